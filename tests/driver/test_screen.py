"""The screen in a terminal of 80 columns, in a pipe, without colours, quiet, and as lines of JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest

import configs
from cli.__main__ import main
from driver.progress import Progress
from driver.screen import JsonLines, Screen
from store import Metric
from tests.driver.test_prometheus import status

ROOT = Path(__file__).resolve().parents[2]
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38|48)[;m]")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A screen as in a training: what is done, a table that is drawn twice, a long warning, the report.
PROGRAM = """
import sys
from dataclasses import replace
import configs
from driver.progress import Progress
from driver.screen import Screen
from tests.driver.test_prometheus import status
import driver.progress
driver.progress.LINE_EVERY_S = 0.0
screen = getattr(Screen, sys.argv[1])()
config = replace(configs.Config(), run_dir="/a/long/directory" * 6)
screen.console.print("what is done, in a line that is much longer than a terminal " * 3)
with Progress(config, title="training", screen=screen) as progress:
    metrics = {"learner/idle_fraction": 0.63, "time/step_s": 2.0}
    progress.show(status(metrics=metrics))
    progress.show(status(metrics=metrics, notices={1: "started again: worker-0 died " * 5}))
screen.event("end", run="x")
screen.end.print("the report at the end")
"""


def shown(mode: str, *, terminal: bool, **variables: str) -> tuple[str, str]:
    """Return what the program writes to standard output and to standard error."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")
    }
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", PROGRAM, mode]
    if not terminal:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout, done.stderr
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=theirs, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 65536):
                written += part
        except OSError:  # the other end is closed
            pass
        assert process.stderr is not None
        errors = process.stderr.read()
    os.close(ours)
    assert process.returncode == 0, errors
    return written.decode(), errors


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", text))]


def test_no_line_is_longer_than_a_terminal_of_80_columns() -> None:
    text, errors = shown("full", terminal=True)
    assert errors == ""
    assert max(map(len, lines_of(text))) <= 80
    assert "limited by" in text and "learner (the workers wait 100%)" in text
    assert COLOUR.search(text), "a warning is yellow"


def test_no_color_is_respected() -> None:
    text, _ = shown("full", terminal=True, NO_COLOR="1")
    assert "started again" in text and not COLOUR.search(text)


def test_a_pipe_gets_whole_lines_without_escapes() -> None:
    text, errors = shown("full", terminal=False)
    assert errors == "" and "\x1b" not in text
    (line, _) = [line for line in text.splitlines() if line.startswith("training  step ")]
    assert line.endswith("limited by learner (the workers wait 100%)")


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_warnings_and_the_end_only(terminal: bool) -> None:
    text, errors = shown("quiet", terminal=terminal, NO_COLOR="1")
    lines = [line for line in lines_of(text) if line]
    assert errors == ""
    assert lines[0].startswith("started again: ") and lines[-1] == "the report at the end"
    assert "what is done" not in text and "training" not in text
    assert len(lines) == (3 if terminal else 2)


def test_json_lines_are_all_that_standard_output_has() -> None:
    text, errors = shown("json", terminal=False)
    events = [json.loads(line) for line in text.splitlines()]
    assert [event["event"] for event in events] == ["warning", "end"]
    assert "the report at the end" in errors and "what is done" in errors


def row(step: int, name: str, value: float = 1.0) -> Metric:
    return Metric(learner_step=step, policy_version=step, name=name, value=value, at_us=0)


def test_each_learner_step_is_one_line_also_after_a_roll_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = JsonLines()
    lines.take([row(1, "loss/loss")], has_all_rows=True)  # of an earlier start
    lines.take([row(2, "loss/loss"), row(2, "loss/kl", float("inf"))], has_all_rows=False)
    lines.take([row(1, "heldout/success")], has_all_rows=False)
    lines.take([row(3, "loss/loss")], has_all_rows=False)
    lines.take([row(1, "loss/loss"), row(1, "heldout/success")], has_all_rows=True)
    lines.take([row(2, "loss/loss", 5.0)], has_all_rows=False)
    written = capsys.readouterr().out
    assert "Infinity" not in written
    assert [json.loads(line) for line in written.splitlines()] == [
        {"event": "step", "learner_step": 2, "metrics": {"loss/loss": 1.0, "loss/kl": None}},
        {"event": "evaluation", "learner_step": 1, "metrics": {"heldout/success": 1.0}},
        {"event": "step", "learner_step": 3, "metrics": {"loss/loss": 1.0}},
        {"event": "rolled back", "learner_step": 1},
        {"event": "step", "learner_step": 2, "metrics": {"loss/loss": 5.0}},
    ]


@pytest.mark.parametrize(
    ("idle", "waiting_on", "limit"),
    [
        (0.63, None, "actors (the learner waits 63%)"),
        (0.02, "admission", "learner (the workers wait 100%)"),
        (0.02, "the engine's start", "neither side"),
        (None, "admission", "-"),
    ],
)
def test_the_table_names_the_side_that_limits(
    tmp_path: Path, idle: float | None, waiting_on: str | None, limit: str
) -> None:
    config = replace(configs.Config(), run_dir=str(tmp_path))
    worker = replace(status().components["worker-0"], waiting_on=waiting_on)
    now = status(
        components={"worker-0": worker},
        metrics={} if idle is None else {"learner/idle_fraction": idle},
    )
    progress = Progress(config, title="training", screen=Screen.quiet())
    progress.show(now)
    assert dict(progress._figures(now))["limited by"] == limit


@pytest.mark.parametrize("options", [["--quiet", "--json"], ["--dry-run", "--json"]])
def test_options_that_exclude_each_other_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "configs/quickstart.yaml", *options]) == 2
    assert "leave" in (error := capsys.readouterr().err) or "give one" in error

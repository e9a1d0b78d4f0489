"""Text of a model, an environment or a run directory reaches a terminal only as text that it
shows.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pytest

from analysis import evaluation_stats as evaluation
from cli.__main__ import main
from cli.store import _show_findings
from cli.table_output import WRITERS
from configs import Config
from driver.progress import Progress, said_with_spinner
from driver.screen import shown_in
from gigpo import PUBLISHED_SETTINGS, advantages_macro
from printable import (
    one_line,
    plain_console,
    printable,
    printable_json,
    shell_word,
)
from store import Catalog, Group, RunLayout, VersionRecord, export, write_open_sql, write_segment
from store.maintenance.finding import Finding
from tests.support.store_samples import make_step, make_trajectory

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = {
    "clear": "\x1b[2J\x1b[H",
    "clipboard": "\x1b]52;c;Y3VybA==\x07",
    "C1": "\x9b31m\x9d52;c;Y3VybA==\x9c\x85",
    "erase": "all is well\r\x08\x08\x7f\x0b\x0c",
    "tab": "a\tb",
    "bidi": "\u202egpj.exe\u2066\u2069\u200f\u061c",
    "hidden": "a\u200bb\u2060c\ufeffd\u00ade\u034ff\u180eg\u3164h\U000e0041\U0001bca0\U0001d173",
    "separators": "one\u2028two\u2029three",
    "markup": "[/nothing] [red] [link=file:///etc/passwd]a[/link] :coffee:",
}
ALL = " ".join(HOSTILE.values())
NAME = "run \x1b]52;c;Y3VybA==\x07 \x9b31m \u202e"
OBEYED = re.compile(
    "[\xad\u034f\u180e\u200b\u2060\u3164\ufeff\U0001bca0\U0001d173\U000e0041\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]"
)


def assert_harmless(shown: str) -> None:
    assert shown.strip(), "nothing was shown"
    found = OBEYED.search(shown)
    assert found is None, (
        f"{found[0]!r} in {shown[max(0, found.start() - 40) : found.end() + 40]!r}"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run in which a model, an environment and a stranger have named everything."""
    root = tmp_path_factory.mktemp("hostile") / NAME
    layout = RunLayout.create(root, config_yaml="{env: {name: key_room}}")
    write_open_sql(layout, macros=[advantages_macro(PUBLISHED_SETTINGS)], max_staleness=1)
    with Catalog.open(layout) as catalog:

        def commit(group: Group) -> None:
            texts = {
                "action_text": ALL,
                "obs_text": ALL,
                "anchor_text": ALL,
                "state_hash": b"\0" * 16,
            }
            trajectories = []
            for member in group.missing:
                rewards = {"reward": float(member)}
                steps = tuple(
                    make_step(i, n_steps=2, version=0, **texts, **rewards) for i in range(2)
                )
                trajectories.append(
                    replace(make_trajectory(group, member), env_name=ALL, steps=steps)
                )
            catalog.commit(
                write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch),
                epoch=catalog.epoch,
            )

        for ordinal in range(2):
            commit(
                catalog.open_group(
                    ordinal=ordinal,
                    task_id=f"{ALL}{ordinal}",
                    split="train",
                    size=3,
                    evaluated_version=None,
                )
            )
        commit(
            catalog.open_group(ordinal=0, task_id=ALL, split="heldout", size=3, evaluated_version=0)
        )
        batch = catalog.claim(n_groups=1, current_version=0, max_staleness=1)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=0)
        catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d", learner_step=1)
        )
        catalog.heartbeats({"worker-0": f"reset of task {ALL}", f"worker {ALL}": None})
        export(catalog, layout)
    return root


EVERYTHING = "SELECT task_id, action_text, obs_text, [action_text] AS nested FROM steps"
COMMANDS = {
    "status": lambda run: main(["status", run]),
    "stop": lambda run: main(["stop", run]),
    "workers": lambda run: main(["workers", run, "2"]),
    "no run": lambda run: main(["status", f"{run}/nowhere"]),
    "resume": lambda run: main(["train", "--resume", f"{run}/nowhere"]),
    "setting": lambda run: main(["train", f"{run}/nowhere.yaml", f"{ALL}=1"]),
    "evaluate": lambda run: main(["evaluate", f"{run}/nowhere", f"run_dir={run}/new"]),
    "evaluate a step": lambda run: main(["evaluate", f"{run}@{ALL}", "run_dir=new"]),
    "compare": lambda run: main(["evaluate", "--compare", run, run]),
    "audit": lambda run: main(["audit", run]),
    "audit against": lambda run: main(
        ["audit", run, "group_filter=none", "--against", "gamma=0.5"]
    ),
    "audit a setting": lambda run: main(["audit", run, f"{ALL}=1"]),
    "option": lambda run: main(["train", f"--{ALL}=1"]),
    "option value": lambda run: main(["train", f"--a={ALL}"]),
    "command": lambda run: main([ALL]),
    "audit where": lambda run: main(["audit", run, "--where", f"'{ALL}'"]),
    "table": lambda run: main(["sql", run, EVERYTHING]),
    "json": lambda run: main(["sql", run, EVERYTHING, "--format", "json"]),
    "columns": lambda run: main(["sql", run, f'SELECT 1 AS "{ALL}"']),
    "explain": lambda run: main(
        ["sql", run, f"EXPLAIN SELECT * FROM steps WHERE action_text <> '{ALL}'"]
    ),
    "SQL error": lambda run: main(["sql", run, f"SELECT error('{ALL}')"]),
    "fsck": lambda run: main(["fsck", run]),
    "fsck of nothing": lambda run: main(["fsck", f"{run}/nowhere"]),
    "bias": lambda run: main(["bias", run]),
    "compact": lambda run: main(["compact", run]),
    "rebuild": lambda run: main(["rebuild", run]),
    "export": lambda run: main(["export", run, f"{run} exported"]),
    "argument": lambda run: main(["sql", run, "SELECT 1", "--timeout", ALL]),
    "learner": lambda run: main(["export-model", f"{run}/nowhere", "dest"]),
    "learner argument": lambda run: main(["replay", run, ALL]),
}


ANSWERS = (
    "status",
    "audit",
    "audit against",
    "compare",
    "table",
    "json",
    "columns",
    "explain",
    "bias",
    "compact",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_what_a_terminal_obeys(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        try:
            status = COMMANDS[name](str(run))
        except SystemExit as ended:
            status = int(ended.code or 0)
    assert status == 0 or name not in ANSWERS
    printed = capsys.readouterr()
    assert_harmless(printed.out + printed.err)
    assert not [warning for warning in warned if OBEYED.search(str(warning.message))]


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_finding_of_fsck_is_harmless(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    _show_findings(
        [Finding(severity="error", what="segment", subject=ALL, detail=ALL, remedy=ALL)], form=form
    )
    assert_harmless(capsys.readouterr().out)


def shown_by(show: object, *, is_terminal: bool) -> str:
    console = plain_console(soft_wrap=True)
    console.file, console._force_terminal, console.width = StringIO(), is_terminal, 4000
    show(console)  # type: ignore[operator]
    return console.file.getvalue()


def test_a_round_that_is_shown_is_harmless(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_task_types", lambda run: {ALL: ALL})
    shown = shown_by(lambda console: evaluation.show_evaluation(run, console), is_terminal=False)
    assert_harmless(shown)
    shown = shown_by(
        lambda console: evaluation.show_evaluation_comparison(run, run, console=console),
        is_terminal=False,
    )
    assert_harmless(shown)


def test_lines_while_it_runs_are_harmless() -> None:
    config = replace(Config(), run_dir=ALL)

    def show(console: object) -> None:
        with (
            said_with_spinner(ALL, console),
            Progress(config, title=ALL, screen=shown_in(console)) as progress,
        ):  # type: ignore[arg-type]
            status = type("Status", (), {"notices": {1: ALL}})
            progress._show_notices(status)  # type: ignore[arg-type]
            component = type("Component", (), {"waiting_on": ALL, "waits_s": 1.0})
            progress.console.print(
                progress._table(type("S", (), {"components": {"w": component}}), [("a", ALL)])
            )  # type: ignore[arg-type]

    shown = shown_by(show, is_terminal=False)
    assert_harmless(shown)
    assert "[red]" in shown and ":coffee:" in shown, "nothing of it is markup"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_json_keeps_the_value(text: str) -> None:
    shown = printable_json(json.dumps({text: [text]}, ensure_ascii=False))
    assert_harmless(shown)
    assert json.loads(shown) == {text: [text]}


def test_csv_is_exact_in_a_file_and_harmless_in_a_terminal() -> None:
    table = pa.table({"text": [ALL, "two\nlines"], "nested": [[ALL], []]})
    terminal, file = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    for out in (terminal, file):
        WRITERS["csv"](table, out)
    assert_harmless(terminal.getvalue())
    rows = list(csv.reader(io.StringIO(file.getvalue(), newline="")))
    assert rows == [
        ["text", "nested"],
        [ALL, json.dumps([ALL], ensure_ascii=False)],
        ["two\nlines", "[]"],
    ]


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize(
    "word",
    [
        "runs/a b",
        "it's",
        "a  b",
        " a\u00a0b\u3000c ",
        "two\nlines",
        "caf\udce9",
        "\x1b[31m'; touch PWNED #",
        "\x1b\\'$(touch PWNED)`touch PWNED`",
        "\u202eabc\u200b0a",
        "",
    ],
)
def test_a_quoted_word_is_one_word_of_a_shell(word: str, lines: bool, tmp_path: Path) -> None:
    """An error is shown in one line: the word must not change by it. No shell runs a part of it."""
    quoted = shell_word(word, lines=lines)
    if not lines:
        assert one_line(f"x {quoted} y") == f"x {quoted} y"
    command = f"printf %s {quoted}"
    for shell in ("bash", "sh"):
        done = subprocess.run([shell, "-c", command], cwd=tmp_path, capture_output=True)
        if shell == "bash":
            assert done.stdout == word.encode("utf-8", "surrogateescape")
    assert list(tmp_path.iterdir()) == []


def test_what_can_be_read_stays() -> None:
    for text in (
        "plain",
        "Zürich 東京\u3000 عربى 👩\u200d👩\u200d👧 नमस्\u200cते",
        "C:\\n [red]",
        "a\u00a0b",
    ):
        assert printable(text) == text
    assert printable("one\ntwo \x1b \x9b \u202e \ud800") == "one\\ntwo \\x1b \\x9b \\u202e \\ud800"
    assert printable("one\ntwo\r", lines=True) == "one\ntwo\\r"


def test_a_traceback_of_an_error_that_nobody_catches_is_harmless() -> None:
    hostile = f"type('K', (), {{'__repr__': lambda s: {ALL!r}}})()"
    code = f"import printable; printable.protect_terminal(); raise KeyError({hostile})"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and "KeyError" in ended.stderr
    assert_harmless(ended.stderr)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_child_of_a_process_without_streams_opens_no_file_under_their_numbers(
    tmp_path: Path, closed: str
) -> None:
    child = "import sys; sys.exit(open(sys.argv[1], 'w').fileno())"
    parent = (
        "import printable, subprocess, sys; printable.open_missing_streams(); "
        f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}, sys.argv[1]]))"
    )
    command = shlex.join([sys.executable, "-c", parent, str(tmp_path / "file")])
    done = subprocess.run(f"{command} {closed}", shell=True, cwd=ROOT, check=False)
    assert done.returncode > 2, "the number that the child's file has"


def test_emoji_and_scripts_that_need_joiners_stay() -> None:
    for text in (
        "\U0001f469\u200d\U0001f680",
        "\u2764\ufe0f",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    ):
        assert printable(text) == text
        assert json.loads(printable_json(json.dumps(text, ensure_ascii=False))) == text


def test_what_hides_text_is_shown_and_stays_the_same_json() -> None:
    hidden = "run\u200b\x7f" + "".join(chr(0xE0000 + ord(letter)) for letter in "obey")
    assert printable(hidden).startswith("run\\u200b\\x7f\\U000e006f")
    shown = printable_json(json.dumps(hidden, ensure_ascii=False))
    assert shown.isascii() and shown.isprintable() and json.loads(shown) == hidden

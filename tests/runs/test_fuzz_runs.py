"""Crafted runs through every command that reads one: nothing outside changes, nothing of it is
shown, no traceback.

FUZZED_RUNS says how many (default: 3; `make test-crash`: 500). FUZZED_FIRST is the first seed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cli.__main__ import main
from tests.support.fuzz_commands import NOBODY
from tests.support.fuzz_runs import HAND_MADE, World

ROOT = Path(__file__).resolve().parents[2]
N_RUNS = int(os.environ.get("FUZZED_RUNS", "3"))
FIRST = int(os.environ.get("FUZZED_FIRST", "0"))
# Each imports every command's modules, which takes as long as some runs.
N_PROCESSES = 2 if N_RUNS > 100 else 1
SHOWN = 20  # findings of a failed test


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(base=tmp_path_factory.mktemp("hand made"))
    world.make()
    return world


@pytest.mark.parametrize("name", HAND_MADE)
def test_a_run_that_once_gave_a_traceback_gives_one_line(
    world: World,
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made, run = HAND_MADE[name], tmp_path / "stranger"
    shutil.copytree(world.template, run)
    made.change(run)
    capsys.readouterr()
    assert main([str(run) if word == "RUN" else word for word in made.command]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(made.said + "\n", error), error


@pytest.mark.skipif(
    sys.platform != "linux" or (os.getuid() == 0 and shutil.which("setpriv") is None),
    reason="root's rights are given up with setpriv, of util-linux",
)
def test_no_crafted_run_reaches_outside_itself() -> None:
    # Not tmp_path: another user could not enter it.
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        Path(directory).chmod(0o711)
        share = -(-N_RUNS // N_PROCESSES)
        processes = []
        for number in range(N_PROCESSES):
            base = Path(directory) / str(number)
            base.mkdir()
            if os.geteuid() == 0:  # its home: nobody else may be able to exchange what is in it
                os.chown(base, NOBODY, NOBODY)
            words = [
                str(base),
                str(FIRST + number * share),
                str(min(share, N_RUNS - number * share)),
            ]
            command = [sys.executable, "-m", "tests.support.fuzz_commands", *words]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    found = [json.loads(line) for output in outputs for line in output.splitlines()]
    shown = "\n".join(
        f"seed {each['seed']}, {each['command']}: {each['wrong'][-800:]}\n    "
        f"{'; '.join(each['crafted'])[:400]}"
        for each in found[:SHOWN]
    )
    assert not found, f"{len(found)} findings:\n{shown}"
    assert [process.returncode for process in processes] == [0] * N_PROCESSES

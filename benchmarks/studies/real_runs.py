"""Start `gigpo train` for studies whose runs are those of a user: a program each.

process = started("configs/key_room.yaml", directory, {"seed": 1})     # its log: directory.log
train("configs/key_room.yaml", directory, {"seed": 1})                 # until it has ended well
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.studies.study import ROOT


def started(
    config: str, directory: Path, settings: Mapping[str, object]
) -> subprocess.Popen[bytes]:
    """Start a run in `directory` with these settings over those of the config."""
    given = {"trackers": "[]", **settings, "run_dir": directory}
    with directory.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "cli", "train", config, *(f"{k}={v}" for k, v in given.items())],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def train(config: str, directory: Path, settings: Mapping[str, object]) -> None:
    """Train to the end. Raises RuntimeError, which names the log, if the program fails."""
    if started(config, directory, settings).wait():
        log = directory.with_suffix(".log")
        raise RuntimeError(f"{directory} could not be trained; see {log}")

"""A whole run of the smallest search config, as its users start it. A minute or two: `make
test-slow`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import store
from tests.support.search_samples import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.run]


def test_the_smallest_search_config_trains(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "cli",
        "train",
        "configs/search_cpu.yaml",
        f"run_dir={tmp_path / 'run'}",
        "learner.steps=2",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with store.open_run(tmp_path / "run") as run:
        (counted,) = run.sql(
            "SELECT count(*) FILTER (action_text LIKE '<search>%') AS searches, count(*) FILTER "
            "(action_text LIKE '<answer>%') "
            "AS answers, count(*) FILTER (obs_text LIKE '<information>Doc 1(Title: %') AS found, "
            "count(DISTINCT anchor_text) AS anchors FROM steps"
        ).to_pylist()
        assert min(counted.values()) > 0, counted
        assert run.sql("SELECT * FROM task_overlap").num_rows == 0

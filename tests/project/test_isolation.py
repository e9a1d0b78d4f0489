"""No test sees the user's `runs/`: each runs in a directory of its own (tests/conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
QUICK_STARTS = (
    ("learner/test_loss_settings.py", "no_sense"),
    ("driver/test_preflight.py", "impossible_wherever or model_that_is_here"),
)


def test_a_test_runs_in_an_empty_directory_of_its_own(tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("file", "names"), QUICK_STARTS, ids=[file for file, _ in QUICK_STARTS])
def test_damaged_runs_of_the_user_change_no_test(file: str, names: str, tmp_path: Path) -> None:
    """Pytest is started beside `runs/` with a damaged run for each shipped config, and a file for
    the games.
    """
    for path in CONFIGS:
        (tmp_path / "runs" / path.stem).mkdir(parents=True)
        (tmp_path / "runs" / path.stem / "run.json").write_text("{damaged")
    (tmp_path / "runs" / "games").write_text("no directory")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-k",
        names,
        str(ROOT / "tests" / file),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_users_runs_cannot_be_opened(tmp_path: Path) -> None:
    for touch in (os.listdir, os.mkdir, open):
        with pytest.raises(PermissionError, match="may not see the user's runs"):
            touch(ROOT / "runs" / "quickstart")
    command = [sys.executable, "-m", "cli", "train", "configs/quickstart.yaml", "--dry-run"]
    with pytest.raises(PermissionError, match=r"give run_dir=\.\.\. in tmp_path"):
        subprocess.run(command, cwd=ROOT, check=False)
    subprocess.run(
        [sys.executable, "-c", "pass", "configs/quickstart.yaml", f"run_dir={tmp_path}"],
        cwd=ROOT,
        check=True,
    )

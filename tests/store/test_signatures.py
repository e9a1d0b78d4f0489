"""Runs that this user made, and copies of them, are known; others and changed ones are not."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from store import RunLayout, StoreError, made_by_this_user, sign_run
from store.untrusted.signatures import (
    MAX_SIGNED_BYTES,
    SIGNED,
    add_signatures,
    state_directory,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of this user, whose key is new."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return RunLayout.create(tmp_path / "run", config_yaml="a: 1\n").root


def test_a_run_that_this_user_made_is_known_also_when_it_was_copied_or_moved(
    run: Path, tmp_path: Path
) -> None:
    assert made_by_this_user(run)
    shutil.copytree(run, tmp_path / "copy")
    run.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert all(made_by_this_user(tmp_path / name) for name in ("copy", "moved", "link"))


def test_a_run_of_another_user_is_not_known_whoever_owns_its_files(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "another user's"))
    assert not made_by_this_user(run)  # no key at all
    RunLayout.create(run.parent / "other", config_yaml="a: 1\n")
    assert not made_by_this_user(run)  # another key
    sign_run(run, config=None)  # what --trust does
    assert made_by_this_user(run)


def test_a_signature_that_was_copied_signs_no_other_text(run: Path) -> None:
    sign_run(run, config=b"env: {name: ours}\n")
    assert made_by_this_user(run)  # with the old config.yaml, or none
    (run / "config.yaml").write_text("env: {name: ours}\n")
    assert made_by_this_user(run)
    (run / "config.yaml").write_text("env: {name: theirs}\n")
    assert not made_by_this_user(run)
    (run / "config.yaml").unlink()
    (run / "run.json").chmod(0o644)
    (run / "run.json").write_text((run / "run.json").read_text().replace("a: 1", "a: 2"))
    assert not made_by_this_user(run)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"signatures": 3}',
        '{"signatures": [[]]}',
        "[" * 100_000,
        '{"signatures": {"a": 1}}',
    ],
)
def test_a_damaged_signature_is_none(run: Path, content: str) -> None:
    (run / SIGNED).write_text(content)
    assert not made_by_this_user(run)


def test_texts_that_are_no_signatures_are_not_kept(run: Path) -> None:
    """They would make signed.json larger than any that is read."""
    good = json.loads((run / SIGNED).read_text())["signatures"]
    fat = json.dumps(
        {"signatures": ["\u00e4" * (MAX_SIGNED_BYTES // 3), *good]}, ensure_ascii=False
    )
    (run / SIGNED).write_text(fat)
    assert made_by_this_user(run)
    for keep in (sign_run, lambda run: add_signatures(run, fat.encode())):
        keep(run)
        assert json.loads((run / SIGNED).read_text())["signatures"] == good


def test_a_config_behind_a_link_is_not_ours(run: Path) -> None:
    text = b"env: {name: ours}\n"
    sign_run(run, config=text)
    (run.parent / "elsewhere.yaml").write_bytes(text)
    (run / "config.yaml").symlink_to(run.parent / "elsewhere.yaml")
    assert not made_by_this_user(run)


def test_the_key_is_the_users_alone_and_one_that_others_can_read_is_refused(run: Path) -> None:
    key = state_directory() / "key"
    assert (
        stat.S_IMODE(key.stat().st_mode) == 0o600
        and stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    )
    key.chmod(0o644)
    with pytest.raises(StoreError, match="is not this user's alone"):
        made_by_this_user(run)


def test_a_user_without_a_home_can_make_a_run() -> None:
    code = """import os, sys
from pathlib import Path
from store import RunLayout, StoreError, made_by_this_user
os.setgid(65534); os.setuid(65534)
print(made_by_this_user(RunLayout.create(Path("run"), config_yaml="").root))
uri = Path("storage").absolute().as_uri()
try: RunLayout.create(Path("elsewhere"), config_yaml="", storage_uri=uri)
except StoreError as error: print(error)
"""
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without a home")
    environment = {**os.environ, "XDG_STATE_HOME": "/nowhere", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as directory:  # tmp_path is closed to other users
        os.chmod(directory, 0o777)
        said = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=directory,
            capture_output=True,
            text=True,
        )
    assert said.stdout.startswith("False\n/nowhere/async-gigpo cannot be written"), said.stderr

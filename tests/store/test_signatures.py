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

from store import RunLayout, StoreError, sign_next, sign_run, signed_texts
from store.run_names import SIGNED
from store.untrusted import signatures
from store.untrusted.signatures import (
    MAX_SIGNED_BYTES,
    add_signatures,
    state_directory,
)
from tests.support.neighbours import Neighbour, give_to_the_user

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of this user, whose key is new."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return RunLayout.create(tmp_path / "run", config_yaml="a: 1\n").root


def test_a_run_that_this_user_made_is_known_also_when_it_was_copied_or_moved(
    run: Path, tmp_path: Path
) -> None:
    assert signed_texts(run)
    shutil.copytree(run, tmp_path / "copy")
    run.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert all(signed_texts(tmp_path / name) for name in ("copy", "moved", "link"))


def test_a_run_of_another_user_is_not_known_whoever_owns_its_files(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(run.parent / "another user's"))
    assert not signed_texts(run)  # no key at all
    RunLayout.create(run.parent / "other", config_yaml="a: 1\n")
    assert not signed_texts(run)  # another key
    sign_run(run)  # what --trust does
    assert signed_texts(run)


def test_a_signature_that_was_copied_signs_no_other_text(run: Path) -> None:
    sign_next(run, config=b"env: {name: ours}\n")
    assert signed_texts(run)  # with the old config.yaml, or none
    (run / "config.yaml").write_text("env: {name: ours}\n")
    assert signed_texts(run)
    (run / "config.yaml").write_text("env: {name: theirs}\n")
    assert not signed_texts(run)
    (run / "config.yaml").unlink()
    (run / "run.json").chmod(0o644)
    (run / "run.json").write_text((run / "run.json").read_text().replace("a: 1", "a: 2"))
    assert not signed_texts(run)


def test_a_copy_in_a_directory_of_another_user_is_theirs(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: who can read the three files built another run around them, which counted as this
    user's. One that this user signs there is known.
    """
    copy, state = run.with_name("copy"), state_directory()
    shutil.copytree(run, copy)
    neighbour = Neighbour(monkeypatch)
    for path in (state.parent, state, state / "key"):
        give_to_the_user(path)
    assert signed_texts(run) and signed_texts(copy)
    neighbour.gets(copy)
    assert signed_texts(run) and not signed_texts(copy)
    sign_run(copy)  # what --trust does
    assert signed_texts(copy)


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
    assert not signed_texts(run)


def test_texts_that_are_no_signatures_are_not_kept(run: Path) -> None:
    """They would make signed.json larger than any that is read."""
    good = json.loads((run / SIGNED).read_text())["signatures"]
    fat = json.dumps(
        {"signatures": ["\u00e4" * (MAX_SIGNED_BYTES // 3), *good]}, ensure_ascii=False
    )
    other = json.dumps({"signatures": ["f" * 64]}).encode()
    for keep in (
        lambda: sign_next(run, config=b"env: {name: ours}"),
        lambda: add_signatures(run, other),
    ):
        (run / SIGNED).write_text(fat)
        assert signed_texts(run)
        keep()
        kept = json.loads((run / SIGNED).read_text())["signatures"]
        assert {*good} < {*kept} and all(len(one) == 64 for one in kept)


@pytest.mark.parametrize("command", ["sign_run", "add_signatures"])
def test_signing_a_run_that_is_exchanged_replaces_no_other_runs_signatures(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The attack: a link to a run of the user was put there once the old signatures were read. That
    run counted as a stranger's from then on.
    """
    theirs, aside = tmp_path / "theirs", tmp_path / "aside"
    shutil.copytree(run, theirs)
    (theirs / SIGNED).unlink()
    read = signatures._signed

    def exchanged(directory: int, place: Path) -> list[str]:
        found = read(directory, place)
        theirs.rename(aside)
        theirs.symlink_to(run)
        return found

    before = (run / SIGNED).read_bytes()
    with monkeypatch.context() as by_neighbour:
        by_neighbour.setattr(signatures, "_signed", exchanged)
        if command == "sign_run":
            sign_run(theirs)
        else:
            add_signatures(theirs, json.dumps({"signatures": ["f" * 64]}).encode())
    assert (run / SIGNED).read_bytes() == before
    assert signed_texts(run)
    assert (aside / SIGNED).is_file()


def test_a_run_that_is_signed_is_left_as_it_is(run: Path) -> None:
    before = (run / SIGNED).stat()
    assert sign_run(run)
    add_signatures(run, (run / SIGNED).read_bytes())
    after = (run / SIGNED).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_key_that_another_user_could_exchange_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(shared / "state"))
    if is_there:
        sign_next(tmp_path / "run", run_json=b"{}")  # before the directory was shared
        give_to_the_user(state_directory() / "key")
    shared.chmod(0o777)
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(shared)
    with pytest.raises(StoreError, match=r"shared belongs to another user .*set XDG_STATE_HOME"):
        sign_next(tmp_path / "run", run_json=b"{}")
    neighbour.gives_back(shared)
    with pytest.raises(
        StoreError, match=r"every user may write in .*shared, .*chmod o-w.*set XDG_STATE_HOME"
    ):
        sign_next(tmp_path / "run", run_json=b"{}")


def test_what_is_made_above_the_key_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: under a umask of 000 a neighbour exchanged the directory of the key."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "local" / "state"))
    (tmp_path / "run").mkdir()
    umask = os.umask(0)
    try:
        sign_next(tmp_path / "run", run_json=b"{}")
    finally:
        os.umask(umask)
    for made in ("local", "local/state", "local/state/async-gigpo"):
        assert stat.S_IMODE((tmp_path / made).stat().st_mode) == 0o700


def test_a_config_behind_a_link_is_not_ours(run: Path) -> None:
    text = b"env: {name: ours}\n"
    sign_next(run, config=text)
    (run.parent / "elsewhere.yaml").write_bytes(text)
    (run / "config.yaml").symlink_to(run.parent / "elsewhere.yaml")
    assert not signed_texts(run)


def test_the_key_is_the_users_alone_and_one_that_others_can_read_is_refused(run: Path) -> None:
    key = state_directory() / "key"
    assert (
        stat.S_IMODE(key.stat().st_mode) == 0o600
        and stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    )
    key.chmod(0o644)
    with pytest.raises(StoreError, match="is not this user's alone"):
        signed_texts(run)


def test_a_user_without_a_home_can_make_a_run() -> None:
    code = """import os, sys
from pathlib import Path
from store import RunLayout, StoreError, signed_texts
os.setgid(65534); os.setuid(65534)
print(signed_texts(RunLayout.create(Path("run"), config_yaml="").root))
uri = Path("storage").absolute().as_uri()
try: RunLayout.create(Path("elsewhere"), config_yaml="", storage_uri=uri)
except StoreError as error: print(error)
"""
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without a home")
    environment = {**os.environ, "XDG_STATE_HOME": "/nowhere", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # tmp_path is closed to other users
        os.chmod(directory, 0o777)
        said = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=directory,
            capture_output=True,
            text=True,
        )
    assert said.stdout.startswith("None\n/nowhere/async-gigpo cannot be written"), said.stderr

"""One process at a time brings a run to a directory."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store import (
    LockedError,
    RunLayout,
    StoreError,
    bring_run,
    is_brought,
)
from store.exchange import bring, run_making
from store.maintenance.fsck import CONTENTS, check
from store.run_names import BRING_MARKER
from tests.support.neighbours import Neighbour, as_user
from tests.support.stored_runs import uri_of


def bring_at_once(uri: str, root: Path, go: Any, said: Any) -> None:
    """Bring the run when all processes are ready, and say how it ended."""
    go.wait()
    try:
        bring_run(uri, root, trusts=False)
        said.put("brought")
    except LockedError:
        said.put("locked")
    except (StoreError, OSError) as error:
        said.put(repr(error))


def test_two_processes_bring_a_run_to_one_directory_once(lost: RunLayout, tmp_path: Path) -> None:
    """Let one of them bring it, and refuse the other in one line, during or after it."""
    uri, root = uri_of(lost), tmp_path / "elsewhere"
    shutil.rmtree(lost.root)
    spawning = multiprocessing.get_context("fork")
    go, said = spawning.Event(), spawning.Queue()
    pair = [spawning.Process(target=bring_at_once, args=(uri, root, go, said)) for _ in range(2)]
    for process in pair:
        process.start()
    go.set()
    ended = sorted(said.get(timeout=60) for _ in pair)
    for process in pair:
        process.join()
    assert "brought" in ended
    ended.remove("brought")
    assert ended == ["locked"] or "has other things in it" in ended[0]
    assert is_brought(uri, root)
    assert check(RunLayout.open(root), level=CONTENTS) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_directory_is_locked_while_a_run_is_brought_to_it(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change nothing at the directory while another process fills it."""
    uri, root, seen = uri_of(lost), tmp_path / "elsewhere", []
    shutil.rmtree(lost.root)
    rebuilt = bring.rebuild

    def rebuild(layout: RunLayout, **given: Any) -> Any:
        with pytest.raises(LockedError, match="another process makes a run at"):
            bring_run(uri, root, trusts=False)
        seen.append(sorted(path.name for path in root.iterdir()))
        return rebuilt(layout, **given)

    monkeypatch.setattr(bring, "rebuild", rebuild)
    bring_run(uri, root, trusts=False)
    assert BRING_MARKER in seen[0]
    assert is_brought(uri, root)


def strangers_file(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def strangers_private_file(path: Path) -> None:
    path.touch(0o600)


def strangers_fifo(path: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)


@pytest.mark.parametrize("make", [strangers_file, strangers_fifo])
def test_a_lock_of_another_user_is_refused_before_anything_is_brought(
    lost: RunLayout,
    tmp_path: Path,
    make: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: in /tmp the run was brought whole, and then the lock could not be removed."""
    shutil.rmtree(lost.root)
    (tmp_path / "elsewhere").mkdir()
    lock = tmp_path / "elsewhere" / f".run{run_making.LOCK_ENDING}"
    make(lock)
    Neighbour(monkeypatch).gets(lock)
    with pytest.raises(StoreError, match=rf"^{lock}.* \(uid 65534\); remove it, or give run_dir="):
        bring_run(uri_of(lost), tmp_path / "elsewhere" / "run", trusts=False)
    assert list((tmp_path / "elsewhere").iterdir()) == [lock]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(
    "make", [strangers_file, strangers_private_file, strangers_fifo, Path.mkdir, None]
)
@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_another_user_cannot_take_the_lock_away(
    make: Callable[[Path], None] | None, mode: int
) -> None:
    """Linux may refuse to open somebody else's file in /tmp: no reason to go on without a lock.

    A directory in which the user can write nothing has no locks, as before.
    """
    # other users cannot enter pytest's directory
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        root = Path(shared) / "run"
        lock = Path(shared) / f".run{run_making.LOCK_ENDING}"
        if make is not None:
            make(lock)
            os.chown(lock, 65534, 65534)
        Path(shared).chmod(mode)
        said = lock_as_user(1234, root)
        if make is None:
            assert said == "held"
        else:
            assert re.fullmatch(rf"{lock}[^\n]*; {re.escape(run_making.NOT_OUR_LOCK)}", said), said
        assert lock.exists() == (make is not None)


def lock_as_user(user: int, root: Path) -> str:
    """Hold the lock of `root` for a moment, in a process of this user. Return its error."""

    def hold() -> str:
        with run_making.making_alone(root):
            return "held"

    return as_user(user, hold)

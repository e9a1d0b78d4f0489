"""Do what another user of the machine may do between two looks of a command.

neighbour = Neighbour(monkeypatch)  # from here on this process is an ordinary user's
neighbour.gets(tmp_path / "run")    # the directory, file or link is another user's
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from store import StoreError, check_own_directory

ANOTHER = 65534  # the neighbour's user id
ORDINARY = 1234  # of the user as whom root's tests act


class Neighbour:
    """Another user of the machine.

    As root, change the owner of their files, and act as an ordinary user: what root made passes as
    this user's. Otherwise patch os.stat to report another owner.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._has: set[tuple[int, int]] = set()
        if os.getuid() == 0:
            monkeypatch.setattr(os, "geteuid", lambda: ORDINARY)
            return
        for name in ("stat", "lstat", "fstat"):
            monkeypatch.setattr(os, name, self._seen_by(getattr(os, name)))

    def gets(self, path: Path) -> None:
        """Make a directory, a file or a link theirs."""
        if os.getuid() == 0:
            os.chown(path, ANOTHER, ANOTHER, follow_symlinks=False)
        else:
            self._has.add(_identity(path))

    def gives_back(self, path: Path) -> None:
        """Make it root's or the user's again."""
        if os.getuid() == 0:
            os.chown(path, 0, 0, follow_symlinks=False)
        else:
            self._has.discard(_identity(path))

    def _seen_by(self, look: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def theirs(*which: object, **options: object) -> os.stat_result:
            found = look(*which, **options)
            if (found.st_dev, found.st_ino) not in self._has:
                return found
            shown = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
            return os.stat_result((*found[:4], ANOTHER, *found[5:]), shown)

        return theirs


def give_to_the_user(path: Path) -> None:
    """Make the ordinary user of a test the owner of a file that the test made."""
    if os.getuid() == 0:
        os.chown(path, ORDINARY, ORDINARY)


def look_while_away(place: Path) -> Callable[..., None]:
    """Return a `check_own_directory` during which `place` has another name."""
    aside = place.with_name(f"{place.name} aside")

    def look(path: Path, **options: bool) -> None:
        place.rename(aside)
        try:
            check_own_directory(path, **options)
        finally:
            aside.rename(place)

    return look


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def as_user(user: int, act: Callable[[], str]) -> str:
    """Return what a function says, or its error, in a process of this user."""
    spawning = multiprocessing.get_context("fork")
    said = spawning.Queue()

    def run() -> None:
        os.seteuid(user)
        try:
            said.put(act())
        except (StoreError, OSError) as error:
            said.put(str(error))

    child = spawning.Process(target=run)
    child.start()
    answer = said.get(timeout=60)
    child.join()
    return str(answer)

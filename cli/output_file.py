"""Write the --output of a command to a new file, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from store import StoreError, opened_by_own_links, written_aside


def check_new_file(option: str, file: Path | None, *, run: Path) -> None:
    """Refuse, before the work, a file that exists, is inside the run, or has no directory."""
    if file is None:
        return
    if file.resolve().is_relative_to(run.resolve()):
        raise StoreError(
            f"{option} {file} is inside the run, which belongs to its writers; write it elsewhere"
        )
    if os.path.lexists(file):
        raise StoreError(f"{option} {file} exists; name another file")
    if not file.parent.is_dir():
        raise StoreError(f"{option} {file}: there is no directory {file.parent}; make it first")


def write_new_file(
    option: str, file: Path, *, write: Callable[[BinaryIO], object], run: Path
) -> None:
    """Let `write` fill a file of another name, then rename it: it is absent or whole.

    The directory may be /tmp, where other users make files too. So the file is new, and it is
    written by its descriptor: no link that they put there leads to a file of the user's. A link of
    theirs on the way is refused.
    """
    try:
        with opened_by_own_links(file.parent) as (directory, _):
            with written_aside(directory, file.name, mode=0o666) as new:
                write(new)
                check_new_file(option, file, run=run)  # the work may have taken an hour
                written = os.fstat(new.fileno())
            found = os.stat(file.name, dir_fd=directory, follow_symlinks=False)
            if not os.path.samestat(found, written):
                raise StoreError(
                    f"{option} {file}: another user put something else in its place while it was "
                    "written; name a file in a directory of your own"
                )
    except OSError as error:
        raise StoreError(
            f"{option} {file} could not be written: {error}; free space, or name another file"
        ) from error

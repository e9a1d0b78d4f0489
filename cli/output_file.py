"""Write the --output of a command to a new file, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from store import StoreError


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


def write_new_file(option: str, file: Path, *, write: Callable[[Path], object], run: Path) -> None:
    """Call `write` with another name, then rename the file: it is absent or whole."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write(unfinished)
        with unfinished.open("rb") as written:
            os.fsync(written.fileno())  # else a power cut could leave the name without the bytes
        check_new_file(option, file, run=run)  # the work may have taken an hour
        unfinished.rename(file)
    except OSError as error:
        raise StoreError(
            f"{option} {file} could not be written: {error}; free space, or name another file"
        ) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)

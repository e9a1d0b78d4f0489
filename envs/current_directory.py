"""Import a library that reads files of the current directory, which may be anybody's in /tmp."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def current_directory(directory: Path) -> Iterator[None]:
    """Make `directory` the current one, and then the one before again.

    A process that `su` or a scheduler starts may be in a directory that its user cannot enter. It
    cannot go back there, and needs no file there.
    """
    before = None
    with suppress(OSError):  # it was removed
        before = os.getcwd()
    os.chdir(directory)
    try:
        yield
    finally:
        with suppress(OSError):
            if before is not None:
                os.chdir(before)

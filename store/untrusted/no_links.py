"""Refuse links where a run has files: a writer would follow them out of the run."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from store.errors import UnsafePathError
from store.run_names import DIRECTORIES_OF_A_RUN, OF_A_RUN
from store.untrusted.file_access import names, status, walk


def check_no_links(root: Path, *, but: Path | None = None) -> None:
    """Raise UnsafePathError for a link, except at `but`, where a run is or is to be made.

    Somebody else may have put it there before the run was made.
    """
    root = root.absolute()
    for name in names(root, root=root):
        path = root / name
        if name in OF_A_RUN or name.startswith("catalog."):
            _check_no_link(path, status(path, root=root))
    for name in (*DIRECTORIES_OF_A_RUN, "base"):
        for path, found in walk(root / name, root=root):
            if path != but:
                _check_no_link(path, found)


def _check_no_link(path: Path, found: os.stat_result | None) -> None:
    if found is not None and stat.S_ISLNK(found.st_mode):
        raise UnsafePathError(
            errno.ELOOP,
            f"{path} is a symbolic link, and a run has none; move what it leads to here",
        )

"""Copy a model directory that a user chose, or files of it: its owner may be somebody else.

    copy_weights(model, run / "base/policy", follow_links=True)
    copy_file(model / "config.json", version / "config.json")

So no link of somebody else's is followed to a private file, and no copy has more rights than what
it was copied from.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from configs import check_model_directory
from learner.files.atomic_directory import atomic_directory
from store import (
    OWNER_MAY,
    PRIVATE,
    UnsafePathError,
    all_in,
    check_file_links,
    copy_with_rights,
    give_rights,
    open_file_by_own_links,
    remove_access_lists,
)


def copy_weights(source: Path, dest: Path, *, follow_links: bool) -> None:
    """Copy a model directory. `dest` appears whole or not at all.

    Links are followed only from a directory that this user chose: the Hub's cache consists of
    links. Otherwise a link raises StoreError, and so does what `copy_file` refuses. Raises
    ConfigError for a directory that names other files or models.
    """
    check_model_directory(source)
    if follow_links:
        check_file_links(source)  # refuses links that lead round in a circle
    with atomic_directory(dest) as unfinished:
        remove_access_lists(unfinished)
        directories = {source: unfinished}
        for path, is_directory in all_in(source):
            copy = directories[path.parent] / path.name
            if path.is_symlink() and not follow_links:
                text = f"{path} is a symbolic link; put what it leads to in its place"
                raise UnsafePathError(errno.ELOOP, text)
            if is_directory:
                copy.mkdir(mode=OWNER_MAY)
                directories[path] = copy
            else:
                copy_file(path, copy)
        for path, copy in directories.items():
            give_rights(copy, source=path, owner=OWNER_MAY)


def copy_file(source: Path, dest: Path) -> None:
    """Copy a file of a model that this user chose. Links are followed.

    A private file stays private, from the first byte. Raises OSError; UnsafePathError for a link of
    another user to a file that is not theirs, and for what is no regular file.
    """
    with open(open_file_by_own_links(source), "rb") as original:
        descriptor = os.open(dest, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
        with open(descriptor, "wb") as copy:
            copy_with_rights(original.fileno(), copy, owner=PRIVATE)

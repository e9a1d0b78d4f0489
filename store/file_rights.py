"""Give copies their rights: nobody may do more with a copy than with its source.

    give_rights(copy, source=original, owner=OWNER_MAY)     # of a file or directory just copied
    copy_with_rights(descriptor, copy, owner=PRIVATE)       # a file and its rights
    bound_rights(made, source=original)                     # of one that was made in its place
    keep_private(run)                                       # it holds a secret

Files and directories are given by their path or a descriptor.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from store.errors import StoreError
from store.untrusted.file_access import copy_first

OWNER_MAY = 0o700  # read, write and execute, or enter
ALL_MAY = 0o777
OTHERS_MAY = 0o007
SPECIAL = 0o7000  # setuid, setgid and sticky
# Attributes of a file, or directory, with an access control list; for what is made in it.
ACCESS_LISTS = ("system.posix_acl_access", "system.posix_acl_default")


def give_rights(copy: int | Path, *, source: int | Path, owner: int) -> None:
    """Give a copy the rights of its source, less the umask, and to its owner `owner` at least.

    The copy must be its owner's alone until then. Raises OSError.
    """
    remove_access_lists(copy)
    rights = rights_of_copy(source, copy) & ~current_umask()
    os.chmod(copy, os.stat(copy).st_mode & SPECIAL | owner | rights)


def copy_with_rights(original: int, copy: BinaryIO, *, owner: int) -> None:
    """Copy a file, and then its rights. Its holes stay holes: it may be larger than a disk."""
    copy_first(original, copy, n_bytes=os.fstat(original).st_size)
    give_rights(copy.fileno(), source=original, owner=owner)


def bound_rights(made: int | Path, *, source: int | Path) -> None:
    """Take from all but the owner what they may not do with the source. Raises OSError."""
    rights = rights_of_copy(source, made)
    os.chmod(made, os.stat(made).st_mode & (SPECIAL | OWNER_MAY | rights))


def rights_of_copy(source: int | Path, copy: int | Path) -> int:
    """Return the rights of a copy: those of its source, but never setuid or setgid.

    With setuid, a program of somebody else would run as the user who copied it. If the copy belongs
    to another group than the source, group and others get what both have of the source: the
    source's group may have been kept out. Of a source with an access control list only the owner
    gets rights: the list may keep out the group, or somebody of all others, and is not copied.
    """
    found, made = os.stat(source), os.stat(copy)
    rights = found.st_mode & ALL_MAY
    if made.st_gid != found.st_gid:
        of_both = rights >> 3 & rights & OTHERS_MAY
        rights = rights & OWNER_MAY | of_both << 3 | of_both
    return rights & OWNER_MAY if _has_access_list(source) else rights


def _has_access_list(file: int | Path) -> bool:
    try:
        return ACCESS_LISTS[0] in os.listxattr(file)
    except OSError:  # the file system has none
        return False


def remove_access_lists(made: int | Path) -> None:
    """Leave rights to the owner alone: those that the directory above gave by a list go.

    Raises OSError.
    """
    # First, as the bits of a list's mask would become the group's.
    os.chmod(made, os.stat(made).st_mode & (SPECIAL | OWNER_MAY))
    for name in ACCESS_LISTS:
        with suppress(OSError):  # it has none
            os.removexattr(made, name)


def current_umask() -> int:
    """Return this process's umask. `os.umask` changes it, which other threads would see."""
    with open("/proc/self/status", encoding="utf-8") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["Umask"], 8)


def keep_private(directory: Path) -> None:
    """Make `directory`, or what is there, the user's own: nobody else may enter it.

    Raises StoreError.
    """
    try:
        directory.mkdir(mode=OWNER_MAY, parents=True, exist_ok=True)
        directory.chmod(OWNER_MAY)
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be kept from other users: {error.strerror}; its settings hold a "
            "secret. Give another run_dir"
        ) from error

"""See and give the rights of files: who may enter, read and write what a run writes."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from store import atomic_write
from store.file_rights import ACCESS_LISTS


def modes_at_each_write(
    directories: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return a list that gets the modes of those `directories` that exist at each file's begin."""
    modes: list[int] = []
    written_aside = atomic_write.written_aside

    def watched(*place: Any, **options: Any) -> AbstractContextManager[BinaryIO]:
        modes.extend(stat.S_IMODE(each.stat().st_mode) for each in directories() if each.exists())
        return written_aside(*place, **options)

    monkeypatch.setattr(atomic_write, "written_aside", watched)
    return modes


def let_one_user_read(path: Path, *, user: int, rights: int, name: str = ACCESS_LISTS[0]) -> None:
    """Give a file an access control list: rights for one user, none for its group and for others.

    The bits that stat shows for the group are those of the list's mask then. `name` may be that of
    the list which a directory gives to what is made in it.
    """
    its_owner, its_group, others, everyone = 0x01, 0x04, 0x20, 0xFFFFFFFF
    a_user, the_mask = 0x02, 0x10
    entries = (
        (its_owner, 7, everyone),
        (a_user, rights, user),
        (its_group, 0, everyone),
        (the_mask, rights, everyone),
        (others, 0, everyone),
    )
    packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, name, struct.pack("<I", 2) + packed)

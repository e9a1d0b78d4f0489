"""Give DuckDB a file system that reads some files of a run: the protection without Landlock.

DuckDB's own file system is switched off beside it, so every path of every statement comes here.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from fsspec import AbstractFileSystem

PREFIX = "readonly://"


class ReadOnlyFiles(AbstractFileSystem):
    """Read files named PREFIX and an absolute path, those of `names` below `root` only.

    `names` are files and directories with all that is in them. What counts is where a path leads.
    """

    protocol = PREFIX.removesuffix("://")
    cachable = False

    def __init__(self, root: Path, *, names: Sequence[str]) -> None:
        super().__init__()
        real = os.path.realpath(root)
        self._readable = [os.path.join(real, name) for name in names]

    def open(self, path: str, mode: str = "rb", **_: object) -> BinaryIO:
        if mode not in ("r", "rb"):
            raise PermissionError(f"{path} cannot be written: a query only reads")
        return open(self._inside(path), "rb")

    def info(self, path: str, **_: object) -> dict[str, object]:
        real = self._inside(path)
        status = os.stat(real)
        return {
            "name": path,
            "size": status.st_size,
            "type": "directory" if os.path.isdir(real) else "file",
        }

    def exists(self, path: str, **_: object) -> bool:
        try:
            return os.path.exists(self._inside(path))
        except PermissionError:
            return False

    def glob(self, path: str, **_: object) -> list[str]:
        plain = path.removeprefix(PREFIX)
        if self.exists(plain):  # a name may hold the characters of a pattern
            return [plain]
        if not glob.has_magic(plain):
            self._inside(plain)
        return sorted(
            name
            for name in glob.iglob(plain, recursive=True)
            if self.exists(name) and os.path.isfile(name)
        )

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(os.stat(self._inside(path)).st_mtime, UTC)

    def _inside(self, path: str) -> str:
        real = os.path.realpath(path.removeprefix(PREFIX))
        if not any(os.path.commonpath([real, each]) == each for each in self._readable):
            raise PermissionError(f"{path} is none of the files that a query reads")
        return real


def _refuse(self: ReadOnlyFiles, *_: object, **__: object) -> None:
    raise PermissionError("a query only reads")


_MAKING = ("mkdir", "makedirs", "cp_file", "mv", "touch", "pipe_file")
_REMOVING = ("rmdir", "rm", "rm_file", "_rm")
for _name in (*_MAKING, *_REMOVING, "created", "sign"):
    setattr(ReadOnlyFiles, _name, _refuse)

"""Give DuckDB a file system that reads below one directory only: the protection without Landlock.

DuckDB's own file system is switched off beside it, so every path of every statement comes here.
"""

from __future__ import annotations

import glob
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from fsspec import AbstractFileSystem

PREFIX = "readonly://"


class ReadOnlyFiles(AbstractFileSystem):
    """Read files named PREFIX and an absolute path, those below `root` only, also behind links."""

    protocol = PREFIX.removesuffix("://")
    cachable = False

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = os.path.realpath(root)

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
        if os.path.commonpath([real, self._root]) != self._root:
            raise PermissionError(
                f"{path} is outside the run; a query reads only below {self._root}"
            )
        return real


def _refuse(self: ReadOnlyFiles, *_: object, **__: object) -> None:
    raise PermissionError("a query only reads")


_MAKING = ("mkdir", "makedirs", "cp_file", "mv", "touch", "pipe_file")
_REMOVING = ("rmdir", "rm", "rm_file", "_rm")
for _name in (*_MAKING, *_REMOVING, "created", "sign"):
    setattr(ReadOnlyFiles, _name, _refuse)

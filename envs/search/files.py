"""Reading JSON lines, plain or compressed."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def check_file(path: Path, *, what: str) -> Path:
    """The path, if there is a file; else ValueError in one line that names `what` is missing."""
    if not path.is_file():
        raise ValueError(f"no {what} at {path}; docs/search.md says where to get some")
    return path


def json_lines(path: Path, *, what: str) -> Iterator[dict[str, Any]]:
    """The objects of a `.jsonl`, `.jsonl.xz` or `.jsonl.gz`. ValueError, in one line, naming `what`
    it should have been.
    """
    with _open(check_file(path, what=what)) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{what} {path} line {number} is not a JSON object: {line[:60]!r}")
            yield row


def _open(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")

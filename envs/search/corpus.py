"""Read a corpus of passages, and index it: with BM25, or with an index of your own.

A line of the corpus file is a JSON object: Search-R1's `{"id", "contents"}`, or
`{"id", "title", "text"}`. The file may be compressed, as `.jsonl.xz` or `.jsonl.gz`.
"""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from envs import bm25

MAX_QUERY_CHARACTERS = 16_384  # of a query; the rest is not searched for. A question has a hundred
# (queries, topk) -> for each query at most topk pairs of passage id and score, best first.
# The server calls it from threads.
Index = Callable[[Sequence[str], int], Sequence[Sequence[tuple[str, float]]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    id: str
    contents: str  # the title in quotes, a line break, the text


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    passage: Passage
    score: float  # more is better


class Corpus:
    """Passages that can be searched. It is as safe for several threads as its index."""

    def __init__(self, passages: Sequence[Passage], index: Index) -> None:
        self._passages = {passage.id: passage for passage in passages}
        self._index = index

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return the best passages for the first MAX_QUERY_CHARACTERS of each query.

        Raises ValueError if the index names a passage that the corpus does not have.
        """
        hits = []
        for found in self._index([query[:MAX_QUERY_CHARACTERS] for query in queries], topk):
            hits.append([Hit(passage=self._passage(key), score=float(s)) for key, s in found])
        return hits

    def _passage(self, key: str) -> Passage:
        if key not in self._passages:
            raise ValueError(
                f"the index found passage {key!r}, which the corpus does not have; index the "
                "same corpus"
            )
        return self._passages[key]


def bm25_index(passages: Sequence[Passage]) -> Index:
    """Index the words of title and text. Equal scores stand in the corpus's order."""
    index = bm25.build(passage.contents for passage in passages)

    def search(query: str, topk: int) -> list[tuple[str, float]]:
        found = bm25.search_scored(index, query, limit=topk)
        return [(passages[number].id, score) for number, score in found]

    return lambda queries, topk: [search(query, topk) for query in queries]


@functools.cache
def bm25_corpus(path: Path) -> Corpus:
    """Read a corpus once per process and index its words. Raises ValueError as `read_passages`."""
    passages = read_passages(path)
    return Corpus(passages, bm25_index(passages))


def read_passages(path: Path) -> list[Passage]:
    """Return the passages of a file. Raises ValueError, in one line, for one that is no corpus."""
    passages: dict[str, Passage] = {}
    for number, row in enumerate(json_lines(path, kind="corpus"), start=1):
        if "contents" in row:
            contents = str(row["contents"])
        elif "title" in row and "text" in row:
            contents = f'"{row["title"]}"\n{row["text"]}'
        else:
            raise ValueError(
                f"corpus {path} line {number} has {sorted(row)}; it must have id and contents, or "
                "id, title and text"
            )
        key = str(row.get("id", number - 1))
        if key in passages:
            raise ValueError(
                f"corpus {path} line {number}: id {key!r} is there twice; each passage needs its "
                "own"
            )
        passages[key] = Passage(id=key, contents=contents)
    if not passages:
        raise ValueError(f"corpus {path} is empty; it must have a passage per line")
    return list(passages.values())


def check_file(path: Path, *, kind: str) -> Path:
    """Return the path. Raises ValueError if no such file of this kind is there."""
    if not path.is_file():
        raise ValueError(f"no {kind} at {path}; docs/search.md says where to get some")
    return path


def json_lines(path: Path, *, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file. Raises ValueError, in one line, for a line without one."""
    for number, line in enumerate(_lines(check_file(path, kind=kind), kind=kind), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{kind} {path} line {number} is not a JSON object: {line[:60]!r}")
        yield row


def _lines(path: Path, *, kind: str) -> Iterator[str]:
    try:
        with _open_text(path) as lines:
            yield from lines
    # cut short or damaged, or no text
    except (EOFError, OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{kind} {path} cannot be read: {error}; get the file again") from error


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")

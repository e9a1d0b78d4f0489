"""The corpus: passages of text, a JSON object a line: Search-R1's `{"id", "contents"}`, or `{"id",
"title", "text"}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.search.files import json_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    id: str
    contents: str  # the title in quotes, a line break, the text


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    passage: Passage
    score: float  # more is better


def read_corpus(path: Path) -> list[Passage]:
    """Raises ValueError, in one line, for a file that is not there or not a corpus, or an id that
    is there twice.
    """
    passages: dict[str, Passage] = {}
    for number, row in enumerate(json_lines(path, what="corpus"), start=1):
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


def shown(hits: Sequence[Hit]) -> str:
    """As an agent reads them: `Doc 1(Title: ...) text`, a line each."""
    lines = []
    for number, hit in enumerate(hits, start=1):
        title, _, text = hit.passage.contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)

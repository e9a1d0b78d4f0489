"""A corpus with an index over it: BM25, or anybody's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from envs import bm25
from envs.search.passages import Hit, Passage, read_corpus

# (queries, topk) -> for each query at most topk of (id of a passage, score), best first. The server
# calls it from threads.
Lookup = Callable[[Sequence[str], int], Sequence[Sequence[tuple[str, float]]]]


class Library:
    """As safe to be used by several threads as its index."""

    def __init__(self, passages: Sequence[Passage], index: Lookup) -> None:
        self._passages = {passage.id: passage for passage in passages}
        self._index = index

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query its best passages. ValueError if the index names a passage that the corpus
        does not have.
        """
        found = self._index(queries, topk)
        unknown = next(
            (key for hits in found for key, _ in hits if key not in self._passages), None
        )
        if unknown is not None:
            raise ValueError(
                f"the index found passage {unknown!r}, which the corpus does not have; index the "
                "same corpus"
            )
        return [
            [Hit(passage=self._passages[key], score=float(score)) for key, score in hits]
            for hits in found
        ]


def bm25_index(passages: Sequence[Passage]) -> Lookup:
    """Every word of title and text counts, but stop words; a query without one finds nothing.

    Equal scores are in the corpus's order.
    """
    index = bm25.build(passage.contents for passage in passages)

    def search(query: str, topk: int) -> list[tuple[str, float]]:
        return [
            (passages[number].id, score)
            for number, score in bm25.search_scored(index, query, limit=topk)
        ]

    return lambda queries, topk: [search(query, topk) for query in queries]


@functools.cache
def bm25_library(corpus: Path) -> Library:
    """Loaded once per process. ValueError as for `read_corpus`."""
    passages = read_corpus(corpus)
    return Library(passages, bm25_index(passages))

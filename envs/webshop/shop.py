"""A shop that is open: catalogue, goals, search, nouns. One per process for the same options,
whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from envs import bm25
from envs.webshop import nouns, reward
from envs.webshop.catalogue import SMALL, Catalogue, open_packed, read
from envs.webshop.goals import Goal, Goals
from envs.webshop.pages import HITS

# whose hits a process keeps: going back and forth asks again, and so do the members of a group
KEPT_QUERIES = 10_000


class Shop:
    def __init__(self, data: Path, which: str, *, instructions: str, seed: int) -> None:
        self.catalogue = catalogue_of(data, which)
        self.goals = Goals(self.catalogue, instructions, seed=seed)
        self._data, self._which = data, which
        self.hits = lru_cache(maxsize=KEPT_QUERIES)(self._hits)

    def score(self, goal: Goal, number: int, options: Mapping[str, str]) -> float:
        """Of buying product `number` with these options."""
        product, tagged = self.catalogue[number], _tagged(self._data)
        title_score = reward.title_score(
            nouns.nouns(goal.product.name, tagged), nouns.nouns(product.name, tagged)
        )
        return reward.score(
            goal, product, options, price=self.goals.price_D[number], title_score=title_score
        )

    def _hits(self, query: str) -> list[int]:
        """Numbers of the products found, best first."""
        return bm25.search(_index(self._data, self._which), query, limit=HITS)


@cache
def open_shop(data: Path, which: str, *, instructions: str, seed: int) -> Shop:
    return Shop(data, which, instructions=instructions, seed=seed)


@cache
def catalogue_of(data: Path, which: str) -> Catalogue:
    """ValueError if its files are missing."""
    if which == SMALL:
        return read(data, which)
    if not packed(data).is_dir():
        raise ValueError(
            f"webshop catalogue={which!r}: no {packed(data)}; make it with: python -m envs.webshop "
            f"pack {data}"
        )
    return open_packed(packed(data))


def packed(data: Path) -> Path:
    """Where `python -m envs.webshop pack` puts what it makes of the full catalogue."""
    return data / "packed"


@cache
def _index(data: Path, which: str) -> bm25.Index:
    if which != SMALL:
        return bm25.load(packed(data))
    catalogue = catalogue_of(data, which)
    return bm25.build(
        (product.contents for product in catalogue), [product.asin for product in catalogue]
    )


@cache
def _tagged(data: Path) -> tuple[nouns.Tagged, ...]:
    return tuple(
        nouns.load(path) for path in (data / nouns.TAGGED, nouns.TAGGED_SMALL) if path.is_file()
    )

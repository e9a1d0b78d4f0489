"""Make anchor keys for similar states: texts of one group, compared in pairs.

The similarity of two texts is 2 LCS(a, b) / (|a| + |b|), from 0 to 1, with LCS the length of their
longest common subsequence. The paper (arXiv 2505.10978) groups search results by "longest matching
subsequence > 0.9". Its authors' code computes difflib's ratio instead (longest common *blocks*,
Ratcliff/Obershelp). That ratio is never larger and depends on the order of its arguments. Its
`autojunk` heuristic may give 0 to texts of 200 characters or more that differ in one.

A text of more than MAX_CHARACTERS is similar to itself only: the time grows with the square. So are
a group's longest texts, where comparing all of its texts would take more than MAX_WORK.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import Match, SequenceMatcher
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rapidfuzz.distance import Indel
from rapidfuzz.process import cdist

from gigpo.input_columns import columns_of

# rapidfuzz's own threshold is off by 1e-5; the exact one is applied to whole numbers afterwards
_MARGIN: Final = 1e-3
MAX_CHARACTERS: Final = 1 << 16  # two such texts take up to 50 ms
# Work of all pairs of a group: up to about 15 s, and enough for 400 texts of 5,000 characters up to
# 255, or for 80 such texts of others. The work of a pair is PAIR_WORK, plus the product of
# its lengths, plus WIDE_WORK times the product of its numbers of characters above 255.
MAX_WORK: Final = 1 << 41
# The same for difflib, in steps of its inner loop: up to about 8 s. It compares fewer pairs.
MAX_RATIO_WORK: Final = 1 << 27
RATIO_PAIR_WORK: Final = 256  # steps that a pair takes, however short its texts are
# rapidfuzz has a table for characters up to 255, and a hash map in each block of 64 for others
WIDE_WORK: Final = 26
PAIR_WORK: Final = 1 << 14  # a pair takes 90 ns, however short its texts are


def similarity_keys(steps: pa.Table, *, threshold: float, method: str) -> pa.Array:
    """Return a key per step: texts of one group with the same key count as the same state.

    Input: a table with group_uid (never null) and anchor_text (text). A key is one of its texts; it
    is null where anchor_text is null. `method`:

    linked   Similar texts (>= threshold) have the same key, and so have texts that a chain of
             similar ones links: the connected components of the group's texts, named by the
             smallest. Row order and repeats do not matter. Two texts of one key may be less similar
             than the threshold.
    greedy   As the authors' code, for comparison. Rows are read in order; each joins the first key
             whose text is >= threshold by difflib's ratio, autojunk included. Row order matters.

    Raises ValueError for a threshold outside (0, 1), an unknown method, and columns that are
    missing or have another type.
    """
    if not 0.0 < threshold < 1.0:
        raise ValueError(
            f"threshold={threshold} is outside (0, 1): at 1 use the state hash, at 0 all texts are "
            "alike"
        )
    if method not in _METHODS:
        raise ValueError(f"method={method!r} is unknown; it is one of {', '.join(_METHODS)}")
    columns = columns_of(steps, ("group_uid", "anchor_text"))
    if columns["group_uid"].null_count:
        row = pc.index(columns["group_uid"].is_null(), True).as_py()
        raise ValueError(
            f"row {row} has no group_uid (it is NULL); give every step the group that it is of"
        )
    texts = columns["anchor_text"].combine_chunks().dictionary_encode()
    # R rows, K rows with a text, P pairs of a group and one of its texts. All numbers are int32.
    group_R = columns["group_uid"].combine_chunks().dictionary_encode().indices.to_numpy()
    text_R = pc.fill_null(texts.indices, -1).to_numpy()
    known_R = text_R >= 0
    # Each text of each group once: by group, then in the order of rows.
    pairs_2P, first_P, pair_of_row_K = np.unique(
        np.stack([group_R[known_R], text_R[known_R]]),
        axis=1,
        return_index=True,
        return_inverse=True,
    )
    group_P, text_P = pairs_2P
    order_P = np.lexsort((first_P, group_P))
    starts_G = np.flatnonzero(np.diff(group_P[order_P], prepend=-1))
    names = texts.dictionary.to_pylist()
    keys_P: list[str] = [""] * len(order_P)
    for members in np.split(order_P, starts_G[1:]) if len(order_P) else ():
        of_group = _keys([names[i] for i in text_P[members]], threshold, method=method)
        for position, key in zip(members, of_group, strict=True):
            keys_P[position] = key
    result_R = np.full(len(steps), None, dtype=object)
    result_R[known_R] = np.array(keys_P, dtype=object)[pair_of_row_K.reshape(-1)]
    return pa.array(result_R, pa.string())


def _keys(texts: list[str], threshold: float, *, method: str) -> list[str]:
    """Return the keys of a group's texts, which are all different."""
    short = _within_work([text for text in texts if len(text) <= MAX_CHARACTERS])
    compared = [text for text in texts if text in short]
    key_of = dict(zip(compared, _METHODS[method](compared, threshold), strict=True))
    return [key_of.get(text, text) for text in texts]


def _within_work(texts: list[str]) -> set[str]:
    """Return the shortest texts whose pairs are within MAX_WORK. Row order does not matter."""
    kept: set[str] = set()
    work = n_characters = n_wide = 0
    for text in sorted(texts, key=lambda text: (len(text), text)):
        wide = _n_wide(text)
        work += len(kept) * PAIR_WORK + n_characters * len(text) + WIDE_WORK * n_wide * wide
        if work > MAX_WORK:
            break
        n_characters += len(text)
        n_wide += wide
        kept.add(text)
    return kept


def _n_wide(text: str) -> int:
    """Return the number of characters above 255."""
    return 0 if text.isascii() else len(text) - len(text.encode("latin-1", "ignore"))


def _linked(texts: list[str], threshold: float) -> list[str]:
    """Return the connected component of each text.

    A text is compared only with texts that are in no component yet, so similar texts are cheap.
    """
    ordered = np.array(sorted(texts), dtype=object)
    lengths = np.array([len(text) for text in ordered])
    remaining = np.arange(len(ordered))
    key_of: dict[str, str] = {}
    while len(remaining):
        component, remaining = [remaining[0]], remaining[1:]
        for current in component:  # grows while it is walked
            alike = _at_least(
                ordered[current],
                ordered[remaining],
                lengths[current] + lengths[remaining],
                threshold,
            )
            component += list(remaining[alike])
            remaining = remaining[~alike]
        key_of |= dict.fromkeys(ordered[component], ordered[component[0]])
    return [key_of[text] for text in texts]


def _at_least(
    text: str, others: np.ndarray, total_lengths: np.ndarray, threshold: float
) -> np.ndarray:
    """Return, as bool, whether 2 LCS / (|a| + |b|) >= threshold.

    The division is difflib's, so that 38 / 40 >= 0.95.
    """
    if not len(others):
        return np.zeros(0, bool)
    similarity = cdist(
        [text],
        others,
        scorer=Indel.normalized_similarity,
        score_cutoff=threshold - _MARGIN,
        dtype=np.float64,
    )[0]
    twice_common = total_lengths - np.rint((1.0 - similarity) * total_lengths)
    return (similarity > 0.0) & (twice_common / np.maximum(total_lengths, 1) >= threshold)


def _greedy(texts: list[str], threshold: float) -> list[str]:
    """Return the key of each text, by difflib's ratio in row order.

    difflib is slow: its time may grow with the cube of the length. Common blocks are a common
    subsequence, so only a text that passes by LCS can pass by blocks. After MAX_RATIO_WORK a text
    is similar to itself only.
    """
    keys: list[str] = []
    leaders: list[str] = []
    matchers: list[_CountingMatcher] = []  # one per leader: it prepares its second text once
    left = MAX_RATIO_WORK
    for text in texts:
        others = np.array(leaders, dtype=object)
        totals = np.array([len(text) + len(leader) for leader in leaders], dtype=np.int64)
        for candidate in np.flatnonzero(_at_least(text, others, totals, threshold)):
            if left <= 0:
                continue
            ratio, left = matchers[candidate].ratio_within(left, text=text)
            if ratio >= threshold:
                keys.append(leaders[candidate])
                break
        else:
            leaders.append(text)
            matchers.append(_CountingMatcher(text))
            keys.append(text)
    return keys


class _CountingMatcher(SequenceMatcher[str]):
    """Compute difflib's ratio of a text to `leader`, within a number of steps."""

    a: str  # the text
    b2j: dict[str, list[int]]  # the places of each character in the leader

    def __init__(self, leader: str) -> None:
        super().__init__(None, b=leader)
        self._left = 0
        self._steps_to: np.ndarray  # steps that the text takes up to each of its characters, int64

    def ratio_within(self, steps: int, *, text: str) -> tuple[float, int]:
        """Return the ratio, 0 if it takes more steps, and how many steps are left."""
        self.set_seq1(text)
        # For each character of the text difflib visits all places of the leader that have it.
        per_character = [1 + len(self.b2j.get(character, ())) for character in text]
        self._steps_to = np.concatenate([[0], np.cumsum(per_character, dtype=np.int64)])
        self._left = steps - RATIO_PAIR_WORK
        try:
            return self.ratio(), self._left
        except _TooManySteps:
            return 0.0, 0

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> Match:
        ahi = len(self.a) if ahi is None else ahi
        self._left -= int(self._steps_to[ahi] - self._steps_to[alo])
        if self._left < 0:
            raise _TooManySteps
        return super().find_longest_match(alo, ahi, blo, bhi)


class _TooManySteps(Exception):
    """End a comparison that takes too long."""


_METHODS: Final = MappingProxyType[str, Callable[[list[str], float], list[str]]](
    {"linked": _linked, "greedy": _greedy}
)

"""Lucene's BM25 by hand: words, stems, scores, ties. tests/envs/test_webshop.py has what the
original answered.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.bm25 import (
    Index,
    _hash,
    _idf,
    _kept_stem,
    _of_byte,
    build,
    search,
    search_scored,
    stem,
    tokens,
)

# Porter's own examples, a few for every step, and what Lucene does otherwise
STEMS = """
    caresses caress  ponies poni  cats cat  feed feed  agreed agre  plastered plaster  bled bled
    motoring motor  sing sing  conflated conflat  hopping hop  falling fall  hissing hiss
    failing fail  filing file  happy happi  sky sky  relational relat  conditional condit
    vietnamization vietnam  operator oper  decisiveness decis  sensibiliti sensibl
    triplicate triplic  electrical electr  goodness good  revival reviv  adjustment adjust
    adoption adopt  communism commun  probate probat  rate rate  cease ceas  controll control
    roll roll  geology geologi  apology apolog  possibly possibl  is is
"""


@pytest.mark.parametrize(
    ("word", "stemmed"), list(zip(STEMS.split()[::2], STEMS.split()[1::2], strict=True))
)
def test_words_are_stemmed_as_porter_does(word: str, stemmed: str) -> None:
    assert stem(word) == stemmed


@given(word=st.text(alphabet="aeioubcdlnrstyz", min_size=1, max_size=14))
def test_a_stem_is_no_longer_than_its_word_and_is_never_empty(word: str) -> None:
    assert 1 <= len(stem(word)) <= len(word)


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("The lamps of Bob's shop", ["lamp", "bob", "shop"]),  # stop words, possessive, plural
        (
            "size:s 1,000.5 6'2 3.5mm 1⁄2 U.S.A. q：a",
            ["size:", "1,000.5", "6'2", "3.5mm", "1⁄2", "u.s.a", "q：a"],
        ),
        ("non-slip w/lid x_y _ a1 +", ["non", "slip", "w", "lid", "x_y", "a1"]),
        # pictographs are words; fractions are none
        ("❤❤ ★ ❤️ x² ½ 漆器 ✿", ["❤", "❤", "★", "❤️", "x", "漆", "器"]),
    ],
)
def test_texts_are_cut_into_words_as_lucene_does(text: str, terms: list[str]) -> None:
    assert tokens(text) == terms


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("b" * 600, [255, 255, 90]),
        ("b." * 400, [255, 255, 255, 31]),
        ("y" * 5_000, [255] * 19 + [155]),
        ("❤" + "\ufe0f" * 300, [255]),
    ],
)
def test_a_word_is_cut_as_lucene_does(text: str, lengths: list[int]) -> None:
    assert list(map(len, tokens(text))) == lengths


def test_only_stems_of_short_words_are_kept() -> None:
    """The attack: words of a megabyte in queries stayed in memory."""
    before = _kept_stem.cache_info()
    assert stem("b" * 65) == "b" * 65
    assert _kept_stem.cache_info() == before
    assert len(stem("q" * 63 + "k")) == 64
    assert _kept_stem.cache_info().currsize == before.currsize + 1


def test_a_score_is_bm25_with_a_length_of_one_byte() -> None:
    """30 documents of 1 word, 1 of 51, which Lucene keeps as 50: idf * count / (count + 0.9 * (0.6
    + 0.4 * 50 / mean)).
    """
    index = build(["lamp"] * 30 + ["lamp shade " + "x " * 49], [f"n{n:02}" for n in range(31)])
    mean = (30 + 51) / 31
    (posting,) = range(index.starts_Vp1[-1])[slice(*index.starts_Vp1[_term(index, "shade") :][:2])]
    assert index.saturations_Z[posting] == pytest.approx(
        1 + 1 / (0.9 * (0.6 + 0.4 * 50 / mean)), rel=1e-6
    )
    assert _idf(1, 31) == pytest.approx(math.log(1 + 30.5 / 1.5), rel=1e-6)
    assert search(index, "shade lamp", limit=2) == [30, 0]  # then equal scores by name
    ((number, score),) = search_scored(index, "shade", limit=5)
    assert number == 30
    # of a word once
    assert score == pytest.approx(
        math.log(1 + 30.5 / 1.5) / (1 + 0.9 * (0.6 + 0.4 * 50 / mean)), rel=1e-6
    )


def test_documents_without_a_word_that_counts_are_never_found() -> None:
    assert search(build(["the", ""]), "the lamp", limit=2) == []
    assert search(build(["the", "lamp"]), "the lamp", limit=2) == [1]


def _term(index: Index, word: str) -> int:
    return int((index.terms_V == _hash(word)).argmax())


@given(length=st.integers(0, 100_000))
def test_a_byte_holds_a_length_from_below_to_within_an_eighth(length: int) -> None:
    kept = max(filter(length.__ge__, map(_of_byte, range(256))))
    assert kept <= length < kept + max(1, kept / 8)
    assert kept == length or length >= 40


def test_equal_scores_go_by_name_and_a_word_twice_counts_twice() -> None:
    index = build(["lamp red", "lamp red", "lamp blue blue"], ["c", "a", "b"])
    assert search(index, "lamp", limit=3) == [1, 0, 2]
    assert search(index, "lamp", limit=1) == [1]
    assert search(index, "red blue", limit=3) == [2, 1, 0]
    assert search(index, "red red red blue", limit=3) == [1, 0, 2]


def test_without_names_equal_scores_go_in_the_order_given() -> None:
    index = build(["lamp red", "lamp red", "lamp blue blue"])
    assert search(index, "lamp", limit=3) == [0, 1, 2]
    (first, second, third) = search_scored(index, "lamp", limit=3)
    assert first[1] == second[1] > third[1] > 0
    assert search_scored(index, "zebra of the", limit=3) == []

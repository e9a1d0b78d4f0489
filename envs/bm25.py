"""Rank documents by words with the BM25 of Lucene 9, as Anserini and Pyserini set it up.

WebShop's search and Search-R1's word search use it. Nothing here needs Java.

    index = build(contents)                      # arrays only: processes can share it on disk
    search(index, "red shoes", limit=50)         # document numbers, best first
    search_scored(index, "red shoes", limit=50)  # pairs of number and score

Scores match Lucene's in every bit, so that near ties fall the same way: a document's length is kept
in one byte, scores have 32 bits, and sums have 64.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
from nltk.stem.porter import PorterStemmer

K1, B = 0.9, 0.4  # Anserini's values
# Lucene's byte for a document's length (SmallFloat): lengths below EXACT_LENGTHS are kept as they
# are, and longer ones as a leading one, MANTISSA_BITS and an exponent.
EXACT_LENGTHS = 24
MANTISSA_BITS = 3
LEADING_ONE = 1 << MANTISSA_BITS
# Stems kept in memory. A corpus of a million passages has fewer frequent words.
KEPT_STEMS = 200_000
KEPT_CHARACTERS = 64  # of a word whose stem is kept
MAX_WORD_CHARACTERS = 255  # Lucene cuts a longer word there and goes on with the rest
STOP_WORDS = """
    a an and are as at be but by for if in into is it no not of on or such that the their then
    there these they this to was will with
"""
IS_STOP_WORD = frozenset(STOP_WORDS.split())
# Word boundaries of Unicode (UAX 29, version 12 as in Lucene), as far as texts in Latin letters
# need them. A word goes on over one of BETWEEN_LETTERS or BETWEEN_DIGITS. Marks belong to the
# letter before them. A pictograph is a word.
MARKS = "\u00ad\u0300-\u036f\u200c-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufe20-\ufe2f\ufeff"
BETWEEN_BOTH = r".'\u2018\u2019\u2024\ufe52\uff07\uff0e"
BETWEEN_LETTERS = rf"[{BETWEEN_BOTH}:\u00b7\u0387\u2027\ufe13\ufe55\uff1a]"
BETWEEN_DIGITS = rf"[{BETWEEN_BOTH},;\u037e\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b]"
PICTOGRAPH = (
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u2388"
    "\u23cf\u23e9-\u23f3\u23f8-\u23fa\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605"
    "\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714\u2716\u271d\u2721\u2728\u2733"
    "\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27a1\u27b0"
    "\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299\U0001f000-"
    "\U0001f0ff\U0001f10d-\U0001f10f\U0001f12f\U0001f16c-\U0001f171\U0001f17e\U0001f17f"
    "\U0001f18e\U0001f191-\U0001f19a\U0001f1ad-\U0001f1e5\U0001f201-\U0001f20f\U0001f21a"
    "\U0001f22f\U0001f232-\U0001f23a\U0001f23c-\U0001f23f\U0001f249-\U0001f3fa\U0001f400-"
    "\U0001f53d\U0001f546-\U0001f64f\U0001f680-\U0001f6ff\U0001f774-\U0001f77f\U0001f7d5-"
    "\U0001f7ff\U0001f90c-\U0001f93a\U0001f93c-\U0001f945\U0001f947-\U0001faff]"
)
LETTER = r"[^\W\d_]"
MORE = f"{{0,{MAX_WORD_CHARACTERS - 1}}}"
WORD = re.compile(
    rf"\w(?:[\w{MARKS}]|(?<={LETTER}){BETWEEN_LETTERS}(?={LETTER})|(?<=\d){BETWEEN_DIGITS}(?=\d))"
    rf"{MORE}|{PICTOGRAPH}[\u200d\ufe0f\U0001f3fb-\U0001f3ff]{MORE}|[\U0001f1e6-\U0001f1ff]{{2}}"
)
# Python's \w has these characters too. Unicode makes a word of none of the first (fractions, raised
# and circled digits), and of each single one of the second (Chinese).
NO_WORD = re.compile(
    "[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070\u2074-\u2079\u2080-\u2089\u2150-\u215f"
    "\u2460-\u249b\u24ea-\u24ff\u2776-\u2793]"
)
ONE_WORD = re.compile("[\u3005\u3007\u3041-\u309f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
POSSESSIVE = re.compile("['’＇]s$")


# Lucene has Porter's algorithm with its author's two later changes ("bli" and "logi" in step 2),
# and leaves words of one or two letters alone. NLTK calls that variant MARTIN_EXTENSIONS.
STEMMER = PorterStemmer(mode=PorterStemmer.MARTIN_EXTENSIONS)


# The file of each array of an index. The names are those of earlier versions' indexes.
FILES = {
    "terms_V": "terms_V.npy",
    "starts_Vp1": "starts_V.npy",
    "documents_Z": "documents_P.npy",
    "saturations_Z": "saturations_P.npy",
    "ranks_R": "ranks_D.npy",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """The words of R documents: V terms, by their 64-bit hashes, and Z postings.

    A posting is a term in a document.
    """

    terms_V: np.ndarray  # uint64, hashes, ascending
    starts_Vp1: np.ndarray  # int64; the postings of term v are starts_Vp1[v] to starts_Vp1[v + 1]
    documents_Z: np.ndarray  # uint32, ascending within a term
    saturations_Z: np.ndarray  # float32, 1 + count / (k1 * (1 - b + b * length / mean length))
    # uint32, rank of the document's name among all names, which decides between equal scores
    ranks_R: np.ndarray


def tokens(text: str) -> list[str]:
    """Return the stems of a text's words in order, repeats included, stop words left out."""
    text = ONE_WORD.sub(r" \g<0> ", NO_WORD.sub(" ", text))
    words = (POSSESSIVE.sub("", word).lower() for word in WORD.findall(text))
    return [stem(word) for word in words if word not in IS_STOP_WORD and word.strip("_")]


def stem(word: str) -> str:
    """Return the stem of a word in lower case: "batteries" becomes "batteri"."""
    return _kept_stem(word) if len(word) <= KEPT_CHARACTERS else _stem(word)


def _stem(word: str) -> str:
    stemmed: str = STEMMER.stem(word, to_lowercase=False)
    return stemmed


_kept_stem = lru_cache(maxsize=KEPT_STEMS)(_stem)


def build(contents: Iterable[str], names: Sequence[str] | None = None) -> Index:
    """Build the index of documents from their texts.

    Documents with equal scores are ranked by name, or by their order here if `names` is None.
    """
    numbers: dict[str, int] = {}
    terms = array("I")
    documents = array("I")
    counts = array("I")
    lengths = array("I")
    for document, text in enumerate(contents):
        found = tokens(text)
        lengths.append(len(found))
        for term, count in Counter(found).items():
            terms.append(numbers.setdefault(term, len(numbers)))
            documents.append(document)
            counts.append(count)
    hashes_V = np.array([_hash(term) for term in numbers], dtype=np.uint64)
    by_hash_V = np.argsort(hashes_V)
    order_V = np.empty_like(by_hash_V)
    order_V[by_hash_V] = np.arange(len(by_hash_V))
    terms_Z = order_V[np.frombuffer(terms, dtype=np.uint32)]
    order_Z = np.argsort(terms_Z, kind="stable")
    documents_Z = np.frombuffer(documents, dtype=np.uint32)[order_Z]
    counts_Z = np.frombuffer(counts, dtype=np.uint32)[order_Z].astype(np.float32)
    lengths_R = np.frombuffer(lengths, dtype=np.uint32)
    ranks_R = np.arange(len(lengths), dtype=np.uint32)
    if names is not None:
        ranks_R[sorted(range(len(names)), key=names.__getitem__)] = ranks_R.copy()
    return Index(
        terms_V=hashes_V[by_hash_V],
        starts_Vp1=np.concatenate(
            [[0], np.cumsum(np.bincount(terms_Z, minlength=len(numbers)))]
        ).astype(np.int64),
        documents_Z=documents_Z,
        saturations_Z=np.float32(1) + counts_Z * _inverse_norms(lengths_R)[documents_Z],
        ranks_R=ranks_R,
    )


def search(index: Index, query: str, *, limit: int) -> list[int]:
    """Return the numbers of the best `limit` documents that have a term of the query."""
    return [number for number, _ in search_scored(index, query, limit=limit)]


def search_scored(index: Index, query: str, *, limit: int) -> list[tuple[int, float]]:
    """Return (number, score) of the best `limit` documents that have a term of the query."""
    scores_R = np.zeros(len(index.ranks_R))
    for term, count in Counter(tokens(query)).items():
        key = np.uint64(_hash(term))
        term_number = int(np.searchsorted(index.terms_V, key))
        if term_number == len(index.terms_V) or index.terms_V[term_number] != key:
            continue
        postings = slice(index.starts_Vp1[term_number], index.starts_Vp1[term_number + 1])
        documents_Z = index.documents_Z[postings]
        weight = np.float32(count) * _idf(len(documents_Z), len(scores_R))
        scores_R[documents_Z] += weight - weight / index.saturations_Z[postings]
    rounded_R = scores_R.astype(np.float32)
    least = np.partition(rounded_R, -limit)[-limit] if limit < len(rounded_R) else 0.0
    best = np.flatnonzero(rounded_R >= max(least, np.finfo(np.float32).tiny))
    order = np.lexsort((index.ranks_R[best], -rounded_R[best]))
    found = best[order][:limit]
    return list(zip(found.tolist(), rounded_R[found].tolist(), strict=True))


def save(index: Index, directory: Path) -> None:
    """Write each array of the index as a file."""
    for name, file in FILES.items():
        np.save(directory / file, getattr(index, name))


def load(directory: Path) -> Index:
    """Map the files of `save` into memory: all processes of a machine share one copy."""
    return Index(
        **{array: np.load(directory / file, mmap_mode="r") for array, file in FILES.items()}
    )


def _hash(term: str) -> int:
    return int.from_bytes(blake2b(term.encode(), digest_size=8).digest(), "little")


def _idf(n_with: int, n_all: int) -> np.float32:
    return np.float32(np.log(1 + (n_all - n_with + 0.5) / (n_with + 0.5)))


def _inverse_norms(lengths_R: np.ndarray) -> np.ndarray:
    # The mean is 0 if no document has a term. Then no document is ever scored.
    mean = np.float32(max(lengths_R.mean(), 1.0))
    table = np.array([_of_byte(byte) for byte in range(256)], dtype=np.float32)
    inverse = np.float32(1) / (np.float32(K1) * (np.float32(1 - B) + np.float32(B) * table / mean))
    # Lucene rounds a length down to one that a byte can stand for.
    return inverse[np.searchsorted(table, lengths_R, side="right") - 1]


def _of_byte(byte: int) -> int:
    """Return the length that a byte of Lucene stands for.

    Bytes 0 to 23 are the lengths themselves. The next 16 are 24 to 39, as the first two exponents
    leave nothing out: so all lengths below 40 are exact. Later ones have four leading bits.
    """
    if byte < EXACT_LENGTHS:
        return byte
    exponent, bits = divmod(byte - EXACT_LENGTHS, LEADING_ONE)
    return EXACT_LENGTHS + (bits if exponent == 0 else (LEADING_ONE + bits) << (exponent - 1))

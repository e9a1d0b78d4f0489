"""Find the nouns of a product's name. WebShop tags them with spaCy at every purchase.

Here tags are made beforehand. This package has them for the 1,000 products: the positions of the
nouns in each name, by the name's hash. `python -P -m envs.webshop nouns` makes those of another
catalogue. The nouns of an untagged name are all its words but the small ones, because spaCy takes
nearly every word of such names for a proper noun. docs/webshop.md says how often that matters.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

TAGGED_SMALL = Path(__file__).parent / "nouns_1000.npz"
TAGGED = "nouns.npz"  # in the data folder
PARTS_OF_SPEECH = ("NOUN", "PROPN")
UNUSED_PARTS = ("parser", "lemmatizer", "ner")  # of the spaCy model; they change no tag
MAX_SPAN = 255  # characters that one byte of a span can skip or take
WORD = re.compile(r"[^\W_]+(?:\.[^\W_]+)*")
LETTER = re.compile(r"[^\W\d_]")
POSSESSIVE = re.compile(r"['’]s\b")
SMALL_WORDS = """
    a all and any are as at be both but by can do does each every for from her his in into is it its
    my no nor not of off on onto or our out over per s t than that the their these this those to
    under up via will with without you your
"""
IS_SMALL = frozenset(SMALL_WORDS.split())
IN_FILE = {"keys_R": "keys_N", "starts_Rp1": "starts_N", "spans": "spans"}  # arrays of a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """The nouns of R names, as spans: characters to skip, and characters of a noun to take."""

    keys_R: np.ndarray  # uint64, hashes of the names, ascending
    starts_Rp1: np.ndarray  # int64; name r has the spans from starts_Rp1[r] to starts_Rp1[r + 1]
    spans: np.ndarray  # uint8 [spans, 2]

    def nouns(self, name: str) -> list[str] | None:
        """Return the nouns in lower case, repeats included; None if the name is not tagged."""
        key = _key(name)
        at = int(np.searchsorted(self.keys_R, np.uint64(key)))
        if at == len(self.keys_R) or self.keys_R[at] != key:
            return None
        found, end = [], 0
        for skipped, taken in self.spans[self.starts_Rp1[at] : self.starts_Rp1[at + 1]].tolist():
            end += skipped + taken
            if taken:
                found.append(name[end - taken : end].lower())
        return found

    def save(self, path: Path) -> None:
        """Write the arrays as a file that appears complete or not at all."""
        scratch = path.with_name(f"tmp-{os.getpid()}-{path.name}")
        arrays = {in_file: getattr(self, array) for array, in_file in IN_FILE.items()}
        np.savez_compressed(scratch, **arrays)
        scratch.rename(path)


def load(path: Path) -> Tagged:
    """Read the file that `save` wrote."""
    with np.load(path) as arrays:
        return Tagged(**{array: arrays[in_file] for array, in_file in IN_FILE.items()})


def nouns(name: str, tagged: Sequence[Tagged]) -> list[str]:
    """Return the nouns in lower case, repeats included; of an untagged name all but small words."""
    for tags in tagged:
        found = tags.nouns(name)
        if found is not None:
            return found
    words = (word.lower() for word in WORD.findall(POSSESSIVE.sub(" ", name)))
    return [word for word in words if LETTER.search(word) and word not in IS_SMALL]


def tag(names: Iterable[str], model: str) -> Tagged:
    """Tag names with a spaCy model. Raises ImportError without spaCy, OSError without the model."""
    import spacy  # not needed to play

    tagger = spacy.load(model, exclude=UNUSED_PARTS)
    spans_of: dict[int, list[tuple[int, int]]] = {}
    for document in tagger.pipe(dict.fromkeys(names)):
        found = [
            (token.idx, len(token.text)) for token in document if token.pos_ in PARTS_OF_SPEECH
        ]
        spans_of[_key(document.text)] = _spans(found)
    keys = sorted(spans_of)
    return Tagged(
        keys_R=np.array(keys, dtype=np.uint64),
        starts_Rp1=np.cumsum([0, *(len(spans_of[key]) for key in keys)], dtype=np.int64),
        spans=np.array([span for key in keys for span in spans_of[key]], dtype=np.uint8).reshape(
            -1, 2
        ),
    )


def _spans(found: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of nouns, given by start and length in order. A too long one is cut."""
    spans, end = [], 0
    for start, length in found:
        spans += [(MAX_SPAN, 0)] * ((start - end) // MAX_SPAN)
        spans.append(((start - end) % MAX_SPAN, min(length, MAX_SPAN)))
        end = start + min(length, MAX_SPAN)
    return spans


def _key(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")

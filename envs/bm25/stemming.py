"""Porter's stemmer (An algorithm for suffix stripping, 1980) as Lucene has it: with its author's
two later departures ("bli" and "logi" in step 2), words of one or two letters left alone. Any
character but a, e, i, o, u and some y is a consonant.

    stem("relational") == "relat"; stem("batteries") == "batteri"; stem("tvs") == "tv"
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Suffix and what takes its place, where what is before it has a measure above 0; the longest that
# fits is the one.
STEP_2 = (
    ("ational", "ate"), ("ization", "ize"), ("iveness", "ive"), ("fulness", "ful"), ("ousness", "ous"), ("tional", "tion"),
    ("biliti", "ble"), ("entli", "ent"), ("ousli", "ous"), ("ation", "ate"), ("alism", "al"), ("aliti", "al"), ("iviti", "ive"),
    ("enci", "ence"), ("anci", "ance"), ("izer", "ize"), ("alli", "al"), ("ator", "ate"), ("logi", "log"), ("bli", "ble"),
    ("eli", "e"),
)  # fmt: skip
STEP_3 = (
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ness", ""),
    ("ful", ""),
)
# Taken off where what is before has a measure above 1.
STEP_4 = (
    "ement", "ance", "ence", "able", "ible", "ment", "ant", "ent", "ion", "ism", "ate", "iti", "ous", "ive", "ize", "al", "er",
    "ic", "ou",
)  # fmt: skip
VOWEL_CONSONANT = re.compile("v+c+")


def stem(word: str) -> str:
    """`word` is in lower case."""
    if len(word) <= 2:
        return word
    word = _step_1(word)
    word = _replace(word, STEP_2)
    word = _replace(word, STEP_3)
    return _step_5(_step_4(word))


def _step_1(word: str) -> str:
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        word = word[:-1] if _measure(word[:-3]) > 0 else word
    elif word.endswith("ed") and _has_vowel(word[:-2]):
        word = _mend(word[:-2])
    elif word.endswith("ing") and _has_vowel(word[:-3]):
        word = _mend(word[:-3])
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    return word


def _mend(word: str) -> str:
    """What is left when "ed" or "ing" is off: conflat -> conflate, hopp -> hop, fil -> file."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_double(word):
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_short(word) else word


def _replace(word: str, suffixes: Sequence[tuple[str, str]]) -> str:
    for suffix, instead in suffixes:
        if word.endswith(suffix):
            before = word[: -len(suffix)]
            return before + instead if _measure(before) > 0 else word
    return word


def _step_4(word: str) -> str:
    for suffix in STEP_4:
        before = word[: -len(suffix)]
        if word.endswith(suffix) and (suffix != "ion" or before.endswith(("s", "t"))):
            return before if _measure(before) > 1 else word
    return word


def _step_5(word: str) -> str:
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1])):
            word = word[:-1]
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


def _letters(word: str) -> str:
    """A "v" for each vowel and a "c" for each consonant; y is a vowel after a consonant."""
    kinds: list[str] = []
    for letter in word:
        is_vowel = letter in "aeiou" or (letter == "y" and bool(kinds) and kinds[-1] == "c")
        kinds.append("v" if is_vowel else "c")
    return "".join(kinds)


def _measure(word: str) -> int:
    """How many times vowels are followed by consonants in it."""
    return len(VOWEL_CONSONANT.findall(_letters(word)))


def _has_vowel(word: str) -> bool:
    return "v" in _letters(word)


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _letters(word)[-1] == "c"


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant that is not w, x or y: as in hop, where an e is missing."""
    return _letters(word)[-3:] == "cvc" and word[-1] not in "wxy"

"""Write a nested value of an Arrow table as Python shows it, up to a number of characters.

    text_of(table["column"][0], at_most=1000)   # "[{'a': 1, 'b': [1, 2]}]"

A list may have millions of values, and a record repeats the names of its fields in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

MAX_LEVELS = 50  # of lists in lists; Python ends after 1,000
CUT = "…"


def text_of(value: pa.Scalar, *, at_most: int) -> str:
    """Return the text of a value, cut after `at_most` characters, the last of which says so."""
    pieces: list[str] = []
    left = at_most
    for piece in _pieces(value, at_most=at_most, n_levels=MAX_LEVELS):
        if len(piece) > left:
            pieces.append(piece[: max(left - 1, 0)] + CUT)
            break
        pieces.append(piece)
        left -= len(piece)
    return "".join(pieces)


def _pieces(value: pa.Scalar, *, at_most: int, n_levels: int) -> Iterator[str]:
    if not value.is_valid:
        yield "None"
    elif n_levels == 0:
        yield CUT
    elif isinstance(value, pa.UnionScalar):
        yield from _pieces(value.value, at_most=at_most, n_levels=n_levels - 1)
    elif isinstance(value, pa.ListScalar):  # a map is one of records with a key and a value
        yield "["
        for number in range(len(value.values)):
            yield ", " if number else ""
            yield from _pieces(value.values[number], at_most=at_most, n_levels=n_levels - 1)
        yield "]"
    elif isinstance(value, pa.StructScalar):
        for number, field in enumerate(value.type):
            yield f"{', ' if number else '{'}{field.name!r}: "
            yield from _pieces(value[number], at_most=at_most, n_levels=n_levels - 1)
        yield "}" if len(value.type) else "{}"
    else:
        leaf = value.as_py()
        yield repr(leaf[:at_most] if isinstance(leaf, str | bytes) else leaf)

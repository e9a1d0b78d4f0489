"""Count the values of a JSON text that is not trusted, before Python's objects are made of them.

    n = count_values(body, max_values=MAX_VALUES)    # n <= MAX_VALUES, or too many
    value = read_value(body, max_values=MAX_VALUES)

A value of two bytes becomes an object of 64 or more: 8 MiB of empty lists take seconds and most of
a gigabyte. The count takes milliseconds for each MiB.
"""

from __future__ import annotations

import json
from typing import Any

# Of one request: 65,536 short messages have 196,608. So many are read in tenths of a second and
# take some 30 MiB.
MAX_VALUES = 2**18
MAX_DIGITS = 1000  # of a whole number, which is read in quadratic time; a float has up to 309
# Each value but the first follows one of them: "[" and "{" begin a list or an object with one.
SEPARATORS = b"[{,"
QUOTE = b'"'
_OTHER_BYTES = bytes(set(range(256)) - set(SEPARATORS + QUOTE))


class TooManyValues(ValueError):
    """A JSON text has more values than its reader takes."""


def count_values(data: bytes, *, max_values: int) -> int:
    """Return at least the number of values in a UTF-8 JSON text, keys not counted, less one.

    It is the number of separators outside of texts. For a number above `max_values` another such
    number may be returned. What follows an error of the JSON is counted in some way.
    """
    n_anywhere = sum(data.count(separator) for separator in SEPARATORS)
    if n_anywhere == 0:
        return 0
    # An escaped quote does not end a text. Two backslashes are one, which escapes nothing.
    kept = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHER_BYTES)
    n_quotes = kept.count(QUOTE)
    if n_quotes > 4 * (max_values + 1):  # a value has two, and so has its key
        return max(max_values + 1, n_quotes // 4)
    return sum(map(len, kept.split(QUOTE)[::2]))  # every second part is outside of texts


def check_values(data: bytes, *, max_values: int) -> None:
    """Raise TooManyValues if a UTF-8 JSON text has more than `max_values` values."""
    if count_values(data, max_values=max_values) > max_values:
        raise TooManyValues(f"it has more than {max_values} values")


def read_value(data: bytes, *, max_values: int) -> Any:
    """Return the value of a UTF-8 JSON text. Raises ValueError if it has none, and TooManyValues.

    A whole number of more than MAX_DIGITS digits is refused. So is text in UTF-16, which `json`
    would read: its bytes cannot be counted.
    """
    text = data.decode()
    check_values(data, max_values=max_values)
    try:
        return json.loads(text, parse_int=whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def whole_number(digits: str) -> int:
    """Return the number in a text, for `json`'s `parse_int`. Raises ValueError for a long one."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has a whole number of more than {MAX_DIGITS} digits")
    return int(digits)

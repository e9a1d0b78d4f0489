"""Test the number of values of a JSON text, which is counted before the text is parsed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounded_json import TooManyValues, check_values, count_values, read_value

TEXTS = st.text(alphabet='ab\\",[{}]: \u2222\u5b22\n', max_size=8)  # also bytes of QUOTE in UTF-16
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=30,
)


def separators(value: object) -> int:
    """Count the separators of a value by its parts: at least one each for a list or an object."""
    if not isinstance(value, list | dict):
        return 0
    inner = value if isinstance(value, list) else list(value.values())
    return max(1, len(inner)) + sum(map(separators, inner))


@given(value=VALUES, ascii_only=st.booleans())
def test_the_separators_outside_of_texts_are_counted(value: object, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    wanted = separators(value)
    assert count_values(data, max_values=10_000) == wanted
    assert read_value(data, max_values=wanted) == value
    if wanted:
        with pytest.raises(TooManyValues, match=f"more than {wanted - 1} values"):
            read_value(data, max_values=wanted - 1)


@pytest.mark.parametrize("one", [b"[]", b"{}", b'""', b"0", b'{"":""}', b'"\\""', b'"\\\\"'])
def test_values_of_every_kind_are_counted(one: bytes) -> None:
    data = b"[" + b",".join([one] * 5_000) + b"]"
    assert count_values(data, max_values=1_000) > 1_000
    n_separators = 5_000 * (1 + one.count(b"{") + one.count(b"["))
    assert count_values(data, max_values=10_000) == n_separators


def test_a_long_text_is_one_value_whatever_its_characters_are() -> None:
    data = json.dumps(['a, [b], {"c"}, \\ ' * 10_000]).encode()
    assert count_values(data, max_values=10) == 1
    check_values(data, max_values=1)


@pytest.mark.parametrize("end", [b"", b'"', b"\\", b"]", b'\\"'])
def test_values_before_an_error_of_the_json_are_counted(end: bytes) -> None:
    """A parser makes the values before the first error, so they count."""
    data = b"[" + b"[]," * 5_000 + end
    assert count_values(data, max_values=1_000) > 1_000


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff", "can't decode"),
        ('"\u2222"'.encode("utf-16"), "can't decode"),
    ],
)
def test_an_unreadable_text_is_a_value_error(data: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        read_value(data, max_values=10**6)
    assert not isinstance(error.value, TooManyValues)


def test_a_long_number_is_not_read() -> None:
    """The attack: an answer full of them held a worker's event loop for seconds."""
    assert read_value(b"[" + b"-" + b"9" * 999 + b"]", max_values=2) == [-(10**999 - 1)]
    with pytest.raises(ValueError, match="a whole number of more than 1000 digits"):
        read_value(b"[" + b"9" * 1001 + b"]", max_values=2)

"""A nested value is shown as Python shows it, and no more of it is made than is shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from analysis.view import downloads
from analysis.view.nested_text import CUT, MAX_LEVELS, text_of
from analysis.view.panel import show_rows
from store import StoreError


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1, None, 2],
        [[1], []],
        {"a": 1, "b": [True, None]},
        [{"a": "x'y"}, None],
        {"a": {}},
        b"x",
    ],
)
def test_it_is_written_as_python_writes_it(value: Any) -> None:
    (scalar,) = pa.array([value])
    assert text_of(scalar, at_most=1000) == repr(value)
    text = text_of(scalar, at_most=5)
    assert text == repr(value) if len(repr(value)) <= 5 else text == repr(value)[:4] + CUT


def test_a_map_is_a_list_of_its_entries() -> None:
    (scalar,) = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32()))
    assert text_of(scalar, at_most=1000) == "[{'key': 'k', 'value': 1}]"


def test_lists_in_lists_without_an_end_are_cut() -> None:
    value: Any = 1
    for _ in range(MAX_LEVELS + 5):
        value = [value]
    (scalar,) = pa.array([value])
    assert text_of(scalar, at_most=1000).strip("[]") == CUT


def test_records_of_a_long_name_take_no_more_than_is_shown() -> None:
    """The attack: a list of 600,000 records with a name of 10,000 characters took six gigabytes."""
    record: Mapping[str, bool] = {"a" * 10_000: True}
    table = pa.table({"c": pa.array([[record] * 100_000])})
    assert len(show_rows(table, links={})) < 1_000_000
    with pytest.raises(StoreError, match="have more than .* characters; download Arrow"):
        downloads.download(table, "csv", name="a", lsn=1)

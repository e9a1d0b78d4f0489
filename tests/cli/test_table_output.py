"""A table of a stranger's run has no lines but its own."""

from __future__ import annotations

import io
import math

import duckdb
import pyarrow as pa
import pytest

from cli.table_output import WRITERS


@pytest.mark.parametrize(
    "value",
    [
        """struct_pack("a\nforged" := 1)""",
        """[struct_pack("a" := struct_pack("b\nforged" := [2]))]""",
        """MAP {1: struct_pack("c\rforged" := 3)}""",
        """[struct_pack("d\nforged" := 4)]::STRUCT("d\nforged" INT)[1]""",
        """union_value("u\nforged" := 2)""",
        """struct_pack("a" := 1, b := 'as before')""",
    ],
)
def test_the_name_of_a_field_makes_no_line_of_its_own(value: str) -> None:
    """The attack: DuckDB draws the names of a type as they are, in the row of types."""
    table = duckdb.sql(f"SELECT {value} AS shown").to_arrow_table()
    drawn = io.StringIO()
    WRITERS["table"](table, drawn)
    lines = drawn.getvalue().strip("\n").split("\n")
    assert len(lines) == 6 and {line[0] for line in lines} <= set("┌│├└")
    assert "\r" not in drawn.getvalue()


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_many_keys_that_become_one_text_take_linear_time(kind: str) -> None:
    """The attack: a map of 59,049 keys, all of NaN and infinity, took minutes, and one of more
    fields days.
    """
    key = pa.struct([("a", pa.float64()), ("b", pa.int32())])
    keys = [{"a": math.nan if number % 2 else math.inf, "b": 1} for number in range(100_000)]
    table = pa.table({"m": pa.array([[(one, 0) for one in keys]], pa.map_(key, pa.int32()))})
    drawn = io.StringIO()
    WRITERS[kind](table, drawn)
    assert "_99999" in drawn.getvalue() and "_100000" not in drawn.getvalue()

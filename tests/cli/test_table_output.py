"""A table of a stranger's run has no lines but its own."""

from __future__ import annotations

import io

import duckdb
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

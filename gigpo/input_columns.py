"""Read the caller's columns as an Arrow table with the types that are computed with.

A type that would have to be guessed is refused: 0.4 is no step_index, 0.3 neither true nor false.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

# Columns of any type, which are only compared for equality.
KEYS: Final = (
    "group_uid",
    "traj_uid",
    "state_hash",
    "anchor_key",
    "final_state_hash",
    "final_anchor_key",
)
TYPES: Final = MappingProxyType(
    {
        "step_index": pa.int64(),
        "reward": pa.float64(),
        "is_action_valid": pa.bool_(),
        "version_min": pa.int64(),
        "weight": pa.float64(),
        "won": pa.bool_(),
        "value": pa.float64(),
        # large: a batch may have more than 2 GiB of texts
        "admissible_actions": pa.list_(pa.large_string()),
        "anchor_text": pa.large_string(),
        "final_admissible_actions": pa.list_(pa.large_string()),
        "final_anchor_text": pa.large_string(),
    }
)


# Views of text and bytes, and the types that Arrow computes with.
_VIEWS: Final = MappingProxyType(
    {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
)


class ArrowStream(Protocol):
    """Arrow's C stream interface.

    Tables and batches of pyarrow, data frames of pandas and polars, and DuckDB's results have it.
    """

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Columns = ArrowStream | Mapping[str, Iterable[object]]


def table_of(steps: Columns) -> pa.Table:
    """Return `steps` as an Arrow table. Raises TypeError if pa.table() cannot make one of it."""
    if isinstance(steps, pa.Table):
        return steps
    try:
        return pa.table(steps)
    except (TypeError, ValueError) as error:  # pyarrow's errors derive from these
        reason = str(error).splitlines()[0]
        raise TypeError(
            f"steps is {type(steps).__name__}, of which pa.table() makes no table ({reason}); "
            "bring an Arrow table, a data frame or a dictionary of columns"
        ) from error


def columns_of(steps: Columns, names: Sequence[str]) -> pa.Table:
    """Return the named columns of `steps`, with the types of TYPES.

    Keys lose Arrow's wrappings; NaN in them becomes null and -0.0 becomes 0.0. Raises ValueError
    for a column that is missing, occurs twice, or has another type, with its name and both types.
    """
    table = table_of(steps)
    there = table.column_names
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(f"steps lacks the columns {missing}; it has {there}")
    twice = [name for name in names if there.count(name) > 1]
    if twice:
        raise ValueError(f"steps has the columns {twice} more than once; drop one of each")
    return pa.table(
        {
            name: (_key if name in KEYS else _value)(name, _without_views(table[name]))
            for name in names
        }
    )


def _without_views(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decode polars' categories, which are views of text that Arrow cannot decode."""
    kind = column.type
    if not types.is_dictionary(kind) or kind.value_type not in _VIEWS:
        return column
    return column.cast(pa.dictionary(kind.index_type, _VIEWS[kind.value_type]))


def _key(name: str, column: pa.ChunkedArray) -> pa.Array:
    values = column.combine_chunks()
    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if isinstance(values, pa.DictionaryArray):
        values = values.dictionary_decode()
    if types.is_floating(values.type):
        # -0.0 + 0.0 is 0.0: codes would tell the two apart, SQL's equality does not
        values = pc.add(values.cast(pa.float64()), 0.0)
        return pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)
    if values.type in _VIEWS:
        return values.cast(_VIEWS[values.type])
    if types.is_nested(values.type):
        raise ValueError(
            f"{name} is {column.type}, and must be of a type with one value a row, such as text or "
            "binary"
        )
    return values


def _value(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    is_right, wanted = _WANTED[TYPES[name]]
    if not (is_right(column.type) or types.is_null(column.type)):
        raise ValueError(f"{name} is {column.type}, and must be {wanted}; cast the column")
    try:
        return column.cast(TYPES[name])
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name} is {column.type}, and cannot be read as {TYPES[name]}: {reason}; cast the "
            "column"
        ) from error


def _is_real(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _is_list_of_text(kind: pa.DataType) -> bool:
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    # Arrow types a column of empty lists and nulls as a list of null.
    return any(is_one(kind) for is_one in lists) and (
        _is_text(kind.value_type) or types.is_null(kind.value_type)
    )


_Predicate = Callable[[pa.DataType], bool]
_WANTED: Final = MappingProxyType[pa.DataType, tuple[_Predicate, str]](
    {
        pa.int64(): (types.is_integer, "an integer"),
        pa.float64(): (_is_real, "a number"),
        pa.bool_(): (types.is_boolean, "bool"),
        pa.large_string(): (_is_text, "text"),
        pa.list_(pa.large_string()): (_is_list_of_text, "a list of text"),
    }
)

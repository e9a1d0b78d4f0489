"""Make rows whose texts are no UTF-8, which no Python text can hold, and a run that has them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from store import Catalog, RunLayout, export, to_table, write_open_sql
from store.segments import TrajectoryMeta, write_rows
from tests.support.store_samples import make_trajectory, open_train_group, play

NO_UTF8 = b"ab\xff\xfe\xc3("


def with_bad_text(table: pa.Table, column: str, *, row: int) -> pa.Table:
    """Return the table with a text in this row that is no UTF-8; of a list, its second element."""
    index = table.schema.get_field_index(column)
    field = table.schema.field(index)
    is_list = pa.types.is_list(field.type)
    kind = pa.list_(pa.binary()) if is_list else pa.binary()
    values = table[column].cast(kind).to_pylist()
    values[row] = [b"valid", NO_UTF8] if is_list else NO_UTF8
    raw = pa.array(values, kind)
    return table.set_column(index, field, _as_texts(raw))


def _as_texts(raw: pa.Array) -> pa.Array:
    """Return the same bytes as texts, which Arrow does not look at."""
    if pa.types.is_list(raw.type):
        nulls = raw.is_null()
        return pa.ListArray.from_arrays(raw.offsets, _as_texts(raw.values), mask=nulls)
    return pa.StringArray.from_buffers(len(raw), *_text_buffers(raw), raw.null_count)


def _text_buffers(raw: pa.Array) -> tuple[pa.Buffer, pa.Buffer, pa.Buffer | None]:
    validity, offsets, data = raw.buffers()
    return offsets, data, validity


def run_with_bad_text(root: Path, column: str) -> tuple[RunLayout, str]:
    """Make a run of two groups. The second one's file has a bad text. Return the file's path."""
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        play(layout, catalog, open_train_group(catalog, 0))
        trajectory = make_trajectory(open_train_group(catalog, 1, size=1), 0)
        meta = write_rows(
            layout,
            with_bad_text(to_table([trajectory]), column, row=1),
            trajectories=(TrajectoryMeta.of(trajectory),),
            worker="w0",
            epoch=catalog.epoch,
        )
        catalog.commit(meta, epoch=catalog.epoch)
        export(catalog, layout)
    return layout, meta.path

"""A run of another format is refused in one line: run.json, the manifest, the catalog, a
segment.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from store import (
    FORMAT,
    Catalog,
    FormatError,
    RunLayout,
    SegmentMeta,
    export,
    open_run,
    read_segment,
    to_table,
    write_open_sql,
    write_segment,
)
from store.errors import OtherFormatError
from store.hashing import file_digest
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild_run_json import is_lost, rebuild_run_json
from store.segment_encoding import decode, encode
from tests.support.store_runs import rewrite
from tests.support.store_samples import make_trajectory, open_train_group, play

EARLIER = {"format_version": 4}  # as runs were marked before FORMAT
NEWER = {"format": "async-gigpo/4"}


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        play(layout, catalog, open_train_group(catalog, 0))
        export(catalog, layout)
    return layout


def marked(path: Path, marks: dict[str, object]) -> None:
    content = json.loads(path.read_text())
    del content["format"]
    rewrite(path, json.dumps({**content, **marks}).encode())


@pytest.mark.parametrize("marks", [EARLIER, NEWER])
def test_a_run_of_another_format_is_refused(layout: RunLayout, marks: dict[str, object]) -> None:
    marked(layout.run_json, marks)
    (found,) = marks.values()
    with pytest.raises(
        OtherFormatError, match=rf"run\.json has format {found!r}, .* reads '{FORMAT}' only; use"
    ) as error:
        RunLayout.open(layout.root)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("marks", [{"format": "async-gygpo/3"}, {"format": [3]}, {}])
def test_a_damaged_name_of_a_format_is_damage_and_no_other_version(
    layout: RunLayout, marks: dict[str, object]
) -> None:
    marked(layout.run_json, marks)
    with pytest.raises(FormatError, match=r"run\.json is damaged .*or: gigpo rebuild"):
        RunLayout.open(layout.root)
    assert is_lost(layout.root)
    rebuild_run_json(layout.root)
    assert RunLayout.open(layout.root).info == layout.info


@pytest.mark.parametrize("marks", [EARLIER, NEWER])
def test_a_manifest_of_another_format_is_refused(
    layout: RunLayout, marks: dict[str, object]
) -> None:
    marked(layout.manifest, marks)
    with pytest.raises(OtherFormatError, match=r"manifest\.json has format"):
        open_run(layout.root)


def test_a_catalog_of_another_format_is_refused_and_not_changed(layout: RunLayout) -> None:
    with closing(sqlite3.connect(layout.catalog)) as connection, connection:
        connection.execute("PRAGMA application_id = 0")
    before = layout.catalog.read_bytes()
    attempts: tuple[Callable[[], object], ...] = (
        lambda: Catalog.open(layout),
        lambda: check(layout, level=CONTENTS),
    )
    for attempt in attempts:
        with pytest.raises(OtherFormatError, match=rf"catalog\.sqlite has format .*{FORMAT}"):
            attempt()
    assert layout.catalog.read_bytes() == before


def segment_of(
    layout: RunLayout, meta: SegmentMeta, table: pa.Table, *, marks: dict[str, str]
) -> SegmentMeta:
    """Return the same trajectories, as code of another format would have written them."""
    sink = pa.BufferOutputStream()
    names = {**marks, "run_id": layout.info.run_id, "worker": "w0", "epoch": "1"}
    pq.write_table(table.replace_schema_metadata(names), sink, write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    digest = file_digest(data)
    path = layout.segment(worker="w0", segment_id=digest)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    changes = {
        "segment_id": digest,
        "digest": digest,
        "path": layout.relative(path),
        "n_bytes": len(data),
        "worker": "w0",
    }
    return SegmentMeta(**{**{name: getattr(meta, name) for name in meta.__slots__}, **changes})


@pytest.mark.parametrize("marks", [{"format_version": "4"}, NEWER])
def test_a_segment_of_another_format_is_refused(layout: RunLayout, marks: dict[str, str]) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 1)
        trajectories = [make_trajectory(group, member) for member in range(2)]
        meta = write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch)
    other = segment_of(layout, meta, to_table(trajectories), marks=marks)
    with pytest.raises(OtherFormatError, match=rf"{other.path} has format"):
        read_segment(layout, other)


@pytest.mark.parametrize("change", ["one is missing", "one is more", "another type"])
def test_a_file_with_other_columns_is_no_segment(layout: RunLayout, change: str) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 1)
    table = to_table([make_trajectory(group, 0)])
    if change == "one is missing":
        table = table.drop_columns(["task_score"])
    elif change == "one is more":
        table = table.append_column("more", pa.array([1, 2, 3]))
    else:
        position = table.column_names.index("version_min")
        table = table.set_column(position, "version_min", table["version_min"].cast(pa.int32()))
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"format": FORMAT}), sink)
    with pytest.raises(FormatError, match="x is not a segment .*other columns"):
        decode(sink.getvalue(), path=Path("x"))
    names = {"run_id": layout.info.run_id, "worker": "w", "epoch": "1"}
    whole = encode(to_table([make_trajectory(group, 0)]), metadata=names)
    assert decode(whole, path=Path("x"), columns=["reward", "won"]).column_names == [
        "reward",
        "won",
    ]

"""Export trajectories of a run as a dataset, for other programs and other runs.

    export_selection(Path("runs/a"), "datasets/won", where="won AND n_steps < 20", as_of=None)

Tools that read Parquet where it lies need no export: `live_files` names a run's own files.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from store.clock import now_us
from store.errors import DigestError, FormatError, StoreError
from store.exchange.dataset_files import (
    BINARY,
    DATASET_JSON,
    PARTS,
    TEXT,
    Dataset,
    DatasetFile,
    write_description,
)
from store.hashing import file_digest
from store.layout import RunLayout
from store.reading.manifest import read_manifest
from store.reading.mirror import mirror
from store.reading.reader import Reader, open_run
from store.records import UID_TYPE, uid_text
from store.run_json import FORMAT
from store.run_names import SEGMENT_PATH, checked_name
from store.segment_encoding import decode, encode_for_readers
from store.storage import Storage, make_place, open_storage
from store.untrusted.bounded_parquet import open_parquet, read_table
from store.untrusted.file_access import open_file

UID_COLUMNS = ("traj_uid", "group_uid", "state_hash", "final_state_hash")
# Decoded rows of a file, which an import holds in memory; the file has 40 to 60 MB.
PART_BYTES = 256 * 1024**2
SELECT_TIMEOUT_S = 3600.0  # of the query over all trajectories of a run
# The columns a condition may use: those of `trajectories`, and those of `groups` that
# `trajectories` does not have.
MATCHING = """(SELECT * FROM (
    SELECT t.*, g.* EXCLUDE (group_uid, split, task_id, n_steps, version_min, version_max)
    FROM trajectories AS t JOIN groups AS g ON g.group_uid = t.group_uid) AS selection
WHERE (
{where}
))"""
SELECTION = """SELECT traj_uid::VARCHAR AS traj_uid, group_uid::VARCHAR AS group_uid, size, n_steps
FROM {selection}"""


def export_selection(
    run: Path,
    dest: Path | str,
    *,
    where: str | None,
    as_of: int | None,
    whole_groups: bool = False,
    text_uids: bool = False,
) -> Dataset:
    """Write the trajectories for which `where` holds, now or at the lsn `as_of`, as a dataset.

    Without `where` all of them are written. `whole_groups` writes all trajectories of a group if
    it holds for one of them. `text_uids` writes uids as SQL shows them, for programs without
    binary columns; no run can import such a dataset.

    `where` is an SQL condition on the columns of `trajectories`, and of `groups` where the names
    differ. It may ask the views:

        won AND n_steps < 20
        state = 'trained' AND version_min >= 10
        group_uid IN (SELECT group_uid FROM lineage WHERE learner_step BETWEEN 5 AND 9)

    Raises StoreError if it selects nothing, if `dest` is not empty or in the run, or if files
    cannot be read; DigestError if files were changed.
    """
    layout = RunLayout.open(run)
    storage = _empty_place(layout, dest)
    selected = trajectories_where(where)
    if whole_groups:
        selected = trajectories_where(f"group_uid IN (SELECT group_uid FROM {selected})")
    with open_run(run, as_of=as_of, warn=False) as reader:
        if reader.left_out:
            raise StoreError(f"{reader.left_out} --repair sets them aside; nothing was exported")
        chosen = reader.sql(SELECTION.format(selection=selected), timeout_s=SELECT_TIMEOUT_S)
        if not chosen.num_rows:
            raise StoreError(
                f"no trajectory of {layout.root} matches {where or 'anything'}; nothing was written"
            )
        n_steps = pc.sum(chosen["n_steps"]).as_py()
        uids = pa.array([_uid(text).bytes for text in chosen["traj_uid"].to_pylist()], UID_TYPE)
        tables = selected_rows(reader, uids)
        if text_uids:
            tables = map(_with_text_uids, tables)
        make_place(storage)
        parts = tuple(_write_parts(layout, storage, tables=tables))
    written = sum(part.n_steps for part in parts)
    if written != n_steps:
        raise StoreError(
            f"the files of {layout.root} hold {written} of the {n_steps} steps selected; run fsck"
        )
    dataset = Dataset(
        format=FORMAT,
        run_id=layout.info.run_id,
        lsn=reader.lsn,
        where=where,
        created_us=now_us(),
        n_trajectories=chosen.num_rows,
        n_steps=n_steps,
        groups=_sizes(chosen),
        parts=parts,
        uids=TEXT if text_uids else BINARY,
    )
    write_description(dataset, storage)
    return dataset


def _sizes(chosen: pa.Table) -> dict[str, int]:
    """Return the size of each group in its own run, by its uid in hex."""
    sizes = zip(chosen["group_uid"].to_pylist(), chosen["size"].to_pylist(), strict=True)
    return {_uid(group_uid).hex: size for group_uid, size in sizes}


def _empty_place(layout: RunLayout, dest: Path | str) -> Storage:
    storage = open_storage(str(dest))
    place, homes = storage.locate(""), [f"{layout.root}/", layout.storage.locate("")]
    if any(f"{place.rstrip('/')}/".startswith(f"{home.rstrip('/')}/") for home in homes):
        raise StoreError(f"{dest} is in the run {layout.root}; choose a directory outside of it")
    if storage.exists(""):
        raise StoreError(f"{dest} is a file; choose a new directory")
    if next(storage.files(""), None) is None:
        return storage
    if storage.exists(f"{PARTS}/part-00000.parquet") and not storage.exists(DATASET_JSON):
        raise StoreError(
            f"{dest} is not empty: an export to it was cut short; "
            "remove it, or choose a new directory"
        )
    raise StoreError(f"{dest} is not empty; choose a new directory")


def trajectories_where(where: str | None) -> str:
    """Return SQL for the trajectories, with columns of their groups, for which `where` holds.

    Raises StoreError if the condition is no SQL, or would close the parentheses of MATCHING.
    """
    if where is None:
        return MATCHING.format(where="true")
    try:
        duckdb.extract_statements(f"SELECT 1 WHERE {where}")
    except duckdb.Error as error:
        raise StoreError(
            f"the condition {where!r} is no SQL expression; write it as after WHERE"
        ) from error
    return MATCHING.format(where=where)


def selected_rows(reader: Reader, uids: pa.Array) -> Iterator[pa.Table]:
    """Yield the rows of the selected trajectories, file by file, of the files the reader sees."""
    layout = reader.layout
    files = reader.sql("SELECT unnest(getvariable('segments')) AS file")["file"].to_pylist()
    if len(set(files)) < len(files):  # the run's own open.sql may set the variable
        raise FormatError(
            f"the views of {layout.root} read a file twice, so its rows would be written twice; "
            f"gigpo fsck --repair {layout.root}"
        )
    excluded: dict[str, list[bytes]] = {}
    for row in reader.sql("SELECT path, hex(traj_uid) AS uid FROM exported.excluded").to_pylist():
        excluded.setdefault(row["path"], []).append(bytes.fromhex(row["uid"]))
    for file in files[1:]:  # the first has no rows, only the columns
        # The run's own open.sql says which files; it may be a stranger's.
        name = str(file).rpartition(f"{layout.root}/")[2]
        path = checked_name(name, SEGMENT_PATH, where=str(layout.open_sql))
        if not _may_hold(layout, path, uids=uids):
            continue
        data = layout.storage.read(path)
        if file_digest(data) != Path(path).stem:
            raise DigestError(
                f"segment {layout.root / path} was changed on disk; gigpo fsck {layout.root}"
            )
        table = decode(data, path=path)
        wanted = pc.is_in(table["traj_uid"], value_set=uids)
        without = pa.array(excluded.get(path, []), uids.type)
        is_excluded = pc.is_in(table["traj_uid"], value_set=without)
        yield table.filter(pc.and_not(wanted, is_excluded))


def _may_hold(layout: RunLayout, path: str, *, uids: pa.Array) -> bool:
    """Return whether the file may hold one of `uids`. A damaged one may: its digest will tell."""
    try:
        with open(open_file(layout.root / path, root=layout.root), "rb") as source:
            n_bytes = os.fstat(source.fileno()).st_size
            file = open_parquet(source, n_bytes=n_bytes, name=path, verify=False)
            table = read_table(file, source, n_bytes=n_bytes, name=path, columns=["traj_uid"])
        return bool(pc.any(pc.is_in(table["traj_uid"], value_set=uids)).as_py())
    except (OSError, pa.ArrowException, FormatError):
        return True


def _write_parts(
    layout: RunLayout, storage: Storage, *, tables: Iterator[pa.Table]
) -> Iterator[DatasetFile]:
    # a part has the metadata of a segment, so that both are read alike
    metadata = {"run_id": layout.info.run_id, "worker": "export", "epoch": "0"}
    for number, table in enumerate(_in_large_tables(tables)):
        data = encode_for_readers(table, metadata=metadata, n_trajectories=0)
        # a directory of Parquet files alone, which every tool can read
        path = f"{PARTS}/part-{number:05d}.parquet"
        storage.write(path, data)
        yield DatasetFile(
            path=path, digest=file_digest(data), n_bytes=len(data), n_steps=table.num_rows
        )


def _in_large_tables(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same rows in tables of about PART_BYTES."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(held.nbytes for held in waiting) >= PART_BYTES:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _with_text_uids(table: pa.Table) -> pa.Table:
    """Return the table with its uids as the SQL views show them."""
    for name in UID_COLUMNS:
        coded = table[name].combine_chunks().dictionary_encode()
        texts = pa.array([uid_text(uid) for uid in coded.dictionary.to_pylist()], pa.string())
        column = texts.take(coded.indices)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _uid(text: object) -> uuid.UUID:
    """Parse a uid of a view. Raises FormatError: the views may be a stranger's."""
    try:
        return uuid.UUID(text if isinstance(text, str) else "")
    except ValueError as error:
        raise FormatError(
            f"the run's views show {text!r:.80} as a uid; gigpo fsck --repair RUN"
        ) from error


def live_files(run: Path | str) -> tuple[Path, ...]:
    """Return the Parquet files of the run's steps, for tools that read files.

    A run that goes on replaces them in time. Raises StoreError if some of their rows do not count,
    which a crash between two commits of a group can leave until compaction.
    """
    layout = mirror(RunLayout.open(run))
    manifest = read_manifest(layout)
    if manifest is None:
        raise FormatError(
            f"{layout.root} has no manifest.json; gigpo fsck --repair {layout.root} writes it"
        )
    if sum(part.n_rows for part in manifest.tables["excluded"]):
        raise StoreError(
            f"files of {layout.root} hold duplicates; read it with SQL, or export it: gigpo export"
        )
    return tuple(layout.root / path for path in manifest.segments[1:])

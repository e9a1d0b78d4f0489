"""Export trajectories of a run as a directory of plain Parquet files, and import them into a run.

    export_selection(Path("runs/a"), "datasets/won", where="won AND n_steps < 20", as_of=None)
    import_selection(Path("runs/b"), "datasets/won")

The directory may be a URI as well: s3://bucket/won?region=eu-central-1.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from store.catalog.catalog import Catalog
from store.catalog.records import IMPORTED, Group
from store.clock import now_us
from store.errors import DigestError, FormatError, StoreError
from store.exchange.dataset_directory import (
    BINARY,
    DATASET_JSON,
    README,
    TEXT,
    UIDS,
    Dataset,
    Part,
    read_dataset,
    read_part,
    with_text_uids,
)
from store.hashing import file_digest
from store.layout import FORMAT, SEGMENT_PATH, RunLayout, checked_name
from store.maintenance import segment_rows
from store.reading.manifest import export, read_manifest
from store.reading.mirror import mirror
from store.reading.reader import Reader, open_run
from store.records import UID_TYPE
from store.segments import decode, encode, write_rows
from store.storage import Storage, open_storage
from store.untrusted.bounded_parquet import open_parquet, read_table
from store.untrusted.file_access import open_file

PARTS = "data"  # the directory of a dataset's files
WORKER = "import"  # the directory of imported segments
# Decoded rows of a file, which an import holds in memory; the file has 40 to 60 MB.
PART_BYTES = 256 * 1024**2
SELECT_TIMEOUT_S = 3600.0
# The columns a condition may use: those of `trajectories`, and those of `groups` that
# `trajectories` does not have.
SELECTION = """SELECT traj_uid::VARCHAR AS traj_uid, group_uid::VARCHAR AS group_uid, size, n_steps
FROM (
    SELECT t.*, g.* EXCLUDE (group_uid, split, task_id, n_steps, version_min, version_max)
    FROM trajectories AS t JOIN groups AS g ON g.group_uid = t.group_uid) AS selection
WHERE (
{where}
)"""
# All trajectories of each group with a selected one.
WHOLE_GROUPS = """SELECT t.traj_uid::VARCHAR AS traj_uid, t.group_uid::VARCHAR AS group_uid,
       g.size, t.n_steps
FROM trajectories AS t JOIN groups AS g ON g.group_uid = t.group_uid
WHERE t.group_uid::VARCHAR IN (SELECT group_uid FROM ({selection}))"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    n_trajectories: int  # that the run did not have
    n_steps: int
    n_known: int  # trajectories that the run had; they stay as they are


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
    if where is not None:
        check_condition(where)
    with open_run(run, as_of=as_of, warn=False) as reader:
        if reader.left_out:
            raise StoreError(f"{reader.left_out} --repair sets them aside; nothing was exported")
        selection = SELECTION.format(where="true" if where is None else where)
        query = WHOLE_GROUPS.format(selection=selection) if whole_groups else selection
        chosen = reader.sql(query, timeout_s=SELECT_TIMEOUT_S)
        if not chosen.num_rows:
            raise StoreError(
                f"no trajectory of {layout.root} matches {where or 'anything'}; nothing was written"
            )
        n_steps = pc.sum(chosen["n_steps"]).as_py()
        tables = selected_rows(reader, uid_array(chosen["traj_uid"]))
        parts = tuple(
            _write_parts(layout, storage, map(with_text_uids, tables) if text_uids else tables)
        )
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
        groups={
            _uid(row["group_uid"]).hex: row["size"]
            for row in chosen.select(["group_uid", "size"]).to_pylist()
        },
        parts=parts,
        uids=TEXT if text_uids else BINARY,
    )
    facts = {
        "where": where or "none, all of it",
        "here": storage.locate("").rstrip("/"),
        "uid_form": UIDS[dataset.uids],
    }
    storage.write("README.md", README.format(**{**dataclasses.asdict(dataset), **facts}).encode())
    storage.write(DATASET_JSON, json.dumps(dataclasses.asdict(dataset), indent=1).encode())
    return dataset


def import_selection(run: Path, source: Path | str) -> ImportReport:
    """Import a dataset into a run without an owner, for SQL: its groups are never trained on.

    Trajectories that the run has stay as they are, so a second import changes nothing. In the run
    that the dataset came from, lost trajectories come back. Raises LockedError if the run has an
    owner, DigestError or FormatError if the dataset was changed.
    """
    storage, layout = open_storage(str(source)), RunLayout.open(run)
    dataset = read_dataset(storage)
    n_trajectories = n_steps = n_known = 0
    with Catalog.open(layout) as catalog:
        for part in dataset.parts:
            new, steps, known = _import_part(catalog, layout, storage, dataset=dataset, part=part)
            n_trajectories += new
            n_steps += steps
            n_known += known
        export(catalog, layout)
    return ImportReport(n_trajectories=n_trajectories, n_steps=n_steps, n_known=n_known)


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
            f"{dest} is not empty: an export to it was cut short; remove it, or choose a new "
            "directory"
        )
    raise StoreError(f"{dest} is not empty; choose a new directory")


def check_condition(where: str) -> None:
    """Raise StoreError if the condition is no SQL, or would close the parentheses of SELECTION."""
    try:
        duckdb.extract_statements(f"SELECT 1 WHERE {where}")
    except duckdb.Error as error:
        raise StoreError(
            f"the condition {where!r} is no SQL expression; write it as after WHERE"
        ) from error


def selected_rows(reader: Reader, uids: pa.Array) -> Iterator[pa.Table]:
    """Yield the rows of the selected trajectories, file by file, of the files the reader sees."""
    layout = reader.layout
    files = reader.sql("SELECT unnest(getvariable('segments')) AS file")["file"].to_pylist()
    excluded: dict[str, list[bytes]] = {}
    for row in reader.sql("SELECT path, hex(traj_uid) AS uid FROM exported.excluded").to_pylist():
        excluded.setdefault(row["path"], []).append(bytes.fromhex(row["uid"]))
    for file in files[1:]:  # the first has no rows, only the columns
        # The run's own open.sql says which files; it may be a stranger's.
        path = checked_name(
            str(file).rpartition(f"{layout.root}/")[2], SEGMENT_PATH, where=str(layout.open_sql)
        )
        if not _may_hold(layout, path, uids):
            continue
        data = layout.storage.read(path)
        if file_digest(data) != Path(path).stem:
            raise DigestError(
                f"segment {layout.root / path} was changed on disk; gigpo fsck {layout.root}"
            )
        table = decode(data, path=path)
        wanted = pc.is_in(table["traj_uid"], value_set=uids)
        without = pa.array(excluded.get(path, []), uids.type)
        yield table.filter(
            pc.and_(wanted, pc.invert(pc.is_in(table["traj_uid"], value_set=without)))
        )


def _may_hold(layout: RunLayout, path: str, uids: pa.Array) -> bool:
    """Return whether the file may hold one of `uids`. A damaged one may: its digest will tell."""
    try:
        with open(open_file(layout.root / path, root=layout.root), "rb") as source:
            n_bytes = os.fstat(source.fileno()).st_size
            file = open_parquet(source, n_bytes=n_bytes, name=path, verify=False)
            table = read_table(file, source, n_bytes=n_bytes, name=path, columns=["traj_uid"])
        return bool(pc.any(pc.is_in(table["traj_uid"], value_set=uids)).as_py())
    except (OSError, pa.ArrowException):
        return True


def _write_parts(layout: RunLayout, storage: Storage, tables: Iterator[pa.Table]) -> Iterator[Part]:
    # a part has the metadata of a segment, so that both are read alike
    metadata = {"run_id": layout.info.run_id, "worker": "export", "epoch": "0"}
    for number, table in enumerate(in_large_tables(tables)):
        data = encode(table, metadata=metadata)
        # a directory of Parquet files alone, which every tool can read
        path = f"{PARTS}/part-{number:05d}.parquet"
        storage.write(path, data)
        yield Part(path=path, digest=file_digest(data), n_bytes=len(data), n_steps=table.num_rows)


def in_large_tables(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same rows in tables of about PART_BYTES."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(held.nbytes for held in waiting) >= PART_BYTES:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def _import_part(
    catalog: Catalog, layout: RunLayout, storage: Storage, *, dataset: Dataset, part: Part
) -> tuple[int, int, int]:
    """Return the counts of new trajectories, their steps, and known trajectories."""
    name, data = storage.locate(part.path), read_part(storage, part)
    held = segment_rows.open_rows(data, path=Path(name))
    for _, detail in segment_rows.malformed(held):
        raise FormatError(f"{name}: {detail}; export it again")
    played = segment_rows.trajectories(held)
    known = catalog.known_trajectories([trajectory.meta.traj_uid for trajectory in played])
    new = [trajectory for trajectory in played if trajectory.meta.traj_uid not in known]
    if new:
        table = decode(data, path=name)
        uids = pa.array([trajectory.meta.traj_uid for trajectory in new], UID_TYPE)
        own = dataset.run_id == layout.info.run_id
        kept = relabelled(table.filter(pc.is_in(table["traj_uid"], value_set=uids)), own=own)
        metas = tuple(trajectory.meta for trajectory in new)
        segment = write_rows(layout, kept, trajectories=metas, worker=WORKER, epoch=catalog.epoch)
        catalog.import_groups(
            segment=segment,
            groups=dataset_groups(dataset, new),
            source=f"run {dataset.run_id}",
            own=own,
        )
    return len(new), sum(trajectory.meta.n_steps for trajectory in new), len(known)


def relabelled(table: pa.Table, *, own: bool) -> pa.Table:
    """Set `split` to imported, unless the rows are the run's own."""
    if own:
        return table
    place = table.schema.get_field_index("split")
    return table.set_column(
        place, table.schema.field(place), pa.array([IMPORTED] * len(table), pa.string())
    )


def dataset_groups(dataset: Dataset, played: Sequence[segment_rows.Played]) -> tuple[Group, ...]:
    task_ids = {trajectory.meta.group_uid: trajectory.task_id for trajectory in played}
    strangers = [group_uid.hex() for group_uid in task_ids if group_uid.hex() not in dataset.groups]
    if strangers:
        raise FormatError(
            f"dataset.json does not tell the size of group {strangers[0]}; export it again"
        )
    return tuple(
        Group.imported(group_uid=group_uid, task_id=task_id, size=dataset.groups[group_uid.hex()])
        for group_uid, task_id in task_ids.items()
    )


def uid_array(texts: pa.ChunkedArray) -> pa.Array:
    return pa.array([_uid(text).bytes for text in texts.to_pylist()], UID_TYPE)


def _uid(text: object) -> uuid.UUID:
    """Parse a uid of a view. Raises FormatError: the views may be a stranger's."""
    try:
        return uuid.UUID(text if isinstance(text, str) else "")
    except ValueError as error:
        raise FormatError(
            f"the run's views show {text!r:.80} as a uid; gigpo fsck --repair RUN"
        ) from error

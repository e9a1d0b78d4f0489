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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from store.atomic_write import READ_ONLY, make_directory, write_atomically
from store.catalog.catalog import Catalog
from store.catalog.records import IMPORTED, Group
from store.clock import now_us
from store.errors import DigestError, FormatError, StoreError
from store.hashing import file_digest
from store.layout import SEGMENT_PATH, RunLayout, checked_name
from store.maintenance import segment_rows
from store.reading.manifest import export, read_manifest
from store.reading.mirror import mirror
from store.reading.reader import Reader, open_run
from store.records import UID_TYPE, uid_text
from store.run_json import FORMAT, check_format, checked_run_id
from store.segments import decode, encode, write_rows
from store.storage import LocalStorage, Storage, make_place, open_storage
from store.untrusted import json_values
from store.untrusted.bounded_parquet import open_parquet, read_table
from store.untrusted.file_access import open_file
from store.untrusted.limited_process import in_limited_process
from store.untrusted.memory_limit import allowed_bytes
from store.user_cache import own_cache

DATASET_JSON = "dataset.json"
MAX_DATASET_JSON_BYTES = 64 << 20  # a group takes 40; as many as a million
BINARY, TEXT = "binary", "text"
UID_COLUMNS = ("traj_uid", "group_uid", "state_hash", "final_state_hash")
UIDS = {BINARY: "16 bytes each", TEXT: "text, as in SQL"}
README = """# {n_trajectories} trajectories, {n_steps} steps

From run {run_id} at lsn {lsn}; condition: {where}.
One row per step, whole trajectories only; `dataset.json` has the details.
`traj_uid`, `group_uid`, `state_hash` and `final_state_hash` are {uid_form}. Load it with any of

    pandas.read_parquet("{here}/data")
    polars.scan_parquet("{here}/data/*.parquet")
    datasets.load_dataset("parquet", data_dir="{here}/data")["train"].select_columns(
        ["response_ids"]
    ).with_format("torch")
    duckdb.sql("SELECT * FROM '{here}/data/*.parquet'")

or take it into another run: `gigpo import RUN {here}`.
"""
MAX_GROUP_SIZE = 1 << 16  # members; the published runs have 8
PARTS = "data"  # the directory of a dataset's files
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFile:
    """One file of a dataset."""

    path: str
    digest: str
    n_bytes: int
    n_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The content of dataset.json, which is written last: without it a dataset is not whole."""

    format: str
    run_id: str
    lsn: int
    where: str | None
    created_us: int
    n_trajectories: int
    n_steps: int
    # group_uid in hex -> its size in its own run, whether all members are here or not
    groups: Mapping[str, int]
    parts: tuple[DatasetFile, ...]
    uids: str = BINARY

    def size_of(self, group_uid: bytes) -> int:
        """Return the size of a group in its own run. Raises FormatError if it is not told."""
        size = self.groups.get(group_uid.hex())
        if size is None:
            raise FormatError(
                f"{DATASET_JSON} does not tell the size of group {group_uid.hex()}; export it again"
            )
        return size


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
    selected = trajectories_where(where)
    if whole_groups:
        selected = trajectories_where(f"group_uid IN (SELECT group_uid FROM {selected})")
    with open_run(run, as_of=as_of, warn=False) as reader:
        if reader.left_out:
            raise StoreError(f"{reader.left_out} --repair sets them aside; nothing was exported")
        query = SELECTION.format(selection=selected)
        chosen = reader.sql(query, timeout_s=SELECT_TIMEOUT_S)
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
    sizes = zip(chosen["group_uid"].to_pylist(), chosen["size"].to_pylist(), strict=True)
    dataset = Dataset(
        format=FORMAT,
        run_id=layout.info.run_id,
        lsn=reader.lsn,
        where=where,
        created_us=now_us(),
        n_trajectories=chosen.num_rows,
        n_steps=n_steps,
        groups={_uid(group_uid).hex: size for group_uid, size in sizes},
        parts=parts,
        uids=TEXT if text_uids else BINARY,
    )
    _describe(dataset, storage)
    return dataset


def _describe(dataset: Dataset, storage: Storage) -> None:
    """Write the dataset's README and, last, the file by which it counts as whole."""
    facts = {
        "where": dataset.where or "none, all of it",
        "here": storage.locate("").rstrip("/"),
        "uid_form": UIDS[dataset.uids],
    }
    storage.write("README.md", README.format(**{**dataclasses.asdict(dataset), **facts}).encode())
    storage.write(DATASET_JSON, json.dumps(dataclasses.asdict(dataset), indent=1).encode())


def import_selection(run: Path, source: Path | str) -> ImportReport:
    """Import a dataset into a run without an owner, for SQL: its groups are never trained on.

    Trajectories that the run has stay as they are, so a second import changes nothing. In the run
    that the dataset came from, lost trajectories come back. Raises LockedError if the run has an
    owner; DigestError or FormatError, before anything is imported, if no run wrote the dataset.
    """
    layout = RunLayout.open(run)
    storage, dataset = open_dataset(str(source))
    for name, table in part_tables(storage, dataset):
        segment_rows.check_importable(table, name=name)
    with Catalog.open(layout) as catalog:
        reports = [
            import_rows(
                catalog,
                layout,
                table=table,
                run_id=dataset.run_id,
                size_of=dataset.size_of,
                worker="import",
                name=name,
            )
            for name, table in part_tables(storage, dataset)
        ]
        export(catalog, layout)
    return ImportReport(
        n_trajectories=sum(report.n_trajectories for report in reports),
        n_steps=sum(report.n_steps for report in reports),
        n_known=sum(report.n_known for report in reports),
    )


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
    except (OSError, pa.ArrowException):
        return True


def _write_parts(
    layout: RunLayout, storage: Storage, *, tables: Iterator[pa.Table]
) -> Iterator[DatasetFile]:
    # a part has the metadata of a segment, so that both are read alike
    metadata = {"run_id": layout.info.run_id, "worker": "export", "epoch": "0"}
    for number, table in enumerate(_in_large_tables(tables)):
        data = encode(table, metadata=metadata)
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


def open_dataset(location: str) -> tuple[Storage, Dataset]:
    """Return where the files of a dataset are on this machine, and what its dataset.json says.

    That of a URI is fetched to this user's cache, once. Raises FormatError for a dataset that no
    run can take in, DigestError if a file was changed.
    """
    here = in_limited_process(_local_copy, location, at_most_bytes=allowed_bytes())
    storage = open_storage(here)
    return storage, read_dataset(storage)


def _local_copy(location: str) -> str:
    """Return the directory of a dataset: `location`, or a copy of what is at that URI."""
    storage = open_storage(location)
    if isinstance(storage, LocalStorage):
        return location
    dataset = read_dataset(storage)
    content = json.dumps(dataclasses.asdict(dataset), indent=1).encode()
    copy = own_cache("datasets", file_digest(content))
    held = LocalStorage(copy)
    if held.exists(DATASET_JSON):
        return str(copy)
    for part in dataset.parts:
        path = copy / part.path
        data = storage.read(part.path, at_most=part.n_bytes)
        _check_unchanged(part, data, name=storage.locate(part.path))
        make_directory(path.parent, beneath=copy)
        write_atomically(path, data, mode=READ_ONLY, beneath=copy)
    write_atomically(copy / DATASET_JSON, content, mode=READ_ONLY, beneath=copy)
    return str(copy)


def read_dataset(storage: Storage) -> Dataset:
    """Read dataset.json. Raises FormatError for a dataset that no run can take in."""
    name = storage.locate(DATASET_JSON)
    try:
        data = storage.read(DATASET_JSON, at_most=MAX_DATASET_JSON_BYTES).to_pybytes()
    except StoreError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise FormatError(
            f"{name} is not there: no dataset, or one that was not written to its end; "
            "export it again"
        ) from error
    try:
        content: dict[str, Any] = json_values.parse_object(data)
        check_format(content, name=name)
        groups = json_values.objects(content, "groups")
        parts = tuple(
            DatasetFile(
                path=json_values.text(part, "path"),
                digest=json_values.text(part, "digest"),
                n_bytes=json_values.integer(part, "n_bytes"),
                n_steps=json_values.integer(part, "n_steps"),
            )
            for part in json_values.entries(content, "parts")
        )
        checked = {
            "run_id": checked_run_id(json_values.text(content, "run_id")),
            "groups": {uid: _size(groups, uid) for uid in groups},
            "parts": parts,
        }
        dataset = Dataset(**{**content, **checked})
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{name} is damaged ({error!r}); export it again") from error
    if dataset.uids != BINARY:
        raise FormatError(
            f"{name}: its uids are text, for other programs; "
            "export it again without --text-uids to use it in a run"
        )
    return dataset


def _size(groups: Mapping[str, Any], uid: str) -> int:
    """Return the size of a group. Raises ValueError for one that no run has."""
    size = json_values.integer(groups, uid)
    if not 1 <= size <= MAX_GROUP_SIZE:
        raise ValueError(f"group {uid:.40} has {size:.3g} members")
    return size


def part_tables(storage: Storage, dataset: Dataset) -> Iterator[tuple[str, pa.Table]]:
    """Yield the name and the rows of each file of a dataset.

    Raises DigestError if a file was changed, FormatError if no run wrote it.
    """
    for part in dataset.parts:
        name, data = storage.locate(part.path), storage.read(part.path)
        _check_unchanged(part, data, name=name)
        yield name, decode(data, path=name)


def _check_unchanged(part: DatasetFile, data: pa.Buffer, *, name: str) -> None:
    if file_digest(data) != part.digest:
        raise DigestError(
            f"{name} is not the file that was exported; copy it again, or export again"
        )


def _with_text_uids(table: pa.Table) -> pa.Table:
    """Return the table with its uids as the SQL views show them."""
    for name in UID_COLUMNS:
        coded = table[name].combine_chunks().dictionary_encode()
        texts = pa.array([uid_text(uid) for uid in coded.dictionary.to_pylist()], pa.string())
        column = texts.take(coded.indices)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def import_rows(
    catalog: Catalog,
    layout: RunLayout,
    *,
    table: pa.Table,
    run_id: str,
    size_of: Callable[[bytes], int],
    worker: str,
    name: str,
) -> ImportReport:
    """Import the trajectories of `table` that the run does not have.

    `run_id` is that of the run that played them, `size_of` returns the size of a group in it, and
    `worker` names the directory of their segment. Raises FormatError, in which `name` is theirs.
    """
    segment_rows.check_importable(table, name=name)
    played = segment_rows.trajectories(table)
    known = catalog.known_trajectories([one.meta.traj_uid for one in played])
    new = [one for one in played if one.meta.traj_uid not in known]
    metas = tuple(one.meta for one in new)
    if new:
        uids = pa.array([meta.traj_uid for meta in metas], UID_TYPE)
        kept = table.filter(pc.is_in(table["traj_uid"], value_set=uids))
        own = run_id == layout.info.run_id
        task_ids = {one.meta.group_uid: one.task_id for one in new}
        kept = _with_splits(kept, catalog.splits_of(task_ids))
        groups = [
            Group.imported(group_uid=group_uid, task_id=task_id, size=size_of(group_uid))
            for group_uid, task_id in task_ids.items()
        ]
        segment = write_rows(layout, kept, trajectories=metas, worker=worker, epoch=catalog.epoch)
        catalog.import_groups(segment=segment, groups=groups, source=f"run {run_id}", own=own)
    return ImportReport(
        n_trajectories=len(new),
        n_steps=sum(meta.n_steps for meta in metas),
        n_known=len(known),
    )


def _with_splits(table: pa.Table, splits: Mapping[bytes, str]) -> pa.Table:
    """Return the rows with the splits of their groups in the run, which may differ in a dataset."""
    index = table.schema.get_field_index("split")
    values = [splits.get(group_uid, IMPORTED) for group_uid in table["group_uid"].to_pylist()]
    return table.set_column(index, table.schema.field(index), pa.array(values, pa.string()))


def _uid(text: object) -> uuid.UUID:
    """Parse a uid of a view. Raises FormatError: the views may be a stranger's."""
    try:
        return uuid.UUID(text if isinstance(text, str) else "")
    except ValueError as error:
        raise FormatError(
            f"the run's views show {text!r:.80} as a uid; gigpo fsck --repair RUN"
        ) from error

"""Import groups of other runs to train on: `gigpo train CONFIG source=RUN[@where]`.

    take_sources(Path("runs/b"), [parse_source("runs/a@won AND n_steps < 8")], order="n_won DESC")

A step is compared with its whole group, so whole groups are taken: each with a trajectory that
matches. A source is a run, which is only read and may go on training, a directory that `export`
wrote, the URI of either, or rows that the caller makes.

First all rows are written, to files that do not count yet. Then one transaction imports them all,
and makes them the groups that the run trains on, in order. If a source is refused or the process is
killed before it, the run has nothing of them, and the same call begins again. After it there is
nothing left to do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from printable import one_line
from store.catalog.catalog import Catalog
from store.catalog.imported_groups import ImportedSegment
from store.catalog.records import TRAIN
from store.errors import FormatError, StoreError
from store.exchange.bring import run_at
from store.exchange.dataset_export import SELECT_TIMEOUT_S, selected_rows, trajectories_where
from store.exchange.dataset_files import DATASET_JSON, open_dataset, part_tables
from store.exchange.dataset_import import NewRows, check_one_task, check_part
from store.hashing import uid
from store.layout import RunLayout
from store.maintenance import segment_rows
from store.maintenance.compact import in_group_order
from store.reading.manifest import export
from store.reading.reader import open_run
from store.records import UID_TYPE, uid_text
from store.storage import open_storage
from store.untrusted.limited_process import SMALL_BYTES, in_limited_process

WORKER = "offline"  # the directory of their segments
WHOLE_HINT = "`gigpo export --groups` exports whole groups"
FILE_STEPS = 2048  # rows of a segment: a batch of a few groups reads whole files
MAX_GROUPS = 10_000_000  # of a source; their rows are held in memory
# Columns that the files of a dataset do not have.
UNKNOWN_OF_DATASETS = ("ordinal", "state", "reason", "opened_at", "completed_at")
# An order may use these columns, and `source` and `played`.
COLUMNS = pa.schema(
    [
        ("group_uid", UID_TYPE),
        ("task_id", pa.string()),
        ("ordinal", pa.int64()),
        ("size", pa.int64()),
        ("n_steps", pa.int64()),
        ("n_won", pa.int64()),
        ("return_sum", pa.float64()),
        ("state", pa.string()),
        ("reason", pa.string()),
        ("version_min", pa.int64()),
        ("version_max", pa.int64()),
        ("opened_at", pa.timestamp("us")),
        ("completed_at", pa.timestamp("us")),
        ("members", pa.list_(UID_TYPE)),
    ]
)
SELECTED = """SELECT unhex(replace(g.group_uid::VARCHAR, '-', '')) AS group_uid, g.task_id,
       g.ordinal, g.size, g.n_steps, g.n_won, g.return_sum, g.state, g.reason, g.version_min,
       g.version_max, g.opened_at, g.completed_at,
       list(DISTINCT unhex(replace(t.traj_uid::VARCHAR, '-', ''))) AS members
FROM groups AS g JOIN trajectories AS t ON t.group_uid = g.group_uid
WHERE g.split = 'train' AND g.group_uid IN (SELECT group_uid FROM {selection})
GROUP BY ALL ORDER BY g.completed_at, g.ordinal"""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineRows:
    """Whole groups that no run has played, such as chats of a file."""

    run_id: str  # stands for the run in lineage; equal contents have equal ids
    tables: Sequence[pa.Table]  # SEGMENT_SCHEMA, split "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSource:
    """A location to take groups from, and a condition on their trajectories."""

    location: (
        str  # a run, a dataset that `export` wrote, each a directory or URI; or that of `rows`
    )
    where: str | None  # None: all groups
    # makes the rows of a location that this package cannot read; called only if they are needed
    rows: Callable[[], OfflineRows] | None = None
    n_tokens: int | None = None  # the model's, whose ids begin at 0; None: not known
    # of a prompt and its response together, which a learner step computes at once; None: any
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenSource:
    """The numbers of groups that were taken from one source."""

    source: OfflineSource
    run_id: str
    n_groups: int  # taken
    n_incomplete: int  # selected, but not all of their trajectories are there
    is_dataset: bool  # not a run

    def __str__(self) -> str:
        where = f" where {self.source.where}" if self.source.where else ""
        left_out = f"; {self.n_incomplete} incomplete ones left out" if self.n_incomplete else ""
        hint = f" ({WHOLE_HINT})" if self.n_incomplete and self.is_dataset else ""
        taken = f"{self.n_groups} groups of {self.source.location}{where} (run {self.run_id})"
        return f"{taken}{left_out}{hint}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Selection:
    """The groups of one source."""

    source: OfflineSource
    run_id: str
    groups: pa.Table  # COLUMNS, whole groups, in the order in which they were played
    n_incomplete: int
    is_dataset: bool
    tables: Iterator[pa.Table]  # all rows of `groups`, and maybe others


def parse_source(text: str) -> OfflineSource:
    """Split "RUN" or "RUN@where".

    A path may have an "@" in it: RUN is the longest beginning that exists. If none does, it ends
    at the first "@".
    """
    parts = text.split("@")
    n = next((n for n in range(len(parts), 0, -1) if Path("@".join(parts[:n])).exists()), 1)
    return OfflineSource(location="@".join(parts[:n]), where="@".join(parts[n:]) or None)


def take_sources(
    run: Path, sources: Sequence[OfflineSource], *, order: str
) -> tuple[TakenSource, ...]:
    """Import the groups of all `sources` into a run without an owner, unless that was done.

    `order` is SQL as after ORDER BY, over COLUMNS, `source` and `played`. If it is empty, the
    groups come as they were played, source by source. Raises StoreError if nothing is selected or
    an SQL text or a source is wrong, DigestError for files that were changed.
    """
    layout = RunLayout.open(run)
    with Catalog.open(layout) as catalog, ExitStack() as opened:
        taken: tuple[TakenSource, ...] = ()
        if not catalog.has_offline_groups():
            selections = [_select(source, opened) for source in sources]
            for selection in selections:
                if selection.run_id == layout.info.run_id:
                    text = f"source {selection.source.location!r} is this very run"
                    raise StoreError(f"{text}; train from it in a new run_dir")
            chosen = in_order(selections, order=order)
            selections = [
                _narrowed(selection, {group_uid for group_uid, at in chosen.items() if at == place})
                for place, selection in enumerate(selections)
            ]
            segments: list[ImportedSegment] = []
            for selection in selections:
                segments += _written(catalog, layout, selection=selection)
            taken = tuple(map(_report, selections))
            run_ids = {group_uid: selections[place].run_id for group_uid, place in chosen.items()}
            detail = "; ".join(map(str, taken))
            catalog.take_offline_groups(run_ids, segments=segments, detail=detail)
        export(catalog, layout)
    return taken


def find_sources(
    sources: Sequence[OfflineSource], *, order: str, known: Collection[bytes] = ()
) -> None:
    """Raise the errors that `take_sources` raises before it takes anything.

    All rows of datasets and chats are looked at. Those of runs are when they are imported; until
    then their views say which members a group has. `known` are uids of groups that the run will
    have already, as a fork does.
    """
    with ExitStack() as opened:
        selections = [_select(source, opened) for source in sources]
        chosen = in_order(selections, order=order)
        if twice := sorted(set(chosen).intersection(known)):
            raise StoreError(
                f"group {uid_text(twice[0])} is in the sources and in the run that is forked, and "
                f"so are {len(twice) - 1} more; export only groups that this run does not have"
            )
        for selection in selections:
            name = _name(selection.source, selection.run_id)
            for table in _rows(selection) if selection.is_dataset else ():
                for piece in _pieces(table, name=name):
                    check_tokens(piece, name=name, source=selection.source)


def in_order(selections: Sequence[_Selection], *, order: str) -> dict[bytes, int]:
    """Return each selected group with the place of its selection: the first in the order.

    A run and its fork both have a group that was open at the checkpoint, and played it differently.

    Raises StoreError if none is selected, `order` is wrong, or two sources contradict each other.
    """
    tables = [
        one.groups.append_column("source", pa.repeat(one.run_id, len(one.groups)))
        for one in selections
    ]
    candidates = pa.concat_tables(tables).drop_columns(["members"])
    candidates = candidates.append_column("played", pa.array(range(len(candidates)), pa.int64()))
    if not len(candidates):
        sources = ", ".join(map(_fault, selections))
        raise StoreError(f"no whole training group is selected in {sources}; nothing to train on")
    sizes = candidates.group_by("group_uid").aggregate([("size", "min"), ("size", "max")])
    for one in sizes.filter(pc.not_equal(sizes["size_min"], sizes["size_max"])).to_pylist():
        raise StoreError(
            f"group {uid_text(one['group_uid'])} has {one['size_min']} members in one source and "
            f"{one['size_max']} in another; leave one of them out"
        )
    # An order by an unknown column is refused; by a column of NULLs it would do nothing.
    if order and candidates["state"].null_count:
        candidates = candidates.drop_columns(list(UNKNOWN_OF_DATASETS))
    if order:
        candidates = _sorted(candidates, order)
    ends = list(accumulate(len(one.groups) for one in selections))  # of `played`
    chosen: dict[bytes, int] = {}
    group_uids, played = candidates["group_uid"].to_pylist(), candidates["played"].to_pylist()
    for group_uid, number in zip(group_uids, played, strict=True):
        chosen.setdefault(group_uid, bisect_right(ends, number))
    return chosen


def _narrowed(selection: _Selection, group_uids: Collection[bytes]) -> _Selection:
    """Return the selection with these groups only."""
    is_kept = pc.is_in(selection.groups["group_uid"], value_set=pa.array(group_uids, UID_TYPE))
    return replace(selection, groups=selection.groups.filter(is_kept))


def _fault(selection: _Selection) -> str:
    """Describe a selection without whole groups."""
    n, where = selection.n_incomplete, selection.source.where or "all"
    hint = f"; {WHOLE_HINT}" if n and selection.is_dataset else ""
    found = f": {n} groups, of which each lacks trajectories{hint}" if n else ""
    return f"{selection.source.location} ({where}{found})"


def _sorted(candidates: pa.Table, order: str) -> pa.Table:
    """Sort with DuckDB, which can reach nothing but the table."""
    with duckdb.connect(
        config={"enable_external_access": False, "lock_configuration": True}
    ) as connection:
        connection.register("candidates", candidates)
        try:
            if len(duckdb.extract_statements(f"SELECT 1 ORDER BY {order}")) != 1:
                raise StoreError(
                    f"the order {order!r} is not one ORDER BY; write it as after those words"
                )
            query = f"SELECT * FROM candidates ORDER BY {order}\n, played"
            return connection.sql(query).to_arrow_table()
        except duckdb.Error as error:
            text = f"the order {order!r} cannot be used ({one_line(error)}); "
            text += "it is SQL over a group's columns"
            if unknown := sorted({*UNKNOWN_OF_DATASETS} - {*candidates.column_names}):
                text += f"; with a dataset among the sources there is no {', '.join(unknown)}"
            raise StoreError(text) from error


def _select(source: OfflineSource, opened: ExitStack) -> _Selection:
    """Return the groups of a file of chats, a run or a dataset. `opened` keeps its files."""
    if source.rows is not None:
        return _select_of_chats(source, source.rows)
    run = run_at(source.location)
    if RunLayout.exists(run):
        return _select_of_run(source, RunLayout.open(run), opened=opened)
    if not in_limited_process(_is_dataset, source.location, at_most_bytes=SMALL_BYTES):
        raise FormatError(
            f"source {source.location!r} does not exist, or is neither a run directory nor one "
            "that `gigpo export` wrote, nor a file of chats (.jsonl or .parquet)"
        )
    return _select_of_dataset(source)


def _is_dataset(location: str) -> bool:
    return open_storage(location).exists(DATASET_JSON)


def _select_of_chats(source: OfflineSource, rows: Callable[[], OfflineRows]) -> _Selection:
    if source.where is not None:
        raise StoreError(
            f"source {source.location}@{source.where}: a file of chats has no SQL; write the "
            "chats that you want into a file of their own, or use offline.train_on"
        )
    made = rows()
    for table in made.tables:
        segment_rows.check_importable(table, name=_name(source, made.run_id))
    played = chain.from_iterable(map(segment_rows.trajectories, made.tables))
    groups = _groups_of(played, name=_name(source, made.run_id))
    sizes = {group_uid: len(members) for group_uid, members in groups.items()}
    return _selected(
        source, groups, run_id=made.run_id, size_of=sizes.__getitem__, tables=made.tables
    )


def _select_of_run(source: OfflineSource, theirs: RunLayout, *, opened: ExitStack) -> _Selection:
    # The open reader keeps the run's files until all is read.
    reader = opened.enter_context(open_run(theirs.root, warn=False))
    if reader.left_out:
        raise StoreError(f"{reader.left_out} --repair sets them aside; nothing was taken")
    try:
        query = SELECTED.format(selection=trajectories_where(source.where))
        answer = reader.sql(query, timeout_s=SELECT_TIMEOUT_S, max_rows=MAX_GROUPS)
    except StoreError as error:
        raise StoreError(
            f"source {source.location}@{source.where} cannot be selected: {error}; write what "
            "follows the @ as after WHERE, over columns of the views trajectories and groups"
        ) from error
    name = _name(source, theirs.info.run_id)
    try:
        groups, n_incomplete = _whole_groups(answer.cast(COLUMNS))
    except pa.ArrowInvalid as error:
        raise FormatError(
            f"{name}: its views show {one_line(error)}; gigpo fsck --repair {theirs.root}"
        ) from error
    _check_members(groups, name=name)
    return _Selection(
        source=source,
        run_id=theirs.info.run_id,
        groups=groups,
        n_incomplete=n_incomplete,
        is_dataset=False,
        tables=selected_rows(reader, pc.list_flatten(groups["members"]).combine_chunks()),
    )


def _check_members(groups: pa.Table, *, name: str) -> None:
    """Raise FormatError for a whole group whose members are not those that its run gave it."""
    sizes, members = groups["size"].to_pylist(), groups["members"].to_pylist()
    for group_uid, size, shown in zip(groups["group_uid"].to_pylist(), sizes, members, strict=True):
        if set(shown) != {uid(group_uid, member) for member in range(size)}:
            raise FormatError(
                f"{name}: its views show trajectories of group {uid_text(group_uid)} that are not "
                f"its members 0..{size - 1}; look at it with gigpo fsck, or leave the group out"
            )


def _select_of_dataset(source: OfflineSource) -> _Selection:
    if source.where is not None:
        raise StoreError(
            f"source {source.location}@{source.where}: a dataset has no SQL; "
            "select when it is exported, by --where"
        )
    storage, dataset = open_dataset(source.location)
    name = _name(source, dataset.run_id)
    played = (
        check_part(table, size_of=dataset.size_of, name=name)
        for _, table in part_tables(storage, dataset)
    )
    return _selected(
        source,
        _groups_of(chain.from_iterable(played), name=name),
        run_id=dataset.run_id,
        size_of=dataset.size_of,
        tables=(table for _, table in part_tables(storage, dataset)),
    )


def _groups_of(
    played: Iterable[segment_rows.Played], *, name: str
) -> dict[bytes, list[segment_rows.Played]]:
    """Return the trajectories of each training group. One that stands in two files counts once.

    Held-out groups stay held out. Imported ones can be taken from the run they are from. Raises
    FormatError for a group of two tasks.
    """
    found: dict[bytes, dict[bytes, segment_rows.Played]] = {}
    task_ids: dict[bytes, str] = {}
    for one in played:
        check_one_task(one, task_ids, name=name)
        if one.split == TRAIN:
            found.setdefault(one.meta.group_uid, {}).setdefault(one.meta.traj_uid, one)
    return {group_uid: list(members.values()) for group_uid, members in found.items()}


def _selected(
    source: OfflineSource,
    groups: Mapping[bytes, Sequence[segment_rows.Played]],
    *,
    run_id: str,
    size_of: Callable[[bytes], int],
    tables: Iterable[pa.Table],
) -> _Selection:
    """Return the selection of a source that is no run; `tables` has the rows of its `groups`."""
    records = [
        _record(group_uid, members, size=size_of(group_uid))
        for group_uid, members in groups.items()
    ]
    whole, n_incomplete = _whole_groups(pa.Table.from_pylist(records, schema=COLUMNS))
    return _Selection(
        source=source,
        run_id=run_id,
        groups=whole,
        n_incomplete=n_incomplete,
        is_dataset=True,
        tables=iter(tables),
    )


def _record(
    group_uid: bytes, members: Sequence[segment_rows.Played], *, size: int
) -> dict[str, Any]:
    metas = [played.meta for played in members]
    return {
        "group_uid": group_uid,
        "task_id": members[0].task_id,
        "size": size,
        "n_steps": sum(meta.n_steps for meta in metas),
        "n_won": sum(meta.won for meta in metas),
        "return_sum": sum(meta.episode_return for meta in metas),
        "version_min": min(meta.version_min for meta in metas),
        "version_max": max(meta.version_max for meta in metas),
        "members": [meta.traj_uid for meta in metas],
    }


def _whole_groups(groups: pa.Table) -> tuple[pa.Table, int]:
    """Return the groups with all their trajectories, and the number of the others."""
    whole = groups.filter(pc.equal(pc.list_value_length(groups["members"]), groups["size"]))
    return whole, len(groups) - len(whole)


def check_tokens(table: pa.Table, *, name: str, source: OfflineSource) -> None:
    """Raise FormatError for rows of a source that the learner of its model cannot train on."""
    segment_rows.check_trainable(table, name=name)
    largest = segment_rows.largest_token(table)
    if source.n_tokens is not None and largest >= source.n_tokens:
        raise FormatError(
            f"{name} has the token id {largest}, and the model knows {source.n_tokens} tokens; use "
            "a source that was played with the same model"
        )
    longest, step = segment_rows.longest_step(table)
    if source.max_tokens is not None and longest > source.max_tokens:
        raise FormatError(
            f"{name}: {step} has {longest:,} tokens, prompt and response together, more than the "
            f"{source.max_tokens:,} of prompt.max_prompt_tokens + actors.max_response_tokens; "
            "raise them in a new run_dir, or leave its group out"
        )


def _written(
    catalog: Catalog, layout: RunLayout, *, selection: _Selection
) -> list[ImportedSegment]:
    """Write all rows of the selected groups that are not here."""
    uids = selection.groups["group_uid"].to_pylist()
    sizes = dict(zip(uids, selection.groups["size"].to_pylist(), strict=True))
    name = _name(selection.source, selection.run_id)
    rows = NewRows(
        catalog, layout, run_id=selection.run_id, size_of=sizes.__getitem__, worker=WORKER
    )
    missing = set(pc.list_flatten(selection.groups["members"]).to_pylist())
    for table in _rows(selection):
        for piece in _pieces(table, name=name):
            check_tokens(piece, name=name, source=selection.source)
            rows.write(piece, name=name)
            missing.difference_update(piece["traj_uid"].unique().to_pylist())
    if missing:
        raise FormatError(
            f"{name}: its files lack trajectory {uid_text(min(missing))}, which its views show; "
            "look at it with gigpo fsck, or leave its group out"
        )
    return rows.segments


def _name(source: OfflineSource, run_id: str) -> str:
    return f"source {source.location} (run {run_id})"


def _rows(selection: _Selection) -> Iterator[pa.Table]:
    """Yield the rows of the selected groups, once."""
    uids = selection.groups["group_uid"].combine_chunks()
    for table in selection.tables:
        yield table.filter(pc.is_in(table["group_uid"], value_set=uids))


def _pieces(table: pa.Table, *, name: str) -> Iterator[pa.Table]:
    """Yield slices of whole groups with at least FILE_STEPS rows, the last with the rest.

    Raises FormatError, which has the name of the rows.
    """
    if not len(table):
        return
    try:
        table = in_group_order([table])
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from error
    uids = table["group_uid"].combine_chunks().dictionary_encode().indices.to_numpy()
    starts = np.flatnonzero(np.diff(uids, prepend=-1))  # of each group
    begin = 0
    for start in (*starts[1:], len(table)):
        if start - begin >= FILE_STEPS or start == len(table):
            yield table.slice(begin, start - begin)
            begin = start


def _report(selection: _Selection) -> TakenSource:
    """Count the groups of a narrowed selection."""
    return TakenSource(
        source=selection.source,
        run_id=selection.run_id,
        n_groups=len(selection.groups),
        n_incomplete=selection.n_incomplete,
        is_dataset=selection.is_dataset,
    )

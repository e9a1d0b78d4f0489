"""Read the catalog's tables as Arrow, now or as of an earlier lsn, for readers without SQLite.

Tables that grow with the run are exported in parts. An export asks only for the rows that changed
since the last one, and merges small parts with newer ones. So a table has about log2(rows) parts,
and a row is written as often. A row that changed later is in two parts: readers take the newer one
(`views.sql`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from printable import one_line
from store.catalog.connection import check_pages, opened_read_only, raise_if_interrupted
from store.catalog.transaction import Transaction
from store.clock import SNAPSHOT_WINDOW_S
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.records import UID_TYPE
from store.run_names import SEGMENT_PATH, checked_name

MERGE_RATIO = 2  # a part is merged with a newer one at least half its size
TIME = pa.timestamp("us")  # UTC; without a zone, so that no reader needs a time zone database
TYPES = {
    "uid": UID_TYPE,
    "text": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "time": TIME,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedPart:
    """One exported file of a table: the rows that changed after lsn `since` and up to `until`."""

    path: str  # relative to the run's root
    since: int
    until: int
    n_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NewPart:
    """Rows to be exported. They replace all known parts that begin at `since` or later."""

    since: int
    table: pa.Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The catalog at one lsn: its live segments, and the rows that the reader does not have yet."""

    lsn: int
    segments: tuple[str, ...]  # paths relative to the run's root, oldest first
    new_parts: Mapping[str, NewPart]  # by table; tables that did not change are left out


@dataclass(frozen=True, kw_only=True, slots=True)
class AsOf:
    """The run at one lsn: the files that were live, and the exported tables that have a history."""

    segments: tuple[str, ...]
    tables: Mapping[str, pa.Table]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """One exported table."""

    columns: str  # "name type, name type"; types as in TYPES
    # the rows that were true at lsn :until, and those that changed after :since if it is named;
    # it gives `columns`, in this order
    query: str
    # the rows that were true at :until, where `query` cannot tell; empty: the table has no history
    as_of: str | None = None

    @property
    def in_parts(self) -> bool:
        return ":since" in self.query

    @property
    def schema(self) -> pa.Schema:
        columns = (column.split() for column in self.columns.split(","))
        return pa.schema([(name, TYPES[kind]) for name, kind in columns])


EXPORTS: Mapping[str, Export] = {
    "groups": Export(
        columns="""group_uid uid, split text, ordinal int64, task_id text, evaluated_version int64,
            size int32, n_members int32, n_steps int64, n_won int32, return_sum double, state text,
            reason text, version_min int64, version_max int64, opened_at time, completed_at time,
            changed_lsn int64, source text, weight double, success_before double,
            weighed_lsn int64""",
        query="""
            SELECT group_uid, split, ordinal, task_id, evaluated_version, size, n_members, n_steps,
                   n_won, return_sum, state, reason, version_min, version_max, opened_us,
                   completed_us, changed_lsn, source, weight, success_before, weighed_lsn
            FROM grp WHERE changed_lsn > :since AND changed_lsn <= :until
            ORDER BY opened_lsn, ordinal""",
        as_of="""
            SELECT g.group_uid, g.split, g.ordinal, g.task_id, g.evaluated_version, g.size,
                   count(t.traj_uid), coalesce(sum(t.n_steps), 0), coalesce(sum(t.won), 0),
                   coalesce(sum(t.episode_return), 0.0), s.state, s.reason, min(t.version_min),
                   max(t.version_max), g.opened_us,
                   CASE WHEN g.completed_lsn <= :until THEN g.completed_us END, s.lsn, g.source,
                   g.weight, g.success_before, g.weighed_lsn
            FROM grp g
            JOIN group_state s ON s.seq = (
                SELECT max(seq) FROM group_state WHERE group_uid = g.group_uid AND lsn <= :until)
            LEFT JOIN trajectory t ON t.group_uid = g.group_uid AND t.lsn <= :until
            WHERE g.opened_lsn <= :until GROUP BY g.group_uid ORDER BY g.opened_lsn, g.ordinal""",
    ),
    "ledger": Export(
        columns="group_uid uid, state text, reason text, lsn int64, at time",
        query="""
            SELECT group_uid, state, reason, lsn, at_us FROM group_state
            WHERE lsn > :since AND lsn <= :until ORDER BY seq""",
    ),
    # At an lsn within a refill the filtered groups are shown as claimed: the time of filtering is
    # recorded only when the batch is settled. The versions of an offline group are another run's:
    # it has no staleness here. A replayed group has none either, because max_staleness does not
    # bound its age.
    "lineage": Export(
        columns="""learner_step int64, batch_id int64, batch_state text, outcome text, live bool,
            group_uid uid, task_id text, version_min int64, version_max int64, version_in int64,
            staleness int64, claimed_at time, trained_at time, changed_lsn int64, use int32,
            source text""",
        query="""
            SELECT b.learner_step, b.batch_id, b.state AS batch_state, l.outcome, l.live,
                   l.group_uid, g.task_id, l.version_min, l.version_max,
                   coalesce(b.version_in, b.claimed_version) AS version_in,
                   iif(g.source IS NULL AND l.use = 1,
                       coalesce(b.version_in, b.claimed_version) - l.version_min, NULL)
                       AS staleness,
                   b.claimed_us, b.trained_us, l.changed_lsn, l.use, g.source
            FROM batch_group l JOIN batch b USING (batch_id) JOIN grp g USING (group_uid)
            WHERE l.changed_lsn > :since AND l.changed_lsn <= :until
            ORDER BY b.batch_id, g.ordinal""",
        as_of="""
            SELECT CASE WHEN b.trained_lsn <= :until THEN b.learner_step END, b.batch_id,
                   CASE WHEN b.rolled_back_lsn <= :until THEN 'rolled_back'
                        WHEN b.trained_lsn <= :until THEN 'trained' ELSE 'claimed' END,
                   CASE WHEN b.trained_lsn <= :until THEN l.outcome ELSE 'claimed' END,
                   coalesce(b.rolled_back_lsn > :until, 1), l.group_uid, g.task_id, l.version_min,
                   l.version_max, iif(b.trained_lsn <= :until, b.version_in, b.claimed_version),
                   iif(g.source IS NULL AND l.use = 1,
                       iif(b.trained_lsn <= :until, b.version_in, b.claimed_version)
                       - l.version_min, NULL),
                   b.claimed_us, CASE WHEN b.trained_lsn <= :until THEN b.trained_us END,
                   l.changed_lsn, l.use, g.source
            FROM batch b JOIN batch_group l USING (batch_id) JOIN grp g USING (group_uid)
            WHERE b.claimed_lsn <= :until
                AND NOT EXISTS (  -- a group that a refill added later
                    SELECT 1 FROM group_state s WHERE s.group_uid = l.group_uid
                    AND s.state = 'claimed' AND s.reason = 'batch ' || l.batch_id
                    AND s.lsn > :until)
            ORDER BY b.batch_id, g.ordinal""",
    ),
    "critic": Export(
        columns="batch_id int64, traj_uid uid, state_values text, lsn int64",
        query="""
            SELECT batch_id, traj_uid, state_values, lsn FROM critic_value
            WHERE lsn > :since AND lsn <= :until ORDER BY batch_id, traj_uid""",
    ),
    "versions": Export(
        columns="""version int64, path text, digest text, learner_step int64, epoch int64,
            published_at time""",
        query="""
            SELECT version, path, digest, learner_step, epoch, published_us
            FROM version WHERE lsn <= :until ORDER BY version""",
    ),
    "checkpoints": Export(
        columns="learner_step int64, path text, version int64, live bool, saved_at time",
        query="""
            SELECT learner_step, path, version, live OR changed_lsn > :until, saved_us
            FROM checkpoint WHERE lsn <= :until ORDER BY lsn""",
    ),
    "metrics": Export(
        columns="""learner_step int64, policy_version int64, name text, value double, live bool,
            lsn int64, changed_lsn int64""",
        query="""
            SELECT learner_step, policy_version, name, value, live, lsn, changed_lsn FROM metric
            WHERE changed_lsn > :since AND changed_lsn <= :until ORDER BY learner_step, name""",
        as_of="""
            SELECT learner_step, policy_version, name, value, live OR changed_lsn > :until, lsn,
                   changed_lsn
            FROM metric WHERE lsn <= :until ORDER BY learner_step, name""",
    ),
    "component": Export(
        columns="name text, waiting_on text, last_beat_at time",
        query="SELECT name, waiting_on, beat_us FROM component ORDER BY name",
        as_of="",
    ),
    "events": Export(
        columns="at time, component text, what text, detail text, lsn int64",
        query="""
            SELECT at_us, component, what, detail, lsn FROM event
            WHERE lsn > :since AND lsn <= :until ORDER BY event_id""",
    ),
    "unfinished": Export(
        columns="""group_uid uid, split text, task_id text, number int32, worker text,
            version int64, why text, n_steps int32, n_response_tokens int64, begun_at time,
            ended_at time, lsn int64""",
        query="""
            SELECT u.group_uid, g.split, g.task_id, u.number, u.worker, u.version, u.why,
                   u.n_steps, u.n_response_tokens, u.begun_us, u.ended_us, u.lsn
            FROM unfinished u JOIN grp g USING (group_uid)
            WHERE u.lsn > :since AND u.lsn <= :until ORDER BY u.unfinished_id""",
    ),
    "excluded": Export(  # rows of live segments that do not count
        columns="path text, traj_uid uid",
        query="""
            SELECT s.path, d.traj_uid FROM duplicate d CROSS JOIN segment s USING (segment_id)
            WHERE s.lsn <= :until AND (s.retired_lsn IS NULL OR s.retired_lsn > :until)
            ORDER BY s.path""",
    ),
}
SEGMENTS_AS_OF = """
    SELECT path FROM segment
    WHERE lsn <= :until AND (retired_lsn IS NULL OR retired_lsn > :until) ORDER BY lsn"""


def take_snapshot(tx: Transaction, *, known: Mapping[str, tuple[ExportedPart, ...]]) -> Snapshot:
    """Return the catalog now: its segments, and all rows that `known` parts do not have.

    Tables and segments belong together, because one transaction reads them all.
    """
    until = tx.lsn - 1  # the last committed lsn: this transaction changes nothing
    changed = {row["name"]: row["lsn"] for row in tx.rows("SELECT name, lsn FROM changed")}
    new_parts = {
        name: _new_part(tx, export, parts=known.get(name, ()), until=until)
        for name, export in EXPORTS.items()
        if name not in known or changed.get(touched_name(name), 0) > known[name][-1].until
    }
    segments = tx.rows("SELECT path FROM segment WHERE retired_lsn IS NULL ORDER BY lsn")
    return Snapshot(lsn=until, segments=tuple(row["path"] for row in segments), new_parts=new_parts)


def read_as_of(layout: RunLayout, lsn: int, *, in_place: bool = False) -> AsOf:
    """Return the rows and files that readers would have seen at `lsn`. The owner is not disturbed.

    `in_place` as for `opened_read_only`. Raises StoreError if `lsn` is in the future, or so old
    that its files are gone.
    """
    try:
        with opened_read_only(layout, in_place=in_place) as connection:
            check_pages(connection, layout)
            connection.execute("BEGIN")  # one moment for all queries
            meta = connection.execute("SELECT lsn, horizon_lsn FROM meta").fetchone()
            if meta is None:
                raise sqlite3.DatabaseError("malformed table meta: it has no row")
            newest, horizon = meta
            if not horizon <= lsn <= newest:
                window = f"{SNAPSHOT_WINDOW_S / 60:g} minutes"
                raise StoreError(
                    f"lsn {lsn} is not between {horizon} and {newest}; files of older snapshots "
                    f"were removed; a training run keeps them for {window}"
                )
            bounds = {"since": 0, "until": lsn}
            tables = {}
            for name, export in EXPORTS.items():
                if query := export.query if export.as_of is None else export.as_of:
                    tables[name] = arrow_table(export, connection.execute(query, bounds).fetchall())
            segments = connection.execute(SEGMENTS_AS_OF, bounds).fetchall()
    except sqlite3.Error as error:
        raise_if_interrupted(error)
        raise FormatError(
            f"{layout.catalog} cannot be read ({error}); leave out the lsn to read the manifest"
        ) from error
    paths = tuple(checked_name(row[0], SEGMENT_PATH, where=str(layout.catalog)) for row in segments)
    return AsOf(segments=paths, tables=tables)


def touched_name(name: str) -> str:
    """Return the name that transactions `touch` for an exported table."""
    return "groups" if name == "ledger" else name  # the ledger changes together with its groups


def arrow_table(export: Export, rows: Sequence[Iterable[object]]) -> pa.Table:
    """Convert rows of the export's query to Arrow."""
    schema = export.schema
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [_array(values, field) for values, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _new_part(
    tx: Transaction, export: Export, *, parts: tuple[ExportedPart, ...], until: int
) -> NewPart:
    if not export.in_parts:
        return NewPart(since=0, table=arrow_table(export, tx.rows(export.query, until=until)))
    since = parts[-1].until if parts else 0
    rows = tx.rows(export.query, since=since, until=until)
    n_rows, first = len(rows), len(parts)
    while first > 0 and parts[first - 1].n_rows <= MERGE_RATIO * n_rows:
        first -= 1
        n_rows += parts[first].n_rows
    if first < len(parts):
        since = parts[first].since
        rows = tx.rows(export.query, since=since, until=until)
    return NewPart(since=since, table=arrow_table(export, rows))


def _array(values: tuple[object, ...], field: pa.Field) -> pa.Array:
    if field.type == pa.bool_():
        values = tuple(None if value is None else bool(value) for value in values)
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise FormatError(
            f"the catalog has a {field.name} out of range ({one_line(error)}); put a backup of "
            "catalog.sqlite back"
        ) from error

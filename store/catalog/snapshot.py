"""The catalog's tables as Arrow, for readers that cannot open SQLite. One query and one schema
each.

Tables that grow with the run are exported in parts: only the rows that changed since the last
export are asked for, and small parts are asked for again together with newer ones, so that a table
has about log2(rows) parts and a row is written as often. A row that changed later is in two parts;
readers take the newer one (`views.sql`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from store.catalog.database import Transaction
from store.errors import FormatError
from store.records import UID_TYPE

MERGE_RATIO = 2  # a part is merged with a newer one at least half its size
TIME = pa.timestamp("us")  # UTC; without a zone, so that no reader needs a time zone database


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One exported file of a table: its rows that changed after `since` and up to `until`, both
    lsns.
    """

    path: str  # relative to the run's root
    since: int
    until: int
    n_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NewPart:
    """Rows to be exported as one more part, which replaces all known parts that begin at `since` or
    later.
    """

    since: int
    table: pa.Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The catalog at one lsn: the live segments, and what the reader does not know yet of each
    table.
    """

    lsn: int
    segments: tuple[str, ...]  # paths relative to the run's root, oldest first
    new_parts: Mapping[str, NewPart]  # by table; tables that did not change are left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """One exported table: its columns are those of `query`, in the order of `schema`."""

    query: str
    schema: pa.Schema
    in_parts: bool  # whether `query` is bounded by :since and :until


EXPORTS: Mapping[str, Export] = {
    "groups": Export(
        query="""SELECT group_uid, split, ordinal, task_id, purpose_version, size, n_members, n_steps, n_won,
                        return_sum, state, reason, version_min, version_max, opened_us, completed_us, changed_lsn,
                        source
                 FROM grp WHERE changed_lsn > :since AND changed_lsn <= :until ORDER BY opened_lsn, ordinal""",
        schema=pa.schema(
            [
                ("group_uid", UID_TYPE),
                ("split", pa.string()),
                ("ordinal", pa.int64()),
                ("task_id", pa.string()),
                ("purpose_version", pa.int64()),
                ("size", pa.int32()),
                ("n_members", pa.int32()),
                ("n_steps", pa.int64()),
                ("n_won", pa.int32()),
                ("return_sum", pa.float64()),
                ("state", pa.string()),
                ("reason", pa.string()),
                ("version_min", pa.int64()),
                ("version_max", pa.int64()),
                ("opened_at", TIME),
                ("completed_at", TIME),
                ("changed_lsn", pa.int64()),
                ("source", pa.string()),
            ]
        ),
        in_parts=True,
    ),
    "ledger": Export(
        query="""SELECT group_uid, state, reason, lsn, at_us FROM group_state
                 WHERE lsn > :since AND lsn <= :until ORDER BY seq""",
        schema=pa.schema(
            [
                ("group_uid", UID_TYPE),
                ("state", pa.string()),
                ("reason", pa.string()),
                ("lsn", pa.int64()),
                ("at", TIME),
            ]
        ),
        in_parts=True,
    ),
    "lineage": Export(
        query="""SELECT b.learner_step, b.batch_id, b.state AS batch_state, l.outcome, l.live, l.group_uid, g.task_id,
                        l.version_min, l.version_max, coalesce(b.version_in, b.claimed_version) AS version_in,
                        -- the versions of a offline group are another run's: their difference says nothing
                        iif(g.source IS NULL, coalesce(b.version_in, b.claimed_version) - l.version_min, NULL) AS staleness,
                        b.claimed_us, b.trained_us, l.changed_lsn, l.use, g.source
                 FROM batch_group l JOIN batch b USING (batch_id) JOIN grp g USING (group_uid)
                 WHERE l.changed_lsn > :since AND l.changed_lsn <= :until ORDER BY b.batch_id, g.ordinal""",
        schema=pa.schema(
            [
                ("learner_step", pa.int64()),
                ("batch_id", pa.int64()),
                ("batch_state", pa.string()),
                ("outcome", pa.string()),
                ("live", pa.bool_()),
                ("group_uid", UID_TYPE),
                ("task_id", pa.string()),
                ("version_min", pa.int64()),
                ("version_max", pa.int64()),
                ("version_in", pa.int64()),
                ("staleness", pa.int64()),
                ("claimed_at", TIME),
                ("trained_at", TIME),
                ("changed_lsn", pa.int64()),
                ("use", pa.int32()),
                ("source", pa.string()),
            ]
        ),
        in_parts=True,
    ),
    "versions": Export(
        query="SELECT version, path, digest, learner_step, epoch, published_us FROM version ORDER BY version",
        schema=pa.schema(
            [
                ("version", pa.int64()),
                ("path", pa.string()),
                ("digest", pa.string()),
                ("learner_step", pa.int64()),
                ("epoch", pa.int64()),
                ("published_at", TIME),
            ]
        ),
        in_parts=False,
    ),
    "checkpoints": Export(
        query="SELECT learner_step, path, version, live, saved_us FROM checkpoint ORDER BY lsn",
        schema=pa.schema(
            [
                ("learner_step", pa.int64()),
                ("path", pa.string()),
                ("version", pa.int64()),
                ("live", pa.bool_()),
                ("saved_at", TIME),
            ]
        ),
        in_parts=False,
    ),
    "metrics": Export(
        query="""SELECT learner_step, policy_version, name, value, live, lsn, changed_lsn FROM metric
                 WHERE changed_lsn > :since AND changed_lsn <= :until ORDER BY learner_step, name""",
        schema=pa.schema(
            [
                ("learner_step", pa.int64()),
                ("policy_version", pa.int64()),
                ("name", pa.string()),
                ("value", pa.float64()),
                ("live", pa.bool_()),
                ("lsn", pa.int64()),
                ("changed_lsn", pa.int64()),
            ]
        ),
        in_parts=True,
    ),
    "component": Export(
        query="SELECT name, waiting_on, beat_us FROM component ORDER BY name",
        schema=pa.schema(
            [("name", pa.string()), ("waiting_on", pa.string()), ("last_beat_at", TIME)]
        ),
        in_parts=False,
    ),
    "events": Export(
        query="""SELECT at_us, component, what, detail, lsn FROM event
                 WHERE lsn > :since AND lsn <= :until ORDER BY event_id""",
        schema=pa.schema(
            [
                ("at", TIME),
                ("component", pa.string()),
                ("what", pa.string()),
                ("detail", pa.string()),
                ("lsn", pa.int64()),
            ]
        ),
        in_parts=True,
    ),
    "unfinished": Export(
        query="""SELECT u.group_uid, g.split, g.task_id, u.number, u.worker, u.version, u.why, u.n_steps,
                        u.n_response_tokens, u.begun_us, u.ended_us, u.lsn
                 FROM unfinished u JOIN grp g USING (group_uid)
                 WHERE u.lsn > :since AND u.lsn <= :until ORDER BY u.unfinished_id""",
        schema=pa.schema(
            [
                ("group_uid", UID_TYPE),
                ("split", pa.string()),
                ("task_id", pa.string()),
                ("number", pa.int32()),
                ("worker", pa.string()),
                ("version", pa.int64()),
                ("why", pa.string()),
                ("n_steps", pa.int32()),
                ("n_response_tokens", pa.int64()),
                ("begun_at", TIME),
                ("ended_at", TIME),
                ("lsn", pa.int64()),
            ]
        ),
        in_parts=True,
    ),
    "excluded": Export(  # rows of live segments that do not count
        query="""SELECT s.path, d.traj_uid FROM duplicate d JOIN segment s USING (segment_id)
                 WHERE s.retired_lsn IS NULL ORDER BY s.path""",
        schema=pa.schema([("path", pa.string()), ("traj_uid", UID_TYPE)]),
        in_parts=False,
    ),
}


def take_snapshot(tx: Transaction, *, known: Mapping[str, tuple[Part, ...]]) -> Snapshot:
    """All of it from one transaction, so that the tables and the list of segments belong
    together.
    """
    until = tx.lsn - 1  # nothing is touched here: the last committed one
    changed = {row["name"]: row["lsn"] for row in tx.rows("SELECT name, lsn FROM changed")}
    new_parts = {
        name: _new_part(tx, export, parts=known.get(name, ()), until=until)
        for name, export in EXPORTS.items()
        if name not in known or changed.get(export_trigger(name), 0) > known[name][-1].until
    }
    segments = tx.rows("SELECT path FROM segment WHERE retired_lsn IS NULL ORDER BY lsn")
    return Snapshot(lsn=until, segments=tuple(row["path"] for row in segments), new_parts=new_parts)


def empty_tables() -> dict[str, pa.Table]:
    """Every exported table without rows: what a run shows before its first commit."""
    return {name: export.schema.empty_table() for name, export in EXPORTS.items()}


def export_trigger(name: str) -> str:
    """The name under which transactions `touch` an exported table: the ledger changes with its
    groups.
    """
    return "groups" if name == "ledger" else name


def arrow_table(export: Export, rows: Sequence[Iterable[object]]) -> pa.Table:
    """Rows of the export's query as Arrow."""
    columns = zip(*rows, strict=True) if rows else [()] * len(export.schema)
    arrays = [_array(values, field) for values, field in zip(columns, export.schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=export.schema)


def _new_part(tx: Transaction, export: Export, *, parts: tuple[Part, ...], until: int) -> NewPart:
    if not export.in_parts:
        return NewPart(since=0, table=arrow_table(export, tx.rows(export.query)))
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
        why = " ".join(str(error).split())
        raise FormatError(
            f"the catalog has a {field.name} out of range ({why}); put a backup of catalog.sqlite "
            "back"
        ) from error

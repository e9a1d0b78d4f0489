"""The catalog's tables as Arrow, for readers that cannot open SQLite. One query and one schema each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from store.catalog.database import Transaction
from store.records import UID_TYPE

TIME = pa.timestamp("us")  # UTC; without a zone, so that no reader needs a time zone database


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The catalog at one lsn: the live segments and those tables the reader did not know yet."""

    lsn: int
    segments: tuple[str, ...]  # paths relative to the run's root, oldest first
    table_lsns: Mapping[str, int]  # lsn of the last change of every exported table
    tables: Mapping[str, pa.Table]  # only those newer than the reader's


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """One exported table: its columns are those of `query`, in the order of `schema`."""

    query: str
    schema: pa.Schema


EXPORTS: Mapping[str, Export] = {
    "groups": Export(
        query="""SELECT group_uid, split, ordinal, task_id, purpose_version, size, n_members, n_steps, n_won,
                        return_sum, state, reason, version_min, version_max, opened_us, completed_us
                 FROM grp ORDER BY opened_lsn, ordinal""",
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
            ]
        ),
    ),
    "lineage": Export(
        query="""SELECT b.learner_step, b.batch_id, b.state AS batch_state, l.outcome, l.live, l.group_uid, g.task_id,
                        g.version_min, g.version_max, coalesce(b.version_in, b.claimed_version) AS version_in,
                        coalesce(b.version_in, b.claimed_version) - g.version_min AS staleness,
                        v.digest AS oldest_weights_digest, b.claimed_us, b.trained_us
                 FROM batch b JOIN batch_group l USING (batch_id) JOIN grp g USING (group_uid)
                      LEFT JOIN version v ON v.version = g.version_min
                 ORDER BY b.batch_id, g.ordinal""",
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
                ("oldest_weights_digest", pa.string()),
                ("claimed_at", TIME),
                ("trained_at", TIME),
            ]
        ),
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
    ),
    "metrics": Export(  # bare columns beside max() come from the row that has it
        query="""SELECT learner_step, policy_version, name, value FROM
                     (SELECT learner_step, policy_version, name, value, max(lsn) FROM metric WHERE live = 1
                      GROUP BY learner_step, policy_version, name)
                 ORDER BY learner_step, name""",
        schema=pa.schema(
            [
                ("learner_step", pa.int64()),
                ("policy_version", pa.int64()),
                ("name", pa.string()),
                ("value", pa.float64()),
            ]
        ),
    ),
    "component": Export(
        query="SELECT name, waiting_on, beat_us FROM component ORDER BY name",
        schema=pa.schema([("name", pa.string()), ("waiting_on", pa.string()), ("last_beat_at", TIME)]),
    ),
    "events": Export(
        query="SELECT at_us, component, what, detail FROM event ORDER BY event_id",
        schema=pa.schema([("at", TIME), ("component", pa.string()), ("what", pa.string()), ("detail", pa.string())]),
    ),
    "excluded": Export(  # rows of live segments that do not count
        query="SELECT s.path, d.traj_uid FROM duplicate d JOIN segment s USING (segment_id) ORDER BY s.path",
        schema=pa.schema([("path", pa.string()), ("traj_uid", UID_TYPE)]),
    ),
}


def take_snapshot(tx: Transaction, *, known: Mapping[str, int]) -> Snapshot:
    """All of it from one transaction, so that the tables and the list of segments belong together."""
    changed = {row["name"]: row["lsn"] for row in tx.rows("SELECT name, lsn FROM changed")}
    table_lsns = {name: changed.get(name, 0) for name in EXPORTS}
    return Snapshot(
        lsn=tx.lsn - 1,  # nothing is touched here: the last committed one
        segments=tuple(row["path"] for row in tx.rows("SELECT path FROM segment WHERE retired_lsn IS NULL ORDER BY lsn")),
        table_lsns=table_lsns,
        tables={name: _table(tx, export) for name, export in EXPORTS.items() if known.get(name) != table_lsns[name]},
    )


def empty_tables() -> dict[str, pa.Table]:
    """Every exported table without rows: what a run shows before its first commit."""
    return {name: export.schema.empty_table() for name, export in EXPORTS.items()}


def _table(tx: Transaction, export: Export) -> pa.Table:
    rows = tx.rows(export.query)
    columns = zip(*rows, strict=True) if rows else [()] * len(export.schema)
    arrays = [_array(values, field.type) for values, field in zip(columns, export.schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=export.schema)


def _array(values: tuple[object, ...], kind: pa.DataType) -> pa.Array:
    if kind == pa.bool_():
        values = tuple(None if value is None else bool(value) for value in values)
    return pa.array(values, kind)

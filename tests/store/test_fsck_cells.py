"""Every cell of the catalog is changed, one at a time: fsck names the change, or a reason says why
nobody can know it.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from cli.__main__ import main
from store import Catalog, RunLayout, StoreError
from store.errors import FormatError
from store.maintenance.backup import write_backup
from store.maintenance.fsck import CONTENTS, check
from tests.support.sizes import some
from tests.support.store_damage import ask, edit
from tests.support.store_runs import fingerprint
from tests.support.store_samples import open_train_group, play

COLUMNS = """SELECT m.name, c.name, c.type
             FROM sqlite_schema m, pragma_table_info(m.name) c WHERE m.type = 'table'"""
UNKNOWN = {  # cells whose value is nowhere else
    "meta.lsn": "a larger one only leaves numbers out; a smaller one is found",
    "meta.epoch": "a larger one only fences workers; a smaller one is found",
    "meta.horizon_lsn": "how old a snapshot may be is told by nothing else",
    "changed.lsn": "a smaller one only delays an export of what changed",
    "changed.name": "a name that is none of an exported table is not read",
    "segment.lsn": "the order of files; files do not know their own",
    "segment.retired_lsn": "when a file was retired is exported nowhere",
    "segment.committed_us": "a time of the catalog alone",
    "segment.level": "how often rows were merged: it only steers compaction",
    "segment.retired_us": "a time of the catalog alone",
    "segment.retired_why": "all reasons to retire a file are alike for its readers",
    "segment.removed_us": "a time of the catalog alone",
    "grp.opened_lsn": "the order of groups; it is in no export",
    "grp.completed_lsn": "a number of the catalog alone",
    "grp.lease_worker": "leases end with the owner",
    "grp.lease_until_us": "leases end with the owner",
    "group_state.seq": "the order of lines; it is in no export",
    "trajectory.lsn": "when a trajectory came is exported nowhere",
    "unfinished.unfinished_id": "the order of lines; it is in no export",
    "batch.epoch": "whose batch it was is exported nowhere",
    "batch.claimed_version": "exported only until the batch is trained on",
    "batch.claimed_lsn": "a number of the catalog alone",
    "batch.trained_lsn": "a number of the catalog alone",
    "batch.rolled_back_lsn": "a number of the catalog alone",
    "version.lsn": "a number of the catalog alone",
    "checkpoint.lsn": "a number of the catalog alone",
    "checkpoint.changed_lsn": "a number of the catalog alone",
    "component.name": "heartbeats of the last second",
    "component.waiting_on": "heartbeats of the last second",
    "component.beat_us": "heartbeats of the last second",
    "event.event_id": "the order of lines; it is in no export",
    "sqlite_sequence.name": "SQLite goes on from the largest number in the table",
    "sqlite_sequence.seq": "a larger one only leaves numbers out, but for one without end",
}


def cells(layout: RunLayout) -> list[tuple[str, str, str]]:
    """Return table, column and type. SQLite's own table has none."""
    return [
        (table, column, kind or {"name": "TEXT", "seq": "INTEGER"}[column])
        for table, column, kind in ask(layout, COLUMNS)
    ]


def changed(table: str, column: str, kind: str) -> str:
    """Another value of the same type, in the first row that has one."""
    value = {
        "INTEGER": f"{column} + 1000",
        "REAL": f"{column} + 1.5",
        "TEXT": f"{column} || 'x'",
        "BLOB": "randomblob(16)",
    }[kind]
    key = {"batch_group": "(batch_id, group_uid)", "duplicate": "(segment_id, traj_uid)"}.get(
        table, column
    )
    if column == "live":
        value = "1 - live"
    names = key.strip("()")
    where = f"{key} = (SELECT {names} FROM {table} WHERE {column} IS NOT NULL LIMIT 1)"
    return f"UPDATE OR IGNORE {table} SET {column} = {value} WHERE {where}"


def is_seen(layout: RunLayout) -> bool:
    """Return whether fsck names an error, or says which number it cannot read."""
    try:
        return any(finding.severity == "error" for finding in check(layout, level=CONTENTS))
    except FormatError:
        return True


def restore(layout: RunLayout, whole: bytes) -> None:
    layout.catalog.write_bytes(whole)


def test_every_changed_cell_is_named_or_listed_with_a_reason(layout: RunLayout) -> None:
    whole, unseen, without_value = layout.catalog.read_bytes(), [], []
    for table, column, kind in cells(layout):
        if f"{table}.{column}" in UNKNOWN:
            continue
        restore(layout, whole)
        with closing(sqlite3.connect(layout.catalog, isolation_level=None)) as connection:
            for (name,) in connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
            ).fetchall():
                connection.execute(f"DROP TRIGGER {name}")
            connection.execute("PRAGMA ignore_check_constraints = ON")
            if connection.execute(changed(table, column, kind)).rowcount == 0:
                without_value.append(f"{table}.{column}")
                continue
        if not is_seen(layout):
            unseen.append(f"{table}.{column}")
    assert unseen == []
    assert UNKNOWN.keys() <= {f"{table}.{column}" for table, column, _ in cells(layout)}
    assert set(without_value) <= {"grp.source", *LOST}, without_value


LOST = {
    f"lost_trajectory.{name}"
    for name in ("traj_uid", "group_uid", "member", "segment_id", "reason", "lsn")
}
ROW = "WHERE path = (SELECT min(path) FROM segment WHERE retired_lsn IS NULL)"


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE segment SET digest = '{'0' * 32}' {ROW}",
        f"UPDATE segment SET n_bytes = n_bytes + 1 {ROW}",
        f"UPDATE segment SET n_bytes = -1, digest = 'x' {ROW}",
        f"UPDATE segment SET n_steps = n_steps - 1 {ROW}",
        f"UPDATE segment SET worker = 'stranger' {ROW}",
        f"UPDATE segment SET epoch = 0 {ROW}",
        f"UPDATE segment SET digest = '{'0' * 32}' WHERE retired_lsn IS NOT NULL",
    ],
)
def test_an_intact_file_whose_row_was_changed_stays_and_the_row_is_set_right(
    layout: RunLayout, change: str
) -> None:
    before, files = ask(layout, "SELECT * FROM segment ORDER BY path"), fingerprint(layout.segments)
    edit(change)(layout)
    assert {finding.what for finding in check(layout, level=CONTENTS)} == {"segment_row"}
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    assert ask(layout, "SELECT * FROM segment ORDER BY path") == before
    assert fingerprint(layout.segments) == files
    assert not list(layout.quarantine.glob("*"))
    assert check(layout, level=CONTENTS) == []


@pytest.mark.shortened
@pytest.mark.parametrize(
    "change",
    some(
        [
            "UPDATE grp SET size = 2 * 1000 * 1000 * 1000 * 1000",
            "UPDATE unfinished SET number = 1 << 40",
            "UPDATE grp SET opened_us = -9223372036854775807, completed_us = 9223372036854775807",
            "UPDATE batch SET claimed_us = 9223372036854775807",
            "UPDATE metric SET value = 9e999",
            "UPDATE grp SET group_uid = x'00' WHERE state = 'open'",
            "UPDATE event SET at_us = 9223372036854775807",
        ],
        every=2,
    ),
)
def test_numbers_out_of_range_are_one_line(
    layout: RunLayout, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(change)(layout)
    (lsn,) = ask(layout, "SELECT lsn FROM meta")[0]
    for arguments in (
        ["fsck", str(layout.root)],
        ["sql", str(layout.root), "FROM groups", "--as-of", str(lsn), "--format", "csv"],
        ["fsck", "--repair", str(layout.root)],
        ["rebuild", "--force", str(layout.root)],
    ):
        main(arguments)
        assert "Traceback" not in capsys.readouterr().err
    with Catalog.open(layout):  # rebuilt
        assert check(layout, level=CONTENTS) == []


COUNTERS = {
    "sqlite_sequence": "UPDATE sqlite_sequence SET seq = {} WHERE name = 'batch'",
    "text": "UPDATE sqlite_sequence SET seq = '{}' || 'x' WHERE name = 'batch'",
    "group_state": "UPDATE group_state SET seq = {} WHERE seq = (SELECT max(seq) FROM group_state)",
    "event": "UPDATE event SET event_id = {} WHERE event_id = (SELECT max(event_id) FROM event)",
    "epoch": "UPDATE meta SET epoch = {}",
    "lsn": "UPDATE meta SET lsn = {}",
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_at_its_end_is_named_and_copied_to_no_backup(
    name: str, layout: RunLayout
) -> None:
    """The attack: fsck called such a run whole, and nothing could be added to it any more."""
    change = edit(COUNTERS[name].format(2**62 - 1))
    backup = layout.backup.read_bytes()
    change(layout)
    assert "counter" in {finding.what for finding in check(layout, level=CONTENTS)}
    with (
        pytest.raises(StoreError, match="counter"),
        closing(sqlite3.connect(layout.catalog)) as copy,
    ):
        write_backup(copy, layout)
    assert layout.backup.read_bytes() == backup
    assert main(["rebuild", "--force", str(layout.root)]) == 0
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 50), version=0)
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *[("event", "detail"), ("group_state", "reason"), ("version", "digest")],
        *[("component", "name"), ("meta", "run_id"), ("grp", "task_id")],
    ],
)
def test_a_text_that_is_no_utf_8_is_named_and_a_rebuild_mends_it(
    layout: RunLayout, table: str, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One flipped bit makes one. fsck ended at it, and blamed the permissions."""
    first = f"SELECT min({column}) FROM {table}"
    edit(
        f"UPDATE {table} SET {column} = CAST(x'41ff' AS TEXT) WHERE {column} = ({first})",
    )(layout)
    findings = check(layout, level=CONTENTS)
    assert [finding.what for finding in findings] == ["catalog_damaged"]
    assert "UTF-8" in findings[0].detail and column in findings[0].detail
    for command in (["fsck", "--repair"], ["fsck"]):
        assert main([*command, str(layout.root)]) == 1
        assert f"gigpo rebuild {layout.root}" in capsys.readouterr().out
    assert main(["rebuild", str(layout.root)]) == 0
    assert not [one for one in check(layout, level=CONTENTS) if one.severity == "error"]

"""A catalog of our schema may hold any rows: the work of checking it grows as its size does."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from store import Catalog, RunLayout
from store.catalog.schema_check import SCHEMA
from store.maintenance.fsck import CATALOG, NAMES, check
from store.maintenance.fsck_catalog import MAX_FINDINGS, check_catalog
from store.maintenance.repair import repair
from store.storage import LocalStorage, StoredFile
from tests.support.program import gigpo
from tests.support.store_damage import edit

ENDS_WITHIN_S = 60  # an attack that succeeded took longer
N_ROWS = 3_000  # of each kind; a catalog of 1.4 MB
STEPS_OF_ROW = 5_000  # of SQLite's machine, for all rules; the rules below need up to 500

NUMBERS = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {N_ROWS})"
GROUP_COLUMNS = (
    "group_uid, split, ordinal, task_id, size, state, n_members, n_steps, n_won, return_sum, "
    "opened_lsn, opened_us, changed_lsn"
)
GROUP_VALUES = "'train', 7, 'task', 2, 'open', 0, 0, 0, 0, 1, 1, 1"
# 3,000 results of one task that have the same place in their order, and 3,000 draws after them.
DRAWS = (
    f"INSERT INTO grp ({GROUP_COLUMNS}, completed_lsn) {NUMBERS} "
    f"SELECT CAST(printf('%016d', i) AS BLOB), {GROUP_VALUES}, 1 FROM n",
    f"INSERT INTO grp ({GROUP_COLUMNS}, weight, weighed_lsn, success_before) {NUMBERS} "
    f"SELECT CAST(printf('d%015d', i) AS BLOB), {GROUP_VALUES}, 1, 1, 0.77 FROM n",
)
UID = "CAST(printf('%016d', i) AS BLOB)"
VERSIONS = f"INSERT INTO version {NUMBERS} SELECT i, 'p', 'd', i, 1, 1, i FROM n"
BATCHES = (
    "INSERT INTO batch (batch_id, epoch, state, claimed_version, learner_step, claimed_us, "
    f"claimed_lsn) {NUMBERS} SELECT i, 1, 'trained', 1, i, 1, 1 FROM n"
)
WORK = {
    "success_before": DRAWS,
    "drawn_by": (
        VERSIONS,
        f"INSERT INTO grp ({GROUP_COLUMNS}, weight, weighed_lsn) {NUMBERS} "
        f"SELECT {UID}, {GROUP_VALUES}, 1, i FROM n",
    ),
    "group_batch": (
        BATCHES,
        f"INSERT INTO grp ({GROUP_COLUMNS}) {NUMBERS} SELECT {UID}, {GROUP_VALUES} FROM n",
        f"INSERT INTO batch_group (batch_id, group_uid, live, outcome) {NUMBERS} "
        f"SELECT i, {UID}, 1, 'trained' FROM n",
    ),
    "unknown_version": (
        BATCHES,
        f"INSERT INTO grp ({GROUP_COLUMNS}) SELECT x'00', {GROUP_VALUES}",
        f"INSERT INTO batch_group (batch_id, group_uid, live, outcome) {NUMBERS} "
        "SELECT i, x'00', 0, 'trained' FROM n",
        "INSERT INTO trajectory (traj_uid, group_uid, member, segment_id, n_steps, episode_return, "
        f"won, invalid_steps, version_min, version_max, lsn) {NUMBERS} "
        f"SELECT {UID}, x'00', i, 's', 1, 0, 0, 0, i, i, 1 FROM n",
        "INSERT INTO version VALUES (0, 'p', 'd', NULL, 1, 1, 1)",
    ),
}


@pytest.fixture
def catalog() -> Iterator[sqlite3.Connection]:
    """Make an empty catalog without triggers and indexes, which a stranger may leave out."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.create_function("now_us", 0, lambda: 1)
        connection.executescript(SCHEMA)
        for kind, name in connection.execute(
            "SELECT type, name FROM sqlite_schema WHERE type IN ('trigger', 'index') "
            "AND sql IS NOT NULL"
        ).fetchall():
            connection.execute(f"DROP {kind} {name}")
        connection.execute("INSERT INTO meta (id, run_id, epoch, lsn) VALUES (1, 'r', 1, 9999)")
        yield connection


@pytest.mark.parametrize("name", ["fsck", "compact", "rebuild"])
def test_a_catalog_whose_rows_all_contradict_each_other_is_checked_soon(
    name: str, layout: RunLayout
) -> None:
    """The attack: each of 3,000 draws was compared with each of 3,000 results, in 2.5 GB."""
    edit(*DRAWS)(layout)
    with closing(sqlite3.connect(layout.catalog)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    layout.backup.chmod(0o644)
    layout.backup.write_bytes(layout.catalog.read_bytes())
    options = ["--force"] if name == "rebuild" else []
    done = gigpo(name, layout.root, *options, timeout_s=ENDS_WITHIN_S)
    assert "Traceback" not in done.stderr
    if name == "fsck":
        assert done.returncode == 1
        assert f"the same of {N_ROWS - MAX_FINDINGS} other rows" in done.stdout


@pytest.mark.parametrize("rule", WORK)
def test_the_steps_of_a_rule_grow_with_the_rows(rule: str, catalog: sqlite3.Connection) -> None:
    for statement in WORK[rule]:
        catalog.execute(statement)
    n_calls = 0

    def count() -> int:
        nonlocal n_calls
        n_calls += 1
        return n_calls > N_ROWS  # 1 interrupts the query

    catalog.set_progress_handler(count, STEPS_OF_ROW)
    assert rule in {finding.what for finding in check_catalog(catalog)}


def test_a_name_of_a_segment_is_no_pattern(catalog: sqlite3.Connection) -> None:
    """The attack: LIKE compares a long path with a long name at each of its characters."""
    name, path = "/" * 20_000, "/" * 400_000
    insert = "INSERT INTO segment VALUES (?, ?, 'd', 1, 1, 'w', 1, 1, NULL, 1, 0, NULL, NULL, NULL)"
    catalog.executemany(insert, [(name, path), ("100%", "w/100%.parquet"), ("_", "w/a.parquet")])
    began = time.monotonic()
    found = check_catalog(catalog)
    assert time.monotonic() - began < 5
    assert {finding.subject for finding in found} == {f"segment {name}", "segment _"}
    assert {finding.what for finding in found} == {"segment_name"}


def test_the_files_are_listed_as_often_however_many_are_gone(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: each of 300 missing files had 4,000 others listed, for two minutes."""
    listings: list[str] = []
    list_files = LocalStorage.files

    def files(storage: LocalStorage, directory: str) -> Iterator[StoredFile]:
        if storage.root == layout.root:  # a thread of an earlier test may look at its own run
            listings.append(directory)
        return list_files(storage, directory)

    monkeypatch.setattr(LocalStorage, "files", files)
    counts = []
    for path in (layout.segments / "w0").glob("*.parquet"):
        path.unlink()
        listings.clear()
        assert any(finding.what.endswith("_missing") for finding in check(layout, level=NAMES))
        counts.append(len(listings))
    assert len(counts) > 2
    assert len(set(counts)) == 1


def test_what_a_repair_puts_right_is_named_in_full(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.maintenance.fsck_catalog.MAX_FINDINGS", 1)
    edit("UPDATE grp SET n_steps = n_steps + 1")(layout)
    found = check(layout, level=CATALOG)
    assert len(found) > 1
    with Catalog.open(layout) as owned:
        repair(owned, layout, findings=found)
    assert check(layout, level=CATALOG) == []

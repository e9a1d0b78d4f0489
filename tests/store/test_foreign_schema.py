"""A stranger's catalog.sqlite holds programs: nothing of them is executed, and one line names each
of them.
"""

from __future__ import annotations

import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from store import Catalog, RunLayout
from store.catalog.database import connect_read_only
from store.catalog.snapshot import read_as_of
from store.errors import ForeignSchemaError, FormatError
from store.maintenance.fsck import CONTENTS, FATAL, check
from tests.support.store_runs import copy_run, make_run

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_S = 60  # an attack that succeeds never ends
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
ENDLESS_TRIGGER = (
    "CREATE TRIGGER evil AFTER UPDATE ON meta BEGIN "
    f"SELECT count(*) FROM ({ENDLESS} SELECT i FROM n); END"
)

ENDLESS_PROGRAMS = {  # the schema, and the commands that it hung
    "trigger": (ENDLESS_TRIGGER, ("compact",)),
    "event": (
        f"DROP TABLE event; CREATE VIEW event AS {ENDLESS} SELECT i AS event_id, -1 AS lsn, 1 AS "
        "at_us, 'c' AS component, "
        "'w' AS what, 'd' AS detail FROM n",
        ("fsck", "compact"),
    ),
    "group_state": (
        f"DROP TABLE group_state; CREATE VIEW group_state AS {ENDLESS} SELECT i AS seq, x'00' AS "
        "group_uid, 'open' AS state, "
        "'r' AS reason, 0 AS lsn, 1 AS at_us FROM n WHERE i < 0",
        ("sql", "--as-of", "1", "--timeout", "5", "SELECT 1"),
    ),
}
FOREIGN = {  # the schema, and what the error names
    "view": ("CREATE VIEW more AS SELECT 1", "view 'more'"),
    "trigger": (ENDLESS_TRIGGER, "trigger 'evil'"),
    "changed trigger": (
        "DROP TRIGGER grp_changed; CREATE TRIGGER grp_changed AFTER UPDATE ON grp BEGIN DELETE "
        "FROM trajectory; END",
        "trigger 'grp_changed'",
    ),
    "virtual table": ("CREATE VIRTUAL TABLE words USING fts5(word)", "table 'words'"),
    "generated column": (
        "ALTER TABLE event ADD COLUMN more TEXT AS (printf('%*c', 1000000, 'x'))",
        "table 'event'",
    ),
    "default": ("ALTER TABLE event ADD COLUMN more TEXT DEFAULT 'x'", "table 'event'"),
    "harmless table": ("CREATE TABLE extra (x)", "table 'extra'"),
    "index on an expression": (
        "CREATE INDEX slow ON event (printf('%*c', 1000000, what))",
        "index 'slow'",
    ),
    "other options": (
        "DROP TABLE component; CREATE TABLE component (name TEXT PRIMARY KEY, waiting_on TEXT, "
        "beat_us INTEGER NOT NULL)",
        "table 'component'",
    ),
    "name of a terminal": (
        'CREATE VIEW "\x1b[2J' + "x" * 1000 + '" AS SELECT 1',
        "view '\\x1b[2Jxxx",
    ),
}
# What no statement can make: SQLite cannot read it either.
UNREADABLE = {
    "no text": "UPDATE sqlite_schema SET sql = NULL WHERE name = 'grp_by_state'",
    "no UTF-8": "UPDATE sqlite_schema SET sql = CAST(sql || x'ff' AS TEXT) WHERE name = 'event'",
    "a table twice": "INSERT INTO sqlite_schema SELECT * FROM sqlite_schema WHERE name = 'event'",
    "two tables of one name": "INSERT INTO sqlite_schema "
    "SELECT type, 'more', 'more', rootpage, sql FROM sqlite_schema WHERE name = 'event'",
}

INTERRUPTED = f"""
import os, pathlib, signal, sys, threading
from store import RunLayout
from store.catalog.database import connect_read_only
connection = connect_read_only(RunLayout.open(pathlib.Path(sys.argv[1])))
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
connection.execute("{ENDLESS} SELECT count(*) FROM n").fetchone()
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return make_run(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture
def layout(sound: RunLayout, tmp_path: Path) -> RunLayout:
    return copy_run(sound, tmp_path / "run")


def forge(layout: RunLayout, script: str) -> None:
    with closing(sqlite3.connect(layout.catalog)) as connection:
        connection.executescript(script)
        connection.commit()


def command(layout: RunLayout, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", name, str(layout.root), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )


@pytest.mark.parametrize("program", ENDLESS_PROGRAMS)
def test_an_endless_program_in_a_catalog_is_never_started(program: str, layout: RunLayout) -> None:
    script, (name, *options) = ENDLESS_PROGRAMS[program]
    forge(layout, script)
    for arguments in [(name, *options)] if name == "sql" else [("fsck",), ("compact",)]:
        done = command(layout, *arguments)
        said = done.stdout + done.stderr
        assert (
            done.returncode != 0 and "that this code makes" in said and "rebuild --force" in said
        ), said
        assert "Traceback" not in said


@pytest.mark.parametrize("schema", FOREIGN)
def test_a_foreign_schema_is_one_line_that_names_the_object(schema: str, layout: RunLayout) -> None:
    script, named = FOREIGN[schema]
    forge(layout, script)
    before = layout.catalog.read_bytes()
    for attempt in (
        lambda: Catalog.open(layout),
        lambda: connect_read_only(layout),
        lambda: read_as_of(layout, 1),
    ):
        with pytest.raises(ForeignSchemaError) as error:
            attempt()
        assert (
            named in str(error.value)
            and "\x1b" not in str(error.value)
            and "\n" not in str(error.value)
        )
    (finding,) = check(layout, level=CONTENTS)
    assert finding.what == "catalog_schema" and finding.what in FATAL
    assert (
        named in finding.detail
        and finding.remedy == f"make a new catalog without it: gigpo rebuild --force {layout.root}"
    )
    assert layout.catalog.read_bytes() == before


@pytest.mark.parametrize("schema", UNREADABLE)
def test_a_schema_that_cannot_be_read_is_damage(schema: str, layout: RunLayout) -> None:
    forge(layout, f"PRAGMA writable_schema = ON; {UNREADABLE[schema]}")
    with pytest.raises(FormatError):
        Catalog.open(layout)
    with pytest.raises(FormatError):
        read_as_of(layout, 1)
    (finding,) = check(layout, level=CONTENTS)
    assert finding.what in FATAL


def test_a_rebuild_makes_a_catalog_without_it(layout: RunLayout) -> None:
    forge(layout, ENDLESS_TRIGGER)
    done = command(layout, "rebuild")  # without --force: the finding is a fatal one
    assert done.returncode == 0, done.stderr
    assert check(layout, level=CONTENTS) == []
    connect_read_only(layout).close()


def test_a_missing_object_is_not_a_foreign_one(layout: RunLayout) -> None:
    forge(layout, "DROP TRIGGER grp_changed; DROP INDEX grp_by_state")
    assert check(layout, level=CONTENTS) == []
    forge(layout, "DROP TABLE component")
    with Catalog.open(layout):  # its owner makes what is missing
        pass
    assert check(layout, level=CONTENTS) == []


def test_a_catalog_of_newer_code_is_told_from_a_foreign_one(layout: RunLayout) -> None:
    forge(
        layout,
        "CREATE TABLE later (x); ALTER TABLE meta ADD COLUMN more TEXT; PRAGMA application_id = 7",
    )
    for attempt in (
        lambda: Catalog.open(layout),
        lambda: connect_read_only(layout),
        lambda: check(layout, level=CONTENTS),
    ):
        with pytest.raises(FormatError, match="has format application_id 7, .* use the version"):
            attempt()


def hot_journal(*, pages: int, page_bytes: int, names: Path | None) -> bytes:
    """Return a journal that SQLite plays back when it opens the catalog; after that it removes the
    file `names`.
    """
    magic, sector_bytes, locked_byte = bytes.fromhex("d9d505f920a163d7"), 512, 2**30
    header = (magic + struct.pack(">5I", 0, 0, pages, sector_bytes, page_bytes)).ljust(
        sector_bytes, b"\0"
    )
    if names is None:
        return header
    name = bytes(names)
    page = struct.pack(">I", locked_byte // page_bytes + 1)
    return header + page + name + struct.pack(">2I", len(name), sum(name)) + magic


def test_a_journal_removes_no_file_that_it_names(layout: RunLayout, tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("of the user")
    journal = layout.catalog.with_name("catalog.sqlite-journal")
    pages = layout.catalog.stat().st_size // 4096
    journal.write_bytes(hot_journal(pages=pages, page_bytes=4096, names=precious))
    for name in ("compact", "fsck"):
        done = command(layout, name)
        assert precious.exists(), name
        assert (
            done.returncode != 0
            and "names another file" in done.stderr
            and "Traceback" not in done.stderr
        )
    assert command(layout, "rebuild", "--force").returncode == 0
    assert precious.exists() and not journal.exists()
    assert check(layout, level=CONTENTS) == []


def test_an_ordinary_journal_of_a_killed_owner_is_played_back(layout: RunLayout) -> None:
    journal = layout.catalog.with_name("catalog.sqlite-journal")
    journal.write_bytes(
        hot_journal(pages=layout.catalog.stat().st_size // 4096, page_bytes=4096, names=None)
    )
    with Catalog.open(layout):
        pass
    assert check(layout, level=CONTENTS) == []


def test_ctrl_c_ends_a_query_that_only_reads(layout: RunLayout) -> None:
    """Tables whose pages share their children can be endless too, and no schema tells."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(layout.root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert done.returncode != 0 and (
        "interrupted" in done.stderr or "KeyboardInterrupt" in done.stderr
    )

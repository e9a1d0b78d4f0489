"""A stranger's catalog.sqlite holds programs: nothing of them is executed, and one line names each
of them.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cli.__main__ import main
from store import Catalog, RunLayout, restart_points
from store.catalog import catalog_files
from store.catalog.connection import opened_read_only
from store.catalog.snapshot import read_as_of
from store.errors import ForeignSchemaError, FormatError
from store.exchange.fork import fork
from store.maintenance.backup import read_backup
from store.maintenance.database_bytes import JOURNAL_MODE, ROLLBACK_JOURNAL
from store.maintenance.fsck import CATALOG, CONTENTS, FATAL, check
from store.reading.lineage import metrics_since
from store.untrusted.signatures import sign_run, signed_texts
from tests.support.program import gigpo
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
    "end within a text": (  # SQLite reads no further than a NUL: this table is not STRICT
        "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = "
        "replace(sql, ') STRICT', ') --' || char(0) || char(10) || ' STRICT') WHERE name = 'meta'",
        "table 'meta'",
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
# Schemas that no statement can make: SQLite cannot read them either.
UNREADABLE = {
    "no text": "UPDATE sqlite_schema SET sql = NULL WHERE name = 'grp_by_state'",
    "no UTF-8": "UPDATE sqlite_schema SET sql = CAST(sql || x'ff' AS TEXT) WHERE name = 'event'",
    "a table twice": "INSERT INTO sqlite_schema SELECT * FROM sqlite_schema WHERE name = 'event'",
    "two tables of one name": "INSERT INTO sqlite_schema "
    "SELECT type, 'more', 'more', rootpage, sql FROM sqlite_schema WHERE name = 'event'",
}

# SQLite reads its table of statistics together with the schema, so these programs ran before any
# check: with 2,000 rows the first and the last take hours, and the second ends with the memory.
STATISTICS = {
    "a long text": "stat AS (hex(zeroblob(450000000)))",
    "columns that double": "g0, "
    + ", ".join(f"g{number} AS (g{number - 1} || g{number - 1})" for number in range(1, 60))
    + ", stat AS (g59)",
    "a long search": "stat AS (length(replace(hex(zeroblob(1000000)), hex(zeroblob(500000)) || '1', "
    "'')))",
    # Nothing interrupts SQLite within a row: ten minutes for the 300 searches of each.
    "many searches": "x AS (hex(zeroblob(8000))), y AS ('*' || replace(hex(zeroblob(2500)), '0', "
    "'[0]') || 'b*'), stat AS (" + " + ".join(["(x GLOB y)"] * 300) + ")",
}

INTERRUPTED = f"""
import os, pathlib, signal, sys, threading
from store import RunLayout
from store.catalog.connection import opened_read_only
with opened_read_only(RunLayout.open(pathlib.Path(sys.argv[1]))) as connection:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    connection.execute("{ENDLESS} SELECT count(*) FROM n").fetchone()
"""

INTERRUPTED_OWNER = f"""
import os, pathlib, signal, sys, threading
from store import Catalog, RunLayout
with Catalog.open(RunLayout.open(pathlib.Path(sys.argv[1]))) as catalog:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with catalog._database.transaction() as tx:
        tx.rows("{ENDLESS} SELECT count(*) FROM n")
"""
# Tables with a rowid, whose pages have the layout that `share_pages` writes.
SHARED = ("group_state", "batch", "version", "event")
INTERIOR_PAGE, HEADER_BYTES = 5, 12
# Cell of `meta` -> a value that no owner writes.
WRONG_CELLS = {
    f"{column} {value}": (column, value)
    for column, values in {
        "run_id": ("NULL", "7"),
        "epoch": ("'x'", "NULL"),
        "lsn": ("'x'", "x'ff'", "-1", "9223372036854775807"),
        "horizon_lsn": ("1.5",),
    }.items()
    for value in values
}


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


def share_pages(layout: RunLayout, table: str, *, levels: int) -> None:
    """Put pages above the root of a table of which each has the page below it as all its children.

    A query of the table then visits some 600 ** levels pages.
    """
    with closing(sqlite3.connect(layout.catalog)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)
        ).fetchone()
    file = bytearray(layout.catalog.read_bytes())

    def interior(child: int) -> bytes:
        cell = struct.pack(">I", child) + b"\x64"  # the key 100
        n_cells = (page_bytes - HEADER_BYTES) // (len(cell) + 2)
        starts = [page_bytes - len(cell) * (number + 1) for number in range(n_cells)]
        header = struct.pack(">BHHHBI", INTERIOR_PAGE, 0, n_cells, starts[-1], 0, child)
        pointers = struct.pack(f">{n_cells}H", *starts)
        return (header + pointers).ljust(starts[-1], b"\0") + cell * n_cells

    at = slice((root - 1) * page_bytes, root * page_bytes)
    file += file[at]
    for _ in range(levels - 1):
        file += interior(len(file) // page_bytes)
    file[at] = interior(len(file) // page_bytes)
    struct.pack_into(">I", file, 28, len(file) // page_bytes)
    layout.catalog.write_bytes(file)


LOOSE = {  # the tables as they would be if they took a value of any type
    "meta": "id INTEGER PRIMARY KEY, run_id, epoch, lsn, horizon_lsn",
    "checkpoint": "lsn INTEGER PRIMARY KEY, learner_step, path, version, live, saved_us, changed_lsn",
    "version": "version INTEGER PRIMARY KEY, path, digest, learner_step, epoch, published_us, lsn",
}


def plant(layout: RunLayout, column: str, value: str, *, table: str = "meta") -> None:
    """Write a value into a STRICT table that it refuses."""
    query = "SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = ?"
    change = "UPDATE sqlite_schema SET sql = ? WHERE type = 'table' AND name = ?"
    with closing(sqlite3.connect(layout.catalog, isolation_level=None)) as connection:
        (sql,) = connection.execute(query, (table,)).fetchone()
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(change, (f"CREATE TABLE {table} ({LOOSE[table]})", table))
    with closing(sqlite3.connect(layout.catalog, isolation_level=None)) as connection:
        connection.execute(f"UPDATE {table} SET {column} = {value}")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(change, (sql, table))


def command(layout: RunLayout, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return gigpo(name, layout.root, *options, timeout_s=ENDS_WITHIN_S)


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


def read(layout: RunLayout) -> None:
    """Open the catalog as a reader does."""
    with opened_read_only(layout):
        pass


@pytest.mark.parametrize("schema", FOREIGN)
def test_a_foreign_schema_is_one_line_that_names_the_object(schema: str, layout: RunLayout) -> None:
    script, named = FOREIGN[schema]
    forge(layout, script)
    before = layout.catalog.read_bytes()
    for attempt in (
        lambda: Catalog.open(layout),
        lambda: read(layout),
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


@pytest.mark.parametrize("program", STATISTICS)
def test_statistics_that_are_a_program_are_refused_in_a_moment(
    program: str, layout: RunLayout
) -> None:
    with closing(sqlite3.connect(layout.catalog, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("ANALYZE")
        row = "INSERT INTO sqlite_stat1 (tbl, stat) VALUES ('grp', '1')"
        for _ in range(2000):
            connection.execute(row)
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(
            "UPDATE sqlite_schema SET sql = ? WHERE name = 'sqlite_stat1'",
            (
                f"CREATE TABLE sqlite_stat1 (a, b, c, tbl AS (a), idx AS (b), {STATISTICS[program]})",
            ),
        )
    layout.backup.chmod(0o644)
    layout.backup.write_bytes(layout.catalog.read_bytes())
    done = command(layout, "fsck")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "'sqlite_stat1' is none that this code makes" in done.stdout or (
        "malformed database schema (it is too large)" in done.stdout
    )
    done = command(layout, "rebuild", "--force")
    assert done.returncode == 0, done.stderr
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize("schema", UNREADABLE)
def test_a_schema_that_cannot_be_read_is_damage(schema: str, layout: RunLayout) -> None:
    forge(layout, f"PRAGMA writable_schema = ON; {UNREADABLE[schema]}")
    with pytest.raises(FormatError):
        Catalog.open(layout)
    with pytest.raises(FormatError):
        read_as_of(layout, 1)
    (finding,) = check(layout, level=CONTENTS)
    assert finding.what in FATAL


@pytest.mark.parametrize(("n_comments", "is_known"), [(1, True), (1200, False)])
def test_a_statement_much_longer_than_ours_is_not_split(
    n_comments: int, is_known: bool, layout: RunLayout
) -> None:
    """Splitting takes the square of the length where comments are opened and not closed."""
    comments = "/* */" * n_comments
    forge(
        layout,
        "PRAGMA writable_schema = ON; "
        f"UPDATE sqlite_schema SET sql = sql || '{comments}' WHERE name = 'meta'",
    )
    if is_known:
        assert check(layout, level=CATALOG) == []
    else:
        with pytest.raises(ForeignSchemaError, match="'meta' is none that this code makes"):
            read(layout)


def test_a_rebuild_makes_a_catalog_without_it(layout: RunLayout) -> None:
    forge(layout, ENDLESS_TRIGGER)
    done = command(layout, "rebuild")  # without --force: the finding is a fatal one
    assert done.returncode == 0, done.stderr
    assert check(layout, level=CONTENTS) == []
    read(layout)


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
        lambda: read(layout),
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


def test_a_journal_makes_no_catalog_of_terabytes(layout: RunLayout) -> None:
    """The attack: `compact` played it back, and took all memory for a copy of the zeros."""
    journal = layout.catalog.with_name("catalog.sqlite-journal")
    before = layout.catalog.stat().st_size
    journal.write_bytes(hot_journal(pages=10**9, page_bytes=4096, names=None))
    for name in ("compact", "fsck"):
        done = command(layout, name)
        assert done.returncode == 2 and "makes a file of 4,096,000,000,000 bytes" in done.stderr
    assert layout.catalog.stat().st_size == before
    assert command(layout, "rebuild", "--force").returncode == 0
    assert check(layout, level=CONTENTS) == []


def test_a_log_makes_no_catalog_of_terabytes(layout: RunLayout) -> None:
    """The attack: its last frame is a commit of a thousand million pages."""
    with closing(sqlite3.connect(layout.catalog)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    data = bytearray(layout.catalog.read_bytes())
    data[JOURNAL_MODE] = b"\2\2"
    layout.catalog.write_bytes(data)
    n_pages, page_bytes = 10**9, 4096
    page = bytearray(data[:page_bytes])
    struct.pack_into(">I", page, 28, n_pages)

    def checksum(part: bytes, so_far: tuple[int, int]) -> tuple[int, int]:
        one, two = so_far
        for left, right in struct.iter_unpack(">II", part):
            one = (one + left + two) & 0xFFFFFFFF
            two = (two + right + one) & 0xFFFFFFFF
        return one, two

    salts = struct.pack(">II", 1, 2)
    header = struct.pack(">IIII", 0x377F0683, 3007000, page_bytes, 0) + salts
    sums = checksum(header, (0, 0))
    frame = struct.pack(">II", 1, n_pages)
    log = header + struct.pack(">II", *sums)
    log += frame + salts + struct.pack(">II", *checksum(bytes(page), checksum(frame, sums))) + page
    layout.catalog.with_name("catalog.sqlite-wal").write_bytes(log)
    for name in ("compact", "fsck"):
        done = command(layout, name)
        assert done.returncode == 2 and "says that it has 1,000,000,000 pages" in done.stderr
    assert command(layout, "rebuild", "--force").returncode == 0
    assert check(layout, level=CONTENTS) == []


def test_a_catalog_with_holes_is_not_read(layout: RunLayout) -> None:
    with closing(sqlite3.connect(layout.catalog)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    os.truncate(layout.catalog, 1 << 40)
    for name in ("compact", "fsck"):
        done = command(layout, name)
        assert done.returncode == 2 and "has 1,099,511,627,776 bytes, of which" in done.stderr


def test_a_catalog_whose_blocks_are_not_counted_yet_is_read(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_files, "_SMALL_BYTES", 0)
    monkeypatch.setattr(catalog_files, "_BLOCK_BYTES", 0)
    with Catalog.open(layout):
        pass
    assert check(layout, level=CONTENTS) == []


def test_an_ordinary_journal_of_a_killed_owner_is_played_back(layout: RunLayout) -> None:
    journal = layout.catalog.with_name("catalog.sqlite-journal")
    journal.write_bytes(
        hot_journal(pages=layout.catalog.stat().st_size // 4096, page_bytes=4096, names=None)
    )
    with Catalog.open(layout):
        pass
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize("program", [INTERRUPTED, INTERRUPTED_OWNER], ids=["reader", "owner"])
def test_ctrl_c_ends_a_query(program: str, layout: RunLayout) -> None:
    """Tables whose pages share their children can be endless too, and no schema tells."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(layout.root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_S,
        check=False,
    )
    assert done.returncode != 0 and (
        "interrupted" in done.stderr or "KeyboardInterrupt" in done.stderr
    )


READS = {
    "fsck": lambda layout: check(layout, level=CATALOG),
    "backup": read_backup,
    "snapshot": lambda layout: read_as_of(layout, 1),
    "lineage": restart_points,
    "fork": lambda layout: fork(layout, layout.root / "../new", learner_step=1, config_yaml=""),
    "owner": Catalog.open,
}


@pytest.mark.parametrize("read", READS)
def test_ctrl_c_is_no_damage(read: str, layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """sqlite3 hides what its progress handler raises, and says that the query was interrupted."""

    def stop() -> int:
        raise KeyboardInterrupt

    def interrupt(connection: sqlite3.Connection) -> None:
        connection.set_progress_handler(stop, 1)

    monkeypatch.setattr("store.catalog.schema_check.let_ctrl_c_end_queries", interrupt)
    with pytest.raises(KeyboardInterrupt):
        READS[read](layout)


@pytest.mark.parametrize("table", SHARED)
def test_a_table_whose_pages_share_their_children_ends_fsck_and_compact(
    table: str, layout: RunLayout
) -> None:
    share_pages(layout, table, levels=8)
    done = command(layout, "fsck")
    assert done.returncode == 1 and "2nd reference to page" in done.stdout, done.stderr
    # It becomes no owner, so it makes no backup of this catalog.
    before = layout.backup.read_bytes()
    assert "Traceback" not in command(layout, "compact").stderr
    assert layout.backup.read_bytes() == before


def test_no_index_is_made_of_a_table_whose_pages_share_their_children(layout: RunLayout) -> None:
    """An index that is missing is made again, and of such a table it would fill the disk."""
    forge(layout, "DROP INDEX group_state_by_lsn")
    share_pages(layout, "group_state", levels=2)  # so that a failure ends
    data = bytearray(layout.catalog.read_bytes())
    data[JOURNAL_MODE] = ROLLBACK_JOURNAL
    layout.backup.unlink()
    layout.backup.write_bytes(data)
    for name, options in (("compact", ()), ("fsck", ("--repair",))):
        done = command(layout, name, *options)
        assert "*** in database main" in done.stdout + done.stderr, name
    with pytest.raises(FormatError, match="cannot be read as a catalog: .* database main"):
        read_backup(layout)
    assert command(layout, "rebuild", "--force").returncode == 0
    assert check(layout, level=CONTENTS) == []


def test_a_schema_whose_pages_share_their_children_is_damage(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of the leaf is an index of a key, which SQLite accepts as often as it comes."""
    with closing(sqlite3.connect(layout.catalog)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        name, table, root = connection.execute(
            "SELECT name, tbl_name, rootpage FROM sqlite_schema WHERE sql IS NULL"
        ).fetchone()
    file = bytearray(layout.catalog.read_bytes())

    def interior(children: list[int], *, at: int = 0) -> bytes:
        cells = [struct.pack(">IB", child, 100) for child in children[:-1]]
        starts = [size - 5 * (number + 1) for number in range(len(cells))]
        header = struct.pack(">BHHHBI", INTERIOR_PAGE, 0, len(cells), starts[-1], 0, children[-1])
        pointers = struct.pack(f">{len(cells)}H", *starts)
        return (bytes(at) + header + pointers).ljust(starts[-1], b"\0") + b"".join(cells[::-1])

    header_bytes = HEADER_BYTES if file[100] == INTERIOR_PAGE else 8
    head = 100 + header_bytes + 2 * struct.unpack_from(">H", file, 103)[0]
    file += file[100:head].ljust(100, b"\0")[: head - 100] + file[head - 100 : size]
    old = len(file) // size
    texts = [text.encode() for text in ("index", name, table)]
    assert all(len(text) < 57 and root < 128 for text in texts)
    kinds = bytes([6, *(13 + 2 * len(text) for text in texts), 1, 0])
    row = kinds + b"".join(texts) + bytes([root])
    cell = bytes([len(row), 100]) + row
    leaf = struct.pack(">BHHHBH", 13, 0, 1, size - len(cell), 0, size - len(cell))
    file += leaf.ljust(size - len(cell), b"\0") + cell
    for _ in range(5):
        file += interior([len(file) // size] * 500)
    file[100:size] = interior([old, len(file) // size], at=100)[100:]
    struct.pack_into(">I", file, 28, len(file) // size)
    layout.catalog.write_bytes(file)
    monkeypatch.setattr("store.catalog.schema_check.SCHEMA_READ_S", 0.5)
    (finding,) = check(layout, level=CATALOG)
    assert finding.what == "catalog_damaged" and "it does not end" in finding.detail
    with pytest.raises(FormatError, match="it does not end"):
        Catalog.open(layout)


@pytest.mark.parametrize("cell", WRONG_CELLS)
def test_a_cell_of_meta_that_counts_nothing_is_one_line(
    cell: str, layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(layout, *WRONG_CELLS[cell])
    (finding,) = check(layout, level=CONTENTS)
    column, _ = WRONG_CELLS[cell]
    assert (
        finding.what == "catalog_damaged"
        and f"its {column} has a wrong type or size" in finding.detail
    )
    run = str(layout.root)
    dest = str(layout.root.with_name("dataset"))
    for arguments in (["compact", run], ["fsck", "--repair", run], ["export", run, dest]):
        assert main(arguments) in (0, 1, 2), arguments
    with pytest.raises(FormatError, match="malformed table meta"):
        read_as_of(layout, 1)
    with pytest.raises(FormatError, match="malformed table meta"):
        fork(layout, layout.root.with_name("forked"), learner_step=1, config_yaml="")
    with pytest.raises(FormatError, match="malformed table meta"):
        metrics_since(layout, 0)
    assert main(["rebuild", run]) == 0, capsys.readouterr().err
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("checkpoint", "learner_step", "NULL"),
        ("checkpoint", "learner_step", "'x'"),
        ("checkpoint", "version", "x'ff'"),
        ("version", "lsn", "x'ff'"),
    ],
)
def test_a_cell_that_numbers_no_checkpoint_is_one_line_for_a_fork(
    table: str, column: str, value: str, layout: RunLayout
) -> None:
    layout.checkpoint_dir(1).mkdir()
    plant(layout, column, value, table=table)
    with pytest.raises(FormatError, match=f"malformed row: its {column} is no whole number"):
        fork(layout, layout.root.with_name("forked"), learner_step=1, config_yaml="")
    assert not layout.root.with_name("forked").exists()


def test_a_backup_with_a_wrong_cell_of_meta_is_not_taken(layout: RunLayout) -> None:
    plant(layout, "lsn", "'x'")
    data = bytearray(layout.catalog.read_bytes())
    data[JOURNAL_MODE] = ROLLBACK_JOURNAL
    layout.backup.chmod(0o644)
    layout.backup.write_bytes(data)
    with pytest.raises(FormatError, match="malformed table meta"):
        read_backup(layout)


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_table_whose_pages_share_their_children_is_not_read(
    layout: RunLayout, is_signed: bool
) -> None:
    """Refuse it before a sort of it fills the disk. No signature covers the catalog."""
    if is_signed:
        sign_run(layout.root)
    else:
        (layout.root / "signed.json").unlink(missing_ok=True)
    assert bool(signed_texts(layout.root)) == is_signed
    assert restart_points(layout) is not None
    share_pages(layout, "checkpoint", levels=3)
    for read in (lambda: restart_points(layout), lambda: read_as_of(layout, 1)):
        with pytest.raises(FormatError, match="is damaged"):
            read()


def test_a_cell_that_contradicts_the_schema_is_one_line_for_an_owner(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contradict(*_: object, **__: object) -> int:
        raise sqlite3.IntegrityError("datatype mismatch")

    monkeypatch.setattr("store.catalog.database.Database._take_over", contradict)
    with pytest.raises(FormatError, match="contradict its schema: datatype mismatch"):
        Catalog.open(layout)

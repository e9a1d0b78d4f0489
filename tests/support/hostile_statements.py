"""Statements that would do harm if they could. {run}, {segment} and {canary} (a directory outside
the run) are filled in.

WRITING and READING must be refused, LEAKING may be answered as long as nothing of the outside is in
it, HEAVY must end at a limit. The text check of the reader sees through most of WRITING; SMUGGLED
pass it, being queries to DuckDB's parser.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from store import Catalog, RunLayout, export, write_open_sql
from store.reading.reader import Reader, open_run
from tests.support.store_samples import open_train_group, play

SECRET = "canary-7f3a"

SMUGGLED = [
    "WITH a AS (COPY (SELECT 1 AS u) TO '{canary}/out.csv') FROM a",
    "WITH a AS (COPY (SELECT 1 AS u) TO '{run}/out.csv') FROM a",
    "WITH a AS (COPY (SELECT 1 AS u) TO '{run}/manifest.json' (USE_TMP_FILE false)) FROM a",
    "WITH a AS (COPY (SELECT 1 AS u) TO '{segment}' (FORMAT parquet, USE_TMP_FILE false)) FROM a",
    "WITH a AS (COPY (SELECT 1 AS u) TO '{canary}/secret.txt' (FORMAT csv, USE_TMP_FILE false)) "
    "FROM a",
    "WITH a AS (COPY (SELECT 1 u, 2 v) TO '{run}/segments' (FORMAT parquet, PARTITION_BY (u), "
    "OVERWRITE)) FROM a",
    "WITH a AS (COPY (SELECT 1 u, 2 v) TO '{canary}' (FORMAT parquet, PARTITION_BY (u), "
    "OVERWRITE)) FROM a",
    "WITH a AS (COPY (SELECT 1 AS u) TO '/dev/stdout') FROM a",
    "WITH a AS (COPY (SELECT 1 AS u) TO '/dev/shm/out_of_the_sandbox') FROM a",
    *[
        f"WITH a AS (COPY (SELECT 1 AS u) TO '/proc/self/fd/{fd}' (USE_TMP_FILE false)) FROM a"
        for fd in range(3, 8)
    ],
    "WITH a AS (INSERT INTO groups VALUES (1) RETURNING 1) FROM a",
    "WITH a AS (DELETE FROM exported.groups RETURNING 1) FROM a",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{canary}/out.csv'",
    "EXPLAIN ANALYZE WITH a AS (COPY (SELECT 1) TO '{run}/out.csv') FROM a",
    "EXPLAIN ANALYZE CREATE OR REPLACE VIEW steps AS SELECT 1",
    "EXPLAIN ANALYZE CREATE TABLE t AS SELECT 1",
    "EXPLAIN ANALYZE DROP VIEW steps",
    "FROM query('COPY (SELECT 1) TO ''{canary}/out.csv''')",
    "FROM enable_logging(storage = 'file', storage_config = {{'path': '{canary}'}})",
    "FROM enable_profiling(save_location = '{canary}/profile.json')",
]
WRITING = [
    *SMUGGLED,
    "COPY (SELECT 1) TO '{canary}/out.csv'",
    "COPY (SELECT 1) TO '{run}/manifest.json' (FORMAT csv, USE_TMP_FILE false)",
    "COPY (SELECT 1) TO '{segment}' (FORMAT parquet, USE_TMP_FILE false)",
    "COPY (SELECT 1) TO '|touch {canary}/out'",
    "COPY exported.groups FROM '{canary}/secret.csv'",
    "EXPORT DATABASE '{canary}/db'",
    "EXPORT DATABASE '{run}/db'",
    "IMPORT DATABASE '{canary}'",
    "ATTACH '{canary}/new.db'",
    "ATTACH '{run}/new.db' AS new",
    "ATTACH '{canary}/canary.db' AS outside (READ_ONLY)",
    "ATTACH '{run}/catalog.sqlite' AS catalog (TYPE sqlite)",
    "ATTACH '{run}/catalog.sqlite' AS catalog (READ_ONLY)",
    "ATTACH ':memory:' AS other",
    "DETACH memory",
    "USE exported",
    "INSTALL httpfs",
    "FORCE INSTALL sqlite FROM 'http://127.0.0.1:9/'",
    "LOAD httpfs",
    "LOAD '{canary}/evil.duckdb_extension'",
    "UPDATE EXTENSIONS",
    "PRAGMA enable_profiling",
    "PRAGMA memory_limit = '1TB'",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET allowed_directories = ['/']",
    "SET temp_directory = '{canary}'",
    "SET VARIABLE segments = ['{canary}/secret.parquet']",
    "RESET disabled_filesystems",
    "CALL enable_logging('QueryLog')",
    "CALL pragma_version()",
    "CREATE TABLE t AS SELECT 1",
    "CREATE TEMP TABLE steps AS SELECT 1",
    "CREATE OR REPLACE VIEW steps AS SELECT 1",
    "CREATE OR REPLACE MACRO twice(x) AS 0",
    "CREATE SECRET (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "CREATE PERSISTENT SECRET (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "DROP VIEW steps",
    "ALTER VIEW steps RENAME TO gone",
    "SELECT 1; SELECT 2",
    "SELECT 1; DROP VIEW steps",
    "PREPARE p AS COPY (SELECT 1) TO '{canary}/out.csv'",
    "EXECUTE p",
    "CHECKPOINT",
    "VACUUM",
    "BEGIN",
    "ROLLBACK",
    "",
    ";",
    "-- nothing",
]
READING = [
    "FROM read_text('/etc/passwd')",
    "FROM '/etc/passwd'",
    "FROM read_csv('/etc/passwd', header = false, all_varchar = true)",
    "FROM read_text('file:///etc/passwd')",
    "FROM read_text('~/.ssh/id_rsa')",
    "FROM read_text('{canary}/secret.txt')",
    "FROM read_blob('{canary}/secret.txt')",
    "FROM '{canary}/secret.csv'",
    "FROM sniff_csv('{canary}/secret.csv')",
    "FROM '{canary}/secret.parquet'",
    "FROM parquet_metadata('{canary}/secret.parquet')",
    "FROM parquet_file_metadata('{canary}/secret.parquet')",
    "FROM read_text('{run}/../canary/secret.txt')",
    "FROM read_text('{run}/link.txt')",
    "FROM read_text('{run}/link/secret.txt')",
    "FROM read_parquet(['{segment}', '{run}/link/secret.parquet'], union_by_name = true)",
    "FROM read_text('/proc/self/environ')",
    "FROM read_text('/proc/self/root/etc/passwd')",
    "FROM read_text('/proc/self/maps')",
    "FROM read_text('/proc/1/environ')",
    *[f"FROM read_text('/proc/self/fd/{fd}')" for fd in range(3, 6)],
    "FROM 'http://127.0.0.1:9/x.parquet'",
    "FROM 'https://example.com/x.csv'",
    "FROM 's3://bucket/x.parquet'",
    "FROM 'hf://datasets/a/b.parquet'",
    "FROM sqlite_scan('{run}/catalog.sqlite', 'meta')",
    "SELECT getenv('HIDDEN_TOKEN')",
    "FROM hidden_table",  # a variable of the parent
    "FROM connection",  # a variable of the child
    "FROM channel",
]
LEAKING = [
    "FROM glob('/etc/*')",
    "FROM glob('{canary}/*')",
    "FROM glob('{run}/link/*')",
    "FROM glob('{run}/**')",
    "FROM read_text('{run}/*.txt')",
    "FROM duckdb_settings()",
    "FROM duckdb_secrets()",
    "FROM duckdb_variables()",
    "FROM duckdb_extensions()",
    "FROM duckdb_logs()",
    "FROM duckdb_temporary_files()",
    "SELECT write_log('x')",
    "SELECT current_setting('lock_configuration')",
]
HEAVY = [
    "SELECT count(*) FROM range(100000) a, range(100000) b, range(100000) c WHERE a.range + "
    "b.range + c.range = 7",
    "SELECT count(*) FROM range(10000000000) a, range(10000000000) b WHERE a.range * b.range = 7",
    "SELECT count(*) FROM " + ", ".join(f"steps AS s{place}" for place in range(30)),
    "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
    "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n FROM t, range(3)) SELECT count(*) FROM "
    "t",
    "SELECT length(repeat('x', 100000000000))",
    "SELECT repeat('x', 100000000) FROM range(1000)",
    "SELECT range(10000000000)",
    "SELECT list(range) FROM range(10000000000)",
    "SELECT string_agg(range::VARCHAR, ',') FROM range(10000000000)",
    "FROM (SELECT random() AS r, repeat('x', 1000) AS x FROM range(1000000000)) ORDER BY r",
    "SELECT count(DISTINCT hash(range)) FROM range(10000000000)",
    "FROM range(100000000000)",
]
DEEP = [
    "SELECT " + "(" * 20_000 + "1" + ")" * 20_000,
    "SELECT " + "NOT " * 50_000 + "true",
    "SELECT 1" + " + 1" * 100_000,
    "SELECT " + "[" * 5_000 + "]" * 5_000,
    "SELECT * FROM (" * 3_000 + "SELECT 1" + ")" * 3_000,
    "SELECT " + "CASE WHEN true THEN " * 5_000 + "1" + " END" * 5_000,
    "SELECT 1" + " UNION ALL SELECT 1" * 20_000,
    "SELECT '" + '{"a":' * 100_000 + "'::JSON->'a'",
]
# A program that a locked-in process runs, without any SQL. It prints what it could do.
LOCKED_IN = """
import os, socket, sys
from pathlib import Path
from store.reading import landlock
inside, outside = map(Path, sys.argv[1:])
listener = socket.create_server(("127.0.0.1", 0))
landlock.restrict([os.open(inside, os.O_PATH)])
attempts = {
    "append": lambda: (inside / "file").open("ab"), "overwrite": lambda: (inside / "file").open("r+b"),
    "create": lambda: (inside / "new").open("xb"), "truncate": lambda: os.truncate(inside / "file", 0),
    "remove": lambda: (inside / "file").unlink(), "rename": lambda: (inside / "file").rename(inside / "new"),
    "make a directory": lambda: (inside / "new").mkdir(), "link": lambda: (inside / "new").symlink_to("file"),
    "remove a directory": lambda: (inside / "empty").rmdir(), "hard link": lambda: os.link(inside / "file", inside / "new"),
    "read outside": lambda: (outside / "secret.txt").read_text(), "list outside": lambda: os.listdir(outside),
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "connect": lambda: socket.create_connection(listener.getsockname()[:2]),
    "listen": lambda: socket.create_server(("127.0.0.1", 0)),
}
assert (inside / "file").read_text() == "x" and os.listdir(inside)
for name, attempt in attempts.items():
    try:
        attempt()
        print("could", name)
    except PermissionError:
        pass
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A run, and beside it a directory that no query may see."""

    layout: RunLayout
    canary: Path
    protection: str | None

    def open(self) -> Reader:
        return open_run(self.layout.root, protection=self.protection, memory_limit="300MB")

    def fill(self, statement: str, *, prefix: str = "") -> str:
        if statement in DEEP:
            return statement
        (segment,) = self.layout.segments.rglob("*.parquet")
        paths = {"run": self.layout.root, "segment": segment, "canary": self.canary}
        return statement.format(
            **{name: prefix + str(path).replace("'", "''") for name, path in paths.items()}
        )

    def fingerprint(self) -> str:
        """Return a digest of every name, mode, size, time and byte, without the readers' pins."""
        digest = hashlib.sha256()
        for path in sorted([*self.layout.root.rglob("*"), *self.canary.rglob("*")]):
            if path.is_relative_to(self.layout.readers):
                continue
            status = path.lstat()
            digest.update(f"{path} {status.st_mode} {status.st_size} {status.st_mtime_ns}".encode())
            if path.is_file() and not path.is_symlink():
                digest.update(path.read_bytes())
        return digest.hexdigest()


def make_world(directory: Path, *, protection: str | None) -> World:
    canary = directory / "canary"
    canary.mkdir()
    (canary / "secret.txt").write_text(SECRET)
    (canary / "secret.csv").write_text(f"a,b\n1,{SECRET}\n")
    pq.write_table(pa.table({"a": [SECRET]}), canary / "secret.parquet")
    duckdb.connect(str(canary / "canary.db")).close()
    layout = RunLayout.create(directory / "a 'quoted' run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=["CREATE MACRO twice(x) AS 2 * x;"], max_staleness=1)
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 0))
        export(catalog, layout)
    (layout.root / "link.txt").symlink_to(canary / "secret.txt")
    (layout.root / "link").symlink_to(canary)
    layout.readers.mkdir(exist_ok=True)
    return World(layout=layout, canary=canary, protection=protection)

"""A run's own open.sql is a stranger's text: it is held by the limits of a query before its first
statement is executed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from printable import SHOWN_CHARACTERS
from store import FormatError, StoreError
from store.reading import landlock, reader
from store.reading.open_sql import MACROS_MARK, VIEWS_MARK, checked_statements
from store.reading.reader import open_run
from tests.support.hostile_statements import HEAVY, SECRET, World, make_world

MODES = [
    pytest.param(
        "landlock",
        marks=pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock"),
    ),
    "filesystem",
]
HUNGRY = [
    "SET VARIABLE hoard = (SELECT list(range) FROM range(1000000000));",
    "CREATE OR REPLACE MACRO hoard() AS (SELECT list(range) FROM range(1000000000)); SET VARIABLE "
    "hoard = hoard();",
]
FORBIDDEN = [
    "ATTACH '{canary}/new.db' AS new;",
    "ATTACH '{canary}/canary.db' AS outside (READ_ONLY);",
    "COPY (SELECT 1) TO '{canary}/out.csv';",
    "EXPORT DATABASE '{canary}/db';",
    "IMPORT DATABASE '{canary}';",
    "INSTALL httpfs;",
    "LOAD '{canary}/evil.duckdb_extension';",
    "PRAGMA memory_limit = '1TB';",
    "PRAGMA enable_profiling;",
    "SET memory_limit = '1TB';",
    "SET GLOBAL threads = 64;",
    "SET enable_external_access = true;",
    "SET search_path = 'exported';",
    "RESET memory_limit;",
    "USE exported;",
    "CALL enable_logging('QueryLog');",
    "CREATE TABLE hoard AS SELECT * FROM range(1000000000);",
    "CREATE TEMP TABLE steps AS SELECT 1;",
    "CREATE PERSISTENT SECRET (TYPE s3, KEY_ID 'a', SECRET 'b');",
    "INSERT INTO groups VALUES (1);",
    "DROP VIEW steps;",
    "PREPARE p AS COPY (SELECT 1) TO '{canary}/out.csv'; EXECUTE p;",
    "SELECT 1;",
    "-- a remark\rCREATE TABLE t AS SELECT 1;\nCREATE VIEW v AS SELECT 1;",
    "/* /* */ CREATE VIEW v AS SELECT 1; */ CREATE TABLE t AS SELECT 1;",
]
LEAKING = [
    "SET VARIABLE taken = (SELECT content FROM read_text('{canary}/secret.txt'));",
    "CREATE OR REPLACE VIEW taken AS FROM read_text('{canary}/secret.txt');",
    "CREATE OR REPLACE VIEW taken AS FROM read_csv('{run}/link/secret.csv');",
    "CREATE OR REPLACE VIEW taken AS WITH a AS (COPY (SELECT 1 AS u) TO '{canary}/out.csv') FROM "
    "a;",
]


@pytest.fixture(scope="module", params=MODES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("hostile"), protection=request.param)


def try_open(world: World, directory: Path, text: str) -> str:
    """Open a copy of the run to whose open.sql `text` was added; return why it could not be
    opened.
    """
    copy = directory / "copy"
    shutil.copytree(world.layout.root, copy, symlinks=True)
    before = world.fingerprint()
    path = copy / "open.sql"
    path.write_text(path.read_text().replace(MACROS_MARK, f"{world.fill(text)}\n{MACROS_MARK}"))
    try:
        with (
            pytest.raises(StoreError) as refused,
            open_run(copy, protection=world.protection, memory_limit="100MB"),
        ):
            pass
    finally:
        shutil.rmtree(copy)
    assert world.fingerprint() == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "CREATE MACRO len(x) AS 1;",
        '-- harmless\ncreate or replace function LEFT_(x) AS 1; CREATE MACRO "Count_Star"() AS 9;',
        "CREATE SCHEMA s; CREATE MACRO s.upper(x) AS 'x';",
        "CREATE MACRO min(x) AS NULL; CREATE MACRO lower(x) AS random()::VARCHAR; CREATE SCHEMA "
        "system; CREATE MACRO duckdb_functions() AS TABLE SELECT 'a' AS function_name, true AS "
        "internal;",
    ],
)
def test_no_macro_takes_the_place_of_a_function(world: World, tmp_path: Path, text: str) -> None:
    """The attack: `len` of a run's own let a page decode 25 million tokens, and with a `count` of
    its own an audit never ended.
    """
    assert "is the name of a function of DuckDB" in try_open(world, tmp_path, text)


@pytest.mark.parametrize("text", HUNGRY)
def test_the_memory_limit_holds_while_a_run_is_opened(
    world: World, tmp_path: Path, text: str
) -> None:
    why = try_open(world, tmp_path, text)
    assert "need more memory than they may have (95.3 MiB); raise memory_limit" in why


def test_the_opening_time_out_ends_an_endless_open_sql(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "START_S", 1.5)  # no time is long enough for the statement
    why = try_open(world, tmp_path, f"SET VARIABLE endless = ({HEAVY[0]});")
    assert "not open within 1.5 s" in why and "open.sql" in why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("left_out", "['{copy}/' || {long}]"),
        ("left_out", "{long}"),
        ("segments", "list_append(getvariable('segments'), '{copy}/' || {long})"),
    ],
)
def test_the_names_of_files_that_are_left_out_are_short(
    world: World, tmp_path: Path, name: str, value: str
) -> None:
    """The run's own text sets the variables that hold them."""
    copy = tmp_path / "copy"
    shutil.copytree(world.layout.root, copy, symlinks=True)
    path, long = copy / "open.sql", "repeat(chr(27) || chr(93), 100000)"
    text = f"SET VARIABLE {name} = {value.format(copy=copy, long=long)};\n{VIEWS_MARK}"
    path.write_text(path.read_text().replace(VIEWS_MARK, text))
    try:
        with open_run(copy, protection=world.protection, warn=False) as run:
            said = run.left_out
    except StoreError as error:
        said = str(error)
    assert said and len(said) <= SHOWN_CHARACTERS


@pytest.mark.parametrize("text", FORBIDDEN)
def test_no_statement_but_views_macros_and_variables_is_allowed(text: str) -> None:
    with pytest.raises(
        FormatError, match="open.sql may only make views, macros and variables, not"
    ):
        checked_statements(text.format(canary="/canary"))


def test_a_run_with_another_statement_is_not_opened(world: World, tmp_path: Path) -> None:
    for text in (FORBIDDEN[0], "CREATE TABLE hoard AS SELECT * FROM range(1000000000);"):
        why = try_open(world, tmp_path, text)
        assert "open.sql may only make views, macros and variables, not" in why
        assert "fsck --repair" in why


def test_what_open_sql_reads_is_in_the_run(world: World, tmp_path: Path) -> None:
    for text in LEAKING:
        assert SECRET not in try_open(world, tmp_path, text), text


def test_open_sql_may_not_hide_a_statement_before_the_views(world: World, tmp_path: Path) -> None:
    """The text before the mark of the views is executed first, and checked like the rest."""
    copy = tmp_path / "copy"
    shutil.copytree(world.layout.root, copy, symlinks=True)
    path = copy / "open.sql"
    path.write_text("SET memory_limit = '1TB';\n" + path.read_text())
    with pytest.raises(
        StoreError, match="may only make views, macros and variables, not SET memory_limit"
    ):
        open_run(copy, protection=world.protection, memory_limit="100MB")


def test_an_honest_run_opens_within_the_limit_and_at_an_older_lsn(world: World) -> None:
    lsn = json.loads(world.layout.manifest.read_text())["lsn"]
    for as_of in (None, lsn):
        with open_run(
            world.layout.root, as_of=as_of, protection=world.protection, memory_limit="100MB"
        ) as opened:
            assert opened.sql("SELECT count(*) AS n, twice(21) AS t FROM steps").to_pylist() == [
                {"n": 6, "t": 42}
            ]
            assert opened.sql("FROM groups").num_rows == 1
            limit = opened.sql(
                "SELECT current_setting('memory_limit') AS m, "
                "current_setting('lock_configuration') AS l"
            )
            assert limit.to_pylist() == [{"m": "95.3 MiB", "l": True}]

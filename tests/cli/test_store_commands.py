"""Check how commands answer wrong arguments, unreadable files and a lack of descriptors.

Check also the printed form of values of every type.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import duckdb
import pytest

from cli.__main__ import main
from store import Catalog, RunLayout, StoreError, export, write_open_sql
from store.reading.reader import open_run
from tests.support.run_views import connect
from tests.support.store_samples import open_train_group, play


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """Two groups, a file each."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=1)
        for ordinal in range(2):
            play(layout, catalog, open_train_group(catalog, ordinal), version=ordinal)
        export(catalog, layout)
    return layout


def test_wrong_arguments_are_refused_before_anything_runs(
    run: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    sql, compact, huge = ["sql", "RUN", "SELECT 1"], ["compact", "RUN"], "9" * 23
    for arguments, named in (
        (["export", "RUN", "DIR", "--where", "won", "--where", "won"], "--where: given twice"),
        ([*sql, "--format", "csv", "--format", "csv"], "--format: given twice"),
        *(([*sql, "--timeout", text], "seconds") for text in ("nan", "inf", "1e300", "-1", "0")),
        ([*sql, "--limit", "many"], "'many' is not a whole number"),
        ([*sql, "--as-of", huge], "9223372036854775807"),
        *(([*compact, "--snapshot-window", text], "seconds") for text in ("nan", "1e300", "-1")),
        *(([*compact, "--keep-days", text], "days") for text in ("1e300", "inf", "nan", "0")),
        *(([*compact, "--keep-versions", text], "whole number of 1 to") for text in (huge, "0")),
    ):
        assert main(arguments) == 2
        assert named in capsys.readouterr().err
    assert main(["sql", str(run.root), "SELECT 1", "--limit", huge]) == 0


@pytest.mark.parametrize("uri", ["file:///nowhere/run", "s3://bucket/run"])
@pytest.mark.parametrize(
    "command",
    [
        ["status", "URI"],
        ["stop", "URI"],
        ["workers", "URI", "3"],
        ["report", "URI"],
        ["sql", "URI", "SELECT 1"],
        ["fsck", "URI"],
        ["compact", "URI"],
        ["rebuild", "URI"],
        ["export", "URI", "DIR"],
        ["import", "URI", "DIR"],
        ["replay", "URI", "3"],
        ["export-model", "URI@3", "DIR"],
        ["evaluate", "URI"],
    ],
    ids=lambda command: command[0],
)
def test_a_uri_in_place_of_a_directory_is_named_with_all_its_slashes(
    capsys: pytest.CaptureFixture[str], command: list[str], uri: str
) -> None:
    assert main([word.replace("URI", uri) for word in command]) == 2
    assert capsys.readouterr().err == (
        f"error: {uri} is a URI; bring the run here: gigpo fetch {uri} DIR\n"
    )


def test_a_storage_without_a_run_is_not_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", (tmp_path / "empty").as_uri(), str(tmp_path / "copy")]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/empty/run.json is not there; is it the store.uri of a run?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_what_is_asked_wrongly_is_named(
    run: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for where, query, named in (
        (str(run.root), "SELECT 1; SELECT 2", "2 statements; ask one at a time"),
        (str(run.run_json), "SELECT 1", "is not a run directory"),
        (
            "s3://bucket/run?region=a",
            "SELECT 1",
            "gigpo fetch 's3://bucket/run?region=a' DIR",
        ),
    ):
        assert main(["sql", where, query]) == 2
        assert named in capsys.readouterr().err
    with open_run(run.root) as reader:
        for timeout_s in (float("nan"), float("inf"), 0.0):
            with pytest.raises(StoreError, match="timeout_s is"):
                reader.sql("SELECT 1", timeout_s=timeout_s)
        run.root.rename(tmp_path / "elsewhere")
        with pytest.raises(StoreError, match="moved or deleted.*open it again"):
            reader.sql("FROM steps")


def test_files_that_cannot_be_read_are_said_once(
    run: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in run.segments.rglob("*.parquet"):
        path.chmod(0o644)
        path.write_bytes(b"")
    said = re.escape("2 of 2 files cannot be read and are left out: first ")
    for opened in (open_run, connect):
        with (
            pytest.warns(UserWarning, match=said) as warned,
            opened(run.root if opened is open_run else run),
        ):
            pass
        assert [warning.filename for warning in warned] == [__file__]
    assert main(["sql", str(run.root), "SELECT count(*) AS n FROM steps", "--format", "csv"]) == 3
    printed = capsys.readouterr()
    assert printed.out.split() == ["n", "0"]
    assert re.fullmatch(f"warning: {said}.*; gigpo fsck .*\n", printed.err)


LIMITED = """import resource, sys
from cli.__main__ import main
import store.reading.reader, store.maintenance.whole_run, store.catalog.catalog
held = [open("/dev/null")]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + int(sys.argv[1]), 4096))
sys.exit(main(sys.argv[2:]))"""


@pytest.mark.parametrize("n_files", [1, 2, 3, 5])
def test_without_free_descriptors_a_command_ends_in_one_line(run: RunLayout, n_files: int) -> None:
    for arguments in (["sql", str(run.root), "SELECT 1"], ["fsck", str(run.root)]):
        command = [sys.executable, "-c", LIMITED, str(n_files), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0 or "error: " in done.stderr, done


# A value of every type of DuckDB, and what it is in CSV and in JSON. None: nobody can know it
# before.
TYPES: Mapping[str, tuple[str, object, object]] = {
    "ARRAY": ("[1, 2]::INT[2]", "[1, 2]", [1, 2]),
    "BIGINT": ("9223372036854775807", "9223372036854775807", 9223372036854775807),
    "BIGNUM": ("repeat('9', 50)::BIGNUM", "9" * 50, "9" * 50),
    "BIT": ("'0101'::BIT", "0101", "0101"),
    "BLOB": (r"'\xff\x00a'::BLOB", "ff0061", "ff0061"),
    "BOOLEAN": ("true", "True", True),
    "DATE": ("'infinity'::DATE", "infinity", "infinity"),
    "DECIMAL": (
        "0.12345678901234567890::DECIMAL(38, 20)",
        "0.12345678901234567890",
        "0.12345678901234567890",
    ),
    "DOUBLE": ("'-inf'::DOUBLE", "-inf", None),
    "ENUM": ("'a'::ENUM('a', 'b')", "a", "a"),
    "FLOAT": ("1.5::FLOAT", "1.5", 1.5),
    "GEOMETRY": ("'POINT (1 2)'::GEOMETRY", "POINT (1 2)", "POINT (1 2)"),
    "HUGEINT": ("(-170141183460469231731687303715884105728)::HUGEINT", str(-(2**127)), -(2**127)),
    "INTEGER": ("-1::INTEGER", "-1", -1),
    "INTERVAL": ("INTERVAL '1 year 2 seconds'", "1 year 00:00:02", "1 year 00:00:02"),
    "LIST": ("['01'::BIT, NULL]", '["01", null]', ["01", None]),
    "MAP": ("MAP {{'a': 1}: ['infinity'::TIMESTAMP]}", None, {'{"a": 1}': ["infinity"]}),
    "NULL": ("NULL", "", None),
    "SMALLINT": ("1::SMALLINT", "1", 1),
    "STRUCT": (
        "{'a': '290000-01-01'::TIMESTAMP, 'b': NULL}",
        None,
        {"a": "290000-01-01 00:00:00", "b": None},
    ),
    "TIME": ("'24:00:00'::TIME", "24:00:00", "24:00:00"),
    "TIME WITH TIME ZONE": ("'12:34:56+02:30'::TIMETZ", "12:34:56+02:30", "12:34:56+02:30"),
    "TIMESTAMP": ("'-infinity'::TIMESTAMP", "-infinity", "-infinity"),
    "TIMESTAMP WITH TIME ZONE": ("'infinity'::TIMESTAMPTZ", "infinity", "infinity"),
    "TIMESTAMPTZ_NS": ("'infinity'::TIMESTAMP_NS::TIMESTAMPTZ_NS", "infinity", "infinity"),
    "TIMESTAMP_MS": (
        "'290000-01-01'::TIMESTAMP_MS",
        "290000-01-01 00:00:00",
        "290000-01-01 00:00:00",
    ),
    "TIMESTAMP_NS": ("'infinity'::TIMESTAMP_NS", "infinity", "infinity"),
    "TIMESTAMP_S": (
        "'290000-01-01'::TIMESTAMP_S",
        "290000-01-01 00:00:00",
        "290000-01-01 00:00:00",
    ),
    "TIME_NS": ("'12:00:00.123456789'::TIME_NS", "12:00:00.123456789", "12:00:00.123456789"),
    "TINYINT": ("1::TINYINT", "1", 1),
    "TUPLE": ("row(1, '01'::BIT)", None, {"element1": 1, "element2": "01"}),
    "TYPE": ("get_type(1)", "INTEGER", "INTEGER"),
    "UBIGINT": ("18446744073709551615::UBIGINT", str(2**64 - 1), 2**64 - 1),
    "UHUGEINT": (
        "340282366920938463463374607431768211455::UHUGEINT",
        str(2**128 - 1),
        str(2**128 - 1),
    ),
    "UINTEGER": ("1::UINTEGER", "1", 1),
    "UNION": ("union_value(at := INTERVAL 1 day)", "1 day", "1 day"),
    "USMALLINT": ("1::USMALLINT", "1", 1),
    "UTINYINT": ("1::UTINYINT", "1", 1),
    "UUID": (
        f"'{'0' * 31}1'::UUID",
        f"{'0' * 8}-0000-0000-0000-{'0' * 11}1",
        f"{'0' * 8}-0000-0000-0000-{'0' * 11}1",
    ),
    "VARCHAR": ("chr(0) || 'é'", "\0é", "\0é"),
    "VARIANT": ("{'a': [1]}::VARIANT", "{'a': [1]}", "{'a': [1]}"),
}
MORE: Mapping[str, tuple[str, object, object]] = {
    "year 2000 BC": ("'2000-01-01 (BC)'::DATE", "2000-01-01 (BC)", "2000-01-01 (BC)"),
    "no fields": ("struct_pack()", "{}", {}),
    "no items": ("[]", "[]", []),
    "no keys": ("MAP {}", "{}", {}),
    "keys with one text": ("MAP(['1'::VARIANT, 1::VARIANT], [1, 2])", "{1=1, 1=2}", "{1=1, 1=2}"),
    "numbers for keys": ("MAP([1.0::FLOAT, 2], [1, 2])", None, {"1.0": 1, "2.0": 2}),
    "nan in a list": ("['nan'::DOUBLE]", "[null]", [None]),
    "union of lists": ("union_value(at := [1])", "[1]", "[1]"),
    '"quoted", name': ("{'a \"b\"': '1'::BIT}", None, {'a "b"': "1"}),
}


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_values_of_every_type_are_printed_as_csv_and_as_json(
    run: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    types = duckdb.sql("SELECT DISTINCT logical_type FROM duckdb_types()").fetchall()
    assert {name for (name,) in types} == TYPES.keys()
    values = {**TYPES, **MORE}
    named = ((value, name.replace('"', '""')) for name, (value, _, _) in values.items())
    query = "SELECT " + ", ".join(f'{value} AS "{name}"' for value, name in named)
    assert main(["sql", str(run.root), query, "--format", "csv"]) == 0
    header, cells = csv.reader(io.StringIO(capsys.readouterr().out, newline=""))
    found = dict(zip(header, cells, strict=True))
    assert {name: found[name] for name, (_, text, _) in values.items() if text is not None} == {
        name: text for name, (_, text, _) in values.items() if text is not None
    }
    assert main(["sql", str(run.root), query, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=no_constant)
    assert found == {name: value for name, (_, _, value) in values.items()}
    assert main(["sql", str(run.root), "SELECT 1 AS x, 2 AS x, 3 AS x_1", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"x": 1, "x_2": 2, "x_1": 3}
    for value in ("(-170141183460469231731687303715884105728)::HUGEINT", "2::UHUGEINT"):
        assert main(["sql", str(run.root), f"SELECT {value} AS x"]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err

"""What the command line and the reader say to wrong arguments, to what cannot be answered and to what is not all."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

from store import Catalog, RunLayout, StoreError, export, write_open_sql
from store.__main__ import main
from store.reading.query import connect
from store.reading.reader import open_run
from tests.store_samples import open_train_group, play

FORMAT_1 = Path(__file__).with_name("data") / "format-1.tar.gz"


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


def test_wrong_arguments_are_refused_before_anything_runs(run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
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
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert named in capsys.readouterr().err
    assert main(["sql", str(run.root), "SELECT 1", "--limit", huge]) == 0


def test_what_is_asked_wrongly_is_named(run: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for where, query, named in (
        (str(run.root), "SELECT 1; SELECT 2", "2 statements; ask one at a time"),
        (str(run.run_json), "SELECT 1", "is not a run directory"),
        ("s3://bucket/run?region=a", "SELECT 1", "python -m store fetch s3://bucket/run?region=a DIR"),
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


def test_files_that_cannot_be_read_are_said_once(run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    for path in run.segments.rglob("*.parquet"):
        path.chmod(0o644)
        path.write_bytes(b"")
    said = re.escape("2 of 2 files cannot be read and are left out: first ")
    for opened in (open_run, connect):
        with pytest.warns(UserWarning, match=said) as warned, opened(run.root if opened is open_run else run):
            pass
        assert [warning.filename for warning in warned] == [__file__]
    assert main(["sql", str(run.root), "SELECT count(*) AS n FROM steps", "--format", "csv"]) == 3
    printed = capsys.readouterr()
    assert printed.out.split() == ["n", "0"]
    assert re.fullmatch(f"warning: {said}.*; python -m store fsck .*\n", printed.err)


def test_what_a_run_of_format_1_does_not_have_is_told_apart_from_a_wrong_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(FORMAT_1) as archive:
        archive.extractall(tmp_path, filter="data")
    root = str(tmp_path / "format-1")
    for arguments, hinted in (
        (["FROM ledger"], True),
        (["SELECT l.newest_weights_digest FROM lineage l"], True),
        (["SELECT 1", "--as-of", "1"], True),
        (["SELEC 1"], False),
    ):
        assert main(["sql", root, *arguments]) == 2
        assert (f"python -m store compact {root} upgrades it" in capsys.readouterr().err) == hinted

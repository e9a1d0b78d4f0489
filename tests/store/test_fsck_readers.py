"""fsck of what readers read: exports, the manifest and open.sql; repair writes them anew."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli.__main__ import main
from store import Catalog, FormatError, RunLayout, export, write_open_sql
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.repair import repair
from store.reading.manifest import read_manifest
from store.reading.open_sql import VIEWS_MARK
from tests.support.run_views import connect
from tests.support.store_damage import an_export, ask
from tests.support.store_runs import copy_run, flip


@pytest.fixture
def layout(intact: RunLayout, tmp_path: Path) -> RunLayout:
    layout = copy_run(intact, tmp_path / "run")
    info = json.loads(layout.run_json.read_text())
    layout.run_json.write_text(json.dumps({**info, "config_yaml": "max_staleness: 2\n"}))
    return RunLayout.open(layout.root)


def test_flipped_bits_in_an_export_are_found_and_it_is_written_anew(layout: RunLayout) -> None:
    path = an_export(layout, part=-1)
    page = pq.ParquetFile(path).metadata.row_group(0).column(0)  # uids: any bits will do
    flip(path, 8 * (page.dictionary_page_offset + page.total_compressed_size // 2))
    assert pq.read_table(path).num_rows
    (finding,) = check(layout, level=CONTENTS)
    assert finding.what == "export_damaged"
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=[finding])
    assert check(layout, level=CONTENTS) == []


def test_an_older_manifest_whose_files_are_gone_is_replaced(layout: RunLayout) -> None:
    older = json.loads(layout.manifest.read_text())
    retired = ask(layout, "SELECT path FROM segment WHERE retired_lsn IS NOT NULL")[0][0]
    for number, content in enumerate(
        (
            {**older, "segments": [*older["segments"], retired]},
            {
                "format_version": 1,
                "run_id": older["run_id"],
                "lsn": 1,
                "segments": [],
                "exports": {"x": "export/x-1.parquet"},
            },
        )
    ):
        (layout.root / retired).unlink(missing_ok=True)
        layout.manifest.write_text(json.dumps(content))
        found = [
            finding for finding in check(layout, level=CONTENTS) if finding.severity == "error"
        ]
        assert [finding.what for finding in found] == [
            ("manifest_segment", "manifest_damaged")[number]
        ]
        with Catalog.open(layout) as catalog:
            repair(catalog, layout, findings=check(layout, level=CONTENTS))
        assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize("text", [None, "garbage", "SET VARIABLE max_staleness = 7;\n"])
def test_open_sql_that_is_gone_or_garbage_is_written_again(
    layout: RunLayout, text: str | None
) -> None:
    layout.open_sql.unlink()
    if text is not None:
        layout.open_sql.write_text(text)
    (finding,) = check(layout, level=CONTENTS)
    assert finding.what == "open_sql_missing"
    with Catalog.open(layout) as catalog:
        (line,) = repair(catalog, layout, findings=[finding])
    assert "advantages(...)" in line
    assert check(layout, level=CONTENTS) == []
    with closing(connect(layout)) as views:
        assert views.sql("SELECT count(*) FROM steps").fetchall()[0][0]
        staleness = views.sql("SELECT getvariable('max_staleness')").fetchall()[0][0]
    assert staleness == (7 if text and "7" in text else 2)  # of what is left of it, or of run.json


PART = {"path": "export/groups-0-9.parquet", "since": 0, "until": 9, "n_rows": 1}
BAD_MANIFESTS: dict[str, object] = {
    "deep": "[" * 100_000,
    "deep inside": '{"format": "async-gigpo/1", "lsn": ' + '{"a":' * 100_000,
    "a long number": '{"lsn": ' + "9" * 5_000 + "}",
    "not utf-8": "\udcff",
    "an lsn beyond int64": {"lsn": 2**63},
    "an lsn below zero": {"lsn": -1},
    "an lsn that is no number": {"lsn": float("nan")},
    "a format that is no text": {"format": ["async-gigpo/1"]},
    "segments that are no texts": {"segments": [["a"]]},
    "no segments": {"segments": []},
    "tables that are no object": {"tables": []},
    "a table without parts": {"tables": {"groups": []}},
    "parts that are no objects": {"tables": {"groups": [[]]}},
    "rows that are no number": {"tables": {"groups": [{**PART, "n_rows": None}]}},
    "rows below zero": {"tables": {"groups": [{**PART, "n_rows": -1}]}},
    "until of another part": {"tables": {"groups": [{**PART, "until": 12}]}},
    "superseded that is a text": {"superseded": {"export/groups-1-2.parquet": "b"}},
}


@pytest.mark.parametrize("what", BAD_MANIFESTS)
def test_a_manifest_with_any_content_is_one_finding(
    intact: RunLayout, tmp_path: Path, what: str
) -> None:
    layout, bad = copy_run(intact, tmp_path / "run"), BAD_MANIFESTS[what]
    content = (
        bad
        if isinstance(bad, str)
        else json.dumps({**json.loads(layout.manifest.read_text()), **bad})
    )
    layout.manifest.write_text(content, errors="surrogateescape")
    with pytest.raises(
        FormatError,
        match=r"manifest.json (is damaged \(.*fsck --repair|names 'a', and no run names)",
    ) as problem:
        read_manifest(layout)
    assert len(str(problem.value)) < 1000
    assert [finding.what for finding in check(layout, level=CONTENTS)] == ["manifest_damaged"]
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=check(layout, level=CONTENTS))
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("GROUP BY", "GROUP  BY"),
        ("SET VARIABLE here = (", "ATTACH 'other.db';\nSET VARIABLE here = ("),
        ("max_staleness = 4;", "max_staleness = 4; DROP VIEW x;"),
        (VIEWS_MARK, f"{VIEWS_MARK} \udcff"),
        ("SELECT", "SELEC"),
    ],
)
def test_open_sql_that_was_changed_is_written_again(
    intact: RunLayout, tmp_path: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = copy_run(intact, tmp_path / "it's a run")
    write_open_sql(layout, macros=["CREATE MACRO own() AS 7;"], max_staleness=4)
    assert check(layout, level=CONTENTS) == []  # also where its directory has moved
    text = layout.open_sql.read_text()
    assert old in text
    layout.open_sql.write_text(text.replace(old, new, 1), errors="surrogateescape")
    assert [finding.what for finding in check(layout, level=CONTENTS)] == ["open_sql_changed"]
    assert main(["sql", str(layout.root), "SELECT 1"]) in (0, 2)
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert check(layout, level=CONTENTS) == []
    assert main(["sql", str(layout.root), "SELECT own() FROM steps"]) == 0
    assert "max_staleness = 4;" in layout.open_sql.read_text()


def test_a_directory_in_the_place_of_open_sql_is_set_aside(
    intact: RunLayout, tmp_path: Path
) -> None:
    layout = copy_run(intact, tmp_path / "run")
    layout.open_sql.unlink()
    layout.open_sql.mkdir()
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    assert layout.open_sql.is_file() and (layout.quarantine / "open.sql").is_dir()


def test_a_run_without_manifest_and_open_sql_gets_both(layout: RunLayout) -> None:
    layout.open_sql.unlink()
    layout.manifest.unlink()
    found = check(layout, level=CONTENTS)
    assert [finding.what for finding in found] == ["manifest_missing", "open_sql_missing"]
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=found)
    assert check(layout, level=CONTENTS) == []


def test_a_start_that_did_not_get_to_open_sql_is_no_damage(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        assert check(layout, level=CONTENTS) == []
        export(catalog, layout)
        assert check(layout, level=CONTENTS) == []

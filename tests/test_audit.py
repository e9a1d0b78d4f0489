"""audit.py: the advantages of a stored run under other settings."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import audit
import configs
from configs import Config
from gigpo import PUBLISHED_SETTINGS, advantages_macro
from store import Catalog, RunLayout, export, write_open_sql
from tests.store_samples import open_train_group, play


@pytest.fixture
def run(tmp_path: Path) -> Path:
    layout = RunLayout.create(tmp_path / "run", config_yaml=configs.to_yaml(Config()))
    write_open_sql(layout, macros=[advantages_macro(PUBLISHED_SETTINGS)], max_staleness=1)
    with Catalog.open(layout) as catalog:
        for ordinal in range(3):
            play(layout, catalog, open_train_group(catalog, ordinal, size=3))
        export(catalog, layout)
    return layout.root


def test_two_settings_stand_side_by_side(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "a.parquet"
    assert audit.main([str(run), "invalid_penalty=5", "--against", "invalid_penalty=0", "--output", str(table)]) == 0
    printed = capsys.readouterr().out
    assert "27 steps" in printed and "invalid_penalty=5.0" in printed and "invalid_penalty=0.0" in printed
    rows = pq.read_table(table)
    # Members are alike, and the first step of each is invalid: without a penalty nothing differs, with one the first steps do.
    assert set(rows["advantage_b"].to_pylist()) == {0.0}
    assert {i: a != 0 for i, a in zip(rows["step_index"].to_pylist(), rows["advantage_a"].to_pylist(), strict=True)} == {
        0: True,
        1: True,
        2: True,
    }


def test_the_run_itself_and_a_selection(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(run), "--where", "group_uid IN (SELECT group_uid FROM groups WHERE ordinal < 2)"]) == 0
    assert "18 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["gama=1"], "gama=1"),
        (["gamma=much"], "float"),
        (["gamma=2"], "outside [0, 1]"),
        (["--where", "false"], "no step"),
        (["--where", "nothing = 1"], "nothing"),
    ],
)
def test_a_mistake_is_one_line(run: Path, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and len(error.splitlines()) == 1


def test_a_file_that_is_there_is_not_written_over(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert audit.main([str(run), "--output", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine").read_text() == "mine"

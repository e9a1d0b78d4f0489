"""Check episodes that were begun and gave no trajectory: recorded, seen by SQL, never taken for
trajectories.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from store import Catalog, RunLayout, StoreError, export, write_open_sql
from store.catalog.records import WHY_UNFINISHED
from store.maintenance.fsck import CONTENTS, check
from tests.support.run_views import connect
from tests.support.store_samples import make_unfinished, open_train_group, play

SHOWN = (
    "SELECT number, worker, version, why, n_steps, n_response_tokens FROM unfinished ORDER BY ALL"
)


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=1)
    return layout


def ask(layout: RunLayout, query: str, *, as_of: int | None = None) -> list[tuple]:
    with closing(connect(layout, as_of=as_of)) as views:
        return views.sql(query).fetchall()


def test_they_are_seen_by_sql_and_counted_nowhere_else(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
        play(layout, catalog, group)
        before = export(catalog, layout)
        counts = catalog.counts()
        catalog.record_unfinished(
            [make_unfinished(group, 2), make_unfinished(group, 1, why="failed", n_steps=0)],
            worker="w0",
        )
        catalog.record_unfinished([], worker="w0")
        assert export(catalog, layout) == before + 1
        assert catalog.counts() == counts
        assert ask(layout, SHOWN) == [
            (1, "w0", 1, "failed", 0, 70),
            (2, "w0", 1, "straggler", 7, 70),
        ]
        assert ask(layout, SHOWN, as_of=before) == []
        assert len(ask(layout, SHOWN, as_of=before + 1)) == 2
        joined = "FROM unfinished u JOIN groups USING (group_uid, task_id)"
        assert (
            ask(layout, f"SELECT u.split, task_id, epoch(ended_at - begun_at), n_members {joined}")
            == [("train", "task-0", 9.0, 2)] * 2
        )
        assert ask(layout, "SELECT count(*) FROM trajectories") == [(2,)]
        batch = catalog.claim(n_groups=1, current_version=1, max_staleness=1)
        assert batch is not None and len(batch.groups) == 1
    assert check(layout, level=CONTENTS) == []


def test_what_contradicts_the_catalog_is_refused_as_a_whole(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
        known = make_unfinished(group, 1)
        with pytest.raises(StoreError, match="cannot end as 'bored'; use one of straggler, failed"):
            catalog.record_unfinished([known, make_unfinished(group, 0, why="bored")], worker="w0")
        with pytest.raises(StoreError, match="FOREIGN KEY"):
            catalog.record_unfinished(
                [known, make_unfinished(group, 0, group_uid=b"x" * 16)], worker="w0"
            )
        for why in WHY_UNFINISHED:
            catalog.record_unfinished([make_unfinished(group, 0, why=why)], worker="w0")
        export(catalog, layout)
    assert ask(layout, "SELECT count(*), count(DISTINCT why) FROM unfinished") == [
        (len(WHY_UNFINISHED),) * 2
    ]
    with (
        closing(sqlite3.connect(layout.catalog)) as file,
        pytest.raises(sqlite3.IntegrityError, match="append-only"),
    ):
        file.execute("DELETE FROM unfinished")

"""Groups of other runs to be trained on: which are taken, in which order they are claimed, how
often, and what undoes it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

from store import (
    Batch,
    Catalog,
    DigestError,
    FormatError,
    Group,
    ReusedGroups,
    RunLayout,
    StoreError,
    Trajectory,
    VersionRecord,
    export,
    read_segments,
    to_table,
    trained_step,
    write_open_sql,
    write_segment,
)
from store.catalog.batches import release
from store.catalog.groups import insert_trajectories
from store.catalog.imported_groups import has_offline_groups, rounds
from store.exchange.dataset_export import export_selection
from store.exchange.dataset_import import import_selection
from store.exchange.offline_import import (
    TakenSource,
    find_sources,
    parse_source,
    take_sources,
)
from store.hashing import uid
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.maintenance.repair import repair
from store.maintenance.sweep import expire_old
from tests.support.fast_directory import fast_directory
from tests.support.forged_dataset import write_dataset
from tests.support.run_views import connect
from tests.support.store_runs import MERGE_TWO, compact_once, flip
from tests.support.store_samples import in_play, make_trajectory, open_train_group, play

VERSION_HERE, BOUND = 3, 1
# events of sys.audit
FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "sqlite3.connect"}


def make_source(root: Path, *, n_groups: int = 3, missing: int = 0) -> RunLayout:
    """Groups of two of versions 0, 1, 2 ...; member 0 won. Of the last `missing` members are not
    played. One held-out group.
    """
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        for number in range(n_groups):
            group = open_train_group(catalog, None)
            members = group.missing[
                : len(group.missing) - (missing if number == n_groups - 1 else 0)
            ]
            played = [
                make_trajectory(group, member, version=number, n_steps=3 + number)
                for member in members
            ]
            catalog.commit(
                write_segment(layout, played, worker="w0", epoch=catalog.epoch), epoch=catalog.epoch
            )
        play(
            layout,
            catalog,
            catalog.open_group(
                ordinal=0, task_id="h", split="heldout", size=1, evaluated_version=0
            ),
        )
        export(catalog, layout)
    return layout


def new_run(root: Path) -> RunLayout:
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=BOUND)
    return layout


def taken_from(target: RunLayout, *sources: str, order: str = "") -> tuple[TakenSource, ...]:
    return take_sources(target.root, [parse_source(text) for text in sources], order=order)


def claim(
    catalog: Catalog, *, n_offline: int = 2, uses: int = 2, n_groups: int = 0
) -> Batch | None:
    return catalog.claim(
        n_groups=n_groups,
        current_version=VERSION_HERE,
        max_staleness=BOUND,
        reused=ReusedGroups(n_offline=n_offline, max_uses=uses),
    )


def learn(catalog: Catalog, step: int, **how: int) -> list[str]:
    """The tasks of one learner step."""
    batch = claim(catalog, **how)
    assert batch is not None
    catalog.settle(batch.batch_id, learner_step=step, filtered={}, version_in=VERSION_HERE)
    return [group.task_id for group in batch.groups]


def ask(layout: RunLayout, query: str) -> list[tuple]:
    with connect(layout) as views:
        return views.sql(query).fetchall()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    # every transaction is synced, and nothing here is about the disk
    with fast_directory() as path:
        yield path


@pytest.fixture(scope="module")
def source() -> Iterator[RunLayout]:
    with fast_directory() as path:
        yield make_source(path / "source")


@pytest.fixture
def target(tmp_path: Path) -> RunLayout:
    return new_run(tmp_path / "target")


@pytest.fixture
def catalog(source: RunLayout, target: RunLayout) -> Iterator[Catalog]:
    taken_from(target, str(source.root))
    with Catalog.open(target) as catalog:
        yield catalog


def test_whole_training_groups_are_taken_and_the_source_is_only_read(
    tmp_path: Path, target: RunLayout
) -> None:
    source = make_source(tmp_path / "source", missing=1)
    before = {path: path.read_bytes() for path in source.root.rglob("*.parquet")}
    with Catalog.open(source):  # it may be training meanwhile
        (taken,) = taken_from(target, str(source.root))
    assert (taken.n_groups, taken.n_incomplete, taken.run_id) == (2, 1, source.info.run_id)
    assert str(taken).endswith("1 incomplete ones left out")
    assert before == {path: path.read_bytes() for path in source.root.rglob("*.parquet")}
    ours = ask(
        target, "SELECT split, state, source, task_id, version_min FROM groups ORDER BY ordinal"
    )
    assert ours == [("imported", "complete", source.info.run_id, f"task-{n}", n) for n in range(2)]
    columns = "traj_uid, step_index, response_ids, response_logprobs, reward, won, version_min"
    theirs = ask(
        source,
        f"SELECT {columns} FROM steps WHERE split = 'train' AND version_min < 2 ORDER BY ALL",
    )
    assert ask(target, f"SELECT {columns} FROM steps ORDER BY ALL") == theirs
    assert check(target, level=CONTENTS) == []


@pytest.mark.parametrize(
    ("where", "tasks"),
    [
        ("won AND n_steps > 3", ["task-1", "task-2"]),  # member 1 comes along, which did not win
        ("group_uid IN (SELECT group_uid FROM groups WHERE ordinal = 2)", ["task-2"]),
    ],
)
def test_a_condition_selects_groups_by_any_of_their_trajectories(
    source: RunLayout, target: RunLayout, where: str, tasks: list[str]
) -> None:
    taken_from(target, f"{source.root}@{where}")
    assert ask(target, "SELECT task_id, n_members FROM groups ORDER BY ordinal") == [
        (task, 2) for task in tasks
    ]


@pytest.mark.parametrize(
    ("order", "tasks"),
    [
        ("", ["task-0", "task-1", "task-2"]),
        ("task_id = 'task-1' DESC, completed_at DESC -- a comment", ["task-1", "task-2", "task-0"]),
    ],
)
def test_the_order_is_sql_over_what_the_source_says_of_its_groups(
    source: RunLayout, target: RunLayout, order: str, tasks: list[str]
) -> None:
    taken_from(target, str(source.root), order=order)
    with Catalog.open(target) as catalog:
        assert learn(catalog, 1, n_offline=3) == tasks


def test_several_sources_a_dataset_among_them(
    tmp_path: Path, source: RunLayout, target: RunLayout
) -> None:
    other = make_source(tmp_path / "other", n_groups=2)
    whole = "group_uid IN (SELECT group_uid FROM trajectories WHERE version_min = 1)"
    export_selection(
        other.root, tmp_path / "dataset", where=f"{whole} OR version_min = 0 AND won", as_of=None
    )
    reports = taken_from(
        target, str(tmp_path / "dataset"), f"{source.root}@version_min > 0", str(source.root)
    )
    assert [(report.n_groups, report.n_incomplete) for report in reports] == [
        (1, 1),
        (2, 0),
        (1, 0),
    ]
    found = ask(target, "SELECT source, task_id FROM groups ORDER BY ordinal")
    assert found == [
        (other.info.run_id, "task-1"),
        *((source.info.run_id, f"task-{n}") for n in (1, 2, 0)),
    ]
    assert (
        sum(n for (n,) in ask(target, "SELECT count(*) FROM steps GROUP BY group_uid"))
        == 8 + 8 + 10 + 6
    )


@pytest.mark.parametrize(
    ("text", "order", "message"),
    [
        ("{run}@true) OR (true", "", "no SQL expression"),
        ("{run}@version_min > 99", "", "no whole training group is selected"),
        (
            "{run}@wonn",
            "",
            r"source .*@wonn cannot be selected: .*write what follows the @ as after WHERE",
        ),
        ("{run}", "nonsense", "nonsense"),
        ("{run}", "(SELECT count(*) FROM read_parquet('x.parquet'))", "cannot be used"),
        ("{run}-not", "", "neither a run directory nor"),
        ("{target}", "", "this very run"),
    ],
)
def test_what_cannot_be_taken_is_refused_and_nothing_is_imported(
    source: RunLayout, target: RunLayout, text: str, order: str, message: str
) -> None:
    with pytest.raises(StoreError, match=message):
        taken_from(target, text.format(run=source.root, target=target.root), order=order)
    with Catalog.open(target) as catalog:
        assert catalog.live_segments() == () and not catalog.has_offline_groups()


def test_a_dataset_of_incomplete_groups_says_how_many_and_how_to_export_whole_ones(
    tmp_path: Path, source: RunLayout, target: RunLayout
) -> None:
    def exported(name: str, *, whole_groups: bool) -> str:
        export_selection(
            source.root, tmp_path / name, where="won -- some", as_of=None, whole_groups=whole_groups
        )
        return str(tmp_path / name)

    hint = "`gigpo export --groups` exports whole groups"
    with pytest.raises(
        StoreError, match=f"all: 3 groups, of which each lacks trajectories; {hint}"
    ):
        taken_from(target, exported("won", whole_groups=False))
    (taken, partly) = taken_from(
        target, exported("groups", whole_groups=True), str(tmp_path / "won")
    )
    assert (taken.n_groups, taken.n_incomplete) == (3, 0)
    assert str(partly).endswith(f"3 incomplete ones left out ({hint})")


def test_a_dataset_takes_no_condition_and_no_changed_file(
    tmp_path: Path, source: RunLayout, target: RunLayout
) -> None:
    dataset = export_selection(source.root, tmp_path / "dataset", where=None, as_of=None)
    with pytest.raises(StoreError, match="select when it is exported"):
        taken_from(target, f"{tmp_path / 'dataset'}@won")
    flip(tmp_path / "dataset" / dataset.parts[0].path, 800)
    with pytest.raises(DigestError, match="export again"):
        taken_from(target, str(tmp_path / "dataset"))


def test_a_group_that_dataset_json_does_not_know_is_named(
    tmp_path: Path, source: RunLayout, target: RunLayout
) -> None:
    export_selection(source.root, tmp_path / "dataset", where=None, as_of=None)
    described = tmp_path / "dataset" / "dataset.json"
    content = json.loads(described.read_text())
    content["groups"] = {}
    described.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="does not tell the size of group .*; export it again"):
        taken_from(target, str(tmp_path / "dataset"))


@pytest.mark.parametrize("order", ["completed_at DESC", "n_won, state"])
def test_an_order_by_what_a_dataset_does_not_say_is_refused(
    tmp_path: Path, source: RunLayout, target: RunLayout, order: str
) -> None:
    export_selection(source.root, tmp_path / "dataset", where=None, as_of=None)
    with pytest.raises(
        StoreError,
        match="with a dataset among the sources there is no completed_at, opened_at, ordinal",
    ):
        taken_from(target, str(source.root), str(tmp_path / "dataset"), order=order)
    taken_from(target, str(tmp_path / "dataset"), order="version_min DESC")
    assert ask(target, "SELECT task_id FROM groups ORDER BY ordinal") == [
        (f"task-{n}",) for n in (2, 1, 0)
    ]


def test_where_the_condition_of_a_source_begins(tmp_path: Path) -> None:
    (tmp_path / "a@b").mkdir()
    (tmp_path / "a").mkdir()
    for text, place, where in (
        ("a", "a", None),
        ("a@b", "a@b", None),
        ("a@b@won", "a@b", "won"),
        ("a@task_id LIKE '%@%'", "a", "task_id LIKE '%@%'"),
        ("none@x@y", "none", "x@y"),
    ):
        found = parse_source(f"{tmp_path}/{text}")
        assert (found.location, found.where) == (f"{tmp_path}/{place}", where)


def interrupted_at(n: int, function: Callable[..., object]) -> Callable[..., object]:
    """The function, but its call number `n` (from 0) is the last thing this process does."""
    left = [n]

    def call(*given: object, **named: object) -> object:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return function(*given, **named)

    return call


@pytest.mark.parametrize(
    ("function", "n"),
    [
        # within a transaction, after another
        (("store.catalog.imported_groups.insert_trajectories", insert_trajectories), 1),
        (
            ("store.catalog.imported_groups.has_offline_groups", has_offline_groups),
            0,
        ),  # all is written, nothing is imported
        (("store.exchange.offline_import.export", export), 0),  # all is taken, readers do not know
    ],
)
def test_interrupted_between_two_of_its_parts_the_same_call_goes_on(
    source: RunLayout, target: RunLayout, function: tuple[str, Callable[..., object]], n: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.exchange.offline_import.FILE_STEPS", 1)  # a file for each group
        patch.setattr(function[0], interrupted_at(n, function[1]))
        with pytest.raises(KeyboardInterrupt):
            taken_from(target, str(source.root))
    taken_from(target, str(source.root))
    assert taken_from(target, str(source.root)) == (), "once for a run"
    assert ask(target, "SELECT task_id, state, source IS NULL FROM groups ORDER BY ordinal") == [
        (f"task-{n}", "complete", False) for n in range(3)
    ]
    assert ask(target, "SELECT count(*) FROM steps") == [(6 + 8 + 10,)]
    assert check(target, level=CONTENTS) == []


def take_and_die(target: Path, source: Path, *, dies_at: int | None, count: Any) -> None:
    """Takes a source; killed at its file operation `dies_at` in the target, or with all of them in
    `count`.
    """
    target_path = f"{target}/"
    with mock.patch("store.exchange.offline_import.FILE_STEPS", 1):

        def count_down(event: str, given: tuple[Any, ...]) -> None:
            if event in FILE_OPERATIONS and target_path in f"{given[0]}/":
                count.value += 1
                if count.value == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count_down)
        take_sources(target, [parse_source(str(source))], order="")


def test_killed_at_its_file_operations_the_same_call_goes_on(
    tmp_path: Path, source: RunLayout
) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])

    def end_of(target: RunLayout, dies_at: int | None) -> tuple[int | None, int]:
        count = processes.Value("i", 0, lock=False)
        child = processes.Process(
            target=take_and_die,
            args=(target.root, source.root),
            kwargs={"dies_at": dies_at, "count": count},
        )
        child.start()
        child.join()
        return child.exitcode, count.value

    status, n_operations = end_of(new_run(tmp_path / "whole"), None)
    assert status == 0 and n_operations > 10
    for number, dies_at in enumerate(
        sorted(random.Random(7).sample(range(1, n_operations + 1), 2))
    ):
        target = new_run(tmp_path / f"target-{number}")
        assert end_of(target, dies_at) == (-signal.SIGKILL, dies_at)
        taken_from(target, str(source.root))
        assert ask(
            target, "SELECT task_id, state, source IS NULL FROM groups ORDER BY ordinal"
        ) == [(f"task-{n}", "complete", False) for n in range(3)]
        assert ask(target, "SELECT count(*) FROM steps") == [(6 + 8 + 10,)]
        assert check(target, level=CONTENTS) == []


def test_the_least_used_come_first_each_so_often_and_then_there_are_none(
    catalog: Catalog, target: RunLayout
) -> None:
    assert catalog.offline_batches_left(2, uses=2) == 3
    assert learn(catalog, 1) == ["task-0", "task-1"]
    assert learn(catalog, 2) == ["task-2", "task-0"]
    assert catalog.offline_batches_left(2, uses=2) == 1
    assert learn(catalog, 3) == ["task-1", "task-2"]
    assert claim(catalog) is None and catalog.offline_batches_left(2, uses=2) == 0
    assert catalog.offline_batches_left(2, uses=3) == 1, "uses may be raised"
    assert learn(catalog, 4, uses=3) == ["task-0", "task-1"]
    counts = catalog.counts()
    assert (in_play(counts), counts.trained, counts.complete, catalog.outstanding()) == (
        0,
        0,
        0,
        0,
    )
    export(catalog, target)
    assert ask(target, "SELECT learner_step, list(use ORDER BY task_id) FROM lineage GROUP BY 1 ORDER BY 1") == [
        (1, [1, 1]), (2, [2, 1]), (3, [2, 2]), (4, [3, 3]),
    ]  # fmt: skip
    assert ask(target, "SELECT DISTINCT state FROM groups") == [("complete",)]
    assert check(target, level=CONTENTS) == []


def test_a_use_that_was_released_gives_its_number_back(catalog: Catalog) -> None:
    first, second = claim(catalog, n_offline=3, uses=3), claim(catalog, n_offline=3, uses=3)
    assert first is not None and second is not None
    with catalog._database.transaction() as tx:
        assert release(tx, first.batch_id, why="released") == 3
    for _ in range(2):
        assert claim(catalog, n_offline=3, uses=3) is not None
    assert claim(catalog, n_offline=3, uses=3) is None
    with catalog._database.transaction() as tx:
        uses = [
            row["use"] for row in tx.rows("SELECT use FROM batch_group WHERE live = 1 ORDER BY use")
        ]
    assert uses == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_stored_groups_are_not_looked_for_while_live_ones_are_too_few(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "store.catalog.imported_groups.least_used",
        lambda *given, **named: pytest.fail("it takes long"),
    )
    assert claim(catalog, n_groups=1) is None


def test_a_roll_back_unuses_them(catalog: Catalog, target: RunLayout) -> None:
    learn(catalog, 1)
    learn(catalog, 2)
    claim(catalog)
    again = catalog.roll_back(1)
    assert (again.batches, again.groups) == (2, 4)
    assert catalog.offline_batches_left(2, uses=2) == 2
    assert learn(catalog, 2) == ["task-2", "task-0"], "as if never asked"
    export(catalog, target)
    assert ask(target, "SELECT count(*), count(*) FILTER (live) FROM lineage") == [(8, 4)]
    assert check(target, level=CONTENTS) == []


def test_live_and_stored_groups_in_one_batch(catalog: Catalog, target: RunLayout) -> None:
    assert claim(catalog, n_groups=1) is None, "nobody has played yet"
    for version in (VERSION_HERE, 0):
        play(target, catalog, open_train_group(catalog, None), version=version)
    batch = claim(catalog, n_groups=1)
    assert batch is not None
    assert [(group.task_id, group.source is None) for group in batch.groups] == [
        ("task-0", True), ("task-0", False), ("task-1", False),
    ]  # fmt: skip
    assert read_segments(target, batch.segments).num_rows == 6 + 6 + 8
    assert claim(catalog, n_groups=1) is None, (
        "the second live one is too old, offline ones never are"
    )
    catalog.settle(
        batch.batch_id,
        learner_step=1,
        filtered={batch.groups[1].group_uid: "alike"},
        version_in=VERSION_HERE,
    )
    export(catalog, target)
    assert ask(target, "SELECT outcome, staleness, source IS NULL FROM lineage ORDER BY ALL") == [
        ("filtered", None, False), ("trained", 0, True), ("trained", None, False),
    ]  # fmt: skip
    assert ask(target, "SELECT count(*) FROM staleness_violations") == [(0,)]
    assert ask(target, "SELECT state, count(*) FROM groups GROUP BY ALL ORDER BY ALL") == [
        ("complete", 3), ("stale", 1), ("trained", 1),
    ]  # fmt: skip
    assert check(target, level=CONTENTS) == []


def test_what_is_merely_imported_is_never_claimed(
    tmp_path: Path, source: RunLayout, target: RunLayout
) -> None:
    export_selection(
        make_source(tmp_path / "other").root, tmp_path / "dataset", where=None, as_of=None
    )
    import_selection(target.root, tmp_path / "dataset")
    taken_from(target, str(source.root))
    with Catalog.open(target) as catalog:
        assert catalog.offline_batches_left(1, uses=1) == 3
        batch = claim(catalog, n_offline=3, uses=1)
        assert batch is not None and {group.source for group in batch.groups} == {
            source.info.run_id
        }


def test_a_task_of_a_stored_group_that_is_held_out_here_is_an_overlap(
    catalog: Catalog, target: RunLayout
) -> None:
    for ordinal, task in enumerate(("h", "task-1")):
        catalog.open_group(
            ordinal=ordinal, task_id=task, split="heldout", size=1, evaluated_version=0
        )
    export(catalog, target)
    assert ask(target, "FROM task_overlap") == [("task-1",)]


def test_retention_and_compaction_leave_them_to_be_used(
    catalog: Catalog, target: RunLayout
) -> None:
    learn(catalog, 1)
    for version in range(VERSION_HERE + 1):
        catalog.record_version(
            VersionRecord(
                version=version,
                path=f"weights/v{version}",
                digest="d",
                learner_step=version or None,
            )
        )
    assert expire_old(catalog, target, keep_days=None, keep_versions=1) == ()
    assert expire_old(catalog, target, keep_days=1e-9, keep_versions=None) == ()
    compact_once(catalog, target, policy=MERGE_TWO, skip=())
    batch = claim(catalog)
    assert batch is not None and read_segments(target, batch.segments).num_rows == 10 + 6


def test_half_a_group_is_not_trained_on(
    source: RunLayout, target: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.exchange.offline_import.FILE_STEPS", 1)
    taken_from(target, str(source.root))
    with Catalog.open(target) as catalog:
        learn(catalog, 1)
        batch = claim(catalog, n_offline=1)
        assert batch is not None and [group.task_id for group in batch.groups] == ["task-2"]
        lost = target.root / batch.segments[0].path
        content = lost.read_bytes()
        lost.unlink()
        repair(catalog, target, findings=check(target, level=CONTENTS))
        assert catalog.offline_batches_left(1, uses=2) == 2, (
            "task-0 and task-1 once more; the claim is released"
        )
        assert check(target, level=CONTENTS) == []
        assert learn(catalog, 2) == ["task-0", "task-1"]
        lost.write_bytes(content)
        repair(catalog, target, findings=check(target, level=CONTENTS))
        assert catalog.offline_batches_left(1, uses=2) == 2
        assert check(target, level=CONTENTS) == []


def test_a_rebuilt_catalog_knows_them_and_their_uses(source: RunLayout, target: RunLayout) -> None:
    taken_from(target, str(source.root))
    columns = "group_uid, split, ordinal, state, source"
    with Catalog.open(target) as catalog:
        learn(catalog, 1)
        learn(catalog, 2)
        catalog.roll_back(1)
        claim(catalog)
        export(catalog, target)
    before = ask(target, f"SELECT {columns} FROM groups ORDER BY ordinal")
    target.catalog.unlink()
    rebuild(target)
    assert ask(target, f"SELECT {columns} FROM groups ORDER BY ordinal") == before
    with Catalog.open(target) as catalog:
        assert catalog.has_offline_groups()
        catalog.roll_back(1)  # as a learner does when it starts
        assert catalog.offline_batches_left(2, uses=2) == 2, "the claim is released"
        assert learn(catalog, 2) == ["task-2", "task-0"]
    assert check(target, level=CONTENTS) == []


@pytest.mark.parametrize(
    ("left", "n", "times"),
    [
        ([2, 2, 2], 2, 3),
        ([5, 1], 2, 1),
        ([1, 1], 3, 0),
        ([3, 3, 1, 0], 2, 3),
        ([-1, 4], 1, 4),
        ([], 1, 0),
        ([4, 4, 4, 1, 1], 3, 4),
    ],
)
def test_rounds(left: list[int], n: int, times: int) -> None:
    assert rounds(left, n) == times


def test_a_mixed_batch_is_told_afterwards_as_it_was_claimed(
    catalog: Catalog, target: RunLayout
) -> None:
    # offline groups of versions 0 and 1: the one of version 2 is now the least used
    learn(catalog, 1)
    for ordinal, version in ((0, VERSION_HERE), (1, VERSION_HERE - 1)):
        play(target, catalog, open_train_group(catalog, ordinal), version=version)
    batch = claim(catalog, n_groups=2, n_offline=2)
    assert batch is not None
    assert [(group.source is not None, group.version_min) for group in batch.groups] == [
        (False, VERSION_HERE - 1),
        (False, VERSION_HERE),
        (True, 2),
        (True, 0),
    ]
    catalog.record_version(
        VersionRecord(version=VERSION_HERE + 1, path="weights/v4", digest="d4", learner_step=2)
    )
    catalog.settle(batch.batch_id, learner_step=2, filtered={}, version_in=VERSION_HERE)
    assert trained_step(target, 2).batch.groups == batch.groups


def forged_source(
    dest: Path, column: str, value: Any, *, size: int = 2, split: str = "train"
) -> Path:
    """Write a dataset of one group of two, of whose second row a column has another value."""
    group_uid = uid("e" * 32, "train", 0, None)
    group = Group.imported(group_uid=group_uid, task_id="t", size=2)
    played = [replace(make_trajectory(group, member), split=split) for member in range(2)]
    table = to_table(played)
    index = table.schema.get_field_index(column)
    values = table[column].to_pylist()
    values[1] = value
    field = table.schema.field(index)
    table = table.set_column(index, field, pa.array(values, field.type))
    return write_dataset(dest, table, run_id="e" * 32, size=size)


def member_of(number: int, place: int, **changes: Any) -> Trajectory:
    """Return a member of one of a stranger's groups of two."""
    group_uid = uid("e" * 32, "train", number, None)
    group = Group.imported(group_uid=group_uid, task_id="t", size=2)
    return replace(make_trajectory(group, place), **({"split": "train"} | changes))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([[(0, 0), (0, 0)]], "the 6 rows of trajectory .* are not steps 0..5"),
        ([[(0, 0)], [(0, 0)]], "dataset.json is damaged .* a part that it names twice.*again"),
        ([[(0, 0), (0, 1, {"member": 0})]], "(run e+).* is not member 0 of .*, which has 2; look"),
        ([[(0, 0), (0, 1, {"member": 2})]], "(run e+).* is not member 2 of .*, which has 2; look"),
        (
            [[(0, 0), (0, 1)], [(1, 0, {"traj_uid": uid(uid("e" * 32, "train", 0, None), 0)})]],
            "(run e+).* is not member 0 of .*, which has 2; look",
        ),
        ([[(0, 0)], [(0, 1, {"task_id": "another"})]], "(run e+).* has more than one task; look"),
        # half a group, which stands in two files
        ([[(0, 0)], [(0, 0), (1, 0)]], "2 groups, of which each lacks trajectories"),
    ],
)
def test_a_dataset_of_wrong_members_is_refused_before_a_run_is_made(
    tmp_path: Path, target: RunLayout, files: list[list[Any]], words: str
) -> None:
    """The attack: half a group counted as whole, and the run that was made never went on."""
    tables = [
        to_table([member_of(number, member, **dict(*more)) for number, member, *more in file])
        for file in files
    ]
    place = write_dataset(tmp_path / "forged", *tables, run_id="e" * 32, size=2)
    with pytest.raises(StoreError, match=words) as refused:
        find_sources([parse_source(str(place))], order="")
    assert str(place) in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(StoreError, match=words):
        taken_from(target, str(place))


def test_a_whole_group_whose_member_stands_in_two_files_is_taken_once(
    tmp_path: Path, target: RunLayout
) -> None:
    one, other = member_of(0, 0), member_of(0, 1)
    files = to_table([one]), to_table([one, other])
    place = write_dataset(tmp_path / "twice", *files, run_id="e" * 32, size=2)
    find_sources([parse_source(str(place))], order="")
    assert taken_from(target, str(place))[0].n_groups == 1
    assert ask(target, "SELECT n_members, n_steps, state FROM groups") == [(2, 6, "complete")]
    assert check(target, level=CONTENTS) == []


def show_other_trajectories(source: RunLayout, query: str) -> None:
    """Make the view `trajectories` of a run show the rows of a query of its old rows, `before`."""
    text = source.open_sql.read_text()
    old = "CREATE OR REPLACE VIEW trajectories AS"
    assert text.count(old) == 1
    text = text.replace(old, old.replace("trajectories", "before"))
    source.open_sql.write_text(f"{text}\nCREATE OR REPLACE VIEW trajectories AS {query};\n")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        # half a group, twice
        ("FROM before UNION ALL FROM before", "1 groups, of which each lacks trajectories"),
        (
            "FROM before UNION ALL SELECT * REPLACE (uuid() AS traj_uid) FROM before",
            r"source .*\(run .*its views show trajectories of group .* not its members 0..1",
        ),
        (
            "SELECT * REPLACE ('abcd' AS traj_uid) FROM before",
            r"source .*\(run .*its views show .*; gigpo fsck --repair",
        ),
    ],
)
def test_a_run_whose_views_invent_members_is_refused_before_a_run_is_made(
    tmp_path: Path, query: str, words: str
) -> None:
    source = make_source(tmp_path / "source", n_groups=1, missing=1)
    show_other_trajectories(source, query)
    with pytest.raises(StoreError, match=words):
        find_sources([parse_source(str(source.root))], order="")


def test_a_member_that_views_show_and_no_file_has_is_named(
    tmp_path: Path, target: RunLayout
) -> None:
    """Anybody can compute a member's uid, and rows of runs are read when they are imported."""
    source = make_source(tmp_path / "source", n_groups=1, missing=1)
    (group_uid,) = ask(source, "SELECT group_uid FROM groups WHERE split = 'train'")[0]
    invented = uid(group_uid.bytes, 1).hex()
    rows = "FROM before WHERE split = 'train'"
    show_other_trajectories(
        source, f"{rows} UNION ALL SELECT * REPLACE ('{invented}'::UUID AS traj_uid) {rows}"
    )
    for _ in range(2):
        with pytest.raises(StoreError, match=r"source .*\(run .* files lack trajectory .* fsck"):
            taken_from(target, str(source.root))
        with Catalog.open(target) as catalog:
            assert catalog.live_segments() == ()


def test_nothing_is_taken_of_the_first_source_if_the_second_is_refused(
    source: RunLayout, tmp_path: Path, target: RunLayout
) -> None:
    """Rows of runs are read when they are imported. The longest here are 5 tokens."""
    first = parse_source(str(source.root))
    second = replace(parse_source(str(make_source(tmp_path / "other").root)), max_tokens=4)
    with pytest.raises(StoreError, match="has 5 tokens, .* more than the 4"):
        take_sources(target.root, [first, second], order="")
    with Catalog.open(target) as catalog:
        assert catalog.live_segments() == () and not catalog.has_offline_groups()
    assert ask(target, "FROM groups") == []
    assert taken_from(target, str(source.root))[0].n_groups == 3


def of_size(dest: Path, size: int, *, members: range, run_id: str = "e" * 32) -> str:
    """Write a dataset with some members of the same group each time, which says its size."""
    group = Group.imported(group_uid=uid("e" * 32, "train", 0, None), task_id="t", size=size)
    table = to_table([replace(make_trajectory(group, one), split="train") for one in members])
    return str(write_dataset(dest, table, run_id=run_id, size=size))


def test_a_dataset_adds_no_member_to_a_group_that_is_trained_on(
    tmp_path: Path, target: RunLayout
) -> None:
    """The attack: a dataset said a larger size, and the next step had members that no source had."""
    taken_from(target, of_size(tmp_path / "whole", 2, members=range(2)))
    more = of_size(tmp_path / "more", 8, members=range(2, 8))
    with pytest.raises(StoreError, match="is trained on in it, .* is none that it lost"):
        import_selection(target.root, more)
    with Catalog.open(target) as catalog:
        batch = claim(catalog, n_offline=1)
        assert batch is not None
        assert [len(one.trajectories) for one in batch.segments] == [2]


def test_fsck_names_a_group_that_is_trained_on_with_more_members_than_its_size(
    tmp_path: Path, target: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import of an earlier version left it so."""
    taken_from(target, of_size(tmp_path / "whole", 2, members=range(2)))
    monkeypatch.setattr("store.catalog.imported_groups._refuse_new_members", lambda *_, **__: None)
    import_selection(target.root, of_size(tmp_path / "more", 8, members=range(2, 8)))
    (finding,) = [one for one in check(target, level=CONTENTS) if one.severity == "error"]
    assert (finding.what, finding.detail) == (
        "group_not_whole",
        "it is complete with 8 of 2 members",
    )
    with Catalog.open(target) as catalog:
        batch = claim(catalog, n_offline=1)
        assert batch is not None
        assert sum(len(one.trajectories) for one in batch.segments) == 8


@pytest.mark.parametrize("sizes", [(2, 8), (8, 2)])
def test_sources_that_say_two_sizes_of_one_group_are_refused(
    tmp_path: Path, target: RunLayout, sizes: tuple[int, int]
) -> None:
    places = [of_size(tmp_path / f"{n}", n, members=range(n)) for n in sizes]
    words = "has 2 members in one source and 8 in another"
    with pytest.raises(StoreError, match=words):
        find_sources([parse_source(place) for place in places], order="")
    with pytest.raises(StoreError, match=words):
        taken_from(target, *places)


def test_a_group_of_two_sources_is_said_to_be_of_the_first(
    tmp_path: Path, target: RunLayout
) -> None:
    runs = ("e" * 32, "f" * 32)
    places = [of_size(tmp_path / run, 2, members=range(2), run_id=run) for run in runs]
    taken_from(target, *places)
    assert ask(target, "SELECT DISTINCT source FROM groups") == [(runs[0],)]


@pytest.mark.parametrize(("order", "place"), [("", 0), ("n_won DESC", 1), ("n_won", 0)])
def test_the_rows_of_a_group_of_two_sources_are_of_the_one_that_is_named(
    tmp_path: Path, target: RunLayout, order: str, place: int
) -> None:
    """The attack: the order chose a group that was won, and the rows were another source's, lost.

    A run and its fork both have a group that was open at the checkpoint.
    """
    runs, won = ("e" * 32, "f" * 32), (False, True)
    places = [
        write_dataset(
            tmp_path / run,
            to_table([member_of(0, member, won=is_won) for member in range(2)]),
            run_id=run,
            size=2,
        )
        for run, is_won in zip(runs, won, strict=True)
    ]
    taken = taken_from(target, *map(str, places), order=order)
    assert [one.n_groups for one in taken] == [int(number == place) for number in range(2)]
    assert ask(target, "SELECT source, n_won FROM groups") == [(runs[place], 2 * won[place])]
    assert ask(target, "SELECT DISTINCT won FROM trajectories") == [(won[place],)]
    assert ask(target, "SELECT count(*) FROM trajectories") == [(2,)]


def test_a_group_that_was_imported_with_another_size_is_not_trained_on(
    tmp_path: Path, target: RunLayout
) -> None:
    import_selection(target.root, of_size(tmp_path / "whole", 2, members=range(2)))
    with pytest.raises(StoreError, match="the run has it with another size"):
        taken_from(target, of_size(tmp_path / "more", 8, members=range(8)))
    with Catalog.open(target) as catalog:
        assert not catalog.has_offline_groups()


PIXELS = bytes(2 * 3 * 3)  # of an image of 2 x 3


def image(height: int | None, width: int | None, pixels: bytes | None = PIXELS) -> dict[str, Any]:
    return {"height": height, "width": width, "pixels": pixels}


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("response_ids", [100, 0], "token id 100, and the model knows 100"),
        ("response_ids", [-1, 0], "response_ids=-1"),
        ("response_ids", [], "differ in number"),
        ("response_ids", [None, 0], "null in response_ids"),
        ("prompt_ids", None, "no prompt_ids in a row"),
        ("version_min", None, "no version_min in a row"),
        ("traj_uid", None, "no traj_uid in a row"),
        ("prompt_ids", [], "without prompt_ids"),
        ("response_logprobs", [-0.5], "differ in number"),
        ("response_logprobs", [float("nan"), -0.5], "response_logprobs=nan"),
        ("reward", 1e150, "reward=1e\\+150"),
        ("reward", 1e13, "reward=1e\\+13"),
        ("reward", -1e60, "reward=-1e\\+60"),
        ("task_score", 1e13, "task_score=1e\\+13"),
        ("reward", float("inf"), "reward=inf"),
        ("reward", None, "no reward"),
        ("version_max", 2**62, "version_max="),
        ("task_id", "another", "more than one task_id"),
        ("group_uid", bytes(16), "are not steps 0..1|more than one group_uid"),
        ("response_logprobs", [], "differ in number"),
        ("prompt_ids", [5] * 300_000, "step 1 of trajectory .* has 300,002 tokens, .*the 50 of "),
        ("prompt_ids", [5] * 49, "has 51 tokens, prompt and response together, more than the 50"),
        ("images", [image(2, 3), image(3, 3)], "an image whose pixels are not height x width x 3"),
        ("images", [image(-2, -3)], "an image whose pixels are not"),
        ("images", [image(0, 3, b"")], "an image whose pixels are not"),
        ("images", [image(2**31 - 1, 2**31 - 1)], "an image whose pixels are not"),
        ("images", [image(2, None)], "an image whose pixels are not"),
        ("images", [image(2, 3, None)], "an image whose pixels are not"),
        ("images", [None], "null in images"),
    ],
)
def test_rows_that_no_learner_can_take_are_refused(
    tmp_path: Path, target: RunLayout, column: str, value: Any, words: str
) -> None:
    """Name the source and the value, before a run is made and before a row is imported."""
    place = forged_source(tmp_path / "forged", column, value)
    source = replace(parse_source(str(place)), n_tokens=100, max_tokens=50)
    for take in (
        lambda: find_sources([source], order=""),
        lambda: take_sources(target.root, [source], order=""),
    ):
        with pytest.raises(StoreError, match=words):
            take()
    with closing(sqlite3.connect(target.catalog)) as catalog:
        query = "SELECT count(*) FROM grp WHERE split = 'imported'"
        assert catalog.execute(query).fetchone() == (0,)


def test_rows_of_just_that_length_are_taken(tmp_path: Path, target: RunLayout) -> None:
    place = forged_source(tmp_path / "forged", "prompt_ids", [5] * 48)
    source = replace(parse_source(str(place)), max_tokens=50)
    find_sources([source], order="")
    assert take_sources(target.root, [source], order="")[0].n_groups == 1


def test_groups_that_are_not_taken_may_have_rows_of_any_length(
    tmp_path: Path, source: RunLayout, target: RunLayout
) -> None:
    """Held-out groups and groups that lack trajectories are not trained on."""
    export_selection(source.root, tmp_path / "honest", where=None, as_of=None)
    long = [5] * 300_000
    forged_source(tmp_path / "held-out", "prompt_ids", long, split="heldout")
    forged_source(tmp_path / "half", "prompt_ids", long, size=3)
    names = ("honest", "held-out", "half")
    given = [replace(parse_source(str(tmp_path / name)), max_tokens=50) for name in names]
    find_sources(given, order="")
    taken = take_sources(target.root, given, order="")
    assert [one.n_groups for one in taken] == [3, 0, 0]


def test_a_long_row_of_a_run_is_refused_before_its_groups_are_taken(
    source: RunLayout, target: RunLayout
) -> None:
    """Its rows are read when they are imported. The longest are 5 tokens."""
    for most, is_taken in ((4, False), (5, True)):
        given = replace(parse_source(str(source.root)), max_tokens=most)
        find_sources([given], order="")
        if is_taken:
            take_sources(target.root, [given], order="")
        else:
            with pytest.raises(StoreError, match="has 5 tokens, .* more than the 4 of prompt.max"):
                take_sources(target.root, [given], order="")
        with Catalog.open(target) as catalog:
            assert catalog.has_offline_groups() is is_taken
    short = "group_uid NOT IN (SELECT group_uid FROM steps WHERE len(prompt_ids) + "
    shorter = replace(given, where=short + "len(response_ids) > 4)")
    with pytest.raises(StoreError, match="no whole training group is selected"):
        find_sources([shorter], order="")

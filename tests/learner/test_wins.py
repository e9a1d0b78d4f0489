"""Wins that are replayed: which, how often, beside what, after a crash; on the real catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch

from configs import Config, ReplayConfig
from coordinator import Coordinator
from learner.data.batch_loader import PreparedBatch, prepare_batch
from learner.explain import GroupGradient, _summary, explain, table
from store import RunLayout, trained_step
from store.maintenance.fsck import CATALOG, check
from tests.support.fast_directory import fast_directory
from tests.support.learner_loop import (
    GROUPS_PER_STEP,
    N_STEPS,
    Handle,
    StandIn,
    good,
    loader_of,
    make_config,
    make_learner,
    open_coordinator,
    play,
)
from tests.support.run_views import connect

STEPS, MAX_AGE = 5, 2


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def replaying(run: Path, **learner: object) -> Config:
    # Synchronous: nothing is claimed before the step before it is settled.
    config = make_config(run, max_staleness=0, **{"steps": STEPS, **learner})
    return replace(config, replay=ReplayConfig(share=0.5, max_age=MAX_AGE, warmup_steps=0))


def play_half_alike(coordinator: Coordinator) -> None:
    """Play all groups that admission allows. Each has one win and one loss. In every other group
    both return 0, so it is filtered.
    """
    while (lease := coordinator.lease("w")) is not None:
        play(coordinator, lease, alike=lease.group.ordinal % 2 == 0)


def train(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    coordinator: Coordinator,
    stats: Callable[..., object] = lambda _, updates: good(updates),
) -> int:
    handle = Handle(coordinator, playing=play_half_alike)
    return make_learner(monkeypatch, config, handle, stats).run()  # type: ignore[arg-type]


def rows(run: Path, sql: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(sql).fetchall()


REPLAYS = "SELECT learner_step, group_uid, use, age FROM replays WHERE live ORDER BY ALL"


def test_wins_of_earlier_groups_join_every_batch_once_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    coordinator = open_coordinator(replaying(run))
    seen: list[int] = []

    def counting(_: StandIn, updates: list) -> object:
        seen.append(sum(batch.n_rows for update in updates for batch in update))
        return good(updates)

    assert train(monkeypatch, coordinator.config, coordinator, counting) == STEPS
    assert check(coordinator.layout, level=CATALOG) == []
    coordinator.close()
    replays = rows(run, REPLAYS)
    assert [step for step, *_ in replays] == [2, 3, 4, 5]
    assert {age for *_, age in replays} == {1}, "the newest of those that were not replayed yet"
    trained = rows(run, "SELECT learner_step, group_uid FROM lineage WHERE outcome = 'trained'")
    before = {group_uid: step for step, group_uid in trained}
    assert all(before[group_uid] < step for step, group_uid, _, _ in replays)
    assert len(trained) == STEPS, "one group of two teaches something"
    live = 2 * N_STEPS  # rows of two episodes
    assert seen == [live, *[live + N_STEPS] * 4], "and of one win"
    assert rows(run, "SELECT count(*) FROM lineage GROUP BY learner_step") == [(2,)] * STEPS
    assert rows(run, "FROM staleness_violations") == []
    assert rows(run, "SELECT DISTINCT value FROM metrics WHERE name = 'replay/groups'") == [(1.0,)]
    assert rows(run, "SELECT DISTINCT state FROM groups JOIN replays USING (group_uid)") == [
        ("trained",)
    ]


def prepared_again(coordinator: Coordinator, learner_step: int) -> PreparedBatch:
    recorded = trained_step(coordinator.layout, learner_step)
    return prepare_batch(
        loader_of(coordinator),
        recorded.batch,
        version=recorded.version_in,
        learner_step=learner_step,
        more=None,
    )


def test_a_replayed_step_is_read_again_as_it_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replaying(tmp_path / "run")
    coordinator = open_coordinator(config)
    inputs: list[list] = []

    def keeping(_: StandIn, updates: list) -> object:
        inputs.append([batch.advantages_N.tolist() for update in updates for batch in update])
        return good(updates)

    train(monkeypatch, config, coordinator, keeping)
    for step in range(1, STEPS + 1):
        again = prepared_again(coordinator, step)
        assert bool(again.replayed.num_rows) == (step > 1)
        found = [b.advantages_N.tolist() for update in again.updates for b in update.micro_batches]
        assert found == inputs[step - 1]
        staleness = {int(n) for u in again.updates for b in u.micro_batches for n in b.staleness_N}
        assert max(staleness) <= MAX_AGE
    coordinator.close()


def test_an_explanation_has_the_wins_that_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replaying(tmp_path / "run")
    coordinator = open_coordinator(config)
    train(monkeypatch, config, coordinator)
    batch = prepared_again(coordinator, STEPS)
    coordinator.close()

    def summaries(_: object, parts: Sequence[Any]) -> tuple[list[GroupGradient], GroupGradient]:
        of_rows = partial(_summary, seen_2N=torch.ones(2, 1), gradient=[torch.ones(1)])
        each = [of_rows(part.rows) for part in parts]
        return each, of_rows(pa.concat_tables([part.rows for part in parts]))

    monkeypatch.setattr("learner.explain._gradients", summaries)
    explanation = explain(SimpleNamespace(learner=config.learner), batch)  # type: ignore[arg-type]
    played, win = explanation.groups[:-1], explanation.groups[-1]
    assert [one.is_replayed for one in played] == [False] * GROUPS_PER_STEP
    assert (win.is_replayed, win.staleness) == (True, 1)
    assert win.gradient is not None and win.gradient.n_rows == N_STEPS, "one episode of two"
    assert win.gradient.advantage > 0 and win.gradient.episode is None
    assert explanation.total is not None and explanation.total.episode is not None
    assert explanation.total.n_rows == batch.rows.num_rows + batch.replayed.num_rows
    shown = table(explanation)
    assert [str(cell).endswith(" again") for cell in shown.columns[0].cells] == [
        *[False] * GROUPS_PER_STEP,
        True,
        False,
    ]
    assert list(shown.columns[8].cells)[-2] == "-", "it has no episode term"


def test_killed_with_wins_claimed_they_are_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = replaying(run, checkpoint_every=3)
    coordinator = open_coordinator(config)
    steps = 0

    def die(_: StandIn, updates: list) -> object:
        nonlocal steps
        steps += 1
        if steps == 4:
            raise MemoryError
        return good(updates)

    with pytest.raises(MemoryError):
        train(monkeypatch, config, coordinator, die)
    assert check(coordinator.layout, level=CATALOG) == []
    coordinator.close()
    assert rows(run, "SELECT count(*) > 0 FROM replays WHERE live AND batch_state = 'claimed'") == [
        (True,)
    ]
    again = open_coordinator(config)
    assert train(monkeypatch, config, again) == STEPS
    assert check(again.layout, level=CATALOG) == []
    again.close()
    assert [step for step, *_ in rows(run, REPLAYS)] == [2, 3, 4, 5]
    assert (
        rows(run, "SELECT group_uid, use FROM replays WHERE live GROUP BY ALL HAVING count(*) > 1")
        == []
    )
    assert rows(run, "SELECT count(*) > 0 FROM replays WHERE NOT live") == [(True,)]


def test_the_wins_of_a_claimed_batch_are_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replaying(tmp_path / "run", steps=3, checkpoint_every=1)
    coordinator = open_coordinator(config)
    train(monkeypatch, config, coordinator)
    version = coordinator.newest_version()
    assert version is not None
    coordinator._last_step = STEPS  # it goes on
    play_half_alike(coordinator)
    catalog = coordinator.catalog

    def expirable() -> set[str]:
        return set(
            catalog.expirable(completed_before_us=None, below_version=99, oldest_checkpoint=99)
        )

    before = expirable()
    batch = coordinator.claim(version.version)
    assert batch is not None and len(batch.replayed) == GROUPS_PER_STEP // 2
    wins = {segment.segment_id for segment in batch.replayed_segments}
    assert wins <= before
    assert expirable() == before - wins
    coordinator.release_claims(3)
    assert expirable() == before
    coordinator.close()

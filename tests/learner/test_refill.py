"""Batches that are refilled: full, at the bound, killed in between, replayed; on the real catalog."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from configs import Config
from coordinator import Coordinator, Settlement
from learner.data.batch_loader import n_wanted, prepare_batch
from learner.data.prefetch import Prefetch
from store import RunLayout, VersionRecord, trained_step
from store.maintenance.fsck import CATALOG, check
from tests.support.fast_directory import fast_directory
from tests.support.learner_loop import (
    GROUP_SIZE,
    GROUPS_PER_STEP,
    Handle,
    good,
    loader_of,
    make_config,
    make_learner,
    open_coordinator,
    play,
)
from tests.support.run_views import connect
from tests.support.store_samples import in_play

DEADLINE_S = 20.0
STEPS = 3


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def refilled(run: Path, *, refill_groups: int, max_staleness: int = 1) -> Config:
    config = make_config(run, max_staleness=max_staleness, steps=STEPS)
    return replace(config, algorithm=replace(config.algorithm, refill_groups=refill_groups))


def play_half(coordinator: Coordinator) -> None:
    """Play all groups that admission allows. Those with an even number teach nothing."""
    while (lease := coordinator.lease("w")) is not None:
        play(coordinator, lease, alike=lease.group.ordinal % 2 == 0)


def play_alike(coordinator: Coordinator) -> None:
    while (lease := coordinator.lease("w")) is not None:
        play(coordinator, lease, alike=True)


def train(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    coordinator: Coordinator,
    playing: Callable[[Coordinator], object],
) -> int:
    handle = Handle(coordinator, playing=playing)
    return make_learner(monkeypatch, config, handle, lambda _, updates: good(updates)).run()


def rows(run: Path, sql: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(sql).fetchall()


BATCHES = """SELECT learner_step, count(*) FILTER (outcome = 'trained') AS trained,
                    count(*) FILTER (outcome = 'filtered') > 0 AS filtered
             FROM lineage WHERE live GROUP BY 1 ORDER BY 1"""
# Ordinals of the played groups by state. Nothing else is in the run.
STATES = "SELECT state, list(ordinal ORDER BY ordinal) FROM groups WHERE n_members > 0 GROUP BY 1"


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_half_solved_tasks_give_full_batches_and_every_group_is_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    run = tmp_path / "run"
    config = refilled(run, refill_groups=2 * GROUPS_PER_STEP, max_staleness=max_staleness)
    coordinator = open_coordinator(config)
    assert train(monkeypatch, config, coordinator, play_half) == STEPS
    coordinator.close()
    assert rows(run, BATCHES) == [(step, GROUPS_PER_STEP, True) for step in range(1, STEPS + 1)]
    assert rows(
        run,
        "SELECT name, list(value ORDER BY learner_step) FROM metrics "
        "WHERE name = 'groups/trained' GROUP BY 1",
    ) == [("groups/trained", [GROUPS_PER_STEP] * STEPS)]
    states = dict(rows(run, STATES))
    assert {ordinal % 2 for ordinal in states["trained"]} == {1}
    assert {ordinal % 2 for ordinal in states["filtered"]} == {0}
    assert len(states["trained"]) == STEPS * GROUPS_PER_STEP
    played = sorted(ordinal for ordinals in states.values() for ordinal in ordinals)
    assert played == list(range(len(played)))
    assert states.keys() <= {"trained", "filtered", "complete"}, "none is stale"
    assert rows(run, "SELECT count(*) FROM groups WHERE state = 'filtered' AND reason IS NULL") == [
        (0,)
    ]
    assert rows(run, "FROM staleness_violations") == []
    assert rows(run, "SELECT count(*) FROM events WHERE what = 'refill bound reached'") == [(0,)]


def test_the_bound_is_an_event_and_the_step_is_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    config = refilled(run, refill_groups=3)
    coordinator = open_coordinator(config)
    assert train(monkeypatch, config, coordinator, play_alike) == STEPS
    coordinator.close()
    n_claimed = GROUPS_PER_STEP + 3
    assert (
        rows(run, "SELECT count(*) FROM lineage WHERE live GROUP BY learner_step")
        == [(n_claimed,)] * STEPS
    )
    lines = rows(run, "SELECT detail FROM events WHERE what = 'refill bound reached'")
    assert len(lines) == STEPS
    assert lines[0][0].startswith(
        "learner step 1 trained on 0 groups instead of 2: algorithm.refill_groups=3 "
    )


def test_no_more_is_asked_for_than_the_bound_allows(tmp_path: Path) -> None:
    config = refilled(tmp_path / "run", refill_groups=1)
    coordinator = open_coordinator(config)
    publish(coordinator, 0)
    play_alike(coordinator)
    loader, batch = loader_of(coordinator), coordinator.claim(0)
    assert batch is not None
    uids = [group.group_uid for group in batch.groups]
    assert n_wanted(loader, batch, []) == 0
    assert n_wanted(loader, batch, uids[:1]) == 1
    assert n_wanted(loader, batch, uids) == 1, "two are missing, and one more is allowed"
    larger = coordinator.refill(batch.batch_id, filtered=uids, n_groups=1, current_version=0)
    assert larger is not None and n_wanted(loader, larger, uids) == 0
    coordinator.close()


def publish(coordinator: Coordinator, version: int) -> None:
    coordinator.publish(
        VersionRecord(version=version, path=f"weights/v{version}", digest="d", learner_step=version)
    )


class Killed(BaseException):
    """The learner's process ended here."""


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_killed_while_a_batch_is_refilled_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """The coordinator dies with its learner. The next start has the groups of the half-filled batch
    again, filtered ones too, and trains on full batches.
    """
    run = tmp_path / "run"
    config = refilled(run, refill_groups=20, max_staleness=max_staleness)
    coordinator = open_coordinator(config)
    refills = 0

    def play_until_killed(coordinator: Coordinator) -> None:
        nonlocal refills
        with coordinator.catalog._database.transaction() as tx:
            refills = tx.value("SELECT count(*) FROM batch_group WHERE outcome = 'filtered'")
        if refills >= 2:
            raise Killed
        play_alike(coordinator)

    with pytest.raises(Killed):
        train(monkeypatch, config, coordinator, play_until_killed)
    before = coordinator.catalog.counts()
    assert before.claimed >= GROUPS_PER_STEP
    assert coordinator.catalog.outstanding() < in_play(before), "others are played instead"
    assert check(coordinator.layout, level=CATALOG) == []
    coordinator.close()
    seen = rows(run, "SELECT DISTINCT batch_state, outcome FROM lineage WHERE live")
    assert ("claimed", "filtered") in seen
    assert {batch_state for batch_state, _ in seen} == {"claimed"}

    again = open_coordinator(config)
    rolled_back = again.resume(0).rolled_back
    after = again.catalog.counts()
    assert rolled_back.groups == before.claimed
    assert (after.claimed, after.complete) == (0, before.claimed + before.complete)
    assert after.trajectories == before.trajectories
    assert again.catalog.outstanding() == in_play(after)
    assert train(monkeypatch, config, again, play_half) == STEPS
    again.close()
    assert [trained for _, trained, _ in rows(run, BATCHES)] == [GROUPS_PER_STEP] * STEPS
    n_groups = rows(run, "SELECT count(*) FROM groups WHERE n_members > 0")[0][0]
    assert rows(run, "SELECT count(*), count(DISTINCT traj_uid) FROM trajectories") == [
        (GROUP_SIZE * n_groups,) * 2
    ]
    assert (
        rows(run, "SELECT group_uid FROM lineage WHERE live GROUP BY 1 HAVING count(*) > 1") == []
    )
    assert check(RunLayout.open(run), level=CATALOG) == []


def take_nothing(batches: Prefetch, *, until: Callable[[], bool]) -> None:
    """Ask for a batch until the condition holds. Fail if there is one, or after DEADLINE_S."""
    ends_at_s = time.monotonic() + DEADLINE_S
    while not until():
        assert batches.take(timeout_s=0.01) is None
        assert time.monotonic() < ends_at_s, f"not within {DEADLINE_S:g} s"


def test_stopped_while_a_batch_is_refilled_its_groups_are_given_back(tmp_path: Path) -> None:
    coordinator = open_coordinator(refilled(tmp_path / "run", refill_groups=9))
    publish(coordinator, 0)
    for _ in range(GROUPS_PER_STEP):
        lease = coordinator.lease("w")
        assert lease is not None
        play(coordinator, lease, alike=True)
    with contextlib.closing(Prefetch(loader_of(coordinator))) as batches:
        batches.start(version=0, learner_step=1)
        # it found that they teach nothing
        take_nothing(batches, until=lambda: not coordinator.catalog.outstanding())
        assert not batches.has_groups
        assert batches.n_claims == 1
    assert batches.under_way
    assert coordinator.release_claims(0) == GROUPS_PER_STEP
    counts = coordinator.catalog.counts()
    assert (counts.claimed, counts.complete, counts.filtered) == (0, GROUPS_PER_STEP, 0)
    coordinator.close()


def test_a_refilled_step_is_read_again_as_it_was_trained(tmp_path: Path) -> None:
    """An older group may be finished after a newer one was claimed. The order is that of a replay
    all the same.
    """
    coordinator = open_coordinator(refilled(tmp_path / "run", refill_groups=9, max_staleness=2))
    publish(coordinator, 0)
    leases = [coordinator.lease("w") for _ in range(5)]
    for number in (1, 2):  # they teach nothing
        play(coordinator, leases[number], alike=True)
    with contextlib.closing(Prefetch(loader_of(coordinator))) as batches:
        batches.start(version=0, learner_step=1)
        take_nothing(batches, until=lambda: coordinator.catalog.outstanding() <= 3)
        for number in (4, 0):
            play(coordinator, leases[number])
        prepared = batches.take(timeout_s=DEADLINE_S)
    assert prepared is not None
    assert [group.ordinal for group in prepared.batch.groups] == [0, 1, 2, 4]
    assert prepared.n_missing == 0
    publish(coordinator, 1)
    coordinator.settle(
        Settlement(
            batch_id=prepared.batch.batch_id,
            learner_step=1,
            filtered=prepared.filtered,
            version_in=0,
            metrics={},
        )
    )
    recorded = trained_step(coordinator.layout, 1)
    assert recorded.batch.groups == prepared.batch.groups
    again = prepare_batch(
        loader_of(coordinator), recorded.batch, version=0, learner_step=1, more=None
    )
    assert again.rows.equals(prepared.rows)
    assert again.filtered == prepared.filtered
    coordinator.close()

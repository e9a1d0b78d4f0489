"""Test that the simulated workers of benchmarks/scale.py do to a coordinator what real ones do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.simulated_run import Pace, make_config
from benchmarks.support.virtual_fleet import Fleet, Load
from tests.support.simulation import Delay

WORKERS, NODES, GROUP_SIZE = 20, 4, 8
BRIEF = Delay(median_s=0.05, sigma=0.5)
EPISODE = Delay(median_s=20.0, sigma=1.0)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    pace = Pace(
        environment=EPISODE,
        generation=BRIEF,
        step_time=BRIEF,
        workers=WORKERS,
        groups_per_step=8,
        group_size=GROUP_SIZE,
        max_steps=10,
    )
    config = make_config(tmp_path / "run", pace, max_staleness=64, steps=10**6)
    load = Load(
        config=replace(config, seed=1),
        nodes=NODES,
        episode=EPISODE,
        upload=BRIEF,
        loading=BRIEF,
        lock_poll_s=(0.05, 0.5),
        lost_nodes_per_hour=15.0,  # one of the four each minute
        heartbeat_s=2.0,
        call_s=1e-4,
        sync_s=1e-4,
    )
    fleet = Fleet(tmp_path / "run", load)
    yield fleet
    fleet.close()


def rows(fleet: Fleet, query: str) -> list[tuple[Any, ...]]:
    with fleet.coordinator.catalog._database.transaction() as tx:
        return [tuple(row) for row in tx.rows(query)]


def test_nodes_are_lost_and_no_episode_with_them(fleet: Fleet) -> None:
    fleet.run(until_s=20.0)
    calls = fleet.measure(seconds=120.0)
    assert len(calls["remove"].taken_s) >= 2 * WORKERS // NODES, "all workers of a node are removed"
    assert rows(fleet, "SELECT count(*) FROM duplicate") == [(0,)]
    ((n_trajectories, n_groups),) = rows(
        fleet, "SELECT count(*), count(DISTINCT group_uid) FROM trajectory"
    )
    n_on_their_way = fleet.n_episodes - n_trajectories
    assert 0 <= n_on_their_way <= GROUP_SIZE and n_trajectories >= 2 * n_groups
    ((n_leased,),) = rows(fleet, "SELECT count(*) FROM grp WHERE lease_worker IS NOT NULL")
    assert n_leased <= WORKERS, "each plays one group at a time"
    assert fleet.coordinator.catalog.learner_step() > 0
    assert {"heartbeat", "lease", "commit", "driver_tick", "claim", "settle", "exports"} <= set(
        calls
    )


def test_a_call_that_takes_longer_than_the_next_one_waits_makes_a_queue(fleet: Fleet) -> None:
    fleet.run(until_s=10.0)
    assert fleet.backlog_s < 1.0
    fleet.load = replace(fleet.load, call_s=1.0)
    calls = fleet.measure(seconds=10.0)
    assert fleet.backlog_s > 30.0
    waited_s = calls["heartbeat"].answered_s
    assert waited_s[-1] > waited_s[0] + 30.0

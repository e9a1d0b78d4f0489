"""Test which tasks are to blame for lost workers, and how they are played and abandoned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import Coordinator, Lease
from coordinator.suspects import MAX_LOSSES, SUSPECT_LOSSES, Suspects
from store import Unfinished
from tests.coordinator.test_coordinator import leases, make_coordinator, play, publish
from tests.coordinator.test_leases import leased, states
from tests.support.store_samples import open_task_group


def lose(coordinator: Coordinator, held: list[Lease], *, reports: bool) -> None:
    """Have the worker "w" die, or first report that it lost its engine."""
    for lease in held if reports else []:
        row = Unfinished(
            group_uid=lease.group.group_uid,
            number=0,
            version=0,
            begun_us=1,
            ended_us=2,
            n_steps=0,
            n_response_tokens=0,
            why="worker_failed",
        )
        coordinator.record_unfinished("w", [row], epoch=lease.epoch)
    coordinator.remove("w", "gave no sign of life")


@pytest.mark.parametrize("reports", [False, True], ids=["died", "lost its engine"])
def test_a_task_that_kills_every_worker_is_abandoned_by_name_and_the_others_are_played(
    tmp_path: Path, reports: bool
) -> None:
    """Keep a task from ending the run without a word, by killing each worker that leases it first."""
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    first = leased(coordinator)
    poison = first.task.id
    lose(coordinator, [first], reports=reports)
    deaths, played = 1, set()
    for _ in range(40):
        held = [lease] if (lease := coordinator.lease("w")) else []
        while held and len(held) < 3 and (lease := coordinator.lease("w")):
            held.append(lease)
        if any(lease.task.id == poison for lease in held):
            deaths += 1
            lose(coordinator, held, reports=reports)
            continue
        for lease in held:
            play(coordinator, lease)
            played.add(lease.task.id)
    assert deaths == MAX_LOSSES
    assert len(played) >= 3
    abandoned = [reason for state, reason in states(coordinator).values() if state == "abandoned"]
    assert len(abandoned) == 1
    assert f"task {poison!r} was in play {MAX_LOSSES} times" in abandoned[0]
    assert "w gave no sign of life" in abandoned[0]
    assert any(
        "group abandoned" in notice and poison in notice
        for notice in coordinator.status().notices.values()
    )
    open_task_group(coordinator.catalog, poison, size=2)
    assert all(lease.task.id != poison for lease in leases(coordinator)), (
        "nor is any other group of it played"
    )
    assert [state for state, _ in states(coordinator).values()].count("abandoned") == 2


def test_a_task_that_killed_workers_is_leased_last_also_after_a_restart(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    first = leased(coordinator)
    other = leased(coordinator, "v")
    for _ in range(SUSPECT_LOSSES - 1):
        coordinator.remove("w", "died")
        assert leased(coordinator).group.group_uid == first.group.group_uid
    coordinator.remove("w", "died")
    coordinator.remove("v", "was stopped")
    coordinator.close()
    again = make_coordinator(tmp_path / "run", max_staleness=1)
    assert leased(again).group.group_uid == other.group.group_uid
    assert all(lease.group.group_uid != first.group.group_uid for lease in leases(again)), (
        "w plays others"
    )
    alone = leased(again, "v")
    assert alone.group.group_uid == first.group.group_uid
    assert again.lease("v") is None, "it plays nothing beside a suspect"
    play(again, alone)
    assert first.task.id not in again.catalog.times_lost()
    assert alone.task.id not in again._suspects.task_ids


def test_groups_that_were_lost_together_are_not_all_to_blame(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    for _ in range(MAX_LOSSES + 2):
        together = [lease for _ in range(2) if (lease := coordinator.lease("w")) is not None]
        assert together
        if len(together) == 1:
            break
        coordinator.remove("w", "died")
    assert not [state for state, _ in states(coordinator).values() if state == "abandoned"]
    play(coordinator, together[0])
    rest = leased(coordinator)
    assert rest.group.group_uid != together[0].group.group_uid


def lease_of(task_id: str) -> Any:
    """Return the part of a lease that `Suspects` reads."""
    return SimpleNamespace(task=SimpleNamespace(id=task_id))


def test_a_task_is_abandoned_only_if_it_was_played_alone_at_last() -> None:
    suspects = Suspects({"poison": MAX_LOSSES - 1, "known": 1})
    assert suspects.task_ids == {"poison"}
    poison, other = lease_of("poison"), lease_of("other")
    assert suspects.lose("w", [poison, other], why="died") is None, "either may be to blame"
    assert suspects.to_abandon == {}
    assert suspects.lose("w", [poison], why="died") is poison
    assert suspects.to_abandon == {
        "poison": f"task 'poison' was in play {MAX_LOSSES + 1} times when a worker was lost, the "
        "last time alone: w died"
    }
    assert suspects.lose("v", [other], why="died") is None, "two losses make a suspect"
    assert suspects.task_ids == {"poison", "other"}


def test_a_group_that_a_failing_worker_gave_up_counts_as_lost_with_it() -> None:
    suspects = Suspects({})
    suspects.report("w", [lease_of("a")])
    suspects.lose("v", [], why="died")
    assert suspects.lose("w", [], why="died") is None and suspects.task_ids == set()
    suspects.report("w", [lease_of("a")])
    suspects.lose("w", [], why="died")
    assert suspects.task_ids == {"a"}, "lost twice"
    suspects.clear("a")
    assert suspects.task_ids == set()


def test_one_worker_at_a_time_drains_for_a_suspect() -> None:
    suspects = Suspects({})
    assert suspects.begin_drain("w") and suspects.begin_drain("w")
    assert not suspects.begin_drain("v")
    suspects.release("v")
    assert not suspects.begin_drain("v"), "w still drains"
    suspects.lose("w", [], why="died")
    assert suspects.begin_drain("v")

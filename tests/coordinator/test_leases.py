"""Test groups in play: given up, abandoned, taken over, waited for, and tasks to blame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import Coordinator, Lease
from coordinator.coordinator import MAX_ABANDONED
from coordinator.leases import MAX_REQUEUES, LeaseTable
from coordinator.suspects import MAX_LOSSES, SUSPECT_LOSSES
from envs import EnvironmentFailed
from store import Unfinished, export
from tests.coordinator.test_coordinator import leases, make_config, make_coordinator, play, publish
from tests.support.run_views import connect
from tests.support.store_samples import open_task_group


def leased(coordinator: Coordinator, worker: str = "w") -> Lease:
    lease = coordinator.lease(worker)
    assert lease is not None
    return lease


def member_of(lease: Lease, *members: int) -> Lease:
    """A lease of the same group for some of its members."""
    return replace(lease, group=replace(lease.group, missing=members))


def states(coordinator: Coordinator) -> dict[bytes, tuple[str, str]]:
    export(coordinator.catalog, coordinator.layout)
    with connect(coordinator.layout) as connection:
        found = connection.sql(
            "SELECT group_uid, state, reason FROM groups WHERE split = 'train'"
        ).fetchall()
    return {uid.bytes: (state, reason) for uid, state, reason in found}


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    return coordinator


def test_a_group_that_became_too_old_is_played_again_from_the_start(
    coordinator: Coordinator,
) -> None:
    first = leased(coordinator)
    coordinator.give_up("w", first.group.group_uid, why="too old")
    again = leased(coordinator, "v")
    assert again.group.group_uid == first.group.group_uid
    assert again.group.missing == first.group.missing
    assert again.worker == "v"


def test_it_is_stale_after_too_many_tries(coordinator: Coordinator) -> None:
    lease = leased(coordinator)
    uid = lease.group.group_uid
    for _ in range(MAX_REQUEUES + 1):
        assert lease.group.group_uid == uid
        coordinator.give_up("w", uid, why="too old")
        lease = leased(coordinator)
    assert lease.group.group_uid != uid
    assert states(coordinator)[uid] == ("stale", "too old")


def test_it_is_stale_at_once_if_some_of_it_is_committed_which_stays(
    coordinator: Coordinator,
) -> None:
    lease = leased(coordinator)
    play(coordinator, member_of(lease, 1))
    coordinator.give_up("w", lease.group.group_uid, why="too old")
    assert states(coordinator)[lease.group.group_uid] == ("stale", "too old")
    with connect(coordinator.layout) as connection:
        assert connection.sql("SELECT member FROM trajectories").fetchall() == [(1,)]


def test_who_lost_its_lease_can_give_up_nothing(coordinator: Coordinator) -> None:
    lease = leased(coordinator, "slow")
    coordinator.remove("slow", "died")
    assert leased(coordinator, "quick").group.group_uid == lease.group.group_uid
    coordinator.give_up("slow", lease.group.group_uid, why="too old")
    assert states(coordinator)[lease.group.group_uid][0] == "open"
    assert leased(coordinator, "third").group.group_uid != lease.group.group_uid, (
        "it is still the quick one's"
    )


def test_a_lost_workers_groups_are_free_at_once_with_what_is_missing_of_them(
    coordinator: Coordinator,
) -> None:
    lease = leased(coordinator, "w0")
    play(coordinator, member_of(lease, 0))
    coordinator.remove("w0", "its process was killed")
    again = leased(coordinator, "w1")
    assert (again.group.group_uid, again.group.missing) == (lease.group.group_uid, (1,))
    play(coordinator, again)
    assert states(coordinator)[lease.group.group_uid][0] == "complete"


def test_an_abandoned_group_is_never_handed_out_again_and_ten_in_a_row_end_the_run(
    coordinator: Coordinator,
) -> None:
    first = leased(coordinator)
    coordinator.abandon("w", first.group.group_uid, why="task 'x': it broke")
    assert states(coordinator)[first.group.group_uid] == ("abandoned", "task 'x': it broke")
    assert any("it broke" in notice for notice in coordinator.status().notices.values())
    for _ in range(MAX_ABANDONED - 2):
        coordinator.abandon("w", leased(coordinator).group.group_uid, why="it broke")
    with pytest.raises(
        EnvironmentFailed,
        match=f"{MAX_ABANDONED} groups in a row were abandoned; the last one: it broke",
    ):
        coordinator.abandon("w", leased(coordinator).group.group_uid, why="it broke")


def test_a_group_whose_task_is_listed_no_more_is_abandoned_by_name(
    coordinator: Coordinator,
) -> None:
    """The attack: a server that lists other tasks at each start ended each start of the run."""
    first = leased(coordinator)
    coordinator.remove("w", "the run was stopped")
    del coordinator.tasks._by_id[first.task.id]
    again = leased(coordinator)
    assert again.task.id != first.task.id
    state, reason = states(coordinator)[first.group.group_uid]
    assert state == "abandoned" and reason.startswith(f"task {first.task.id!r} is not among")
    assert any(reason in notice for notice in coordinator.status().notices.values())
    assert coordinator._n_abandoned == 0, "a shorter list alone does not end the run"


def test_a_member_that_was_played_before_another_one_failed_does_not_end_the_row(
    coordinator: Coordinator,
) -> None:
    def member_1_breaks() -> None:
        lease = leased(coordinator)
        play(coordinator, member_of(lease, 0))
        coordinator.abandon("w", lease.group.group_uid, why="member 1 always breaks")

    for _ in range(MAX_ABANDONED - 1):
        member_1_breaks()
    with pytest.raises(EnvironmentFailed):
        member_1_breaks()


def test_a_group_that_is_played_in_between_ends_the_row(coordinator: Coordinator) -> None:
    for number in range(2 * MAX_ABANDONED):
        lease = leased(coordinator)
        if number % (MAX_ABANDONED - 1):
            coordinator.abandon("w", lease.group.group_uid, why="it broke")
        else:
            play(coordinator, lease)
            batch = coordinator.claim(0)  # makes room for more
            if batch is not None:
                coordinator.settle(
                    batch.batch_id, learner_step=1, filtered={}, version_in=0, metrics={}
                )


def test_with_wait_the_learner_waits_for_a_group_that_the_next_version_would_make_too_old(
    tmp_path: Path,
) -> None:
    make_coordinator(tmp_path / "run", max_staleness=1).close()
    coordinator = Coordinator(
        replace(make_config(tmp_path / "run", max_staleness=1), stragglers="wait"), learns=True
    )
    publish(coordinator, 0, 0)
    slow, *others = leases(coordinator)  # begun at version 0
    for lease in others:
        play(coordinator, lease)
    # at version 0 all is in time: 0 + 1 would still take what began at 0
    batch = coordinator.claim(0)
    assert batch is not None
    coordinator.settle(batch.batch_id, learner_step=1, filtered={}, version_in=0, metrics={})
    publish(coordinator, 1, 1)
    for lease in leases(coordinator):
        play(coordinator, lease)
    assert coordinator.claim(1) is None, "version 2 would make the slow group too old"
    play(coordinator, slow)
    batch = coordinator.claim(1)
    assert batch is not None and slow.group.group_uid in {group.group_uid for group in batch.groups}


def lose(coordinator: Coordinator, held: list[Lease], *, reports: bool) -> None:
    """The worker "w" dies, or first reports that it lost its engine."""
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


def test_groups_that_were_lost_together_are_not_all_to_blame(coordinator: Coordinator) -> None:
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


def test_a_lease_that_ran_out_belongs_to_the_worker_that_has_it_now(
    coordinator: Coordinator,
) -> None:
    lease = leased(coordinator, "v")
    table = LeaseTable(extra_members=0)
    table.begin(lease)
    table.begin(replace(lease, worker="w"))
    assert table.of("v") == [] and [each.worker for each in table.of("w")] == ["w"]
    assert table.lose("v") == []
    lost = table.lose("w")
    assert {episode.number for episode in lost} == set(lease.group.missing)
    assert table.of("w") == [] and table.task_id(lease.group.group_uid) is None

"""Test groups in play: given up, abandoned, taken over, and waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator import Coordinator, Lease, Settlement
from coordinator.coordinator import MAX_ABANDONED
from coordinator.leases import MAX_REQUEUES, LeaseTable
from envs import EnvironmentFailed
from store import export
from tests.coordinator.test_coordinator import leases, make_config, make_coordinator, play, publish
from tests.support.run_views import connect


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
                    Settlement(
                        batch_id=batch.batch_id,
                        learner_step=1,
                        filtered={},
                        version_in=0,
                        metrics={},
                    )
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
    coordinator.settle(
        Settlement(batch_id=batch.batch_id, learner_step=1, filtered={}, version_in=0, metrics={})
    )
    publish(coordinator, 1, 1)
    for lease in leases(coordinator):
        play(coordinator, lease)
    assert coordinator.claim(1) is None, "version 2 would make the slow group too old"
    play(coordinator, slow)
    batch = coordinator.claim(1)
    assert batch is not None and slow.group.group_uid in {group.group_uid for group in batch.groups}


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

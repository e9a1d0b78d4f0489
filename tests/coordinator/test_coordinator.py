"""Test admission, leases and staleness on a real catalog; workers and learner are plain calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configs
from configs import Config
from coordinator import Coordinator, Lease, Settlement
from coordinator import export_schedule as maintenance
from coordinator.admission import free_groups
from coordinator.export_schedule import maintainer_settings
from coordinator.task_queue import task_index
from store import (
    CommitResult,
    RunLayout,
    SegmentMeta,
    Step,
    StoreError,
    UnavailableError,
    VersionRecord,
    state_hash,
    write_open_sql,
    write_segment,
)
from tests.support.fast_directory import fast_directory
from tests.support.lease_samples import leased_trajectory
from tests.support.run_views import connect


def make_config(run_dir: Path, *, max_staleness: int, groups_per_step: int = 2) -> Config:
    config = Config(run_dir=str(run_dir), max_staleness=max_staleness)
    return replace(
        config,
        env=configs.EnvConfig(name="key_room", options={}),
        algorithm=replace(config.algorithm, group_size=2),
        learner=replace(config.learner, groups_per_step=groups_per_step, steps=100),
        evaluation=replace(config.evaluation, every=2, episodes_per_task=1),
    )


def make_coordinator(run_dir: Path, *, max_staleness: int, groups_per_step: int = 2) -> Coordinator:
    config = make_config(run_dir, max_staleness=max_staleness, groups_per_step=groups_per_step)
    if not RunLayout.exists(run_dir):
        write_open_sql(
            RunLayout.create(run_dir, config_yaml=configs.as_yaml(config)),
            macros=[],
            max_staleness=max_staleness,
        )
    return Coordinator(config, learns=True)


def publish(coordinator: Coordinator, version: int, learner_step: int) -> None:
    coordinator.publish(
        VersionRecord(
            version=version, path=f"weights/v{version}", digest="d", learner_step=learner_step
        )
    )


def play(
    coordinator: Coordinator,
    lease: Lease,
    *,
    members: Sequence[int] | None = None,
    task_scores: Sequence[float | None] = (None, None),
) -> None:
    """Commit members of a group, all that are missing if None, by the version of its lease.

    Every member wins.
    """
    trajectories = [
        leased_trajectory(
            lease,
            member,
            won=True,
            task_score=task_scores[member],
            steps=(
                Step(
                    step_index=0,
                    prompt_ids=(1,),
                    prompt_dropped_turns=0,
                    prompt_dropped_tokens=0,
                    response_ids=(2,),
                    response_logprobs=(-0.1,),
                    version_min=lease.version.version,
                    version_max=lease.version.version,
                    finish_reason="stop",
                    obs_text="o",
                    anchor_text="o",
                    state_hash=state_hash("o"),
                    admissible_actions=None,
                    action_text="a",
                    reward=float(member),
                    is_action_valid=True,
                    terminated=True,
                    truncated=False,
                    t_start_us=1,
                    gen_us=1,
                    env_us=1,
                ),
            ),
        )
        for member in (lease.group.missing if members is None else members)
    ]
    coordinator.commit(
        write_segment(coordinator.layout, trajectories, worker="w", epoch=lease.epoch), lease.epoch
    )


def leases(coordinator: Coordinator) -> list[Lease]:
    granted = []
    while (lease := coordinator.lease("w")) is not None:
        granted.append(lease)
    return granted


def test_nothing_is_handed_out_before_the_first_weights(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    assert coordinator.lease("w") is None
    publish(coordinator, 0, 0)
    assert coordinator.lease("w") is not None


def test_admission_counts_claimed_groups_until_the_new_weights_are_out(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=0)
    publish(coordinator, 0, 0)
    first = leases(coordinator)
    assert len(first) == 2  # (0 + 1) * 2
    assert coordinator.claim(0) is None  # open, not complete
    for lease in first:
        play(coordinator, lease)
    batch = coordinator.claim(0)
    assert batch is not None
    assert leases(coordinator) == []  # synchronous: nothing is played while the learner trains
    publish(coordinator, 1, 1)
    assert leases(coordinator) == []
    coordinator.count_answers(3, 1)
    coordinator.count_answers(5, 5)  # of another worker
    coordinator.settle(
        Settlement(
            batch_id=batch.batch_id,
            learner_step=1,
            filtered={},
            version_in=0,
            metrics={"loss": 1.0},
        )
    )
    assert [lease.version.version for lease in leases(coordinator)] == [1, 1]
    assert coordinator.status().metrics == {"loss": 1.0, "env/remembered": 0.75}


@settings(max_examples=25, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    choices=st.lists(st.integers(0, 3), min_size=10, max_size=60),
    data=st.data(),
)
def test_whatever_the_order_nothing_is_trained_on_beyond_the_bound(
    max_staleness: int,
    choices: list[int],
    data: st.DataObject,
) -> None:
    with fast_directory() as directory:
        play_in_any_order(
            directory / "run", max_staleness=max_staleness, choices=choices, data=data
        )


def play_in_any_order(
    run: Path, *, max_staleness: int, choices: list[int], data: st.DataObject
) -> None:
    """Lease, play, claim and settle as chosen, and check the bound after each."""
    coordinator = make_coordinator(run, max_staleness=max_staleness)
    publish(coordinator, 0, 0)
    version, step, held = 0, 0, []
    for choice in choices:
        if choice == 0 and (lease := coordinator.lease("w")) is not None:
            held.append(lease)
        elif choice in (1, 2) and held:
            play(coordinator, held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif choice == 3 and (batch := coordinator.claim(version)) is not None:
            assert all(version - group.version_min <= max_staleness for group in batch.groups)
            step += 1
            publish(coordinator, version + 1, step)
            coordinator.settle(
                Settlement(
                    batch_id=batch.batch_id,
                    learner_step=step,
                    filtered={},
                    version_in=version,
                    metrics={},
                )
            )
            version += 1
        assert coordinator.catalog.outstanding() <= (max_staleness + 1) * 2
    coordinator.close()
    with connect(RunLayout.open(run)) as connection:
        assert connection.sql("FROM staleness_violations").fetchall() == []


def test_a_heartbeat_of_any_component_renews_the_leases_of_all_that_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.heartbeats.WRITE_EVERY_S", 0.0)
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    assert coordinator.lease("w") is not None
    until = "SELECT lease_until_us FROM grp WHERE lease_worker = 'w'"
    with coordinator.catalog._database.transaction() as tx:
        ((before,),) = tx.rows(until)
    coordinator.heartbeat("v", None, waits_s=0.0)
    with coordinator.catalog._database.transaction() as tx:
        ((after,),) = tx.rows(until)
    assert after > before
    coordinator.close()


def test_a_restart_hands_out_the_unfinished_groups_first_with_what_is_missing(
    tmp_path: Path,
) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    whole, begun, untouched = (coordinator.lease("w") for _ in range(3))
    assert whole is not None and begun is not None and untouched is not None
    play(coordinator, whole)
    play(coordinator, begun, members=(1,))
    coordinator.close()
    again = make_coordinator(tmp_path / "run", max_staleness=1)
    first, second, new = leases(again)
    assert (first.group.group_uid, first.group.missing) == (begun.group.group_uid, (0,))
    assert (second.group.group_uid, second.group.missing) == (untouched.group.group_uid, (0, 1))
    known = {lease.group.group_uid for lease in (whole, begun, untouched)}
    assert new.group.group_uid not in known and new.group.missing == (0, 1)


def test_held_out_tasks_are_played_first_and_their_success_becomes_a_metric(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=0)
    publish(coordinator, 0, 0)
    coordinator.evaluate(0, 1)
    assert coordinator.status().heldout_open == 20
    for _ in range(20):
        lease = coordinator.lease("w")
        assert lease is not None
        assert lease.task.split == "heldout"
        assert lease.temperature == coordinator.config.evaluation.temperature
        play(coordinator, lease)
    before = coordinator.status()
    assert "heldout/success" not in before.metrics and "driver" not in before.components, (
        "asking for the status writes nothing"
    )
    status = coordinator.driver_tick()
    assert status.heldout_open == 0 and "driver" in status.components
    assert status.metrics | {"heldout/success": 1.0, "heldout/episodes": 20.0} == status.metrics
    assert coordinator.claim(0) is None  # held-out groups are never trained on


def evaluates_at_start(run_dir: Path, *, learner_step: int = 0) -> Coordinator:
    """Open the run as its learner does: go on from a step, publish those weights as a new version."""
    make_coordinator(run_dir, max_staleness=1).close()
    config = make_config(run_dir, max_staleness=1)
    coordinator = Coordinator(
        replace(config, evaluation=replace(config.evaluation, at_start=True)), learns=True
    )
    newest = coordinator.resume(learner_step).latest_version
    publish(coordinator, 0 if newest is None else newest + 1, learner_step)
    return coordinator


def test_version_0_is_evaluated_before_anything_is_trained(tmp_path: Path) -> None:
    coordinator = evaluates_at_start(tmp_path / "run")
    round_0 = leases(coordinator)
    assert [(lease.group.split, lease.group.evaluated_version) for lease in round_0] == [
        ("heldout", 0)
    ] * 20
    assert coordinator.lease("w") is None, (
        "no training group before the last held-out episode has ended"
    )
    for lease in round_0:
        play(coordinator, lease)
    metrics = coordinator.driver_tick().metrics
    assert (metrics["heldout/success"], metrics["heldout/newest_version"]) == (1.0, 0.0)
    assert {lease.group.split for lease in leases(coordinator)} == {"train"}
    coordinator.close()


def test_a_run_that_goes_on_does_not_evaluate_its_start_again(tmp_path: Path) -> None:
    """Start four times: with 5 of the 20 tasks, with the others, with none, and after step 1."""
    run = tmp_path / "run"
    coordinator = evaluates_at_start(run)
    for lease in leases(coordinator)[:5]:
        play(coordinator, lease)
    coordinator.close()
    coordinator = evaluates_at_start(run)
    left = leases(coordinator)
    assert [(lease.group.split, lease.group.evaluated_version) for lease in left] == [
        ("heldout", 0)
    ] * 15
    for lease in left:
        play(coordinator, lease)
    assert coordinator.driver_tick().metrics["heldout/success"] == 1.0
    coordinator.close()
    for learner_step in (0, 1):
        coordinator = evaluates_at_start(run, learner_step=learner_step)
        assert coordinator.status().heldout_open == 0
        coordinator.close()


@given(n_tasks=st.integers(1, 50), seed=st.integers(0, 5))
def test_every_pass_plays_every_task_once_in_its_own_order(n_tasks: int, seed: int) -> None:
    played = [task_index(ordinal, n_tasks, seed=seed) for ordinal in range(2 * n_tasks)]
    assert sorted(played[:n_tasks]) == sorted(played[n_tasks:]) == list(range(n_tasks))
    if n_tasks >= 20:
        assert played[:n_tasks] != played[n_tasks:]


def test_a_worker_is_told_that_the_maintainer_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MAINTENANCE_PAUSE_S", 0.001)
    coordinator = make_coordinator(tmp_path / "run", max_staleness=0)
    assert coordinator.lease("w") is None  # no weights yet
    monkeypatch.setattr(coordinator.catalog, "live_segments", None)  # whatever it may be
    deadline = time.monotonic() + 30.0
    while coordinator.maintainer._failure is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(StoreError, match="maintainer of .* stopped: TypeError"):
        coordinator.lease("w")
    with pytest.raises(StoreError, match="maintainer"):
        coordinator.close()
    make_coordinator(tmp_path / "run", max_staleness=0).close()  # it had been given back


def test_a_limit_of_0_keeps_for_ever() -> None:
    kept = maintainer_settings(configs.StoreConfig())
    assert (kept.snapshot_window_s, kept.keep_days, kept.keep_versions) == (900.0, None, None)
    limited = maintainer_settings(configs.StoreConfig(keep_days=2.5, keep_versions=3))
    assert (limited.keep_days, limited.keep_versions) == (2.5, 3)


def test_free_groups_is_the_formula() -> None:
    assert free_groups(outstanding=0, groups_per_step=8, max_staleness=1) == 16
    assert free_groups(outstanding=16, groups_per_step=8, max_staleness=1) == 0
    assert free_groups(outstanding=20, groups_per_step=8, max_staleness=1) == 0


def test_a_heartbeat_after_the_end_is_heard_and_not_written(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=0)
    coordinator.close()
    # the first heartbeat in a second, which would be written
    coordinator.heartbeat("worker-0", None, waits_s=0.0)
    assert "worker-0" in coordinator._heartbeats.components()


def test_a_segment_that_only_its_worker_sees_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the volume of the storage was not mounted where the worker runs."""
    volume = tmp_path / "volume"
    config = make_config(tmp_path / "run", max_staleness=1)
    config = replace(config, store=replace(config.store, uri=volume.as_uri()))
    layout = RunLayout.create(
        tmp_path / "run", config_yaml=configs.as_yaml(config), storage_uri=config.store.uri
    )
    write_open_sql(layout, macros=[], max_staleness=1)
    coordinator = Coordinator(config, learns=True)
    publish(coordinator, 0, 0)
    (lease, *_) = leases(coordinator)
    commit = coordinator.commit

    def commit_unseen(segment: SegmentMeta, epoch: int) -> CommitResult:
        (volume / segment.path).unlink()
        return commit(segment, epoch)

    with monkeypatch.context() as patch:
        patch.setattr(coordinator, "commit", commit_unseen)
        with pytest.raises(UnavailableError, match=r"is not there; mount the volume where w runs"):
            play(coordinator, lease)
    play(coordinator, lease)
    assert coordinator.status().counts.complete == 1
    coordinator.close()

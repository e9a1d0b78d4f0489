"""Check that every begun episode is stored: as a trajectory, or as unfinished with its reason."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors import EngineLostError
from actors.rollout.episode import AttemptProgress, EpisodeOverdue, EpisodeRules
from actors.rollout.group import Attempts
from actors.rollout.step_records import EpisodeIds
from envs import EnvironmentFailed, Task
from store import Trajectory, write_segment
from tests.actors.test_runner import Stage, on_stage
from tests.coordinator.test_coordinator import make_config, make_coordinator, publish
from tests.support.store_samples import make_step, make_trajectory

SHOWN = "SELECT why, number, n_steps, n_response_tokens FROM unfinished ORDER BY ALL"
TOKENS = len(make_step(0, n_steps=1, version=0).response_ids)


def test_stragglers_are_recorded_with_how_far_they_got(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        stage.end(0, 3)
        await asyncio.sleep(1.0)
        # A stage's episode has played as many steps as its number says. Number 3 took a member's
        # place.
        assert stage.sql(SHOWN) == [("straggler", 1, 1, TOKENS), ("straggler", 2, 2, 2 * TOKENS)]
        state = (
            "SELECT state, u.split, worker, version FROM unfinished u JOIN groups USING (group_uid)"
        )
        assert set(stage.sql(state)) == {("complete", "train", "w", 0)}
        assert stage.sql("SELECT count(*) FROM unfinished WHERE begun_at > ended_at") == [(0,)]
        assert stage.sql("SELECT count(*) FROM trajectories") == [(2,)]

    on_stage(tmp_path, body, extra_members=2)


def test_extra_is_a_trajectory_and_not_unfinished(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        stage.end(0, 1, 2)
        await asyncio.sleep(1.0)
        assert stage.sql(SHOWN) == []

    on_stage(tmp_path, body, extra_members=1)


def test_a_group_that_becomes_too_old_is_recorded_before_it_is_played_again(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        publish(stage.coordinator, 2, 3)
        await asyncio.sleep(1.0)
        assert stage.sql(SHOWN) == [("too_old", 0, 0, 0), ("too_old", 1, 1, TOKENS)]
        # it plays the group again: that is what is lost now
        stage.coordinator.remove("w", "it died")
        assert stage.sql(
            "SELECT why, number, n_steps FROM unfinished WHERE n_steps IS NULL ORDER BY ALL"
        ) == [
            ("worker_lost", 0, None),
            ("worker_lost", 1, None),
        ]

    on_stage(tmp_path, body)


def test_a_stopped_worker_records_each_episode_that_it_gives_up_once(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        stage.end(0)
        await asyncio.sleep(0.0)
        stage.runner.stop()
        await asyncio.sleep(1.0)
        stage.coordinator.remove("w", "left, as it was asked to")
        assert stage.sql(SHOWN) == [("stopped", 1, 1, TOKENS)]

    on_stage(tmp_path, body)


def test_a_worker_that_loses_its_engine_reports_all_of_its_groups(tmp_path: Path) -> None:
    shown: list[tuple] = []

    async def body(stage: Stage) -> None:
        first, *_ = stage.playing.values()
        first.set_exception(EngineLostError("gone"))
        await asyncio.sleep(1.0)
        shown.extend(stage.sql(SHOWN))

    with pytest.raises(ExceptionGroup) as raised:
        on_stage(tmp_path, body)
    assert raised.group_contains(EngineLostError, match="gone")
    assert shown == [("worker_failed", 0, 0, 0), ("worker_failed", 1, 1, TOKENS)]


def test_every_failed_attempt_is_recorded_and_the_rest_of_an_abandoned_group(
    tmp_path: Path,
) -> None:
    shown: list[tuple] = []
    states: list[tuple] = []

    async def body(stage: Stage) -> None:
        inner = stage.run

        async def run(
            task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
        ) -> Trajectory:
            if ids.member == 0:
                return await inner(task, ids, rules, progress=progress)
            progress.add(make_step(0, n_steps=1, version=0))
            raise EpisodeOverdue("too late")

        stage.run = run  # type: ignore[method-assign]
        env = replace(stage.runner.config.env, attempts=2)
        stage.runner.config = replace(stage.runner.config, env=env)
        stage.end(0, 1)  # of the group that began before
        await asyncio.sleep(1.0)
        shown.extend(stage.sql(SHOWN))
        states.extend(
            stage.sql(
                "SELECT DISTINCT state FROM groups g SEMI JOIN unfinished u USING (group_uid)"
            )
        )

    with pytest.raises(ExceptionGroup) as raised:
        on_stage(tmp_path, body)
    assert raised.group_contains(EnvironmentFailed, match="10 groups in a row were abandoned")
    assert shown == [("failed", 1, 1, TOKENS)] * 20 + [("group_failed", 0, 0, 0)] * 10
    assert states == [("abandoned",)]


def test_episodes_of_a_lost_worker_are_recorded_without_their_length(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", max_staleness=1)
    config = replace(config, actors=replace(config.actors, extra_members=1))
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    coordinator.config = config
    coordinator._leases._extra_members = 1
    publish(coordinator, 0, 0)
    lease = coordinator.lease("w")
    assert lease is not None
    segment = write_segment(
        coordinator.layout, [make_trajectory(lease.group, 1)], worker="w", epoch=lease.epoch
    )
    coordinator.commit(segment, lease.epoch)
    coordinator.remove("w", "died")
    coordinator.remove("w", "a last sign of life came after it was gone")
    stage = SimpleNamespace(coordinator=coordinator)
    rows = Stage.sql(stage, "SELECT why, number, n_steps, worker FROM unfinished ORDER BY ALL")  # type: ignore[arg-type]
    assert rows == [("worker_lost", 0, None, "w"), ("worker_lost", 2, None, "w")]
    coordinator.close()


def test_a_report_of_a_fenced_worker_is_not_entered(tmp_path: Path) -> None:
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    lease = coordinator.lease("w")
    assert lease is not None
    attempts = Attempts(lease)
    attempts.begin(0)
    coordinator.record_unfinished("w", attempts.close("stopped"), epoch=lease.epoch - 1)
    assert Stage.sql(SimpleNamespace(coordinator=coordinator), SHOWN) == []  # type: ignore[arg-type]
    coordinator.close()

"""Test the real RolloutRunner and coordinator, with episodes that end on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.concurrency import MORE_AFTER, Concurrency
from actors.rollout.committer import STORAGE_TIMEOUT_S, Committer, StorageSilent
from actors.rollout.episode import AttemptProgress, EpisodeRules
from actors.rollout.runner import REPORT_AFTER_S, RolloutRunner
from actors.rollout.step_records import EpisodeIds
from coordinator import Coordinator, CoordinatorClient
from envs import PendingOperations, Task
from store import Trajectory, VersionRecord, export, uid, uid_text
from tests.coordinator.test_coordinator import make_config, make_coordinator, publish
from tests.support.run_views import connect
from tests.support.simulation import LocalHandle
from tests.support.store_samples import make_step
from tests.support.virtual_time import VirtualTimeLoop


@dataclass
class Stage:
    """The running episodes by (group, number), of one runner of groups of two."""

    coordinator: Coordinator
    runner: RolloutRunner
    playing: dict[tuple[bytes, int], asyncio.Future[None]] = field(default_factory=dict)
    loads: list[int] = field(default_factory=list)
    version: int = -1  # that it serves

    async def run(
        self, task: Task, ids: EpisodeIds, rules: EpisodeRules, *, progress: AttemptProgress
    ) -> Trajectory:
        number = ids.member
        key = (ids.group_uid, number)
        for index in range(number):  # the later its number, the further it gets
            progress.add(make_step(index, n_steps=number, version=0))
        self.playing[key] = asyncio.get_running_loop().create_future()
        try:
            await self.playing[key]
        finally:
            del self.playing[key]
        return Trajectory(
            traj_uid=uid(ids.group_uid, number),
            group_uid=ids.group_uid,
            env_name="key_room",
            task_id=task.id,
            split="train",
            seed=0,
            member=number,
            won=True,
            task_score=None,
            steps=(make_step(0, n_steps=1, version=self.loads[-1], reward=1.0),),
        )

    async def sync(self, version: VersionRecord) -> None:
        if self.coordinator.is_written(version.version):
            self.loads.append(version.version)
            self.version = version.version

    def end(self, *numbers: int) -> None:
        """End these numbers in every group."""
        for (_, number), episode in list(self.playing.items()):
            if number in numbers and not episode.done():
                episode.set_result(None)

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        export(self.coordinator.catalog, self.coordinator.layout)
        with connect(self.coordinator.layout) as connection:
            return connection.sql(query).fetchall()


def on_stage(
    tmp_path: Path, body: Callable[[Stage], Awaitable[None]], *, extra_members: int = 0
) -> None:
    """Run `body` while the runner runs; raise the errors of both."""
    config = make_config(tmp_path / "run", max_staleness=1)
    coordinator = make_coordinator(tmp_path / "run", max_staleness=1)
    publish(coordinator, 0, 0)
    actors = replace(
        config.actors, groups_in_flight=1, max_groups_in_flight=3, extra_members=extra_members
    )
    config = replace(config, actors=actors)

    async def run() -> None:
        client = CoordinatorClient(LocalHandle(coordinator, delay=None, seed=0), component="w")
        stage: Stage = Stage(coordinator, None)  # type: ignore[arg-type]
        pending = PendingOperations()
        stage.runner = RolloutRunner(
            client,
            config,
            committer=Committer(client, coordinator.layout, pending=pending),
            episodes=stage,  # type: ignore[arg-type]
            weights=stage,
            concurrency=Concurrency.of(config),
            pending=pending,
        )
        async with running(stage.runner):
            await body(stage)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
    coordinator.close()


@asynccontextmanager
async def running(runner: RolloutRunner) -> AsyncIterator[None]:
    task = asyncio.create_task(runner.run())
    await asyncio.sleep(1.0)
    try:
        yield
    finally:
        runner.stop()
        await asyncio.wait_for(task, timeout=60.0)


def test_it_plays_one_group_after_the_other_until_admission_closes_and_then_says_so(
    tmp_path: Path,
) -> None:
    async def body(stage: Stage) -> None:
        for _ in range(4):  # (max_staleness + 1) * 2 groups
            assert sorted(number for _, number in stage.playing) == [0, 1]
            assert stage.runner.waiting() is None
            stage.end(0, 1)
            await asyncio.sleep(1.0)
        assert stage.playing == {}
        reason, seconds = stage.runner.waiting() or ("", 0.0)
        assert reason == "admission" and seconds > 0.0
        assert stage.sql("SELECT state, count(*) FROM groups GROUP BY ALL") == [("complete", 4)]

    on_stage(tmp_path, body)


def test_a_stopped_runner_commits_ended_episodes_and_frees_the_rest_for_others(
    tmp_path: Path,
) -> None:
    async def body(stage: Stage) -> None:
        stage.end(1)
        await asyncio.sleep(0.0)
        stage.runner.stop()
        await asyncio.sleep(1.0)
        assert stage.sql("SELECT member FROM trajectories") == [(1,)]
        stage.coordinator.remove("w", "stopped")
        lease = stage.coordinator.lease("v")
        assert lease is not None and lease.group.missing == (0,)

    on_stage(tmp_path, body)


def test_a_worker_that_leaves_ends_groups_that_are_almost_done_and_begins_none(
    tmp_path: Path,
) -> None:
    async def body(stage: Stage) -> None:
        (group,) = {group for group, _ in stage.playing}
        stage.runner.leave(within_s=20.0)
        await asyncio.sleep(15.0)
        assert {each for each, _ in stage.playing} == {group}, "it leases no other group"
        stage.end(0, 1)
        await asyncio.sleep(1.0)
        assert stage.playing == {}
        assert stage.sql("SELECT state, count(*) FROM groups GROUP BY ALL") == [("complete", 1)]

    on_stage(tmp_path, body)


def test_a_worker_that_leaves_hands_back_groups_that_take_longer(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        stage.runner.leave(within_s=20.0)
        await asyncio.sleep(19.0)
        assert sorted(number for _, number in stage.playing) == [0, 1]
        stage.end(1)
        await asyncio.sleep(2.0)
        assert stage.playing == {}
        assert stage.sql("SELECT member FROM trajectories") == [(1,)]
        assert stage.sql("SELECT number, why FROM unfinished") == [(0, "stopped")]
        stage.coordinator.remove("w", "left")
        lease = stage.coordinator.lease("v")
        assert lease is not None and lease.group.missing == (0,)

    on_stage(tmp_path, body)


def test_with_a_spare_a_group_does_not_wait_for_its_slowest(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        assert sorted(number for _, number in stage.playing) == [0, 1, 2]
        stage.end(0, 2)
        await asyncio.sleep(1.0)
        assert stage.sql("SELECT state FROM groups WHERE n_members = 2") == [("complete",)]
        assert stage.sql("SELECT member FROM trajectories ORDER BY 1") == [(0,), (1,)]

    on_stage(tmp_path, body, extra_members=1)


def test_extra_is_kept_and_marked_and_nobody_trains_on_it(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        (group_uid,) = {group_uid for group_uid, _ in stage.playing}
        stage.end(0, 1, 2)
        await asyncio.sleep(1.0)
        assert stage.sql("SELECT split, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL") == [
            ("imported", 1),
            ("train", 2),
        ]
        ((state, reason),) = stage.sql("SELECT state, reason FROM groups WHERE split = 'imported'")
        assert (state, reason) == (
            "complete",
            f"imported from extra of group {uid_text(group_uid)}",
        )
        assert stage.coordinator.claim(0) is None  # one group of two is complete
        assert stage.coordinator.status().counts.trajectories == 2

    on_stage(tmp_path, body, extra_members=1)


def test_a_group_too_old_to_be_trained_on_is_given_up_and_makes_room(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        (first,) = {group_uid for group_uid, _ in stage.playing}
        publish(stage.coordinator, 1, 1)
        await asyncio.sleep(1.0)
        # one version apart may still be trained on
        assert {group_uid for group_uid, _ in stage.playing} == {first}
        publish(stage.coordinator, 2, 3)  # not step 2, after which there is an evaluation
        await asyncio.sleep(1.0)
        assert stage.loads[-1] == 2
        ((reason,),) = stage.sql("SELECT detail FROM events WHERE what = 'group given up'")
        assert "still played at version 2, begun at 0" in reason
        # it is played again, on the new weights
        assert {group_uid for group_uid, _ in stage.playing} == {first}
        stage.end(0, 1)
        await asyncio.sleep(1.0)
        assert stage.sql("SELECT DISTINCT version_min FROM trajectories") == [(2,)]

    on_stage(tmp_path, body)


def test_it_leases_no_group_for_weights_that_are_not_written_yet(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        stage.coordinator.announce(
            VersionRecord(version=1, path="weights/v1", digest="d", learner_step=1)
        )
        stage.end(0, 1)
        await asyncio.sleep(REPORT_AFTER_S)
        assert stage.playing == {} and set(stage.loads) == {0}
        reason, seconds = stage.runner.waiting() or ("", 0.0)
        assert reason == "the weights of version 1" and seconds > 0.0
        stage.coordinator.written(1)
        await asyncio.sleep(1.0)
        assert len(stage.playing) == 2 and stage.loads[-1] == 1

    on_stage(tmp_path, body)


def test_while_its_engine_is_idle_it_plays_more_groups(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        assert len(stage.playing) == 2
        for _ in range(MORE_AFTER):
            stage.runner.adapt(preempted=0)
        await asyncio.sleep(1.0)
        assert len(stage.playing) == 4
        for _ in range(10 * MORE_AFTER):
            stage.runner.adapt(preempted=0)
        await asyncio.sleep(1.0)
        assert len(stage.playing) == 6  # max_groups_in_flight = 3

    on_stage(tmp_path, body)


def test_a_storage_that_never_answers_is_named_and_ends_the_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(1e9)

    async def body(stage: Stage) -> None:
        stage.end(0, 1)
        await asyncio.sleep(REPORT_AFTER_S + 1.0)
        reason, seconds = stage.runner.waiting() or ("", 0.0)
        assert reason == "the storage, to write a segment" and seconds > REPORT_AFTER_S
        await asyncio.sleep(STORAGE_TIMEOUT_S)

    monkeypatch.setattr("actors.rollout.committer.asyncio.to_thread", never)
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr("envs.hosting.pending.time", clock)
    with pytest.raises(ExceptionGroup) as raised:
        on_stage(tmp_path, body)
    assert raised.group_contains(StorageSilent, match="w could not write a segment within 300 s")

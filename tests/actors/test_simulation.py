"""Play whole runs in virtual time: random delays, deaths, joins and restarts.

Coordinator, catalog and files are real. A run is decided by its seed alone. What `World` does to it is what happens to real ones: workers
are killed and join, the learner is killed and goes on from its checkpoint, the coordinator is
replaced, messages are slow and outlive their senders.

SIMULATED_RUNS says how many (default: 60; `make test-crash`: 300).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest

import configs
from actors.rollout.episode import AsyncEnvironment
from configs import Config
from coordinator import Coordinator, heartbeats
from coordinator import export_schedule as maintenance
from coordinator.task_queue import task_index
from envs import environment_class, list_tasks
from store import (
    Batch,
    RunLayout,
    SegmentMeta,
    Trajectory,
    TrajectoryMeta,
    write_open_sql,
    write_segment,
)
from store.reading.open_sql import fixed
from tests.support.simulation import (
    Delay,
    DelayedEnvironment,
    LocalHandle,
    SimulatedLearner,
    SimulatedSetup,
    SimulatedWorker,
)
from tests.support.virtual_time import VirtualTimeLoop

N_RUNS = int(os.environ.get("SIMULATED_RUNS", "60"))
N_CARELESS = 30  # runs that must find the bound forgotten
GROUP_SIZE, LEARNER_STEPS = 2, 3
LEASE_S = 2.0
MANY = 60  # workers, as the config has it: they ask more seldom, which makes the runs quicker
# runs; the others commit files that they did not write, which is what takes longest
FILES_EVERY = 10
LONGEST_S = 300.0  # virtual: a run takes seconds, one that does not end is stuck
RESTART_S = 0.2  # after a death; messages of the dead have arrived by then


class Careless(Coordinator):
    """Ignore the bound when it hands out batches."""

    def claim(self, current_version: int) -> Batch | None:
        return self.catalog.claim(
            n_groups=self.config.learner.groups_per_step,
            current_version=current_version,
            max_staleness=1_000,
        )


@dataclass
class World:
    """Play one run: `await play()` until the learner has finished."""

    run_dir: Path
    seed: int
    coordinator_class: type[Coordinator] = Coordinator
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.max_staleness = self.random.randrange(4)
        self.config = make_config(
            self.run_dir,
            max_staleness=self.max_staleness,
            stragglers=self.random.choice(("drop", "wait")),
            groups_per_step=self.random.randint(1, 2),
            groups_in_flight=self.random.randint(1, 2),
            extra_members=self.random.choice((0, 0, 1)),
        )
        self.environment, self.generation, self.loading, self.message, self.step_time = (
            Delay(
                median_s=10 ** self.random.uniform(low, high),
                sigma=self.random.choice((0.0, 0.5, 1.0)),
            )
            for low, high in ((-2.5, -1.0), (-2.5, -1.0), (-2.5, -0.5), (-3.5, -2.5), (-1.5, -0.3))
        )
        self.mishap = Delay(median_s=10 ** self.random.uniform(-0.6, 0.3), sigma=1.0)
        self.workers: dict[SimulatedWorker, asyncio.Task[None]] = {}

    async def play(self) -> None:
        self.handle = LocalHandle(self.open_coordinator(), delay=self.message, seed=self.seed)
        for _ in range(self.random.randint(1, 4)):
            await self.join()
        self.learner = asyncio.create_task(self.learn(after_s=0.0))
        mishaps = asyncio.create_task(self.mishaps())
        while not self.learner.done():
            await asyncio.wait(
                [self.learner, mishaps], timeout=1.0, return_when=asyncio.FIRST_COMPLETED
            )
            failed = [task for task in (mishaps, *self.workers.values()) if task.done()]
            assert not failed, f"ended by itself: {failed}"
        mishaps.cancel()
        for worker in self.workers:
            await worker.stop()
        await asyncio.gather(*self.workers.values())
        assert self.learner.result() == LEARNER_STEPS
        coordinator: Any = self.handle.target
        self.happened["stale"] += coordinator.catalog.counts().stale
        coordinator.close()

    async def learn(self, *, after_s: float) -> int:
        await asyncio.sleep(after_s)
        learner = SimulatedLearner(
            self.config, self.handle, step_time=self.step_time, seed=self.random.getrandbits(32)
        )
        await learner.start()
        return await learner.run()

    async def join(self) -> None:
        self.happened["join"] += 1
        setup = SimulatedSetup(
            name=f"w{self.happened['join']}",
            config=self.config,
            seed=self.seed,
            environment=self.make_environment,
            generation=self.generation,
            loading=self.loading,
        )
        worker = SimulatedWorker(setup, self.handle)
        self.workers[worker] = asyncio.create_task(worker.run())

    def make_environment(self, source: random.Random) -> AsyncEnvironment:
        return DelayedEnvironment(
            environment_class("key_room")({}), delay=self.environment, source=source
        )

    async def mishaps(self) -> None:
        kinds = (
            self.join,
            self.lose_worker,
            self.lose_worker,
            self.kill_learner,
            self.restart_coordinator,
        )
        while True:
            await asyncio.sleep(self.mishap.draw(self.random))
            await self.random.choice(kinds)()
            if not self.workers:
                await self.join()

    async def lose_worker(self) -> None:
        """Let a worker leave in order, or die. A death is reported soon, or its leases run out."""
        worker = self.random.choice(list(self.workers))
        task = self.workers.pop(worker)
        if self.random.random() < 0.3:
            self.happened["worker left"] += 1
            await worker.stop()
            return
        self.happened["worker killed"] += 1
        worker.kill()
        await task
        if self.random.random() < 0.5:
            await asyncio.sleep(RESTART_S)
            await self.handle.remove.remote(worker.name, "killed")

    async def kill_learner(self) -> None:
        if not self.learner.done():
            self.happened["learner killed"] += 1
            self.learner.cancel()
            self.learner = asyncio.create_task(self.learn(after_s=RESTART_S))

    async def restart_coordinator(self) -> None:
        """Replace the coordinator without an export, as after a crash."""
        self.happened["coordinator replaced"] += 1
        old: Any = self.handle.target
        old.maintainer.close()
        old.catalog.close()
        self.handle.target = self.open_coordinator()

    def open_coordinator(self) -> Coordinator:
        coordinator = self.coordinator_class(self.config, learns=True)
        # no power is lost here
        coordinator.catalog._database._connection.execute("PRAGMA synchronous = OFF")
        return coordinator


def make_config(
    run_dir: Path,
    *,
    max_staleness: int,
    stragglers: str,
    groups_per_step: int,
    groups_in_flight: int,
    extra_members: int,
) -> Config:
    config = Config(run_dir=str(run_dir), max_staleness=max_staleness, stragglers=stragglers)
    return replace(
        config,
        env=configs.EnvConfig(name="key_room", options={}, max_steps=3),
        prompt=replace(config.prompt, template="compact"),
        actors=replace(
            config.actors,
            workers=MANY,
            groups_in_flight=groups_in_flight,
            extra_members=extra_members,
        ),
        algorithm=replace(config.algorithm, group_size=GROUP_SIZE),
        learner=replace(
            config.learner, groups_per_step=groups_per_step, steps=LEARNER_STEPS, checkpoint_every=2
        ),
        evaluation=replace(config.evaluation, every=0),
    )


@pytest.fixture
def simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[World, list[Any]]]:
    """Play the run of a seed; return its world and its rows of staleness_violations."""
    empty = tmp_path / "empty"
    layout = RunLayout.create(empty, config_yaml="")
    write_open_sql(layout, macros=[], max_staleness=0)
    Coordinator(
        make_config(
            empty,
            max_staleness=0,
            stragglers="drop",
            groups_per_step=1,
            groups_in_flight=1,
            extra_members=0,
        ),
        learns=True,
    ).close()
    statements = the_views(fixed(layout.open_sql.read_text(), empty))
    duck = duckdb.connect(config={"threads": 1})  # the tables are tiny
    # at the end is often enough
    monkeypatch.setattr("coordinator.export_schedule.EXPORT_INTERVAL_S", float("inf"))
    monkeypatch.setattr("coordinator.coordinator.LEASE_S", LEASE_S)
    # so that groups are committed in parts
    monkeypatch.setattr("actors.rollout.group.COMMIT_EVERY_S", 0.2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power is lost here

    def play(seed: int, **how: Any) -> tuple[World, list[Any]]:
        world = World(tmp_path / f"run-{seed}", seed, **how)
        monkeypatch.setattr(
            "actors.rollout.committer.write_segment",
            write_segment if seed % FILES_EVERY == 0 else write_nothing,
        )
        shutil.copytree(empty, world.run_dir)
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            clock = runner.get_loop().time
            monkeypatch.setattr("store.catalog.database.now_us", lambda: 1 + round(clock() * 1e6))
            for module in (maintenance, heartbeats):
                monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
            runner.run(asyncio.wait_for(world.play(), timeout=LONGEST_S))
        for statement in statements:
            duck.execute(
                statement.replace(
                    f"SET VARIABLE run = '{empty}'", f"SET VARIABLE run = '{world.run_dir}'"
                )
            )
        duck.execute(f"SET VARIABLE max_staleness = {world.max_staleness}")
        violations = duck.sql("FROM staleness_violations").fetchall()
        check_batches(world)
        shutil.rmtree(world.run_dir)
        return world, violations

    return play


def write_nothing(
    layout: RunLayout, trajectories: Sequence[Trajectory], *, worker: str, epoch: int
) -> SegmentMeta:
    """Return what the catalog would be told of a file."""
    metas = tuple(TrajectoryMeta.of(trajectory) for trajectory in trajectories)
    name = f"{worker}-{time.perf_counter_ns()}"
    n_steps = sum(meta.n_steps for meta in metas)
    # as the store names it
    path = (
        f"segments/{worker}/{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}.parquet"
    )
    return SegmentMeta(
        segment_id=name,
        path=path,
        digest=name,
        n_steps=n_steps,
        n_bytes=1,
        worker=worker,
        trajectories=metas,
    )


def the_views(open_sql: str) -> list[str]:
    """Return the statements of open.sql behind staleness_violations; the others open every file."""
    text = "\n".join(line.partition("--")[0] for line in open_sql.splitlines())
    views = ("exported.versions", "exported.lineage", "versions", "lineage", "staleness_violations")
    wanted = [f"CREATE OR REPLACE VIEW {view} " for view in views]
    kept = [
        s
        for s in map(str.strip, text.split(";"))
        if s.startswith(("SET ", "CREATE SCHEMA ", *wanted))
    ]
    for view in wanted:
        assert any(statement.startswith(view) for statement in kept), view
    return kept


def check_batches(world: World) -> None:
    """Check what was trained on and handed out, and count what has happened.

    Every learner step up to the last has its groups, and no group was trained on twice. The tasks
    that were handed out are those of an undisturbed run, one after the other.
    """
    with closing(sqlite3.connect(world.run_dir / "catalog.sqlite")) as catalog:
        rows = catalog.execute(
            """SELECT learner_step, group_uid, version_in - version_min
               FROM batch JOIN batch_group USING (batch_id)
               WHERE state = 'trained' AND live = 1"""
        ).fetchall()
        handed_out = catalog.execute(
            "SELECT ordinal, task_id FROM grp WHERE split = 'train' ORDER BY ordinal"
        ).fetchall()
    tasks = list_tasks(world.config.env.name, world.config.env.options)["train"]
    order = [
        task_index(ordinal, len(tasks), seed=world.config.seed)
        for ordinal in range(len(handed_out))
    ]
    assert handed_out == [(ordinal, tasks[place].id) for ordinal, place in enumerate(order)], (
        world.seed
    )
    steps = Counter(step for step, _, _ in rows)
    assert steps == dict.fromkeys(
        range(1, LEARNER_STEPS + 1), world.config.learner.groups_per_step
    ), world.seed
    assert len({group_uid for _, group_uid, _ in rows}) == len(rows), world.seed
    world.happened["trained at the bound"] += sum(
        staleness == world.max_staleness > 0 for _, _, staleness in rows
    )


def test_nothing_is_trained_on_beyond_the_bound_whoever_dies_joins_or_is_slow(
    simulated: Callable[..., tuple[World, list[Any]]],
) -> None:
    happened: Counter[str] = Counter()
    for seed in range(N_RUNS):
        world, violations = simulated(seed)
        assert violations == [], f"seed {seed}, max_staleness {world.max_staleness}: {violations}"
        happened += world.happened
    print(happened)
    assert all(
        happened[what] >= N_RUNS / 10
        for what in (
            "join",
            "worker left",
            "worker killed",
            "learner killed",
            "coordinator replaced",
        )
    )
    assert all(happened[what] >= N_RUNS / 10 for what in ("trained at the bound", "stale")), (
        happened
    )


def test_the_same_runs_find_a_coordinator_that_forgets_the_bound(
    simulated: Callable[..., tuple[World, list[Any]]],
) -> None:
    assert any(simulated(seed, coordinator_class=Careless)[1] for seed in range(N_CARELESS))

"""A run that is killed again and again, and gone on with; beside it the same run undisturbed, for
comparison.

Both have one run id, so their tasks and the seeds of their samples are the same: with the scripted
player every trajectory is.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import configs
import store
from configs import Config
from coordinator.task_queue import task_index
from envs import list_tasks
from store import RunLayout
from tests.support.fault_runs import (
    CONFIG,
    FAULTY_WORLD,
    ROOT,
    SCRIPTED,
    FaultRun,
    catalog_number,
    catalog_rows,
    processes_of,
    trained_step,
)

SIMULATED = (*SCRIPTED, "supervision.silent_s=15")
# The policy hardly changes, so that lengths can be compared; silent_s as usual, as engines start on
# a busy machine.
REAL = ("learner.learning_rate=1e-6", "supervision.silent_s=15", "actors.engine_timeout_s=20")
NEED_THE_COMMAND = ("tree", "driver", "coordinator")
STARTED_AGAIN = ("worker-0", "learner", "worker-0 environment")
ENGINE = "worker-0 engine"
IN_THE_START = 0.3  # of the kills of tree and driver: while the run comes up, not while it works
# kills come within the one after the command was given, the other after it works again
START_S, WORK_S = 12.0, 4.0
PATIENCE_S = 300.0  # until something is committed; a busy machine takes long to start


@dataclass(kw_only=True)
class KilledRun:
    """`start()`, then `kill(target)` as often as wanted, then `finish()`. `recovered_s` are seconds
    from a command to the first trajectory that was committed after it."""

    home: Path
    name: str
    model: Path
    settings: Sequence[str]
    random: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    recovered_s: list[float] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    running: FaultRun | None = None
    begun_s: float = 0.0
    epoch: int = 0  # of the catalog when the command was given
    n_commands: int = 0
    ended_early: int = 0

    @property
    def run(self) -> Path:
        return self.home / self.name

    def start(self, *overrides: str) -> None:
        """The same command, and every other time `--resume`, from another directory."""
        self.n_commands += 1
        again = self.n_commands % 2 == 0
        given = (
            ["--resume", str(self.run)]
            if again
            else [str(self.home / "killed.yaml"), f"run_dir={self.run}"]
        )
        settings = () if again else (f"model.path={self.model}", *self.settings)
        command = [sys.executable, "-m", "cli", "train", *given, *settings, *overrides]
        fault = self.home / "fault"
        output = self.home / f"{self.name}.out"
        with output.open("a") as out:
            process = subprocess.Popen(
                command,
                cwd=self.home if again else ROOT,
                env=self.environ(),
                text=True,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running = FaultRun(run=self.run, process=process, fault=fault, output=output)
        self.begun_s, self.epoch = time.monotonic(), self.catalog_epoch()

    def environ(self) -> dict[str, str]:
        """With which the world of the runs is found."""
        mine = {
            "HF_HUB_OFFLINE": "1",
            "FAULT_FILE": str(self.home / "fault"),
            "PYTHONPATH": str(self.home),
        }
        return {**os.environ, **mine}

    def wait_until_it_works(self) -> None:
        """Something was committed by who was started with the command: of a killed driver's run
        others may still commit.
        """
        self._until(lambda: self.last_commit_epoch() > self.epoch, what="a new trajectory")
        self.recovered_s.append(time.monotonic() - self.begun_s)

    def kill(self, target: str) -> None:
        """At a random moment; afterwards the run works again. `target` is one of NEED_THE_COMMAND,
        or a part of FaultRun's.
        """
        self.kills[target] += 1
        if target in ("tree", "driver") and self.random.random() < IN_THE_START:
            time.sleep(self.random.uniform(0.0, START_S))
        else:
            if self.begun_s:
                self.wait_until_it_works()
                self.begun_s = 0.0
            self._until(
                lambda: target in ("tree", "driver") or self._running().find(target) is not None,
                what=target,
            )
            time.sleep(self.random.uniform(0.0, WORK_S))
        self._kill(target)
        self.seen = self.committed()
        if target in NEED_THE_COMMAND:
            self.start()

    def finish(self, steps: int) -> str:
        """Goes on to learner step `steps` and ends; what it said."""
        if self.begun_s and self.n_commands:
            self.wait_until_it_works()
        self._kill("tree")
        self.seen = self.committed()
        self.start(f"learner.steps={steps}")
        running = self._running()
        assert running.process.wait(timeout=3 * PATIENCE_S) == 0, running.said()
        return running.said()

    def close(self) -> None:
        """Whatever is left of it is killed."""
        if self.running is not None:
            self._kill("tree")

    def committed(self) -> set[bytes]:
        return {uid for (uid,) in self.catalog("SELECT traj_uid FROM trajectory")}

    def last_commit_epoch(self) -> int:
        return catalog_number(self.run, "SELECT max(epoch) FROM segment WHERE level = 0")

    def catalog_epoch(self) -> int:
        return catalog_number(self.run, "SELECT epoch FROM meta")

    def settled_step(self) -> int:
        return trained_step(self.run)

    def catalog(self, query: str) -> list[tuple[Any, ...]]:
        return catalog_rows(self.run, query)

    def _until(self, condition: Callable[[], bool], *, what: str) -> None:
        """A part that dies before all have started once ends the run: the command is given again
        then.
        """
        waiting_since_s = time.monotonic()
        while not condition():
            running = self._running()
            assert time.monotonic() - waiting_since_s < PATIENCE_S, (
                f"{what} did not happen:\n{running.said()}"
            )
            if running.process.poll() is not None:
                assert "the same command goes on" in running.said().splitlines()[-1], running.said()
                self.ended_early += 1
                self.start()
            time.sleep(0.1)

    def _running(self) -> FaultRun:
        assert self.running is not None, "start it first"
        return self.running

    def _kill(self, target: str) -> None:
        running = self._running()
        if target == "tree":
            victims = processes_of(self.run)
            running.process.kill()
            for victim in victims:
                with contextlib.suppress(psutil.Error):
                    victim.kill()
        elif target == "driver":
            running.process.kill()
        else:
            victim = running.find(target)
            if victim is not None:  # it may have been on its way to be started again
                with contextlib.suppress(psutil.Error):
                    victim.send_signal(signal.SIGKILL)
        if target in NEED_THE_COMMAND:
            running.process.wait(timeout=PATIENCE_S)


def killed_and_undisturbed(
    home: Path, model: Path, settings: Sequence[str], *, seed: int
) -> tuple[KilledRun, KilledRun]:
    """Two run directories with one run id, nothing started."""
    write_world(home)
    runs = [
        KilledRun(home=home, name=name, model=model, settings=settings, random=random.Random(seed))
        for name in ("killed", "undisturbed")
    ]
    overrides = [f"run_dir={runs[0].run}", f"model.path={model}", *settings]
    config = configs.load(home / "killed.yaml", overrides)
    RunLayout.create(runs[0].run, config_yaml=configs.as_yaml(config))
    shutil.copytree(runs[0].run, runs[1].run)
    return runs[0], runs[1]


def write_world(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "faulty_world.py").write_text(FAULTY_WORLD)
    (home / "killed.yaml").write_text(CONFIG)


def expected_tasks(config: Config, n: int) -> list[tuple[int, str]]:
    """Return the tasks that a run must dispatch, whatever happens to it."""
    tasks = list_tasks("key_room", config.env.options)["train"]  # those of the faulty world
    return [
        (ordinal, tasks[task_index(ordinal, len(tasks), seed=config.seed)].id)
        for ordinal in range(n)
    ]


def dispatched(run: KilledRun) -> list[tuple[int, str]]:
    return [
        tuple(row)
        for row in run.catalog(
            "SELECT ordinal, task_id FROM grp WHERE split = 'train' ORDER BY ordinal"
        )
    ]


def trained_twice(run: Path) -> int:
    """Groups that are in two learner steps that count, plus learner steps that are missing or there
    twice.
    """
    with store.open_run(run) as reader:
        (row,) = reader.sql(
            """
            SELECT count(*) - count(DISTINCT group_uid) AS groups,
                   count(DISTINCT batch_id) AS batches, coalesce(max(learner_step), 0) AS steps
            FROM lineage WHERE live AND batch_state = 'trained'
            """
        ).to_pylist()
    return int(row["groups"]) + abs(int(row["batches"]) - int(row["steps"]))


def staleness_violations(run: Path) -> int:
    with store.open_run(run) as reader:
        return int(reader.sql("SELECT count(*) AS n FROM staleness_violations").to_pylist()[0]["n"])


def lengths_by_group(run: KilledRun) -> dict[int, float]:
    """Ordinal of a training group that was played to its end -> mean number of steps of its
    trajectories.
    """
    query = (
        "SELECT ordinal, n_steps * 1.0 / size FROM grp WHERE split = 'train' AND n_members = size"
    )
    return dict(run.catalog(query))


@contextlib.contextmanager
def closing(*runs: KilledRun) -> Iterator[None]:
    try:
        yield
    finally:
        for run in runs:
            run.close()

"""A run of gigpo train to break: its processes by name, its faults by a file, and what must hold
of it afterwards.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

import configs
import store
from actors import sample_chats
from driver.run_lock import RUN_MARK
from learner import make_tiny_model, train_tokenizer
from store import RunLayout
from tests.support.run_views import connect

ROOT = Path(__file__).resolve().parents[2]
NAMED_WITHIN_S = 30.0
PATIENCE_S = 600.0  # for what nothing promises: starts, on a busy machine

# Does what the first line of the file FAULT says in one step, then goes on as key_room does.
FAULTY_WORLD = """
import dataclasses, os, random, time
from envs import Observation, Transition
from envs.key_room import KeyRoomEnv
FAULT = os.environ["FAULT_FILE"]
class FaultyRoom(KeyRoomEnv):
    def step(self, action):
        time.sleep(0.005)
        try:
            fault = open(FAULT).read()
        except FileNotFoundError:  # no two episodes earn the same: an untrained model still has something to learn from
            transition = super().step(action)
            return dataclasses.replace(transition, reward=transition.reward + 0.01 * random.random())
        if not fault.startswith("always"):
            os.unlink(FAULT)
        if "hang" in fault:
            time.sleep(3600)
        if "nonsense" in fault:
            return {"reward": 1.0}
        if "nan" in fault:
            nan = float("nan")
            return Transition(observation=Observation(text="?"), reward=nan, terminated=False, truncated=False, won=False)
        raise RuntimeError("the door fell on the agent")
"""
CONFIG = """
env: {name: "faulty_world:FaultyRoom", max_steps: 12, answer_timeout_s: 3}
prompt: {template: compact, history_length: 1, max_prompt_tokens: 120, invalid: admissible}
actors: {groups_in_flight: 4, max_response_tokens: 12, kv_cache_gib: 0.25, engine_timeout_s: 3}
model: {tiny: {vocabulary_size: 384, hidden_size: 64, layers: 1}}
algorithm: {group_size: 4}
learner: {steps: 3000, groups_per_step: 4, keep_versions: 3002, learning_rate: 1.0e-3, checkpoint_every: 5}
evaluation: {every: 0, final_episodes_per_task: 1}
supervision: {silent_s: 8, max_restarts: 20}
"""
SETTLED = "SELECT batch_id FROM batch WHERE trained_lsn IS NOT NULL"  # also if rolled back since
SCRIPTED = (
    "actors.scripted=true",
    "loss.policy=behaviour_cloning",
    "max_staleness=3000",
    "algorithm.group_filter=advantages",
)


@dataclass(frozen=True, kw_only=True)
class FaultRun:
    """A run that `started` started. `part` gives its processes."""

    run: Path
    process: subprocess.Popen[str]
    fault: Path
    output: Path

    def sql(self, query: str) -> list[tuple]:
        with connect(RunLayout.open(self.run)) as connection:
            return connection.sql(query).fetchall()

    def part(self, name: str) -> psutil.Process:
        """The process of that component: "coordinator", "learner", "worker-0", "worker-0
        environment", "worker-0 engine".

        Waits for one that is being started again.
        """
        found: list[psutil.Process] = []

        def is_there() -> bool:
            process = self.find(name)
            found.extend([] if process is None else [process])
            return bool(found)

        self.wait(is_there, what=f"a process {name}")
        return found[0]

    def find(self, name: str) -> psutil.Process | None:
        """The same; None while there is none."""
        return find_part(self.run, name)

    def wait(
        self, condition: Callable[[], bool], *, what: str, within_s: float = PATIENCE_S
    ) -> float:
        """Seconds until it held."""
        started = time.monotonic()
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() - started < within_s, (
                f"{what} did not happen within {within_s:g} s:\\n{self.said()}"
            )
            time.sleep(0.1)
        return time.monotonic() - started

    def events(self, what: str) -> list[str]:
        query = f"SELECT detail FROM event WHERE what = '{what}' ORDER BY lsn, event_id"
        return [detail for (detail,) in catalog_rows(self.run, query)]

    def trajectories(self) -> int:
        return len(catalog_rows(self.run, "SELECT 1 FROM trajectory"))

    def learner_step(self) -> int:
        """Newest learner step; 0 while readers are shown nothing."""
        return trained_step(self.run) if (self.run / "manifest.json").exists() else 0

    def tell(self, fault: str) -> None:
        """Write the fault into the file that the environment reads."""
        # Renamed into place: a step that read an empty file would fail in another way.
        whole = self.fault.with_suffix(".whole")
        whole.write_text(fault)
        whole.replace(self.fault)

    def goes_on(self) -> None:
        """New trajectories are committed and new learner steps settled."""
        trajectories, steps = self.trajectories(), len(catalog_rows(self.run, SETTLED))
        self.wait(lambda: self.trajectories() > trajectories, what="a new trajectory")
        self.wait(lambda: len(catalog_rows(self.run, SETTLED)) > steps, what="a new learner step")

    def said(self) -> str:
        return self.output.read_text()

    def ended(self, *, within_s: float) -> tuple[int, str]:
        """Exit code and last line."""
        code = self.process.wait(timeout=within_s)
        return code, self.said().strip().splitlines()[-1]


@contextlib.contextmanager
def started(run: Path, model: Path, *overrides: str) -> Iterator[FaultRun]:
    """`gigpo train` on a world that can be told to fail. At the end whatever is left of it is
    killed.
    """
    home = run.parent
    home.mkdir(parents=True, exist_ok=True)
    (home / "faulty_world.py").write_text(FAULTY_WORLD)
    (home / "faults.yaml").write_text(CONFIG)
    fault, output = home / f"{run.name}.fault", home / f"{run.name}.out"
    command = [
        sys.executable,
        "-m",
        "cli",
        "train",
        str(home / "faults.yaml"),
        f"run_dir={run}",
        f"model.path={model}",
        *overrides,
    ]
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "FAULT_FILE": str(fault),
        "PYTHONPATH": str(home),
    }
    with output.open("a") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            text=True,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield FaultRun(run=run, process=process, fault=fault, output=output)
    finally:
        for left in processes_of(run):
            with contextlib.suppress(psutil.Error):
                left.kill()
        process.kill()
        process.wait()


def catalog_rows(run: Path, query: str) -> list[tuple[Any, ...]]:
    """Ask a run's catalog itself. Return no rows while there is none.

    Readers are shown what a second ago was true. And to open a run's views takes so much processor
    time that a test that waits for something would slow the run down.
    """
    path = run / "catalog.sqlite"
    if not path.exists():
        return []
    with contextlib.closing(
        sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)
    ) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):  # it has just been made
                raise
            return []


def catalog_number(run: Path, query: str) -> int:
    """Return the one number that the catalog answers; 0 if there is none."""
    rows = catalog_rows(run, query)
    return int(rows[0][0] or 0) if rows else 0


def trained_step(run: Path) -> int:
    """Return the newest learner step; 0 before the first."""
    return catalog_number(run, "SELECT max(learner_step) FROM batch WHERE state = 'trained'")


def find_part(run: Path, name: str) -> psutil.Process | None:
    """Return the living process of a run's component, named as in `FaultRun.part`, if there is one."""
    return next(iter(find_parts(run, name)), None)


def find_parts(run: Path, name: str) -> list[psutil.Process]:
    """Return all of them: a task that ended its environment process is played in a second one."""
    found: list[psutil.Process] = []
    component, _, child = name.partition(" ")
    log = str((run / "logs" / f"{component}.log").resolve())
    wanted = {"environment": "envs.hosting.environment_process", "engine": "EngineCore"}
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(process.cmdline())
            is_child = any(word in command for word in wanted.values())
            if not child and not is_child and os.readlink(f"/proc/{process.pid}/fd/1") == log:
                found.append(process)
            # Not `process.parent()`: it compares starting times, of which psutil knows an older
            # process's by an older clock.
            if (
                child
                and wanted[child] in command
                and os.readlink(f"/proc/{process.ppid()}/fd/1") == log
            ):
                found.append(process)
    return found


def processes_of(run: Path) -> list[psutil.Process]:
    """All living ones that carry the run's mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                process.environ().get(RUN_MARK) == str(run.resolve())
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def untrained_model(path: Path) -> Path:
    """A tiny model that can read the world of CONFIG."""
    config = configs.from_yaml(
        yaml.safe_dump({**yaml.safe_load(CONFIG), "env": {"name": "key_room", "max_steps": 12}})
    )
    tokenizer = train_tokenizer(
        sample_chats(config), vocabulary_size=config.model.tiny.vocabulary_size
    )
    make_tiny_model(path, tokenizer=tokenizer, config=config.model.tiny, seed=0)
    return path


def check_nothing_lost(run: FaultRun, seen: set[object]) -> None:
    """Every trajectory that was ever seen is there, once; no batch holds a group twice; fsck
    agrees.
    """
    with store.open_run(run.run) as reader:
        uids = [
            row["traj_uid"] for row in reader.sql("SELECT traj_uid FROM trajectories").to_pylist()
        ]
        assert len(uids) == len(set(uids))
        assert seen <= set(uids)
        assert reader.sql(
            "SELECT count(*) - count(DISTINCT group_uid) AS n FROM lineage WHERE live"
        ).to_pylist() == [{"n": 0}]
        assert reader.sql("SELECT count(*) AS n FROM staleness_violations").to_pylist() == [
            {"n": 0}
        ]
    command = [sys.executable, "-m", "cli", "fsck", str(run.run)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ": whole, " in answer.stdout, answer.stdout + answer.stderr


def seen_now(run: FaultRun) -> set[object]:
    with store.open_run(run.run) as reader:
        return {
            row["traj_uid"] for row in reader.sql("SELECT traj_uid FROM trajectories").to_pylist()
        }

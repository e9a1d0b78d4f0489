"""Check runs with two engines: one that nobody touches, one whose engine is killed, one that goes
on with others.

How well a run learns differs by more than 0.2 between two seeds, so no test compares two runs. Each
run has to prove what holds of every run: no step is missing or done twice, both engines played,
each engine served what was published, and every stored log-probability is what the weights of its
version give.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from actors.policy import Completion, Prompt
from tests.support.fault_runs import (
    NAMED_WITHIN_S,
    ROOT,
    FaultRun,
    check_nothing_lost,
    processes_of,
    seen_now,
)
from tests.support.learner_logprobs import both_logprobs

pytestmark = pytest.mark.faults
Start = Callable[..., FaultRun]

STEPS = 40
SETTINGS = (
    "actors.workers=2",
    f"learner.steps={STEPS}",
    "learner.keep_versions=100",  # all: their rows are looked at again
    "evaluation.every=0",
    "evaluation.final_episodes_per_task=1",
)
KILL_AFTER_STEPS = (5, 15, 25)
LONGEST_S = 1800.0
SAME = 1e-4  # of a log-probability in float32; the version next to it differs by far more

STEPS_TRAINED = """
    SELECT learner_step, count(DISTINCT batch_id) FROM lineage
    WHERE live AND batch_state = 'trained' GROUP BY ALL ORDER BY ALL"""
# By worker, how many of its loads read something else than was published.
LOADS = """
    WITH load AS (
        SELECT component, (detail ->> 'version')::BIGINT AS version, detail ->> 'digest' AS served
        FROM events WHERE what = 'weights loaded'
    )
    SELECT component, count(*) FILTER (served IS DISTINCT FROM digest)
    FROM load LEFT JOIN versions USING (version) GROUP BY ALL ORDER BY ALL"""
# Some rows of each version that wrote them alone, and where its weights are.
ROWS = """
    SELECT v.path, s.prompt_ids, s.response_ids, s.response_logprobs
    FROM steps AS s JOIN versions AS v ON v.version = s.version_min
    WHERE s.split = 'train' AND s.version_min = s.version_max
    QUALIFY 8 >= row_number() OVER (
        PARTITION BY s.version_min ORDER BY hash(s.traj_uid), s.step_index)"""


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Start runs, and end those that are left."""
    runs: list[FaultRun] = []

    def start(run: Path, *overrides: str) -> FaultRun:
        output = run.parent / f"{run.name}.out"
        command = [
            sys.executable,
            "-m",
            "cli",
            "train",
            "configs/key_room.yaml",
            f"run_dir={run}",
            *SETTINGS,
            *overrides,
        ]
        with output.open("a") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
                text=True,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        runs.append(FaultRun(run=run, process=process, fault=run.parent / "none", output=output))
        return runs[-1]

    yield start
    for run in runs:
        for left in [*processes_of(run.run), run.process]:
            with contextlib.suppress(psutil.Error):
                left.kill()
        run.process.wait()


def wait_for_step(run: FaultRun, step: int) -> None:
    run.wait(
        lambda: (run.run / "open.sql").exists() and run.learner_step() >= step,
        what=f"learner step {step}",
        within_s=LONGEST_S,
    )


@pytest.fixture(scope="module")
def alone(start: Start, tmp_path_factory: pytest.TempPathFactory) -> FaultRun:
    """Nobody touches it."""
    run = start(tmp_path_factory.mktemp("two_engines") / "alone")
    assert run.ended(within_s=LONGEST_S)[0] == 0, run.said()
    return run


def base_of(run: FaultRun) -> str:
    return f"model.path={run.run / 'base' / 'policy'}"


def check_whole(run: FaultRun, *, seen: set[object], workers: Sequence[str]) -> None:
    """Check what must hold of a run that ended, whatever happened to it."""
    code, _ = run.ended(within_s=LONGEST_S)
    assert code == 0, run.said()
    assert processes_of(run.run) == []
    check_nothing_lost(run, seen)
    assert run.sql(STEPS_TRAINED) == [(step, 1) for step in range(1, STEPS + 1)]
    assert run.sql(LOADS) == [(worker, 0) for worker in workers]
    assert workers_that_played(run) == list(workers)
    check_logprobs(run)


def loads_of_worker_1(run: FaultRun) -> int:
    """Return how often an engine of worker-1 has loaded weights: an engine that starts has loaded
    none.
    """
    ((n,),) = run.sql(
        "SELECT count(*) FROM events WHERE component = 'worker-1' AND what = 'weights loaded'"
    )
    return int(n)


def workers_that_played(run: FaultRun) -> list[str]:
    """Return the workers that committed rows; only the catalog knows whose a file was."""
    with contextlib.closing(sqlite3.connect(run.run / "catalog.sqlite")) as catalog:
        rows = catalog.execute(
            "SELECT DISTINCT worker FROM segment WHERE level = 0 AND n_steps > 0 ORDER BY 1"
        )
        return [worker for (worker,) in rows]


def check_logprobs(run: FaultRun) -> None:
    """Check stored log-probabilities against the weights of their version, and that others would be
    noticed.
    """
    played: dict[str, list[tuple[Prompt, Completion]]] = {}
    for path, prompt, response, logprobs in run.sql(ROWS):
        completion = Completion(
            token_ids=tuple(response),
            logprobs=tuple(logprobs),
            finish_reason="stop",
            version_min=0,
            version_max=0,
        )
        played.setdefault(path, []).append(
            (Prompt(token_ids=tuple(prompt), actions=None), completion)
        )
    there = [path for path in sorted(played) if (run.run / path).is_dir()]
    assert len(there) > STEPS / 2
    for path in there:
        behaviour_N, learner_N = both_logprobs(run.run / path, played[path], temperature=1.0)
        torch.testing.assert_close(behaviour_N, learner_N, atol=SAME, rtol=0.0)
    behaviour_N, learner_N = both_logprobs(run.run / there[-1], played[there[0]], temperature=1.0)
    assert (behaviour_N - learner_N).abs().max() > 100 * SAME, (
        "weights of another version give the same"
    )


def test_left_alone_it_is_whole(alone: FaultRun) -> None:
    check_whole(alone, seen=set(), workers=("worker-0", "worker-1"))


def test_killed_three_times_it_is_whole(start: Start, tmp_path: Path, alone: FaultRun) -> None:
    killed = start(tmp_path / "killed", base_of(alone), "learner.transfer=broadcast")
    n_loads = 0
    for step in KILL_AFTER_STEPS:
        wait_for_step(killed, step)
        before = len(killed.events("started again"))
        killed.wait(
            lambda n=n_loads: loads_of_worker_1(killed) > n,
            what="an engine that serves",
            within_s=LONGEST_S,
        )  # type: ignore[misc]
        killed.part("worker-1 engine").send_signal(signal.SIGKILL)
        killed.wait(
            lambda before=before: len(killed.events("started again")) > before,  # type: ignore[misc]
            what="the restart",
            within_s=NAMED_WITHIN_S,
        )
        seen = seen_now(killed)
        n_loads = loads_of_worker_1(killed)
    check_whole(killed, seen=seen, workers=("worker-0", "worker-1"))
    received = (
        "SELECT count(DISTINCT component) FROM events "
        "WHERE what = 'weights loaded' AND (detail ->> 'received')::BOOLEAN"
    )
    assert killed.sql(received) == [(2,)], "also the engines that came later were sent weights"


def test_resumed_with_one_worker_and_two_ranks_it_is_whole(
    start: Start, tmp_path: Path, alone: FaultRun
) -> None:
    first = start(tmp_path / "run", base_of(alone))
    wait_for_step(first, 15)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    seen = seen_now(first)
    again = start(tmp_path / "run", base_of(alone), "actors.workers=1", "learner.ranks=2")
    again.wait(
        lambda: "continues at learner step" in again.said(), what="the resume", within_s=LONGEST_S
    )
    check_whole(again, seen=seen, workers=("worker-0", "worker-1"))  # the first start had two

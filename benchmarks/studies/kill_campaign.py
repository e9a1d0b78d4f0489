"""Do kills at random times change anything but the time that a run takes?"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.real_runs import started, train
from benchmarks.studies.study import Arm, Result, Study

CONFIG = "configs/key_room.yaml"
SETTINGS = {
    "learner.checkpoint_every": 5,
    "evaluation.every": 0,
    "supervision.max_restarts": 1000,  # the campaign may hit one component every time
}
STEPS = 60  # of the config
KILLS = 6
# A kill comes so long after the one before. Shorter times meet the restart, longer ones the work.
LEAST_S, MOST_S = 2.0, 30.0
VICTIMS = (
    "driver",
    "coordinator",
    "learner",
    "worker-0",
    "worker-0 environment",
    "worker-0 engine",
)
MOST_STARTS = 10 * KILLS  # of a run that never ends
LOOK_S = 0.2

COMMITTED = "SELECT hex(traj_uid) FROM trajectory"
CURVE = """
SELECT value FROM metrics WHERE name = 'train/success' ORDER BY learner_step"""
LEDGER = """
SELECT (SELECT count(*) - count(DISTINCT traj_uid) FROM trajectories) AS doubled,
       (SELECT count(*) - count(DISTINCT group_uid) FROM lineage WHERE live) AS trained_twice,
       (SELECT count(*) FROM staleness_violations) AS too_stale,
       (SELECT count(*) FROM trajectories) AS trajectories,
       (SELECT last(value ORDER BY learner_step) FROM metrics WHERE name = 'heldout/success')
           AS heldout"""


def run(arms: Sequence[Arm], seed: int, work: Path) -> Iterator[Result]:
    import store

    policy = _base_policy(seed, work)
    for arm in arms:
        directory = work / f"{arm.name.replace(' ', '_')}_seed{seed}"
        shutil.rmtree(directory, ignore_errors=True)
        began_s = time.monotonic()
        campaign = _Campaign(directory, n_kills=int(arm.settings["kills"]), seed=seed)
        campaign.run_to_the_end({"seed": seed, "model.path": policy})
        wall_s = time.monotonic() - began_s
        with store.open_run(directory) as reader:
            ledger = reader.rows(LEDGER)[0]
            curve = [row["value"] for row in reader.rows(CURVE)]
        lost = campaign.seen - _committed(directory)
        yield (
            arm,
            {
                "mean": sum(curve) / len(curve),
                "final": float(ledger["heldout"]),
                "lost": float(len(lost)),
                "doubled": float(ledger["doubled"]),
                "trained_twice": float(ledger["trained_twice"]),
                "too_stale": float(ledger["too_stale"]),
                "kills": float(len(campaign.killed)),
                "killed": ", ".join(campaign.killed) or "nothing",
                "steps": float(len(curve)),
                "trajectories": float(ledger["trajectories"]),
                "wall_s": wall_s,
            },
            curve,
        )


class _Campaign:
    """Train a run to its end, start it again whenever it ended early, and kill parts of it."""

    def __init__(self, directory: Path, *, n_kills: int, seed: int) -> None:
        self.directory = directory
        self.killed: list[str] = []
        self.seen: set[str] = set()  # trajectories that were committed when a kill came
        self._n_kills = n_kills
        self._draw = random.Random(seed)

    def run_to_the_end(self, settings: dict[str, Any]) -> None:
        for _ in range(MOST_STARTS):
            process = started(CONFIG, self.directory, {**SETTINGS, **settings})
            self._kill_while_running(process)
            if process.wait() == 0:
                return
        raise RuntimeError(f"{self.directory} did not end after {MOST_STARTS} starts")

    def _kill_while_running(self, process: subprocess.Popen[bytes]) -> None:
        from tests.support.fault_runs import trained_step

        # The first kill needs a run that has begun to learn; later ones may meet a restart.
        due_s: float | None = None if not self.killed else self._next_s()
        while process.poll() is None:
            time.sleep(LOOK_S)
            if len(self.killed) == self._n_kills:
                process.wait()
                return
            if due_s is None:
                due_s = self._next_s() if trained_step(self.directory) > 0 else None
            elif time.monotonic() >= due_s:
                self._kill_one(process)
                due_s = self._next_s()

    def _next_s(self) -> float:
        return time.monotonic() + self._draw.uniform(LEAST_S, MOST_S)

    def _kill_one(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a random component, or the driver if that one is not there now."""
        import psutil

        from tests.support.fault_runs import find_part

        name = self._draw.choice(VICTIMS)
        part = None if name == "driver" else find_part(self.directory, name)
        self.seen |= _committed(self.directory)
        try:
            (part or psutil.Process(process.pid)).kill()
        except psutil.NoSuchProcess:  # it ended by itself: the next kill comes later
            return
        self.killed.append(name if part else "driver")


def _base_policy(seed: int, work: Path) -> Path:
    """Make the policy with which both arms of a seed begin, unless it is there."""
    directory = work / f"base_seed{seed}"
    policy = directory / "base" / "policy"
    if not policy.exists():
        shutil.rmtree(directory, ignore_errors=True)
        train(CONFIG, directory, {**SETTINGS, "seed": seed, "learner.steps": 1})
    return policy


def _committed(directory: Path) -> set[str]:
    """Return the uids of the trajectories in the catalog, in hex."""
    from tests.support.fault_runs import catalog_rows

    return {uid for (uid,) in catalog_rows(directory, COMMITTED)}


STUDY = Study(
    name="kill_campaign",
    title="Thirty kills change nothing but the clock",
    question=f"""
        If parts of a run are killed with SIGKILL at random times, {KILLS} times in each of five
        runs, and it is started again whenever it ended, does it learn as it would have learned
        undisturbed, and is any trajectory lost, doubled, trained on twice or too late?
    """,
    prediction="""
        (23 November 2026.) Nothing is lost, doubled, trained on twice or too stale in any run. The
        success of killed and undisturbed runs differs by less than 0.05 in the mean over the
        learner steps, with an interval that has 0 in it. The killed runs take two to four times as
        long, most of it for restarts.
    """,
    setup=f"""
        `gigpo train {CONFIG}` with a checkpoint every 5 learner steps: {STEPS} learner steps, vLLM
        on the CPU, `max_staleness=2`. Both runs of a seed begin with the same cloned policy. From
        its first learner step on, a killed run is hit every {LEAST_S:g} to {MOST_S:g} seconds
        (uniformly at random, restarts included) until {KILLS} kills are done. The victim is drawn
        among driver, coordinator, learner, worker, environment process and vLLM engine; where it is
        not there at that moment, the driver is killed. When the program has ended, the same command
        starts it again at once. Before each kill the committed trajectories are noted.
    """,
    arms=(
        Arm(name="undisturbed", settings={"kills": 0}),
        Arm(name="killed", settings={"kills": KILLS}),
    ),
    seeds=5,
    measures={
        "mean": "success of training episodes, mean over all learner steps",
        "final": "success of held-out episodes at the end",
        "lost": "trajectories that were committed before a kill and are not there at the end",
        "doubled": "trajectories that are there twice",
        "trained_twice": "groups that count in two learner steps",
        "too_stale": "groups that were trained on beyond `max_staleness`",
        "kills": "processes killed",
        "steps": "learner steps with a figure",
        "trajectories": "trajectories at the end, also those that were never trained on",
        "wall_s": "seconds from the start to the end",
    },
    comparisons=(("killed", "undisturbed"),),
    curve="success of training episodes over learner steps",
    reading="""
        The kills changed nothing but the clock. No trajectory that was committed before a kill was
        lost, none is there twice, no group was trained on twice or too late. The mean success over
        the learner steps differs by {killed - undisturbed[mean]}, the success at the end by
        {killed - undisturbed[final]}: five runs cannot tell less than that. Single runs are not
        equal, because two runs of one seed never are when actors and learner work at the same
        time: which groups a step trains on depends on the clock.

        The prediction of the time was wrong: a killed run took {killed[wall_s]} s and an
        undisturbed one {undisturbed[wall_s]} s, less than twice as long. The killed runs also made
        more trajectories, {killed - undisturbed[trajectories]}: while the learner restarts, actors
        go on, and groups that become too old meanwhile are never trained on. Of the thirty kills,
        twelve hit the driver, five each a worker and the learner, four the coordinator, three an
        environment process and one an engine.
    """,
    run_cpu_s=200,
    is_timed=True,
    run=run,
)

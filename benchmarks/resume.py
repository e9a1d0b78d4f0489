"""Kill runs of gigpo train with -9 at random moments and go on: what is lost, how long it takes.

    python benchmarks/resume.py [--quick] [--kills N] [--simulated-kills N] [--seed S]

Two runs: one with the real engine, one with the scripted policy (all else of it is real: Ray,
learner, environments, store). What is killed is drawn: the whole tree of processes, the driver, the
coordinator (the command is then given again: the same, or --resume), or a worker, its engine, an
environment, the learner (which the run starts again by itself). A part of the kills comes while the
run is starting. After each runs the same run undisturbed, with the same run id, so the same tasks
and sampling seeds.

lost              trajectories that the catalog had at a kill, and has not at the end
trained_twice     groups in two learner steps that count, and learner steps that are missing
dispatched_equal  whether both runs dispatched the tasks of the seed, one ordinal after the other
length_p          whether trajectories are longer or shorter: groups of one ordinal compared, signs
                  of the differences flipped
recovery          seconds from the command to the first trajectory that is committed

--quick has the simulated run only. The last line is JSON.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser, show_json, show_table

import configs
from store import BASE_POLICY, RunLayout
from tests.support.fault_runs import untrained_model
from tests.support.killed_runs import (
    ENGINE,
    NEED_THE_COMMAND,
    REAL,
    SIMULATED,
    STARTED_AGAIN,
    KilledRun,
    closing,
    dispatched,
    expected_tasks,
    killed_and_undisturbed,
    lengths_by_group,
    staleness_violations,
    trained_twice,
    write_world,
)

FLIPS = 10_000  # random signs of a permutation test: p-values are known to 1e-4
MORE_STEPS = 2  # learner steps after the last kill
REQUIRED = {
    "lost": "0",
    "trained_twice": "0",
    "dispatched_equal": "1",
    "staleness_violations": "0",
    "length_p": "> 0.01",
    "recovery_p50_s": "",
    "recovery_max_s": "<= 40 real, <= 10 simulated",
}


def cloned_model(home: Path) -> Path:
    """Make a policy that plays at random, but validly. An untrained one never gets anywhere."""
    run = KilledRun(
        home=home,
        name="cloned",
        model=Path(),
        settings=("learner.steps=1",),
        random=random.Random(0),
    )
    write_world(home)
    with closing(run):
        run.start("model.path=''")
        assert run.running is not None and run.running.process.wait(timeout=1800.0) == 0, (
            run.running.said()
        )
    return run.run / BASE_POLICY


def campaign(
    home: Path,
    model: Path,
    settings: tuple[str, ...],
    *,
    targets: tuple[str, ...],
    kills: int,
    seed: int,
) -> dict[str, float]:
    killed, undisturbed = killed_and_undisturbed(home, model, settings, seed=seed)
    source = random.Random(seed)
    order: list[str] = []
    while len(order) < kills:  # every one as often as the others
        order += source.sample(targets, len(targets))
    with closing(killed, undisturbed):
        killed.start()
        worst_twice, ever = 0, set()
        for number, target in enumerate(order[:kills], start=1):
            killed.kill(target)
            missing = ever - killed.seen
            assert not missing, f"{len(missing)} trajectories vanished at kill {number} ({target})"
            ever |= killed.seen
            if killed.settled_step():
                worst_twice = max(worst_twice, trained_twice(killed.run))
            print(
                f"kill {number:3}: {target:22} learner step {killed.settled_step():4}, "
                f"{len(killed.seen):6} trajectories, recovered in {killed.recovered_s[-1:]} s",
                flush=True,
            )
        steps = killed.settled_step() + MORE_STEPS
        killed.finish(steps)
        undisturbed.start(f"learner.steps={steps}")
        assert undisturbed.running is not None
        undisturbed.running.process.wait(timeout=3600.0)
        figures = compared(killed, undisturbed)
    first_s, *recovered_s = killed.recovered_s
    return figures | {
        "kills": float(kills),
        "lost": float(len(ever - killed.committed())),
        "trained_twice": float(max(worst_twice, trained_twice(killed.run))),
        "staleness_violations": float(staleness_violations(killed.run)),
        "first_start_s": first_s,
        "recovery_p50_s": statistics.median(recovered_s or [first_s]),
        "recovery_max_s": max(recovered_s or [first_s]),
        # a part was killed before all had started once: the run ends in order
        "ended_early": float(killed.ended_early),
        "learner_steps": float(steps),
    }


def compared(killed: KilledRun, undisturbed: KilledRun) -> dict[str, float]:
    config = configs.from_yaml(RunLayout.open(killed.run).info.config_yaml)
    rows = [dispatched(run) for run in (killed, undisturbed)]
    equal = all(found == expected_tasks(config, len(found)) for found in rows)
    ours, theirs = lengths_by_group(killed), lengths_by_group(undisturbed)
    both = sorted(ours.keys() & theirs.keys())
    differences = np.array([ours[ordinal] - theirs[ordinal] for ordinal in both])
    return {
        "dispatched_equal": float(equal),
        "groups_killed": float(len(rows[0])),
        "groups_undisturbed": float(len(rows[1])),
        "groups_compared": float(len(both)),
        "groups_alike": float((differences == 0).sum()),
        "length_killed": float(np.mean([ours[ordinal] for ordinal in both])),
        "length_undisturbed": float(np.mean([theirs[ordinal] for ordinal in both])),
        "length_p": sign_flip_p(differences),
    }


def sign_flip_p(differences: np.ndarray) -> float:
    """Return how often the mean is as far from 0 if each difference had either sign by chance.

    Returns 1 if there are no differences.
    """
    if not differences.any():
        return 1.0
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(FLIPS, len(differences)))
    flipped, observed = np.abs(signs @ differences), abs(differences.sum())
    return float((1 + (flipped >= observed - 1e-9).sum()) / (1 + FLIPS))


def main() -> None:
    parser = quick_parser(
        __doc__, quick="two kills of the simulated run, for a run of about a minute"
    )
    parser.add_argument(
        "--kills", type=int, default=30, help="of the run with the real engine; 0 leaves it out"
    )
    parser.add_argument("--simulated-kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.quick:
        options.kills, options.simulated_kills = 0, 2
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for kind, settings, kills in (
            ("simulated", SIMULATED, options.simulated_kills),
            ("real", REAL, options.kills),
        ):
            if kills:
                home = Path(name) / kind
                home.mkdir()
                targets = (*NEED_THE_COMMAND, *STARTED_AGAIN)
                if kind == "real":
                    model, targets = cloned_model(home), (*targets, ENGINE)
                else:
                    model = untrained_model(home / "untrained")
                found[kind] = campaign(
                    home, model, settings, targets=targets, kills=kills, seed=options.seed
                )
    for kind, figures in found.items():
        print(f"{kind} run")
        show_table(figures, REQUIRED)
    line = last_line(found)
    show_json(line, line)


def last_line(found: dict[str, dict[str, float]]) -> dict[str, float]:
    runs = list(found.values())
    line = {}
    for figure in ("kills", "lost", "trained_twice"):
        line[figure] = sum(figures[figure] for figures in runs)
    for figure in ("dispatched_equal", "length_p"):
        line[figure] = min(figures[figure] for figures in runs)
    for kind, figures in found.items():
        line[f"recovery_{kind}_max_s"] = figures["recovery_max_s"]
    return line


if __name__ == "__main__":
    main()

"""Study whether leaving out groups that take too long selects against slow tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

from benchmarks.studies.horizon import GROUPS, LEARNING_RATE, STEPS, UPDATES, learner_config
from benchmarks.studies.study import Arm, Result, Study

if TYPE_CHECKING:
    import numpy as np

    from benchmarks.studies.event_training import Simulation, TimedStep

TASKS, DISTANCE, MAX_STEPS = 4, 3, 14  # corridors; the shortest ways have 6 and 7 steps
SPREADS = {"wide": 1.5, "narrow": 0.5}  # deviation of the logarithm of a task's time of a step
SLOW = 1  # task: the slowest quarter
NOISE = 0.25  # the same of an episode: much less than between tasks
SLOTS = GROUPS  # groups that are played at once: no arm has more than the synchronous one
LEARN_S = 12.0  # of a learner step, in steps of a mean task: about as long as an episode
CLOCK_S = STEPS * LEARN_S  # every arm needs at least so long, so every arm has a success until then
BOUNDS = (1, 2, 4)  # max_staleness
RULES = ("drop", "wait")
ARMS: dict[str, dict[str, object]] = {
    "synchronous": {"max_staleness": 0},
    **{
        f"{rule}/{bound}": {"max_staleness": bound, "stragglers": rule}
        for rule in RULES
        for bound in BOUNDS
    },
}


def run(arms: Sequence[Arm], seed: int, work: Path) -> Iterator[Result]:
    from benchmarks.studies.corridor import Corridors
    from benchmarks.studies.event_training import Simulation
    from benchmarks.studies.small_world import make_engine, make_worlds
    from configs import AlgorithmConfig, Config

    panel = {"distance": DISTANCE, "n": TASKS}
    (world,), base = make_worlds(Corridors, [panel], max_steps=[MAX_STEPS], at=work)
    for arm in arms:
        settings = dict(arm.settings)
        step_s_K = step_times(float(settings.pop("spread")), seed=seed)
        config = Config(
            seed=seed,
            algorithm=AlgorithmConfig(group_filter="rewards"),
            learner=learner_config(),
            **settings,
        )
        engine = make_engine(base, learner=config.learner, loss=config.loss)
        simulation = Simulation(
            engine=engine,
            world=world,
            config=config,
            task_step_s=list(step_s_K),
            noise=NOISE,
            slots=SLOTS,
            learn_s=LEARN_S,
        )
        slow_tasks = [int(task) for task in step_s_K.argsort()[-SLOW:]]
        before_K = simulation.success_K()
        steps = list(simulation.steps())
        engine.close()
        measures = measured(steps, simulation, before_K=before_K, slow_tasks=slow_tasks)
        yield arm, measures, [float(step.success_K[slow_tasks].mean()) for step in steps]


def step_times(spread: float, *, seed: int) -> np.ndarray:
    """Return the time of a step in each task, with mean 1: quantiles, in another order by seed."""
    import numpy as np

    middles = [(number + 0.5) / TASKS for number in range(TASKS)]
    quantiles_K = np.exp([spread * NormalDist().inv_cdf(middle) for middle in middles])
    return np.random.default_rng([seed, 6]).permutation(quantiles_K / quantiles_K.mean())


def measured(
    steps: Sequence[TimedStep],
    simulation: Simulation,
    *,
    before_K: np.ndarray,
    slow_tasks: Sequence[int],
) -> dict[str, float]:
    import numpy as np

    success_LK = np.array([step.success_K for step in steps])
    clocks_L = np.array([step.clock_s for step in steps])
    trained = [group for step in steps for group in step.groups]
    slow_L = success_LK[:, slow_tasks].mean(axis=1)
    return {
        "mean": float(success_LK.mean()),
        "slow": float(slow_L.mean()),
        "slow_final": float(slow_L[-1]),
        "equal_clock": until_clock(success_LK.mean(axis=1), clocks_L, before=before_K.mean()),
        "slow_equal_clock": until_clock(slow_L, clocks_L, before=before_K[slow_tasks].mean()),
        "slow_share": float(np.mean([group.task in slow_tasks for group in trained])),
        "length": float(np.mean([group.lengths for group in trained])),
        "length_begun": float(np.mean([group.lengths for group in simulation.attempts])),
        "left_out": simulation.n_stale / simulation.n_opened,
        "staleness": float(np.mean([step.staleness for step in steps])),
        "step_s": float(clocks_L[-1] / len(steps)),
    }


def until_clock(success_L: np.ndarray, clocks_L: np.ndarray, *, before: float) -> float:
    """Return the mean success until CLOCK_S. A learner step's weights count from its end on."""
    import numpy as np

    bounds_s = np.clip([0.0, *clocks_L, max(CLOCK_S, clocks_L[-1])], 0.0, CLOCK_S)
    return float(np.dot([before, *success_L], np.diff(bounds_s)) / CLOCK_S)


STUDY = Study(
    name="stragglers",
    title="Does leaving out what takes too long select against slow tasks?",
    question="""
        An asynchronous learner cannot train on groups that were begun too long ago. It may leave
        them out (`stragglers=drop`), or wait for them (`stragglers=wait`), or play and train in
        alternation (`max_staleness=0`). If some tasks are always slow, which episodes are trained
        on, is a slow task learned, and what do samples and time buy?
    """,
    prediction="""
        (27 November 2026.) With the wide spread and `drop`, less than 0.10 of the groups that are
        trained on are of the slowest quarter of the tasks at max_staleness 1 and 2, where 0.25 is
        even; success on these tasks, mean over the run, is lower than with `wait` by more than 0.1
        at 1, and by less at 4. With the narrow spread the share is above 0.2 at 2 and 4, and no
        difference of success is outside its interval. Over all tasks at equal samples, `wait` and
        the synchronous run are above `drop` at 1 with the wide spread; until the same time `drop`
        is above both with the wide spread, and within its interval of `wait` with the narrow one.
        Episodes that are trained on are as long as those that are begun with `wait`, and shorter
        with `drop`.
    """,
    setup=f"""
        Four corridors with other room names each, the door {DISTANCE} rooms from the key, at most
        {MAX_STEPS} steps. In two of them the key is in the west, in two in the east, so that what
        is learned in one is wrong in another. All arms begin with the same cloned policy, which
        takes every admissible action equally often: a Qwen2 with one layer of 64. GiGPO, {STEPS}
        learner steps of {GROUPS} groups of 8 episodes, {UPDATES} updates each, learning rate
        {LEARNING_RATE:g} as in [horizon](horizon.md), the default loss and correction. Nothing was
        tuned for an arm. Earlier forms (more corridors, 4 groups, a rate of 0.001) were tried with
        the synchronous run and once with `drop`; in the last of them the synchronous run lost all
        success on the slowest task. A step of an episode
        takes a time that depends on the task: log-normal, quantiles with a deviation of the
        logarithm of {SPREADS["wide"]:g} (wide: the slowest task takes about 32 times as long as the
        quickest) or {SPREADS["narrow"]:g} (narrow: 3 times), with mean 1; each seed gives them to
        other tasks. An episode takes the time of its steps, times a log-normal number of its own
        (deviation {NOISE:g}). {SLOTS} groups are played at once, a learner step takes
        {LEARN_S:g}. Time is simulated: which groups are admitted, claimed, given up, played again,
        too old or waited for follows the rules of coordinator and catalog. Batches are not
        refilled. Success is computed exactly from the policy's probabilities.
    """,
    arms=tuple(
        Arm(
            name=f"{name}/{spread}",
            label=name,
            panel=f"{spread} spread of times",
            settings={**settings, "spread": SPREADS[spread]},
        )
        for spread in SPREADS
        for name, settings in ARMS.items()
    ),
    seeds=5,
    measures={
        "mean": "success on all tasks, mean over all learner steps: at equal samples",
        "slow": "the same on the slowest quarter of the tasks",
        "slow_final": "success on these after the last learner step",
        "equal_clock": f"success on all tasks, mean over the time until {CLOCK_S:g}",
        "slow_equal_clock": "the same on the slowest quarter of the tasks",
        "slow_share": "share of the groups trained on that are of these tasks; 0.25 is even",
        "length": "steps of the episodes that were trained on, mean",
        "length_begun": "steps of the episodes that were begun, to their end, mean",
        "left_out": "share of the groups that were opened and never trained on as too old",
        "staleness": "versions, mean of the groups trained on",
        "step_s": "simulated time of a learner step",
    },
    comparisons=tuple(
        (f"{first}/{spread}", f"{second}/{spread}")
        for spread in SPREADS
        for first, second in (
            *((f"drop/{bound}", f"wait/{bound}") for bound in BOUNDS),
            *((f"{rule}/{bound}", "synchronous") for rule in RULES for bound in BOUNDS),
        )
    ),
    curve="success on the slowest quarter of the tasks over learner steps",
    reading="""
        Seven runs of one seed, all with the wide spread: no interval, and nothing about the narrow
        one. In them `drop` selects as predicted. Of the groups that are trained on the slowest
        quarter of the tasks has {drop/1/wide[slow_share]} at max_staleness 1 and
        {drop/2/wide[slow_share]} at 2; at 4 it has {drop/4/wide[slow_share]}, where hardly a group
        becomes too old. With `wait` it has {wait/1/wide[slow_share]}, {wait/2/wide[slow_share]} and
        {wait/4/wide[slow_share]}. Waiting takes time: a learner step takes {wait/1/wide[step_s]}
        where `drop` takes {drop/1/wide[step_s]} at 1, {wait/2/wide[step_s]} and
        {drop/2/wide[step_s]} at 2, and the synchronous run {synchronous/wide[step_s]}. The episodes
        that are trained on are not shorter than those that are begun, against the prediction: with
        `drop` at 1 they have {drop/1/wide[length]} and {drop/1/wide[length_begun]} steps.

        The predicted loss on the slowest task is not there: `drop` less `wait` at 1 is
        {drop/1/wide - wait/1/wide[slow]}. That does not answer what selection costs, because no arm
        learns much here. Mean success over the run is {synchronous/wide[mean]} in the synchronous
        run, which trains on every task evenly, and {drop/1/wide[mean]} with `drop` at 1; after the
        last step it is {synchronous/wide[slow_final]} and {drop/1/wide[slow_final]} on the slowest
        task. What is hardly learned where it is trained on cannot be missed where it is left out.
        A world that the synchronous run learns comes first.
    """,
    run_cpu_s=15,
    run=run,
)

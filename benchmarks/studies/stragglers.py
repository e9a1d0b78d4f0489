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

TASKS, DISTANCE, MAX_STEPS = 4, 5, 28  # as in horizon with the door 5 rooms away
SPREAD = 1.5  # deviation of the logarithm of a task's time of a step
SLOW = 1  # task: the slowest quarter
NOISE = 0.25  # the same of an episode: much less than between tasks
SLOTS = GROUPS  # groups that are played at once: no arm has more than the synchronous one
LEARN_S = 20.0  # of a learner step, in steps of a mean task: about as long as an episode at first
CLOCK_S = STEPS * LEARN_S  # every arm needs at least so long, so every arm has a success until then
BOUNDS = (1, 4)  # max_staleness
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

    panel = {"distance": DISTANCE}
    (world,), base = make_worlds(Corridors, [panel], max_steps=[MAX_STEPS], at=work)
    step_s = step_times()
    slow_tasks = list(range(TASKS - SLOW, TASKS))
    for arm in arms:
        config = Config(
            seed=seed,
            algorithm=AlgorithmConfig(group_filter="rewards"),
            learner=learner_config(),
            **arm.settings,
        )
        engine = make_engine(base, learner=config.learner, loss=config.loss)
        simulation = Simulation(
            engine=engine,
            world=world,
            config=config,
            task_step_s=list(step_s),
            noise=NOISE,
            slots=SLOTS,
            learn_s=LEARN_S,
        )
        before = simulation.task_success()
        steps = list(simulation.steps())
        engine.close()
        measures = measured(steps, simulation, before=before, slow_tasks=slow_tasks)
        yield arm, measures, [float(step.task_success[slow_tasks].mean()) for step in steps]


def step_times() -> np.ndarray:
    """Return the time of a step in each task, float64 [tasks], with mean 1.

    They are quantiles, the last task's the slowest.
    """
    import numpy as np

    middles = [(number + 0.5) / TASKS for number in range(TASKS)]
    quantiles = np.exp([SPREAD * NormalDist().inv_cdf(middle) for middle in middles])
    return quantiles / quantiles.mean()


def measured(
    steps: Sequence[TimedStep],
    simulation: Simulation,
    *,
    before: np.ndarray,  # float64 [tasks], success before the first step
    slow_tasks: Sequence[int],
) -> dict[str, float]:
    import numpy as np

    success = np.array([step.task_success for step in steps])  # float64 [steps, tasks]
    clocks_s = np.array([step.clock_s for step in steps])
    trained = [group for step in steps for group in step.groups]
    slow = success[:, slow_tasks].mean(axis=1)  # float64 [steps]
    return {
        "mean": float(success.mean()),
        "slow": float(slow.mean()),
        "slow_final": float(slow[-1]),
        "equal_clock": until_clock(success.mean(axis=1), clocks_s, before=before.mean()),
        "slow_equal_clock": until_clock(slow, clocks_s, before=before[slow_tasks].mean()),
        "slow_share": float(np.mean([group.task in slow_tasks for group in trained])),
        "length": float(np.mean([group.lengths for group in trained])),
        "length_begun": float(np.mean([group.lengths for group in simulation.attempts])),
        "left_out": simulation.n_stale / simulation.n_opened,
        "staleness": float(np.mean([step.staleness for step in steps])),
        "step_s": float(clocks_s[-1] / len(steps)),
    }


def until_clock(success: np.ndarray, clocks_s: np.ndarray, *, before: float) -> float:
    """Return the mean success until CLOCK_S. A learner step's weights count from its end on.

    `success` and `clocks_s` are float64 [steps]; `before` is the success until the first step ends.
    """
    import numpy as np

    bounds_s = np.clip([0.0, *clocks_s, max(CLOCK_S, clocks_s[-1])], 0.0, CLOCK_S)
    return float(np.dot([before, *success], np.diff(bounds_s)) / CLOCK_S)


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
        trained on are of the slowest task at max_staleness 1 and 2, where 0.25 is
        even; success on it, mean over the run, is lower than with `wait` by more than 0.1
        at 1, and by less at 4. With the narrow spread the share is above 0.2 at 2 and 4, and no
        difference of success is outside its interval. Over all tasks at equal samples, `wait` and
        the synchronous run are above `drop` at 1 with the wide spread; until the same time `drop`
        is above both with the wide spread, and within its interval of `wait` with the narrow one.
        Episodes that are trained on are as long as those that are begun with `wait`, and shorter
        with `drop`. (The same day, after earlier forms had shown the shares and before any
        asynchronous run of this one, which has the wide spread and the bounds 1 and 4 only.) The
        share of the slowest task with `drop` at 1 is below 0.10, and at 4 above 0.15. Success on
        it, mean over the run, is lower with `drop` at 1 than with `wait` at 1, by less than 0.1,
        because what is learned in the other corridors is right in it too.
    """,
    setup=f"""
        Four corridors with other room names each, as in [horizon](horizon.md) with the key in the
        west and the door {DISTANCE} rooms further east; the start is 1, 2, 3 or 4 rooms from the
        key, at most {MAX_STEPS} steps. All arms begin with the same cloned policy, which takes
        every admissible action equally often: a Qwen2 with one layer of 64. GiGPO, {STEPS} learner
        steps of {GROUPS} groups of 8 episodes, {UPDATES} updates each, learning rate
        {LEARNING_RATE:g} as there, the default loss and correction. Nothing was tuned for an arm.
        Earlier forms were tried: in them the key was in the east of every second corridor, a room's
        name had two numbers, and no arm had more than 0.33 of mean success, in seven runs of the
        last of them. This form was
        chosen by a synchronous run on seed 100, which is not in the study. A step of an episode
        takes a time that depends on the task: log-normal, quantiles with a deviation of the
        logarithm of {SPREAD:g}, with mean 1. The corridor with the longest way is the slowest: a
        step takes about 32 times as long as in the one with the shortest. An episode takes the time
        of its steps, times a log-normal number of its own (deviation {NOISE:g}). {SLOTS} groups are
        played at once, a learner step takes {LEARN_S:g}. Time is simulated: which groups are
        admitted, claimed, given up, played again, too old or waited for follows the rules of
        coordinator and catalog. Batches are not refilled. Success is computed exactly from the
        policy's probabilities.
    """,
    arms=tuple(Arm(name=name, settings=settings) for name, settings in ARMS.items()),
    seeds=5,
    measures={
        "mean": "success on all tasks, mean over all learner steps: at equal samples",
        "slow": "the same on the slowest task",
        "slow_final": "success on it after the last learner step",
        "equal_clock": f"success on all tasks, mean over the time until {CLOCK_S:g}",
        "slow_equal_clock": "the same on the slowest task",
        "slow_share": "share of the groups trained on that are of it; 0.25 is even",
        "length": "steps of the episodes that were trained on, mean",
        "length_begun": "steps of the episodes that were begun, to their end, mean",
        "left_out": "share of the groups that were opened and never trained on as too old",
        "staleness": "versions, mean of the groups trained on",
        "step_s": "simulated time of a learner step",
    },
    comparisons=(
        *((f"drop/{bound}", f"wait/{bound}") for bound in BOUNDS),
        *((f"{rule}/{bound}", "synchronous") for rule in RULES for bound in BOUNDS),
    ),
    curve="success on the slowest task over learner steps",
    reading="""
        `drop` selects as predicted. The slowest task has {drop/1[slow_share]} of the groups that
        are trained on at max_staleness 1 and {drop/4[slow_share]} at 4, where few groups become too
        old; with `wait` it has {wait/1[slow_share]} and {wait/4[slow_share]}.

        The predicted loss on that task is not there. Its success, mean over the run, with `drop` at
        1 less `wait` at 1 is {drop/1 - wait/1[slow]}, and at 4 {drop/4 - wait/4[slow]}; over all
        tasks it is {drop/1 - wait/1[mean]} and {drop/4 - wait/4[mean]}. All arms win always at the
        end. What is left out is learned in the other corridors, and what is trained on is younger:
        {drop/1[staleness]} versions with `drop` at 1 and {wait/1[staleness]} with `wait`.
        Against the synchronous run, which trains on every task evenly and on nothing old, `drop` at
        1 is at {drop/1 - synchronous[slow]} on the slowest task and `wait` at 1 at
        {wait/1 - synchronous[slow]}: one version of age costs something here, which
        [staleness](staleness.md) did not show.

        Waiting takes time. A learner step takes {drop/1[step_s]} with `drop` at 1,
        {wait/1[step_s]} with `wait`, {drop/4[step_s]} and {wait/4[step_s]} at 4, and
        {synchronous[step_s]} in the synchronous run. Until the same time `drop` at 1 is above
        `wait` at 1 by {drop/1 - wait/1[equal_clock]} over all tasks, by
        {drop/1 - wait/1[slow_equal_clock]} on the slowest one, and above the synchronous run by
        {drop/1 - synchronous[equal_clock]}; at 4 the two rules differ by
        {drop/4 - wait/4[equal_clock]}. The length of episodes: with `drop` at 1 those that are
        trained on have {drop/1[length]} steps and those that are begun {drop/1[length_begun]}, with
        `wait` {wait/1[length]} and {wait/1[length_begun]}.

        This is a world in which quick tasks teach what the slow one needs. In the earlier forms
        they taught the opposite, and there no arm learned. What selection costs where the slow
        tasks alone teach something is not answered, nor the narrow spread and the bound 2 of the
        first prediction. Intervals of so few seeds are too
        narrow.
    """,
    run_cpu_s=20,
    run=run,
)

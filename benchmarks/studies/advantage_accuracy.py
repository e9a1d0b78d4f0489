"""Study how near each estimator's advantage is to the true one, from the same episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.studies.horizon import MAX_STEPS, learner_config
from benchmarks.studies.study import Arm, Result, Study

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from benchmarks.studies.small_world import World
    from learner.training.engine import Engine

DISTANCE = 5  # the middle one of horizon
GROUPS, GROUP_SIZE = 48, 8  # of a sample that is judged
JUDGED_AT = (0, 5, 10)  # learner steps after which a sample is played
LAGS = (0, 1, 2, 4)  # learner steps between a sample and the policy that it is judged for
# By how often a group met the state: less than once an episode, up to four times, more often.
BINS = {"visits_1_7": (1, 7), "visits_8_31": (8, 31), "visits_32": (32, 10**9)}
STEP_TERM = "gigpo's step term"
ESTIMATORS: Mapping[str, Mapping[str, object]] = {
    "gigpo": {"estimator": "gigpo"},
    STEP_TERM: {"estimator": "gigpo"},
    "grpo": {"estimator": "gigpo", "omega": 0.0},
    "rloo": {"estimator": "rloo"},
    "reinforce_pp": {"estimator": "reinforce_pp"},
    "hgpo": {"estimator": "hgpo"},
    "graphgpo": {"estimator": "graphgpo"},
    "g2po": {"estimator": "g2po"},
    "gagpo": {"estimator": "gagpo"},
}
CONTINUED, CONTINUATIONS = 12, 64  # states of a sample, and episodes from each
# Added to the learner steps before a sample, so that its random numbers, and those of its
# continuations, are not those of a training batch.
SAMPLE_SEED, CONTINUATION_SEED = 1000, 2000
UNSURE = (0.05, 0.95)  # chances of a win; outside, a variance is too small to be a scale
LEAST_STEPS = 30  # of a correlation; with fewer it is noise

PerSample = Mapping[int, "np.ndarray"]  # learner steps before the sample -> an array [R]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Episodes of one training, and the truth about their actions."""

    rows: Mapping[int, pa.Table]  # by the learner steps before them
    # By the same and by the policy, "lag_2" or "discounted": true advantages [R].
    truths_R: Mapping[tuple[int, str], np.ndarray]
    scaled_errors: Sequence[float]  # of the check by Monte Carlo

    def correlation(self, estimates_R: PerSample, truth: str, is_chosen_R: PerSample) -> float:
        """Return the mean over the samples of an estimate's correlation with a truth."""
        import numpy as np

        found = [
            _correlation(estimate_R[is_chosen_R[at]], self.truths_R[at, truth][is_chosen_R[at]])
            for at, estimate_R in estimates_R.items()
        ]
        return float(np.mean([each for each in found if np.isfinite(each)] or [np.nan]))


def run(arms: Sequence[Arm], seed: int, work: Path) -> Iterator[Result]:
    samples = _played(seed, work)
    for arm in arms:
        yield arm, _measures(arm, samples), []


def _played(seed: int, work: Path) -> Samples:
    """Train with GiGPO, and play a sample after each of JUDGED_AT learner steps."""
    from benchmarks.studies.corridor import Corridor
    from benchmarks.studies.small_training import learner_steps
    from benchmarks.studies.small_world import chances_of, make_engine, make_worlds, play
    from configs import AlgorithmConfig, Config

    panels = [{"distance": DISTANCE}]
    (world,), base = make_worlds(Corridor, panels, max_steps=[MAX_STEPS[DISTANCE]], at=work)
    learner = replace(learner_config(), steps=max(JUDGED_AT) + max(LAGS))
    config = Config(seed=seed, algorithm=AlgorithmConfig(group_filter="rewards"), learner=learner)
    engine = make_engine(base, learner=learner, loss=config.loss)
    samples: dict[int, pa.Table] = {}
    truths_R: dict[tuple[int, str], np.ndarray] = {}
    scaled_errors: list[float] = []
    training = learner_steps(engine, world, config)
    for done in range(learner.steps + 1):
        chances = chances_of(world, engine)
        if done in JUDGED_AT:
            samples[done] = play(
                engine,
                world,
                n_groups=GROUPS,
                group_size=GROUP_SIZE,
                seed=(seed, SAMPLE_SEED + done),
                version=done,
            )
            truths_R[done, "discounted"] = true_advantages(
                world, samples[done], chances, gamma=config.algorithm.gamma
            )
            scaled_errors += continued(
                engine, world, samples[done], seed=(seed, CONTINUATION_SEED + done)
            )
        for at, rows in samples.items():
            truths_R[at, f"lag_{done - at}"] = true_advantages(world, rows, chances, gamma=1.0)
        if done < learner.steps:
            next(training)
    engine.close()
    return Samples(rows=samples, truths_R=truths_R, scaled_errors=scaled_errors)


def _measures(arm: Arm, samples: Samples) -> dict[str, float]:
    """Return the correlations of an arm's advantages; without those that are not defined."""
    import numpy as np

    from configs import AlgorithmConfig
    from gigpo import AdvantageSettings, compute_advantages

    settings = AdvantageSettings.of(AlgorithmConfig(**dict(arm.settings)))
    column = "step_advantage" if arm.name == STEP_TERM else "advantage"
    estimates_R = {
        at: compute_advantages(rows, settings)[column].to_numpy()
        for at, rows in samples.rows.items()
    }
    visits_R = {at: visits(rows) for at, rows in samples.rows.items()}
    everything_R = {at: np.ones(len(rows), bool) for at, rows in samples.rows.items()}
    measures = {"correlation": samples.correlation(estimates_R, "lag_0", everything_R)}
    for name, (low, high) in BINS.items():
        inside_R = {at: (n_R >= low) & (n_R <= high) for at, n_R in visits_R.items()}
        measures[name] = samples.correlation(estimates_R, "lag_0", inside_R)
    for truth in (*(f"lag_{lag}" for lag in LAGS[1:]), "discounted"):
        measures[truth] = samples.correlation(estimates_R, truth, everything_R)
    measures["monte_carlo"] = float(np.mean(samples.scaled_errors))
    return {name: value for name, value in measures.items() if np.isfinite(value)}


def true_advantages(
    world: World, rows: pa.Table, chances: np.ndarray, *, gamma: float
) -> np.ndarray:
    """Return Q - V of each row's action under a policy, float64 [R].

    Both are worths of a situation with the steps that the limit leaves: V before the action, Q
    after it. See `small_world.wins_of`.
    """
    import numpy as np

    from benchmarks.studies.small_world import WON, wins_of

    worth = wins_of(world, chances, gamma=gamma)
    before_R, after_R, left_R = positions(world, rows)
    next_R = np.where(after_R == WON, 1.0, gamma * worth[left_R - 1, after_R])
    return next_R - worth[left_R, before_R]


def positions(world: World, rows: pa.Table) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each row's situation, the one after its action or WON, and the steps left before it.

    All int64 [R]. The stored actions are replayed in the explored world.
    """
    import numpy as np

    number = {seen.text: at for at, seen in enumerate(world.observations)}
    leads_to = {(each.situation, each.command): each.leads_to for each in world.choices}
    before = [number[text] for text in rows["obs_text"].to_pylist()]
    actions = rows["action_text"].to_pylist()
    after = [leads_to.get(pair, pair[0]) for pair in zip(before, actions, strict=True)]
    left_R = world.max_steps - rows["step_index"].to_numpy()
    return np.array(before), np.array(after), left_R


def visits(rows: pa.Table) -> np.ndarray:
    """Return how many steps of its group met each row's state, itself among them: int64 [R]."""
    from gigpo import PUBLISHED_SETTINGS, compute_advantages

    return compute_advantages(rows, PUBLISHED_SETTINGS)["anchor_size"].to_numpy()


def continued(
    engine: Engine, world: World, rows: pa.Table, *, seed: tuple[int, ...]
) -> list[float]:
    """Check exact worths by Monte Carlo: go back to stored states and play on from there.

    Return the squared difference of won fraction and exact probability for each state, in units of
    its variance: 1 on average if the exact numbers are right.
    """
    import numpy as np

    from benchmarks.studies.small_world import WON, chances_of, play, wins_of

    worth = wins_of(world, chances_of(world, engine))
    _, after_R, left_R = positions(world, rows)
    scaled_errors: list[float] = []
    for row in np.random.default_rng(seed).permutation(len(rows)):
        situation, left = int(after_R[row]), int(left_R[row]) - 1
        if situation == WON or not UNSURE[0] < worth[left, situation] < UNSURE[1]:
            continue
        from_there = replace(world, tasks=world.tasks[:1], starts=(situation,), max_steps=left)
        played = play(
            engine,
            from_there,
            n_groups=1,
            group_size=CONTINUATIONS,
            seed=(*seed, int(row)),
            version=0,
        )
        won = float(np.sum(played["terminated"].to_numpy(zero_copy_only=False))) / CONTINUATIONS
        chance = float(worth[left, situation])
        scaled_errors.append((won - chance) ** 2 / (chance * (1 - chance) / CONTINUATIONS))
        if len(scaled_errors) == CONTINUED:
            break
    return scaled_errors


def _correlation(estimate_R: np.ndarray, truth_R: np.ndarray) -> float:
    """Return Pearson's; NaN if one of the two is constant or there are under LEAST_STEPS."""
    import numpy as np

    if len(estimate_R) < LEAST_STEPS or np.ptp(estimate_R) == 0 or np.ptp(truth_R) == 0:
        return float("nan")
    return float(np.corrcoef(estimate_R, truth_R)[0, 1])


STUDY = Study(
    name="advantage_accuracy",
    title="How near is an estimated advantage to the true one?",
    question="""
        An estimator judges each action by a few episodes. How well do its advantages correlate with
        the true ones, by how often the group met the state, and when the policy has moved on since
        the episodes were played?
    """,
    prediction="""
        (23 November 2026.) GiGPO correlates better than ω = 0, RLOO and REINFORCE++, and its step
        term alone better than the sum. The gain grows with the visits of a state: in states met
        once there is none. G2PO and GAGPO, which value successor states, are at least as good as
        GiGPO. Four learner steps of staleness cost less than 0.1 of the correlation.
    """,
    setup=f"""
        The corridor of [horizon](horizon.md) with the door {DISTANCE} rooms away. GiGPO trains for
        {max(JUDGED_AT)} learner steps, as there. After {JUDGED_AT[0]}, {JUDGED_AT[1]} and
        {JUDGED_AT[2]} of them {GROUPS} groups of {GROUP_SIZE} episodes are played and stored. Each
        estimator computes its advantages of the same rows. The true advantage of a stored step is
        Q − V of the policy: the probability of a win after the action, less the one before it, with
        the steps that the limit leaves. Both are computed by backward induction over the explored
        world, which is Monte-Carlo continuation with infinitely many episodes; `monte_carlo`
        checks it against {CONTINUATIONS} real continuations from each of
        {CONTINUED * len(JUDGED_AT)} stored states. A run's
        number is the mean over the three samples of Pearson's correlation over all steps. PPO is
        left out: its advantages are those of a critic and not of these rows.
    """,
    arms=tuple(Arm(name=name, settings=settings) for name, settings in ESTIMATORS.items()),
    seeds=10,
    measures={
        "correlation": "correlation with the true advantage of the policy that played",
        **{
            name: f"the same, of steps whose state the group met {text}"
            for name, text in zip(
                BINS, ("up to 7 times", "8 to 31 times", "32 times or more"), strict=True
            )
        },
        **{
            f"lag_{lag}": f"with the true advantage of the policy {lag} learner steps later"
            for lag in LAGS[1:]
        },
        "discounted": "with the true advantage of wins discounted by 0.95 a step",
        "monte_carlo": "squared error of the check in units of its variance; 1 is expected",
    },
    comparisons=tuple(("gigpo", other) for other in ESTIMATORS if other != "gigpo"),
    reading="""
        A step's advantage from one group's episodes is a weak guess: GiGPO's correlates with the
        true one at {gigpo[correlation]}. That is more than ω = 0, by {gigpo - grpo[correlation]},
        and about as much as RLOO and REINFORCE++, which do not divide by each group's deviation:
        GiGPO less REINFORCE++ is {gigpo - reinforce_pp[correlation]}. Within states that were met
        equally often GiGPO is ahead of both. Its step term alone correlates as well as the sum over
        all steps, and better within each class of visits:
        {gigpo - gigpo's step term[visits_8_31]} for 8 to 31 visits.

        Estimators that value successor states are much nearer to the truth: G2PO has
        {g2po[correlation]}, GraphGPO {graphgpo[correlation]}, GAGPO {gagpo[correlation]}. In
        [horizon](horizon.md) G2PO also learns fastest.

        The prediction about visits is wrong. Correlations fall with the visits of a state for every
        estimator, and so does the gain of the step term over ω = 0: {gigpo - grpo[visits_1_7]} with
        up to 7 visits, {gigpo - grpo[visits_32]} with 32 or more. States met once are too few to be
        judged.

        Four learner steps of staleness cost little: GiGPO falls from {gigpo[correlation]} to
        {gigpo[lag_4]}, G2PO from {g2po[correlation]} to {g2po[lag_4]}. Most of the difference to
        the truth is not staleness but the small number of episodes. With wins discounted by 0.95
        the order is the same. The check by Monte Carlo is {gigpo[monte_carlo]}; 1 is
        expected. All of this is one world, one model, and three moments of GiGPO's own training.
    """,
    run_cpu_s=1.7,
    run=run,
)

"""Study whether the order of the estimators in the corridor is that in two other games."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.studies.horizon import ESTIMATORS as ALL_ESTIMATORS
from benchmarks.studies.horizon import GROUPS, LEARNING_RATE, STEPS, UPDATES, learner_config
from benchmarks.studies.study import Arm, Result, Study

MAX_STEPS = 12
ESTIMATORS = ("gigpo", "grpo", "rloo", "reinforce_pp", "g2po")
TASKS = 4
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "task_kwargs": "envs.adapters.toy_text:lake_of_seed",
    "render": "envs.adapters.toy_text:lake",
    "actions": ["left", "down", "right", "up"],
    "objective": "walk over the ice to the goal G, around the holes H.",
    "win_at": 1.0,
    "deterministic": True,
    "train_seeds": [0, TASKS],
    "heldout_seeds": [TASKS, TASKS + 1],
}
SOKOBAN = {
    "rows": 5,
    "columns": 5,
    "boxes": 1,
    "least_moves": 3,
    "most_moves": 6,
    "train_rooms": TASKS,
    "heldout_rooms": 1,
    "seed": 0,
}
GAMES = ("frozenlake", "sokoban")


def run(arms: Sequence[Arm], seed: int, work: Path) -> Iterator[Result]:
    import numpy as np

    from benchmarks.studies.small_training import learner_steps
    from benchmarks.studies.small_world import make_engine, make_worlds
    from configs import AlgorithmConfig, Config
    from envs.adapters.from_gymnasium import GymnasiumEnv
    from envs.sokoban import SokobanEnv

    made = {
        "frozenlake": make_worlds(
            GymnasiumEnv, [LAKE], max_steps=[MAX_STEPS], at=work / "frozenlake"
        ),
        "sokoban": make_worlds(SokobanEnv, [SOKOBAN], max_steps=[MAX_STEPS], at=work / "sokoban"),
    }
    for arm in arms:
        settings = dict(arm.settings)
        (world,), base = made[settings.pop("game")]
        config = Config(
            seed=seed,
            algorithm=AlgorithmConfig(group_filter="rewards", **settings),
            learner=learner_config(),
        )
        engine = make_engine(base, learner=config.learner, loss=config.loss)
        steps = list(learner_steps(engine, world, config))
        engine.close()
        curve = [step.success for step in steps]
        anchor = np.mean([np.mean(step.rows["anchor_size"].to_numpy()) for step in steps])
        yield (
            arm,
            {"mean": float(np.mean(curve)), "final": curve[-1], "anchor_size": float(anchor)},
            curve,
        )


STUDY = Study(
    name="replication",
    title="Is the order of the estimators the same in other games?",
    question="""
        In the [corridor](horizon.md) GiGPO learns faster than estimators of whole episodes, and
        G2PO faster than GiGPO. Is that so in FrozenLake, where an episode can be lost early, and in
        Sokoban with one box, where a wrong push cannot be undone?
    """,
    prediction="""
        (27 November 2026.) In both games GiGPO's mean success over the run is above that of ω = 0,
        by 0.02 to 0.10, and G2PO's is above GiGPO's. RLOO is within 0.05 of ω = 0 and REINFORCE++
        is the lowest. The gaps are smaller than in the corridor with the door 8 rooms away, because
        ways are as short as there at 2 to 5 rooms.
    """,
    setup=f"""
        FrozenLake: {TASKS} random lakes of 4 by 4 without slippery ice, of which two turned out to
        be equal. Sokoban: {TASKS} rooms of 5
        by 5 with walls, one box, {SOKOBAN["least_moves"]} to {SOKOBAN["most_moves"]} moves. Both
        as text, at most {MAX_STEPS} steps, success is the only reward. All arms of a game begin
        with the same cloned policy, which takes every admissible action equally often: a Qwen2 with
        one layer of 64, too small to generalise, so this is learning of {TASKS} tasks. {STEPS}
        learner steps of {GROUPS} groups of 8 episodes, {UPDATES} updates each, learning rate
        {LEARNING_RATE:g}, as in [horizon](horizon.md): nothing was tuned for these games. Success
        is computed exactly from the policy's probabilities.
    """,
    arms=tuple(
        Arm(
            name=f"{name}/{game}",
            label=name,
            panel=game,
            settings={**ALL_ESTIMATORS[name], "game": game},
        )
        for game in GAMES
        for name in ESTIMATORS
    ),
    seeds=5,
    measures={
        "mean": "success, mean over all learner steps: how fast it learns",
        "final": "success after the last learner step",
        "anchor_size": "steps in a step's anchor group, mean",
    },
    comparisons=tuple(
        (f"gigpo/{game}", f"{other}/{game}") for game in GAMES for other in ESTIMATORS[1:]
    ),
    curve="success over learner steps",
    reading="""
        Seven runs of one seed: no interval, and the study was stopped there, because this form
        cannot answer. In FrozenLake GiGPO less ω = 0 is
        {gigpo/frozenlake - grpo/frozenlake[mean]}, less G2PO
        {gigpo/frozenlake - g2po/frozenlake[mean]}, less RLOO
        {gigpo/frozenlake - rloo/frozenlake[mean]} and less REINFORCE++
        {gigpo/frozenlake - reinforce_pp/frozenlake[mean]}: smaller than seeds may differ. All five
        end between {grpo/frozenlake[final]} and {reinforce_pp/frozenlake[final]}. In Sokoban
        neither arm learns: success is {gigpo/sokoban[final]} with GiGPO at the end and
        {grpo/sokoban[final]} with ω = 0, where the cloned policy has 0.18.

        The cause is the policy and not the estimator. In a grid of signs, which state it is shows
        only in where the signs stand, and a model of one layer hardly learns that in 160 updates.
        Trained on the best action of every state it needs about 200 updates at a rate of 0.002 in
        Sokoban, and with two layers it wins 0.56 in FrozenLake after 240. Until a policy tells
        states apart, a step's advantage, which differs between them, cannot help. On seed 100,
        GiGPO at a rate of 0.002 ends at 0.17 in Sokoban and 0.48 in FrozenLake. With one lake and
        one room whose places have names, as in the corridor, it reaches 0.13 and 0.25 in 40 learner
        steps at 0.0005 and loses all at 0.001: there 80 learner steps at the lower rate come next.
        These probes are not among the stored runs.
    """,
    run_cpu_s=17,
    run=run,
)

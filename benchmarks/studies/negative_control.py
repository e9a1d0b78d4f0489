"""Study whether GiGPO is GRPO, to the last bit of the weights, where no state recurs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.studies.study import Arm, Result, Study

if TYPE_CHECKING:
    import torch

DISTANCE, MAX_STEPS = 5, 28  # the middle one of horizon
STEPS, GROUPS = 10, 4  # learner steps, and groups of each: a digest shows any difference


def run(arms: Sequence[Arm], seed: int, work: Path) -> Iterator[Result]:
    import pyarrow as pa

    from benchmarks.studies.corridor import Corridor
    from benchmarks.studies.small_training import learner_steps, weights_digest
    from benchmarks.studies.small_world import make_engine, make_worlds
    from configs import AlgorithmConfig, Config, LearnerConfig
    from store import state_hash

    (world,), base = make_worlds(Corridor, [{"distance": DISTANCE}], max_steps=[MAX_STEPS], at=work)

    def made_unique(rows: pa.Table) -> pa.Table:
        names = [state_hash(f"step {row}") for row in range(len(rows))]
        at = rows.schema.get_field_index("state_hash")
        return rows.set_column(at, rows.schema.field(at), pa.array(names, rows["state_hash"].type))

    for arm in arms:
        anchors, normalise, weighting = (
            str(arm.settings[name]) for name in ("anchors", "normalise", "weighting")
        )
        learner = LearnerConfig(
            steps=STEPS, groups_per_step=GROUPS, learning_rate=5e-4, updates_per_step=2
        )
        digests, weights, successes = [], [], []
        for estimator in ("gigpo", "grpo"):
            algorithm = AlgorithmConfig(
                estimator=estimator, normalise=normalise, weighting=weighting
            )
            config = Config(seed=seed, algorithm=algorithm, learner=learner)
            engine = make_engine(base, learner=learner, loss=config.loss)
            change = made_unique if anchors == "unique" else lambda rows: rows
            *_, last = learner_steps(engine, world, config, change=change)
            digests.append(weights_digest(engine))
            weights.append({name: tensor.clone() for name, tensor in engine.weights()})
            successes.append(last.success)
            engine.close()
        gigpo, grpo = weights
        difference = max(float((gigpo[name] - grpo[name]).abs().max()) for name in gigpo)
        moved = max(
            float((gigpo[name] - tensor).abs().max()) for name, tensor in _weights_of(base).items()
        )
        yield (
            arm,
            {
                "same_digest": float(digests[0] == digests[1]),
                "difference": difference,
                "moved": moved,
                "success_gigpo": successes[0],
                "success_grpo": successes[1],
                "digest_gigpo": digests[0],
                "digest_grpo": digests[1],
            },
            [],
        )


def _weights_of(base: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(next(base.glob("*.safetensors")))


STUDY = Study(
    name="negative_control",
    title="Where no state recurs, GiGPO is GRPO",
    question="""
        If every step has a state of its own, GiGPO's step advantages are all 0. Are its weights
        then those of GRPO, bit for bit, after ten learner steps in which each policy played its own
        episodes?
    """,
    prediction="""
        (23 November 2026.) Yes, for each normalisation and weighting: equal digests. With the true
        states, which recur, the digests differ: the control could have failed.
    """,
    setup=f"""
        The corridor of [horizon](horizon.md) with the door {DISTANCE} rooms away. {STEPS} learner
        steps of {GROUPS} groups of 8 episodes, 2 updates each, once with `estimator: gigpo` and
        once with `grpo`, from the same weights and the same random numbers. In the arms with unique
        anchors each step's state hash is replaced by one of its own before the advantages are
        computed.
    """,
    arms=(
        *(
            Arm(
                name=f"unique, {normalise}, {weighting}",
                settings={"anchors": "unique", "normalise": normalise, "weighting": weighting},
            )
            for normalise in ("mean_std", "mean", "leave_one_out")
            for weighting in ("steps", "trajectories")
        ),
        Arm(
            name="recurring, mean_std, steps",
            settings={"anchors": "recurring", "normalise": "mean_std", "weighting": "steps"},
        ),
    ),
    seeds=5,
    measures={
        "same_digest": "fraction of the pairs whose weights have the same digest",
        "difference": "largest difference between a weight of GiGPO and of GRPO",
        "moved": "largest change of a weight from the base model",
        "success_gigpo": "success after the last learner step with GiGPO",
        "success_grpo": "the same with GRPO",
    },
    numbers=".3g",
    reading="""
        As predicted. Without a recurring state the fraction of equal digests is
        {unique, mean_std, steps[same_digest]}, {unique, mean, steps[same_digest]} and
        {unique, leave_one_out, steps[same_digest]} for the three normalisations by steps, and
        {unique, mean_std, trajectories[same_digest]}, {unique, mean, trajectories[same_digest]} and
        {unique, leave_one_out, trajectories[same_digest]} by trajectories. With the true states it
        is {recurring, mean_std, steps[same_digest]}: there the weights differ by as much as
        {recurring, mean_std, steps[difference]}, and training moved them by
        {recurring, mean_std, steps[moved]}.
    """,
    run_cpu_s=6,
    run=run,
)

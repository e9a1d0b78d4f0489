"""Study whether a synchronous run is the plain loop that one would write by hand."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.studies.real_runs import train
from benchmarks.studies.study import Arm, Result, Study

STEPS = 5  # enough to see whether a difference grows
SETTINGS = {
    "max_staleness": 0,
    "learner.steps": STEPS,
    "learner.checkpoint_every": STEPS,
    "learner.keep_versions": STEPS + 2,
    "evaluation.every": 0,
    "evaluation.final_episodes_per_task": 1,
}
CONFIG = "configs/key_room.yaml"
PLAYED = """
SELECT g.ordinal // 8 AS batch, s.traj_uid, s.step_index, s.prompt_ids, s.response_ids
FROM steps s JOIN groups g USING (group_uid) WHERE g.split = 'train'"""


def run(arms: Sequence[Arm], seed: int, work: Path) -> Iterator[Result]:
    import store
    from benchmarks.studies.minimal_loop import minimal_loop
    from store import BASE_POLICY, RunLayout

    for arm in arms:
        rate = float(arm.settings["learning_rate"])
        directory = work / f"rate{rate:g}_seed{seed}"
        shutil.rmtree(directory, ignore_errors=True)
        train(CONFIG, directory, {**SETTINGS, "seed": seed, "learner.learning_rate": rate})
        layout = RunLayout.open(directory)
        with store.open_run(directory) as reader:
            rows = reader.rows(PLAYED)
        stored = {
            (bytes.fromhex(row["traj_uid"].replace("-", "")), row["step_index"]): (
                row["prompt_ids"],
                row["response_ids"],
            )
            for row in rows
        }
        n_steps_of = Counter(row["batch"] for row in rows)
        loop = minimal_loop(
            directory / BASE_POLICY, run_id=layout.info.run_id, seed=seed, learning_rate=rate
        )
        differences, n_same, n_same_batches = [], 0, 0
        for number, (episodes, weights) in enumerate(loop, start=1):
            own = {
                (episode.uid, at): (step.prompt, step.answer)
                for episode in episodes
                for at, step in enumerate(episode.steps)
            }
            n_same_here = sum(stored.get(name) == tokens for name, tokens in own.items())
            is_same = n_same_here == len(own) == n_steps_of[number - 1]
            n_same_batches += is_same and n_same_batches == number - 1
            n_same += n_same_here
            differences.append(_difference(layout.weights_dir(number), weights))
        yield (
            arm,
            {
                **{f"step_{k}": found for k, found in enumerate(differences, start=1)},
                "moved": _difference(directory / BASE_POLICY, weights),
                "same_batches": float(n_same_batches),
                "same_steps": n_same / len(stored),
                "agent_steps": float(len(stored)),
            },
            [],
        )


def _difference(directory: Path, weights: dict) -> float:
    """Return the largest difference between a weight of this directory and of `weights`."""
    from safetensors.torch import load_file

    (file,) = directory.glob("*.safetensors")
    stored = load_file(file)
    return max(float((tensor - weights[name]).abs().max()) for name, tensor in stored.items())


STUDY = Study(
    name="sync_equality",
    title="A synchronous run is the loop that one would write by hand",
    question="""
        With `max_staleness=0`, do workers, coordinator, store, vLLM, SQL and DeepSpeed together
        play the episodes and compute the weights of a plain loop of 200 lines of code?
    """,
    prediction=f"""
        (23 November 2026.) Yes: every prompt and every sampled token of {STEPS} learner steps is
        equal, and no weight differs by more than 1e-6 after the fifth.
    """,
    setup=f"""
        `gigpo train {CONFIG} max_staleness=0 learner.steps={STEPS}`: 64 episodes of key_room a
        learner step, GiGPO with the defaults, vLLM on the CPU. Beside it
        `benchmarks/studies/minimal_loop.py`, from the same base model: it was given the run's id,
        which names the episodes and seeds their sampling, and nothing else of the run. It shares
        with the run the environment, the tokenizer and vLLM's kernel that draws a token.
    """,
    arms=tuple(
        Arm(name=f"learning rate {rate:g}", settings={"learning_rate": rate})
        for rate in (1e-3, 1e-5)
    ),
    seeds=2,
    measures={
        f"step_{STEPS}": f"largest difference of a weight after learner step {STEPS}",
        "step_1": "the same after learner step 1",
        "moved": "largest change of a weight from the base model",
        "same_batches": "learner steps up to which every prompt and every token is equal",
        "same_steps": "fraction of the agent steps whose prompt and answer are equal",
        "agent_steps": "agent steps of the run",
    },
    numbers=".2g",
    reading="""
        The episodes are equal in every run: every prompt and every sampled token of all learner
        steps. With the small learning rate the weights are too: after the last learner step the
        largest difference is {learning rate 1e-05[step_5]}, where training moved a weight by
        {learning rate 1e-05[moved]}. With the config's learning rate it is
        {learning rate 0.001[step_5]}, where training moved one by {learning rate 0.001[moved]}:
        more than the 1e-6 that was predicted. It arises in the first learner step,
        {learning rate 0.001[step_1]}, and does not grow. Probably it is AdamW, whose first step
        divides each gradient by its own size, so that rounding of a gradient near 0 is a visible
        part of the learning rate; that was not tested separately.

        An earlier form of the plain loop left the end token in the text of an answer without a
        closing tag. In three of four runs a few prompts then differed, and with them the weights:
        the mistake was the loop's.
    """,
    run_cpu_s=90,
    run=run,
)

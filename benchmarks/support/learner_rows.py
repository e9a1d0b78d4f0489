"""Rows of benchmarks/learner.py: random tokens in several distributions of lengths.

    rows = make_rows(MIXES["real"](rng, 256), rng=rng, vocabulary=1024)
    rows = make_histories(32, rng=rng, vocabulary=1024)    # prompts repeat all earlier tokens

They have the columns that `micro_batches` reads. A mix gives the prompt and response lengths of a
number of rows, in random order, as concurrent episodes produce them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Lengths = tuple[NDArray[np.int64], NDArray[np.int64]]  # of prompts and of responses, in tokens
Mix = Callable[[np.random.Generator, int], Lengths]

# Lengths of the 11,052 training rows of a quick-start run of 14 learner steps
# (configs/quickstart.yaml, seed 0):
#   SELECT len(prompt_ids) // 4 * 4, count(*) FROM steps WHERE split = 'train' GROUP BY 1
# and the same of len(response_ids). Prompt and response, and prompts of one episode, are all but
# independent.
PROMPT_BIN_TOKENS = 4
REAL_PROMPTS = range(24, 84, PROMPT_BIN_TOKENS)
PROMPT_ROWS = (6, 47, 196, 883, 1691, 2471, 1588, 730, 1048, 779, 801, 459, 199, 152, 2)
REAL_RESPONSES = range(1, 14)
RESPONSE_ROWS = (1, 7, 50, 204, 7215, 287, 3108, 100, 61, 8, 6, 4, 1)
# Made up, in the limits of configs/alfworld_*.yaml: prompts with a few turns of history, answers
# that think first.
# median, sigma of the logarithm, least, most
LONG_PROMPTS, LONG_RESPONSES = (300, 0.7, 64, 2048), (60, 0.8, 8, 512)
# The real rows' means. Rows of them only, "equal", leave nothing to pad; those of "all_response"
# leave nothing else to save either, as every token but the first is a response's and needs the
# output layer.
ROW_TOKENS, MEAN_RESPONSE_TOKENS = 56, 6
# Sizes of that run too: the first prompt, an observation, and the steps of an episode.
FIRST_PROMPT_TOKENS = 45
OBSERVATION_TOKENS = 20
EPISODE_STEPS = 11


def real(rng: np.random.Generator, n_rows: int) -> Lengths:
    bins = _drawn(rng, REAL_PROMPTS, PROMPT_ROWS, n_rows)
    prompts = bins + rng.integers(0, PROMPT_BIN_TOKENS, n_rows)
    return prompts, _drawn(rng, REAL_RESPONSES, RESPONSE_ROWS, n_rows)


def long_tail(rng: np.random.Generator, n_rows: int) -> Lengths:
    return _lognormal(rng, LONG_PROMPTS, n_rows), _lognormal(rng, LONG_RESPONSES, n_rows)


def equal(rng: np.random.Generator, n_rows: int) -> Lengths:
    return np.full(n_rows, ROW_TOKENS - MEAN_RESPONSE_TOKENS), np.full(n_rows, MEAN_RESPONSE_TOKENS)


def all_response(rng: np.random.Generator, n_rows: int) -> Lengths:
    return np.full(n_rows, 1), np.full(n_rows, ROW_TOKENS - 1)


MIXES: dict[str, Mix] = {mix.__name__: mix for mix in (equal, all_response, real, long_tail)}


def make_rows(lengths: Lengths, *, rng: np.random.Generator, vocabulary: int) -> pa.Table:
    prompts = [rng.integers(0, vocabulary, n).tolist() for n in lengths[0]]
    responses = [rng.integers(0, vocabulary, n).tolist() for n in lengths[1]]
    trajectories = [rng.bytes(16) for _ in prompts]
    return _table(
        prompts, responses, trajectories, [0] * len(prompts), rng=rng, vocabulary=vocabulary
    )


def make_histories(n_episodes: int, *, rng: np.random.Generator, vocabulary: int) -> pa.Table:
    """Return episodes in which each prompt begins with the prompt and response before it."""
    prompts = []
    responses = []
    trajectories = []
    steps = []
    for _ in range(n_episodes):
        trajectory = rng.bytes(16)
        history = rng.integers(0, vocabulary, FIRST_PROMPT_TOKENS).tolist()
        for step in range(EPISODE_STEPS):
            response = rng.integers(0, vocabulary, MEAN_RESPONSE_TOKENS).tolist()
            prompts.append(history)
            responses.append(response)
            trajectories.append(trajectory)
            steps.append(step)
            observation = rng.integers(0, vocabulary, OBSERVATION_TOKENS).tolist()
            history = [*history, *response, *observation]
    return _table(prompts, responses, trajectories, steps, rng=rng, vocabulary=vocabulary)


def n_tokens(rows: pa.Table) -> int:
    """Count the tokens of prompts and responses, which every contender is credited with.

    Padding does not count. In full histories each step's whole prompt counts.
    """
    return sum(
        pc.sum(pc.list_value_length(rows[name])).as_py() for name in ("prompt_ids", "response_ids")
    )


def _table(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    trajectories: Sequence[bytes],
    steps: Sequence[int],
    *,
    rng: np.random.Generator,
    vocabulary: int,
) -> pa.Table:
    # Log-probabilities near the random model's: some ratios are clipped, and most are not.
    behaviour = [
        (rng.normal(0.0, 0.1, len(ids)) - np.log(vocabulary)).astype(np.float32)
        for ids in responses
    ]
    return pa.table(
        {
            "traj_uid": pa.array(trajectories, pa.binary(16)),
            "step_index": pa.array(steps, pa.int32()),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "response_logprobs": pa.array(behaviour, pa.list_(pa.float32())),
            "advantage": pa.array(rng.normal(size=len(prompts))),
            "staleness": pa.array(np.zeros(len(prompts), dtype=np.int64)),
        }
    )


def _drawn(
    rng: np.random.Generator, values: Sequence[int], counts: Sequence[int], n: int
) -> NDArray[np.int64]:
    return rng.choice(np.array(values), size=n, p=np.array(counts) / sum(counts))


def _lognormal(
    rng: np.random.Generator, shape: tuple[float, float, int, int], n: int
) -> NDArray[np.int64]:
    median, sigma, least, most = shape
    return np.clip(rng.lognormal(np.log(median), sigma, n), least, most).astype(np.int64)

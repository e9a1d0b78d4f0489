"""Compute the advantages by other means than gigpo's SQL, all in float64, and make the steps."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gigpo import PUBLISHED_SETTINGS

EPISODE_STEPS, GROUP_SIZE = 50, 8
GROUP_STEPS = EPISODE_STEPS * GROUP_SIZE
GAMMA, OMEGA = PUBLISHED_SETTINGS.gamma, PUBLISHED_SETTINGS.omega
PENALTY = PUBLISHED_SETTINGS.invalid_penalty
EPSILON = 1e-6


def make_steps(rows: int, *, seed: int) -> pa.Table:
    """Return tasks x 8 trajectories x 50 steps, with sparse rewards.

    A tenth of the actions are invalid, and about a third of the steps meet a state of their group
    again. Every seed has uids of its own.
    """
    rng = np.random.default_rng(seed)
    trajectory = np.arange(rows) // EPISODE_STEPS
    group = trajectory // GROUP_SIZE
    step = np.arange(rows) % EPISODE_STEPS
    won = rng.random(rows // EPISODE_STEPS)[trajectory] < 0.5
    states = _binary16(group * 500 + rng.integers(0, 500, rows), rng)
    return pa.table(
        {
            "group_uid": _binary16(group, rng),
            "traj_uid": _binary16(trajectory, rng),
            "step_index": pa.array(step, pa.int32()),
            "reward": pa.array(np.where(won & (step == EPISODE_STEPS - 1), 10.0, 0.0)),
            "is_action_valid": pa.array(rng.random(rows) > 0.1),
            "won": pa.array(won),
            "state_hash": states,
            # the same as of the last step: its action led nowhere
            "final_state_hash": pc.if_else(step == EPISODE_STEPS - 1, states, None),
        }
    )


def by_loop(steps: pa.Table) -> np.ndarray:
    """Compute with dictionaries and loops over Python floats; linear in the rows."""
    rows = list(zip(*(steps[name].to_pylist() for name in steps.column_names), strict=True))
    position = {(traj, step): i for i, (_, traj, step, *_) in enumerate(rows)}
    returns, scores = [0.0] * len(rows), [0.0] * len(rows)
    totals: dict[bytes, float] = defaultdict(float)
    for i in sorted(range(len(rows)), key=lambda i: -rows[i][2]):
        _, traj, step, reward, *_ = rows[i]
        later = position.get((traj, step + 1))
        returns[i] = reward + (GAMMA * returns[later] if later is not None else 0.0)
        totals[traj] += reward
    episode: dict[bytes, list[int]] = defaultdict(list)
    anchor: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    for i, (group, traj, _, _, valid, _, state, _) in enumerate(rows):
        penalty = 0.0 if valid else PENALTY
        returns[i] -= penalty
        scores[i] = totals[traj] - penalty
        episode[group].append(i)
        anchor[group, state].append(i)
    advantages = np.zeros(len(rows))
    for groups, values, weight in ((episode, scores, 1.0), (anchor, returns, OMEGA)):
        for members in groups.values():
            of_group = [values[i] for i in members]
            if max(of_group) == min(of_group):
                continue
            mean = sum(of_group) / len(of_group)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in of_group) / (len(of_group) - 1))
            for i in members:
                advantages[i] += weight * (values[i] - mean) / (deviation + EPSILON)
    return advantages


def by_numpy(steps: pa.Table) -> np.ndarray:
    """Compute with keys hashed to 64 bits and sorted, bincounts, and one sweep per step.

    In its favour: two keys may collide, and it refuses nothing.
    """
    group, traj, state = (_dense(steps, name) for name in ("group_uid", "traj_uid", "state_hash"))
    step, reward = steps["step_index"].to_numpy(), steps["reward"].to_numpy()
    penalty = np.where(steps["is_action_valid"].to_numpy(), 0.0, PENALTY)
    grid = np.zeros((traj.max() + 1, step.max() + 2))
    grid[traj, step] = reward
    totals = grid.sum(axis=1)
    for t in range(step.max(), -1, -1):
        grid[:, t] += GAMMA * grid[:, t + 1]
    anchor = np.unique(group * (state.max() + 1) + state, return_inverse=True)[1]
    return _normalised(totals[traj] - penalty, group) + OMEGA * _normalised(
        grid[traj, step] - penalty, anchor
    )


def by_polars(steps: pa.Table) -> np.ndarray:
    """Compute with window expressions, on all cores.

    Returns are sum(r gamma^t) / gamma^t, which suits gamma near 1 and short episodes.
    """
    import polars as pl  # not needed to run gigpo

    def normalised(x: str, keys: list[str]) -> Any:
        value, alike = pl.col(x), pl.col(x).min().over(keys) == pl.col(x).max().over(keys)
        standard = (value - value.mean().over(keys)) / (value.std().over(keys) + EPSILON)
        return pl.when(alike).then(0.0).otherwise(standard)

    discount = pl.lit(GAMMA).pow(pl.col("step_index"))
    penalty = pl.when("is_action_valid").then(0.0).otherwise(PENALTY)
    discounted = (pl.col("reward") * discount).cum_sum(reverse=True).over(
        "traj_uid", order_by="step_index"
    ) / discount
    frame = pl.from_arrow(steps)
    assert isinstance(frame, pl.DataFrame)
    frame = frame.with_columns(
        step_return=discounted - penalty, score=pl.col("reward").sum().over("traj_uid") - penalty
    ).select(
        normalised("score", ["group_uid"])
        + OMEGA * normalised("step_return", ["group_uid", "state_hash"])
    )
    return frame.to_series().to_numpy()


def _binary16(keys: np.ndarray, rng: np.random.Generator) -> pa.Array:
    """Return sixteen random-looking bytes a key, as a uid or a hash has."""
    words = rng.integers(0, 2**63, (int(keys.max()) + 1, 2), dtype=np.int64)[keys]
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(keys), [None, pa.py_buffer(words.tobytes())]
    )


def _dense(steps: pa.Table, name: str) -> np.ndarray:
    words = np.frombuffer(steps[name].combine_chunks().buffers()[1], dtype=np.uint64).reshape(-1, 2)
    hashed = words[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ words[:, 1]
    return np.unique(hashed, return_inverse=True)[1]


def _normalised(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    n = np.bincount(key)
    centred = x - (np.bincount(key, x) / n)[key]
    deviation = np.sqrt(np.bincount(key, centred**2) / np.maximum(n - 1, 1))
    low, high = np.full(len(n), np.inf), np.full(len(n), -np.inf)
    np.minimum.at(low, key, x)
    np.maximum.at(high, key, x)
    return np.where((low == high)[key], 0.0, centred / (deviation + EPSILON)[key])

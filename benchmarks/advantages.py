"""How long the advantages of a batch take, beside the same equations in a Python loop and in numpy, all in float64.

    python benchmarks/advantages.py [--quick]

Rows: tasks x 8 trajectories x 50 steps, sparse rewards, a tenth of the actions invalid, about a third of the steps
meeting a state of their group again. Best of several calls; all three must agree. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gigpo import AdvantageSettings, compute_advantages

EPISODE_STEPS, GROUP_SIZE = 50, 8
SIZES_QUICK, SIZES = (6_400, 64_000), (6_400, 64_000, 640_000)
SETTINGS = AdvantageSettings(
    estimator="gigpo", gamma=0.95, omega=1.0, normalise="mean_std", weighting="steps", invalid_penalty=0.1
)
EPSILON = 1e-6


def make_steps(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    trajectory = np.arange(rows) // EPISODE_STEPS
    group = trajectory // GROUP_SIZE
    step = np.arange(rows) % EPISODE_STEPS
    won = rng.random(rows // EPISODE_STEPS)[trajectory] < 0.5
    return pa.table(
        {
            "group_uid": binary16(group, rng),
            "traj_uid": binary16(trajectory, rng),
            "step_index": pa.array(step, pa.int32()),
            "reward": pa.array(np.where(won & (step == EPISODE_STEPS - 1), 10.0, 0.0)),
            "is_action_valid": pa.array(rng.random(rows) > 0.1),
            "state_hash": binary16(group * 1_000 + rng.integers(0, 500, rows), rng),
        }
    )


def binary16(keys: np.ndarray, rng: np.random.Generator) -> pa.Array:
    """Sixteen random-looking bytes a key, as a uid or a hash has."""
    words = rng.integers(0, 2**63, (int(keys.max()) + 1, 2), dtype=np.int64)[keys]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(keys), [None, pa.py_buffer(words.tobytes())])


def by_loop(steps: pa.Table) -> np.ndarray:
    """Dictionaries and loops over Python floats; linear in the rows."""
    rows = list(zip(*(steps[name].to_pylist() for name in steps.column_names), strict=True))
    position = {(traj, step): i for i, (_, traj, step, *_) in enumerate(rows)}
    returns, scores = [0.0] * len(rows), [0.0] * len(rows)
    totals: dict[bytes, float] = defaultdict(float)
    for i in sorted(range(len(rows)), key=lambda i: -rows[i][2]):
        _, traj, step, reward, _, _ = rows[i]
        later = position.get((traj, step + 1))
        returns[i] = reward + (SETTINGS.gamma * returns[later] if later is not None else 0.0)
        totals[traj] += reward
    episode: dict[bytes, list[int]] = defaultdict(list)
    anchor: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
    for i, (group, traj, _, _, valid, state) in enumerate(rows):
        penalty = 0.0 if valid else SETTINGS.invalid_penalty
        returns[i] -= penalty
        scores[i] = totals[traj] - penalty
        episode[group].append(i)
        anchor[group, state].append(i)
    advantages = np.zeros(len(rows))
    for groups, values, weight in ((episode, scores, 1.0), (anchor, returns, SETTINGS.omega)):
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
    """Keys made dense by sorting, statistics by bincount, returns by one sweep per step of the episode.

    In its favour: of each 16-byte key it looks at 8 bytes, and it refuses nothing.
    """

    def dense(name: str) -> np.ndarray:
        words = np.frombuffer(steps[name].combine_chunks().buffers()[1], dtype=np.uint64)
        return np.unique(words[::2], return_inverse=True)[1]

    group, traj, state = dense("group_uid"), dense("traj_uid"), dense("state_hash")
    step, reward = steps["step_index"].to_numpy(), steps["reward"].to_numpy()
    penalty = np.where(steps["is_action_valid"].to_numpy(), 0.0, SETTINGS.invalid_penalty)
    grid = np.zeros((traj.max() + 1, step.max() + 2))
    grid[traj, step] = reward
    totals = grid.sum(axis=1)
    for t in range(step.max(), -1, -1):
        grid[:, t] += SETTINGS.gamma * grid[:, t + 1]
    anchor = np.unique(group * (state.max() + 1) + state, return_inverse=True)[1]
    return normalised(totals[traj] - penalty, group) + SETTINGS.omega * normalised(grid[traj, step] - penalty, anchor)


def normalised(x: np.ndarray, key: np.ndarray) -> np.ndarray:
    n = np.bincount(key)
    centred = x - (np.bincount(key, x) / n)[key]
    deviation = np.sqrt(np.bincount(key, centred**2) / np.maximum(n - 1, 1))
    low, high = np.full(len(n), np.inf), np.full(len(n), -np.inf)
    np.minimum.at(low, key, x)
    np.maximum.at(high, key, x)
    return np.where((low == high)[key], 0.0, centred / (deviation + EPSILON)[key])


def by_gigpo(steps: pa.Table) -> np.ndarray:
    return compute_advantages(steps, SETTINGS)["advantage"].to_numpy()


def best_ms(function: Callable[[pa.Table], np.ndarray], steps: pa.Table, *, calls: int) -> tuple[float, np.ndarray]:
    times_s = []
    for _ in range(calls):
        start_s = time.perf_counter()
        result = function(steps)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s) * 1e3, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="stop at 64,000 rows")
    figures: dict[str, float] = {}
    print(f"{'rows':>9} {'gigpo':>10} {'loop':>10} {'numpy':>10}   ms, best of several")
    for rows in SIZES_QUICK if parser.parse_args().quick else SIZES:
        steps = make_steps(rows)
        calls = 7 if rows <= 64_000 else 2
        gigpo_ms, advantages = best_ms(by_gigpo, steps, calls=calls)
        loop_ms, from_loop = best_ms(by_loop, steps, calls=2)
        numpy_ms, from_numpy = best_ms(by_numpy, steps, calls=calls)
        np.testing.assert_allclose(advantages, from_loop, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(advantages, from_numpy, rtol=1e-6, atol=1e-9)
        print(f"{rows:>9,} {gigpo_ms:>10.1f} {loop_ms:>10.1f} {numpy_ms:>10.1f}")
        figures |= {
            f"gigpo_ms_{rows}": round(gigpo_ms, 2),
            f"loop_over_gigpo_{rows}": round(loop_ms / gigpo_ms, 2),
            f"gigpo_over_numpy_{rows}": round(gigpo_ms / numpy_ms, 2),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""The small world of the studies: exact success is what is played, and GiGPO learns faster in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.studies.corridor import Corridor
from benchmarks.studies.horizon import STUDY
from benchmarks.studies.small_world import make_engine, make_worlds, play, success_of
from configs import LearnerConfig, LossConfig

SEEDS = (0, 1, 2)
GAP = 0.04  # of the mean success; the study found about 0.1


@pytest.mark.slow
def test_exact_success_is_how_often_episodes_are_won(tmp_path: Path) -> None:
    (world,), base = make_worlds(Corridor, [{"distance": 2}], max_steps=[16], at=tmp_path)
    engine = make_engine(base, learner=LearnerConfig(), loss=LossConfig())
    chance = success_of(world, engine)
    rows = play(engine, world, n_groups=8, group_size=64, seed=(0,), version=0)
    engine.close()
    n_won = int(np.sum(rows["terminated"].to_numpy(zero_copy_only=False)))
    n_episodes = len(rows["traj_uid"].unique())
    assert n_episodes == 512
    assert 0.2 < chance < 0.8
    assert abs(n_won / n_episodes - chance) < 4 * np.sqrt(chance * (1 - chance) / n_episodes)


@pytest.mark.slow
def test_gigpo_learns_faster_than_its_episode_term_alone(tmp_path: Path) -> None:
    """A short form of the study `horizon`: the middle distance, three seeds."""
    arms = [arm for arm in STUDY.arms if arm.name in ("gigpo/5", "grpo/5")]
    found = {
        (arm.name, seed): measures
        for seed in SEEDS
        for arm, measures, _ in STUDY.run(arms, seed, tmp_path)
    }
    assert all(found["gigpo/5", seed]["final"] > 0.9 for seed in SEEDS)
    gaps = [found["gigpo/5", seed]["mean"] - found["grpo/5", seed]["mean"] for seed in SEEDS]
    assert np.mean(gaps) > GAP, "without the step term there is no gap at all"

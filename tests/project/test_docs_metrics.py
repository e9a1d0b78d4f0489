"""docs/metrics.md names every metric that code can write, and no other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import torch

import configs
from coordinator.coordinator import REMEMBERED
from gigpo import Tokens, token_diagnostics
from learner.data.batch_summary import BatchSummary, Episodes
from learner.step_times import LoadTimes, StepTimes
from learner.training.alarms import collapse_alarms
from learner.training.critic import CriticStats, critic_metrics
from learner.training.run_health import BAD_IN_A_ROW, EMPTY_IN_A_ROW
from learner.training.step_metrics import UpdateStats, step_metrics
from store.catalog.records import Evaluation, SuccessRate

ROOT = Path(__file__).resolve().parents[2]
PREFIXES = (
    "alarm",
    "anchor",
    "env",
    "groups",
    "heldout",
    "learner",
    "critic",
    "loss",
    "offline",
    "replay",
    "staleness",
    "time",
    "tokens",
    "train",
)
METRIC = re.compile(rf"(?:{'|'.join(PREFIXES)})/[a-z0-9_]+")
SOURCES = ("actors", "coordinator", "gigpo", "learner", "store")


def documented() -> list[str]:
    """Return the first column of the page's tables."""
    return re.findall(
        r"^\| `([a-z]+/[a-z0-9_]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE
    )


def of_an_update() -> UpdateStats:
    """Return the statistics of one token of every class of staleness."""
    staleness_N = torch.tensor([-1, 0, 1, 2, 3, 5, 9])
    zeros_N = torch.zeros(len(staleness_N))
    tokens = Tokens(
        logprobs_N=zeros_N,
        behaviour_logprobs_N=zeros_N,
        advantages_N=zeros_N,
        sequence_N=torch.zeros(len(staleness_N), dtype=torch.long),
    )
    diagnostics = token_diagnostics(
        tokens, factor_N=zeros_N, clipped_N=zeros_N.bool(), staleness_N=staleness_N
    )
    return UpdateStats(
        loss=0.0, kl=0.0, entropy=0.0, grad_norm=0.0, learning_rate=0.0, n_rows=1, n_tokens=7,
        n_tokens_computed=9, skipped=False, bad_rows=(), tokens=diagnostics,
    )  # fmt: skip


def of_a_learner_step() -> set[str]:
    """Return the names of a batch with own, offline and replayed groups."""
    groups = [
        SimpleNamespace(source=None, oldest_version=0),
        SimpleNamespace(source="run", version_min=0),
    ]
    episodes = Episodes(success=0.5, mean_return=1.0, mean_steps=3.0)
    advantages = ("advantage", "episode_advantage", "step_advantage")
    summary = BatchSummary(
        n_rows=1, n_response_tokens=7, n_own_tokens=7, success=0.5, own=episodes, offline=episodes,
        values_digest=1,
    )  # fmt: skip
    ready = SimpleNamespace(
        batch=SimpleNamespace(groups=groups, replayed=groups[:1]), version=1, summary=summary,
        filtered={}, state_values={b"t": [0.0]}, replayed=pa.table({"advantage": [0.5]}),
        rows=pa.table({"anchor_size": [1], **{name: [0.0] for name in advantages}}),
        times=LoadTimes(),
    )  # fmt: skip
    metrics = step_metrics(ready, updates=[of_an_update()], times=StepTimes(step_s=1.0))  # type: ignore[arg-type]
    alarms = collapse_alarms(metrics, before={}, learner_step=1, config=configs.Config())
    critic = CriticStats(
        loss=0.0, grad_norm=0.0, value_mean=0.0, explained_variance=0.0, clip_fraction=0.0,
        skipped=False,
    )  # fmt: skip
    of_critic = critic_metrics([critic])
    return {*metrics, *of_critic, *alarms.values, BAD_IN_A_ROW, EMPTY_IN_A_ROW}


def of_an_evaluation() -> set[str]:
    done = Evaluation(
        version=1, newest_version=1, learner_step=1, success=SuccessRate(n_trajectories=2, n_won=1),
        return_sum=1.0, n_steps=6, n_abandoned=1,
    )  # fmt: skip
    without_episodes = replace(done, success=SuccessRate(n_trajectories=0, n_won=0))
    assert not {"heldout/return", "heldout/episode_steps"} & without_episodes.metrics().keys()
    return set(done.metrics())


def test_the_page_names_the_metrics_that_are_written() -> None:
    names = documented()
    assert len(names) == len(set(names)), "each is there once"
    assert set(names) == of_a_learner_step() | of_an_evaluation() | {REMEMBERED}


def test_the_page_names_every_metric_that_the_sources_spell_out() -> None:
    texts = [path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    spelt = {name for text in texts for name in re.findall(rf'"({METRIC.pattern})"', text)}
    assert len(spelt) > 20
    assert spelt <= set(documented())

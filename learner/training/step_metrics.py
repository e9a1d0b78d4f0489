"""Figures of a learner step, under the names they have in the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from gigpo import anchor_size_shares, singleton_fraction, step_variance_share
from learner.data.batch_loader import Episodes, PreparedBatch
from learner.training.update_stats import UpdateStats

LENGTH = "tokens/response_per_row"
# It compares two engines at the same weights, and the first update changes one of them.
FIRST_UPDATE_ONLY = {"mismatch_kl_on_policy"}


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """Seconds that the loop spent in a learner step, which ends when its weights are published.

    A checkpoint is saved after that, so its time is in the next step. The preparing thread's
    seconds are in `PreparedBatch`.
    """

    checkpoint_s: float = 0.0  # of the step before, if one was saved
    groups_wait_s: float = 0.0  # until workers had committed the groups
    batch_wait_s: float = 0.0  # for reading, advantages and packing after that
    publish_s: float = 0.0  # until the coordinator knew of the weights
    step_s: float = 0.0  # the whole step


class StepClock:
    """Measure learner steps one after the other, so that every second is in exactly one."""

    def __init__(self) -> None:
        self._began_at_s = time.monotonic()
        self._times = StepTimes()

    def waited_for_batch(self, *, since_s: float, groups_at_s: float) -> None:
        """Split a wait that ends now into the time before and after the groups were complete."""
        waited_s = time.monotonic() - since_s
        self._times.groups_wait_s = min(max(0.0, groups_at_s - since_s), waited_s)
        self._times.batch_wait_s = waited_s - self._times.groups_wait_s

    @contextmanager
    def publishing(self) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self._times.publish_s = time.monotonic() - started_s

    @contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self._times.checkpoint_s = time.monotonic() - started_s

    def end_step(self) -> StepTimes:
        """Return the times of the step that ends now, and begin the next."""
        now_s, ended = time.monotonic(), self._times
        ended.step_s = now_s - self._began_at_s
        self._began_at_s, self._times = now_s, StepTimes()
        return ended


def step_metrics(
    batch: PreparedBatch, updates: list[UpdateStats], times: StepTimes
) -> dict[str, float]:
    """Return the figures of a learner step by name."""
    n_computed = sum(update.n_tokens_computed for update in updates)
    figures = {
        "learner/idle_fraction": times.groups_wait_s / times.step_s,
        "time/read_s": batch.read_s,
        "time/advantages_s": batch.advantages_s,
        "time/advantages_cpu_s": batch.advantages_cpu_s,
        "time/filter_s": batch.signal_s,
        "time/pack_s": batch.pack_s,
        "time/batch_wait_s": times.batch_wait_s,
        "time/publish_s": times.publish_s,
        "time/checkpoint_s": times.checkpoint_s,
        "time/step_s": times.step_s,
        "tokens/trained_per_s": n_computed / (times.step_s - times.groups_wait_s),
    }
    if batch.live is not None:
        figures["tokens/generated_per_s"] = batch.n_live_tokens / times.step_s
    return figures | timeless_metrics(batch, updates)


def timeless_metrics(batch: PreparedBatch, updates: list[UpdateStats]) -> dict[str, float]:
    """Return the figures that depend on batch and weights alone, which a replay repeats."""
    live = [group for group in batch.batch.groups if group.source is None]
    figures = {
        **episode_metrics("train", batch.live),
        **episode_metrics("offline", batch.offline),
        LENGTH: batch.n_response_tokens / batch.n_rows,
        "learner/updates": float(len(updates)),
        "groups/filtered": float(len(batch.filtered)),
        "groups/offline": float(len(batch.batch.groups) - len(live)),
        "anchor/singleton_fraction": singleton_fraction(batch.rows),
        "anchor/step_variance_share": step_variance_share(batch.rows),
    }
    for name, share in anchor_size_shares(batch.rows).items():
        figures[f"anchor/{name}"] = share
    if live:
        oldest = min(group.oldest_version for group in live)
        figures["staleness/max"] = float(batch.version - oldest)
    return figures | mean_of_updates(updates)


def episode_metrics(prefix: str, episodes: Episodes | None) -> dict[str, float]:
    """Return the figures of live ("train") or offline ("offline") episodes; none without any."""
    if episodes is None:
        return {}
    return {
        f"{prefix}/success": episodes.success,
        f"{prefix}/return": episodes.mean_return,
        f"{prefix}/episode_steps": episodes.mean_steps,
    }


def mean_of_updates(updates: list[UpdateStats]) -> dict[str, float]:
    """Return `loss/<name>`: each statistic's mean over the updates that have it.

    Statistics of FIRST_UPDATE_ONLY are taken from the first update.
    """
    seen: dict[str, list[float]] = {}
    for index, update in enumerate(updates):
        record = asdict(update)
        tokens, bad_rows = record.pop("tokens"), record.pop("bad_rows")
        for name, value in (record | tokens | {"bad_rows": len(bad_rows)}).items():
            if index == 0 or name not in FIRST_UPDATE_ONLY:
                seen.setdefault(f"loss/{name}", []).append(float(value))
    return {name: sum(values) / len(values) for name, values in seen.items()}

"""The figures of a learner step, by the names the store has them under."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gigpo import anchor_size_shares, singleton_fraction, step_variance_share
from learner.data.batch_loader import Episodes, PreparedBatch
from learner.training.update_stats import UpdateStats

LENGTH = "tokens/response_per_row"
FIRST_UPDATE_ONLY = {"mismatch_kl_on_policy"}


@dataclass(kw_only=True, slots=True)
class Times:
    """Seconds of the loop, not of the thread beside it, from when one version was published to when
    the next one is.

    So a step's checkpoint, which comes after its version, is in the time of the next step, and
    every second in just one. The loop fills it in.
    """

    began_at_s: float  # time.monotonic()
    checkpoint_s: float = 0.0  # of the step before, if it had one
    groups_wait_s: float = 0.0  # for the workers
    batch_wait_s: float = 0.0  # for reading, advantages and packing, once the groups were there
    publish_s: float = 0.0  # until the coordinator knew of the weights
    step_s: float = 0.0  # all of it


def step_metrics(
    ready: PreparedBatch, updates: list[UpdateStats], times: Times
) -> dict[str, float]:
    """The figures of a learner step, by the names the store has them under."""
    n_computed = sum(update.n_tokens_computed for update in updates)
    return {
        "learner/idle_fraction": times.groups_wait_s / times.step_s,
        "time/read_s": ready.read_s,
        "time/advantages_s": ready.advantages_s,
        "time/advantages_cpu_s": ready.advantages_cpu_s,
        "time/filter_s": ready.filter_s,
        "time/pack_s": ready.pack_s,
        "time/batch_wait_s": times.batch_wait_s,
        "time/publish_s": times.publish_s,
        "time/checkpoint_s": times.checkpoint_s,
        "time/step_s": times.step_s,
        **(
            {}
            if ready.live is None
            else {"tokens/generated_per_s": ready.n_live_tokens / times.step_s}
        ),
        "tokens/trained_per_s": n_computed / (times.step_s - times.groups_wait_s),
        **timeless_metrics(ready, updates),
    }


def timeless_metrics(ready: PreparedBatch, updates: list[UpdateStats]) -> dict[str, float]:
    """Those without a clock in them: the same batch at the same weights has the same."""
    live = [group for group in ready.batch.groups if group.source is None]
    return {
        **episode_metrics("train", ready.live),
        **episode_metrics("offline", ready.offline),
        **(
            {"staleness/max": float(ready.version - min(group.oldest_version for group in live))}
            if live
            else {}
        ),
        LENGTH: ready.n_response_tokens / ready.n_rows,
        "learner/updates": float(len(updates)),
        "groups/filtered": float(len(ready.filtered)),
        "groups/offline": float(len(ready.batch.groups) - len(live)),
        "anchor/singleton_fraction": singleton_fraction(ready.rows),
        **{f"anchor/{name}": share for name, share in anchor_size_shares(ready.rows).items()},
        "anchor/step_variance_share": step_variance_share(ready.rows),
        **mean_of_updates(updates),
    }


def episode_metrics(whose: str, episodes: Episodes | None) -> dict[str, float]:
    """Return the figures of the episodes played ("train") or stored; nothing without any."""
    if episodes is None:
        return {}
    return {
        f"{whose}/success": episodes.success,
        f"{whose}/return": episodes.mean_return,
        f"{whose}/episode_steps": episodes.mean_steps,
    }


def mean_of_updates(updates: list[UpdateStats]) -> dict[str, float]:
    """`loss/<name>`: each statistic averaged over the updates of a learner step that have it.

    Those of FIRST_UPDATE_ONLY are the first update's: they compare two engines at the same weights,
    and it moves one of them.
    """
    seen: dict[str, list[float]] = {}
    for index, update in enumerate(updates):
        record = asdict(update)
        tokens, bad_rows = record.pop("tokens"), record.pop("bad_rows")
        for name, value in (record | tokens | {"bad_rows": len(bad_rows)}).items():
            if index == 0 or name not in FIRST_UPDATE_ONLY:
                seen.setdefault(f"loss/{name}", []).append(float(value))
    return {name: sum(values) / len(values) for name, values in seen.items()}

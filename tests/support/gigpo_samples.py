"""Small tables of steps, written as texts."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pyarrow as pa

from gigpo import PUBLISHED_SETTINGS, AdvantageSettings, compute_advantages

Row = tuple[str | None, float, bool]  # state, reward, valid


def settings(**changes: object) -> AdvantageSettings:
    """The published ones, but normalise 'mean', whose numbers can be checked by eye."""
    return replace(PUBLISHED_SETTINGS, **({"normalise": "mean"} | changes))  # type: ignore[arg-type]


def uid(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def table(episodes: dict[str, list[Row]], *, group: str = "task") -> pa.Table:
    rows = [
        (uid(group), uid(name), index, reward, valid, None if state is None else uid(state), state)
        for name, episode in episodes.items()
        for index, (state, reward, valid) in enumerate(episode)
    ]
    names = [
        "group_uid",
        "traj_uid",
        "step_index",
        "reward",
        "is_action_valid",
        "state_hash",
        "anchor_text",
    ]
    types = [
        pa.binary(16),
        pa.binary(16),
        pa.int32(),
        pa.float64(),
        pa.bool_(),
        pa.binary(16),
        pa.string(),
    ]
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=names)


def episode(states: str, *, end: float, invalid: tuple[int, ...] = ()) -> list[Row]:
    """Space-separated states; the reward comes with the last step."""
    names = states.split()
    return [(s, end if i == len(names) - 1 else 0.0, i not in invalid) for i, s in enumerate(names)]


def column(steps: pa.Table, name: str, **changes: object) -> list[float]:
    return compute_advantages(steps, settings(**changes))[name].to_pylist()

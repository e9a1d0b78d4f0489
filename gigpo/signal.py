"""Dynamic sampling: which groups are left out because nothing can be learnt from them, and why.

silent = groups_without_signal(compute_advantages(steps, signal_settings(settings, signal="returns")))
# {group_uid: "8 trajectories, no advantage differs from 0"}
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from gigpo.settings import AdvantageSettings

SIGNALS: Final = ("advantages", "returns")


def signal_settings(settings: AdvantageSettings, *, signal: str) -> AdvantageSettings:
    """The settings under which a group is asked whether it has a signal.

    advantages  what the learner trains on: a group is silent if every one of its advantages is 0
    returns     DAPO (arXiv 2503.14476), also "GiGPO dynamic": silent if its episodes' undiscounted returns are all equal, no
                penalty counted, although its step terms may differ (won sooner, won later)
    """
    if signal == "advantages":
        return settings
    if signal == "returns":
        return replace(settings, estimator="grpo", normalise="mean", invalid_penalty=0.0, anchor="state", versions="mixed")
    raise ValueError(f"signal={signal!r} is unknown; it is one of {', '.join(SIGNALS)}")


def groups_without_signal(advantages: pa.Table) -> dict[bytes, str]:
    """Groups in which every advantage is exactly 0, each with the reason. In: compute_advantages' table."""
    columns = pa.table(
        {
            "group_uid": advantages["group_uid"],
            "traj_uid": advantages["traj_uid"],
            "size": pc.abs(advantages["advantage"]),
        }
    )
    groups = columns.group_by("group_uid").aggregate([("size", "max"), ("traj_uid", "count_distinct")])
    silent = groups.filter(pc.equal(groups["size_max"], 0.0))
    return {
        uid: f"{n} {'trajectory' if n == 1 else 'trajectories'}, no advantage differs from 0"
        for uid, n in zip(silent["group_uid"].to_pylist(), silent["traj_uid_count_distinct"].to_pylist(), strict=True)
    }

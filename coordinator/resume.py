"""What a learner that goes on has to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from store import RollBack


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    latest_version: int | None  # None in a new run
    last_step: (
        int  # at which the run ends: `learner.steps`, or where its offline groups are used up
    )
    rolled_back: RollBack
    metrics: Mapping[str, float]  # newest value of each name, up to the learner step resumed from

"""Summarise all rows that a learner step claimed, those of filtered groups included."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from learner.data.values import values_digest
from store import IMPORTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Episodes:
    """Means over the trajectories of a batch, including filtered groups."""

    success: float  # fraction that won
    mean_return: float  # undiscounted sum of the rewards
    mean_steps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSummary:
    """Figures of all claimed groups. The batch's own groups are the ones that this run played."""

    n_rows: int
    n_response_tokens: int
    n_own_tokens: int  # response tokens that this run's workers generated
    success: float  # fraction of all trajectories that won
    own: Episodes | None  # None without own groups
    offline: Episodes | None  # None without offline groups
    # Digest of the critic's values of all response tokens; None unless the estimator is one of
    # TOKEN_LEVEL.
    values_digest: int | None


def batch_summary(rows: pa.Table) -> BatchSummary:
    """Summarise the rows of whole groups, as `scored_rows` returns them."""
    own, offline = own_rows(rows), rows.filter(pc.equal(rows["split"], IMPORTED))
    return BatchSummary(
        n_rows=rows.num_rows,
        n_response_tokens=_n_response_tokens(rows),
        n_own_tokens=_n_response_tokens(own),
        success=pc.mean(_first_steps(rows)["won"]).as_py(),
        own=_episodes(own),
        offline=_episodes(offline),
        values_digest=values_digest(rows) if "token_value" in rows.column_names else None,
    )


def own_rows(rows: pa.Table) -> pa.Table:
    """Return the rows that this run played: all but those of offline groups."""
    return rows.filter(pc.not_equal(rows["split"], IMPORTED))


def _n_response_tokens(rows: pa.Table) -> int:
    return pc.sum(pc.list_value_length(rows["response_ids"]), min_count=0).as_py()


def _first_steps(rows: pa.Table) -> pa.Table:
    """Return one row per trajectory."""
    return rows.filter(pc.equal(rows["step_index"], 0))


def _episodes(rows: pa.Table) -> Episodes | None:
    first_steps = _first_steps(rows)
    if first_steps.num_rows == 0:
        return None
    return Episodes(
        success=pc.mean(first_steps["won"]).as_py(),
        mean_return=pc.sum(rows["reward"]).as_py() / first_steps.num_rows,
        mean_steps=rows.num_rows / first_steps.num_rows,
    )

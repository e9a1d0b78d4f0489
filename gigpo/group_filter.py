"""Find groups to leave out because nothing can be learnt from them, and say why (dynamic sampling).

    left_out = filtered_groups(compute_advantages(steps, settings), group_filter="rewards")
    # {group_uid: "8 trajectories, all returned 0, they differ in penalties only"}

A filter names the quantity in which the episodes of a group must differ:

none        nothing: all groups pass, as in the scripts of GiGPO's authors. KL and entropy act on
            every step
advantages  a group is left out if all its advantages are 0. Penalties count
rewards     rewards without penalties: their undiscounted returns or, where the estimator has a
            step term, the discounted returns from some state on (won sooner, won later)
returns     their undiscounted returns without penalties: DAPO (arXiv 2503.14476)

`rewards` and `returns` ignore differences that rounding can make (queries/trajectories.sql), and
leave out a lone trajectory, which nothing can differ from. Every filter but `none` leaves out a
group whose advantages are all 0. The baseline of reinforce_pp is the batch, so only `advantages`
keeps a group of it that won every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from printable import counted, did_you_mean

GROUP_FILTERS: Final = ("advantages", "rewards", "returns", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Groups:
    """The figures of each group that decide whether it is left out."""

    uids_G: pa.Array
    group_R: np.ndarray  # integer, the group of each row
    n_trajectories_G: np.ndarray  # integer
    episodes_differ_G: np.ndarray  # bool: in the quantity that the filter names
    has_advantage_G: np.ndarray  # bool: one of its advantages is not 0
    is_lone_G: np.ndarray  # bool: a single trajectory, and the filter compares trajectories

    @property
    def left_out_G(self) -> np.ndarray:
        """Return a bool per group: whether nothing can be learnt from it."""
        return ~self.episodes_differ_G | ~self.has_advantage_G | self.is_lone_G


def filtered_groups(advantages: pa.Table, *, group_filter: str) -> dict[bytes, str]:
    """Return the groups to leave out, each with the reason as a line for people.

    `advantages` is the table of compute_advantages. Raises ValueError for an unknown filter. Here
    R are rows, and G the groups, in the order of their first rows.
    """
    check_group_filter(group_filter)
    if group_filter == "none":
        return {}
    groups = _groups(advantages, group_filter=group_filter)
    if not groups.left_out_G.any():
        return {}
    return _reasons(groups, advantages, group_filter=group_filter)


def check_group_filter(group_filter: str) -> None:
    """Raise ValueError for an unknown filter."""
    if group_filter not in GROUP_FILTERS:
        raise ValueError(
            f"group_filter={group_filter!r} is unknown; it is one of {', '.join(GROUP_FILTERS)}"
            f"{did_you_mean(group_filter, GROUP_FILTERS)}"
        )


def _groups(advantages: pa.Table, *, group_filter: str) -> _Groups:
    """Find the groups, and judge each by the filter."""
    coded = advantages["group_uid"].combine_chunks().dictionary_encode()
    group_R, n_groups = coded.indices.to_numpy(), len(coded.dictionary)
    has_advantage_R = advantages["advantage"].to_numpy() != 0.0
    if group_filter == "advantages":
        episodes_differ_R = has_advantage_R
    else:
        episodes_differ_R = advantages["episodes_differ"].to_numpy()
    if group_filter == "rewards":
        episodes_differ_R = episodes_differ_R | advantages["steps_differ"].to_numpy()
    is_first_step_R = advantages["step_index"].to_numpy() == 0
    n_trajectories_G = np.bincount(group_R[is_first_step_R], minlength=n_groups)
    return _Groups(
        uids_G=coded.dictionary,
        group_R=group_R,
        n_trajectories_G=n_trajectories_G,
        episodes_differ_G=_any(episodes_differ_R, group_R=group_R, n_groups=n_groups),
        has_advantage_G=_any(has_advantage_R, group_R=group_R, n_groups=n_groups),
        is_lone_G=(n_trajectories_G == 1) & (group_filter != "advantages"),
    )


def _reasons(groups: _Groups, advantages: pa.Table, *, group_filter: str) -> dict[bytes, str]:
    """Say of each left-out group why, by its uid."""
    group_R, n_groups = groups.group_R, len(groups.uids_G)
    first_row_G = np.unique(group_R, return_index=True)[1]
    advantage_R = advantages["advantage"].to_numpy()
    advantages_differ_R = advantage_R != advantage_R[first_row_G][group_R]
    advantages_differ_G = _any(advantages_differ_R, group_R=group_R, n_groups=n_groups)
    has_penalties_G = advantages["has_penalties"].to_numpy()[first_row_G]
    episode_return_G = advantages["episode_return"].to_numpy()[first_row_G]
    reasons = {}
    for g in np.flatnonzero(groups.left_out_G):
        if groups.is_lone_G[g]:
            reason = "nothing to compare it with"
        elif group_filter == "advantages" or groups.episodes_differ_G[g]:
            reason = "no advantage differs from 0"
        else:
            reason = f"all returned {episode_return_G[g]:g}"
            if group_filter == "rewards" and advantages_differ_G[g] and has_penalties_G[g]:
                reason += ", they differ in penalties only"
        n_trajectories = counted(groups.n_trajectories_G[g], "trajectory")
        reasons[groups.uids_G[g].as_py()] = f"{n_trajectories}, {reason}"
    return reasons


def _any(flag_R: np.ndarray, *, group_R: np.ndarray, n_groups: int) -> np.ndarray:
    """Return a bool per group: whether one of its rows has the flag."""
    return np.bincount(group_R[flag_R], minlength=n_groups) > 0

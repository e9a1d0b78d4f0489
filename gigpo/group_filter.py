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

from typing import Final

import numpy as np
import pyarrow as pa

from printable import counted, did_you_mean

GROUP_FILTERS: Final = ("advantages", "rewards", "returns", "none")


def filtered_groups(advantages: pa.Table, *, group_filter: str) -> dict[bytes, str]:
    """Return the groups to leave out, each with the reason as a line for people.

    `advantages` is the table of compute_advantages. Raises ValueError for an unknown filter. Here
    R are rows, and G the groups, in the order of their first rows.
    """
    check_group_filter(group_filter)
    if group_filter == "none":
        return {}
    coded = advantages["group_uid"].combine_chunks().dictionary_encode()
    uids_G, group_R = coded.dictionary, coded.indices.to_numpy()
    advantage_R = advantages["advantage"].to_numpy()
    has_advantage_G = _any(advantage_R != 0.0, group_R=group_R, n_groups=len(uids_G))
    differing_R = advantages["episodes_differ"].to_numpy()
    if group_filter == "rewards":
        differing_R = differing_R | advantages["steps_differ"].to_numpy()
    elif group_filter == "advantages":
        differing_R = advantage_R != 0.0
    has_difference_G = _any(differing_R, group_R=group_R, n_groups=len(uids_G))
    is_first_step_R = advantages["step_index"].to_numpy() == 0
    n_trajectories_G = np.bincount(group_R[is_first_step_R], minlength=len(uids_G))
    is_lone_G = (n_trajectories_G == 1) & (group_filter != "advantages")
    filtered = np.flatnonzero(~has_difference_G | ~has_advantage_G | is_lone_G)
    if not len(filtered):
        return {}
    first_row_G = np.unique(group_R, return_index=True)[1]
    differs_R = advantage_R != advantage_R[first_row_G][group_R]
    differs_G = _any(differs_R, group_R=group_R, n_groups=len(uids_G))
    penalties_only_G = differs_G & advantages["has_penalties"].to_numpy()[first_row_G]
    episode_return_G = advantages["episode_return"].to_numpy()[first_row_G]
    reasons = {}
    for g in filtered:
        if is_lone_G[g]:
            reason = "nothing to compare it with"
        elif group_filter == "advantages" or has_difference_G[g]:
            reason = "no advantage differs from 0"
        elif group_filter == "rewards" and penalties_only_G[g]:
            reason = f"all returned {episode_return_G[g]:g}, they differ in penalties only"
        else:
            reason = f"all returned {episode_return_G[g]:g}"
        reasons[uids_G[g].as_py()] = f"{counted(n_trajectories_G[g], 'trajectory')}, {reason}"
    return reasons


def check_group_filter(group_filter: str) -> None:
    """Raise ValueError for an unknown filter."""
    if group_filter not in GROUP_FILTERS:
        raise ValueError(
            f"group_filter={group_filter!r} is unknown; it is one of {', '.join(GROUP_FILTERS)}"
            f"{did_you_mean(group_filter, GROUP_FILTERS)}"
        )


def _any(flag_R: np.ndarray, *, group_R: np.ndarray, n_groups: int) -> np.ndarray:
    """Return a bool per group: whether one of its rows has the flag."""
    return np.bincount(group_R[flag_R], minlength=n_groups) > 0

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

    `advantages` is the table of compute_advantages. Raises ValueError for an unknown filter.
    """
    check_group_filter(group_filter)
    if group_filter == "none":
        return {}
    coded = advantages["group_uid"].combine_chunks().dictionary_encode()
    uids, group = coded.dictionary, coded.indices.to_numpy()
    advantage = advantages["advantage"].to_numpy()
    has_advantage = _any(advantage != 0.0, group=group, n_groups=len(uids))
    differing = advantages["episodes_differ"].to_numpy()
    if group_filter == "rewards":
        differing = differing | advantages["steps_differ"].to_numpy()
    elif group_filter == "advantages":
        differing = advantage != 0.0
    has_difference = _any(differing, group=group, n_groups=len(uids))
    is_first_step = advantages["step_index"].to_numpy() == 0
    n_trajectories = np.bincount(group[is_first_step], minlength=len(uids))
    lone = (n_trajectories == 1) & (group_filter != "advantages")
    filtered = np.flatnonzero(~has_difference | ~has_advantage | lone)
    if not len(filtered):
        return {}
    first = np.unique(group, return_index=True)[1]  # first row of each group
    differs = _any(advantage != advantage[first][group], group=group, n_groups=len(uids))
    penalties_only = differs & advantages["has_penalties"].to_numpy()[first]
    episode_return = advantages["episode_return"].to_numpy()[first]
    reasons = {}
    for number in filtered:
        if lone[number]:
            reason = "nothing to compare it with"
        elif group_filter == "advantages" or has_difference[number]:
            reason = "no advantage differs from 0"
        elif group_filter == "rewards" and penalties_only[number]:
            reason = f"all returned {episode_return[number]:g}, they differ in penalties only"
        else:
            reason = f"all returned {episode_return[number]:g}"
        reasons[uids[number].as_py()] = f"{counted(n_trajectories[number], 'trajectory')}, {reason}"
    return reasons


def check_group_filter(group_filter: str) -> None:
    """Raise ValueError for an unknown filter."""
    if group_filter not in GROUP_FILTERS:
        raise ValueError(
            f"group_filter={group_filter!r} is unknown; it is one of {', '.join(GROUP_FILTERS)}"
            f"{did_you_mean(group_filter, GROUP_FILTERS)}"
        )


def _any(flag: np.ndarray, *, group: np.ndarray, n_groups: int) -> np.ndarray:
    """Return a bool per group: whether one of its rows has the flag."""
    return np.bincount(group[flag], minlength=n_groups) > 0

"""Test whether dropped units differ from kept ones, by permutation of whole units within strata.

A unit was dropped or kept as one, so its trajectories are not independent: a group or, for extra
members, one trajectory. A stratum has units that could have changed roles: groups of about the same
policy versions or, for extra members, the members of one group. A stratum without dropped or
without kept units has no information and is left out.

Unit u of stratum S has n_u trajectories, and s_u is the sum of a measure over them.
n_d(S), n_k(S): trajectories of the dropped and of the kept units of S
N: sum of n_d(S) over S; X: permutations

    kept mean     m(S)  = sum of s_u over kept units / n_k(S)
    difference    delta = sum over dropped units of (s_u - n_u m(S)) / N
    variance      V     = [ sum over dropped units of (s_u - n_u (m(S) + delta))^2
                          + sum over kept units of (n_d(S) / n_k(S))^2 (s_u - n_u m(S))^2 ] / N^2
    statistic     t     = delta / sqrt(V)
    p-value       p     = (1 + number of permutations with |t| at least as large) / (1 + X)

V is the cluster-robust variance, with units as clusters: Liang & Zeger, "Longitudinal data analysis
using generalized linear models", Biometrika 1986. To permute t instead of delta makes the test
hold, at least approximately, where the two sides differ in more than their mean: Janssen,
"Studentized permutation tests", Stat. Probab. Lett. 1997; Chung & Romano, "Exact and asymptotically
robust permutation tests", Ann. Stat. 2013. Dropped units are often smaller than kept ones, as
unfinished groups are. The 1 in the p-value counts the observed one among the permutations: Phipson
& Smyth, "Permutation p-values should never be zero", 2010.

scipy.stats.permutation_test has no strata and takes one statistic at a time.

Arrays are float64, and int64 where they hold indices or counts. Their shapes: U units, E of them
dropped; S strata; M measures; Q tasks; X permutations, as many as are computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 2000  # the smallest p is 1 / 2001: enough for 20 comparisons
CELLS_AT_ONCE = 2**18  # permutations times units, or tasks if there are more; about 100 MB
# Relative difference below which two statistics are equal: permutations with equal sums may add
# them up in another order.
TIE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """U units, in any order."""

    stratum_U: np.ndarray  # int64, 0 and up
    dropped_U: np.ndarray  # bool
    sizes_U: np.ndarray  # float64, trajectories
    sums_UM: np.ndarray  # float64, over the unit's trajectories, of each of M measures
    task_U: np.ndarray  # int64, 0 and up

    def __post_init__(self) -> None:
        assert all(
            len(getattr(self, name)) == len(self.stratum_U)
            for name in ("dropped_U", "sizes_U", "sums_UM", "task_U")
        )

    def comparable(self) -> Units:
        """Return the units of strata with both roles, ordered by stratum, numbered from 0."""
        n_strata = int(self.stratum_U.max(initial=-1)) + 1
        n_dropped_S = np.bincount(self.stratum_U[self.dropped_U], minlength=n_strata)
        n_kept_S = np.bincount(self.stratum_U[~self.dropped_U], minlength=n_strata)
        has_both_S = (n_dropped_S > 0) & (n_kept_S > 0)
        rows = np.flatnonzero(has_both_S[self.stratum_U])  # of the units that stay
        rows = rows[np.argsort(self.stratum_U[rows], kind="stable")]
        return Units(
            stratum_U=np.unique(self.stratum_U[rows], return_inverse=True)[1],
            dropped_U=self.dropped_U[rows],
            sizes_U=self.sizes_U[rows],
            sums_UM=self.sums_UM[rows],
            task_U=self.task_U[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The mean of a measure over trajectories, or a task's share of the groups, on both sides."""

    dropped: float
    # mean or share of kept units in the same strata; a stratum weighs as much as among the dropped
    kept: float
    p: float  # two-sided, of this comparison alone


def differences_of_means(
    units: Units, *, seed: int, permutations: int = PERMUTATIONS
) -> list[Difference]:
    """Return the difference of each of the M measures, with the p-value of its t.

    `units` are comparable ones, with at least one stratum.
    """
    strata = _strata(units)
    terms = _terms(units, strata)  # [U, 2 + 3 M]
    all_sums = np.add.reduceat(terms, strata.starts_S)  # [S, 2 + 3 M]

    def differences_and_t(chosen_XE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # [X, S, 2 + 3 M]: the units of a stratum lie side by side in `chosen_XE`
        dropped_sums = np.add.reduceat(terms[chosen_XE], strata.dropped_starts_S, axis=1)
        return _differences_and_t(dropped_sums, all_sums)

    def t_XM(chosen_XE: np.ndarray) -> np.ndarray:
        return differences_and_t(chosen_XE)[1]

    (difference_M,), (t_M,) = differences_and_t(strata.dropped_E[None])
    p_M = _p_values(units, t_M, statistic=t_XM, seed=seed, permutations=permutations)
    n_dropped = units.sizes_U[strata.dropped_E].sum()
    dropped_M = units.sums_UM[strata.dropped_E].sum(0) / n_dropped
    rows = zip(dropped_M, dropped_M - difference_M, p_M, strict=True)
    return [
        Difference(dropped=float(dropped), kept=float(kept), p=float(p))
        for dropped, kept, p in rows
    ]


def difference_of_tasks(
    units: Units, *, seed: int, permutations: int = PERMUTATIONS
) -> tuple[int, Difference]:
    """Return the task whose share differs most, and the difference, with the p of all tasks.

    The statistic is Pearson's chi-square of the table of tasks by (dropped, kept). Of a stratum's
    units, every task is expected to lose the same share.
    """
    n_tasks = int(units.task_U.max()) + 1
    strata = _strata(units)
    dropped_share_S = strata.n_dropped_S / strata.n_units_S
    n_units_Q = np.bincount(units.task_U, minlength=n_tasks)
    expected_Q = np.bincount(units.task_U, dropped_share_S[units.stratum_U], minlength=n_tasks)
    # A unit more on one side is one less on the other: both cells of a task have the same square.
    with np.errstate(divide="ignore"):
        both_cells_Q = 1 / expected_Q + 1 / (n_units_Q - expected_Q)
    weight_Q = np.where(expected_Q > 0, both_cells_Q, 0.0)

    def chi_square_X1(chosen_XE: np.ndarray) -> np.ndarray:
        observed_XQ = _counts_of_tasks(units.task_U[chosen_XE], n_tasks=n_tasks)
        return ((observed_XQ - expected_Q) ** 2 @ weight_Q)[:, None]

    observed = chi_square_X1(strata.dropped_E[None])[0]  # [1]
    (p,) = _p_values(units, observed, statistic=chi_square_X1, seed=seed, permutations=permutations)
    dropped_Q, kept_Q = _shares_of_tasks(units, strata, n_tasks=n_tasks)
    task = int(np.argmax(np.abs(dropped_Q - kept_Q)))
    return task, Difference(dropped=float(dropped_Q[task]), kept=float(kept_Q[task]), p=float(p))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: Holm, Scand. J. Stat. 1979.

    Without any difference, the chance that one of them is this small is at most its value.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected.tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Strata:
    """The strata of units that are ordered by stratum. All arrays are int64."""

    starts_S: np.ndarray  # the first unit of each
    n_units_S: np.ndarray
    n_dropped_S: np.ndarray  # dropped units of each
    dropped_starts_S: np.ndarray  # the first dropped unit of each, as an index of `dropped_E`
    dropped_E: np.ndarray  # the indices of the dropped units, ordered by stratum


def _strata(units: Units) -> _Strata:
    n_dropped_S = np.bincount(units.stratum_U[units.dropped_U])
    return _Strata(
        starts_S=np.flatnonzero(np.diff(units.stratum_U, prepend=-1)),
        n_units_S=np.bincount(units.stratum_U),
        n_dropped_S=n_dropped_S,
        dropped_starts_S=np.cumsum(n_dropped_S) - n_dropped_S,
        dropped_E=np.flatnonzero(units.dropped_U),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """Sums over units, by stratum: all that t needs. They are [S, ...], or [X, S, ...] of draws."""

    n: np.ndarray  # of n_u; the last dimension is 1
    nn: np.ndarray  # of n_u^2; 1
    s: np.ndarray  # of s_u; M
    ss: np.ndarray  # of s_u^2; M
    sn: np.ndarray  # of s_u n_u; M

    @classmethod
    def of_columns(cls, columns: np.ndarray) -> _Sums:
        """Split sums of `_terms`, [..., 2 + 3 M], by what they are sums of."""
        n_measures = (columns.shape[-1] - 2) // 3
        ends = (1, 2, 2 + n_measures, 2 + 2 * n_measures)
        n, nn, s, ss, sn = np.split(columns, ends, axis=-1)
        return cls(n=n, nn=nn, s=s, ss=ss, sn=sn)

    def squared_residuals(self, level: np.ndarray) -> np.ndarray:
        """Return the sum of (s_u - n_u level)^2, [..., S, M], by its expansion.

        `level` has that shape, or one that broadcasts to it.
        """
        return self.ss - 2 * level * self.sn + level**2 * self.nn


def _terms(units: Units, strata: _Strata) -> np.ndarray:
    """Return n_u, n_u^2, s_u, s_u^2 and s_u n_u of every unit, side by side: [U, 2 + 3 M].

    s_u is centred by its stratum's mean, so that the expanded squares keep their digits. This
    changes neither the difference nor its variance.
    """
    n_U1 = units.sizes_U[:, None]
    total_SM = np.add.reduceat(units.sums_UM, strata.starts_S)
    n_trajectories_S = np.add.reduceat(units.sizes_U, strata.starts_S)
    mean_SM = total_SM / n_trajectories_S[:, None]
    s_UM = units.sums_UM - n_U1 * mean_SM[units.stratum_U]
    return np.concatenate([n_U1, n_U1**2, s_UM, s_UM**2, s_UM * n_U1], axis=1)


def _differences_and_t(
    dropped_sums: np.ndarray, all_sums: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return delta and t, [X, M] each, of X choices of dropped units.

    `dropped_sums` is [X, S, 2 + 3 M], `all_sums` [S, 2 + 3 M]; the columns are those of `_terms`.
    """
    dropped = _Sums.of_columns(dropped_sums)
    kept = _Sums.of_columns(all_sums - dropped_sums)
    both = _Sums.of_columns(all_sums)
    n_X1 = dropped.n.sum(1)
    kept_mean_XSM = kept.s / kept.n
    difference_XM = (dropped.s - dropped.n * kept_mean_XSM).sum(1) / n_X1
    # The level is the kept mean plus the one difference, and not the dropped units' own mean, so
    # that a stratum with one dropped unit has a residual too.
    level_XSM = kept_mean_XSM + difference_XM[:, None]
    of_dropped_XM = dropped.squared_residuals(level_XSM).sum(1)
    of_kept_XM = ((dropped.n / kept.n) ** 2 * kept.squared_residuals(kept_mean_XSM)).sum(1)
    # A few small dropped units may all be equal by chance (none won). So their part is at least
    # that of all units of the stratum per trajectory. This is conservative: members of a group are
    # correlated, so small groups vary less per trajectory.
    least_of_dropped_XM = (both.ss / both.n * dropped.n).sum(1)
    squares_XM = np.maximum(of_dropped_XM, least_of_dropped_XM) + of_kept_XM
    with np.errstate(invalid="ignore"):
        t_XM = np.where(squares_XM > 0, difference_XM * n_X1 / np.sqrt(squares_XM), 0.0)
    return difference_XM, t_XM


def _counts_of_tasks(task_XE: np.ndarray, *, n_tasks: int) -> np.ndarray:
    """Return how often each row has each task, int64 [X, Q]."""
    n = len(task_XE)
    cell_XE = task_XE + np.arange(n)[:, None] * n_tasks
    return np.bincount(cell_XE.ravel(), minlength=n * n_tasks).reshape(n, n_tasks)


def _shares_of_tasks(
    units: Units, strata: _Strata, *, n_tasks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each task's share of the dropped and of the kept units, float64 [Q] both.

    A stratum weighs as much among the kept units as among the dropped ones.
    """
    n_kept_S = strata.n_units_S - strata.n_dropped_S
    weight_S = strata.n_dropped_S / n_kept_S / strata.n_dropped_S.sum()
    kept_U = ~units.dropped_U
    n_dropped_Q = np.bincount(units.task_U[strata.dropped_E], minlength=n_tasks)
    kept_Q = np.bincount(units.task_U[kept_U], weight_S[units.stratum_U[kept_U]], minlength=n_tasks)
    return n_dropped_Q / len(strata.dropped_E), kept_Q


def _p_values(
    units: Units,
    observed: np.ndarray,
    *,
    statistic: Callable[[np.ndarray], np.ndarray],
    seed: int,
    permutations: int,
) -> np.ndarray:
    """Return the two-sided p-value of each column of the statistic, p of the module docstring.

    `statistic` takes indices [X, E] of chosen units and returns [X, columns]. `observed` and the
    result are [columns].
    """
    least = np.abs(observed) * (1 - TIE)
    n_as_large = sum(
        (np.abs(statistic(chosen)) >= least).sum(0)
        for chosen in _permuted(units, seed=seed, permutations=permutations)
    )
    return (1 + n_as_large) / (1 + permutations)


def _permuted(units: Units, *, seed: int, permutations: int) -> Iterator[np.ndarray]:
    """Yield int64 [X, E] indices of drawn units by stratum, as many of each as were dropped."""
    random = np.random.default_rng(seed)
    strata = _strata(units)
    n_units, n_tasks = len(units.stratum_U), int(units.task_U.max()) + 1
    # Each stratum is shuffled, and its first units are drawn.
    position_U = np.arange(n_units) - strata.starts_S[units.stratum_U]
    drawn_E = np.flatnonzero(position_U < strata.n_dropped_S[units.stratum_U])
    at_once = max(1, CELLS_AT_ONCE // max(n_units, n_tasks))
    for start in range(0, permutations, at_once):
        size = (min(at_once, permutations - start), n_units)
        # Strata are whole numbers in order, so sorting shuffles the units within each.
        shuffled_XU = np.argsort(units.stratum_U + random.random(size), axis=1)
        yield shuffled_XU[:, drawn_E]

"""Test whether dropped units differ from kept ones, by permutation of whole units within strata.

A unit was dropped or kept as one, so its trajectories are not independent: a group or, for extra
members, one trajectory. A stratum has units that could have changed roles: groups of about the same
policy versions or, for extra members, the members of one group. A stratum without dropped or
without kept units has no information and is left out.

scipy.stats.permutation_test has no strata and takes one statistic at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 2000  # the smallest p is 1 / 2001: enough for 20 comparisons
CELLS_AT_ONCE = 2**18  # permutations times units, or tasks if there are more; about 100 MB
# relative; permutations with equal sums may add them up in another order
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
        n_dropped = np.bincount(self.stratum_U[self.dropped_U], minlength=n_strata)
        n_kept = np.bincount(self.stratum_U[~self.dropped_U], minlength=n_strata)
        rows = np.flatnonzero(((n_dropped > 0) & (n_kept > 0))[self.stratum_U])
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
    """Return the difference of each of the M measures.

    `units` are comparable ones, with at least one stratum. The statistic is the difference over
    its cluster-robust standard error (Liang & Zeger 1986, with units as clusters). To permute this
    ratio makes the test hold, at least approximately, where the two sides differ in more than their
    mean (Janssen 1997; Chung & Romano 2013): dropped units are often smaller than kept ones, as
    unfinished groups are. A few small dropped units may all be equal by chance (none won), so their
    part of the variance is at least that of all units of the stratum per trajectory. This is
    conservative: members of a group are correlated, so small groups vary less per trajectory.
    """
    starts_S, n_dropped_S, chosen_D = _layout(units)
    n_U, dropped_starts_S = units.sizes_U, np.cumsum(n_dropped_S) - n_dropped_S
    mean_SM = np.add.reduceat(units.sums_UM, starts_S) / np.add.reduceat(n_U, starts_S)[:, None]
    # centred, so that the squares below keep their digits
    n_U1, s_UM = n_U[:, None], units.sums_UM - n_U[:, None] * mean_SM[units.stratum_U]
    # The parts of the statistic add up over units.
    parts_UC = np.concatenate([n_U1, n_U1**2, s_UM, s_UM**2, s_UM * n_U1], axis=1)
    total_SC = np.add.reduceat(parts_UC, starts_S)

    def differences_and_t(chosen_PD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        dropped_PSC = np.add.reduceat(parts_UC[chosen_PD], dropped_starts_S, axis=1)
        return _differences_and_t(dropped_PSC, total_SC)

    def t_PM(chosen_PD: np.ndarray) -> np.ndarray:
        return differences_and_t(chosen_PD)[1]

    (difference_M,), (t_M,) = differences_and_t(chosen_D[None])
    p_M = _p_values(units, t_M, statistic=t_PM, seed=seed, permutations=permutations)
    dropped_M = units.sums_UM[chosen_D].sum(0) / n_U[chosen_D].sum()
    rows = zip(dropped_M, dropped_M - difference_M, p_M, strict=True)
    return [
        Difference(dropped=float(dropped), kept=float(kept), p=float(p))
        for dropped, kept, p in rows
    ]


def difference_of_tasks(
    units: Units, *, seed: int, permutations: int = PERMUTATIONS
) -> tuple[int, Difference]:
    """Return the task whose share differs most, and the difference, with the p of all tasks.

    The statistic is the chi-square of units by task, dropped or kept, against the expectation of
    each stratum.
    """
    n_tasks = int(units.task_U.max()) + 1
    starts_S, n_dropped_S, chosen_D = _layout(units)
    n_S = np.diff([*starts_S, len(units.task_U)])
    expected_K = np.bincount(units.task_U, (n_dropped_S / n_S)[units.stratum_U], minlength=n_tasks)
    left_K = np.bincount(units.task_U, minlength=n_tasks) - expected_K
    with np.errstate(divide="ignore"):
        weight_K = np.where(expected_K > 0, 1 / expected_K + 1 / left_K, 0.0)

    def chi_square_P1(chosen_PD: np.ndarray) -> np.ndarray:
        n = len(chosen_PD)
        cells = units.task_U[chosen_PD] + np.arange(n)[:, None] * n_tasks
        observed_PK = np.bincount(cells.ravel(), minlength=n * n_tasks).reshape(n, n_tasks)
        return ((observed_PK - expected_K) ** 2 @ weight_K)[:, None]

    observed = chi_square_P1(chosen_D[None])[0]
    (p,) = _p_values(units, observed, statistic=chi_square_P1, seed=seed, permutations=permutations)
    kept_U = ~units.dropped_U
    kept_weight_S = n_dropped_S / (n_S - n_dropped_S) / n_dropped_S.sum()
    dropped_K = np.bincount(units.task_U[chosen_D], minlength=n_tasks) / len(chosen_D)
    kept_weight_U = kept_weight_S[units.stratum_U[kept_U]]
    kept_K = np.bincount(units.task_U[kept_U], kept_weight_U, minlength=n_tasks)
    task = int(np.argmax(np.abs(dropped_K - kept_K)))
    return task, Difference(dropped=float(dropped_K[task]), kept=float(kept_K[task]), p=float(p))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number, by Holm's method.

    Without any difference, the chance that one of them is this small is at most its value.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected.tolist()


def _differences_and_t(
    dropped_PSC: np.ndarray, total_SC: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the differences of means and their t, [P, M] each, of P choices of dropped units.

    The C columns are sums over units of their size n, n² and, for each measure, its s, s² and s·n.
    """
    dn, dnn, ds, dss, dsn = _split(dropped_PSC)
    kn, knn, ks, kss, ksn = _split(total_SC - dropped_PSC)
    tn, _, _, tss, _ = _split(total_SC)
    n = dn.sum(1)
    kept_mean = ks / kn
    difference = (ds - dn * kept_mean).sum(1) / n
    # Residuals of dropped units are from their stratum's kept mean plus the one difference, which
    # also works for a stratum with one dropped unit.
    level = kept_mean + difference[:, None]
    of_dropped = dss - 2 * level * dsn + level**2 * dnn
    of_kept = (dn / kn) ** 2 * (kss - 2 * kept_mean * ksn + kept_mean**2 * knn)
    squares = np.maximum(of_dropped.sum(1), (tss / tn * dn).sum(1)) + of_kept.sum(1)
    with np.errstate(invalid="ignore"):
        t = np.where(squares > 0, difference * n / np.sqrt(squares), 0.0)
    return difference, t


def _split(columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return n, n², s, s² and s·n; n and n² have one column, the others one per measure."""
    n_measures = (columns.shape[-1] - 2) // 3
    return tuple(np.split(columns, (1, 2, 2 + n_measures, 2 + 2 * n_measures), axis=-1))


def _layout(units: Units) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first unit of each stratum, its number of dropped units, and which those are."""
    starts_S = np.flatnonzero(np.diff(units.stratum_U, prepend=-1))
    return starts_S, np.bincount(units.stratum_U[units.dropped_U]), np.flatnonzero(units.dropped_U)


def _p_values(
    units: Units,
    observed: np.ndarray,
    *,
    statistic: Callable[[np.ndarray], np.ndarray],
    seed: int,
    permutations: int,
) -> np.ndarray:
    """Return the two-sided p-value of each column of the statistic."""
    least = np.abs(observed) * (1 - TIE)
    n_as_large = sum(
        (np.abs(statistic(chosen)) >= least).sum(0)
        for chosen in _permuted(units, seed=seed, permutations=permutations)
    )
    return (1 + n_as_large) / (1 + permutations)


def _permuted(units: Units, *, seed: int, permutations: int) -> Iterator[np.ndarray]:
    """Yield [P, D] indices of drawn units, ordered by stratum, as many per stratum as dropped."""
    random = np.random.default_rng(seed)
    starts_S, n_dropped_S, _ = _layout(units)
    rank_U = np.arange(len(units.stratum_U)) - starts_S[units.stratum_U]
    drawn_D = np.flatnonzero(rank_U < n_dropped_S[units.stratum_U])
    at_once = max(1, CELLS_AT_ONCE // max(len(units.stratum_U), int(units.task_U.max()) + 1))
    for start in range(0, permutations, at_once):
        size = (min(at_once, permutations - start), len(units.stratum_U))
        # Strata are whole numbers in order, so sorting shuffles the units within each.
        shuffled_PU = np.argsort(units.stratum_U + random.random(size), axis=1)
        yield shuffled_PU[:, drawn_D]

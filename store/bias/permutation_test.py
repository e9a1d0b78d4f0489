"""Whether what was dropped differs from what was kept beyond chance: permutations of whole units
within strata.

Unit: what was dropped or kept as one, so that its trajectories are not independent: a group; of
extra, one trajectory. Stratum: units that could have changed places: groups of about the same
policy versions; of extra, the members of one group. A stratum without dropped or without kept
units says nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PERMUTATIONS = 2000  # the smallest p is 1 / 2001: 20 comparisons can still be told from chance
# permutations times dropped units, or times tasks if there are more of them; about 100 MB
CELLS_AT_ONCE = 2**18
TIE = 1e-9  # relative; permutations that do the same may add up in another order


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
        """Those of strata that have both, ordered by stratum, strata numbered from 0."""
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
    """Of a measure's mean over trajectories, or of a task's share of the groups."""

    dropped: float
    # of those kept of the same strata, each stratum with the weight it has among the dropped
    kept: float
    p: float  # two-sided, of this comparison alone


def differences_of_means(
    units: Units, *, seed: int, permutations: int = PERMUTATIONS
) -> list[Difference]:
    """One for each of the M measures. `units` are comparable ones, at least one stratum.

    The statistic is the difference over its cluster-robust standard error (Liang & Zeger 1986, with
    units as clusters). Whole units are permuted, and to permute a difference over its error is what
    makes the test hold, at least approximately, where the units of the two sides are unlike in more
    than their mean (Janssen 1997; Chung & Romano 2013): dropped units are often smaller than kept
    ones, as the unfinished groups are. Where few small units are dropped they may all be alike by
    chance (none won), so their part of the variance is at least what all units of the stratum have
    per trajectory. That errs on the safe side: members of a group have something in common, so that
    per trajectory small groups vary less than large ones.
    """
    n_U = units.sizes_U
    starts_S, n_dropped_S, chosen_D = _layout(units)
    mean_SM = np.add.reduceat(units.sums_UM, starts_S) / np.add.reduceat(n_U, starts_S)[:, None]
    # else the squares below lose digits
    centred_UM = units.sums_UM - n_U[:, None] * mean_SM[units.stratum_U]
    statistics = _Statistics.of(
        n_U, centred_UM, starts_S=starts_S, dropped_starts_S=np.cumsum(n_dropped_S) - n_dropped_S
    )
    (difference_M,), (t_M,) = statistics.at(chosen_D[None])
    more_M = _exceeding(
        units,
        t_M,
        lambda chosen_PD: statistics.at(chosen_PD)[1],
        seed=seed,
        permutations=permutations,
    )
    dropped_M = units.sums_UM[chosen_D].sum(0) / n_U[chosen_D].sum()
    rows = zip(dropped_M, dropped_M - difference_M, (1 + more_M) / (1 + permutations), strict=True)
    return [
        Difference(dropped=float(dropped), kept=float(kept), p=float(p))
        for dropped, kept, p in rows
    ]


def difference_of_tasks(
    units: Units, *, seed: int, permutations: int = PERMUTATIONS
) -> tuple[int, Difference]:
    """The task whose share of the dropped units is furthest from what it is of the kept ones, and
    the p-value of the whole mix: chi-square of units by task, dropped or kept, against what each
    stratum would give.
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

    (more,) = _exceeding(
        units, chi_square_P1(chosen_D[None])[0], chi_square_P1, seed=seed, permutations=permutations
    )
    kept_U = ~units.dropped_U
    kept_weight_S = n_dropped_S / (n_S - n_dropped_S) / n_dropped_S.sum()
    dropped_K = np.bincount(units.task_U[chosen_D], minlength=n_tasks) / len(chosen_D)
    kept_K = np.bincount(
        units.task_U[kept_U], kept_weight_S[units.stratum_U[kept_U]], minlength=n_tasks
    )
    task = int(np.argmax(np.abs(dropped_K - kept_K)))
    p = float((1 + more) / (1 + permutations))
    return task, Difference(dropped=float(dropped_K[task]), kept=float(kept_K[task]), p=p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for their number: the chance that any of them is this small or smaller is at most
    this.
    """
    order = np.argsort(p_values, kind="stable")
    scaled = np.asarray(p_values)[order] * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return corrected.tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Statistics:
    """Sums over any choice of units are sums of these columns: size n, n², and of each measure the
    sum s, s² and s·n.
    """

    columns_UC: np.ndarray
    total_SC: np.ndarray
    dropped_starts_S: np.ndarray

    @classmethod
    def of(
        cls,
        n_U: np.ndarray,
        s_UM: np.ndarray,
        *,
        starts_S: np.ndarray,
        dropped_starts_S: np.ndarray,
    ) -> _Statistics:
        n_U1 = n_U[:, None]
        columns = np.concatenate([n_U1, n_U1**2, s_UM, s_UM**2, s_UM * n_U1], axis=1)
        return cls(
            columns_UC=columns,
            total_SC=np.add.reduceat(columns, starts_S),
            dropped_starts_S=dropped_starts_S,
        )

    def at(self, chosen_PD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The difference of means and its t, [P, M] each, if `chosen_PD`, ordered by stratum, were
        the dropped units.
        """
        dropped = np.add.reduceat(self.columns_UC[chosen_PD], self.dropped_starts_S, axis=1)
        dn, dnn, ds, dss, dsn = _split(dropped)
        kn, knn, ks, kss, ksn = _split(self.total_SC - dropped)
        n = dn.sum(1)
        kept_mean = ks / kn
        difference = (ds - dn * kept_mean).sum(1) / n
        # Residuals of the dropped are from their stratum's kept mean plus the one difference: also
        # where a stratum has one.
        level = kept_mean + difference[:, None]
        of_dropped = dss - 2 * level * dsn + level**2 * dnn
        of_kept = (dn / kn) ** 2 * (kss - 2 * kept_mean * ksn + kept_mean**2 * knn)
        tn, _, _, tss, _ = _split(self.total_SC)
        squares = np.maximum(of_dropped.sum(1), (tss / tn * dn).sum(1)) + of_kept.sum(1)
        with np.errstate(invalid="ignore"):
            t = np.where(squares > 0, difference * n / np.sqrt(squares), 0.0)
        return difference, t


def _split(columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """n, n², s, s² and s·n; the first two with one measure."""
    n_measures = (columns.shape[-1] - 2) // 3
    return tuple(np.split(columns, (1, 2, 2 + n_measures, 2 + 2 * n_measures), axis=-1))


def _layout(units: Units) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each stratum starts, how many of it are dropped, and which units are."""
    starts_S = np.flatnonzero(np.diff(units.stratum_U, prepend=-1))
    return starts_S, np.bincount(units.stratum_U[units.dropped_U]), np.flatnonzero(units.dropped_U)


def _exceeding(
    units: Units,
    observed: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    *,
    seed: int,
    permutations: int,
) -> np.ndarray:
    """How many permutations have a statistic as far from 0 as `observed` or further, for each of
    its columns.
    """
    least = np.abs(observed) * (1 - TIE)
    return sum(
        (np.abs(statistic(chosen)) >= least).sum(0)
        for chosen in _permuted(units, seed=seed, permutations=permutations)
    )


def _permuted(units: Units, *, seed: int, permutations: int) -> Iterator[np.ndarray]:
    """As many dropped units in each stratum as there are, drawn anew: [P, D] indices, ordered by
    stratum.
    """
    random = np.random.default_rng(seed)
    starts_S, n_dropped_S, chosen_D = _layout(units)
    n_S = np.diff([*starts_S, len(units.stratum_U)])
    draw = _by_stratum if len(n_S) < n_dropped_S.max() else _by_rank
    draws = draw(random, starts_S=starts_S, n_S=n_S, n_dropped_S=n_dropped_S)
    at_once = max(1, CELLS_AT_ONCE // max(len(chosen_D), int(units.task_U.max()) + 1))
    for start in range(0, permutations, at_once):
        yield np.stack([next(draws) for _ in range(min(at_once, permutations - start))])


def _by_stratum(
    random: np.random.Generator, *, starts_S: np.ndarray, n_S: np.ndarray, n_dropped_S: np.ndarray
) -> Iterator[np.ndarray]:
    """For few large strata, such as blocks of versions: one after the other."""
    strata = list(zip(starts_S.tolist(), n_S.tolist(), n_dropped_S.tolist(), strict=True))
    while True:
        yield np.concatenate(
            [start + random.choice(n, k, replace=False, shuffle=False) for start, n, k in strata]
        )


def _by_rank(
    random: np.random.Generator, *, starts_S: np.ndarray, n_S: np.ndarray, n_dropped_S: np.ndarray
) -> Iterator[np.ndarray]:
    """For many small strata, such as groups with extra: the first of every stratum, then the
    second, as in a shuffle.
    """
    place_U = np.arange(n_S.sum())  # stays shuffled: a shuffle of any order is one
    rank_U = place_U - np.repeat(starts_S, n_S)
    drawn_D = np.flatnonzero(rank_U < np.repeat(n_dropped_S, n_S))
    while True:
        for rank in range(n_dropped_S.max()):
            has_S = n_dropped_S > rank
            at = starts_S[has_S] + rank
            other = at + random.integers(0, n_S[has_S] - rank)
            place_U[at], place_U[other] = place_U[other], place_U[at]
        yield place_U[drawn_D]

"""Compare dropped trajectories with trained ones: length, reward and task, by permutation test.

Dropped are the trajectories of training groups that are stale, filtered or abandoned now, and
extra trajectories: extra members that a group did not need. Groups that may still be played or
trained on, held-out groups and imported ones are neither dropped nor trained.

Unfinished training episodes, one kind for each reason, are compared with the trained members of
their own groups. They are measured up to the moment they were given up, so their whole lengths
are at least that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from analysis.bias.permutation_test import (
    Difference,
    Units,
    difference_of_tasks,
    differences_of_means,
    holm,
)
from store import (
    EXTRA_OF,
    WHY_UNFINISHED,
    Reader,
    StoreError,
    open_run,
    trajectories_where,
)

QUERY_TIMEOUT_S = 3600.0  # of one query; a large run takes minutes
SEED = 0  # of the permutations, so that a report is the same again
DROPPED_STATES = ("stale", "filtered", "abandoned")
EXTRA = "extra"
MEASURES = ("n_steps", "n_response_tokens", "episode_return", "won")
TASKS = "tasks"
# Kinds that are compared with members of their own groups, so with the same task.
WITHIN_GROUP = (EXTRA, *WHY_UNFINISHED)
# Measures in which a kind differs by definition, so there is nothing to test.
BY_DEFINITION = {"filtered": ("episode_return", "won"), **dict.fromkeys(WITHIN_GROUP, (TASKS,))}
# least groups on each side; with fewer, permutations could not tell a difference from chance
MIN_GROUPS = 5
# blocks of policy versions: most of them, and least trained groups in each
MAX_BLOCKS, GROUPS_PER_BLOCK = 10, 10

SUMS = "count(*)::DOUBLE AS n, " + ", ".join(
    f"sum({measure}::DOUBLE) AS {measure}" for measure in MEASURES
)
VALUES = ", ".join(f"{measure}::DOUBLE AS {measure}" for measure in MEASURES)
GROUPS = """SELECT state, any_value(task_id) AS task, min(version_min) AS version, {sums}
FROM {played}
WHERE split = 'train' AND state IN ('trained', 'stale', 'filtered', 'abandoned')
GROUP BY group_uid, state ORDER BY group_uid"""
# Every extra trajectory, and the trained members of their groups.
MEMBERS = f"""WITH played AS {{played}},
extra AS (
    SELECT
        group_uid,
        regexp_extract(reason, '^imported from {EXTRA_OF} ([0-9a-f-]+)$', 1) AS of_group
    FROM groups WHERE split = 'imported' AND reason LIKE 'imported from {EXTRA_OF} %'),
members AS (
    SELECT of_group, true AS dropped, p.* FROM played AS p JOIN extra USING (group_uid)
    UNION ALL BY NAME
    SELECT group_uid::VARCHAR AS of_group, false AS dropped, * FROM played
    WHERE split = 'train' AND state = 'trained'
        AND group_uid::VARCHAR IN (SELECT of_group FROM extra))
SELECT dense_rank() OVER (ORDER BY of_group) - 1 AS of_group, dropped, task_id AS task,
    1::DOUBLE AS n, {{values}}
FROM members ORDER BY of_group, dropped, traj_uid"""
# Unfinished training episodes, and the trained members of their groups, whose `why` is NULL.
UNFINISHED = """WITH played AS {played},
given_up AS (
    SELECT why, group_uid, task_id AS task, n_steps, n_response_tokens FROM unfinished
    WHERE split = 'train' AND n_steps IS NOT NULL
        AND ({all_groups} OR group_uid IN (SELECT group_uid FROM played))),
members AS (
    SELECT NULL AS why, group_uid, task_id AS task, n_steps, n_response_tokens FROM played
    WHERE split = 'train' AND state = 'trained'
        AND group_uid IN (SELECT group_uid FROM given_up))
SELECT why, group_uid::VARCHAR AS of_group, task, 1::DOUBLE AS n, n_steps::DOUBLE AS n_steps,
    n_response_tokens::DOUBLE AS n_response_tokens
FROM (FROM given_up UNION ALL BY NAME FROM members) ORDER BY ALL"""
N_GROUPS = "SELECT state, count(*) AS n FROM groups WHERE split = 'train' GROUP BY 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """The trajectories that were dropped for one reason, or the trained ones."""

    name: str
    n_groups: int  # with a trajectory in the run
    n_trajectories: int
    # means per trajectory, in the order of MEASURES; unfinished episodes have the first two; ()
    # without trajectories
    means: tuple[float, ...]
    n_tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A measure of one kind against trained trajectories of about the same policy versions.

    Extra and unfinished episodes are compared with members of their own groups.
    """

    kind: str
    measure: str  # of MEASURES, or TASKS: shares of the most different task
    difference: Difference
    task: str | None = None
    # by Holm, for the number of comparisons of the report; None for a difference by definition
    p_corrected: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasReport:
    lsn: int | None
    kinds: tuple[Kind, ...]  # the trained ones first
    comparisons: tuple[Comparison, ...]
    not_compared: dict[str, str]  # kind → reason
    n_unseen: dict[str, int]  # kind → its groups without a trajectory in the run


def bias_report(run: Path, *, as_of: int | None, where: str | None) -> BiasReport:
    """Compare the trajectories where `where` holds, now or at the lsn `as_of`.

    The run may be training. Raises StoreError for an invalid condition, and for files that cannot
    be read, because missing trajectories could be the difference.
    """
    played = trajectories_where(where)
    with open_run(run, as_of=as_of, warn=False) as reader:
        if reader.left_out:
            raise StoreError(f"{reader.left_out}; what is missing could be the difference")
        return _report(reader, played, all_groups=where is None)


def _report(reader: Reader, played: str, *, all_groups: bool) -> BiasReport:
    groups = reader.sql(GROUPS.format(played=played, sums=SUMS), timeout_s=QUERY_TIMEOUT_S)
    members = reader.sql(MEMBERS.format(played=played, values=VALUES), timeout_s=QUERY_TIMEOUT_S)
    state_U = np.asarray(groups["state"].to_pylist(), dtype=object)
    kinds = [_kind("trained", groups.filter(pa.array(state_U == "trained")))]
    comparisons: list[Comparison] = []
    not_compared = {}
    selected = {}  # kind → its tasks and the units to compare
    for name in DROPPED_STATES:
        kinds.append(_kind(name, groups.filter(pa.array(state_U == name))))
        selected[name] = _groups_as_units(groups, state_U, dropped=name)
    unfinished = _unfinished(reader, played, all_groups=all_groups)
    for name, rows in {EXTRA: members, **unfinished}.items():
        kinds.append(_kind(name, rows.filter(rows["dropped"])))
        selected[name] = _members_as_units(rows)
    for kind in kinds[1:]:
        name, (tasks, all_units) = kind.name, selected[kind.name]
        units = all_units.comparable()
        if (why := _too_few(units, kind)) is None:
            comparisons += _compare(name, units, tasks=tasks)
        else:
            not_compared[name] = why
    totals = {row["state"]: row["n"] for row in reader.sql(N_GROUPS).to_pylist()}
    counted = kinds[: 1 + len(DROPPED_STATES)] if all_groups else []
    unseen = {kind.name: totals.get(kind.name, 0) - kind.n_groups for kind in counted}
    return BiasReport(
        lsn=reader.lsn,
        kinds=tuple(kinds),
        comparisons=tuple(_corrected(comparisons)),
        not_compared=not_compared,
        n_unseen={name: n for name, n in unseen.items() if n},
    )


def _unfinished(reader: Reader, played: str, *, all_groups: bool) -> dict[str, pa.Table]:
    """Return the unfinished episodes by reason, with the trained members of their groups.

    The column `dropped` tells them apart.
    """
    query = UNFINISHED.format(played=played, all_groups=str(all_groups).lower())
    rows = reader.sql(query, timeout_s=QUERY_TIMEOUT_S)
    why_U = np.asarray(rows["why"].to_pylist(), dtype=object)
    is_member_U = rows["why"].is_null().to_numpy()
    group_U = np.asarray(rows["of_group"].combine_chunks().dictionary_encode().indices)
    rows = rows.drop_columns("of_group").append_column("of_group", pa.array(group_U, pa.int64()))
    found = {}
    for why in WHY_UNFINISHED:
        dropped_U = why_U == why
        if dropped_U.any():
            members_U = is_member_U & np.isin(group_U, group_U[dropped_U])
            marked = rows.append_column("dropped", pa.array(dropped_U))
            found[why] = marked.filter(pa.array(dropped_U | members_U))
    return found


def _measures(rows: pa.Table) -> list[str]:
    """Return the MEASURES of these rows: an unfinished episode has no return."""
    return [measure for measure in MEASURES if measure in rows.column_names]


def _kind(name: str, rows: pa.Table) -> Kind:
    """Summarise rows: one per group, per extra trajectory, or per unfinished episode."""
    n = int(np.sum(rows["n"].to_numpy()))
    measures = _measures(rows) if n else []
    n_groups = len(rows["of_group"].unique()) if "of_group" in rows.column_names else len(rows)
    return Kind(
        name=name,
        n_groups=n_groups,
        n_trajectories=n,
        means=tuple(float(np.sum(rows[measure].to_numpy()) / n) for measure in measures),
        n_tasks=len(rows["task"].unique()),
    )


def _groups_as_units(
    groups: pa.Table, state_U: np.ndarray, *, dropped: str
) -> tuple[list[str], Units]:
    """Return the groups of a state and trained ones, in strata of about the same policy versions.

    Without strata the test would find what the policy learnt meanwhile.
    """
    trained_U = state_U == "trained"
    version_U = groups["version"].to_numpy()
    n_blocks = max(1, min(MAX_BLOCKS, int(trained_U.sum()) // GROUPS_PER_BLOCK))
    ordered = np.sort(version_U[trained_U])
    edges = np.unique(ordered[np.arange(1, n_blocks) * len(ordered) // n_blocks])
    rows_U = np.flatnonzero(trained_U | (state_U == dropped))
    stratum_U = np.searchsorted(edges, version_U[rows_U], side="right")
    dropped_U = state_U[rows_U] == dropped
    return _units(groups.take(pa.array(rows_U)), stratum_U=stratum_U, dropped_U=dropped_U)


def _members_as_units(members: pa.Table) -> tuple[list[str], Units]:
    """Return extra or unfinished episodes and trained members, in one stratum per group."""
    dropped_U = np.asarray(members["dropped"].to_pylist(), bool)
    return _units(members, stratum_U=members["of_group"].to_numpy(), dropped_U=dropped_U)


def _units(
    rows: pa.Table, *, stratum_U: np.ndarray, dropped_U: np.ndarray
) -> tuple[list[str], Units]:
    """Return the tasks that `task_U` has the indices of, and the units."""
    coded = rows["task"].combine_chunks().dictionary_encode()
    units = Units(
        stratum_U=np.asarray(stratum_U, np.int64),
        dropped_U=dropped_U,
        sizes_U=rows["n"].to_numpy(),
        sums_UM=np.stack([rows[measure].to_numpy() for measure in _measures(rows)], axis=1),
        task_U=coded.indices.to_numpy().astype(np.int64),
    )
    return coded.dictionary.to_pylist(), units


def _too_few(units: Units, kind: Kind) -> str | None:
    if not kind.n_trajectories:
        return "none"
    n_dropped, n_kept = int(units.dropped_U.sum()), int((~units.dropped_U).sum())
    counts, least = f"{n_dropped} groups beside {n_kept} trained ones", f"{MIN_GROUPS} of each"
    if kind.name in WITHIN_GROUP:
        n_dropped = n_kept = int(units.stratum_U.max(initial=-1)) + 1
        what = EXTRA if kind.name == EXTRA else f"{kind.name} episodes"
        counts, least = f"{n_dropped} trained groups have {what}", str(MIN_GROUPS)
    if min(n_dropped, n_kept) >= MIN_GROUPS:
        return None
    return f"{counts}, too few to compare; it takes {least}"


def _compare(kind: str, units: Units, *, tasks: Sequence[str]) -> list[Comparison]:
    measures = MEASURES[: units.sums_UM.shape[1]]
    compared = zip(measures, differences_of_means(units, seed=SEED), strict=True)
    rows = [
        Comparison(kind=kind, measure=name, difference=difference) for name, difference in compared
    ]
    if TASKS not in BY_DEFINITION.get(kind, ()):
        task, difference = difference_of_tasks(units, seed=SEED)
        rows.append(Comparison(kind=kind, measure=TASKS, difference=difference, task=tasks[task]))
    return rows


def _corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with their p-values corrected for their number."""
    tested = [
        index
        for index, row in enumerate(comparisons)
        if row.measure not in BY_DEFINITION.get(row.kind, ())
    ]
    corrected = holm([comparisons[index].difference.p for index in tested])
    found = list(comparisons)
    for index, p in zip(tested, corrected, strict=True):
        found[index] = replace(found[index], p_corrected=p)
    return found

"""Advantages of a table of steps: the macro of `macro.py`, run on integers instead of uids.

Python and a bare DuckDB shell run the same text, so an audit of an old run and a live batch cannot
disagree.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gigpo.input_columns import KEYS, TYPES, Columns, columns_of, table_of
from gigpo.settings import PUBLISHED_SETTINGS, WHITENED, AdvantageSettings
from gigpo.similarity import similarity_keys
from gigpo.sql_macro import advantages_macro

_ALWAYS: Final = ("group_uid", "traj_uid", "step_index", "reward", "is_action_valid", "state_hash")
# similarity.py's method, by anchor
_SIMILARITY: Final = {"similar": "linked", "similar_greedy": "greedy"}
# Computed at once. Smaller parts pay for more calls, larger ones for a processor's cache; of 2^14,
# 2^15, ... 2^20 this was the fastest at 655,360 steps: 0.31 s of a core, 0.34 at 2^16, 0.45 at
# 2^18.
_PART_STEPS: Final = 2**17
_RESULTS: Final = {
    "step_return": np.float64,
    "episode_advantage": np.float64,
    "step_advantage": np.float64,
    "advantage": np.float64,
    "anchor_size": np.int64,
    "episode_return": np.float64,
    "episodes_differ": np.bool_,
    "steps_differ": np.bool_,
    "has_penalties": np.bool_,
}


def compute_advantages(steps: Columns, settings: AdvantageSettings) -> pa.Table:
    """Advantage of every step (eqs. 3 and 5-8), in the input's row order.

    In, an Arrow table, or what pa.table() makes one of (a data frame of pandas or polars, a
    dictionary of columns), one row per step, whole trajectories in any order; other columns are
    ignored:
      group_uid, traj_uid; step_index int; reward float; is_action_valid bool; state_hash or null. Where settings ask for
      them: version_min int (anchor_versions 'window'), weight float from 1e-100 to 1e100 ('weighted'), won bool
      ('graphgpo'), admissible_actions list of text (anchor 'state_and_actions'), anchor_key or null (anchor 'anchor_key'),
      anchor_text or null (anchors 'similar', 'similar_greedy', which read no anchor_key). Uids, hashes and keys of any one
      type that has one value a row; NaN in them is null, -0.0 is 0.0. A trajectory is won if any of its rows says so.
    Out: group_uid, traj_uid, step_index as they came; step_return (R_t less the penalty),
    episode_advantage,
      step_advantage, advantage (float64); anchor_size (int64, steps in the anchor group); and for filtered_groups
      episode_return (float64; of the trajectory, undiscounted, no penalty), episodes_differ (its group's, beyond rounding),
      steps_differ (returns of its anchor group, no penalty), has_penalties (some row of its group), all bool.

    A column that is missing or of another type raises ValueError with its name; a trajectory whose
    step_index is not 0..T-1, or whose rewards are not finite or add up to sizes above 1e100, with
    its uid; what is no table, or no AdvantageSettings, TypeError. The same rows in the same order
    give the same bits; in another order, or beside other groups, the same numbers to rounding (but
    anchor 'similar_greedy', and estimators that whiten over the batch).
    """
    _check_settings(settings)
    table = _with_similarity_keys(table_of(steps), settings)
    narrow = columns_of(table, _columns(settings))
    results: dict[str, np.ndarray] = {
        name: np.empty(len(table), dtype) for name, dtype in _RESULTS.items()
    }
    # That no step has a key is refused: the SQL has to see all of them.
    for rows, part in _parts(narrow, whole=_has_no_key(narrow) or settings.estimator in WHITENED):
        try:
            places, computed = _computed(part, settings)
        except duckdb.InvalidInputException as error:
            raise ValueError(_with_uids(narrow.take(rows), settings) or _message(error)) from error
        places = rows[places]
        for name, values in results.items():
            values[places] = computed[name]
    return pa.table(
        {name: table[name] for name in ("group_uid", "traj_uid", "step_index")} | results
    )


def prepare_advantages(settings: AdvantageSettings) -> None:
    """Plans the SQL for these settings, so that the first `compute_advantages` is as fast as all
    others: 0.1 s once.
    """
    _check_settings(settings)
    _prepared(_of_the_sql(settings))


def _check_settings(settings: object) -> None:
    if not isinstance(settings, AdvantageSettings):
        raise TypeError(
            "settings must be an AdvantageSettings, such as PUBLISHED_SETTINGS, and not of type "
            f"{type(settings).__name__}"
        )


def _with_similarity_keys(steps: pa.Table, settings: AdvantageSettings) -> pa.Table:
    """`steps`; where anchor_text is what is compared, with its keys as anchor_key, in place of any
    that was there.
    """
    if settings.anchor not in _SIMILARITY:
        return steps
    keys = similarity_keys(
        steps, threshold=settings.similarity, method=_SIMILARITY[settings.anchor]
    )
    if keys.null_count == len(keys) > 0:
        raise ValueError(
            f"anchor {settings.anchor} compares anchor_text, and every step's is NULL; fill it in, "
            "or take anchor='state'"
        )
    return steps.select(
        [name for name in steps.column_names if name != "anchor_key"]
    ).append_column("anchor_key", keys)


def _columns(settings: AdvantageSettings) -> tuple[str, ...]:
    needed = {
        "version_min": settings.anchor_versions == "window",
        "weight": settings.anchor_versions == "weighted",
        "won": settings.estimator == "graphgpo",
        "anchor_key": settings.anchor == "anchor_key" or settings.anchor in _SIMILARITY,
        "admissible_actions": settings.anchor == "state_and_actions",
    }
    return (*_ALWAYS, *(name for name, is_needed in needed.items() if is_needed))


def _codes(column: pa.ChunkedArray) -> pa.Array:
    """Equal values as equal integers, in the order of first appearance; null stays null. An integer
    is compared and hashed several times as fast as a uid, and every step is, several times.
    """
    return column.combine_chunks().dictionary_encode().indices


def _parts(narrow: pa.Table, *, whole: bool) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Whole groups, about _PART_STEPS rows at a time: which rows, and the rows. Groups have nothing
    to do with each other, and hash tables that fit into a processor's cache make time linear in the
    steps: 6.4 million take 4 s instead of 10.

    A part without a single anchor key, which the SQL would refuse, borrows a group that has one;
    its rows then come twice.
    """
    everything = np.arange(len(narrow))
    if whole or len(narrow) <= _PART_STEPS:
        yield everything, narrow
        return
    coded = {name: _codes(narrow[name]) for name in ("group_uid", "traj_uid")}
    group, trajectory = (codes.fill_null(-1).to_numpy() for codes in coded.values())
    group_of = np.empty(len(narrow) + 1, group.dtype)  # of each trajectory; one more for null
    group_of[trajectory] = group
    # A trajectory in two groups is refused by the SQL, which has to see both.
    if not np.array_equal(group_of[trajectory], group):
        yield everything, narrow
        return
    order = everything
    short = pa.table(
        coded | {name: narrow[name] for name in narrow.column_names if name not in coded}
    )
    if np.any(group[1:] < group[:-1]):
        order = np.argsort(group, kind="stable")
        short = short.take(order)
    ends = np.cumsum(np.bincount(group + 1))
    start = 0
    while start < len(narrow):
        end = int(ends[np.searchsorted(ends, min(start + _PART_STEPS, len(narrow)))])
        places, part = order[start:end], short.slice(start, end - start)
        if _has_no_key(part):
            keyed = group[pc.index(narrow["anchor_key"].is_valid(), True).as_py()]
            borrowed = slice(int(ends[keyed]), int(ends[keyed + 1]))
            places = np.concatenate([places, order[borrowed]])
            part = pa.concat_tables([part, short[borrowed]])
        yield places, part
        start = end


def _has_no_key(steps: pa.Table) -> bool:
    """Whether anchor keys are asked for and no step has one."""
    return "anchor_key" in steps.column_names and steps["anchor_key"].null_count == len(steps)


def _computed(
    part: pa.Table, settings: AdvantageSettings
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The results in whatever order the SQL has them, and which row of `part` each of them is
    of.
    """
    coded = pa.table(
        {name: _codes(part[name]) if name in KEYS else part[name] for name in part.column_names}
    )
    computed = _prepared(_of_the_sql(settings)).run(coded)
    # No join by uid and step: steps that were not 0..T-1 have been refused by now, so the place of
    # each is known.
    trajectory = coded["traj_uid"].to_numpy()
    assert len(computed["traj_uid"]) == len(trajectory), (
        f"{len(trajectory)} steps in, {len(computed['traj_uid'])} out"
    )
    lengths = np.bincount(trajectory)
    first = np.cumsum(lengths) - lengths
    slots = np.empty(len(trajectory), np.int64)
    slots[first[trajectory] + coded["step_index"].to_numpy()] = np.arange(len(trajectory))
    return slots[first[computed["traj_uid"]] + computed["step_index"]], computed


def _of_the_sql(settings: AdvantageSettings) -> AdvantageSettings:
    """Once the keys are there, what they were made of plays no part."""
    anchor = "anchor_key" if settings.anchor in _SIMILARITY else settings.anchor
    return replace(settings, anchor=anchor, similarity=PUBLISHED_SETTINGS.similarity)


@functools.lru_cache(maxsize=32)
def _prepared(settings: AdvantageSettings) -> _Prepared:
    return _Prepared(settings)


# DuckDB's binding reports connections that outlive the interpreter as leaks
atexit.register(_prepared.cache_clear)


class _Prepared:
    """An in-memory database with the macro prepared for one setting: at 6,400 steps planning takes
    longer than running. Parameters of the statement instead of literals would have it planned at
    every call.

    One thread: sums of doubles are then taken in one order, and replaying a learner step gives the
    same bits.
    """

    def __init__(self, settings: AdvantageSettings) -> None:
        self.lock = threading.Lock()
        # of keys, their codes
        types = {name: pa.int32() if name in KEYS else TYPES[name] for name in _columns(settings)}
        self.source = _Source(pa.schema(types).empty_table())
        self.connection = duckdb.connect(config={"threads": 1})
        self.connection.register("steps", self.source)
        self.connection.execute(advantages_macro(settings))
        columns = ", ".join(("traj_uid", "step_index", *_RESULTS))
        self.connection.execute(f"PREPARE computed AS SELECT {columns} FROM advantages()")

    def run(self, steps: pa.Table) -> pa.Table:
        with self.lock:
            self.source.table = steps
            try:
                return self.connection.execute("EXECUTE computed").fetchnumpy()
            finally:
                self.source.table = None


class _Source:
    """What the prepared statement reads: whichever table is set, of the columns it was prepared
    for.
    """

    def __init__(self, table: pa.Table | None) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        assert self.table is not None
        return self.table.__arrow_c_stream__(requested_schema)


def _with_uids(steps: pa.Table, settings: AdvantageSettings) -> str | None:
    """The refusal again, in terms of uids instead of codes: refusing may be slow."""
    uids = [
        name for name in KEYS if name in steps.column_names and steps[name].type == pa.binary(16)
    ]
    casts = f"REPLACE ({', '.join(f'{name}::UUID AS {name}' for name in uids)})" if uids else ""
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("given", steps)
        connection.execute(f"CREATE VIEW steps AS SELECT * {casts} FROM given")
        connection.execute(advantages_macro(_of_the_sql(settings)))
        try:
            connection.sql("FROM advantages()").to_arrow_table()
        except duckdb.InvalidInputException as error:
            return _message(error)
    return None


def _message(error: duckdb.Error) -> str:
    return str(error).removeprefix("Invalid Input Error: ")

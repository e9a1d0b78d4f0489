"""Compute the advantages of a table of steps with the macro of `sql_macro.py`.

Python and a bare DuckDB shell run the same SQL, so an audit of an old run and a live batch agree.
Uids become integers first, which DuckDB compares several times as fast.
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
from gigpo.settings import PUBLISHED_SETTINGS, WHITENED, WITH_CRITIC, AdvantageSettings
from gigpo.similarity import similarity_keys
from gigpo.sql_macro import advantages_macro

_ALWAYS: Final = ("group_uid", "traj_uid", "step_index", "reward", "is_action_valid", "state_hash")
# Anchor -> method of similarity.py.
_SIMILARITY: Final = {"similar": "linked", "similar_greedy": "greedy"}
# Steps computed in one call. More calls cost time, and so do tables larger than a processor's
# cache. Fastest of 2^14, 2^15, ... 2^20 at 655,360 steps: 0.31 s of a core; 0.34 at 2^16, 0.45 at
# 2^18.
_PART_STEPS: Final = 2**17
_RESULTS: Final[dict[str, type[np.generic]]] = {
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
    """Return the advantage of every step (eqs. 3 and 5-8), in the input's row order.

    Input: an Arrow table, a data frame of pandas or polars, or a dictionary of columns. One row per
    step, whole trajectories, in any order; other columns are ignored:
      group_uid, traj_uid; step_index int; reward float; is_action_valid bool; state_hash or null.
      Some settings read more columns: version_min int (anchor_versions 'window'), weight float from
      1e-100 to 1e100 ('weighted'), won bool ('graphgpo' and 'g2po'; one row that says so is
      enough), value float ('turn_ppo', 'ppo': the critic's, of the step's state),
      admissible_actions list of text (anchor 'state_and_actions'), anchor_key or null
      (anchor 'anchor_key'), anchor_text or null (anchors 'similar' and 'similar_greedy').
      'graphgpo' also reads what identifies the observation after the last action, in the row of the
      last step: final_state_hash or null, and by the anchor final_admissible_actions,
      final_anchor_key or final_anchor_text. A null is a state of its own.
      Uids, hashes and keys have any type with one value per row. NaN in them is null, -0.0 is 0.0.
    Output: group_uid, traj_uid, step_index as given; float64 step_return (R_t less the penalty),
      episode_advantage, step_advantage, advantage; int64 anchor_size (steps in the anchor group).
      For filtered_groups: float64 episode_return (of the trajectory, undiscounted, no penalty);
      bool episodes_differ (returns of its group, beyond rounding), steps_differ (returns of its
      anchor group, no penalty), has_penalties (a row of its group).
      With 'turn_ppo' also float64 value_target (the lambda-return, which the critic learns).
      With 'ppo' value_target is the row's score, and advantage that of its first token with
      gae_lambda 1, whitened over the rows; token_advantages has those of all tokens.

    Raises ValueError, with the name, for a column that is missing or has another type. Raises it,
    with the uid, for a trajectory whose step_index is not 0..T-1, or whose rewards are not finite
    or add up to sizes above 1e100. Raises TypeError for `steps` that is no table, and for other
    settings.

    The same rows in the same order give the same bits. In another order, or beside other groups,
    they give the same numbers to rounding, except with anchor 'similar_greedy' and with estimators
    that whiten over the batch.
    """
    _check_settings(settings)
    table = _with_similarity_keys(table_of(steps), settings)
    narrow = columns_of(table, _columns(settings))
    results: dict[str, np.ndarray] = {
        name: np.empty(len(table), dtype) for name, dtype in _results(settings).items()
    }
    # The SQL refuses a table in which no step has a key, so it has to see all steps.
    for rows, part in _parts(narrow, whole=_has_no_key(narrow) or settings.estimator in WHITENED):
        try:
            row_numbers, computed = _computed(part, settings)
        except duckdb.InvalidInputException as error:
            raise ValueError(_with_uids(narrow.take(rows), settings) or _message(error)) from error
        row_numbers = rows[row_numbers]
        for name, values in results.items():
            values[row_numbers] = computed[name]
    return pa.table(
        {name: table[name] for name in ("group_uid", "traj_uid", "step_index")} | results
    )


def columns_read(settings: AdvantageSettings) -> frozenset[str]:
    """Return the columns that `compute_advantages` reads with these settings."""
    if settings.anchor not in _SIMILARITY:
        return frozenset(_columns(settings))
    made_of = {"anchor_key": "anchor_text", "final_anchor_key": "final_anchor_text"}
    return frozenset(made_of.get(name, name) for name in _columns(settings))


def prepare_advantages(settings: AdvantageSettings) -> None:
    """Plan the SQL for these settings, which makes the first `compute_advantages` 0.1 s faster."""
    _check_settings(settings)
    _prepared(_sql_settings(settings))


def _check_settings(settings: object) -> None:
    if not isinstance(settings, AdvantageSettings):
        raise TypeError(
            "settings must be an AdvantageSettings, such as PUBLISHED_SETTINGS, and not of type "
            f"{type(settings).__name__}"
        )


def _with_similarity_keys(steps: pa.Table, settings: AdvantageSettings) -> pa.Table:
    """Return `steps`, with keys made of their texts if the anchor compares texts."""
    if settings.anchor not in _SIMILARITY:
        return steps
    texts = {"anchor_key": columns_of(steps, ("group_uid", "anchor_text"))}
    if settings.estimator == "graphgpo":
        texts["final_anchor_key"] = _final_texts(steps)
    # Row by row, as in GraphGPO's code: the final text comes directly after the last step's.
    order = np.arange(len(texts) * len(steps)).reshape(len(texts), -1).T.reshape(-1)
    keys = similarity_keys(
        pa.concat_tables(texts.values()).take(order),
        threshold=settings.similarity,
        method=_SIMILARITY[settings.anchor],
    )
    made = {name: keys[at :: len(texts)] for at, name in enumerate(texts)}
    if made["anchor_key"].null_count == len(steps) > 0:
        raise ValueError(
            f"anchor {settings.anchor} compares anchor_text, and every step's is NULL; fill it in, "
            "or take anchor='state'"
        )
    steps = steps.select([name for name in steps.column_names if name not in made])
    for name, column in made.items():
        steps = steps.append_column(name, column)
    return steps


def _final_texts(steps: pa.Table) -> pa.Table:
    """Return group_uid, and final_anchor_text as anchor_text: null after a win."""
    columns = columns_of(steps, ("group_uid", "traj_uid", "won", "final_anchor_text"))
    won_uids = columns["traj_uid"].filter(columns["won"])
    is_won = pc.is_in(columns["traj_uid"], value_set=won_uids)
    texts = pc.if_else(is_won, pa.scalar(None, pa.large_string()), columns["final_anchor_text"])
    return pa.table({"group_uid": columns["group_uid"], "anchor_text": texts})


def _columns(settings: AdvantageSettings) -> tuple[str, ...]:
    compares_keys = settings.anchor == "anchor_key" or settings.anchor in _SIMILARITY
    compares_actions = settings.anchor == "state_and_actions"
    has_final_nodes = settings.estimator == "graphgpo"
    needed = {
        "version_min": settings.anchor_versions == "window",
        "weight": settings.anchor_versions == "weighted",
        "won": settings.estimator in ("graphgpo", "g2po"),
        "anchor_key": compares_keys,
        "admissible_actions": compares_actions,
        "final_state_hash": has_final_nodes and not compares_keys,
        "final_anchor_key": has_final_nodes and compares_keys,
        "final_admissible_actions": has_final_nodes and compares_actions,
        "value": settings.estimator in WITH_CRITIC,
    }
    return (*_ALWAYS, *(name for name, is_needed in needed.items() if is_needed))


def _codes_of_keys(part: pa.Table) -> dict[str, pa.Array]:
    """Return the codes of each key. A final state has the code that it has as a step's state."""
    codes: dict[str, pa.Array] = {}
    for name in KEYS:
        if name not in part.column_names or name in codes:
            continue
        column, final = part[name], f"final_{name}"
        if final in part.column_names:
            column = pa.chunked_array([*column.chunks, *part[final].cast(column.type).chunks])
            codes[final] = _codes(column)[len(part) :]
        codes[name] = _codes(column)[: len(part)]
    return codes


def _results(settings: AdvantageSettings) -> dict[str, type[np.generic]]:
    """Return the columns of the result, with their types."""
    if settings.estimator in WITH_CRITIC:
        return _RESULTS | {"value_target": np.float64}
    return _RESULTS


def _codes(column: pa.ChunkedArray) -> pa.Array:
    """Return equal values as equal integers, in order of first appearance; null stays null."""
    return column.combine_chunks().dictionary_encode().indices


def _parts(narrow: pa.Table, *, whole: bool) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Yield whole groups, about _PART_STEPS rows at a time: the row numbers, and the rows.

    Groups are independent, and hash tables that fit into a processor's cache make the time linear
    in the steps: 6.4 million take 4 s instead of 10. The SQL refuses a part without any anchor key,
    so such a part borrows a group that has one; the rows of that group are then computed twice.
    Letters: R rows, G groups, J trajectories.
    """
    all_R = np.arange(len(narrow))
    if whole or len(narrow) <= _PART_STEPS:
        yield all_R, narrow
        return
    coded = {name: _codes(narrow[name]) for name in ("group_uid", "traj_uid")}
    group_R, trajectory_R = (codes.fill_null(-1).to_numpy() for codes in coded.values())
    group_J = np.empty(len(narrow) + 1, group_R.dtype)  # of each trajectory J, and of null
    group_J[trajectory_R] = group_R
    # A trajectory in two groups is refused by the SQL, which has to see both.
    if not np.array_equal(group_J[trajectory_R], group_R):
        yield all_R, narrow
        return
    order_R = all_R
    short = pa.table(
        coded | {name: narrow[name] for name in narrow.column_names if name not in coded}
    )
    if np.any(group_R[1:] < group_R[:-1]):
        order_R = np.argsort(group_R, kind="stable")
        short = short.take(order_R)
    ends_G = np.cumsum(np.bincount(group_R + 1))  # the first is that of null
    start = 0
    while start < len(narrow):
        end = int(ends_G[np.searchsorted(ends_G, min(start + _PART_STEPS, len(narrow)))])
        row_numbers, part = order_R[start:end], short.slice(start, end - start)
        if _has_no_key(part):
            keyed = group_R[pc.index(narrow["anchor_key"].is_valid(), True).as_py()]
            borrowed = slice(int(ends_G[keyed]), int(ends_G[keyed + 1]))
            row_numbers = np.concatenate([row_numbers, order_R[borrowed]])
            part = pa.concat_tables([part, short[borrowed]])
        yield row_numbers, part
        start = end


def _has_no_key(steps: pa.Table) -> bool:
    """Return whether anchor keys are asked for and no step has one."""
    return "anchor_key" in steps.column_names and steps["anchor_key"].null_count == len(steps)


def _computed(
    part: pa.Table, settings: AdvantageSettings
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the results in the order of the SQL, and the row of `part` that each belongs to."""
    coded = pa.table({name: part[name] for name in part.column_names} | _codes_of_keys(part))
    computed = _prepared(_sql_settings(settings)).run(coded)
    # No join by uid and step is needed: the steps of each trajectory are 0..T-1 by now, which gives
    # the row of each.
    trajectory_R = coded["traj_uid"].to_numpy()
    assert len(computed["traj_uid"]) == len(trajectory_R), (
        f"{len(trajectory_R)} steps in, {len(computed['traj_uid'])} out"
    )
    n_steps_J = np.bincount(trajectory_R)
    first_J = np.cumsum(n_steps_J) - n_steps_J
    # Rows by trajectory and step.
    row_R = np.empty(len(trajectory_R), np.int64)
    row_R[first_J[trajectory_R] + coded["step_index"].to_numpy()] = np.arange(len(trajectory_R))
    return row_R[first_J[computed["traj_uid"]] + computed["step_index"]], computed


def _sql_settings(settings: AdvantageSettings) -> AdvantageSettings:
    """Return the settings of the SQL, which gets similarity keys ready-made."""
    anchor = "anchor_key" if settings.anchor in _SIMILARITY else settings.anchor
    return replace(settings, anchor=anchor, similarity=PUBLISHED_SETTINGS.similarity)


@functools.lru_cache(maxsize=32)
def _prepared(settings: AdvantageSettings) -> _Prepared:
    return _Prepared(settings)


# DuckDB's binding reports connections that outlive the interpreter as leaks
atexit.register(_prepared.cache_clear)


class _Prepared:
    """Hold an in-memory database with the macro prepared for one setting.

    At 6,400 steps planning takes longer than running. Literals are used instead of parameters of
    the statement, which would be planned at every call. One thread: sums of doubles are then taken
    in one order, and replaying a learner step gives the same bits.
    """

    def __init__(self, settings: AdvantageSettings) -> None:
        self.lock = threading.Lock()
        # keys come as codes
        types = {name: pa.int32() if name in KEYS else TYPES[name] for name in _columns(settings)}
        self.source = _Source(pa.schema(types).empty_table())
        self.connection = duckdb.connect(config={"threads": 1})
        self.connection.register("steps", self.source)
        self.connection.execute(advantages_macro(settings))
        columns = ", ".join(("traj_uid", "step_index", *_results(settings)))
        self.connection.execute(f"PREPARE computed AS SELECT {columns} FROM advantages()")

    def run(self, steps: pa.Table) -> dict[str, np.ndarray]:
        """Return each column of the result by name."""
        with self.lock:
            self.source.table = steps
            try:
                return self.connection.execute("EXECUTE computed").fetchnumpy()
            finally:
                self.source.table = None


class _Source:
    """Give the prepared statement whichever table is set, with the columns it was prepared for."""

    def __init__(self, table: pa.Table | None) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        assert self.table is not None
        return self.table.__arrow_c_stream__(requested_schema)


def _with_uids(steps: pa.Table, settings: AdvantageSettings) -> str | None:
    """Return the SQL's refusal in terms of uids instead of codes. It may be slow."""
    uids = [
        name for name in KEYS if name in steps.column_names and steps[name].type == pa.binary(16)
    ]
    casts = f"REPLACE ({', '.join(f'{name}::UUID AS {name}' for name in uids)})" if uids else ""
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.register("given", steps)
        connection.execute(f"CREATE VIEW steps AS SELECT * {casts} FROM given")
        connection.execute(advantages_macro(_sql_settings(settings)))
        try:
            connection.sql("FROM advantages()").to_arrow_table()
        except duckdb.InvalidInputException as error:
            return _message(error)
    return None


def _message(error: duckdb.Error) -> str:
    return str(error).removeprefix("Invalid Input Error: ")

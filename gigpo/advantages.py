"""Advantages of a table of steps: the query files of `queries/` composed into one DuckDB table macro.

Python and a bare DuckDB shell run the same text, so an audit of an old run and a live batch cannot disagree.
"""

from __future__ import annotations

import difflib
import functools
import math
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa

ESTIMATORS: Final = ("gigpo", "grpo")
NORMALISATIONS: Final = ("mean", "mean_std")
WEIGHTINGS: Final = ("steps", "trajectories")

# Each is one file and one common table expression of that name; a file reads only the ones before it (and itself).
_QUERIES: Final = (
    "base",
    "trajectories",
    "returns",
    "scores",
    "episode_advantage",
    "anchor_groups",
    "step_advantage",
    "advantages",
)
# Read more than once. Left to the optimiser they might be computed as often.
_MATERIALISED: Final = ("base", "scores")

_INPUT_COLUMNS: Final = ("group_uid", "traj_uid", "step_index", "reward", "is_action_valid", "state_hash")
_KEY_COLUMNS: Final = ("group_uid", "traj_uid", "step_index")


def _check_name(field: str, value: str, *, known: tuple[str, ...]) -> None:
    if value in known:
        return
    nearest = difflib.get_close_matches(value, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"{field}={value!r} is unknown; it is one of {', '.join(known)}{hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    """What decides an advantage. The macro's parameters have the same names.

    estimator        'gigpo' (eq. 8) or 'grpo' (episode term only)
    gamma            discount per step of the environment, in [0, 1] (eq. 5)
    omega            weight of the step term (eq. 8); not used by 'grpo'
    normalise        'mean' (divide by 1) or 'mean_std' (divide by the ddof-1 standard deviation + 1e-6)
    weighting        episode statistics over 'steps' (the authors' code) or 'trajectories' (the paper's eq. 3)
    invalid_penalty  subtracted from the return and the episode score of a row whose action was invalid; in reward units
    """

    estimator: str
    gamma: float
    omega: float
    normalise: str
    weighting: str
    invalid_penalty: float

    def __post_init__(self) -> None:
        _check_name("estimator", self.estimator, known=ESTIMATORS)
        _check_name("normalise", self.normalise, known=NORMALISATIONS)
        _check_name("weighting", self.weighting, known=WEIGHTINGS)
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma={self.gamma} is outside [0, 1]: returns would grow with the episode's length")
        if not (math.isfinite(self.omega) and self.omega >= 0.0):
            raise ValueError(f"omega={self.omega} must be finite and >= 0: below 0 it would reward the worse action")
        if not (math.isfinite(self.invalid_penalty) and self.invalid_penalty >= 0.0):
            raise ValueError(
                f"invalid_penalty={self.invalid_penalty} must be finite and >= 0: it is subtracted, "
                "so below 0 it would reward invalid actions"
            )


# The authors' ALFWorld script (rows as the unit of episode statistics).
PUBLISHED_SETTINGS: Final = AdvantageSettings(
    estimator="gigpo", gamma=0.95, omega=1.0, normalise="mean_std", weighting="steps", invalid_penalty=0.1
)


def compute_advantages(steps: pa.Table, settings: AdvantageSettings) -> pa.Table:
    """Advantage of every step (eqs. 3 and 5-8), in the input's row order.

    In, one row per step, whole trajectories in any order; other columns are ignored:
      group_uid, traj_uid binary(16); step_index int; reward float; is_action_valid bool; state_hash binary(16) or null.
    Out: group_uid, traj_uid, step_index as they came; step_return (R_t less the penalty), episode_advantage,
      step_advantage, advantage (float64); anchor_size (int64, steps in the anchor group).

    A trajectory whose step_index is not 0..T-1 raises ValueError with its uid.
    """
    missing = [name for name in _INPUT_COLUMNS if name not in steps.column_names]
    if missing:
        raise ValueError(f"steps lacks the columns {missing}; it has {steps.column_names}")
    narrow = steps.select(_INPUT_COLUMNS)
    with _database().cursor() as connection:
        connection.register("steps", narrow.append_column("input_row", pa.array(np.arange(len(narrow)))))
        try:
            computed = connection.sql(_CALL_MACRO, params=asdict(settings)).to_arrow_table()
        except duckdb.InvalidInputException as error:
            raise ValueError(str(error).removeprefix("Invalid Input Error: ")) from error
    assert len(computed) == len(narrow), f"{len(narrow)} steps in, {len(computed)} out"
    columns = {name: narrow[name] for name in _KEY_COLUMNS} | {name: computed[name] for name in computed.column_names}
    return pa.table(columns)


def advantages_macro(defaults: AdvantageSettings) -> str:
    """SQL that creates the table macro `advantages(...)` over a view or table `steps`.

    Its parameters are the fields of AdvantageSettings, all named, with `defaults` (a run's own settings):
        SELECT * FROM advantages(omega := 0.5, normalise := 'mean_std');
    It returns group_uid, traj_uid, step_index, step_return, episode_advantage, step_advantage, advantage, anchor_size;
    join it with `steps` on (traj_uid, step_index) for anything else, for example anchor_text.
    """
    *inner, last = _QUERIES
    expressions = ",\n".join(
        f"{name} AS {'MATERIALIZED ' if name in _MATERIALISED else ''}(\n{_query(name)})" for name in inner
    )
    parameters = ",\n".join(f"    {name} := {_literal(value)}" for name, value in asdict(defaults).items())
    head = f"CREATE OR REPLACE MACRO advantages(\n{parameters}\n) AS TABLE\n"
    return f"{head}WITH RECURSIVE\n{expressions}\n{_query(last)};\n"


_CALL_MACRO: Final = """\
SELECT a.step_return, a.episode_advantage, a.step_advantage, a.advantage, a.anchor_size
FROM advantages(
    gamma := $gamma,
    omega := $omega,
    normalise := $normalise,
    weighting := $weighting,
    invalid_penalty := $invalid_penalty,
    estimator := $estimator
) AS a
JOIN steps ON a.traj_uid = steps.traj_uid::UUID AND a.step_index = steps.step_index
ORDER BY steps.input_row
"""


@functools.cache
def _database() -> duckdb.DuckDBPyConnection:
    """An in-memory database that holds the macro and nothing else; each call takes its own cursor.

    Kept because opening one and defining the macro costs more than the query itself at 6,400 rows.
    One thread: sums of doubles are then taken in one order, and replaying a learner step gives the same bits.
    """
    connection = duckdb.connect(config={"threads": 1})
    # A macro needs a `steps` when it is made; each call's own view of that name hides this empty one.
    connection.execute(
        "CREATE TABLE steps (group_uid BLOB, traj_uid BLOB, step_index BIGINT, "
        "reward DOUBLE, is_action_valid BOOLEAN, state_hash BLOB)"
    )
    connection.execute(advantages_macro(PUBLISHED_SETTINGS))  # every call passes all parameters
    return connection


def _query(name: str) -> str:
    return resources.files("gigpo").joinpath("queries", f"{name}.sql").read_text(encoding="utf-8")


def _literal(value: str | float) -> str:
    return f"'{value}'" if isinstance(value, str) else repr(float(value))

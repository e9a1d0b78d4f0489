"""The query files of `queries/` composed into one DuckDB table macro, `advantages(...)`."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources
from typing import Final

from gigpo.settings import AdvantageSettings

# Each is one file and one common table expression of that name; a file reads only the ones before
# it (and itself).
_QUERIES: Final = (
    "checked",
    "base",
    "trajectories",
    "returns",
    "episodes",
    "episode_groups",
    "episode_advantage",
    "whitening",
    "graph_returns",
    "scores",
    "suffixes",
    "anchor_keys",
    "weighted_anchor_groups",
    "anchor_groups",
    "step_advantage",
    "hierarchy",
    "advantages",
)
# Short, or slow to make again. The others are cheaper computed where they are read than copied
# (measured at 64,000 steps).
_MATERIALISED: Final = ("base", "trajectories", "episodes", "episode_advantage", "suffixes")
_SOURCE: Final = "    FROM checked\n"  # in base.sql


def advantages_macro(defaults: AdvantageSettings, anchor_expression: str | None = None) -> str:
    """SQL that creates the table macro `advantages(...)` over a view or table `steps`.

    Its parameters are the fields of AdvantageSettings but `similarity`, all named, with `defaults`
    (a run's own settings):
        SELECT * FROM advantages(omega := 0.5, normalise := 'mean_std');
    It returns the columns that queries/advantages.sql names; join it with `steps` on (traj_uid,
    step_index) for anything else, for example anchor_text.

    `steps` has to be there, with all its columns, when this SQL runs: DuckDB looks names up at
    once. `anchor_expression`, SQL over the columns of `steps`, is what anchor := 'anchor_key'
    compares instead of a column of that name, for example "lower(anchor_text)". Anchors 'similar'
    and 'similar_greedy' are refused, as SQL cannot compare texts so: give `steps` a column
    anchor_key of similarity_keys, and ask for anchor := 'anchor_key'.
    """
    queries = {name: _query(name) for name in _QUERIES}
    if anchor_expression is not None:
        assert _SOURCE in queries["base"]
        keyed = f"    SELECT COLUMNS(lambda c: lower(c) <> 'anchor_key'), ({anchor_expression}) AS anchor_key FROM checked\n"
        queries["base"] = queries["base"].replace(_SOURCE, keyed)
    result = queries.pop("advantages")
    how = {"returns": ""} | dict.fromkeys(_MATERIALISED, "MATERIALIZED ")  # a recursion is neither
    expressions = ",\n".join(
        f"{name} AS {how.get(name, 'NOT MATERIALIZED ')}(\n{query})"
        for name, query in queries.items()
    )
    # `similarity` is no parameter: it makes the keys that the macro is given.
    arguments = {name: value for name, value in asdict(defaults).items() if name != "similarity"}
    parameters = ",\n".join(f"    {name} := {_literal(value)}" for name, value in arguments.items())
    head = f"CREATE OR REPLACE MACRO advantages(\n{parameters}\n) AS TABLE\n"
    return f"{head}WITH RECURSIVE\n{expressions}\n{result};\n"


def _literal(value: str | int | float) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    # With an exponent it is a DOUBLE, digit by digit; 0.95 would be a DECIMAL first.
    return f"{value!r}e0" if isinstance(value, float) and "e" not in repr(value) else repr(value)


def _query(name: str) -> str:
    return resources.files("gigpo").joinpath("queries", f"{name}.sql").read_text(encoding="utf-8")

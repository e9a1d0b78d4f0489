"""Compose the files of `queries/` into one DuckDB table macro, `advantages(...)`."""

from __future__ import annotations

from dataclasses import asdict
from importlib import resources
from typing import Final

from gigpo.settings import AdvantageSettings

# Each name is a file and a common table expression. A file reads only earlier ones, and itself. The
# first two check parameters and columns; the equations follow.
_QUERIES: Final = (
    "checked",
    "base",
    "trajectories",
    "returns",
    "episodes",
    "episode_groups",
    "episode_advantage",
    "whitening",
    "scores",
    "suffixes",
    "anchor_keys",
    "graph_returns",
    "node_values",
    "critic_values",
    "gae",
    "comparisons",
    "weighted_anchor_groups",
    "anchor_groups",
    "step_advantage",
    "hierarchy",
    "g2po_terms",
    "ppo_terms",
    "step_terms",
    "episode_terms",
    "advantages",
)
# Short relations, or slow ones. The others are faster computed where they are read than copied
# (measured at 64,000 steps).
_MATERIALISED: Final = (
    "base",
    "trajectories",
    "episodes",
    "episode_advantage",
    "suffixes",
    "graph_returns",
    "node_values",
)
_STEPS: Final = "FROM steps\n"  # in checked.sql
_SOURCE: Final = "    FROM checked\n"  # in base.sql


def advantages_macro(
    defaults: AdvantageSettings, anchor_expression: str | None = None, *, relation: str = "steps"
) -> str:
    """Return SQL that creates the table macro `advantages(...)` over a view or table `steps`.

    Its parameters are the fields of AdvantageSettings except `similarity`, all named, with
        `defaults`: SELECT * FROM advantages(omega := 0.5, normalise := 'mean_std');
    queries/advantages.sql names its columns. Join it with `steps` on (traj_uid, step_index) for
    other columns, such as anchor_text.

    `steps` must exist with all its columns when this SQL runs, because DuckDB resolves names at
    once. `anchor_expression` is SQL over the columns of `steps`, such as "lower(anchor_text)";
    anchor := 'anchor_key' compares it instead of a column anchor_key. Anchors 'similar' and
    'similar_greedy' are refused, because SQL cannot compare texts so: give `steps` a column
    anchor_key made by similarity_keys, and use anchor := 'anchor_key'. `relation` is the name of a
    view or table to read instead of `steps`.
    """
    queries = {name: _query(name) for name in _QUERIES}
    assert _STEPS in queries["checked"]
    queries["checked"] = queries["checked"].replace(_STEPS, f"FROM {relation}\n")
    if anchor_expression is not None:
        assert _SOURCE in queries["base"]
        others = "COLUMNS(lambda c: lower(c) <> 'anchor_key')"
        keyed = f"    SELECT {others}, ({anchor_expression}) AS anchor_key FROM checked\n"
        queries["base"] = queries["base"].replace(_SOURCE, keyed)
    result = queries.pop("advantages")
    # The recursive one takes no hint.
    hints = {"returns": ""} | dict.fromkeys(_MATERIALISED, "MATERIALIZED ")
    expressions = ",\n".join(
        f"{name} AS {hints.get(name, 'NOT MATERIALIZED ')}(\n{query})"
        for name, query in queries.items()
    )
    # `similarity` is no parameter: the keys that it makes are given to the macro.
    arguments = {name: value for name, value in asdict(defaults).items() if name != "similarity"}
    parameters = ",\n".join(f"    {name} := {_literal(value)}" for name, value in arguments.items())
    head = f"CREATE OR REPLACE MACRO advantages(\n{parameters}\n) AS TABLE\n"
    return f"{head}WITH RECURSIVE\n{expressions}\n{result};\n"


def _literal(value: str | int | float) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    # An exponent makes it a DOUBLE with these digits; 0.95 alone would be a DECIMAL.
    return f"{value!r}e0" if isinstance(value, float) and "e" not in repr(value) else repr(value)


def _query(name: str) -> str:
    return resources.files("gigpo").joinpath("queries", f"{name}.sql").read_text(encoding="utf-8")

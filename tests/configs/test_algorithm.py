"""Test a config's section `algorithm` beside gigpo's record, and gigpo's record beside its SQL.

A bare DuckDB shell has the SQL alone. Names, defaults, choices and bounds are the same everywhere.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

import configs
from configs import AlgorithmConfig, Config, ConfigError
from driver.preflight import check_algorithm
from gigpo import (
    ANCHOR_VERSIONS,
    ANCHORS,
    ESTIMATORS,
    GROUP_FILTERS,
    NORMALISATIONS,
    PUBLISHED_SETTINGS,
    WEIGHTINGS,
    WITH_CRITIC,
    AdvantageSettings,
)

CHECKED = (Path(__file__).resolve().parents[2] / "gigpo/queries/checked.sql").read_text()
CHOICES = {
    "estimator": ESTIMATORS,
    "normalise": NORMALISATIONS,
    "weighting": WEIGHTINGS,
    "anchor": ANCHORS,
    "anchor_versions": ANCHOR_VERSIONS,
}
# a run does not record what they need
NOT_IN_A_RUN = {"anchor": {"anchor_key"}, "anchor_versions": {"weighted"}}
REALS, INTEGERS = (
    ("gamma", "gae_lambda", "graph_gamma", "omega", "invalid_penalty", "similarity"),
    ("anchor_history", "version_window"),
)
VALUES = {
    **dict.fromkeys(
        REALS,
        (-1.0, -1e-9, 0.0, 0.5, 1.0, 1.0 + 1e-9, 2.0, float("inf"), float("-inf"), float("nan")),
    ),
    **dict.fromkeys(INTEGERS, (-2, -1, 0, 1, 2, 3)),
}
READERS = {"similarity": {"anchor": "similar"}, "anchor_history": {"anchor": "suffix"}}
READERS |= {"version_window": {"anchor_versions": "window"}, "gae_lambda": {"estimator": "gagpo"}}
READERS |= {"graph_gamma": {"estimator": "graphgpo"}}


def test_the_names_and_the_defaults_are_the_same() -> None:
    algorithm, names = (
        asdict(AlgorithmConfig()),
        {field.name for field in fields(AdvantageSettings)},
    )
    assert names | {"group_size", "group_filter", "refill_groups"} == algorithm.keys(), (
        "and these three decide no advantage"
    )
    assert names == {*CHOICES, *VALUES}
    assert {name: algorithm[name] for name in names} == asdict(PUBLISHED_SETTINGS)


@pytest.mark.parametrize("name", [*CHOICES, "group_filter"])
def test_the_choices_are_the_same(name: str) -> None:
    """Compare the choices with the lists in a run's refusal and in the SQL."""
    known = set(GROUP_FILTERS if name == "group_filter" else CHOICES[name])
    with pytest.raises(ConfigError, match=f"algorithm.{name}='no such' is unknown") as caught:
        check_algorithm(Config(algorithm=AlgorithmConfig(**{name: "no such"})))
    assert set(str(caught.value).partition("one of ")[2].split(", ")) == known
    for choice in known:
        assert config_takes(name, choice) is (choice not in NOT_IN_A_RUN.get(name, ()))
    if name != "group_filter":
        (in_sql,) = re.findall(rf"\({name} IN \(([^)]*)\)\)", CHECKED)
        assert set(re.findall(r"'(\w+)'", in_sql)) == known
        said = re.findall(
            rf"'{name} must be ([^{{]*), not {{}}'", re.sub(r"'\s*\|\|\s*'", "", CHECKED)
        )[0]
        assert set(re.split(r", | or ", said)) == known


@pytest.fixture(scope="module")
def shell() -> Iterator[duckdb.DuckDBPyConnection]:
    """The SQL's check of parameters alone, over one row."""
    parameters = ", ".join(
        f"{name} := {value!r}"
        for name, value in asdict(PUBLISHED_SETTINGS).items()
        if name != "similarity"
    )
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE steps AS SELECT 1 AS step_index")
        connection.execute(f"CREATE MACRO checked({parameters}) AS TABLE {CHECKED}")
        yield connection


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in VALUES.items() for value in values]
)
def test_the_bounds_are_the_same(shell: duckdb.DuckDBPyConnection, name: str, value: float) -> None:
    taken = gigpo_takes(name, value)
    assert config_takes(name, value) is taken
    if name != "similarity":  # which the SQL does not have
        assert sql_takes(shell, name, value) is taken


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_config_has_a_critic_for_the_estimators_that_need_one(estimator: str) -> None:
    config = Config(algorithm=AlgorithmConfig(estimator=estimator))
    assert configs.has_critic(config) is (estimator in WITH_CRITIC)


def test_hgpo_has_its_own_anchors_everywhere(shell: duckdb.DuckDBPyConnection) -> None:
    for estimator, anchor in itertools.product(("hgpo", "gigpo"), ("state", "suffix")):
        taken = estimator != "hgpo" or anchor == "state"
        assert gigpo_takes("anchor", anchor, estimator=estimator) is taken
        assert config_takes("anchor", anchor, estimator=estimator) is taken
        assert sql_takes(shell, "anchor", anchor, estimator=estimator) is taken


def gigpo_takes(name: str, value: object, **others: Any) -> bool:
    try:
        replace(PUBLISHED_SETTINGS, **{**others, name: value})
    except ValueError:
        return False
    return True


def config_takes(name: str, value: object, **others: Any) -> bool:
    with_it = {**READERS.get(name, {}), **others, name: value}
    try:
        config = Config(algorithm=AlgorithmConfig(**with_it))
        configs.check(config)
        check_algorithm(config)
    except ConfigError:
        return False
    return True


def sql_takes(shell: duckdb.DuckDBPyConnection, name: str, value: object, **others: str) -> bool:
    given = {
        key: f"'{v}'::DOUBLE" if isinstance(v, float) else repr(v)
        for key, v in {**others, name: value}.items()
    }
    try:
        shell.execute(
            f"FROM checked({', '.join(f'{key} := {literal}' for key, literal in given.items())})"
        ).fetchall()
    except duckdb.InvalidInputException:
        return False
    return True

"""Give inputs of all kinds to compute_advantages and the macro, and run the recipe of the docs."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gigpo import (
    ESTIMATORS,
    PUBLISHED_SETTINGS,
    WITH_CRITIC,
    advantages_macro,
    compute_advantages,
    prepare_advantages,
    token_advantages,
)
from gigpo.settings import NORMALISATIONS, WEIGHTINGS
from row_bounds import MAX_REWARD
from tests.support.gigpo_samples import column, episode, settings, table, uid

STEPS = table({"A": episode("s0 s1 s2", end=10, invalid=(1,)), "B": episode("s0 s1", end=0)})


@pytest.mark.parametrize(
    ("name", "values", "why"),
    [
        ("step_index", [0, 0.4, 2, 0, 1], "step_index is double, and must be an integer"),
        ("step_index", ["0", "1", "2", "0", "1"], "step_index is string, and must be an integer"),
        (
            "step_index",
            pa.array([2**63] * 5, pa.uint64()),
            "step_index is uint64, and cannot be read as int64",
        ),
        ("is_action_valid", [1, 0.3, 1, 1, 1], "is_action_valid is double, and must be bool"),
        ("is_action_valid", [1, 0, 1, 1, 1], "is_action_valid is int64, and must be bool"),
        ("reward", ["0"] * 5, "reward is string, and must be a number"),
        ("reward", [True] * 5, "reward is bool, and must be a number"),
        (
            "admissible_actions",
            [[1]] * 5,
            "admissible_actions is list<.*int64>, and must be a list of text",
        ),
        (
            "state_hash",
            [["s"]] * 5,
            "state_hash is list<.*>, and must be of a type with one value a row",
        ),
        ("group_uid", [float("nan")] * 5, "has a NULL uid"),
    ],
)
def test_a_column_of_another_type_is_refused_by_name(name, values, why):
    values = values if isinstance(values, pa.Array) else pa.array(values)
    steps = STEPS.select([other for other in STEPS.column_names if other != name]).append_column(
        name, values
    )
    anchor = "state_and_actions" if name == "admissible_actions" else "state"
    with pytest.raises(ValueError, match=why):
        compute_advantages(steps, settings(anchor=anchor))


@pytest.mark.parametrize(
    ("column_of_steps", "why"),
    [
        ("0.4::DOUBLE AS step_index", "step_index is DOUBLE, and must be an integer"),
        ("0.3 AS is_action_valid", r"is_action_valid is DECIMAL\(2,1\), and must be BOOLEAN"),
        ("1 AS won", "won is INTEGER, and must be BOOLEAN"),
        ("'NaN'::DOUBLE AS group_uid", "has a NULL uid"),
    ],
)
def test_the_macro_does_not_round_what_python_refuses(column_of_steps, why):
    with duckdb.connect() as shell:
        shell.register("given", STEPS.append_column("won", pa.array([True] * 3 + [False] * 2)))
        shell.execute(f"CREATE VIEW steps AS SELECT * REPLACE ({column_of_steps}) FROM given")
        shell.execute(advantages_macro(PUBLISHED_SETTINGS))
        with pytest.raises(duckdb.InvalidInputException, match=why):
            shell.execute("FROM advantages(estimator := 'graphgpo')").fetchall()


def test_finite_rewards_without_a_finite_sum_are_refused():
    steps = table({"A": [("s", 1e308, True), ("t", 1e308, True)], "B": episode("s", end=1)})
    name = duckdb.execute("SELECT $1::BLOB::UUID::VARCHAR", [uid("A")]).fetchall()[0][0]
    with pytest.raises(
        ValueError, match=f"trajectory {name} has rewards whose sizes add up to inf; scale them"
    ):
        compute_advantages(steps, settings())
    largest = table(
        {"A": [("s", 1e100, True)], "B": [("s", -1e100, True)], "C": [("s", 1.0, True)]}
    )
    for normalise in ("mean", "mean_std", "leave_one_out"):
        assert all(map(math.isfinite, column(largest, "advantage", normalise=normalise)))


@pytest.mark.parametrize("normalise", NORMALISATIONS)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_largest_rewards_fit_into_float32_squared(estimator, normalise, weighting):
    """A gradient's norm squares them, and adds millions of squares."""
    long = [(f"s{index % 7}", MAX_REWARD, index % 3 > 0) for index in range(1000)]
    steps = table(
        {
            "A": long,
            "B": [(state, -reward, valid) for state, reward, valid in long],
            "C": [("s0", MAX_REWARD, True), ("s1", -MAX_REWARD, True)],
            "D": episode("s0 s2 s1", end=0),
        }
    )
    steps = steps.append_column("value", pa.array([0.0] * len(steps)))
    steps = steps.append_column("won", pa.array([True] * len(steps)))
    steps = steps.append_column("final_state_hash", pa.nulls(len(steps), pa.binary(16)))
    given = settings(estimator=estimator, normalise=normalise, weighting=weighting)
    found = compute_advantages(steps, given)
    numbers = [found["advantage"].to_numpy()]
    if estimator in WITH_CRITIC:
        numbers.append(found["value_target"].to_numpy())
        numbers += token_advantages(
            np.zeros(2 * len(steps)), numbers[1], np.full(len(steps), 2), gae_lambda=0.95
        )
    for each in numbers:
        single = each.astype(np.float32)
        assert np.isfinite(single).all() and np.abs(single).max() > 0
        assert np.isfinite(np.square(single) * np.float32(1e6)).all()


def test_a_data_frame_or_a_dictionary_of_columns_is_a_table_too():
    expected = compute_advantages(STEPS, settings())
    frame = polars.from_arrow(STEPS)
    for given in (STEPS.to_pandas(), frame, STEPS.to_batches()[0], STEPS.to_pydict()):
        got = compute_advantages(given, settings())
        assert got.drop_columns(["group_uid", "traj_uid", "step_index"]).equals(
            expected.select(got.column_names[3:])
        )
        assert got["traj_uid"].to_pylist() == expected["traj_uid"].to_pylist()
    for given in (None, 5, [{"reward": 1}], {"a": [1], "b": [1, 2]}, frame.lazy()):
        with pytest.raises(
            TypeError, match=f"steps is {type(given).__name__}, of which pa.table.. makes no table"
        ) as caught:
            compute_advantages(given, settings())
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"the columns \['reward'\] more than once"):
        compute_advantages(STEPS.append_column("reward", STEPS["reward"]), settings())


@pytest.mark.parametrize("kind", [polars.Categorical, polars.Enum(["s0", "s1", "s2"])])
def test_categories_of_polars_are_texts(kind):
    """Read two frames, each with its own categories."""
    frame = polars.from_arrow(STEPS).with_columns(polars.col("anchor_text").alias("state_hash"))
    frame = frame.with_columns(polars.col("anchor_text", "state_hash").cast(kind))
    tables = pa.concat_tables([pa.table(frame[:2]), pa.table(frame[2:])])
    for anchor in ("state", "similar"):
        expected = column(STEPS, "advantage", anchor=anchor)
        assert (
            column(frame, "advantage", anchor=anchor)
            == column(tables, "advantage", anchor=anchor)
            == expected
        )


@pytest.mark.parametrize("anchor", ["state", "suffix", "anchor_key"])
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_minus_zero_is_zero_in_python_and_in_sql(anchor, kind):
    keys = pa.array([0.0, 1.0, -0.0, -0.0, 1.0], kind)
    steps = (
        STEPS.drop_columns("state_hash")
        .append_column("state_hash", keys)
        .append_column("anchor_key", keys)
    )
    expected = [2, 2, 1, 2, 2] if anchor == "suffix" else [3, 2, 3, 3, 2]
    assert column(steps, "anchor_size", anchor=anchor) == expected
    with duckdb.connect() as shell:
        shell.register("steps", steps)
        shell.execute(advantages_macro(settings(anchor=anchor)))
        sizes = shell.execute("SELECT anchor_size FROM advantages()").fetchall()
    assert sorted(size for (size,) in sizes) == sorted(expected)


def test_extreme_versions_are_refused_by_value():
    """Accept versions just within the bounds, whose difference just fits into 64 bits."""
    largest = 2**62 - 1
    for versions, window in (([-largest, largest] * 2 + [0], largest), ([0] * 5, 0)):
        steps = STEPS.append_column("version_min", pa.array(versions))
        compute_advantages(steps, settings(anchor_versions="window", version_window=window))
    for version in (-(2**62), 2**62, -(2**63), 2**63 - 1):
        steps = STEPS.append_column("version_min", pa.array([version, 0, 0, 0, 2**62 - 1]))
        with pytest.raises(ValueError, match=f"version_min is {version}, and must be between"):
            compute_advantages(steps, settings(anchor_versions="window"))
        compute_advantages(steps, settings())
    with pytest.raises(ValueError, match=f"version_window={2**63 - 1} must be less than 2.62"):
        settings(version_window=2**63 - 1)


@pytest.mark.parametrize("given", [None, {"gamma": 0.5}])
def test_a_record_that_is_no_settings_is_refused_by_type(given):
    for computed in (lambda: compute_advantages(STEPS, given), lambda: prepare_advantages(given)):
        with pytest.raises(
            TypeError,
            match=f"settings must be an AdvantageSettings, .* type {type(given).__name__}",
        ):
            computed()


def test_a_trajectory_is_won_if_any_row_says_so():
    ended = STEPS.append_column("final_state_hash", pa.nulls(5))
    sizes = [
        ended.append_column("won", pa.array(won))
        for won in ([True] * 3 + [False] * 2, [False, False, True, False, False])
    ]
    every_row, last_row = (column(steps, "advantage", estimator="graphgpo") for steps in sizes)
    assert every_row == last_row


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("gamma := '0.5', omega := true", "gamma := 0.5, omega := 1"),
        ("invalid_penalty := false", "invalid_penalty := 0"),
        ("anchor := 'suffix', anchor_history := '2'", "anchor := 'suffix', anchor_history := 2"),
        ("anchor := 'suffix', anchor_history := 2.0", "anchor := 'suffix', anchor_history := 2"),
        ("anchor_history := '2.5'", "anchor_history must be a whole number .* not 2.5"),
        (
            "version_window := 9223372036854775807",
            "version_window must be .* less than 2.62, not 9223372036854775807",
        ),
        ("gamma := 'much'", "gamma must be in .* not much"),
    ],
)
def test_the_macro_casts_as_the_docs_say(given, meant):
    with duckdb.connect() as shell:
        shell.register("steps", STEPS)
        shell.execute(advantages_macro(settings()))
        query = "SELECT advantage FROM advantages({}) ORDER BY traj_uid, step_index"
        if " must be " in meant:
            with pytest.raises(duckdb.InvalidInputException, match=meant):
                shell.execute(query.format(given))
        else:
            assert (
                shell.execute(query.format(given)).fetchall()
                == shell.execute(query.format(meant)).fetchall()
            )


def test_numbers_of_numpy_are_numbers():
    given = settings(
        gamma=np.float32(0.5), omega=1, invalid_penalty=np.float64(0.1), anchor_history=np.int64(2)
    )
    assert given == settings(gamma=0.5, omega=1.0, invalid_penalty=0.1, anchor_history=2)
    assert advantages_macro(given) == advantages_macro(settings(gamma=0.5, anchor_history=2))


def test_the_recipe_in_the_docs_works_in_a_bare_shell(tmp_path, monkeypatch):
    """Over a Parquet file of one's own, with nothing but this package and the duckdb binary."""
    folder = Path(sys.executable).parent
    if shutil.which("duckdb", path=str(folder)) is None:
        pytest.skip("no duckdb binary: pip install duckdb-cli")
    text = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    text = text[text.index("### Your own table") : text.index("## 2. ")]
    ((make_macro, in_shell),) = re.findall(
        r"```sh\npython -c \"(.*)\" > advantages.sql\n(.*?)```", text, re.DOTALL
    )
    (in_python,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    pq.write_table(STEPS, "steps.parquet")

    def advantages(recipe: str) -> list[float]:
        done = subprocess.run(["sh", "-ec", recipe], check=True, capture_output=True, text=True)
        return sorted(float(line.rsplit(",", 1)[1]) for line in done.stdout.splitlines()[1:])

    with open("advantages.sql", "w") as file, redirect_stdout(file):
        exec(make_macro, {})
    assert advantages(in_shell) == pytest.approx(sorted(column(STEPS, "advantage")), rel=1e-12)
    exec(in_python, {})
    again = in_shell.replace("steps.parquet", "keyed.parquet").replace(
        "normalise", "anchor := 'anchor_key', normalise"
    )
    by_key = advantages(again)
    assert by_key == pytest.approx(
        sorted(column(STEPS, "advantage", anchor="similar", similarity=0.9)), rel=1e-12
    )

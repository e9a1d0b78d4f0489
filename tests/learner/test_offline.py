"""A learner that trains on groups of other runs: which steps, for how long, what a crash takes
back, and beside live play.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import configs
from configs import Config, ConfigError
from coordinator import Coordinator
from learner import Learner, check_train_on
from learner.data.batch_loader import PreparedBatch, prepare_batch
from learner.data.training_rows import AdvantageError, check_finite
from learner.data.updates import OFFLINE_STALENESS, with_staleness
from learner.explain import explain, table
from learner.step_times import StepTimes
from learner.training.run_health import StarvationError, check_batches
from learner.training.step_metrics import step_metrics
from row_bounds import MAX_REWARD
from store import (
    FormatError,
    RunLayout,
    VersionRecord,
    export,
    export_selection,
    parse_source,
    take_sources,
    uid_text,
    write_open_sql,
)
from tests.support.fast_directory import fast_directory
from tests.support.forged_dataset import write_dataset
from tests.support.learner_loop import (
    Handle,
    good,
    loader_of,
    make_config,
    make_learner,
    open_coordinator,
    play,
)
from tests.support.run_views import connect

N_SOURCE = 5  # groups of two members; member 1 wins, member 0 does not
COLUMNS = ("group_uid", "member", "advantage", "episode_advantage", "staleness")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


@pytest.fixture(scope="module")
def played() -> Iterator[Path]:
    """A run with N_SOURCE groups of version 3."""
    with fast_directory() as path:
        config = make_config(path / "played", max_staleness=N_SOURCE, steps=9)
        coordinator = open_coordinator(config)
        coordinator.publish(VersionRecord(version=3, path="weights/v3", digest="d", learner_step=0))
        for _ in range(N_SOURCE):
            lease = coordinator.lease("w")
            assert lease is not None
            play(coordinator, lease)
        coordinator.close()
        yield path / "played"


def stored_config(
    run_dir: Path, played: Path, *, steps: int = 9, max_staleness: int = 1, **stored: Any
) -> Config:
    config = make_config(run_dir, max_staleness=max_staleness, steps=steps, checkpoint_every=2)
    config = replace(config, source=[str(played)], offline=replace(config.offline, **stored))
    configs.check(config)
    return config


def make_run(config: Config) -> Config:
    layout = RunLayout.create(Path(config.run_dir), config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=config.max_staleness)
    take_sources(
        layout.root, [parse_source(text) for text in config.source], order=config.offline.order
    )
    return config


def rows(run: Path | str, query: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(query).fetchall()


def next_ready(config: Config) -> PreparedBatch:
    coordinator = open_coordinator(config)
    try:
        batch = coordinator.claim(7)
        assert batch is not None
        return prepare_batch(
            loader_of(coordinator, config=config),
            batch,
            version=7,
            learner_step=1,
            more=None,
        )
    finally:
        coordinator.close()


def loop(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    *,
    playing: Any = lambda _: None,
    stats: Any = None,
) -> Any:
    """A started learner and its coordinator."""
    coordinator = open_coordinator(config)
    answer = stats or (lambda step, updates: good(updates))
    learner: Learner = make_learner(
        monkeypatch,
        config,
        Handle(coordinator, playing=playing),
        lambda _, updates: answer(learner.step + 1, updates),
    )
    return learner, coordinator


def test_rows_left_out_of_training_still_count_in_the_baseline(
    tmp_path: Path, played: Path
) -> None:
    all_of_it = next_ready(make_run(stored_config(tmp_path / "all", played)))
    winners = next_ready(
        make_run(stored_config(tmp_path / "won", played, train_on="won AND advantage > 0"))
    )
    assert (all_of_it.rows.num_rows, winners.rows.num_rows) == (8, 4)
    expected = [row for row in all_of_it.rows.to_pylist() if row["member"] == 1]
    assert [row["advantage"] for row in winners.rows.to_pylist()] == [
        row["advantage"] for row in expected
    ]
    assert all(row["advantage"] > 0 for row in expected), (
        "a winner alone would have nothing to be better than"
    )
    assert (winners.summary.n_rows, winners.summary.success) == (8, 0.5)
    assert winners.filtered == {}
    (update,) = winners.updates
    assert {int(value) for batch in update.micro_batches for value in batch.staleness_N} == {
        OFFLINE_STALENESS
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        {"normalise": "mean"},
        {"normalise": "leave_one_out"},
        {"estimator": "rloo"},
        {"estimator": "dr_grpo"},
    ],
)
@pytest.mark.parametrize("size", [MAX_REWARD, 1e60])
def test_a_datasets_rewards_are_finite_in_the_tensors(
    tmp_path: Path, played: Path, size: float, algorithm: dict[str, str]
) -> None:
    export_selection(played, tmp_path / "out", where=None, as_of=None)
    (part,) = (tmp_path / "out").rglob("*.parquet")
    table = pq.read_table(part)
    index = table.schema.get_field_index("reward")
    rewards = pc.multiply(table["reward"], size)
    table = table.set_column(index, table.schema.field(index), rewards)
    place = write_dataset(tmp_path / "forged", table, run_id="f" * 32, size=2)
    config = stored_config(tmp_path / "run", place)
    config = replace(config, algorithm=replace(config.algorithm, **algorithm))
    if size > MAX_REWARD:
        with pytest.raises(FormatError, match="reward=1e\\+60, which no run writes"):
            make_run(config)
        return
    ready = next_ready(make_run(config))
    batches = [batch for update in ready.updates for batch in update.micro_batches]
    assert all(batch.advantages_N.isfinite().all() for batch in batches)
    assert any(batch.advantages_N.abs().max() > 1e11 for batch in batches)


@pytest.mark.parametrize("name", ["advantage", "value_target", "token_advantage"])
@pytest.mark.parametrize("wrong", [1e39, -1e60, float("inf"), float("nan")])
def test_an_advantage_that_is_no_finite_float32_names_its_group(name: str, wrong: float) -> None:
    uids = [bytes([number]) * 16 for number in range(3)]
    numbers: list[Any] = [0.5, 3.4e38, wrong]
    if name.startswith("token_"):
        numbers = [[0.5, 1.0], [], [3.4e38, wrong]]
    rows = pa.table({"group_uid": pa.array(uids, pa.binary(16)), name: numbers})
    check_finite(rows[:2])
    with pytest.raises(AdvantageError, match=f"group {uid_text(uids[2])} has {name}="):
        check_finite(rows)


def test_a_group_of_which_nothing_is_wanted_says_so(tmp_path: Path, played: Path) -> None:
    first = "group_uid = (SELECT min(group_uid) FROM steps)"
    ready = next_ready(make_run(stored_config(tmp_path / "run", played, train_on=first)))
    kept = set(ready.rows["group_uid"].to_pylist())
    assert ready.filtered == ready.unselected
    (why,) = ready.unselected.values()
    assert len(kept) == 1 and not kept & ready.filtered.keys() and "offline.train_on" in why


@pytest.mark.parametrize(
    "condition", ["wonn", "true) OR (true", "won; SELECT 1", "count(*) > 1", "won FROM steps"]
)
def test_a_condition_that_is_none_is_refused_before_a_run_starts(condition: str) -> None:
    with pytest.raises(ConfigError, match="offline.train_on="):
        check_train_on(condition)
    check_train_on("")
    check_train_on("won AND advantage > 0 -- or any comment")


@pytest.mark.parametrize(
    "condition", ["task_id::INT > 3", "'abc'", "traj_uid = (SELECT traj_uid FROM steps)"]
)
def test_a_condition_that_fails_on_values_only_is_named_and_may_be_replaced(
    tmp_path: Path, played: Path, condition: str
) -> None:
    config = make_run(stored_config(tmp_path / "run", played, train_on=condition))
    with pytest.raises(ConfigError, match=r"offline\.train_on=.* goes on with another one"):
        next_ready(config)
    assert (
        configs.forbidden_changes(
            config, replace(config, offline=replace(config.offline, train_on="won"))
        )
        == []
    )


def test_batches_that_train_on_empties_end_the_run_with_its_name(
    tmp_path: Path, played: Path
) -> None:
    ready = next_ready(make_run(stored_config(tmp_path / "run", played, train_on="false")))
    assert ready.updates == []
    with pytest.raises(
        StarvationError,
        match="no step of it is one of offline.train_on=false. Use another offline.train_on",
    ):
        check_batches(11, success=1.0, unselected=ready.unselected)
    check_batches(11, success=1.0, unselected={})


def test_the_figures_of_a_mixed_batch_tell_what_was_played_from_what_was_stored(
    tmp_path: Path, played: Path
) -> None:
    config = make_run(stored_config(tmp_path / "run", played, share=0.5))
    coordinator = open_coordinator(config)
    coordinator.publish(VersionRecord(version=7, path="weights/v7", digest="d", learner_step=0))
    lease = coordinator.lease("w")
    assert lease is not None
    play(coordinator, lease)
    coordinator.close()
    mixed, offline = (
        next_ready(config),
        next_ready(make_run(stored_config(tmp_path / "offline", played))),
    )
    n_own_tokens = mixed.summary.n_own_tokens
    assert 0 < n_own_tokens < mixed.summary.n_response_tokens
    assert offline.summary.n_own_tokens == 0
    times = StepTimes(step_s=2.0)
    figures = step_metrics(mixed, updates=[], times=times)
    assert figures["tokens/generated_per_s"] == n_own_tokens / 2.0
    assert mixed.summary.own is not None and mixed.summary.offline is not None
    assert (mixed.summary.own.success, mixed.summary.offline.success) == (0.5, 0.5)
    assert (figures["train/success"], figures["offline/success"]) == (0.5, 0.5)
    of_split = rows(
        config.run_dir,
        """SELECT split, avg(episode_return), avg(n_steps)
           FROM trajectories SEMI JOIN lineage USING (group_uid)
           GROUP BY split ORDER BY split DESC""",
    )
    assert [split for split, _, _ in of_split] == ["train", "imported"]
    for name, (_, episode_return, n_steps) in zip(("train", "offline"), of_split, strict=True):
        means = (figures[f"{name}/return"], figures[f"{name}/episode_steps"])
        assert means == pytest.approx((episode_return, n_steps))
    none_played = {"train/success", "train/return", "train/episode_steps", "tokens/generated_per_s"}
    assert not step_metrics(offline, updates=[], times=times).keys() & none_played
    staleness = with_staleness(mixed.rows, version=7).select(["split", "staleness"]).to_pylist()
    assert {(row["split"], row["staleness"]) for row in staleness} == {
        ("train", 0),
        ("imported", OFFLINE_STALENESS),
    }


def test_a_stored_group_is_explained_without_a_staleness(
    tmp_path: Path, played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = next_ready(make_run(stored_config(tmp_path / "run", played)))
    seen: list[set[int]] = []

    def gradients(engine: object, parts: Any) -> tuple[list[None], None]:
        seen.extend(set(part.rows["staleness"].to_pylist()) for part in parts)
        return [None for _ in parts], None

    monkeypatch.setattr("learner.explain._gradients", gradients)
    explanation = explain(
        SimpleNamespace(learner=make_config(tmp_path, max_staleness=1).learner), ready
    )  # type: ignore[arg-type]
    assert [group.staleness for group in explanation.groups] == [None, None]
    assert list(table(explanation).columns[4].cells) == ["-", "-"]
    assert seen == [{OFFLINE_STALENESS}, {OFFLINE_STALENESS}]


def test_a_run_ends_in_order_where_its_groups_are_used_up_and_goes_on_with_more_uses(
    tmp_path: Path, played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(stored_config(tmp_path / "run", played))
    learner, coordinator = loop(monkeypatch, config)
    assert learner.run() == 2, "five groups are two batches of two"
    (notice,) = coordinator.status().notices.values()
    assert "learner step 2 of 9" in notice and "offline.uses=1" in notice
    assert coordinator.lease("w") is None and coordinator.catalog.outstanding() == 0
    coordinator.close()
    more = replace(config, offline=replace(config.offline, uses=3))
    assert configs.forbidden_changes(config, more) == []
    learner, coordinator = loop(monkeypatch, more)
    assert learner.run() == 7
    coordinator.close()
    assert rows(config.run_dir, "SELECT max(use), count(*) FROM lineage WHERE live") == [(3, 14)]
    uses = (
        "SELECT min(n), max(n) "
        "FROM (SELECT count(*) AS n FROM lineage WHERE live GROUP BY group_uid)"
    )
    assert rows(config.run_dir, uses) == [(2, 3)]
    assert rows(config.run_dir, "SELECT count(*) FROM staleness_violations") == [(0,)]
    assert rows(config.run_dir, "SELECT count(*) FROM metrics WHERE name = 'staleness/max'") == [
        (0,)
    ]
    source = RunLayout.open(played).info.run_id
    assert rows(config.run_dir, "SELECT DISTINCT source, staleness, version_min FROM lineage") == [
        (source, None, 3)
    ]


def test_a_crash_unuses_what_no_checkpoint_has(
    tmp_path: Path, played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(stored_config(tmp_path / "run", played, uses=2))

    def until_killed(step: int, updates: Any) -> Any:
        if step == 4:
            raise MemoryError
        return good(updates)

    first, coordinator = loop(monkeypatch, config, stats=until_killed)
    with pytest.raises(MemoryError):
        first.run()
    coordinator.close()
    again, coordinator = loop(monkeypatch, config)
    assert again.step == 2
    assert again.run() == 5
    coordinator.close()
    batches = (
        "SELECT learner_step, list_sort(list(task_id || use)) FROM lineage "
        "WHERE {} AND learner_step = 3 GROUP BY 1"
    )
    assert rows(config.run_dir, batches.format("live")) == rows(
        config.run_dir, batches.format("NOT live")
    ), "the same again"
    assert rows(config.run_dir, "SELECT count(*) FROM lineage WHERE live") == [(10,)]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_live_and_stored_groups_together(
    tmp_path: Path, played: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """Half of each batch is played meanwhile, within the bound.

    The offline half is of no version of this run.
    """
    config = make_run(
        stored_config(tmp_path / "run", played, steps=4, share=0.5, max_staleness=max_staleness)
    )
    most: list[int] = []

    def play_what_is_admitted(coordinator: Coordinator) -> None:
        while (lease := coordinator.lease("w")) is not None:
            play(coordinator, lease)
        most.append(coordinator.catalog.outstanding())

    learner, coordinator = loop(monkeypatch, config, playing=play_what_is_admitted)
    assert learner.run() == 4
    coordinator.close()
    assert max(most) == max_staleness + 1, "admission counts the live ones only"
    per_step = (
        "SELECT learner_step, count(source), count(*) FROM lineage WHERE live GROUP BY 1 ORDER BY 1"
    )
    assert rows(config.run_dir, per_step) == [(step, 1, 2) for step in range(1, 5)]
    assert rows(
        config.run_dir,
        "SELECT max(staleness) <= ?::INT FROM lineage".replace("?", str(max_staleness)),
    ) == [(True,)]
    assert rows(config.run_dir, "SELECT count(*) FROM staleness_violations") == [(0,)]
    assert rows(config.run_dir, "SELECT sum(value) FROM metrics WHERE name = 'groups/offline'") == [
        (4.0,)
    ]


def test_without_live_play_no_environment_is_needed(tmp_path: Path, played: Path) -> None:
    config = make_run(stored_config(tmp_path / "run", played))
    elsewhere = replace(config, env=configs.EnvConfig(name="not_installed_here:World"))
    coordinator = open_coordinator(elsewhere)
    export(coordinator.catalog, coordinator.layout)
    coordinator.publish(VersionRecord(version=20, path="weights/v20", digest="d", learner_step=20))
    assert coordinator.catalog.open_heldout() == 0, "nobody would play the evaluation"
    coordinator.close()

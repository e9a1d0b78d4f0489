"""Test the way from a claimed batch to updates: the rows, their order and their staleness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from configs import AlgorithmConfig, Config, CriticConfig
from coordinator import Coordinator
from learner.data.batch_loader import PreparedBatch, in_batch_order, prepare_batch
from learner.data.micro_batch import MicroBatch
from learner.data.updates import cut_updates
from learner.training.critic import CriticStats
from learner.training.engine import train_batch
from learner.training.step_metrics import UpdateStats, means
from row_bounds import TEXT_COLUMNS
from store import WIDE_SCHEMA, DigestError, VersionRecord, read_segments
from tests.support.fast_directory import fast_directory
from tests.support.learner_loop import loader_of, make_config, open_coordinator, play, play_all


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = open_coordinator(make_config(tmp_path / "run", max_staleness=2))
    coordinator.publish(VersionRecord(version=0, path="weights/v0", digest="d", learner_step=0))
    yield coordinator
    coordinator.close()


def next_ready(
    coordinator: Coordinator, *, config: Config | None = None, version: int = 0
) -> PreparedBatch:
    source = loader_of(coordinator, config=config)
    batch = source.claim(version)
    assert batch is not None
    return prepare_batch(source, batch, version=version, learner_step=version + 1, more=None)


def test_a_group_without_a_signal_is_counted_but_not_trained_on(coordinator: Coordinator) -> None:
    for alike in (True, False):
        lease = coordinator.lease("w")
        assert lease is not None
        play(coordinator, lease, alike=alike, n_response_tokens=3)
    ready = next_ready(coordinator)
    silent, telling = (group.group_uid for group in ready.batch.groups)
    assert list(ready.filtered) == [silent]
    assert set(ready.rows["group_uid"].to_pylist()) == {telling}
    assert (ready.summary.n_rows, ready.rows.num_rows) == (8, 4)
    assert (ready.summary.n_response_tokens, ready.summary.success) == (24, 0.5)
    (update,) = ready.updates
    assert sum(batch.n_response_tokens for batch in update.micro_batches) == 12
    assert {"advantage", "episode_advantage", "step_advantage", "anchor_size"} <= set(
        ready.rows.column_names
    )


def test_a_batch_without_any_signal_has_no_updates(coordinator: Coordinator) -> None:
    play_all(coordinator, alike=True)
    ready = next_ready(coordinator)
    assert (ready.rows.num_rows, ready.updates, len(ready.filtered)) == (0, [], 2)


@pytest.mark.parametrize("updates_per_step", [2, 9])
def test_a_batch_without_any_signal_that_is_cut_in_several_has_no_updates(
    coordinator: Coordinator, updates_per_step: int
) -> None:
    play_all(coordinator, alike=True)
    learner = replace(coordinator.config.learner, updates_per_step=updates_per_step)
    ready = next_ready(coordinator, config=replace(coordinator.config, learner=learner))
    assert (ready.rows.num_rows, ready.updates, len(ready.filtered)) == (0, [], 2)


def test_cloning_filters_no_group(coordinator: Coordinator) -> None:
    play_all(coordinator, alike=True)
    config = replace(
        coordinator.config, loss=replace(coordinator.config.loss, policy="behaviour_cloning")
    )
    assert next_ready(coordinator, config=config).rows.num_rows == 8


@pytest.mark.parametrize(
    ("algorithm", "train_on", "texts"),
    [
        ({}, "", set()),
        ({"anchor": "state_and_actions"}, "", {"admissible_actions"}),
        ({"anchor": "similar"}, "", {"anchor_text"}),
        (
            {"anchor": "similar", "estimator": "graphgpo"},
            "",
            {"anchor_text", "final_anchor_text"},
        ),
        ({}, "reward > 0", set(TEXT_COLUMNS)),  # it may ask anything
    ],
)
def test_texts_are_read_only_if_something_is_asked_of_them(
    coordinator: Coordinator, algorithm: dict[str, str], train_on: str, texts: set[str]
) -> None:
    """The attack: observations of 64 million characters filled the learner's memory."""
    play_all(coordinator)
    source = loader_of(coordinator)
    settings = replace(
        source.settings,
        advantages=replace(source.settings.advantages, **algorithm),
        train_on=train_on,
    )
    columns = set(settings.columns)
    assert columns == set(WIDE_SCHEMA.names) - set(TEXT_COLUMNS) | texts
    if "admissible_actions" in texts:  # which these rows do not have
        return
    source = replace(source, settings=settings)
    batch = source.claim(0)
    assert batch is not None
    ready = prepare_batch(source, batch, version=0, learner_step=1, more=None)
    assert columns == set(WIDE_SCHEMA.names).intersection(ready.rows.column_names)


def test_staleness_is_counted_from_the_version_it_is_trained_at(coordinator: Coordinator) -> None:
    play_all(coordinator)
    ready = next_ready(coordinator, version=2)
    assert ready.version == 2
    (update,) = ready.updates
    assert {int(value) for batch in update.micro_batches for value in batch.staleness_N} == {2}


def test_a_file_that_changed_on_disk_is_refused(coordinator: Coordinator) -> None:
    play_all(coordinator)
    for path in coordinator.layout.segments.rglob("*.parquet"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DigestError, match="its bytes changed on disk"):
        next_ready(coordinator)


def test_rows_come_as_claimed_whatever_files_they_are_in(coordinator: Coordinator) -> None:
    play_all(coordinator)
    batch = coordinator.claim(0)
    assert batch is not None
    rows = read_segments(coordinator.layout, batch.segments)
    ordered = in_batch_order(rows, batch)
    assert in_batch_order(rows.take(pa.array([5, 0, 7, 2, 4, 1, 6, 3])), batch).equals(ordered)
    keys = [
        tuple(row.values())
        for row in ordered.select(["group_uid", "member", "step_index"]).to_pylist()
    ]
    uids = [group.group_uid for group in batch.groups]
    assert keys == [(uid, member, step) for uid in uids for member in range(2) for step in range(2)]


def make_rows(versions: list[int], lengths: list[int]) -> pa.Table:
    n = len(versions)
    return pa.table(
        {
            "traj_uid": pa.array([bytes([row]) * 16 for row in range(n)], pa.binary(16)),
            "step_index": pa.array([0] * n, pa.int32()),
            "prompt_ids": pa.array([[1, 2]] * n, pa.list_(pa.int32())),
            "response_ids": pa.array([[3] * length for length in lengths], pa.list_(pa.int32())),
            "response_logprobs": pa.array(
                [[-0.5] * length for length in lengths], pa.list_(pa.float32())
            ),
            "advantage": pa.array([float(row) for row in range(n)], pa.float64()),
            "version_min": pa.array(versions, pa.int64()),
            "split": pa.array(["train"] * n, pa.string()),
        }
    )


def learner_config(**changes: Any) -> Any:
    return replace(Config().learner, **changes)


def test_the_example_in_the_docstring() -> None:
    rows = make_rows([6, 6, 7, 7, 7], [1] * 5)
    updates = cut_updates(rows, learner=learner_config(updates_per_step=2), version=7, seed=3)
    assert [update.rows.num_rows for update in updates] == [3, 2]
    seen = {}
    for update in updates:
        for batch in update.micro_batches:
            for row, advantage, staleness in zip(
                batch.rows_N, batch.advantages_N, batch.staleness_N, strict=True
            ):
                # rows_N counts in the update's own rows
                assert update.rows["advantage"][int(row)].as_py() == float(advantage)
                seen[float(advantage)] = int(staleness)
    assert seen == {0.0: 1, 1.0: 1, 2.0: 0, 3.0: 0, 4.0: 0}


def test_updates_of_a_given_number_of_rows_count_steps_whether_they_are_merged_or_not() -> None:
    """Seven steps of one trajectory, each of which repeats the last one's tokens: 3, 3 and 1 of
    them, on two ranks.
    """
    prompts = [list(range(1, 2 + 2 * step)) for step in range(7)]
    rows = pa.table(
        {
            "traj_uid": pa.array([bytes(16)] * 7, pa.binary(16)),
            "step_index": pa.array(range(7), pa.int32()),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(
                [[len(prompt) + 1] for prompt in prompts], pa.list_(pa.int32())
            ),
            "response_logprobs": pa.array([[-0.5]] * 7, pa.list_(pa.float32())),
            "advantage": pa.array([float(step) for step in range(7)], pa.float64()),
            "version_min": pa.array([0] * 7, pa.int64()),
            "split": pa.array(["train"] * 7, pa.string()),
        }
    )
    learner = learner_config(rows_per_update=3, ranks=2)
    updates = cut_updates(rows, learner=learner, version=0, seed=1)
    n_rows = [sum(batch.n_rows for batch in update.micro_batches) for update in updates]
    assert n_rows == [3, 3, 1]
    assert [len(update.micro_batches) % 2 for update in updates] == [0, 0, 0]


def test_parts_without_a_response_token_are_left_out() -> None:
    assert cut_updates(make_rows([0, 0], [0, 0]), learner=learner_config(), version=0, seed=0) == []
    (update,) = cut_updates(
        make_rows([0, 0], [0, 2]), learner=learner_config(updates_per_step=2), version=0, seed=0
    )
    assert update.rows["advantage"].to_pylist() == [1.0]


def test_the_order_of_rows_is_that_of_the_seed() -> None:
    rows, learner = make_rows(list(range(8)), [1] * 8), learner_config(updates_per_step=2)

    def cut(seed: int) -> list[float]:
        return (
            cut_updates(rows, learner=learner, version=9, seed=seed)[0]
            .rows["advantage"]
            .to_pylist()
        )

    assert cut(4) == cut(4)
    assert any(cut(4) != cut(seed) for seed in range(5, 9))


class Noted:
    """Stand in for an engine: note which network is trained, and return no statistics."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        self.calls.append(f"policy {len(updates)}")
        return []

    def train_critic(self, updates: Sequence[Sequence[MicroBatch]]) -> list[CriticStats]:
        self.calls.append(f"critic {len(updates)}")
        return []


def test_the_policy_waits_for_the_warm_up_of_a_critic_and_nothing_trains_on_nothing() -> None:
    updates = cut_updates(
        make_rows([0, 0], [1, 1]), learner=learner_config(updates_per_step=2), version=0, seed=0
    )
    config = Config(
        algorithm=AlgorithmConfig(estimator="turn_ppo"), critic=CriticConfig(warmup_steps=1)
    )
    engine = Noted()
    for learner_step in (1, 2):
        train_batch(engine, [], config=config, learner_step=learner_step)
        train_batch(engine, updates, config=config, learner_step=learner_step)
    train_batch(engine, updates, config=Config(), learner_step=1)
    assert engine.calls == ["critic 2", "critic 2", "policy 2", "policy 2"]


def test_a_figure_is_the_mean_of_the_records_that_have_it() -> None:
    assert means([{"a": 1.0, "b": 5.0}, {"a": 3.0}]) == {"a": 2.0, "b": 5.0}
    assert means([]) == {}

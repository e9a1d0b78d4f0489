"""The critic: its values and updates on one rank, whatever the cut and the ZeRO stage, and what a
checkpoint keeps of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from configs import Config, CriticConfig, LearnerConfig, LossConfig, ModelConfig
from learner.checkpoint import CheckpointError, load_checkpoint, read_content
from learner.data.micro_batch import MicroBatch, first_tokens, micro_batches
from learner.data.values import critic_values
from learner.distributed.optimizer_state import MASTER, read_state, trainable
from learner.model.tiny_model import make_tiny_model, train_tokenizer
from learner.training.engine import Engine
from tests.support.engine_samples import (
    CUT,
    WHOLE,
    copied,
    history_rows,
    make_base,
    random_rows,
    save_checkpoint,
    with_places,
)
from tests.support.learner_samples import one_step_each

CRITIC = CriticConfig(learning_rate=1e-2, clip=100.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("critic") / "base")


@contextmanager
def engine_of(
    base: Path, *, zero_stage: int = 0, lora_rank: int = 0, critic: CriticConfig | None = CRITIC
) -> Iterator[Engine]:
    engine = Engine(
        model_path=base,
        model=ModelConfig(lora_rank=lora_rank),
        learner=LearnerConfig(zero_stage=zero_stage, learning_rate=1e-3, weight_decay=0.0),
        loss=LossConfig(),
        critic=critic,
        temperature=1.0,
        seed=0,
    )
    try:
        yield engine
    finally:
        engine.close()


def cut(rows: pa.Table, tokens: int, *, merge_steps: bool = False) -> list[MicroBatch]:
    """Rows with the values 0 and targets that can be read off their first prompt token."""
    targets = [float(ids[0] % 5) for ids in rows["prompt_ids"].to_pylist()]
    rows = rows.append_column("value", pa.array([0.0] * len(rows)))
    rows = rows.append_column("value_target", pa.array(targets))
    rows = rows if merge_steps else one_step_each(rows)
    return micro_batches(rows, micro_batch_tokens=tokens, ranks=1)


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    assert engine.critic is not None
    parameters = trainable(engine.critic.network)
    read = read_state(engine.critic.deepspeed, parameters, kind=MASTER)
    return {name: tensor.clone() for name, tensor in read}


def test_first_tokens_by_hand() -> None:
    assert first_tokens(torch.tensor([7, 7, 7, 2, 2, 9])).tolist() == [0, 3, 5]
    assert first_tokens(torch.tensor([], dtype=torch.int64)).tolist() == []


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_it_begins_with_0_and_learns_its_targets_and_the_policy_stays(
    base: Path, lora_rank: int
) -> None:
    with engine_of(base, lora_rank=lora_rank) as engine:
        batches, policy = cut(random_rows(), WHOLE), copied(engine)
        assert torch.cat(engine.values(batches)).abs().max() == 0.0
        first, *_, last = engine.train_critic([batches] * 60)
        assert last.loss < 0.05 * first.loss and not last.skipped
        assert first.explained_variance == pytest.approx(0.0, abs=1e-6)
        assert all(torch.equal(tensor, policy[name]) for name, tensor in engine.weights())
        assert engine.critic is not None
        projection = engine.critic.network.causal_lm.get_output_embeddings()
        assert isinstance(projection, torch.nn.Identity), "no projection to the vocabulary"


def test_its_clip_acts_from_the_second_update_of_a_learner_step_on(base: Path) -> None:
    """The first update also moves the values of the other rows, whose old value is still 0."""
    rows, found = random_rows(16), {}
    for clip in (0.01, 100.0):
        with engine_of(base, critic=replace(CRITIC, clip=clip)) as engine:
            found[clip] = engine.train_critic([cut(rows[:8], WHOLE), cut(rows[8:], WHOLE)])
    first, second = found[0.01]
    unclipped_first, unclipped_second = found[100.0]
    assert first.clip_fraction == 0.0 and first.grad_norm == unclipped_first.grad_norm
    assert second.clip_fraction > unclipped_second.clip_fraction == 0.0
    assert second.grad_norm < unclipped_second.grad_norm


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_neither_the_cut_nor_the_stage_changes_an_update(base: Path, zero_stage: int) -> None:
    """Also of merged steps, whose values are read where each response begins."""
    rows = history_rows()
    ways = [(WHOLE, False), (CUT, True)]
    found = []
    for tokens, merge_steps in ways if zero_stage else [*ways, (1, False)]:
        with engine_of(base, zero_stage=zero_stage) as engine:
            batches = cut(rows, tokens, merge_steps=merge_steps)
            stats = engine.train_critic([batches, batches])
            found.append((stats, weights(engine), by_row(engine.values(batches), batches)))
    expected, expected_weights, expected_values = found[0]
    assert len(expected_values) == len(rows)
    for stats, tensors, values in found[1:]:
        for one, other in zip(stats, expected, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-4)
            assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
        assert tensors["output.bias"] == pytest.approx(expected_weights["output.bias"], rel=1e-3)
        assert values == pytest.approx(expected_values, rel=2e-2, abs=1e-3)


def by_row(values: list[torch.Tensor], batches: list[MicroBatch]) -> dict[int, float]:
    found = {}
    for batch, values_N in zip(batches, values, strict=True):
        for first in first_tokens(batch.rows_N).tolist():
            found[int(batch.rows_N[first])] = float(values_N[first])
    return dict(sorted(found.items()))


def test_an_update_that_is_not_finite_changes_nothing(base: Path) -> None:
    with engine_of(base) as engine:
        batches = cut(random_rows(), WHOLE)
        engine.train_critic([batches])
        before = weights(engine)
        assert batches[0].value_targets_N is not None
        bad = [replace(batches[0], value_targets_N=batches[0].value_targets_N * float("nan"))]
        (stats,) = engine.train_critic([bad])
        assert stats.skipped and stats.loss == float("inf")
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_checkpoint_goes_on_bit_for_bit_with_another_stage(
    base: Path, tmp_path: Path, lora_rank: int
) -> None:
    batches = cut(random_rows(), WHOLE)
    with engine_of(base, lora_rank=lora_rank) as engine:
        engine.train_critic([batches] * 3)
        engine.train([batches])
        save_checkpoint(engine, tmp_path / "step000001", learner_step=1, version=1, lsn=0)
        engine.train_critic([batches])
        expected = weights(engine)
    content = read_content(tmp_path / "step000001")
    assert (content.adam_steps, content.critic_adam_steps) == (1, 3)
    assert "critic.output.weight" in content.parameters
    assert not any(name.startswith("critic.") for name in content.policy_parameters)
    for stage in (0, 2):
        with engine_of(base, lora_rank=lora_rank, zero_stage=stage) as engine:
            load_checkpoint(engine, tmp_path / "step000001")
            engine.train_critic([batches])
            found = weights(engine)
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                assert torch.allclose(tensor, expected[name], rtol=0, atol=0 if not stage else 1e-7)
    with (
        engine_of(base, lora_rank=lora_rank, critic=None) as engine,
        pytest.raises(CheckpointError, match="critic"),
    ):
        load_checkpoint(engine, tmp_path / "step000001")


def test_a_network_of_its_own_may_be_smaller(base: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["go north"] * 9, vocabulary_size=280)
    tiny = Config().model.tiny
    small = replace(tiny, vocabulary_size=280, hidden_size=32, layers=1)
    make_tiny_model(tmp_path / "small", tokenizer=tokenizer, config=small, seed=1)
    with engine_of(base, critic=replace(CRITIC, path=str(tmp_path / "small"))) as engine:
        first, *_, last = engine.train_critic([cut(random_rows(), WHOLE)] * 20)
        assert last.loss < first.loss
        assert engine.critic is not None and engine.critic.network.output.weight.shape == (1, 32)


def test_it_learns_the_value_of_each_token_whatever_the_cut(base: Path) -> None:
    """Each token's target is its place in the response. The loss is the mean over tokens, not
    over rows.
    """
    rows = with_places(history_rows())
    places = rows["token_value_target"].to_pylist()
    flat = [place for of_row in places for place in of_row]
    losses = []
    for tokens, merge_steps in ((WHOLE, False), (CUT, True)):
        batches = cut(rows, tokens, merge_steps=merge_steps)
        found = {
            int(row): batch.advantages_N[batch.rows_N == row].tolist()
            for batch in batches
            for row in batch.rows_N.unique()
        }
        assert [found[row] for row in range(len(rows))] == places
        with engine_of(base) as engine:
            stats = engine.train_critic([batches] * 20)
        assert stats[0].loss == pytest.approx(sum(x**2 for x in flat) / len(flat) / 2, rel=1e-6)
        losses.append([one.loss for one in stats])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[0][-1] < 0.5 * losses[0][0]


def test_a_step_without_a_response_has_a_value_too() -> None:
    """The critic is asked for each row; here it answers with the number of tokens before. Of the
    row without a response only the row has a value.
    """
    rows = random_rows(3)
    for name, kind in (("response_ids", pa.int32()), ("response_logprobs", pa.float32())):
        lists = rows[name].to_pylist()
        index = rows.column_names.index(name)
        rows = rows.set_column(index, name, pa.array([lists[0], [], lists[2]], pa.list_(kind)))
    rows = rows.drop_columns(["advantage", "staleness"])

    def lengths(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        return [batch.position_ids_T[batch.positions_N].float() + 1 for batch in batches]

    values_R, values_N = critic_values(rows, lengths, learner=LearnerConfig())
    before = [len(ids) for ids in rows["prompt_ids"].to_pylist()]
    assert values_R.tolist() == before
    n_tokens = [len(ids) for ids in rows["response_ids"].to_pylist()]
    pairs = zip(before, n_tokens, strict=True)
    assert values_N.tolist() == [start + t for start, n in pairs for t in range(n)]

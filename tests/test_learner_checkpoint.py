from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from configs import LearnerConfig, LossConfig, ModelConfig, TinyModelConfig
from learner.batch import MicroBatch, micro_batches
from learner.checkpoint import (
    CheckpointError,
    CheckpointPoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from learner.engine import Engine
from learner.tiny_model import make_tiny_model, train_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    config = TinyModelConfig(vocabulary_size=280, hidden_size=32, layers=1, heads=1)
    make_tiny_model(path, train_tokenizer(["go north"] * 9, vocabulary_size=280), config, seed=0)
    return path


def make_engine(base: Path, *, zero_stage: int, dtype: str) -> Engine:
    learner = LearnerConfig(learning_rate=1e-2, warmup_updates=8, zero_stage=zero_stage)
    model = ModelConfig(dtype=dtype)
    return Engine(model_path=base, model=model, learner=learner, loss=LossConfig(kl_coef=0.1), temperature=1.0, seed=0)


def drawn_batches() -> list[MicroBatch]:
    """Different at each call, by the process's random states: the data goes on only where those are restored."""
    prompts = torch.randint(8, 264, (6, 5)).tolist()
    responses = np.random.randint(8, 264, (6, 3)).tolist()
    table = pa.table(
        {
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "response_logprobs": pa.array([[-5.6] * 3] * 6, pa.list_(pa.float32())),
            "advantage": pa.array([random.gauss(0.0, 1.0) for _ in range(6)], pa.float64()),
            "staleness": pa.array([0] * 6, pa.int64()),
        }
    )
    return micro_batches(table, micro_batch_tokens=16)


def copied(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_dict().items()}


@pytest.mark.parametrize(("zero_stage", "dtype"), [(0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16")])
def test_a_loaded_run_goes_on_bit_for_bit(base: Path, tmp_path: Path, zero_stage: int, dtype: str) -> None:
    engine = make_engine(base, zero_stage=zero_stage, dtype=dtype)
    for _ in range(2):
        engine.update(drawn_batches())
    save_checkpoint(engine, tmp_path / "step_000002", learner_step=2, version=3)
    saved = copied(engine)
    straight = [engine.update(drawn_batches()) for _ in range(2)]
    end = copied(engine)
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]

    torch.rand(5), np.random.rand(5), random.random()
    again = make_engine(base, zero_stage=zero_stage, dtype=dtype)
    point = load_checkpoint(again, tmp_path / "step_000002")
    assert point == CheckpointPoint(learner_step=2, version=3, n_updates=2)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())
    assert [again.update(drawn_batches()) for _ in range(2)] == straight
    assert all(torch.equal(tensor, end[name]) for name, tensor in again.state_dict().items())
    assert not all(torch.equal(tensor, saved[name]) for name, tensor in end.items())
    again.close()


def test_a_checkpoint_that_does_not_fit_is_refused(base: Path, tmp_path: Path) -> None:
    engine = make_engine(base, zero_stage=0, dtype="float32")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_checkpoint(engine, tmp_path / "step_000001")
    save_checkpoint(engine, tmp_path / "step_000001", learner_step=1, version=1)
    point = tmp_path / "step_000001" / "checkpoint.json"
    content = json.loads(point.read_text())
    point.write_text(json.dumps(content | {"zero_stage": 2}))
    with pytest.raises(CheckpointError, match=r"written with learner\.zero_stage=2, not 0"):
        load_checkpoint(engine, tmp_path / "step_000001")
    point.write_text(json.dumps(content | {"format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99"):
        load_checkpoint(engine, tmp_path / "step_000001")
    engine.close()


def test_an_interrupted_save_is_never_seen(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(base, zero_stage=0, dtype="float32")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(engine, tmp_path / "step_000001", learner_step=1, version=1)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001.tmp"]
    save_checkpoint(engine, tmp_path / "step_000001", learner_step=1, version=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    engine.close()


def test_pruning_keeps_the_last(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        (tmp_path / f"step_{step:06d}").mkdir()
    assert prune_checkpoints(tmp_path, keep=2) == ["step_000009"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000100"]

"""The memory plan against what DeepSpeed holds: bytes a parameter at an optimizer step, counted in
tensors.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs import Config, LearnerConfig, LossConfig, ModelConfig, TinyModelConfig, rank_bytes
from configs.model_size import model_billions
from learner import make_tiny_model, train_tokenizer
from learner.training.engine import Engine
from tests.support.engine_samples import cut, random_rows

SMALL_BYTES = 0.5  # a parameter: what is not counted, such as batches


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with little but matrices."""
    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def storages() -> dict[int, int]:
    """Bytes of every tensor's storage, by address; a gradient is no object of its own until it is
    asked for.
    """
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    return {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in tensors
        if one.layout == torch.strided
    }


@pytest.mark.parametrize("layers", [1, 3])
def test_the_plan_counts_the_parameters_of_a_tiny_model(layers: int, tmp_path: Path) -> None:
    tiny = TinyModelConfig(vocabulary_size=280, layers=layers)
    tokenizer = train_tokenizer(["go north"] * 9, vocabulary_size=tiny.vocabulary_size)
    make_tiny_model(tmp_path / "tiny", tokenizer=tokenizer, config=tiny, seed=0)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "tiny")
    planned = model_billions(Config(model=ModelConfig(tiny=tiny))) * 1e9
    # Without biases and norms.
    assert planned == pytest.approx(model.num_parameters(), rel=0.02)


@pytest.mark.parametrize(
    ("dtype", "zero_stage", "at_step"),
    [("float32", 0, 16.0), ("float32", 1, 20.0), ("bfloat16", 1, 20.0), ("bfloat16", 2, 18.0)],
)
def test_the_plan_has_room_for_all_that_deepspeed_keeps(
    base: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, zero_stage: int, at_step: float
) -> None:
    held: list[int] = []
    step = torch.optim.AdamW.step

    def counted(adam: torch.optim.AdamW) -> None:
        step(adam)
        held.append(sum(size for address, size in storages().items() if address not in before))

    model, learner = ModelConfig(dtype=dtype), LearnerConfig(zero_stage=zero_stage)
    before = storages()
    engine = Engine(
        model_path=base, model=model, learner=learner, loss=LossConfig(), temperature=1.0, seed=0
    )
    n_parameters = sum(parameter.numel() for parameter in engine.policy.parameters())
    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    engine.update(cut(random_rows(4), 30))
    engine.close()
    (found,) = held
    planned = rank_bytes(Config(model=model, learner=learner), parameters=n_parameters)
    assert found / n_parameters == pytest.approx(at_step, abs=SMALL_BYTES)
    assert found <= planned * (1 + SMALL_BYTES / at_step)

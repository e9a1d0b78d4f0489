"""Test that ZeRO 3 loads a model part by part, and gives the model that is loaded whole."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs import ConfigError, LearnerConfig, LossConfig, ModelConfig
from learner.distributed import deepspeed_setup
from learner.distributed.deepspeed_setup import LOOPBACK, host_ranks, join_ranks
from learner.distributed.partitioned_load import is_partitioned, load_partitioned
from learner.model import policy_model
from learner.model.policy_model import load_policy
from learner.training.engine import Engine
from tests.support.engine_samples import copied, cut, make_base, random_rows
from tests.support.forked_ranks import forked_ranks

EMBEDDING = "model.embed_tokens.weight"
DEADLINE_S = 600.0  # only for what hangs
LEARNER = LearnerConfig(zero_stage=3, learning_rate=1e-2)


def make_model(path: Path, *, layers: int, hidden: int, tied: bool = True) -> Path:
    config = Qwen2Config(
        vocab_size=300,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", layers=16, hidden=512)
    small = make_model(tmp_path / "small", layers=1, hidden=64)
    store = host_ranks(LOOPBACK)
    arguments = (f"{LOOPBACK}:{store.port}", base, small, tmp_path)
    with forked_ranks("tests.support.partitioned_ranks", 2, *arguments) as ranks:
        assert ranks.wait(DEADLINE_S) == 0
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    n_elements = sum(tensor.numel() for tensor in load_file(base / "model.safetensors").values())
    assert sum(each["n_own"] for each in found) == n_elements
    for each in found:
        assert each["are_equal"] and each["is_trimmed"]
        # Half of the weights, and a few layers while they are read, sent and checked.
        assert each["peak"] < 0.75 * 4 * n_elements < each["whole_peak"], found


@pytest.fixture
def divides_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide small parameters too, which would stay whole."""
    monkeypatch.setattr(deepspeed_setup, "WHOLE_ELEMENTS", 0)


def trained(base: Path, *, divided: bool, tied: bool, dtype: str) -> dict[str, torch.Tensor]:
    engine = Engine(
        model_path=base,
        model=ModelConfig(dtype=dtype),
        learner=LEARNER,
        loss=LossConfig(kl_coef=0.1),
        temperature=1.0,
        seed=0,
    )
    for model in (engine.policy, engine.reference):
        assert model is not None and model.is_trimmed
    assert is_partitioned(engine.policy)
    assert engine.reference is not None and is_partitioned(engine.reference) == divided
    for _ in range(2):
        engine.update(cut(random_rows(), 40))
    weights = copied(engine)
    engine.close()
    assert ("lm_head.weight" in weights) == (not tied)
    return weights


@pytest.mark.parametrize(("tied", "dtype"), [(True, "bfloat16"), (False, "float32")])
@pytest.mark.usefixtures("divides_all")
def test_a_divided_model_and_its_reference_train_like_those_that_were_loaded_whole(
    tmp_path: Path, tied: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_model(tmp_path / "base", layers=3, hidden=64, tied=tied)
    divided = trained(base, divided=True, tied=tied, dtype=dtype)
    monkeypatch.setattr(policy_model, "load_partitioned", lambda *given, **more: None)
    whole = trained(base, divided=False, tied=tied, dtype=dtype)
    assert whole.keys() == divided.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(divided[name], tensor, rtol=1e-6, atol=1e-7)


def divide(base: Path) -> bool:
    """Return whether the model in `base` was divided while it was loaded."""
    join_ranks(0, ranks=1, address=None)
    policy = load_policy(
        base,
        dtype="float32",
        gradient_checkpointing=False,
        temperature=1.0,
        divided_by=LEARNER,
    )
    return is_partitioned(policy)


def rewrite(base: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of a model's file, or leave them out."""
    file = base / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def test_weights_under_older_names_are_loaded_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_base(tmp_path / "base")
    assert divide(base)
    file = base / "model.safetensors"
    older = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    save_file(older, file, metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        assert not divide(base)
    assert "every rank loads all of" in caplog.text and "its files have no" in caplog.text


def test_an_output_layer_in_the_files_of_a_tied_model_is_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_base(tmp_path / "base")
    rewrite(base, {"lm_head.weight": load_file(base / "model.safetensors")[EMBEDDING].clone()})
    with caplog.at_level(logging.WARNING):
        assert not divide(base)
    assert "its files have lm_head.weight, which is tied to another weight" in caplog.text


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("model.norm.weight", None), ("model.norm.weight", torch.ones(3))],
    ids=["missing", "of another shape"],
)
def test_a_weight_that_is_missing_is_named(
    tmp_path: Path, name: str, tensor: torch.Tensor | None
) -> None:
    base = make_base(tmp_path / "base")
    rewrite(base, {name: tensor})
    with pytest.raises(ConfigError, match=r"lack model\.norm\.weight in the shape"):
        divide(base)


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="the weights in .* cannot be loaded"):
        divide(base)


def test_a_model_that_is_made_without_weights_takes_no_random_numbers(tmp_path: Path) -> None:
    """Adapters begin with the seed's numbers, the same at every ZeRO stage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base = make_base(tmp_path / "base")
    join_ranks(0, ranks=1, address=None)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    config = AutoConfig.from_pretrained(base)
    made = load_partitioned(
        base,
        model_of=AutoModelForCausalLM,
        config=config,
        dtype=torch.float32,
        learner=LEARNER,
    )
    assert made is not None and torch.equal(torch.random.get_rng_state(), before)

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs import TinyModelConfig
from learner.policy_model import PolicyModel, load_policy
from learner.publish import copy_weights, file_digest, prune_versions, visible_last, write_weights
from learner.tiny_model import make_tiny_model, train_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    config = TinyModelConfig(vocabulary_size=280, hidden_size=32, layers=1, heads=1)
    make_tiny_model(path, train_tokenizer(["go north"] * 9, vocabulary_size=280), config, seed=0)
    return path


@pytest.fixture
def policy(base: Path) -> PolicyModel:
    return load_policy(base, dtype="float32", gradient_checkpointing=False, temperature=1.0)


def test_a_published_directory_loads_and_equals_the_live_weights(base: Path, policy: PolicyModel, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.125)
    digest = write_weights(policy.weights(), tmp_path / "v000001", source_dir=base)
    assert digest == file_digest(tmp_path / "v000001" / "model.safetensors")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "v000001", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    live = policy.causal_lm.state_dict()
    assert set(loaded.state_dict()) == set(live)
    assert all(torch.equal(tensor, live[name]) for name, tensor in loaded.state_dict().items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "v000001")
    assert tokenizer.encode("go north") == AutoTokenizer.from_pretrained(base).encode("go north")
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_tied_output_layer_is_written_once(policy: PolicyModel) -> None:
    assert "lm_head.weight" not in policy.weights()
    assert "model.embed_tokens.weight" in policy.weights()


def test_the_digest_is_of_the_weights_and_changes_with_any_of_them(base: Path, policy: PolicyModel, tmp_path: Path) -> None:
    first = write_weights(policy.weights(), tmp_path / "first", source_dir=base)
    assert write_weights(policy.weights(), tmp_path / "same", source_dir=base) == first
    digests = {first}
    for name, tensor in policy.weights().items():
        with torch.no_grad():
            tensor.view(-1)[-1] += 1.0
        digests.add(write_weights(policy.weights(), tmp_path / name, source_dir=base))
    assert len(digests) == 1 + len(policy.weights())


def test_the_recorded_dtype_is_that_of_the_weights(base: Path, policy: PolicyModel, tmp_path: Path) -> None:
    halved = {name: tensor.bfloat16() for name, tensor in policy.weights().items()}
    write_weights(halved, tmp_path / "v", source_dir=base)
    assert json.loads((tmp_path / "v" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v", dtype="auto").state_dict()
    assert torch.equal(loaded["model.norm.weight"], halved["model.norm.weight"])
    with pytest.raises(ValueError, match=r"one dtype, not \['torch.bfloat16', 'torch.float32'\]"):
        write_weights(halved | {"x": torch.zeros(1)}, tmp_path / "w", source_dir=base)


def test_shard_indices_of_the_base_model_are_not_copied(base: Path, policy: PolicyModel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((base / "config.json").read_text())
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "model-00001-of-00002.safetensors").write_text("")
    write_weights(policy.weights(), tmp_path / "v", source_dir=source)
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == ["config.json", "model.safetensors"]


def test_a_writer_that_dies_leaves_nothing_visible_and_the_next_one_succeeds(tmp_path: Path) -> None:
    dest = tmp_path / "v000001"

    def die_half_way() -> None:
        with visible_last(dest) as unfinished:
            (unfinished / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die_half_way()
    assert not dest.exists()
    for text in ("whole", "again"):  # the second finds a directory that nobody was told of
        with visible_last(dest) as unfinished:
            assert list(unfinished.iterdir()) == []
            (unfinished / "file").write_text(text)
            assert not dest.exists() or (dest / "file").read_text() == "whole"
        assert (dest / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["v000001"]


def test_a_copy_is_whole(base: Path, tmp_path: Path) -> None:
    copy_weights(base, tmp_path / "copy")
    assert {p.name: p.read_bytes() for p in base.iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()}


def test_pruning_keeps_the_newest_and_removes_what_dead_writers_left(tmp_path: Path) -> None:
    for name in ("v000009", "v000010", "v000011", "v000012.tmp", "v000008.old"):
        (tmp_path / name).mkdir()
    assert prune_versions(tmp_path, keep=2) == ["v000008.old", "v000012.tmp", "v000009"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000010", "v000011"]
    with pytest.raises(ValueError, match="keep=0"):
        prune_versions(tmp_path, keep=0)

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import configs
from configs import Config, LearnerConfig, LossConfig, ModelConfig
from learner.__main__ import main
from learner.checkpoint import save_checkpoint
from learner.deepspeed_setup import initialize, join_ranks
from learner.engine import Engine
from learner.full_state import trainable
from learner.lora import add_adapters, merged
from learner.policy_model import load_policy
from learner.publish import prune_versions, write_weights
from store import Catalog, RunLayout, export, files_digest, write_open_sql
from tests.engine_samples import copied, cut, make_base, random_rows

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunLayout, dict[int, Weights]]:
    """A run in bfloat16 with versions 0 to 3, the first of them removed, and checkpoints 1 and 3; its weights by version."""
    root = tmp_path_factory.mktemp("runs") / "run"
    learner = LearnerConfig(learning_rate=1e-2, zero_stage=1)
    config = Config(run_dir=str(root), model=ModelConfig(dtype="bfloat16"), learner=learner)
    layout = RunLayout.create(root, config_yaml=configs.to_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=1)
    base = make_base(root / "base" / "policy")
    engine = Engine(model_path=base, model=config.model, learner=learner, loss=LossConfig(), temperature=1.0, seed=0)
    weights = {}
    with Catalog.open(layout) as catalog:
        for version in range(4):
            if version:
                engine.train([cut(random_rows(seed=version), 40)])
            directory = layout.weights_dir(version)
            digest = write_weights(engine.weights(), directory, source_dir=base)
            path = layout.relative(directory)
            catalog.record_version(version=version, path=path, digest=digest, learner_step=version)
            weights[version] = copied(engine)
            if version in (1, 3):
                save_checkpoint(engine, layout.checkpoint_dir(version), learner_step=version, version=version, lsn=1)
        prune_versions(layout.weights, keep=3)
        export(catalog, layout)
    engine.close()
    return layout, weights


@pytest.fixture
def run(trained: tuple[RunLayout, dict[int, Weights]], tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(trained[0].root, tmp_path / "run")
    return tmp_path / "run"


def assert_weights(directory: Path, weights: Weights) -> None:
    loaded, report = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert AutoTokenizer.from_pretrained(directory).encode("go north")


@pytest.mark.parametrize(
    ("options", "version"), [([], 3), (["--version", "1"], 1), (["--version", "2"], 2), (["--checkpoint", "1"], 1)]
)
def test_what_is_exported_is_what_was_published(
    trained: tuple[RunLayout, dict[int, Weights]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    version: int,
) -> None:
    layout, weights = trained
    assert main(["export", str(layout.root), *options, str(tmp_path / "out")]) == 0
    assert_weights(tmp_path / "out", weights[version])
    digest = files_digest([layout.weights_dir(version) / "model.safetensors"])
    assert capsys.readouterr().out.strip().endswith(f"of {layout.root}; digest {digest}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--version", "0"],
            "version 0 of RUN has been removed; there are versions 1, 2, 3 and checkpoints of learner steps 1, 3",
        ),
        (["--version", "7"], "version 7 of RUN was never published; there are versions 1, 2, 3 and checkpoints"),
        (["--checkpoint", "2"], "RUN has no checkpoint of learner step 2; there are versions 1, 2, 3 and checkpoints"),
    ],
)
def test_what_is_gone_is_named_with_what_there_is(
    trained: tuple[RunLayout, dict[int, Weights]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    root = str(trained[0].root)
    assert main(["export", root, *options, str(tmp_path / "out")]) == 2
    assert words.replace("RUN", root) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    weights = run / "weights" / "v000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert main(["export", str(run), str(out)]) == 2
    assert "it was changed or cut; export another version, or a checkpoint" in capsys.readouterr().err
    master = run / "checkpoints" / "step000003" / "master-rank00000.safetensors"
    tensors = load_file(master)
    save_file({name: tensor + 1.0 for name, tensor in tensors.items()}, master)
    assert main(["export", str(run), "--checkpoint", "3", str(out)]) == 2
    assert "step000003/master-rank00000.safetensors" in capsys.readouterr().err
    shutil.rmtree(run / "base")
    assert main(["export", str(run), "--checkpoint", "1", str(out)]) == 2
    assert "base model of" in capsys.readouterr().err
    out.mkdir()
    assert main(["export", str(run), str(out)]) == 2
    assert f"{out} exists; choose another directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert list(out.iterdir()) == []


def test_adapters_of_a_checkpoint_are_merged_into_the_base_model(tmp_path: Path) -> None:
    root = tmp_path / "run"
    config = Config(run_dir=str(root), model=ModelConfig(lora_rank=2, lora_alpha=4.0))
    layout = RunLayout.create(root, config_yaml=configs.to_yaml(config))
    base = make_base(root / "base" / "policy")
    policy = load_policy(base, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    add_adapters(policy.causal_lm, rank=2, alpha=4.0)
    with torch.no_grad():
        for parameter in trainable(policy.causal_lm).values():
            parameter.normal_(std=0.1)
    join_ranks(0, ranks=1, address=None)
    deepspeed = initialize(policy, dtype="float32", learner=config.learner)
    engine: Any = SimpleNamespace(policy=policy, deepspeed=deepspeed, learner=config.learner, rank=0, ranks=1, n_updates=0)
    save_checkpoint(engine, layout.checkpoint_dir(5), learner_step=5, version=5, lsn=1)
    assert main(["export", str(root), "--checkpoint", "5", str(tmp_path / "out")]) == 0
    assert_weights(tmp_path / "out", {name: tensor.clone() for name, tensor in merged(policy.causal_lm)})
    deepspeed.destroy()


def test_a_directory_that_is_no_run_is_an_error_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is not a run directory" in capsys.readouterr().err

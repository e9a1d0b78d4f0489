from __future__ import annotations

import getpass
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import configs
from actors.inference.engine_process import engine_environment
from cli.__main__ import main
from configs import ActorsConfig, Config, LearnerConfig, LossConfig, ModelConfig
from learner.distributed.deepspeed_setup import initialize, join_ranks
from learner.distributed.optimizer_state import trainable
from learner.files.atomic_directory import new_directory, prune_oldest
from learner.model.lora import adapter_weights, add_adapters, merged, write_adapter_config
from learner.model.policy_model import load_policy
from learner.publishing import export_version as export_module
from learner.publishing.exportable import find_version
from learner.publishing.publish import WeightsCopy, write_weights
from learner.training.engine import Engine
from store import (
    Catalog,
    CheckpointRecord,
    RunLayout,
    StoreError,
    VersionRecord,
    export,
    files_digest,
    weight_files,
    write_base,
    write_open_sql,
)
from store.remote_directory import publish_directory
from tests.support.engine_samples import copied, cut, make_base, random_rows, save_checkpoint
from tests.support.neighbours import Neighbour

ROOT = Path(__file__).resolve().parents[2]
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunLayout, dict[int, Weights]]:
    """A run in bfloat16 with versions 0 to 3, the first of them removed, and checkpoints 1 and 3;
    its weights by version.
    """
    root = tmp_path_factory.mktemp("runs") / "run"
    learner = LearnerConfig(learning_rate=1e-2, zero_stage=1)
    config = Config(run_dir=str(root), model=ModelConfig(dtype="bfloat16"), learner=learner)
    layout = RunLayout.create(root, config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=1)
    base = make_base(root / "base" / "policy")
    engine = Engine(
        model_path=base,
        model=config.model,
        learner=learner,
        loss=LossConfig(),
        temperature=1.0,
        seed=0,
    )
    weights = {}
    with Catalog.open(layout) as catalog:
        for version in range(4):
            if version:
                engine.train([cut(random_rows(seed=version), 40)])
            directory = layout.weights_dir(version)
            digest = write_weights(engine.weights(), directory, source_dir=base)
            path = layout.relative(directory)
            catalog.record_version(
                VersionRecord(version=version, path=path, digest=digest, learner_step=version)
            )
            weights[version] = copied(engine)
            if version in (1, 3):
                save_checkpoint(
                    engine,
                    layout.checkpoint_dir(version),
                    learner_step=version,
                    version=version,
                    lsn=1,
                )
        prune_oldest(layout.weights, keep=3)
        export(catalog, layout)
    engine.close()
    return layout, weights


@pytest.fixture
def run(trained: tuple[RunLayout, dict[int, Weights]], tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(trained[0].root, tmp_path / "run")
    return tmp_path / "run"


def assert_weights(directory: Path, weights: Weights) -> None:
    loaded, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype="auto", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    assert AutoTokenizer.from_pretrained(directory).encode("go north")


@pytest.mark.parametrize(
    ("at", "options", "version"),
    [("", [], 3), ("", ["--version", "1"], 1), ("", ["--version", "2"], 2), ("@1", [], 1)],
)
def test_an_export_has_the_published_weights(
    trained: tuple[RunLayout, dict[int, Weights]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    at: str,
    options: list[str],
    version: int,
) -> None:
    layout, weights = trained
    assert main(["export-model", f"{layout.root}{at}", *options, str(tmp_path / "out")]) == 0
    assert_weights(tmp_path / "out", weights[version])
    digest = files_digest([layout.weights_dir(version) / "model.safetensors"])
    assert capsys.readouterr().out.strip().endswith(f"of {layout.root}; digest {digest}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("at", "options", "words"),
    [
        (
            "",
            ["--version", "0"],
            "version 0 of RUN has no files: they were removed, or its learner was ended before it "
            "wrote them; there are versions 1, 2, 3 and checkpoints of "
            "learner steps 1, 3",
        ),
        (
            "",
            ["--version", "7"],
            "version 7 of RUN was never published; there are versions 1, 2, 3 and checkpoints",
        ),
        (
            "@2",
            [],
            "RUN has no checkpoint of learner step 2; there are versions 1, 2, 3 and checkpoints",
        ),
    ],
)
def test_a_missing_checkpoint_is_named_with_those_that_are_there(
    trained: tuple[RunLayout, dict[int, Weights]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    at: str,
    options: list[str],
    words: str,
) -> None:
    root = str(trained[0].root)
    assert main(["export-model", f"{root}{at}", *options, str(tmp_path / "out")]) == 2
    assert words.replace("RUN", root) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    weights = run / "weights" / "v000003" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert main(["export-model", str(run), str(out)]) == 2
    assert (
        "it was changed or cut; export another version, or a checkpoint" in capsys.readouterr().err
    )
    master = run / "checkpoints" / "step000003" / "master-rank00000.safetensors"
    tensors = load_file(master)
    save_file({name: tensor + 1.0 for name, tensor in tensors.items()}, master)
    assert main(["export-model", f"{run}@3", str(out)]) == 2
    assert "step000003/master-rank00000.safetensors" in capsys.readouterr().err
    shutil.rmtree(run / "base")
    assert main(["export-model", f"{run}@1", str(out)]) == 2
    assert "base model of" in capsys.readouterr().err
    out.mkdir()
    assert main(["export-model", str(run), str(out)]) == 2
    assert f"{out} exists; choose another directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("at", ["", "@3"])
def test_directories_beside_an_export_stay_as_they_are(
    run: Path, tmp_path: Path, fails: bool, at: str
) -> None:
    """The attack: the user's DEST.old and DEST.tmp were taken for an export's, and removed."""
    if fails:
        shutil.rmtree(run / "base")
        file = run / "weights" / "v000003" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    for suffix in ("old", "tmp"):
        (tmp_path / f"out.{suffix}").mkdir()
        (tmp_path / f"out.{suffix}" / "mine").write_text("a year's work")
    assert main(["export-model", f"{run}{at}", str(tmp_path / "out")]) == (2 if fails else 0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(["out"] if not fails else []), "out.old", "out.tmp", "run"]
    for suffix in ("old", "tmp"):
        assert (tmp_path / f"out.{suffix}" / "mine").read_text() == "a year's work"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunLayout, PreTrainedModel]:
    """A run with adapters and its checkpoint 5, and the model as it was then."""
    root = tmp_path_factory.mktemp("adapted") / "run"
    config = Config(run_dir=str(root), model=ModelConfig(lora_rank=2, lora_alpha=4.0))
    layout = RunLayout.create(root, config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=1)
    base = make_base(root / "base" / "policy")
    policy = load_policy(base, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    add_adapters(policy.causal_lm, rank=2, alpha=4.0)
    with torch.no_grad():
        for parameter in trainable(policy.causal_lm).values():
            parameter.normal_(std=0.1)
    join_ranks(0, ranks=1, address=None)
    deepspeed = initialize(policy, dtype="float32", learner=config.learner)
    engine: Any = SimpleNamespace(
        policy=policy,
        critic=None,
        deepspeed=deepspeed,
        learner=config.learner,
        rank=0,
        ranks=1,
        n_updates=0,
    )
    save_checkpoint(engine, layout.checkpoint_dir(5), learner_step=5, version=5, lsn=1)
    deepspeed.destroy()
    with Catalog.open(layout) as catalog:
        for learner_step in (5, 8):  # the second has been removed
            path = layout.relative(layout.checkpoint_dir(learner_step))
            catalog.record_checkpoint(
                CheckpointRecord(learner_step=learner_step, path=path, version=learner_step)
            )
        export(catalog, layout)
    return layout, policy.causal_lm


def test_adapters_of_a_checkpoint_are_merged_into_the_base_model(
    adapted: tuple[RunLayout, PreTrainedModel], tmp_path: Path
) -> None:
    layout, model = adapted
    assert main(["export-model", f"{layout.root}@5", str(tmp_path / "out")]) == 0
    assert_weights(tmp_path / "out", {name: tensor.clone() for name, tensor in merged(model)})


@pytest.mark.parametrize("at", ["", "@5"])
def test_adapters_alone_are_the_same_policy_in_peft(
    adapted: tuple[RunLayout, PreTrainedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    at: str,
) -> None:
    layout, model = adapted
    out = tmp_path / "out"
    assert main(["export-model", f"{layout.root}{at}", str(out), "--adapter"]) == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    digest = files_digest([out / "adapter_model.safetensors"])
    assert (
        capsys.readouterr().out
        == f"{out}: the adapters after learner step 5 of {layout.root}; digest {digest}\n"
    )
    # By the base model's name in the adapter, from wherever this is read.
    read = AutoPeftModelForCausalLM.from_pretrained(str(out)).get_base_model().state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
    assert any(".lora_B." in name and tensor.any() for name, tensor in read.items())


@pytest.mark.slow
@pytest.mark.engine
def test_adapters_alone_are_the_same_policy_in_vllm(
    adapted: tuple[RunLayout, PreTrainedModel], tmp_path: Path
) -> None:
    """The log-probabilities of what vLLM generates with them and without, against the same policy
    in peft.
    """
    layout, _ = adapted
    base, out = layout.root / "base" / "policy", tmp_path / "out"
    assert main(["export-model", str(layout.root), str(out), "--adapter"]) == 0
    command = [sys.executable, "-m", "tests.support.vllm_adapter", str(base), str(out)]
    environment = os.environ | engine_environment(ActorsConfig(), base, tmp_path / "engine.log")
    environment["PYTHONPATH"] = str(ROOT)  # an engine takes no module from the current directory
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    prompt_ids, adapted_answer, base_answer = json.loads(done.stdout.splitlines()[-1])
    assert adapted_answer != base_answer
    models = (
        AutoPeftModelForCausalLM.from_pretrained(str(out)),
        AutoModelForCausalLM.from_pretrained(base),
    )
    for (token_ids, logprobs), model in zip((adapted_answer, base_answer), models, strict=True):
        with torch.no_grad():
            logits_TV = model.eval()(torch.tensor([prompt_ids + token_ids])).logits[
                0, len(prompt_ids) - 1 : -1
            ]
        expected_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected_T, atol=1e-5, rtol=0.0)


@pytest.fixture
def served(
    adapted: tuple[RunLayout, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> RunLayout:
    """Make a run whose version 1 is the adapter of `adapted`, to damage."""
    layout, model = adapted
    root = tmp_path_factory.mktemp("served") / "run"
    shutil.copytree(layout.root / "base", root / "base")
    config = Config(run_dir=str(root), model=ModelConfig(lora_rank=2, lora_alpha=4.0))
    layout = RunLayout.create(root, config_yaml=configs.as_yaml(config))
    write_open_sql(layout, macros=[], max_staleness=1)
    base = layout.root / "base" / "policy"

    def write_others(directory: Path) -> None:
        write_adapter_config(model, directory)
        write_base(directory, digest=files_digest([base / "model.safetensors"]))

    copy = WeightsCopy()
    digest = copy.take(adapter_weights(model))
    copy.write_adapter(layout.weights_dir(1), write_others=write_others)
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(
                version=1,
                path=layout.relative(layout.weights_dir(1)),
                digest=digest,
                learner_step=1,
            )
        )
        export(catalog, layout)
    return layout


def test_a_served_version_is_exported_merged(
    adapted: tuple[RunLayout, PreTrainedModel], served: RunLayout, tmp_path: Path
) -> None:
    assert main(["export-model", str(served.root), str(tmp_path / "out")]) == 0
    assert_weights(tmp_path / "out", {name: tensor.clone() for name, tensor in merged(adapted[1])})


def test_a_served_versions_adapter_is_exported_as_it_is(
    adapted: tuple[RunLayout, PreTrainedModel],
    served: RunLayout,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert main(["export-model", str(served.root), str(out), "--adapter", "--version", "1"]) == 0
    digest = files_digest([served.weights_dir(1) / "adapter_model.safetensors"])
    assert f"of learner step 1 of {served.root}; digest {digest}" in capsys.readouterr().out
    read = AutoPeftModelForCausalLM.from_pretrained(str(out)).get_base_model().state_dict()
    model = adapted[1].state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.items())


@pytest.mark.parametrize("options", [[], ["--adapter", "--version", "1"]])
def test_a_served_version_that_changed_is_not_exported(
    served: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = served.weights_dir(1) / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert main(["export-model", str(served.root), str(tmp_path / "out"), *options]) == 2
    assert "it was changed or cut" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--adapter", "--version", "1"]])
def test_a_link_of_a_served_version_is_not_copied(
    served: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    path = served.weights_dir(1) / "base.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert main(["export-model", str(served.root), str(tmp_path / "out"), *options]) == 2
    assert "base.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_served_version_is_not_merged_into_another_base(
    served: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(served.root / "base" / "policy")
    make_base(served.root / "base" / "policy", seed=1)
    assert main(["export-model", str(served.root), str(tmp_path / "out")]) == 2
    assert "belongs to a base model with digest" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_adapters_that_are_nowhere_are_an_error_in_one_line(
    trained: tuple[RunLayout, dict[int, Weights]],
    adapted: tuple[RunLayout, PreTrainedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "out")
    for layout, at, options, words in (
        (
            trained[0],
            "@3",
            [],
            "has model.lora_rank=0: there are no adapters; leave out --adapter",
        ),
        (trained[0], "", [], "has no checkpoint yet; adapters are in checkpoints only"),
        (
            trained[0],
            "",
            ["--version", "2"],
            "was published as whole weights; give RUN@STEP for the adapters of a checkpoint",
        ),
        (
            adapted[0],
            "@8",
            [],
            "has no checkpoint of learner step 8; there are versions (none) and",
        ),
    ):
        assert main(["export-model", f"{layout.root}{at}", out, "--adapter", *options]) == 2
        assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_no_run_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-model", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["base/policy/config.json", "checkpoints/step000005", "weights", "untrained"]
)
def test_a_link_in_a_strangers_run_is_not_followed(
    adapted: tuple[RunLayout, PreTrainedModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    run, outside = tmp_path / "stranger", tmp_path / "outside"
    shutil.copytree(adapted[0].root, run)
    shutil.copytree(run / "base" / "policy", run / "untrained")
    (run / name).rename(outside)
    (run / name).symlink_to(outside)
    for words in (
        ["export-model", str(run), str(tmp_path / "dest")],
        ["replay", str(run), "5"],
    ):
        assert main(words) == 2
        assert f"{run / name} is a symbolic link" in capsys.readouterr().err
    assert not (tmp_path / "dest").exists()


def test_a_strangers_run_brings_no_model_of_the_reader_into_an_export(
    adapted: tuple[RunLayout, PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, private, dest = tmp_path / "stranger", tmp_path / "private", tmp_path / "dest"
    shutil.copytree(adapted[0].root, run)
    shutil.copytree(run / "base" / "policy", private)
    (private / "vocab.txt").write_text("a text of the reader")
    content = json.loads((run / "run.json").read_text())
    config = configs.from_yaml(content["config_yaml"])
    content["config_yaml"] = configs.as_yaml(
        replace(config, model=replace(config.model, path=str(private)))
    )
    (run / "run.json").chmod(0o644)
    (run / "run.json").write_text(json.dumps(content))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    words = ["export-model", f"{run}@5", str(dest)]
    assert main(words) == 2
    assert "--trust" in capsys.readouterr().err
    assert not dest.exists()
    assert main([*words, "--trust"]) == 0


@pytest.mark.parametrize("place", ["{}/private.safetensors", "unpublished.safetensors"])
def test_an_index_beside_a_version_names_only_what_the_digest_covers(
    run: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuse an index of other files: the digest covers .safetensors files of any name."""
    version = sorted((run / "weights").glob("v*"))[-1]
    for path in (version, *version.iterdir()):
        path.chmod(0o755)
    shutil.copy(version / "model.safetensors", tmp_path / "private.safetensors")
    names = load_file(version / "model.safetensors")
    (version / "model.safetensors").rename(version / "other.safetensors")
    index = {"weight_map": dict.fromkeys(names, place.format(tmp_path))}
    (version / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["export-model", str(run), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "safetensors" in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "n_bytes", "words"),
    [
        ("extra.txt", 2 << 30, "beside its weights have 2,147,4"),
        ("a\x1b]0;pwn\x07.txt", 1, "a file 'a\\x1b]0;pwn\\x07.txt', with characters"),
    ],
)
def test_a_strangers_file_that_no_digest_covers_is_not_copied(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    n_bytes: int,
    words: str,
) -> None:
    """The attack: a sparse file of 2 GiB became one of 2 GB, and an odd name stayed."""
    with (run / "weights" / "v000003" / name).open("wb") as file:
        file.truncate(n_bytes)
    assert main(["export-model", str(run), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_has_only_files_that_a_version_has(run: Path, tmp_path: Path) -> None:
    version, out = run / "weights" / "v000003", tmp_path / "out"
    expected = {path.name for path in version.iterdir()}
    (version / "extra.bin").write_bytes(b"x")
    (version / "code").mkdir()
    assert main(["export-model", str(run), str(out)]) == 0
    assert {path.name for path in out.iterdir()} == expected


def test_a_link_that_comes_while_a_version_is_copied_is_not_followed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: the run's owner waited for the large file, and was shown a private one."""
    version, secret = run / "weights" / "v000003", tmp_path / "secret"
    secret.write_text("private")
    last = max(path for path in version.iterdir() if path.suffix == ".json")
    copy = export_module.copy_first

    def exchanged(file: int, copied: BinaryIO, *, n_bytes: int) -> None:
        copy(file, copied, n_bytes=n_bytes)
        last.unlink(missing_ok=True)
        last.symlink_to(secret)

    monkeypatch.setattr(export_module, "copy_first", exchanged)
    assert main(["export-model", str(run), str(tmp_path / "out")]) == 2
    assert f"{last.name} is or lies behind a symbolic link" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_version_0_of_an_evaluation_is_exported_without_what_a_neighbours_link_leads_to(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, private = tmp_path / "model", tmp_path / "private"
    monkeypatch.setattr(RunLayout, "check_trusted", lambda _: None)  # the key is root's below
    layout = RunLayout.create(tmp_path / "evaluation", config_yaml=configs.as_yaml(Config()))
    (run / "weights" / "v000003").rename(model)
    layout.weights_dir(0).symlink_to(model)
    private.write_text("{}")
    (model / "added.json").symlink_to(private)
    version = VersionRecord(
        version=0,
        path="weights/v000000",
        digest=files_digest(weight_files(model)),
        learner_step=None,
    )
    export_module.export_version(layout, version, dest=tmp_path / "own")
    assert (tmp_path / "own" / "added.json").read_text() == "{}"
    Neighbour(monkeypatch).gets(model / "added.json")
    with pytest.raises(StoreError, match="added.json is a link of another user .uid 65534."):
        export_module.export_version(layout, version, dest=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("exchanged", [".", "weights", "weights/v000001"])
def test_a_link_that_comes_while_an_adapter_is_copied_leads_to_nobodys_file(
    served: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: str
) -> None:
    """The attack: a private adapter was copied into a directory that everybody could read."""
    place, private = served.root / exchanged, tmp_path / "private"
    expected = (served.weights_dir(1) / "adapter_model.safetensors").read_bytes()
    shutil.copytree(place, private)
    next(private.rglob("adapter_model.safetensors")).write_bytes(b"private")
    write = Path.write_bytes

    def written(path: Path, data: bytes) -> int:
        if path.name == "base.json":
            place.rename(place.with_name("aside"))
            place.symlink_to(private)
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", written)
    out = tmp_path / "out"
    assert main(["export-model", str(served.root), str(out), "--adapter", "--version", "1"]) == 0
    assert (out / "adapter_model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("exchanged", [".", "weights"])
def test_a_run_that_is_exchanged_while_a_version_is_copied_leads_to_nobodys_file(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanged: str
) -> None:
    """The attack: no digest covers a tokenizer, so the copy had that of a private run."""
    place, private = run / exchanged, tmp_path / "private"
    shutil.copytree(place, private)
    for file in private.rglob("tokenizer.json"):
        file.write_text('{"private": 1}')
    copy = export_module.copy_first

    def exchanging(file: int, copied: BinaryIO, *, n_bytes: int) -> None:
        copy(file, copied, n_bytes=n_bytes)
        if not place.is_symlink():
            place.rename(place.with_name("aside"))
            place.symlink_to(private)

    monkeypatch.setattr(export_module, "copy_first", exchanging)
    expected = (run / "weights" / "v000003" / "tokenizer.json").read_bytes()
    assert main(["export-model", str(run), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == expected


def test_no_file_of_a_strangers_checkpoint_is_opened(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FIFO that came while the files were hashed was waited for without end."""
    (run / "signed.json").unlink()
    for path in (run / "checkpoints" / "step000003").iterdir():
        path.unlink()
        os.mkfifo(path)
    assert main(["export-model", f"{run}@3", str(tmp_path / "model")]) == 2
    assert "was not made by you" in capsys.readouterr().err


@pytest.mark.parametrize("adapter", [False, True])
def test_a_version_that_is_removed_before_it_is_opened_is_named(run: Path, adapter: bool) -> None:
    layout = RunLayout.open(run)
    version = find_version(layout, 3)
    shutil.rmtree(layout.weights_dir(3))
    export = export_module.export_adapter_version if adapter else export_module.export_version
    with pytest.raises(StoreError, match=r"v000003 is not there \(any more\); ask for a newer"):
        export(layout, version, dest=run.with_name("model"))


def test_no_storage_is_asked_by_settings_that_were_exchanged_meanwhile(run: Path) -> None:
    """The attack: `export-model` read a run.json with a storage, and the views one without."""
    layout = RunLayout.open(run)
    uri = "s3://bucket/run?endpoint_override=127.0.0.1:9"
    read_before = replace(layout, info=replace(layout.info, storage_uri=uri))
    with pytest.raises(StoreError, match="would ask there with your credentials"):
        find_version(read_before, None)
    version = find_version(layout, 3)
    with pytest.raises(StoreError, match="would ask there with your credentials"):
        export_module.export_version(read_before, version, dest=run.with_name("model"))


def test_a_strangers_model_is_looked_at_in_the_copy(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could put a FIFO in place of a file that is opened by its path."""
    looked_at, check = [], configs.check_model_directory
    monkeypatch.setattr(
        configs, "check_model_directory", lambda path: (looked_at.append(path), check(path))
    )
    index = run / "weights" / "v000003" / "model.safetensors.index.json"
    index.write_text("{")
    with pytest.raises(configs.ConfigError, match=f"{index} cannot be used"):
        export_module.export_version(
            RunLayout.open(run),
            find_version(RunLayout.open(run), 3),
            dest=tmp_path / "model",
        )
    assert len(looked_at) == 1 and not looked_at[0].is_relative_to(run)


def test_a_version_that_is_only_in_the_storage_is_copied_past_the_run(
    run: Path, trained: tuple[RunLayout, dict[int, Weights]], tmp_path: Path
) -> None:
    """The owner of the run could put a link in place of a directory that was made in it."""
    storage = tmp_path / "storage"
    shutil.copytree(run, storage)
    settings = json.loads((run / "run.json").read_text())
    settings["storage_uri"] = f"file://{storage}"
    (run / "run.json").write_text(json.dumps(settings))
    layout = RunLayout.open(run)
    publish_directory(layout, layout.weights_dir(3))
    shutil.rmtree(layout.weights_dir(3))
    before = sorted(run.rglob("*"))
    assert main(["export-model", str(run), str(tmp_path / "model")]) == 0
    assert_weights(tmp_path / "model", trained[1][3])
    assert sorted(run.rglob("*")) == before
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("gigpo-weights-*"))


def test_files_beside_the_weights_of_a_storage_are_bounded_before_they_are_copied(
    run: Path, tmp_path: Path
) -> None:
    """The attack: six files of 900 MB that took no room there filled the disk of the cache."""
    storage = tmp_path / "storage"
    shutil.copytree(run, storage)
    info = replace(RunLayout.open(run).info, storage_uri=f"file://{storage}")
    layout = replace(RunLayout.open(run), info=info)
    version = find_version(layout, 3)
    publish_directory(layout, layout.weights_dir(3))
    shutil.rmtree(layout.weights_dir(3))
    marker = storage / "weights" / "v000003" / "complete.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "side.json": 900 << 20}))
    with pytest.raises(StoreError, match="beside its weights have .* no model has so much"):
        export_module.export_version(layout, version, dest=tmp_path / "model")
    assert not list(Path(os.environ["XDG_CACHE_HOME"]).rglob("gigpo-weights-*"))


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_whole_model_has_the_permissions_that_the_umask_leaves(
    tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        with new_directory(tmp_path / "model") as unfinished:
            assert stat.S_IMODE(unfinished.stat().st_mode) == 0o700
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model").stat().st_mode) == 0o777 & ~umask
    assert not list((tmp_path / "model").iterdir())


def test_a_description_of_millions_of_lists_is_not_decoded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: 12 million lists in a config.json of 36 MB took 72 s."""
    file = run / "weights" / "v000003" / "config.json"
    file.write_text(file.read_text().rstrip()[:-1] + ', "more": [' + "[]," * 1_000_000 + "0]}")
    assert main(["export-model", str(run), str(tmp_path / "out")]) == 2
    assert "config.json is not readable (it has more than 524288 values)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_command_writes_nothing_into_the_home_directory_but_into_its_cache(
    trained: tuple[RunLayout, dict[int, Weights]], tmp_path: Path
) -> None:
    """Load what an export loads with none of the variables that tell libraries of a test. MLflow,
    which writes there, is not loaded at all. Nor does it matter that a neighbour has the name in
    the temporary directory under which torch would keep compiled code.
    """
    layout, _ = trained
    (tmp_path / f"torchinductor_{getpass.getuser()}").touch()
    home = tmp_path / "home"
    home.mkdir()
    program = "import runpy, sys; sys.argv[0] = 'gigpo'\n"
    program += "try: runpy.run_module('cli', run_name='__main__', alter_sys=True)\n"
    program += "finally: print('LOADED', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "export-model", str(layout.root), str(tmp_path / "model")],
        cwd=ROOT,
        env={
            "HOME": str(home),
            "TMPDIR": str(tmp_path),
            "PATH": os.environ["PATH"],
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert "deepspeed.autotuning.autotuner" in loaded and "mlflow" not in loaded
    compiled = home / ".cache" / "async-gigpo" / "compiled"
    made = {compiled.parent.parent, compiled.parent, compiled}
    assert made <= set(home.rglob("*")) <= {*made, compiled / "cc"}  # where there is a compiler

"""Run LoRA to the end with the real engine, which serves each version's adapter.

The base policy is untrained, so that no other run has to clone it first: the world's rewards differ
by chance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import configs
import store
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.model.lora import add_adapters, merged, read_adapter
from learner.model.policy_model import PolicyModel, load_policy
from store import RunLayout, files_digest
from tests.support.fault_runs import FAULTY_WORLD, untrained_model
from tests.support.run_views import connect

pytestmark = pytest.mark.run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
env: {name: "faulty_world:FaultyRoom", max_steps: 6}
prompt: {template: compact, history_length: 1, max_prompt_tokens: 120, invalid: admissible}
actors: {groups_in_flight: 4, max_response_tokens: 12, kv_cache_gib: 0.25}
model:
  lora_rank: 4
  lora_alpha: 8.0
algorithm: {group_size: 4}
learner:
  {steps: 4, groups_per_step: 4, learning_rate: 1.0e-2, checkpoint_every: 2, keep_versions: 9}
evaluation: {every: 0, final_episodes_per_task: 1, temperature: 1.0}
"""
TIMEOUT_S = 900.0  # only for what hangs
ATOL = 1e-5


def gigpo(*arguments: object) -> str:
    finished = subprocess.run(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("lora")
    (place / "config.yaml").write_text(CONFIG)
    (place / "faulty_world.py").write_text(FAULTY_WORLD)
    base = untrained_model(place / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        patch.setenv("FAULT_FILE", str(place / "no fault"))
        gigpo("train", place / "config.yaml", f"run_dir={place / 'run'}", f"model.path={base}")
        yield place / "run"


def published(run: Path) -> dict[int, tuple[Path, str]]:
    with connect(RunLayout.open(run)) as connection:
        rows = connection.sql(
            "SELECT version, path, digest FROM versions ORDER BY version"
        ).fetchall()
    return {version: (run / path, digest) for version, path, digest in rows}


def policy_of(run: Path, version: Path) -> PolicyModel:
    """Return the learner's model of a version: the base model with its adapter."""
    model = configs.from_yaml(RunLayout.open(run).info.config_yaml).model
    policy = load_policy(
        run.parent / "base", dtype="float32", gradient_checkpointing=False, temperature=1.0
    )
    add_adapters(policy.causal_lm, rank=model.lora_rank, alpha=model.lora_alpha)
    read_adapter(policy.causal_lm, version)
    return policy


def micro(rows: pa.Table) -> list[MicroBatch]:
    nothing = pa.array(np.zeros(rows.num_rows))
    rows = rows.append_column("advantage", nothing).append_column(
        "staleness", pc.cast(nothing, pa.int64())
    )
    return micro_batches(rows, micro_batch_tokens=1500, ranks=1)


def test_versions_hold_adapters_only_and_engines_loaded_them(run: Path) -> None:
    versions = published(run)
    assert list(versions) == [0, 1, 2, 3, 4]
    for path, digest in versions.values():
        assert sorted(file.name for file in path.iterdir()) == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "base.json",
            "tokenizer.json",
        ]
        assert files_digest([path / "adapter_model.safetensors"]) == digest
    with connect(RunLayout.open(run)) as connection:
        events = connection.sql("SELECT detail FROM events WHERE what = 'weights loaded'")
        loads = [json.loads(detail) for (detail,) in events.fetchall()]
    assert max(load["version"] for load in loads) == 4
    assert all(load["digest"] == versions[load["version"]][1] for load in loads)


def test_recorded_log_probabilities_are_those_of_the_adapter_that_sampled(run: Path) -> None:
    with store.open_run(run) as reader:
        steps = reader.sql("SELECT * FROM steps ORDER BY traj_uid, step_index")
    assert steps["version_min"].equals(steps["version_max"]), "no answer has two versions"
    compared = set()
    for version, (path, _) in published(run).items():
        rows = steps.filter(pc.equal(steps["version_min"], version))
        if not rows.num_rows:
            continue
        policy, batches = policy_of(run, path), micro(rows)
        with torch.no_grad():
            found = torch.cat([policy(batch)[0] for batch in batches])
        behaviour = torch.cat([batch.behaviour_logprobs_N for batch in batches])
        torch.testing.assert_close(found, behaviour, rtol=0, atol=ATOL)
        compared.add(version)
    assert {0, 4} <= compared


def test_a_version_is_exported_merged_or_as_it_is(run: Path, tmp_path: Path) -> None:
    path, digest = published(run)[3]
    gigpo("export-model", run, tmp_path / "whole", "--version", 3)
    exported = load_policy(
        tmp_path / "whole", dtype="float32", gradient_checkpointing=False, temperature=1.0
    ).causal_lm.state_dict()
    for name, tensor in merged(policy_of(run, path).causal_lm):
        assert torch.equal(exported[name], tensor), name
    said = gigpo("export-model", run, tmp_path / "adapter", "--version", 3, "--adapter")
    assert f"the adapters of version 3, of learner step 3 of {run}; digest {digest}" in said
    assert files_digest([tmp_path / "adapter" / "adapter_model.safetensors"]) == digest


def test_learner_steps_are_replayed_bit_for_bit(run: Path) -> None:
    assert "DIFFERENT" not in gigpo("replay", run, 1, "--to", 4)


def test_newest_weights_are_evaluated_in_another_run(run: Path, tmp_path: Path) -> None:
    gigpo("evaluate", run, f"run_dir={tmp_path / 'evaluation'}")
    with connect(RunLayout.open(tmp_path / "evaluation")) as connection:
        rows = connection.sql(
            "SELECT DISTINCT version_max FROM trajectories WHERE split = 'heldout'"
        ).fetchall()
    assert rows == [(0,)], "the merged model is version 0 of that run"


@pytest.mark.slow
def test_a_run_goes_on_with_its_adapters_and_then_with_merged_weights(run: Path) -> None:
    """A change of the form publishes the weights once more."""
    newest = 5
    gigpo("train", "--resume", run, "learner.steps=5")
    versions = published(run)
    assert max(versions) == newest
    assert (versions[newest][0] / "adapter_config.json").is_file()
    steps = f"learner.steps={newest + 1}"
    gigpo("train", "--resume", run, steps, "model.lora_serving=merged")
    versions = published(run)
    assert max(versions) == newest + 2
    for version in (newest + 1, newest + 2):
        assert (versions[version][0] / "config.json").is_file()
    before = dict(merged(policy_of(run, versions[newest][0]).causal_lm))
    after = load_policy(
        versions[newest + 1][0], dtype="float32", gradient_checkpointing=False, temperature=1.0
    ).causal_lm.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())

"""A whole run of Sokoban in images with a tiny vision model: engine and learner see what was
drawn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

import store
from envs.sokoban import draw_room
from learner import export_checkpoint
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.model.policy_model import load_policy
from store import RunLayout, files_digest
from tests.support.run_views import connect
from tests.support.vision_samples import make_vision_model

pytestmark = pytest.mark.run

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
max_staleness: 1
env:
  name: sokoban
  options:
    {rows: 6, columns: 7, boxes: 1, least_moves: 1, most_moves: 4, train_rooms: 8, heldout_rooms: 2,
     seed: 0, observation: image}
  max_steps: 3
  win_reward: 1.0
# Random tokens are an action now and then: a reply is whole with its first space, and " up" is
# one token.
prompt: {history_length: 0, max_prompt_tokens: 150, parser: text, stop: [" "]}
actors: {groups_in_flight: 4, max_response_tokens: 16, kv_cache_gib: 0.25}
algorithm: {group_size: 4, invalid_penalty: 0.5}
loss: {entropy_coef: 0.1}
learner: {steps: 3, groups_per_step: 2, learning_rate: 1.0e-2, micro_batch_tokens: 1500,
          checkpoint_every: 3}
evaluation: {every: 0, final_episodes_per_task: 1, temperature: 1.0}
"""
TEMPLATE = """
first: "{objective}"
later: "{objective}"
next: "{objective}"
turn: ""
action: ""
answer: "{action}"
tags: [action]
thinks: false
"""
TIMEOUT_S = 900.0  # only for what hangs
ATOL = 1e-5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vision")
    make_vision_model(place / "base", [" up down left right"], seed=0)
    (place / "config.yaml").write_text(CONFIG)
    (place / "template.yaml").write_text(TEMPLATE)
    paths = [
        f"run_dir={place / 'run'}",
        f"model.path={place / 'base'}",
        f"prompt.template={place / 'template.yaml'}",
    ]
    command = [sys.executable, "-m", "cli", "train", place / "config.yaml", *paths]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return place / "run"


@pytest.fixture(scope="module")
def steps(run: Path) -> pa.Table:
    with store.open_run(run) as reader:
        return reader.sql("SELECT * FROM steps ORDER BY traj_uid, step_index")


def micro(rows: pa.Table) -> list[MicroBatch]:
    nothing = pa.array(np.zeros(rows.num_rows))
    rows = rows.append_column("advantage", nothing).append_column(
        "staleness", pc.cast(nothing, pa.int64())
    )
    return micro_batches(rows, micro_batch_tokens=1500, ranks=1)


def published(run: Path) -> dict[int, tuple[Path, str]]:
    with connect(RunLayout.open(run)) as connection:
        rows = connection.sql(
            "SELECT version, path, digest FROM versions ORDER BY version"
        ).fetchall()
    return {version: (run / path, digest) for version, path, digest in rows}


def test_the_stored_image_is_the_one_that_was_drawn(run: Path, steps: pa.Table) -> None:
    assert steps.num_rows >= 3 * 2 * 4 and steps["images"].null_count == 0
    for row in steps.to_pylist():
        (image,) = row["images"]
        assert image["pixels"] == draw_room(row["obs_text"], cell_pixels=28).tobytes()
        assert (image["height"], image["width"]) == (6 * 28, 7 * 28)
        assert row["anchor_text"] == row["obs_text"]


def test_recorded_log_probabilities_are_the_learners_of_the_version_that_sampled(
    run: Path, steps: pa.Table
) -> None:
    compared = set()
    for version, (path, digest) in published(run).items():
        rows = steps.filter(
            pc.and_(
                pc.equal(steps["version_min"], version), pc.equal(steps["version_max"], version)
            )
        )
        if not rows.num_rows or not path.is_dir():
            continue
        assert files_digest(sorted(path.glob("*.safetensors"))) == digest
        policy = load_policy(path, dtype="float32", gradient_checkpointing=False, temperature=1.0)
        batches = micro(rows)
        with torch.no_grad():
            found = torch.cat([policy(batch)[0] for batch in batches])
            behaviour = torch.cat([batch.behaviour_logprobs_N for batch in batches])
            torch.testing.assert_close(found, behaviour, rtol=0, atol=ATOL)
            # Had the engine, or the learner, not looked at the image, this would say so.
            black = [
                tuple(tuple(np.zeros_like(i) for i in images) for images in batch.images_S)
                for batch in batches
            ]
            blind = [
                policy(replace(batch, images_S=none))[0]
                for batch, none in zip(batches, black, strict=True)
            ]
            assert (torch.cat(blind) - behaviour).abs().max() > 1000 * ATOL
        compared.add(version)
    assert 3 in compared, "the final evaluation plays with what the learner published last"


def test_every_version_served_has_the_digest_that_was_published(run: Path) -> None:
    digests = {version: digest for version, (_, digest) in published(run).items()}
    with connect(RunLayout.open(run)) as connection:
        events = connection.sql(
            "SELECT detail FROM events WHERE what = 'weights loaded'"
        ).fetchall()
    loads = [json.loads(detail) for (detail,) in events]
    assert max(load["version"] for load in loads) == 3
    assert all(load["digest"] == digests[load["version"]] for load in loads)


def test_no_engine_lost_an_image_when_weights_changed_under_its_requests(run: Path) -> None:
    """With a cached prefix that holds the whole image, of 42 tokens here and not one block, vLLM
    0.32 does.
    """
    with connect(RunLayout.open(run)) as connection:
        lost = (
            "SELECT detail FROM events "
            "WHERE what = 'started again' AND detail LIKE '%lost its engine%'"
        )
        assert connection.sql(lost).fetchall() == []


def test_both_the_tower_and_the_text_model_were_trained(run: Path) -> None:
    def weights(path: Path) -> dict[str, torch.Tensor]:
        policy = load_policy(path, dtype="float32", gradient_checkpointing=False, temperature=1.0)
        return {name: parameter.detach() for name, parameter in policy.causal_lm.named_parameters()}

    newest, _ = published(run)[3]
    before, after = weights(run.parent / "base"), weights(newest)
    for part in (
        "model.visual.patch_embed",
        "model.visual.merger",
        "model.language_model.layers.0",
    ):
        assert any(
            not torch.equal(before[name], after[name]) for name in before if name.startswith(part)
        ), part


def test_a_checkpoint_is_exported_as_the_version_it_belongs_to(run: Path, tmp_path: Path) -> None:
    _, digest = published(run)[3]
    assert export_checkpoint(RunLayout.open(run), 3, dest=tmp_path / "exported") == digest

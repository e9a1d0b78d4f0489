"""Learner steps again from what is stored: the same bits, or the first difference by name."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

import store
from analysis.audit import Setting, audit_rows
from cli.__main__ import main
from configs import CriticConfig
from learner.data.batch_loader import PreparedBatch, prepare_batch
from learner.explain import Explanation, _summary
from learner.replay import Replayed, replayed
from store import Catalog, RunLayout, restart_points, trained_step, uid_text
from tests.support.fast_directory import fast_directory
from tests.support.replay_samples import config_of, train
from tests.support.store_runs import fingerprint, flip

STEPS, CRASH_AT, RESTORED = 22, 11, 8
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0  # only for what hangs

Replay = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    """A finished run that died once: learner steps 9 and 10 were trained, rolled back and trained
    again.
    """
    with fast_directory() as directory:
        config = config_of(directory / "run", steps=STEPS)
        train(config, crash_at=CRASH_AT)
        train(config)
        yield directory / "run"


@pytest.fixture
def copy(run: Path) -> Iterator[Path]:
    with fast_directory() as directory:
        shutil.copytree(run, directory / "elsewhere")
        yield directory / "elsewhere"


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Replay:
    """Exit status, output, errors."""

    def ask(run: Path, *arguments: object) -> tuple[int, str, str]:
        status = main(["replay", str(run), *map(str, arguments)])
        return status, *capsys.readouterr()

    return ask


def explained(run: Path, learner_step: int, **learner: object) -> tuple[Explanation, Replayed]:
    """Return the explanation of a learner step, and the step replayed."""
    said: list[Explanation] = []
    config = config_of(run, steps=STEPS, **learner)
    layout = RunLayout.open(run)
    steps = replayed(
        layout,
        config,
        first=learner_step,
        last=learner_step,
        explained=said.append,
        say=lambda line: None,
    )
    last = list(steps)[-1]
    return said[0], last


def test_a_whole_run_is_identical_from_the_base_model_and_not_touched(
    run: Path, replay: Replay
) -> None:
    with store.open_run(run) as reader:
        twice = reader.sql(
            "SELECT learner_step FROM versions GROUP BY 1 HAVING count(*) > 1 ORDER BY 1"
        ).to_pylist()
    assert [row["learner_step"] for row in twice] == list(range(RESTORED, CRASH_AT + 1)), (
        "it was restored in the middle"
    )
    before = fingerprint(run)
    status, output, errors = replay(run, 1, "--to", STEPS)
    assert (status, errors) == (0, "")
    assert (
        f"begins with the base model {run}/base/policy; its weights are those of version 0"
        in output
    )
    assert f"{STEPS} of {STEPS} learner steps identical" in output
    assert fingerprint(run) == before


def test_it_begins_at_the_newest_checkpoint_that_is_still_there(copy: Path, replay: Replay) -> None:
    assert [point.learner_step for point in restart_points(RunLayout.open(copy))] == [22, 16, 8]
    status, output, _ = replay(copy, STEPS)
    assert (status, "the checkpoint of learner step 16; its weights are those" in output) == (
        0,
        True,
    )
    assert "6 of 6 learner steps identical" in output
    shutil.rmtree(copy / "checkpoints" / "step000016")
    status, output, _ = replay(copy, 9)
    assert (status, "the checkpoint of learner step 8; its weights are those" in output) == (
        0,
        True,
    )
    assert "1 of 1 learner steps identical" in output
    shutil.rmtree(copy / "checkpoints" / "step000008")
    assert "begins with the base model" in replay(copy, 1)[1]


@pytest.mark.parametrize(
    "setting", ["seed=1", "learner.learning_rate=0.00200001", "learner.steps=23"]
)
def test_other_settings_give_other_weights(run: Path, replay: Replay, setting: str) -> None:
    status, output, _ = replay(run, 17, setting)
    assert status == 1
    assert "the weights after learner step 17 are" in output
    assert "  loss/learning_rate: " in output, (
        "scaled by the effective sample size, so by all of them"
    )


def test_a_changed_byte_of_a_segment_a_checkpoint_or_the_base_model_is_named(
    copy: Path, replay: Replay
) -> None:
    segment = copy / trained_step(RunLayout.open(copy), 18).batch.segments[-1].path
    flip(segment, 8 * (segment.stat().st_size // 2))
    # a merged file may hold rows of earlier steps too
    status, output, errors = replay(copy, 20)
    assert (status, str(segment) in errors, errors.count("\n")) == (2, True, 1)
    assert "learner step 18: " not in output

    checkpoint = next((copy / "checkpoints" / "step000016").glob("exp_avg_sq*"))
    flip(checkpoint, 8 * (checkpoint.stat().st_size - 3))
    status, _, errors = replay(copy, 20)
    assert (status, str(checkpoint) in errors, errors.count("\n")) == (2, True, 1)

    weights = copy / "base" / "policy" / "model.safetensors"
    flip(weights, 8 * (weights.stat().st_size - 3))
    status, output, _ = replay(copy, 1)
    assert (status, f"{weights.parent}; its weights are NOT those of version 0" in output) == (
        1,
        True,
    )


def test_a_missing_step_or_file_is_named_with_the_remedy(copy: Path, replay: Replay) -> None:
    layout = RunLayout.open(copy)
    status, _, errors = replay(copy, STEPS + 1)
    assert (status, errors) == (
        2,
        f"error: {copy} was trained to learner step {STEPS}; there is no {STEPS + 1}\n",
    )
    with Catalog.open(layout) as catalog:
        expired = [segment.segment_id for segment in trained_step(layout, 17).batch.segments]
        catalog.expire(expired)
        assert replay(copy, 17)[0] == 0, "the file is still there"
        catalog.mark_removed(expired)
    status, _, errors = replay(copy, 18)
    assert (status, "were removed: segments/" in errors, "store.keep_days" in errors) == (
        2,
        True,
        True,
    )
    shutil.rmtree(copy / "base")
    status, _, errors = replay(copy, 20)
    assert (status, f"{copy}/base/policy, the base model of {copy}, is not here" in errors) == (
        2,
        True,
    )
    layout.catalog.unlink()
    status, _, errors = replay(copy, 20)
    assert (status, "gigpo rebuild" in errors) == (2, True)


def test_explaining_a_step_does_not_change_it(run: Path, replay: Replay) -> None:
    status, output, _ = replay(run, 17, "--to", 18, "--explain")
    assert (status, "2 of 2 learner steps identical" in output) == (0, True)
    assert output.count("gradient") == 1, "one table, of the step that was asked for"


def test_the_explained_gradient_is_the_gradient_of_the_step(run: Path) -> None:
    explanation, step = explained(run, 17, updates_per_step=1)
    gradients = [one.gradient for one in explanation.groups if one.gradient is not None]
    total = explanation.total
    assert total is not None
    assert (total.n_rows, total.n_tokens) == (
        sum(one.n_rows for one in gradients),
        sum(one.n_tokens for one in gradients),
    )
    assert step.changed["loss/grad_norm"][1] == pytest.approx(total.grad_norm, rel=1e-4), (
        "what one update over all rows has"
    )
    assert 0.0 < total.grad_norm < sum(one.grad_norm for one in gradients), (
        "of a sum of gradients that point apart"
    )
    assert (
        total.ratio_max
        == max(one.ratio_max for one in gradients)
        > 1.0
        > total.ratio_min
        == min(o.ratio_min for o in gradients)
    )
    assert total.ratio_max == pytest.approx(step.changed["loss/ratio_max"][1], rel=1e-4)


def test_updates_of_a_given_number_of_rows_are_replayed(replay: Replay) -> None:
    """12 rows a learner step, 5 in an update: updates of 5, 5 and 2 rows, the last with 2 / 5 of
    the weight.
    """
    sized = {
        "rows_per_update": 5,
        "updates_per_step": 1,
        "schedule": "constant",
        "warmup_updates": 7,
    }
    with fast_directory() as directory:
        train(config_of(directory / "run", steps=5, checkpoint_every=2, **sized))
        with store.open_run(directory / "run") as reader:
            counted = reader.sql(
                "SELECT max(value) AS n FROM metrics WHERE name = 'learner/updates'"
            ).to_pylist()
        assert counted == [{"n": 3.0}]
        status, output, _ = replay(directory / "run", 1, "--to", 5)
        assert (status, "5 of 5 learner steps identical" in output) == (0, True)


def test_adapters_are_replayed(replay: Replay) -> None:
    with fast_directory() as directory:
        train(config_of(directory / "run", steps=5, checkpoint_every=2, lora_rank=4, kl_coef=0.01))
        for first, n in ((1, 5), (5, 1)):
            status, output, _ = replay(directory / "run", first, "--to", 5, "--explain")
            assert (status, f"{n} of {n} learner steps identical" in output) == (0, True)


@pytest.mark.parametrize(
    ("estimator", "lora_rank"),
    [("turn_ppo", 0), pytest.param("turn_ppo", 4, marks=pytest.mark.slow), ("ppo", 4)],
)
def test_steps_with_a_critic_are_replayed_with_its_values(
    replay: Replay, estimator: str, lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the base model and from checkpoints, also of the warm-up; after a crash between two
    steps. An audit finds, over the stored values, the advantages that were trained on.
    """
    trained: dict[int, pa.Table] = {}

    def noting(*given: Any, learner_step: int, **named: Any) -> PreparedBatch:
        batch = prepare_batch(*given, learner_step=learner_step, **named)
        trained[learner_step] = batch.rows
        return batch

    monkeypatch.setattr("learner.data.prefetch.prepare_batch", noting)
    with fast_directory() as directory:
        config = config_of(
            directory / "run",
            steps=5,
            checkpoint_every=2,
            keep_every=2,
            lora_rank=lora_rank,
            critic=CriticConfig(learning_rate=1e-2, warmup_steps=1),
            schedule="constant",
            estimator=estimator,
        )
        train(config, crash_at=4)
        train(config)
        for first, n in ((1, 5), (3, 3), (5, 1)):
            status, output, _ = replay(directory / "run", first, "--to", 5)
            assert (status, f"{n} of {n} learner steps identical" in output) == (0, True), output
        layout = RunLayout.open(directory / "run")
        steps = [trained_step(layout, step) for step in (1, 2, 5)]
        assert steps[0].published.digest != steps[1].published.digest, "the policy begins at 2"
        assert {len(values) for values in steps[0].values.values()} == {3}
        assert {value for values in steps[0].values.values() for value in values} == {0.0}
        assert len({value for values in steps[2].values.values() for value in values}) > 10
        with store.open_run(directory / "run") as reader:
            counted = reader.sql(
                "SELECT learner_step, count(*) AS n FROM critic_values GROUP BY ALL ORDER BY ALL"
            ).to_pylist()
            (valued,) = reader.sql("SELECT count(value) AS n FROM valued_steps").to_pylist()
            audited = audit_rows(reader, {"a": Setting.of(config)}, where="split = 'train'")
        assert [row["learner_step"] for row in counted] == [1, 2, 3, 4, 5], "one of each, no other"
        assert valued["n"] == len(audited) == sum(row["n"] for row in counted)
        advantages = {
            (row["traj_uid"], row["step_index"]): (row["advantage_a"], row["value_target_a"])
            for row in audited.filter(audited["passes_filter_a"]).to_pylist()
        }
        learnt = {
            (uid_text(row["traj_uid"]), row["step_index"]): (row["advantage"], row["value_target"])
            for rows in trained.values()
            for row in rows.to_pylist()
        }
        assert learnt.keys() == advantages.keys()
        for step, found in advantages.items():
            assert found == pytest.approx(learnt[step], abs=1e-9)
        with sqlite3.connect(layout.catalog) as connection:
            connection.execute(
                "UPDATE critic_value SET state_values = '[0.5, 0, 0]' WHERE traj_uid = "
                "(SELECT min(traj_uid) FROM critic_value JOIN batch USING (batch_id) "
                "WHERE learner_step = 5)"
            )
        status, output, _ = replay(directory / "run", 5)
        assert (status, "trajectories whose values, by the critic, are not" in output) == (1, True)


def test_advantages_of_tokens_are_shown_where_there_are_some() -> None:
    """They are what the loss reads. The row without a response has none."""
    rows = pa.table(
        {
            "advantage": [9.0, 9.0, 9.0],
            "episode_advantage": [0.0] * 3,
            "step_advantage": [9.0] * 3,
            "token_advantage": [[1.0, -3.0], [], [5.0]],
        }
    )
    shown = _summary(rows, seen_2N=torch.ones(2, 3), gradient=[torch.ones(1)])
    assert (shown.advantage, shown.step) == (3.0, 9.0)
    by_row = _summary(
        rows.drop_columns("token_advantage"), seen_2N=torch.ones(2, 3), gradient=[torch.ones(1)]
    )
    assert by_row.advantage == 9.0


def test_the_values_of_tokens_are_compared_by_their_digest(replay: Replay) -> None:
    """The weights and all else may be equal: the digest alone says that values were others."""
    with fast_directory() as directory:
        critic = CriticConfig(learning_rate=1e-2)
        train(config_of(directory / "run", steps=3, critic=critic, estimator="ppo"))
        with store.open_run(directory / "run") as reader:
            digests = reader.sql(
                "SELECT value FROM metrics WHERE name = 'critic/values_digest'"
            ).to_pylist()
        assert len({row["value"] for row in digests}) == 3
        assert all(0 < row["value"] < 2**48 for row in digests)
        status, output, _ = replay(directory / "run", 1, "--to", 3, "--explain")
        assert (status, "3 of 3 learner steps identical" in output) == (0, True), output
        with sqlite3.connect(RunLayout.open(directory / "run").catalog) as connection:
            connection.execute(
                "UPDATE metric SET value = value + 1 "
                "WHERE name = 'critic/values_digest' AND learner_step = 3"
            )
        status, output, _ = replay(directory / "run", 1, "--to", 3)
        assert (status, "are identical, but 1 figures differ" in output) == (1, True)
        assert "critic/values_digest" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("learner.gpus_per_rank=1",),
            "the run's learner had GPUs (learner.gpus_per_rank=1), there is none here",
        ),
        (
            ("learner.zero_stage=3", "--explain"),
            "learner.zero_stage=3 spreads the gradient over the ranks",
        ),
        (
            ("learner.ranks=2", "learner.sequence_parallel=2", "--explain"),
            "learner.sequence_parallel=2 spreads each sequence over several ranks",
        ),
        (("learner.rate=3",), "unknown key 'learner.rate'"),
        (("algorithm.gamma=.nan",), "algorithm.gamma=nan is outside [0, 1]"),
        (("algorithm.group_filter=x",), "algorithm.group_filter='x' is unknown"),
        (("--to", "0"), "0 is not a whole number of 1 to"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CPU")
def test_a_run_that_cannot_be_replayed_is_refused_in_a_line(
    run: Path, replay: Replay, arguments: tuple[str, ...], said: str
) -> None:
    status, _, errors = replay(run, 1, *arguments)
    assert (status, errors.count("\n")) == (2, 1)
    assert said in errors


def test_the_last_step_is_not_before_the_first(run: Path, replay: Replay) -> None:
    status, _, errors = replay(run, 3, "--to", 2)
    assert status == 2
    assert "steps 3 to 2: steps count from 1, and the last is not before the first" in errors


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("critic",)])
def test_a_run_of_two_ranks_is_replayed_by_two(tmp_path: Path, more: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    making = [
        sys.executable,
        "-c",
        "from tests.support.replay_samples import main; main()",
        str(run),
        "5",
        "2",
        *more,
    ]
    subprocess.run(making, cwd=ROOT, timeout=DEADLINE_S, check=True, capture_output=True)
    before = fingerprint(run)
    replay = [sys.executable, "-m", "cli", "replay"]
    asking = [*replay, str(run), "1", "--to", "5", "--explain"]
    done = subprocess.run(
        asking, cwd=ROOT, timeout=DEADLINE_S, check=False, capture_output=True, text=True
    )
    assert (done.returncode, "5 of 5 learner steps identical" in done.stdout) == (0, True), (
        done.stdout + done.stderr
    )
    assert fingerprint(run) == before


def test_the_model_of_a_strangers_run_is_not_loaded_without_trust(
    copy: Path, replay: Replay
) -> None:
    (copy / "signed.json").unlink()
    status, _, error = replay(copy, STEPS)
    assert (status, error.count("\n")) == (2, 1)
    assert f"{copy} was not made by you" in error and "Add --trust" in error
    assert replay(copy, STEPS, "--trust")[0] == 0

"""docs/your_environment.md: its environment is whole, short, right, and trains with the command
that stands below it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import configs
from actors import sample_chats
from actors.policy import ScriptedPolicy
from actors.prompting.prompt import PromptForm
from actors.rollout.episode import AttemptProgress, EpisodeContext, EpisodeRules, play_episode
from actors.rollout.step_records import EpisodeIds
from envs import EnvironmentPool, Task, environment_class, list_tasks
from gigpo import AdvantageSettings, compute_advantages
from learner import make_tiny_model, train_tokenizer
from learner.data.micro_batch import micro_batches
from learner.training.engine import Engine
from store import RunLayout, Trajectory, to_table, uid
from tests.support.learner_samples import one_step_each
from tests.support.run_views import connect

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs/your_environment.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
(COMMAND,) = re.findall(r"```sh\nPYTHONPATH=\. gigpo (train .*?)\n```", DOC, re.DOTALL)
NAME = "lamps:Lamps"
MAX_LINES = 40
TIMEOUT_S = 900.0  # only for what hangs


@pytest.fixture
def lamps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with lamps.py in it."""
    (tmp_path / "lamps.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def trained(folder: Path, *overrides: str) -> Path:
    """The run of the documented command, elsewhere and shorter."""
    run = folder / "run"
    answer = subprocess.run(
        [sys.executable, "-m", "cli", *shlex.split(COMMAND), f"run_dir={run}", *overrides],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder), "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
    return run


def rows(run: Path, sql: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(sql).fetchall()


def test_the_environment_has_fewer_lines_than_promised() -> None:
    assert len(CODE.splitlines()) < MAX_LINES


def test_the_environment_plays_as_its_rules_say(lamps: Path) -> None:
    splits = list_tasks(NAME, {})
    assert {split: len(tasks) for split, tasks in splits.items()} == {"train": 10, "heldout": 5}
    env = environment_class(NAME)({})
    first = env.reset(next(task for task in splits["train"] if task.data["lit"] == "1101"))
    assert (first.text, first.actions) == (
        "The lamps are on on off on.",
        ("turn off 1", "turn off 2", "turn on 3", "turn off 4"),
    )
    seen = [
        env.step(action)
        for action in ("turn on 1", "turn off 1", "turn on 3", "turn off 4", "turn on 1")
    ]
    assert [t.observation.text.removeprefix("The lamps are ") for t in seen] == [
        "on on off on.",
        "off on off on.",
        "off on on on.",
        "off on on off.",
        "on on on off.",
    ]
    assert [t.valid for t in seen] == [False, True, True, True, True] and not any(
        t.won for t in seen
    )
    env.reset(next(task for task in splits["train"] if task.data["lit"] == "0100"))
    won = env.step("turn off 2")
    assert (won.reward, won.terminated, won.truncated, won.won) == (1.0, True, False, True)


def test_groups_of_it_have_advantages_and_teach_a_model(lamps: Path) -> None:
    """Play groups with a scripted policy, and train a tiny model on them, all in this process."""
    config = configs.load(
        ROOT / "configs/key_room.yaml", [f"env.name={NAME}", "env.options={}", "env.max_steps=8"]
    )
    tokenizer = train_tokenizer(
        sample_chats(config), vocabulary_size=config.model.tiny.vocabulary_size
    )
    make_tiny_model(lamps / "tiny", tokenizer=tokenizer, config=config.model.tiny, seed=0)
    form, rules = PromptForm(tokenizer, config.prompt), EpisodeRules.of(config, temperature=1.0)

    async def play() -> list[Trajectory]:
        pool = EnvironmentPool(NAME, {}, processes=1, answer_timeout_s=30.0)

        async def episode(task: Task, member: int) -> Trajectory:
            async with pool.environment() as environment:
                ids = EpisodeIds.of(uid(task.id), member)
                policy = ScriptedPolicy(form.encode_answer)
                return await play_episode(
                    EpisodeContext(
                        environment=environment,
                        policy=policy,
                        form=form,
                        task=task,
                        ids=ids,
                        rules=rules,
                    ),
                    progress=AttemptProgress(),
                )

        try:
            return await asyncio.gather(
                *(
                    episode(task, member)
                    for task in list_tasks(NAME, {})["train"]
                    for member in range(4)
                )
            )
        finally:
            pool.close()

    trajectories = asyncio.run(play())
    assert 0 < sum(trajectory.won for trajectory in trajectories) < len(trajectories) == 40
    rows = to_table(trajectories)
    computed = compute_advantages(rows, AdvantageSettings.of(config.algorithm))
    assert any(computed["steps_differ"].to_pylist()), (
        "no two steps of a group have the same anchor and another worth"
    )
    rows = rows.append_column("advantage", computed["advantage"]).append_column(
        "staleness", pa.array([0] * len(rows))
    )
    engine = Engine(
        model_path=lamps / "tiny",
        model=configs.ModelConfig(),
        learner=configs.LearnerConfig(learning_rate=3e-3),
        loss=configs.LossConfig(policy="behaviour_cloning"),
        temperature=1.0,
        seed=0,
        rank=0,
        address=None,
    )
    batch = micro_batches(one_step_each(rows), micro_batch_tokens=4096, ranks=1)
    losses = [update.loss for _ in range(3) for update in engine.train([batch])]
    engine.close()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_the_documented_command_trains_it(lamps: Path) -> None:
    """With the scripted policy for a policy and its moves to be learned, so that no engine has to
    start.
    """
    config = configs.load(ROOT / "configs/key_room.yaml", [f"env.name={NAME}", "env.options={}"])
    tokenizer = train_tokenizer(
        sample_chats(config), vocabulary_size=config.model.tiny.vocabulary_size
    )
    make_tiny_model(lamps / "tiny", tokenizer=tokenizer, config=config.model.tiny, seed=0)
    run = trained(
        lamps,
        f"model.path={lamps / 'tiny'}",
        "actors.scripted=true",
        "loss.policy=behaviour_cloning",
        "algorithm.estimator=grpo",
        "algorithm.group_size=1",
        "algorithm.group_filter=advantages",
        "learner.steps=2",
        "max_staleness=2",
        "evaluation.every=0",
        "evaluation.final_episodes_per_task=1",
    )
    assert rows(run, "SELECT max(learner_step) FROM lineage WHERE batch_state = 'trained'") == [
        (2,)
    ]
    assert rows(
        run, "SELECT count(DISTINCT task_id) FROM trajectories WHERE split = 'heldout'"
    ) == [(5,)]
    assert rows(run, "SELECT count(*) FROM task_overlap") == [(0,)]


@pytest.mark.slow
def test_the_documented_command_as_it_stands_learns(lamps: Path) -> None:
    run = trained(
        lamps, "learner.steps=20", "evaluation.every=0", "evaluation.final_episodes_per_task=2"
    )
    success = (
        "SELECT avg(won::INT) FROM trajectories JOIN lineage USING (group_uid) "
        "WHERE batch_state = 'trained' AND learner_step"
    )
    ((before,),), ((after,),) = rows(run, f"{success} <= 2"), rows(run, f"{success} > 18")
    assert after > before + 0.3  # it was 0.63 more

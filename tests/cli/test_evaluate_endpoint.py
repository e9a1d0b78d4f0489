"""gigpo evaluate with a model behind a server: whole evaluations, what is recorded of them, and
what is refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import configs
import store
from analysis import evaluation_stats as evaluation
from cli.__main__ import main
from configs import Config, ConfigError, EndpointConfig
from driver.environment_check import try_tasks
from driver.evaluate_run import new_run_settings
from driver.offline_sources import check_sources
from store import RunLayout
from tests.support.chat_server import Answer, ChatServer, chat_server, plays_key_room
from tests.support.fault_runs import ROOT

KEY_ROOM = str(ROOT / "configs" / "key_room.yaml")
SECRET = "sk-never-written"
AT = ["endpoint.url=http://127.0.0.1:9/v1", "endpoint.model=m"]


def command(server: ChatServer, *given: str) -> list[str]:
    return [
        "-m",
        "cli",
        "evaluate",
        *given,
        f"endpoint.url={server.url}",
        "endpoint.model=quick-7b",
        "endpoint.api_key_env=EPISODE_KEY",
    ]


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "EPISODE_KEY": SECRET, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.run
def test_a_model_behind_a_server_is_evaluated_into_a_store_and_goes_on_where_it_was_stopped(
    tmp_path: Path,
) -> None:
    """All in one, as each start of Ray takes seconds."""
    new = tmp_path / "new"
    n_answered = 0

    def dies_on_the_way(body: dict[str, Any]) -> Answer:
        nonlocal n_answered
        n_answered += 1
        return (
            plays_key_room(body)
            if n_answered <= 30
            else (400, {"error": {"message": "the credit is used up"}})
        )

    with chat_server(dies_on_the_way) as server:
        again = command(server, KEY_ROOM, f"run_dir={new}", "evaluation.final_episodes_per_task=2")
        first = run([*again, "endpoint.requests=3"])
        assert first.returncode == 2, first.stdout + first.stderr
        assert f"EndpointFailed: {server.url} answered 400: the credit is used up" in first.stderr
        n_answered = -10_000
        n_before = len(server.asked)
        second = run(again)
        assert second.returncode == 0, second.stdout + second.stderr
        assert server.keys == {f"Bearer {SECRET}"}
        assert len(server.asked) - n_before > 0
    assert (
        "all   20     40" in second.stdout
        and "held-out episodes" in second.stdout
        and "learner" not in second.stdout
    )
    check_recorded(new)
    check_nothing_loaded(new)
    fsck = run(["-m", "cli", "fsck", str(new)])
    assert fsck.returncode == 0, fsck.stdout + fsck.stderr
    console = Console(width=200, record=True)
    evaluation.show_evaluation_comparison(new, new, console=console)
    assert "20 tasks in common" in console.export_text()
    check_not_trained_on(new, tmp_path)


def check_recorded(new: Path) -> None:
    with store.open_run(new) as reader:
        (row,) = reader.sql(
            "SELECT count(*) AS n, count(DISTINCT traj_uid) AS uids, avg(won::INT) AS success FROM "
            "trajectories"
        ).to_pylist()
        assert row["n"] == row["uids"] == 40 and 0.3 < row["success"] <= 1.0
        said = reader.sql(
            """SELECT action_text, obs_text,
            array_to_string(list_transform(response_ids, lambda c: chr(c)), '') AS reply,
            array_to_string(list_transform(prompt_ids, lambda c: chr(c)), '') AS prompt
            FROM steps LIMIT 20"""
        ).to_pylist()
    for step in said:
        assert (
            step["reply"] == f"<action>{step['action_text']}</action>"
            and step["obs_text"] in step["prompt"]
        )
    layout = RunLayout.open(new)
    assert '"model": "quick-7b"' in (layout.weights_dir(0) / "endpoint.json").read_text()
    for path in new.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), (
            f"{path} has the API key"
        )


def check_nothing_loaded(new: Path) -> None:
    assert not (new / "base").exists() and not (new / "tensorboard").exists()
    assert {path.name for path in (new / "logs").iterdir()} <= {"coordinator.log", "worker-0.log"}


def check_not_trained_on(new: Path, tmp_path: Path) -> None:
    config = configs.load(KEY_ROOM, [f"source={new}", f"run_dir={tmp_path / 'trained'}"])
    with pytest.raises(
        ConfigError, match="was played by quick-7b at http.*nothing can be trained from it"
    ):
        check_sources(config, Console())


def test_a_worker_and_the_driver_load_nothing_to_compute_with() -> None:
    """No torch, tokenizer or engine: what a worker is made of, and what the driver does until Ray
    is up.
    """
    code = """if True:
        import sys
        from dataclasses import replace
        import configs
        from driver.evaluate_run import new_run_settings
        from actors.policy import Policy
        from actors.inference.codepoint_tokenizer import codepoint_form
        from actors.inference.openai_policy import ChatPolicy
        given = ['run_dir=x', 'endpoint.url=http://h/v1', 'endpoint.model=m']
        config = new_run_settings('configs/key_room.yaml', given)
        ChatPolicy(config), codepoint_form(config.prompt)
        from driver.progress import Progress
        import driver.supervisor
        from rich.console import Console
        from driver.screen import shown_in
        Progress(config, title='evaluating', screen=shown_in(Console()))
        print(*sys.modules)"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & {"torch", "transformers", "deepspeed", "vllm"}


def test_the_settings_are_the_runs_and_nothing_of_ours_is_loaded(tmp_path: Path) -> None:
    given = [f"run_dir={tmp_path / 'new'}", *AT]
    config = new_run_settings(str(ROOT / "configs" / "alfworld_qwen2.5_1.5b.yaml"), given)
    assert (config.model.path, config.model.lora_rank, config.actors.gpus_per_worker) == ("", 0, 0)
    made = configs.load(KEY_ROOM, [f"run_dir={tmp_path / 'run'}", "env.max_steps=7"])
    RunLayout.create(tmp_path / "run", config_yaml=configs.as_yaml(made))
    of_run = new_run_settings(str(tmp_path / "run"), given)
    assert (of_run.env.max_steps, of_run.endpoint.model, of_run.run_dir) == (
        7,
        "m",
        str(tmp_path / "new"),
    )
    with pytest.raises(ConfigError, match="endpoint.url= beside .*@3"):
        new_run_settings(f"{tmp_path / 'run'}@3", given)


def test_another_server_goes_on_and_another_model_does_not() -> None:
    config = Config(endpoint=EndpointConfig(url="http://a/v1", model="m"))
    moved = Config(endpoint=EndpointConfig(url="http://b/v1", model="m", attempts=3))
    other = Config(endpoint=EndpointConfig(url="http://a/v1", model="n"))
    assert configs.forbidden_changes(config, moved) == []
    assert configs.forbidden_changes(config, other) == ["endpoint.model: 'm' -> 'n'"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["endpoint.model=m"], "has no server; add endpoint.url="),
        (
            ["endpoint.url=host:8000"],
            "endpoint.url='host:8000' is no URL like http://localhost:8000/v1",
        ),
        (["endpoint.url='http://[x/v1'"], "endpoint.url='http://[x/v1' is no URL like"),
        (["endpoint.url=http://host:70000/v1"], "'http://host:70000/v1' is no URL like"),
        (["endpoint.url=http://me:secret@host/v1"], "name or password in it; leave them out"),
        (
            [*AT, "endpoint.api_key_env=sk-12345"],
            "give the name, e.g. OPENAI_API_KEY, never the key itself",
        ),
        ([*AT, "endpoint.attempts=0"], "endpoint.attempts=0 must be above 0"),
        ([*AT, "endpoint.modle=x"], "endpoint.modle"),
    ],
)
def test_a_mistake_is_one_line_without_secrets(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load(KEY_ROOM, given)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert "secret@" not in str(caught.value) and "12345" not in str(caught.value)


def test_nothing_starts_where_no_server_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    assert main(["evaluate", KEY_ROOM, f"run_dir={new}", *AT]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: http://127.0.0.1:9/v1 cannot be reached (") and not new.exists()


def test_a_dry_run_asks_the_server_and_lists_the_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(plays_key_room) as server:
        given = [
            f"run_dir={tmp_path / 'new'}",
            f"endpoint.url={server.url}",
            "endpoint.model=quick-7b",
        ]
        assert main(["evaluate", KEY_ROOM, "--dry-run", *given]) == 0
        assert len(server.asked) == 1
    shown = capsys.readouterr().out
    assert (
        f"quick-7b answers at {server.url}" in shown and "40 training tasks, 20 held out" in shown
    )
    assert not (tmp_path / "new").exists()


def test_nothing_is_trained_from_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", KEY_ROOM, *AT]) == 2
    assert "is for gigpo evaluate" in capsys.readouterr().err


def test_an_agent_program_has_its_own_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    given = [
        f"run_dir={tmp_path}",
        *AT,
        "env.name=number_game_agent:Agent",
        "env.options={highest: 5, guesses: 2}",
    ]
    config = new_run_settings(KEY_ROOM, given)
    with pytest.raises(ConfigError, match="is an agent program, which calls its model by itself"):
        try_tasks(config, Console())

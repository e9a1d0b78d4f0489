"""docs/agent_programs.md: the command that it gives is whole, and works on a CPU without any
model.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import configs
from actors import read_chats
from cli.__main__ import main
from driver.screen import Screen
from driver.train_run import _make_base_policy
from envs import list_tasks
from store import RunLayout
from tests.support.run_views import connect

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs/examples"
DOC = (ROOT / "docs/agent_programs.md").read_text()
(COMMAND,) = re.findall(
    r"```sh\nPYTHONPATH=\$PWD/docs/examples gigpo train (.*?)\n```", DOC, re.DOTALL
)
CONFIG, *OVERRIDES = shlex.split(COMMAND.replace("\\\n", " "))
(TOOL_COMMANDS,) = re.findall(
    r"```sh\nexport PYTHONPATH=\$PWD/docs/examples\n(.*?)```", DOC, re.DOTALL
)
TIMEOUT_S = 900.0  # only for what hangs


def test_the_documented_command_has_tasks_and_all_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    given = [str(ROOT / CONFIG), *OVERRIDES, f"run_dir={tmp_path / 'run'}", "--dry-run"]
    assert main(["train", *given]) == 0
    assert "number_game_agent:Agent: 6 training tasks, 2 held out" in capsys.readouterr().out


def test_a_missing_option_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the error is the one that the documentation shows."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    others = [text for text in OVERRIDES if not text.startswith("env.options=")]
    given = [str(ROOT / CONFIG), *others, f"run_dir={tmp_path / 'run'}"]
    assert main(["train", *given, "env.options={highest: 8}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = "option 'guesses' is missing (given: highest); set env.options.guesses=..."
    assert said in line and said in DOC
    assert main(["train", *given, "env.options={guesses: 3}", "--dry-run"]) == 2
    assert "option 'highest' is missing (given: guesses)" in capsys.readouterr().err


def test_a_program_without_a_model_gets_one_made_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    config = configs.load(ROOT / CONFIG, [*OVERRIDES, f"run_dir={tmp_path}"])
    assert config.model.path == ""
    policy = _make_base_policy(config, Screen.quiet())
    assert policy == tmp_path / "base" / "policy" == _make_base_policy(config, Screen.quiet())
    assert sorted(path.name for path in policy.parent.iterdir()) == ["policy"]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    chat = [{"role": "user", "content": "Guess: 7"}]
    assert "Guess: 7" in tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_the_commands_of_the_agent_with_tools_fit_its_chats_and_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    commands = [shlex.split(line) for line in TOOL_COMMANDS.replace("\\\n", " ").splitlines()]
    make, clone, export, play = commands
    made = subprocess.run(
        [sys.executable, *make[1:3]], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    chats = tmp_path / make[-1]
    chats.write_bytes(made.stdout)
    cloning, playing = (configs.load(ROOT / command[2], command[3:]) for command in (clone, play))
    n_chats = sum(1 for _ in read_chats(chats))
    used = cloning.learner.steps * cloning.learner.groups_per_step
    assert (cloning.source, n_chats) == ([chats.name], int(make[2]))
    assert used <= n_chats * cloning.offline.uses
    assert (f"runs/{Path(cloning.run_dir).name}", playing.model.path) == tuple(export[2:])
    tasks = list_tasks(playing.env.name, playing.env.options)
    assert {split: len(found) for split, found in tasks.items()} == {"train": 12, "heldout": 6}
    assert not {t.id for t in tasks["train"]} & {t.id for t in tasks["heldout"]}


@pytest.mark.slow
def test_the_documented_command_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shorter = ["learner.steps=2", "evaluation.every=0", "evaluation.final_episodes_per_task=1"]
    answer = subprocess.run(
        [sys.executable, "-m", "cli", "train", CONFIG, *OVERRIDES, f"run_dir={run}", *shorter],
        cwd=ROOT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "docs/examples",
            "TMPDIR": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
    with connect(RunLayout.open(run)) as connection:
        sql = "SELECT max(learner_step) FROM lineage WHERE batch_state = 'trained'"
        assert connection.sql(sql).fetchall() == [(2,)]

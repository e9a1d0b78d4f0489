"""The program answers `--help` and mistakes before it loads anything heavy, and names the fix."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cli.__main__ import SECTIONS, main
from tests.support.store_runs import make_run

ROOT = Path(__file__).resolve().parents[2]
KEY_ROOM = str(ROOT / "configs" / "key_room.yaml")
HEAVY = {
    "torch",
    "ray",
    "vllm",
    "deepspeed",
    "transformers",
    "duckdb",
    "pyarrow",
    "pandas",
    "numpy",
    "omegaconf",
    "rich",
}
COMMANDS = [str(command.name) for commands in SECTIONS.values() for command in commands]
MISTAKES = [
    "wrong",
    "train",
    "train --learner.steps=5",
    "evaluate",
    "audit",
    "sql",
    "export-model",
    "replay runs/a none",
    "workers runs/a 0",
]
# Print the loaded modules when the interpreter ends: --help and mistakes end in SystemExit.
LOADED = """
import atexit, runpy, sys
atexit.register(lambda: print("LOADED", *sys.modules))
sys.argv[0] = "gigpo"
runpy.run_module("cli", run_name="__main__", alter_sys=True)
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOADED, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("asked", ["--help", *(f"{name} --help" for name in COMMANDS), *MISTAKES])
def test_help_and_mistakes_load_nothing_heavy(asked: str) -> None:
    done = run(*asked.split())
    assert done.returncode == (0 if "--help" in asked else 2), done.stderr
    assert ("Usage: gigpo" in done.stdout) == ("--help" in asked), done.stdout + done.stderr
    assert "--help" in asked or done.stderr.count("\n") == 1, done.stderr
    assert not set(done.stdout.rpartition("LOADED")[2].split()) & HEAVY


def test_only_the_learner_and_engines_of_a_run_load_torch(tmp_path: Path) -> None:
    done = run("train", KEY_ROOM, f"run_dir={tmp_path / 'run'}", "--dry-run")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert "driver.supervisor" in loaded
    assert not loaded & {"torch", "vllm", "deepspeed", "transformers"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_and_explains_every_option(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"gigpo {name} " in shown.partition("Example")[2]
    (command,) = [each for each in sum(SECTIONS.values(), ()) if each.name == name]
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.opts


def test_the_help_of_the_program_names_every_command_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [sum(line[:1] == [name] for line in lines) for name in COMMANDS] == [1] * len(COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["c.yaml", "--learner.steps=5"],
            "--learner.steps=5: settings are given without dashes, as learner.steps=5",
        ),
        (
            ["c.yaml", "--learner.steps", "5"],
            "--learner.steps: settings are given without dashes, as learner.steps=5",
        ),
        (["c.yaml", "--learner.steps", "seed=5"], "as learner.steps=VALUE"),
        (["c.yaml", "--seed=5"], "as seed=5"),
        (["--run-dir=runs/a", "c.yaml"], "as run_dir=runs/a"),
        (["c.yaml", "--verbose"], "No such option '--verbose'"),
        (["c.yaml", "--dryrun"], "Did you mean '--dry-run'"),
        (["--resume", "runs/a", "--resume", "runs/b"], "--resume: given twice; give it once"),
        (["--resume", "runs/a", "--fork", "runs/b@1"], "--resume and --fork exclude each other"),
    ],
)
def test_a_mistake_names_the_fix_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and line.endswith("see gigpo train --help")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_changes_no_answer(tmp_path: Path, closed: str) -> None:
    """fsck of a whole run ended with status 1, because its output could not be flushed."""
    make_run(tmp_path / "run")
    command = shlex.join([sys.executable, "-m", "cli", "fsck", str(tmp_path / "run")])
    done = subprocess.run(
        f"{command} {closed}", shell=True, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_shell_completes_commands_and_options() -> None:
    for words, place, completed in (
        ("gigpo ev", "1", "evaluate"),
        ("gigpo sql --lim", "2", "--limit"),
    ):
        done = run(_GIGPO_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=place)
        assert f"plain,{completed}" in done.stdout.split()


def test_a_dry_run_shows_what_differs_and_with_all_every_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["train"], ["evaluate"]):
        given = [*command, KEY_ROOM, f"run_dir={tmp_path / 'new'}", "seed=7"]
        if command == ["evaluate"]:
            given.append("model.path=nowhere/at_all/here")
        shown = {}
        for option in ("--dry-run", "--dry-run --all"):
            assert main([*given, *option.split()]) == 0, capsys.readouterr().err
            shown[option] = capsys.readouterr().out
        assert all("seed: 7" in text for text in shown.values())
        assert "attempts:" not in shown["--dry-run"] and "attempts:" in shown["--dry-run --all"]
        assert main([*given, "--all"]) == 2
        assert "--all shows settings; give it with --dry-run" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

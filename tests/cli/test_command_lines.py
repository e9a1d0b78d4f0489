"""The commands answer `--help` and mistakes before they load anything heavy, and name the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli import command_lines
from store import cli

ROOT = Path(__file__).resolve().parents[2]
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
STORE_COMMANDS = sorted(path.stem for path in Path(cli.__path__[0]).glob("[a-z]*.py"))
ASKED = [
    *(
        f"{script} --help"
        for script in ("-m", "cli", "train", "-m", "cli", "evaluate", "-m", "cli", "audit")
    ),
    *(
        "-m store --help",
        "-m learner --help",
        "-m learner export --help",
        "-m learner replay --help",
    ),
    *(
        f"-m store {name} --help"
        for name in [*STORE_COMMANDS, "export", "import"]
        if name != "exchange"
    ),
    *(
        "gigpo train --learner.steps=5",
        "-m",
        "cli",
        "train",
        "-m",
        "cli",
        "evaluate",
        "-m",
        "cli",
        "audit",
        "-m store sql",
        "-m learner export",
    ),
    *("-m store wrong", "-m learner wrong"),
]
# Print the loaded modules when the interpreter ends: --help and mistakes end in SystemExit.
LOADED = """
import atexit, runpy, sys
atexit.register(lambda: print("LOADED", *sys.modules))
sys.path.insert(0, "")
words = sys.argv[1:]
if words[0] == "-m":
    sys.argv = words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
"""


@pytest.mark.parametrize("asked", ASKED)
def test_help_and_mistakes_load_nothing_heavy(asked: str) -> None:
    command = [sys.executable, "-c", LOADED, *asked.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if "--help" in asked else 2), done.stderr
    assert ("usage:" in done.stdout) == ("--help" in asked), done.stdout + done.stderr
    assert not set(done.stdout.rpartition("LOADED")[2].split()) & HEAVY


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
        (["c.yaml", "--verbose"], "unrecognized arguments: --verbose"),
    ],
)
def test_a_setting_with_dashes_is_named_without(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_lines.train_options(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_options_stand_anywhere_and_are_no_settings() -> None:
    options = command_lines.train_options(["c.yaml", "--dry-run", "seed=1"])
    assert (options.config, options.dry_run, options.overrides) == ("c.yaml", True, ["seed=1"])
    assert command_lines.train_options(["--status=runs/a"]).status == "runs/a"
    assert command_lines.audit_options(
        ["r", "--against", "gamma=1.0"], description=None
    ).against == ["gamma=1.0"]
    assert command_lines.evaluate_options(["--compare", "a", "b"], description=None).compare == [
        Path("a"),
        Path("b"),
    ]

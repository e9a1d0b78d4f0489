"""deploy/Dockerfile: its steps are those of the README and of pyproject.toml. No image is built here;
`make` shows what each step would run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = {"FROM", "ARG", "RUN", "USER", "WORKDIR", "COPY", "ENV", "CMD"}


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in lines]


ALL = instructions()


def runs(**arguments: str) -> list[str]:
    """Return the RUN steps with the build's arguments in them."""
    defaults = dict(rest.split("=") for name, rest in ALL if name == "ARG")
    assert set(arguments) <= set(defaults)
    steps = [rest for name, rest in ALL if name == "RUN"]
    for name, value in (defaults | arguments).items():
        steps = [re.sub(rf"\${name}\b", value, step) for step in steps]
    return steps


def test_the_file_is_read() -> None:
    assert {name for name, _ in ALL} == INSTRUCTIONS
    assert ALL[0][0] == "FROM" and len(runs()) == 4


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_the_set_up_is_that_of_the_readme(extra: str) -> None:
    """The README's `make train` and `make test` set up by `make setup`, which runs setup.sh."""
    (step,) = [step for step in runs(EXTRA=extra) if step.startswith("make ")]
    words = shlex.split(step)
    assert words[1] == "setup" and f"EXTRA={extra}" in words
    shown = subprocess.run(
        ["make", "--dry-run", *words[1:], "VENV=elsewhere"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"VENV=elsewhere EXTRA={extra} sh setup.sh" in shown
    # make passes GPU_CHECK on in the environment
    assert "GPU_CHECK=no" in words and '"${GPU_CHECK:-}" = no' in (ROOT / "setup.sh").read_text()


@pytest.mark.parametrize("extras", ["cluster", "cluster,alfworld"])
def test_the_extras_are_those_of_the_project(extras: str) -> None:
    (step,) = [step for step in runs(EXTRAS=extras) if "pip install" in step]
    found = re.fullmatch(r'\.venv/bin/python -m pip install -e "\.\[([\w,]+)\]"', step)
    assert found and set(found[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_packages_are_those_that_set_up_and_kuberay_ask_for() -> None:
    (step,) = [step for step in runs() if "apt-get install" in step]
    packages = re.search(r"--no-install-recommends ([\w+ -]+?) &&", step)
    # gpu_check.sh asks for a C compiler, KubeRay's probes for wget
    assert packages and {"gcc", "g++", "make", "wget"} <= set(packages[1].split())


def test_the_python_is_one_that_the_project_allows() -> None:
    image = dict(ALL)["FROM"]
    minor = re.fullmatch(r"python:3\.(\d+)-slim-bookworm", image)
    allowed = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"])
    assert minor and allowed and int(allowed[1]) <= int(minor[1]) < int(allowed[2])
    directory = next(rest for name, rest in ALL if name == "WORKDIR")
    assert f"PATH={directory}/.venv/bin:$PATH" in dict(ALL)["ENV"]


def test_what_git_ignores_is_not_copied_into_the_image() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    names = {line.strip("/").removeprefix("**/") for line in left_out if not line.startswith("#")}
    as_a_star = {".venv", ".venv-cpu", ".venv-docs"}  # .venv*
    assert ignored - as_a_star <= names and {".venv*", ".git"} <= names


def test_the_user_is_not_root() -> None:
    names = [name for name, _ in ALL]
    made = names.index("USER")
    assert dict(ALL)["USER"] == "gigpo" and made < names.index("COPY")
    assert dict(ALL)["COPY"].startswith("--chown=gigpo ")
    assert "useradd" in runs()[1] and os.path.normpath(dict(ALL)["WORKDIR"]) in runs()[1]

"""Check that set-up names what a GPU machine lacks, before it installs 10 GB and after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """Programs that set-up finds, and no others; `sh` is given by its path."""

    def __init__(self, path: Path) -> None:
        self.bin, self.include = path / "bin", path / "include"
        self.bin.mkdir()
        self.include.mkdir()
        (self.include / "Python.h").write_text("")
        self.add("nvidia-smi", "echo 580.65.06; echo 580.65.06")
        self.add("gcc", "true")
        self.add("python", f"echo {self.include}")

    def add(self, name: str, body: str) -> None:
        program = self.bin / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)

    def check(self, when: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {
            "PATH": str(self.bin),
            "PYTHON": str(self.bin / "python"),
            "VENV": str(self.bin.parent / "venv"),
        }
        return subprocess.run(
            ["/bin/sh", "gpu_check.sh", when],
            cwd=ROOT,
            env=environ | variables,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def assert_missing(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("set-up failed: ") and line.endswith("make setup EXTRA=cpu")
    assert all(word in line for word in words), line


def test_a_machine_with_all_that_is_needed_passes(machine: Machine) -> None:
    done = machine.check("before")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("program", "body", "words"),
    [
        (
            "nvidia-smi",
            "echo 570.86.15",
            ["driver is 570.86.15", "580 or newer", "update the driver"],
        ),
        ("nvidia-smi", "exit 9", ["nvidia-smi does not run"]),
        ("nvidia-smi", "echo", ["names no driver version"]),
        ("python", "echo /nowhere", ["/nowhere/Python.h is missing", "python3-dev"]),
    ],
)
def test_what_is_missing_is_said_in_a_line(
    machine: Machine, program: str, body: str, words: list[str]
) -> None:
    machine.add(program, body)
    assert_missing(machine.check("before"), *words)


def test_a_compiler_is_gcc_clang_or_the_one_that_is_named(machine: Machine) -> None:
    (machine.bin / "gcc").rename(machine.bin / "clang")
    assert machine.check("before").returncode == 0
    (machine.bin / "clang").rename(machine.bin / "my-cc")
    assert_missing(
        machine.check("before"), "no C compiler (gcc or clang)", "install gcc, or set CC"
    )
    assert machine.check("before", CC="my-cc").returncode == 0
    assert_missing(machine.check("before", CC="other-cc"), "no C compiler (other-cc)")


def test_a_gpu_that_torch_does_not_find_is_said_with_torchs_reason(machine: Machine) -> None:
    """This environment's torch is shown no GPU: of the CPU build, or without a device."""
    venv = machine.bin.parent / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (venv / "python").chmod(0o755)
    done = machine.check("after", CUDA_VISIBLE_DEVICES="", HOME=os.environ.get("HOME", "/"))
    assert_missing(done, "torch finds no GPU (torch ", "for CUDA", "nvidia-smi")
    (venv / "python").write_text("#!/bin/sh\necho found\n")
    assert machine.check("after").returncode == 0
    (venv / "python").write_text("#!/bin/sh\nexit 1\n")
    assert_missing(machine.check("after"), "torch cannot be imported")


def set_up(
    machine: Machine, *, venv: Path, extra: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run setup.sh with the programs of the machine, and with more variables."""
    environ = {
        "PATH": f"{machine.bin}:/bin:/usr/bin",
        "PYTHON": str(machine.bin / "python"),
        "VENV": str(venv),
        "EXTRA": extra,
    }
    return subprocess.run(
        ["/bin/sh", "setup.sh"], cwd=ROOT, env=environ | more, capture_output=True, text=True
    )


@pytest.mark.parametrize(("extra", "checked"), [("cuda", True), ("cpu", False)])
def test_set_up_checks_before_it_installs_anything(
    tmp_path: Path, extra: str, checked: bool
) -> None:
    """A Python that passes the test of its version and makes no environment; so the CPU set-up ends
    there.
    """
    machine = Machine(tmp_path)
    machine.add("nvidia-smi", "echo 470.1")
    machine.add("python", 'case "$1" in -m) echo "makes $3" >&2; exit 7 ;; esac')
    done = set_up(machine, venv=tmp_path / "new", extra=extra)
    assert done.returncode == (1 if checked else 7)
    assert ("driver is 470.1" in done.stderr) == checked and ("makes " in done.stderr) != checked


@pytest.mark.parametrize("system", ["Darwin x86_64", "Darwin arm64", "Linux aarch64"])
def test_another_system_than_linux_on_x86_64_is_refused_in_a_line_that_names_the_way_out(
    machine: Machine, system: str
) -> None:
    kernel, processor = system.split()
    machine.add("uname", f'case "$1" in -s) echo {kernel} ;; -m) echo {processor} ;; esac')
    done = set_up(machine, venv=machine.bin.parent / "new", extra="cpu")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"set-up failed: this is {system},")
    assert "deploy/Dockerfile, with --platform linux/amd64" in line and "WSL" in line
    assert "--platform linux/amd64" in (ROOT / "deploy/Dockerfile").read_text()


def test_nothing_is_said_after_a_set_up_that_ctrl_c_ended(machine: Machine) -> None:
    """The attack: a job in the background ignores Ctrl-C, and went on saying so for ever."""
    venv = machine.bin.parent / "new"
    (venv / "bin").mkdir(parents=True)
    pip = venv / "bin" / "python"
    pip.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    pip.chmod(0o755)
    machine.add("python", "true")
    machine.add("sleep", "exec /bin/sleep 0.2")
    environ = {
        "PATH": f"{machine.bin}:/bin:/usr/bin",
        "PYTHON": str(machine.bin / "python"),
        "VENV": str(venv),
        "EXTRA": "cpu",
    }
    command = ["/bin/sh", "setup.sh"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        while "so far" not in process.stdout.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == -signal.SIGINT
        rest = process.communicate(timeout=60)[0]  # until nobody can write any more
    assert rest.count("so far") <= 1


def test_an_image_is_set_up_without_a_gpu(tmp_path: Path) -> None:
    """deploy/Dockerfile: nothing is asked of the driver, so set-up comes to its first program."""
    machine = Machine(tmp_path)
    machine.add("nvidia-smi", "exit 9")
    machine.add("python", 'case "$1" in -m) exit 7 ;; esac')
    for more, status in (({}, 1), ({"GPU_CHECK": "no"}, 7)):
        done = set_up(machine, venv=tmp_path / "new", extra="cuda", **more)
        assert done.returncode == status


@pytest.mark.parametrize(
    "target", ["test", "test-slow", "test-faults", "test-cluster", "test-crash", "bench"]
)
def test_on_a_gpu_machine_tests_and_benchmarks_have_the_cpu_build(
    target: str, machine: Machine
) -> None:
    """They start CPU engines, which vLLM's CUDA build does not have."""
    environ = {**os.environ, "PATH": f"{machine.bin}:{os.environ['PATH']}"}
    command = ["make", "--dry-run", target, "VENV=elsewhere"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert "VENV=elsewhere-cpu EXTRA=cpu sh setup.sh" in done.stdout
    assert "EXTRA=cuda" not in done.stdout and "elsewhere/bin" not in done.stdout

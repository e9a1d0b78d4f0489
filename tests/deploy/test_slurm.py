"""deploy/slurm.sbatch, run by a real bash. srun, scontrol, ray, python and gigpo are stand-ins that
write down what they were given; Slurm's part, its signals, is done by the test.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy/slurm.sbatch"
TIMEOUT_S = 60.0  # only for what hangs
# `gigpo` waits for SIGTERM if there is a file `waits`, and ends with the status in `status`.
STAND_IN = """#!/bin/bash
name=$(basename "$0")
trap 'echo "SIGTERM for $name" >>log; exit "$(cat status)"' TERM
line="$name $(printf '%s;' "$@")"
[[ $name == ray || $name == srun || $name == gigpo ]] && line+=" ${RAY_ADDRESS:-private} ${RAY_AUTH_MODE:-open} ${#RAY_AUTH_TOKEN}"
echo "$line" >>log
[[ $name == gigpo ]] || exit 0
while [[ -e waits ]]; do sleep 0.02; done
exit "$(cat status)"
"""
PROGRAMS = ("gigpo", "ray", "srun", "scontrol")
CONFIG = ["configs/key_room.yaml", "seed=3"]


class Job:
    """A submit directory with a virtual environment, and the script that runs in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bin = path / ".venv" / "bin"
        self.bin.mkdir(parents=True)
        for name in PROGRAMS:
            self._add(name, STAND_IN)
        # it makes the token, and waits for the nodes
        self._add("python", "#!/bin/sh\necho 0123456789abcdef\n")
        (self.bin / "activate").write_text(f"PATH={self.bin}:$PATH\n")
        self.log = path / "log"

    def _add(self, name: str, body: str) -> None:
        (self.bin / name).write_text(body)
        (self.bin / name).chmod(0o755)

    def start(
        self, *arguments: str, status: int, waits: bool = False, nodes: int = 1
    ) -> subprocess.Popen[str]:
        self.log.write_text("")
        (self.path / "status").write_text(str(status))
        if waits:
            (self.path / "waits").touch()
        slurm = {
            "SLURM_SUBMIT_DIR": str(self.path),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURMD_NODENAME": "node1",
            "SLURM_CPUS_PER_TASK": "64",
        }
        others = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        # Slurm runs a copy of the script, in a session of its own
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            cwd="/",
            env=others | slurm,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, text: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while text not in self.log.read_text():
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.log.read_text()!r}"
            time.sleep(0.01)

    def said(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_gives_gigpo_its_arguments_and_ends_with_its_status(job: Job) -> None:
    for status in (0, 2):
        script = job.start(*CONFIG, "env.options={a: 'b c'}", status=status)
        assert script.wait(TIMEOUT_S) == status
        expected = "gigpo train;configs/key_room.yaml;seed=3;env.options={a: 'b c'};"
        assert job.said() == [f"{expected} private open 0"]


def test_before_the_time_limit_gigpo_is_stopped_and_the_job_is_requeued(job: Job) -> None:
    """Slurm signals the batch shell only. gigpo's status after an orderly stop is 130."""
    starts = []
    for _ in range(2):  # as it was submitted, and as Slurm starts it again
        script = job.start(*CONFIG, status=130, waits=True)
        job.wait_for("gigpo")
        script.send_signal(signal.SIGUSR1)
        assert script.wait(TIMEOUT_S) == 130
        started, *ended = job.said()
        assert ended == ["SIGTERM for gigpo", "scontrol requeue;4711;"]
        starts.append(started)
    assert starts[0] == starts[1], "the same command goes on with the run"


def test_a_job_that_is_cancelled_is_stopped_in_order_and_not_requeued(job: Job) -> None:
    """`scancel --batch --signal=TERM` sends SIGTERM to the batch shell only, and no more."""
    for place in (SCRIPT, ROOT / "docs/cluster.md"):
        assert "scancel --batch --signal=TERM JOB" in place.read_text()
    script = job.start(*CONFIG, status=130, waits=True)
    job.wait_for("gigpo")
    script.send_signal(signal.SIGTERM)
    assert script.wait(TIMEOUT_S) == 130
    assert job.said()[1:] == ["SIGTERM for gigpo"]


@pytest.mark.parametrize("status", [0, 2])
def test_a_run_that_has_ended_by_itself_is_not_requeued(job: Job, status: int) -> None:
    """It was done, or failed, while it was asked to stop."""
    script = job.start(*CONFIG, status=status, waits=True)
    job.wait_for("gigpo")
    script.send_signal(signal.SIGUSR1)
    assert script.wait(TIMEOUT_S) == status
    assert job.said()[1:] == ["SIGTERM for gigpo"]


def test_several_nodes_join_one_ray_that_asks_for_a_token(job: Job) -> None:
    script = job.start(*CONFIG, status=0, nodes=3, waits=True)
    for name in ("srun", "gigpo"):  # srun goes on beside the job
        job.wait_for(name)
    (job.path / "waits").unlink()
    assert script.wait(TIMEOUT_S) == 0
    by_name = {line.split()[0]: line for line in job.said()}
    assert sorted(by_name) == ["gigpo", "ray", "srun"]
    # port 20000 + 4711; the token has 16 characters here
    assert re.match(r"ray start;--head;--port=24711;.* token 16$", by_name["ray"])
    workers = by_name["srun"]
    assert workers.startswith(
        "srun --nodes=2;--ntasks=2;--exclude=node1;--cpus-per-task=64;ray;start;--address="
    )
    assert ":24711;--block;" in workers and workers.endswith(" token 16")
    assert by_name["gigpo"].endswith(" auto token 16")


def test_a_job_without_a_config_or_outside_slurm_says_so(job: Job) -> None:
    script = job.start(status=0)
    assert script.wait(TIMEOUT_S) != 0
    assert "usage: sbatch deploy/slurm.sbatch CONFIG" in script.communicate()[1]
    outside = subprocess.run(
        ["bash", str(SCRIPT), *CONFIG],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert outside.returncode != 0 and "this script is for sbatch" in outside.stderr
    assert job.said() == []


def test_slurm_is_asked_to_requeue_and_to_signal_the_shell_in_time() -> None:
    text = SCRIPT.read_text()
    assert text.startswith("#!/bin/bash\n")
    head = text[: text.index("\nconfig=")]  # sbatch reads no option behind the first command
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, re.M))
    assert text.count("#SBATCH") == len(options)
    assert set(options) == {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "cpus-per-task",
        "mem",
        "exclusive",
        "time",
        "output",
        "open-mode",
        "requeue",
        "signal",
    }
    signalled = re.fullmatch(r"B:USR1@(\d+)", options["signal"])
    assert signalled and 600 <= int(signalled[1]) < 65_536  # Slurm's largest
    assert (options["requeue"], options["open-mode"]) == ("", "append")

"""Train as anybody does, and read the CPU time of every process of the run; for `budget.py`.

with LiveRun(run_dir, config_name, settings) as run:
    run.wait_for_learner_step(2)
    before = run.cpu_s()            # {"engine": 12.3, "worker": 4.5, ...} since their starts
    stacks = run.profile("worker", seconds=10)
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from driver.run_lock import RUN_MARK

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("engine", "worker", "environment", "learner", "coordinator", "driver", "ray")
CHILDREN = {"EngineCore": "engine", "envs.hosting.environment_process": "environment"}
LOG_NAME = re.compile(r"(worker|learner|coordinator)[-\d]*\.log")
PATIENCE_S = 900.0  # for a start on a busy machine
POLL_S = 0.2
THREAD = re.compile(r"thread \((\d+)\)")
NS_PER_S = 1e9
SAMPLES_PER_S = 200


class LiveRun:
    """Run `gigpo train` between `__enter__` and `__exit__`, which stops it in order."""

    def __init__(self, run_dir: Path, config: str, settings: Mapping[str, object]) -> None:
        self.run_dir = run_dir
        overrides = [f"{name}={value}" for name, value in {**settings, "run_dir": run_dir}.items()]
        self._command = [sys.executable, "-m", "cli", "train", config, *overrides]
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> LiveRun:
        self._output = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._output.close()

    def wait(self) -> None:
        """Wait for the run's own end."""
        while self._process.poll() is None:
            time.sleep(POLL_S)
        self._check()

    def wait_for_learner_step(self, step: int) -> None:
        begun_s = time.monotonic()
        while self.learner_step() < step:
            if self._process.poll() is not None or time.monotonic() > begun_s + PATIENCE_S:
                self._check(needs_life=True)
            time.sleep(POLL_S)

    def learner_step(self) -> int:
        """Return the newest settled learner step, 0 before the first."""
        query = "SELECT max(learner_step) FROM batch WHERE state = 'trained'"
        uri = f"file:{self.run_dir / 'catalog.sqlite'}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=10.0)) as catalog:
                return int(catalog.execute(query).fetchone()[0] or 0)
        except sqlite3.OperationalError:  # the catalog, or its tables, are not there yet
            return 0

    def cpu_s(self) -> dict[str, float]:
        """Return the seconds of CPU of each component's processes since they started."""
        seconds = dict.fromkeys(COMPONENTS, 0.0)
        for process, component in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds[component] += times.user + times.system
        return seconds

    def profile(self, component: str, *, seconds: float) -> Counter[tuple[str, ...]]:
        """Return the nanoseconds of CPU by stack of Python functions, outermost first.

        A function reads "encode (/home/me/store/segments.py:210)". A thread's CPU time is divided
        among its samples, since a sampler cannot tell well which threads wait. A thread without a
        sample has the empty stack: it runs no Python. Empty without py-spy, or where the machine
        does not let users look into their processes (kernel.yama.ptrace_scope).
        """
        here = str(Path(sys.executable).parent)
        sampler = shutil.which("py-spy", path=os.pathsep.join([here, os.environ.get("PATH", "")]))
        if sampler is None:
            print(f"no function groups of the {component}: pip install py-spy")
            return Counter()
        processes = [process for process, name in self._processes() if name == component]
        pid = max(processes, key=lambda process: process.cpu_times().user).pid
        before_s = thread_cpu_s(pid)
        with tempfile.NamedTemporaryFile() as file:
            command = [sampler, "record", "--pid", str(pid), "--nonblocking", "--threads"]
            command += ["--rate", str(SAMPLES_PER_S), "--duration", f"{seconds:.0f}"]
            command += ["--format", "raw", "--full-filenames", "--output", file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = Path(file.name).read_text().splitlines()
        if done.returncode:
            print(f"no function groups of the {component}: {done.stderr.strip()[-200:]}")
            return Counter()
        used_s = {
            thread: end_s - before_s.get(thread, 0.0) for thread, end_s in thread_cpu_s(pid).items()
        }
        return by_stack(lines, used_s)

    def _processes(self) -> list[tuple[psutil.Process, str]]:
        # The driver marks the processes that it starts, and not itself.
        found = [(psutil.Process(self._process.pid), "driver")]
        for process in psutil.process_iter():
            # It ended meanwhile, or is another user's.
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(RUN_MARK) == str(self.run_dir.resolve()):
                    found.append((process, self._component(process)))
        return found

    def _component(self, process: psutil.Process) -> str:
        command = " ".join(process.cmdline())
        for word, component in CHILDREN.items():
            if word in command:
                return component
        log = LOG_NAME.fullmatch(Path(os.readlink(f"/proc/{process.pid}/fd/1")).name)
        return "ray" if log is None else log[1]

    def _check(self, *, needs_life: bool = False) -> None:
        if self._process.returncode or needs_life:
            self._output.seek(0)
            said = self._output.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{' '.join(self._command)} did not go on:\n{said}")


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the seconds of CPU of each thread of a process."""
    return {
        thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()
    }


def by_stack(lines: Sequence[str], used_s: Mapping[int, float]) -> Counter[tuple[str, ...]]:
    """Divide each thread's seconds among its lines, "thread (17): name;outer;inner count"."""
    samples: dict[int, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if found := THREAD.match(stack):
            samples[int(found[1])][tuple(stack.split(";"))] += int(count)
    used_ns: Counter[tuple[str, ...]] = Counter()
    for thread, seconds in used_s.items():
        stacks = samples.get(thread) or Counter({(): 1})
        for stack, count in stacks.items():
            used_ns[stack] += round(seconds * NS_PER_S * count / stacks.total())
    return used_ns

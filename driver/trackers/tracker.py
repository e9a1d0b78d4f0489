"""Give a run's metrics to a tracker in a process of its own, and never wait for it.

    tracker = TrackerProcess("wandb", config=config, layout=layout, say=say)
    tracker.take(rows)      # at every look
    tracker.close()

A tracker that fails or hangs is said once, and gets no more in this start. The next start goes on
where it was left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import Config, ConfigError, shown_settings
from driver.run_lock import RUN_MARK
from driver.trackers.delivered import DeliveredMetrics
from driver.trackers.services import PACKAGES, TrackerSetup
from driver.trackers.tracker_process import READY
from printable import REASON_CHARACTERS
from store import Metric, RunLayout, StoreError
from usage_statistics import usage_statistics_off

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = "trackers"  # in the run, for local files
# Variables of trackers. MLflow's URI has forms of its own, and a relative one is in the run.
OF_DIRECTORIES = ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "TRACKIO_DIR")
N_LOGGED = "n_logged"
START_S = 60.0  # of a tracker, while the run ends; it starts beside a run
CLOSE_S = 60.0  # for what is left to send
POLL_S = 0.05  # between two looks whether the tracker has ended
READ_BYTES = 2**16  # of its answers at a time
MAX_UNREAD_BYTES = 2**24  # a tracker that is so far behind hangs


def check_trackers(config: Config) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in config.trackers:
        missing = [package for package in PACKAGES.get(name, ()) if not _is_there(package)]
        if missing:
            raise ConfigError(
                f"trackers={name} needs the package {missing[0]}, which is not installed: "
                "pip install 'async-gigpo[trackers]'"
            )


class TrackerProcess:
    """Drive the process of one tracker, and send it each metric once."""

    def __init__(
        self, name: str, *, config: Config, layout: RunLayout, say: Callable[[str], None]
    ) -> None:
        """Start the process. The tracker loads its libraries beside the run's own start."""
        self.name, self._say = name, say
        self._delivered = DeliveredMetrics(layout, name)
        self.log = layout.logs / f"{name}.log"
        directory = layout.root / DIRECTORY
        directory.mkdir(exist_ok=True)
        setup = TrackerSetup(
            run_id=layout.info.run_id,
            run_name=layout.root.resolve().name,
            directory=str(directory.resolve()),
            settings=shown_settings(config),
            n_logged=self._delivered.notes.get(N_LOGGED, 0),
        )
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "driver.trackers.tracker_process",
                    name,
                ],
                # Trackers take settings from there, for example to which server a key is sent.
                cwd=directory,
                env={
                    **os.environ,
                    **_absolute(os.environ),
                    "PYTHONPATH": path,
                    **usage_statistics_off(os.environ),
                    RUN_MARK: str(layout.root.resolve()),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which then ends that one
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for pipe in (self._in, self._out):
            os.set_blocking(pipe, False)
        # Lines that it has not taken yet. The settings are no argument: `ps` would show them.
        self._unread = json.dumps(asdict(setup)).encode() + b"\n"
        self._answers = b""
        self.is_ready = self.has_failed = False

    def wants(self) -> bool:
        """Send the rows that are left. Return whether the tracker has started, and not failed."""
        self._look()
        return self.is_ready and not self.has_failed

    def take(self, rows: Sequence[Metric], *, has_all_rows: bool) -> None:
        """Send the rows that the tracker was not given before."""
        try:
            new = self._delivered.new(rows, counted=N_LOGGED)
        except StoreError as error:  # a full disk
            self.fail(str(error))
            return
        self._unread += b"".join(json.dumps(each).encode() + b"\n" for each in new)
        self._look()

    def wait_until_ready(self) -> None:
        """Wait until the tracker has started, START_S at most."""
        deadline_s = time.monotonic() + START_S
        while not (self.is_ready or self.has_failed):
            if time.monotonic() > deadline_s:
                self.fail(f"it has not started for {START_S:g} s")
            time.sleep(POLL_S)
            self._look()

    def close(self) -> None:
        """Let the tracker write the rows that are left, CLOSE_S at most. Then end the process."""
        deadline_s = time.monotonic() + CLOSE_S
        try:
            while self._unread and not self.has_failed and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
                self._look()
            assert self._process.stdin is not None
            self._process.stdin.close()
            while not self.has_failed and time.monotonic() < deadline_s:
                if self._process.poll() is not None:
                    self._look()
                    break
                time.sleep(POLL_S)
            else:
                self.fail(f"it has not ended for {CLOSE_S:g} s")
        finally:
            self._process.kill()
            self._process.wait()

    def fail(self, why: str) -> None:
        """Say once that the tracker shows no more, and why."""
        if self.has_failed:
            return
        self.has_failed, self._unread = True, b""
        self._say(
            f"the tracker {self.name} failed: {why[:REASON_CHARACTERS]}; it shows no more of this "
            f"start. The run goes on, and the store has all metrics; see {self.log}"
        )

    def _look(self) -> None:
        if self.has_failed:
            return
        ended = self._process.poll()
        try:
            while part := os.read(self._out, READ_BYTES):
                self._answers += part
        except BlockingIOError:
            pass  # it has said all that there is now
        *lines, self._answers = self._answers.split(b"\n")
        for line in lines:
            answer: Mapping[str, Any] = json.loads(line)
            self.is_ready = self.is_ready or READY in answer
            if "fault" in answer:
                self.fail(str(answer["fault"]))
        if ended:
            self.fail(f"its process ended with status {ended}")
        elif self._unread and not self.has_failed:
            self._send()

    def _send(self) -> None:
        try:
            n_sent = os.write(self._in, self._unread)
        except BlockingIOError:
            n_sent = 0
        except BrokenPipeError:  # its last answer, or its status, says why at the next look
            return
        self._unread = self._unread[n_sent:]
        if len(self._unread) > MAX_UNREAD_BYTES:
            self.fail(f"it has {len(self._unread):,} bytes of metrics to read")


def _absolute(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name a directory, which may be relative to the current one."""
    given = {name: environment[name] for name in OF_DIRECTORIES if environment.get(name)}
    return {name: os.path.abspath(path) for name, path in given.items()}


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None

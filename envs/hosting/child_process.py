"""A process for code that is not ours: it may hang, stop, crash and start others, and none of that
outlives its owner.

child = Child(["-c", "...", str(theirs.fileno())], options=options, channel=theirs, log=log)    # on
its owner's event loop code = child.end(patience_s=5.0)
# with all that it started child.place()
# where in the author's code it crashed

begin(sys.argv[-1])                                                            # the first thing the
child does options = given_options(sys.argv[-2])
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from envs.errors import where_it_was

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Waits for the end of the parent, whose end of the pipe closes, then kills the group that it is in.
# A shell, because the code it waits beside may hold Python's lock for ever. `&`: a program that
# waits for all its children does not wait for this one.
GUARD = "exec 3<&0; { read -r line <&3; kill -KILL 0; } &"
DUMP_TIMEOUT_S = 1.0  # for a hung process to write where it is


class Child:
    """The parent's end of a process that runs code of others.

    It is in a session of its own: Ctrl-C at the terminal is for the owner, who then ends it. The
    kernel watches the *thread* that makes this object; make it on the event loop that talks to the
    child, as that is of no use without its thread.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        options: Mapping[str, object],
        channel: socket.socket,
        log: Path | None,
    ) -> None:
        """Start `python arguments... OPTIONS DUMP` with `channel` open, with this process's import
        path, in its folder.

        OPTIONS and DUMP are descriptors. Options may be a key of a server, and every user can read
        a command line.

        Everything the child prints is appended to `log`; without one it goes where this process's
        output goes.
        """
        above_envs = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([above_envs, *map(os.path.abspath, sys.path)])
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryFile() as given,
            log.open("ab") if log is not None else nullcontext() as output,
        ):
            given.write(json.dumps(dict(options)).encode())
            given.seek(0)
            self._process = subprocess.Popen(
                # -P: what lies in this folder is imported only where it is here too.
                # -u: what was printed is in the log also after a crash.
                [
                    sys.executable,
                    "-P",
                    "-u",
                    *arguments,
                    str(given.fileno()),
                    str(self._dump.fileno()),
                ],
                pass_fds=[channel.fileno(), given.fileno(), self._dump.fileno()],
                env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path),
                stdin=subprocess.PIPE,  # nothing is written: the guard waits for its end
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, *, patience_s: float) -> int:
        """Wait until it ends by itself, then kill it and all it started. Return its exit code; a
        second call does no more.
        """
        process = self._process
        assert process.stdin is not None
        if not process.stdin.closed:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience_s)
            # until now the guard kept the group's number from being reused
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
        return process.wait()

    def end_hung(self) -> None:
        """Have it write down where it is, then kill it and all it started."""
        self._process.send_signal(signal.SIGABRT)
        self._process.send_signal(signal.SIGCONT)  # a stopped process would not hear the first
        self.end(patience_s=DUMP_TIMEOUT_S)

    def dump(self) -> str:
        """Return the stacks that it wrote when it crashed; "" if it wrote none."""
        self._dump.seek(0)
        return self._dump.read().decode(errors="replace")

    def place(self) -> str:
        """Return ", at FILE:LINE in FUNCTION" of the crash; "" if it is unknown."""
        place = where_it_was(self.dump())
        return f", at {place}" if place else ""


def given_options(descriptor: str) -> Mapping[str, object]:
    """Return the options that the parent gave this child."""
    with open(int(descriptor), "rb") as given:
        options: dict[str, object] = json.loads(given.read())
    return options


def begin(dump: str) -> None:
    """Prepare a child: its end comes with its parent's, and a crash is written to the file
    descriptor `dump`.

    The kernel ends this process with its parent, even one that is stopped; the guard ends what it
    will have started.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # Parent gone before that was asked for: the guard ends this process.
    subprocess.run(
        ["sh", "-c", GUARD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.enable(int(dump))
    # The parent ends a hung child with SIGABRT, which would leave a core file beside the run.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

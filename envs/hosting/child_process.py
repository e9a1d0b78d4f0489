"""Run other people's code in a child process, which may hang, crash and start processes itself.

In the parent, on the event loop that talks to the child:

    arguments = ["-c", "...", str(theirs.fileno())]
    child = ChildProcess(arguments, options=options, channel=theirs, log=log)
    exit_code = child.end(patience_s=5.0)  # ends all that the child has started, too
    child.crash_place()                    # where in the author's code it crashed

In the child, whose last arguments are two file descriptors:

    prepare_child(sys.argv[-1])
    options = read_options(sys.argv[-2])
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

from envs.error_texts import where_crashed
from envs.logs import open_log

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Waits until the parent's end of the pipe closes, then kills its own process group. It is a shell,
# because the author's code may hold Python's lock for ever. `&` makes it no child of the author's
# code, which may wait for all its children.
GUARD = "exec 3<&0; { read -r line <&3; kill -KILL 0; } &"
DUMP_TIMEOUT_S = 1.0  # for a hung process to write its stacks


class ChildProcess:
    """The parent's handle of a process that runs other people's code.

    The child has a session of its own: Ctrl-C at the terminal reaches the parent, which then ends
    the child. The kernel ends it with the *thread* that makes this object, so make it on the event
    loop that talks to it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        options: Mapping[str, object],
        channel: socket.socket,
        log: Path | None,
    ) -> None:
        """Start `python ARGUMENTS... OPTIONS DUMP` with this process's import path and folder.

        OPTIONS and DUMP are file descriptors: options may hold a server's key, and every user of
        the machine can read a command line. The child's output is appended to `log`, or goes where
        this process's output goes.
        """
        # Nothing more, such as this project's folder: a class that the child finds there would be
        # missing in the driver and in workers.
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        self._dump = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        with (
            tempfile.TemporaryFile() as options_file,
            open_log(log) or nullcontext() as output,
        ):
            options_file.write(json.dumps(dict(options)).encode())
            options_file.seek(0)
            self._process = subprocess.Popen(
                # -P: do not import from the current folder unless this process does.
                # -u: the log has the output also after a crash.
                [
                    sys.executable,
                    "-P",
                    "-u",
                    *arguments,
                    str(options_file.fileno()),
                    str(self._dump.fileno()),
                ],
                pass_fds=[channel.fileno(), options_file.fileno(), self._dump.fileno()],
                env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path),
                stdin=subprocess.PIPE,  # never written: the guard waits for it to close
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self, *, patience_s: float) -> int:
        """Give the child time to end, then kill it and all it started. Return its exit code.

        A second call does nothing more.
        """
        process = self._process
        assert process.stdin is not None
        if not process.stdin.closed:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience_s)
            # The guard is still in the group, so the group's number is not another one's yet.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
        return process.wait()

    def end_hung(self) -> None:
        """Have the child write its stacks, then kill it and all it started."""
        self._process.send_signal(signal.SIGABRT)
        self._process.send_signal(signal.SIGCONT)  # a stopped process does not get the first
        self.end(patience_s=DUMP_TIMEOUT_S)

    def dump(self) -> str:
        """Return the stacks that the child wrote when it crashed; "" if it wrote none."""
        self._dump.seek(0)
        return self._dump.read().decode(errors="replace")

    def crash_place(self) -> str:
        """Return ", at FILE:LINE in FUNCTION" of the crash; "" if it is unknown."""
        place = where_crashed(self.dump())
        return f", at {place}" if place else ""


def end_fork_of(pid: int) -> None:
    """End this process at once unless it has this pid.

    The author's code may fork, and both processes may return from it. The fork has the same
    sockets: its answer would count as that of the other, or as that to the next request.
    """
    if os.getpid() != pid:
        os._exit(0)


def read_options(descriptor: str) -> Mapping[str, object]:
    """Return the options that the parent gave this child."""
    with open(int(descriptor), "rb") as file:
        options: dict[str, object] = json.loads(file.read())
    return options


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, even a stopped one.

    The kernel watches the thread that started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def prepare_child(dump: str) -> None:
    """Tie this process's end to its parent's, and write a crash to the file descriptor `dump`.

    The guard ends all processes that this one starts.
    """
    end_with_parent()
    # If the parent has ended before this line, the guard ends this process.
    subprocess.run(
        ["sh", "-c", GUARD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    faulthandler.enable(int(dump))
    # The parent ends a hung child with SIGABRT, which would otherwise leave a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

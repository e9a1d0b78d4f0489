"""A process for code that is not ours: it may hang, stop, crash and start others, and none of that outlives its owner.

process = start_child(["-c", "...", str(theirs.fileno())], channel=theirs)     # on the event loop of its owner
end_child(process)                                                             # with all that it started

end_with_parent()                                                              # the first thing the child does
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Waits for the end of the parent, whose end of the pipe closes, then kills the group that it is in. A shell, because the code
# it waits beside may hold Python's lock for ever. `&`: a program that waits for all its children does not wait for this one.
GUARD = "exec 3<&0; { read -r line <&3; kill -KILL 0; } &"


def start_child(arguments: Sequence[str], *, channel: socket.socket) -> subprocess.Popen[bytes]:
    """`python arguments...` with `channel` open, with this process's import path, in its folder: paths mean the same in both.

    It is in a session of its own: Ctrl-C at the terminal is for the owner, who then ends it. The kernel watches the *thread*
    that calls this; call it on the event loop that talks to the child, as that is of no use without its thread.
    """
    above_envs = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([above_envs, *map(os.path.abspath, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-P", *arguments],  # -P: what lies in this folder is imported only where it is here too
        pass_fds=[channel.fileno()],
        env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path),
        stdin=subprocess.PIPE,  # nothing is written: the guard waits for its end
        start_new_session=True,
    )


def end_child(process: subprocess.Popen[bytes], *, patience_s: float) -> int:
    """Waits for its own end, then kills it and what it started; returns its exit code. The second time it does no more."""
    assert process.stdin is not None
    if not process.stdin.closed:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
        with suppress(ProcessLookupError, PermissionError):  # until now the guard kept the group's number from being another's
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
    return process.wait()


def end_with_parent() -> None:
    """The kernel ends this process with its parent, even one that is stopped; the guard ends what it will have started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    # Parent gone before that was asked for: the guard ends this process.
    subprocess.run(["sh", "-c", GUARD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

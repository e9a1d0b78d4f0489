"""Ask a server that nobody vouches for in a child process with little memory.

    begun = in_limited_process(_has_begun, uri, at_most_bytes=SMALL_BYTES)

Arrow gathers whatever a server sends, in threads that nobody can end. This process would grow until
the deadline of the call, and then until it is killed, because Arrow waits for them at its end.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import psutil

from store.errors import StoreError, is_out_of_memory
from store.storage import LocalStorage, open_storage

SMALL_BYTES = 1 << 30  # for the settings of a run, or a list of some million files
BYTES_PER_CORE = 32 << 20  # for stacks: libraries start threads for each core
MIB = 1 << 20
Result = TypeVar("Result")
_PR_SET_PDEATHSIG = 1
_BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from store.untrusted.limited_process import serve
serve()"""


def in_limited_process(
    work: Callable[..., Result], uri: str, *arguments: object, at_most_bytes: int
) -> Result:
    """Return `work(uri, *arguments)` of a child that may take `at_most_bytes` beside its libraries.

    The work has deadlines of its own, and is done here if the URI is a directory's. Raises its
    errors, and StoreError if memory does not suffice. Only Linux limits it.
    """
    storage = open_storage(uri)
    if isinstance(storage, LocalStorage):
        return work(uri, *arguments)
    path = [str(Path(__file__).resolve().parents[2]), *map(os.path.abspath, sys.path)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # C++ says there that it got no memory
        start_new_session=True,  # Ctrl-C is for the parent, which then ends the child
    )
    asked = pickle.dumps((work, (uri, *arguments), at_most_bytes))
    with process:
        try:
            answer, _ = process.communicate(asked)
        finally:
            process.kill()
    try:
        result, error = pickle.loads(answer)
    except (EOFError, pickle.UnpicklingError):  # as C++ ends a process that gets no memory
        result, error = None, MemoryError()
    if error is None:
        return cast(Result, result)
    if not isinstance(error, MemoryError):
        raise error
    raise StoreError(
        f"the answers of {storage.locate('')} take more than {at_most_bytes // MIB:,} MiB of "
        "memory; check the URI, and who answers there"
    ) from error


def serve() -> None:
    """Do the work that standard input names, and write its result to standard output."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    work, arguments, at_most_bytes = pickle.load(sys.stdin.buffer)
    has_bytes = getattr(psutil.Process().memory_info(), "data", 0)
    max_bytes = has_bytes + at_most_bytes + BYTES_PER_CORE * (os.cpu_count() or 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        max_bytes = min(max_bytes, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    result, error = None, None
    try:
        result = work(*arguments)
    except Exception as raised:  # noqa: BLE001  a process border: the parent raises it
        error = MemoryError() if is_out_of_memory(raised) else raised
    sys.stdout.buffer.write(pickle.dumps((result, error)))
    sys.stdout.buffer.flush()
    os._exit(0)  # Arrow would wait for the threads that still receive

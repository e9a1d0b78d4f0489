"""Run a function in its own process under ptrace: record its file-system calls, or kill it at one.

ptrace through ctypes, because strace is missing on many laptops and CI images, and preloading a
library needs a compiler. Every call of the process is seen, SQLite's too; a seccomp filter lets it
stop at file-system calls only, a seventh of all. PTRACE_GET_SYSCALL_INFO (Linux 5.3) makes it the
same on every machine but for the numbers of the calls. Where tracing is not permitted, `why_not()`
says so and the tests are skipped with that reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import signal
import struct
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path

# Effect of a call on files -> its numbers. A call of the last kind would not be understood: it is an
# error, not overlooked.
NUMBERS: dict[str, dict[str, tuple[int, ...]]] = {
    "x86_64": {
        "open": (2,),
        "openat": (257,),
        "close": (3,),
        "write": (1,),
        "pwrite64": (18,),
        "fsync": (74, 75),
        "ftruncate": (77,),
        "rename": (82,),
        "renameat": (264, 316),
        "link": (86,),
        "linkat": (265,),
        "unlink": (87,),
        "unlinkat": (263,),
        "mkdir": (83,),
        "mkdirat": (258,),
        "rmdir": (84,),
        "unknown": (20, 40, 76, 85, 88, 266, 285, 296, 326, 328, 437),
    },
    "aarch64": {
        "openat": (56,),
        "close": (57,),
        "write": (64,),
        "pwrite64": (68,),
        "fsync": (82, 83),
        "ftruncate": (46,),
        "renameat": (38, 276),
        "linkat": (37,),
        "unlinkat": (35,),
        "mkdirat": (34,),
        "unknown": (36, 45, 47, 66, 70, 71, 285, 287, 437),
    },
}
NAME_OF = {
    number: name
    for name, numbers in NUMBERS.get(platform.machine(), {}).items()
    for number in numbers
}
TRACEME, CONT, SYSCALL, SETOPTIONS, GET_SYSCALL_INFO = 0, 7, 24, 0x4200, 0x420E
# Mark exits; follow fork, vfork, clone; see exec, which would be a SIGTRAP; stop by seccomp; die
# with the tracer.
OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000
SECCOMP_EVENT = 7
EXIT_STOP = signal.SIGTRAP | 0x80
NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE = 38, 22, 2
ALL_THREADS = 0x40000000  # __WALL
CWD = -100
PATH_BYTES = 4096
DEADLINE_S = 120  # of the traced process: SIGALRM ends one that hangs
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
LIBC.ptrace.restype = ctypes.c_long


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCall:
    """One call that changed, or makes durable, something beneath the watched directory. `mark`: the
    function's own remarks.
    """

    name: str  # open, close, write, fsync, truncate, rename, link, unlink, mkdir, mark
    path: str
    target: str = ""  # the new name of a rename or a link
    offset: int = 0  # of a write; the flags of an open; the new size of a truncate
    data: bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    status: int  # exit code, negative: the signal that ended it
    error: str  # its traceback, if it raised
    calls: tuple[FileCall, ...]  # marks included


@dataclass(kw_only=True, slots=True)
class _Tracee:
    pid: int
    memory: int  # descriptor of its memory
    watched: str
    marks: str
    kill_at: int | None
    begun: dict[int, FileCall] = field(default_factory=dict)  # by thread: the call it is in
    calls: list[FileCall] = field(default_factory=list)
    counted: int = 0


def run(
    entry: str,
    *arguments: object,
    sources: Path | None = None,
    watched: Path | None = None,
    marks: Path | None = None,
    kill_at: int | None = None,
) -> Trace:
    """Run `module:function` in a forked process, with its store imported from `sources` if given,
    and wait for it.

    With `watched` it is traced; a file `marks` that it appends to is recorded among the calls.
    `kill_at` counts from 1 the calls beneath `watched`: that one does not happen any more, SIGKILL
    comes first.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_the_child(
            entry, arguments, sources=sources, traced=watched is not None, errors=writable
        )
    os.close(writable)
    tracee = None
    if watched is not None:
        tracee = _Tracee(
            pid=pid, memory=-1, watched=f"{watched}", marks=f"{marks}", kill_at=kill_at
        )
    try:
        status = _wait(pid, tracee)
    except BaseException:
        _end(pid)
        raise
    with open(readable) as errors:
        return Trace(
            status=status,
            error=errors.read(),
            calls=tuple(tracee.calls) if tracee is not None else (),
        )


def why_not() -> str | None:
    """None if processes can be traced here, else the reason."""
    if sys.platform != "linux" or not NAME_OF:
        return f"ptrace: no system call numbers for {sys.platform} on {platform.machine()}"
    with tempfile.TemporaryDirectory() as directory:
        trace = run("os:mkdir", f"{directory}/seen", watched=Path(directory).resolve())
    if [call.name for call in trace.calls] == ["mkdir"]:
        return None
    reason = trace.error.strip().rpartition("\n")[2] or trace.status
    return f"ptrace does not work here, no system call was seen: {reason}"


def _be_the_child(
    entry: str, arguments: tuple[object, ...], *, sources: Path | None, traced: bool, errors: int
) -> None:
    code = 1
    try:
        signal.alarm(DEADLINE_S)
        if sources is not None:
            for loaded in [
                name for name in sys.modules if name.partition(".")[0] in ("store", "tests")
            ]:
                del sys.modules[loaded]
            sys.path.insert(0, f"{sources}")
        module, _, name = entry.partition(":")
        function = getattr(importlib.import_module(module), name)
        if traced:
            if LIBC.ptrace(TRACEME, 0, None, None) != 0:
                raise OSError(ctypes.get_errno(), "PTRACE_TRACEME")
            os.kill(os.getpid(), signal.SIGSTOP)  # the tracer sets its options now
            _stop_at_file_calls()
        function(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001  the border of the process: told to whoever waits for it
        os.write(errors, traceback.format_exc().encode()[-8000:])
    finally:
        os._exit(code)


def _stop_at_file_calls() -> None:
    """A BPF program: load the number of the call; if it is one of ours jump to TRACE, else
    ALLOW.
    """
    tests = [(0x15, len(NAME_OF) - index, 0, number) for index, number in enumerate(NAME_OF)]
    program = [(0x20, 0, 0, 0), *tests, (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FF00000)]
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    )
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    LIBC.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    if LIBC.prctl(SET_SECCOMP, FILTER_MODE, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def _wait(pid: int, tracee: _Tracee | None) -> int:
    """Until all its threads have ended."""
    code = 0
    while True:
        try:
            thread, status = os.waitpid(-1, ALL_THREADS)
        except ChildProcessError:
            return code
        if not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status) if thread == pid else code
            continue
        assert tracee is not None
        signal_number, event = os.WSTOPSIG(status), status >> 16
        deliver, resume = 0, CONT
        if tracee.memory < 0:
            tracee.memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
            LIBC.ptrace(SETOPTIONS, pid, None, OPTIONS)
        elif event == SECCOMP_EVENT:
            resume = SYSCALL if _on_entry(tracee, thread) else CONT
        elif signal_number == EXIT_STOP:
            _on_exit(tracee, thread)
        elif not event and signal_number != signal.SIGSTOP:  # SIGSTOP is how a new thread begins
            deliver = signal_number
        LIBC.ptrace(resume, thread, None, deliver)


def _end(pid: int) -> None:
    """Kill a process that nobody follows any more. Left stopped, it would be waited for by the next
    run, for ever.
    """
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, ALL_THREADS)


def _on_entry(tracee: _Tracee, thread: int) -> bool:
    """Whether it is a call to be recorded when it has succeeded. Those of its own children are let
    through: they only read.
    """
    if not os.path.exists(f"/proc/{tracee.pid}/task/{thread}"):
        return False
    number, *arguments = struct.unpack_from("=Q6q", _syscall_info(thread), 24)
    call = _understand(tracee, NAME_OF[number], arguments)
    if call is None:
        return False
    tracee.begun[thread] = call
    if call.name != "mark":
        tracee.counted += 1
        if tracee.counted == tracee.kill_at:
            os.kill(tracee.pid, signal.SIGKILL)
    return True


def _on_exit(tracee: _Tracee, thread: int) -> None:
    (result,) = struct.unpack_from("=q", _syscall_info(thread), 24)
    call = tracee.begun.pop(thread)
    if result >= 0:
        assert call.name != "write" or result == len(call.data), f"a short write to {call.path}"
        tracee.calls.append(call)


def _syscall_info(thread: int) -> bytes:
    info = ctypes.create_string_buffer(88)
    LIBC.ptrace(GET_SYSCALL_INFO, thread, len(info), info)
    return info.raw


def _understand(tracee: _Tracee, name: str, a: list[int]) -> FileCall | None:
    """Return the call, None if it does not concern the watched directory."""
    if name in ("write", "pwrite64", "fsync", "ftruncate", "close", "unknown"):
        path = _path_of(tracee, a[0])
        if path == tracee.marks and name == "write":
            return FileCall(name="mark", path="", data=os.pread(tracee.memory, a[2], a[1]))
        if not _is_watched(tracee, path):
            return None
        assert name != "unknown", (
            f"{path} was changed by a system call that the tracer does not know; teach it"
        )
        if name in ("write", "pwrite64"):
            offset = a[3] if name == "pwrite64" else _descriptor_info(tracee, a[0])[0]
            return FileCall(
                name="write", path=path, offset=offset, data=os.pread(tracee.memory, a[2], a[1])
            )
        if name == "close":
            return (
                FileCall(name=name, path=path)
                if _descriptor_info(tracee, a[0])[1] & os.O_ACCMODE
                else None
            )
        return (
            FileCall(name="truncate", path=path, offset=a[1])
            if name == "ftruncate"
            else FileCall(name=name, path=path)
        )
    # without a directory; the same from here on
    if name in ("rename", "link", "open", "unlink", "mkdir", "rmdir"):
        a = [CWD, a[0], CWD, *a[1:]] if name in ("rename", "link") else [CWD, *a]
    path = _path_at(tracee, a[0], a[1])
    target = (
        _path_at(tracee, a[2], a[3]) if name in ("rename", "renameat", "link", "linkat") else ""
    )
    if not _is_watched(tracee, path) and not (target and _is_watched(tracee, target)):
        return None
    if name in ("open", "openat"):
        changes = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR
        return FileCall(name="open", path=path, offset=a[2]) if a[2] & changes else None
    return FileCall(
        name="unlink" if name == "rmdir" else name.removesuffix("at"), path=path, target=target
    )


def _is_watched(tracee: _Tracee, path: str) -> bool:
    return path == tracee.watched or path.startswith(f"{tracee.watched}/")


def _path_of(tracee: _Tracee, descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/{tracee.pid}/fd/{descriptor}")
    except FileNotFoundError:  # the call is about to fail too
        return ""


def _descriptor_info(tracee: _Tracee, descriptor: int) -> tuple[int, int]:
    """Return its position and flags."""
    lines = dict(
        line.split(":")
        for line in Path(f"/proc/{tracee.pid}/fdinfo/{descriptor}").read_text().splitlines()[:2]
    )
    return int(lines["pos"]), int(lines["flags"], 8)


def _path_at(tracee: _Tracee, directory: int, address: int) -> str:
    page_rest = PATH_BYTES - address % PATH_BYTES  # the next page may not be there
    data = os.pread(tracee.memory, page_rest, address)
    if b"\0" not in data:
        data += os.pread(tracee.memory, PATH_BYTES, address + page_rest)
    path = data.partition(b"\0")[0].decode()
    # an int in a register of 64 bits: -100 may be 4294967196 there
    directory = ctypes.c_int(directory).value
    here = (
        ""
        if path.startswith("/")
        else os.readlink(f"/proc/{tracee.pid}/{'cwd' if directory == CWD else f'fd/{directory}'}")
    )
    return os.path.normpath(os.path.join(here, path))

"""List the tasks of an environment before a run starts, where the author's code can do no harm.

    splits = list_tasks_in_child("lamps:Lamps", options, creating=True, log=log)

A user's class is imported in a child process, because it may end or crash its process. Our own
environments are listed in the caller's process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from envs.base import Task, task_to_json
from envs.error_texts import describe_exit, full_traceback
from envs.errors import EnvironmentFailed
from envs.hosting.child_process import (
    ChildProcess,
    end_fork_of,
    prepare_child,
    read_options,
)
from envs.logs import log_hint, write_log
from envs.registry import is_program, is_users_class
from envs.validation import check_constructor, checked_tasks, list_tasks, planned_tasks

# with `python -m` all classes would exist twice
CHILD_CODE = "from envs.hosting.task_listing import main; main()"
MAX_ANSWER_BYTES = 1 << 30
EXIT_TIMEOUT_S = 1.0  # a dying process closes its socket a moment before it has an exit code

# What an answer that is none raises, or one of a hundred million values.
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError)

Splits = dict[str, Sequence[Task]]


def list_tasks_in_child(
    name: str, options: Mapping[str, object], *, creating: bool, log: Path
) -> Splits | None:
    """Return the tasks of every split. Raises EnvironmentFailed, with the traceback in `log`.

    `creating`: a run starts now, so missing task files are created, and a program's class is tried.
    Without it the answer is None if listing would create files.
    """
    if is_users_class(name):
        return _list_in_child(name, options, creating=creating, log=log)
    return _list_here(name, options, creating=creating, log=log)


def _list_here(
    name: str, options: Mapping[str, object], *, creating: bool, log: Path
) -> Splits | None:
    try:
        splits = list_tasks(name, options) if creating else planned_tasks(name, options)
        if creating and is_program(name):
            check_constructor(name, options)
        return splits
    except EnvironmentFailed as error:
        if error.__cause__ is None:  # the message has all there is to know
            raise
        write_log(log, full_traceback(error.__cause__))
        failed = EnvironmentFailed(f"{error}{log_hint(log)}")
        failed.may_work_elsewhere = error.may_work_elsewhere
        raise failed from error.__cause__


def _list_in_child(
    name: str, options: Mapping[str, object], *, creating: bool, log: Path
) -> Splits | None:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = ["-c", CHILD_CODE, str(theirs.fileno()), name, json.dumps(creating), str(log)]
        # its output is progress, for the terminal
        child = ChildProcess(arguments, options=options, channel=theirs, log=None)
    try:
        # The author's code may write any length to it.
        with Connection(ours.detach()) as connection, suppress(EOFError, OSError):
            return _decode(connection.recv_bytes(MAX_ANSWER_BYTES), name)
        exit_code = describe_exit(child.end(patience_s=EXIT_TIMEOUT_S))
        place = child.crash_place()
        message = f"env.name={name}: listing its tasks ended the process with {exit_code}{place}"
        write_log(log, f"{message}\n{child.dump()}")
        raise EnvironmentFailed(message + log_hint(log))
    finally:
        child.end(patience_s=0.0)


def _encode_splits(splits: Splits | None) -> bytes:
    """Return the tasks as JSON, which the parent can read without the author's module."""
    fields = None
    if splits is not None:
        fields = {split: list(map(task_to_json, tasks)) for split, tasks in splits.items()}
    return json.dumps({"splits": fields}).encode()


def _decode(encoded: bytes, name: str) -> Splits | None:
    """Return the child's tasks, or raise its error.

    The author's code may write to the same socket. Anything else than an answer is an error too.
    """
    try:
        answer = json.loads(encoded)
        if "failed" not in answer:
            return _decode_splits(answer["splits"])
        failed = EnvironmentFailed(str(answer["failed"]))
        failed.may_work_elsewhere = answer["may_work_elsewhere"] is True
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise EnvironmentFailed(
            f"env.name={name}: listing its tasks ended with an answer that cannot be read: {reason}"
        ) from None
    raise failed


def _decode_splits(splits: Any) -> Splits | None:
    if splits is None:
        return None
    decoded: Splits = {}
    for split, tasks in splits.items():
        # Again, for in the child a text may have lied about itself.
        decoded[split] = checked_tasks([Task(**fields) for fields in tasks], split=split)
    return decoded


def main() -> None:
    """Run the child. Arguments: socket, name, creating, log, descriptors of options and dump."""
    descriptor, name, creating, log, options, dump = sys.argv[1:7]
    prepare_child(dump)
    pid = os.getpid()
    try:
        splits = _list_here(
            name, read_options(options), creating=json.loads(creating), log=Path(log)
        )
        answer = _encode_splits(splits)
    except EnvironmentFailed as error:
        fields = {"failed": str(error), "may_work_elsewhere": error.may_work_elsewhere}
        answer = json.dumps(fields).encode()
    end_fork_of(pid)
    with Connection(int(descriptor)) as connection, suppress(BrokenPipeError):
        connection.send_bytes(answer)

"""List the tasks of an environment before a run starts, where the author's code can do no harm to
the driver.

splits = list_tasks_apart("lamps:Lamps", options, playable=True, log=log)

A user's class is imported and asked for its tasks in a child process, because it may end or crash
the process it is in. The environments of this project are asked in the caller's process.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from envs.base import Task
from envs.errors import exit_text, full, keep, log_hint
from envs.hosting.child_process import Child, begin, given_options
from envs.registry import is_program
from envs.validation import EnvironmentFailed, check_can_be_made, list_tasks, planned_tasks

CHILD = (
    "from envs.hosting.task_listing import main; main()"  # with -m all classes would exist twice
)
EXIT_TIMEOUT_S = 1.0  # its socket closes a moment before it has an exit code

Splits = dict[str, Sequence[Task]]


def list_tasks_apart(
    name: str, options: Mapping[str, object], *, playable: bool, log: Path
) -> Splits | None:
    """Return the tasks of every split; None where listing would make them, and `playable` is false.

    `playable`: a run starts now, so tasks are made where they are missing, and a program's class is
    tried. Raises EnvironmentFailed, whose traceback is in `log`.
    """
    if ":" not in name:
        return _listed(name, options, playable=playable, log=log)
    answer = _asked_apart(name, options, playable=playable, log=log)
    if isinstance(answer, EnvironmentFailed):
        raise answer
    return answer[0]


def _listed(
    name: str, options: Mapping[str, object], *, playable: bool, log: Path
) -> Splits | None:
    try:
        splits = list_tasks(name, options) if playable else planned_tasks(name, options)
        if playable and is_program(name):
            check_can_be_made(name, options)
        return splits
    except EnvironmentFailed as error:
        if error.__cause__ is None:  # the message has all there is to know
            raise
        keep(log, full(error.__cause__))
        named = EnvironmentFailed(f"{error}{log_hint(log)}")
        named.may_work_elsewhere = error.may_work_elsewhere
        raise named from error.__cause__


def _asked_apart(
    name: str, options: Mapping[str, object], *, playable: bool, log: Path
) -> tuple[Splits | None] | EnvironmentFailed:
    """Ask a child for the tasks. Return them, or its error."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = ["-c", CHILD, str(theirs.fileno()), name, json.dumps(playable), str(log)]
        # what it prints is progress, for the terminal
        child = Child(arguments, options=options, channel=theirs, log=None)
    try:
        with Connection(ours.detach()) as connection, suppress(EOFError, ConnectionResetError):
            return _read(connection.recv_bytes(), name)
        code = child.end(patience_s=EXIT_TIMEOUT_S)
        message = f"env.name={name}: listing its tasks ended the process with {exit_text(code)}{child.place()}"
        keep(log, f"{message}\n{child.dump()}")
        return EnvironmentFailed(message + log_hint(log))
    finally:
        child.end(patience_s=0.0)


def _written(answer: tuple[Splits | None] | EnvironmentFailed) -> bytes:
    """Return the answer as JSON, which needs nothing of the author's module and runs nothing where
    it is read.
    """
    if isinstance(answer, EnvironmentFailed):
        return json.dumps(
            {"failed": str(answer), "may_work_elsewhere": answer.may_work_elsewhere}
        ).encode()
    (splits,) = answer
    return json.dumps(
        {"splits": splits and {split: list(map(_fields, tasks)) for split, tasks in splits.items()}}
    ).encode()


def _fields(task: Task) -> dict[str, object]:
    data = {str(name): str(text) for name, text in task.data.items()}
    return {
        "id": task.id,
        "env_name": task.env_name,
        "split": task.split,
        "seed": task.seed,
        "data": data,
    }


def _read(written: bytes, name: str) -> tuple[Splits | None] | EnvironmentFailed:
    """Return what `_written` wrote. The author's code may write to the same socket: an error names
    what is wrong.
    """
    try:
        answer = json.loads(written)
        if "failed" in answer:
            failed = EnvironmentFailed(str(answer["failed"]))
            failed.may_work_elsewhere = answer["may_work_elsewhere"] is True
            return failed
        splits = answer["splits"]
        return (
            splits
            and {split: [Task(**fields) for fields in tasks] for split, tasks in splits.items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        return EnvironmentFailed(
            f"env.name={name}: listing its tasks ended with an answer that cannot be read: {why}"
        )


def main() -> None:
    """The child: descriptor of its socket, environment, playable, log, descriptors of options and
    dump.
    """
    descriptor, name, playable, log, options, dump = sys.argv[1:7]
    begin(dump)
    answer: tuple[Splits | None] | EnvironmentFailed
    try:
        answer = (
            _listed(name, given_options(options), playable=json.loads(playable), log=Path(log)),
        )
    except EnvironmentFailed as error:
        answer = error
    with Connection(int(descriptor)) as connection, suppress(BrokenPipeError):
        connection.send_bytes(_written(answer))

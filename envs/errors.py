"""Define errors of environments and agent programs, and describe any error in one line.

describe_error(error, called=environment.step)  # "ValueError: no such lamp, at lamps.py:22 in step"
where_raised(error, called=environment.step)    # "lamps.py:22 in step", in the author's file
where_crashed(dump)                             # the same, from a dump of `faulthandler`
write_log(log, full_traceback(error))
"""

from __future__ import annotations

import inspect
import os
import re
import selectors
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from envs.options import OptionsError
from printable import UserError, printable

MAX_CHARACTERS = 500  # of an error's own message; the log has more of it
SHOWN_PARTS = 4  # of so much text they are taken: white space goes
MAX_PLACE_CHARACTERS = 5000  # of "FILE:LINE in FUNCTION"; a path has at most 4096
MAX_LOGGED_CHARACTERS = 1_000_000  # of one text in a log
MAX_LINKED = 1000  # errors that one traceback may have: causes, contexts, members of groups
FOLDER = Path(__file__).resolve().parent
HOSTING = FOLDER / "hosting"
# These files and all of `hosting` call environments: a frame in them says nothing about the cause.
CALLER_FILES = ("errors.py", "options.py", "registry.py", "validation.py")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
# Errors of files, packages and servers that another machine may have. All others are mistakes in
# the code or the config.
MACHINE_ERRORS = (OSError, ImportError, ValueError)

Frame = tuple[str, int, str]  # file, line, function

_name_in_type = type.__dict__["__name__"].__get__  # a metaclass may have its own `__name__`
_unwritable: set[Path | None] = set()  # logs of which standard error was told already


class EnvironmentDied(RuntimeError):
    """An environment raised, returned nonsense, hung, or lost its process during an episode.

    `at_fault` is False for an episode that only shared the process of the failing one.
    """

    def __init__(self, message: str, *, at_fault: bool) -> None:
        super().__init__(message)
        self.at_fault = at_fault

    def __reduce__(self) -> tuple[Any, ...]:
        # Python pickles only the positional arguments of an exception.
        return partial(EnvironmentDied, at_fault=self.at_fault), (str(self),)


class EnvironmentStuckError(RuntimeError):
    """An environment's coroutine goes on though it was cancelled. The worker has to end."""


class EnvironmentFailed(UserError, RuntimeError):
    """An environment cannot be used. The one-line message names it, the fault and the fix.

    `may_work_elsewhere`: this machine lacks something that another may have. A dry run then only
    reports it.
    """

    may_work_elsewhere = False

    @classmethod
    def because(
        cls, context: str, error: BaseException, *, called: Callable[..., Any] | None
    ) -> EnvironmentFailed:
        """Return the failure for an environment's own error, raised by the method `called`."""
        kind = type(error)  # a class may lie to `isinstance`
        is_option = issubclass(kind, OptionsError)
        text = _full_message(error) if is_option else describe_error(error, called=called)
        failed = cls(f"{context}: {text}")
        failed.may_work_elsewhere = issubclass(kind, MACHINE_ERRORS) and not is_option
        return failed


def describe_error(error: BaseException, *, called: Callable[..., Any] | None) -> str:
    """Return type, message and place of an error in one line. Never raises.

    `called` is the method that was called, None if the error came from elsewhere.
    """
    message = message_of(error)
    if issubclass(type(error), EnvironmentDied):  # a server's error, which has a place already
        return message
    if len(message) > MAX_CHARACTERS:
        message = message[:MAX_CHARACTERS] + "..."
    place = where_raised(error, called=called)
    if issubclass(type(error), ValueError | OSError) and _is_ours(place):
        place = ""  # these errors of our own environments say what to change
    name = type_name(error)
    text = f"{name}: {message}" if message else name
    return f"{text}, at {place}" if place else text


def message_of(error: BaseException) -> str:
    """Return an error's own message in one line, cut. Its class may be unable to tell it."""
    return " ".join(_full_message(error)[: SHOWN_PARTS * MAX_CHARACTERS].split())


def type_name(value: object) -> str:
    """Return the name of a value's type, whatever the type says of itself."""
    return plain_text(_name_in_type(type(value)))[:MAX_CHARACTERS]


def plain_text(text: str) -> str:
    """Return a text as Python's own `str`. A subclass may give other answers than its characters.

    Raises TypeError if it is no text.
    """
    return str.__str__(text)


def where_raised(error: BaseException, *, called: Callable[..., Any] | None) -> str:
    """Return "FILE:LINE in FUNCTION" of the last frame in the author's files; "" if unknown.

    If `called` was never entered, or returned nonsense, its first line is named.
    """
    return told_by_author(lambda: _where_raised(error, called), otherwise="")[:MAX_PLACE_CHARACTERS]


def _where_raised(error: BaseException, called: Callable[..., Any] | None) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    stack = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)]
    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    if code is not None:  # last: it counts only if no other frame is the author's
        frames.append((code.co_filename, code.co_firstlineno, code.co_name))
    return _place(frames)


def told_by_author(tell: Callable[[], str], *, otherwise: str) -> str:
    """Return `tell()`, a text in which the author's code has a say; `otherwise` if it raises.

    The caller handles an error of that code already. A second one, of any kind, must not take its
    place: it would end the process and not the episode.
    """
    try:
        return plain_text(tell())
    except BaseException:  # noqa: BLE001 - the border to a user's own code; see above
        return otherwise


def where_crashed(dump: str) -> str:
    """Return the place of the newest frame in a dump of `faulthandler`; "" if there is none."""
    current = dump.rpartition("Current thread")[2]
    frames = DUMPED_FRAME.findall(current)
    place = _place([(file, int(line), name) for file, line, name in frames])
    # An event loop waits there for something. Its stack does not say for what.
    return "" if place.startswith(f"{selectors.__file__}:") else place


def describe_exit(code: int) -> str:
    """Return "exit code 3", or "exit code -11 (SIGSEGV)" for a process that a signal ended."""
    try:
        return f"exit code {code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"exit code {code}"


def write_log(log: Path | None, text: str) -> None:
    """Append a text to the log, after the time of day. Without a log it is printed. Never raises.

    A full disk of logs is worth no episode, and neither is an output that an environment closed.
    """
    try:
        _append(log, text)
    except BaseException as error:  # noqa: BLE001 - standard error is told, once for each log
        _tell_unwritable(log, error)


def _append(log: Path | None, text: str) -> None:
    if len(text) > MAX_LOGGED_CHARACTERS:
        half = MAX_LOGGED_CHARACTERS // 2
        text = f"{text[:half]}\n...\n{text[-half:]}"
    now = told_by_author(lambda: time.strftime("%Y-%m-%d %H:%M:%S"), otherwise="(no time)")
    stamped = f"{now} {text.rstrip()}\n"
    if log is None:
        print(printable(stamped, lines=True), end="", flush=True)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", errors="backslashreplace") as file:
        file.write(printable(stamped, lines=True))


def open_log(log: Path | None) -> IO[bytes] | None:
    """Open a log for a process to append to. Return None, for the output of this one, without it.

    A log that cannot be opened is as none.
    """
    if log is None:
        return None
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab")
    except OSError as error:
        _tell_unwritable(log, error)
        return None


def _tell_unwritable(log: Path | None, error: BaseException) -> None:
    """Say once on standard error that a log cannot be written."""
    if log in _unwritable:
        return
    _unwritable.add(log)
    text = f"{log or 'the log'} cannot be written: {type_name(error)}: {message_of(error)}"
    # Standard error may be a file on the same disk, and an environment may have closed it or
    # replaced it.
    with suppress(BaseException):
        print(printable(text), file=sys.stderr, flush=True)


def log_hint(log: Path | None) -> str:
    """Return "; log: PATH" for the end of a message; "" if there is no such file."""
    # Path.exists raises for a folder that cannot be read.
    return "" if log is None or not os.path.exists(log) else f"; log: {log}"


def full_traceback(error: BaseException) -> str:
    """Return the traceback with all causes; without them for messages beyond measure. Never raises.

    A message of 300 million characters would hold the event loop for seconds.
    """
    stack = told_by_author(lambda: "".join(traceback.format_tb(error.__traceback__)), otherwise="")
    alone = f"{stack}{type_name(error)}: {_full_message(error)[:MAX_LOGGED_CHARACTERS]}"

    def with_causes() -> str:
        linked = list(islice(_linked(error), MAX_LINKED + 1))
        n_characters = sum(_n_characters(each) for each in linked)
        if len(linked) > MAX_LINKED or n_characters > MAX_LOGGED_CHARACTERS:
            return f"{alone}...\n(more errors or longer messages than a log takes)"
        return "".join(traceback.format_exception(error))

    return told_by_author(with_causes, otherwise=alone)


def _linked(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that a traceback shows: this one, its causes, and members of groups."""
    found, seen = [error], {id(error)}
    while found:
        each = found.pop()
        yield each
        more = [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            more += each.exceptions
        for linked in more:
            if linked is not None and id(linked) not in seen:
                seen.add(id(linked))
                found.append(linked)


def _n_characters(error: BaseException) -> int:
    """Return the length of all texts of an error that a traceback shows."""
    notes = getattr(error, "__notes__", ())
    texts = list(notes) if isinstance(notes, list | tuple) else [notes]
    if isinstance(error, SyntaxError):
        texts.append(error.text)
    return len(_full_message(error)) + sum(len(str(text)) for text in texts)


def _full_message(error: BaseException) -> str:
    try:
        return plain_text(str(error))
    except BaseException as fault:  # noqa: BLE001 - the border to a user's own class
        return f"it has no message, for its __str__ raises {type_name(fault)}"


def _place(frames: Iterable[Frame]) -> str:
    """Return the first frame, newest first, of a user; else of this package; else of a library."""
    called = [frame for frame in frames if not _is_caller(frame[0])]
    outside_libraries = [frame for frame in called if not _is_library(frame[0])]
    users = [frame for frame in outside_libraries if not _is_ours(frame[0])]
    for file, line, name in users or outside_libraries or called:
        return f"{file}:{line} in {name}"
    return ""


def _is_ours(file: str) -> bool:
    """Return whether a file belongs to this package. A user's class may inherit from ours."""
    return file.startswith(f"{FOLDER}/")


def _is_caller(file: str) -> bool:
    path = Path(file).resolve()
    is_calling = path.parent == HOSTING or (path.parent == FOLDER and path.name in CALLER_FILES)
    return file.startswith("<") or is_calling


def _is_library(file: str) -> bool:
    in_package = any(folder in Path(file).parts for folder in PACKAGE_FOLDERS)
    return in_package or file.startswith(STANDARD_LIBRARY)

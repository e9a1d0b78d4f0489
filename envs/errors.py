"""Define errors of environments and agent programs, and describe any error in one line.

describe_error(error, called=environment.step)  # "ValueError: no such lamp, at lamps.py:22 in step"
where_raised(error, called=environment.step)    # "lamps.py:22 in step", in the author's file
where_crashed(dump)                             # the same, from a dump of `faulthandler`
write_log(log, full_traceback(error))
"""

from __future__ import annotations

import inspect
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from envs.options import OptionsError
from printable import UserError, printable

MAX_CHARACTERS = 500  # of an error's own message; the log has more of it
SHOWN_PARTS = 4  # of so much text they are taken: white space goes
MAX_LOGGED_CHARACTERS = 1_000_000  # of one text in a log
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


class EnvironmentDied(RuntimeError):
    """An environment raised, returned nonsense, hung, or lost its process during an episode.

    `at_fault` is False for an episode that only shared the process of the failing one.
    """

    def __init__(self, message: str, *, at_fault: bool) -> None:
        super().__init__(message)
        self.at_fault = at_fault

    def __reduce__(self) -> tuple[Any, ...]:
        # Python pickles an exception by its positional arguments alone, and `at_fault` is none.
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
        is_option = isinstance(error, OptionsError)
        text = str(error) if is_option else describe_error(error, called=called)
        failed = cls(f"{context}: {text}")
        failed.may_work_elsewhere = isinstance(error, MACHINE_ERRORS) and not is_option
        return failed


def describe_error(error: BaseException, *, called: Callable[..., Any] | None) -> str:
    """Return type, message and place of an error in one line.

    `called` is the method that was called, None if the error came from elsewhere.
    """
    message = _message_of(error)
    if len(message) > MAX_CHARACTERS:
        message = message[:MAX_CHARACTERS] + "..."
    place = where_raised(error, called=called)
    if isinstance(error, ValueError | OSError) and _is_ours(place):
        place = ""  # these errors of our own environments say what to change
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text}, at {place}" if place else text


def _message_of(error: BaseException) -> str:
    """Return an error's own message in one line, cut. Its class may be unable to tell it."""
    try:
        text = str(error)
    except Exception as fault:  # noqa: BLE001 - the border to a user's own class
        return f"it has no message, for its __str__ raises {type(fault).__name__}"
    return " ".join(text[: SHOWN_PARTS * MAX_CHARACTERS].split())


def where_raised(error: BaseException, *, called: Callable[..., Any] | None) -> str:
    """Return "FILE:LINE in FUNCTION" of the last frame in the author's files.

    If `called` was never entered, or returned nonsense, its first line is named.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    stack = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(stack)]
    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    if code is not None:  # last: it counts only if no other frame is the author's
        frames.append((code.co_filename, code.co_firstlineno, code.co_name))
    return _place(frames)


def where_crashed(dump: str) -> str:
    """Return the place of the newest frame in a dump of `faulthandler`; "" if there is none."""
    current = dump.rpartition("Current thread")[2]
    return _place([(file, int(line), name) for file, line, name in DUMPED_FRAME.findall(current)])


def describe_exit(code: int) -> str:
    """Return "exit code 3", or "exit code -11 (SIGSEGV)" for a process that a signal ended."""
    try:
        return f"exit code {code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"exit code {code}"


def write_log(log: Path | None, text: str) -> None:
    """Append a text to the log, after the time of day. Without a log it is printed."""
    if len(text) > MAX_LOGGED_CHARACTERS:
        half = MAX_LOGGED_CHARACTERS // 2
        text = f"{text[:half]}\n...\n{text[-half:]}"
    stamped = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n"
    if log is None:
        print(printable(stamped, lines=True), end="", flush=True)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", errors="backslashreplace") as file:
        file.write(printable(stamped, lines=True))


def log_hint(log: Path | None) -> str:
    """Return "; log: PATH" for the end of a message; "" if there is no such file."""
    return "" if log is None or not log.exists() else f"; log: {log}"


def full_traceback(error: BaseException) -> str:
    """Return the traceback with all causes; without them for a message beyond measure."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - the border to a user's own class; a traceback says so too
        message = ""
    if len(message) <= MAX_LOGGED_CHARACTERS:
        return "".join(traceback.format_exception(error))
    stack = "".join(traceback.format_tb(error.__traceback__))
    return f"{stack}{type(error).__name__}: {message[:MAX_LOGGED_CHARACTERS]}..."


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

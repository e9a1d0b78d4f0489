"""Describe an error in one line. Its class may be an environment's own, which may lie or raise.

describe_error(error, called=environment.step)  # "ValueError: no such lamp, at lamps.py:22 in step"
where_raised(error, called=environment.step)    # "lamps.py:22 in step", in the author's file
where_crashed(dump)                             # the same, from a dump of `faulthandler`
"""

from __future__ import annotations

import inspect
import re
import selectors
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from envs.errors import EnvironmentDied

MAX_CHARACTERS = 500  # of an error's own message; the log has more of it
SHOWN_PARTS = 4  # times MAX_CHARACTERS are read of a message, as white space is taken out of it
MAX_PLACE_CHARACTERS = 5000  # of "FILE:LINE in FUNCTION"; a path has at most 4096
MAX_TRACEBACK_CHARACTERS = 1_000_000
MAX_LINKED = 1000  # errors that one traceback may have: causes, contexts, members of groups
FOLDER = Path(__file__).resolve().parent
HOSTING = FOLDER / "hosting"
# These files and all of `hosting` call environments: a frame in them says nothing about the cause.
CALLER_FILES = ("error_texts.py", "logs.py", "options.py", "registry.py", "validation.py")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

Frame = tuple[str, int, str]  # file, line, function

_name_in_type = type.__dict__["__name__"].__get__  # a metaclass may have its own `__name__`


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
    return " ".join(full_message(error)[: SHOWN_PARTS * MAX_CHARACTERS].split())


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


def full_traceback(error: BaseException) -> str:
    """Return the traceback with all causes; without them for messages beyond measure. Never raises.

    A message of 300 million characters would hold the event loop for seconds.
    """
    stack = told_by_author(lambda: "".join(traceback.format_tb(error.__traceback__)), otherwise="")
    alone = f"{stack}{type_name(error)}: {full_message(error)[:MAX_TRACEBACK_CHARACTERS]}"

    def with_causes() -> str:
        linked = list(islice(_linked(error), MAX_LINKED + 1))
        n_characters = sum(_n_characters(each) for each in linked)
        if len(linked) > MAX_LINKED or n_characters > MAX_TRACEBACK_CHARACTERS:
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
    return len(full_message(error)) + sum(len(str(text)) for text in texts)


def full_message(error: BaseException) -> str:
    """Return an error's own message, whole. Its class may be unable to tell it."""
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

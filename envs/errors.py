"""Describe an error of an environment or agent program: in one line, with the place in its author's
file.

where_raised(error, called=environment.step)    "/home/me/lamps.py:22 in step"
where_it_was(dump)                               the same, from the dump of a crashed process
one_line(error, called=...)                      "ValueError: no such lamp, at /home/me/lamps.py:22
in step"
keep(log, text)                                  appends the full traceback to a log
"""

from __future__ import annotations

import inspect
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from printable import printable

MAX_CHARACTERS = 500  # of an error's own message; the log has all of it
FOLDER = Path(__file__).resolve().parent
HOSTING = FOLDER / "hosting"
# These, and all files of `hosting`, call environments. A frame in one of them says nothing about
# the environment.
CALLER_FILES = ("errors.py", "images.py", "options.py", "registry.py", "validation.py")
PACKAGES = ("site-packages", "dist-packages")  # folders of installed libraries
LIBRARY = sysconfig.get_paths()["stdlib"]
DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

Frame = tuple[str, int, str]  # file, line, function


def one_line(error: BaseException, *, called: Callable[..., Any] | None) -> str:
    """Return type, message and place of `error`. `called` is the method that was called, if one
    was.
    """
    text = " ".join(str(error).split())
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + "..."
    place = where_raised(error, called=called)
    if isinstance(error, ValueError | OSError) and _is_ours(place):
        place = ""  # our environments say in these errors what to change
    said = f": {text}" if text else ""  # a bare assert has nothing to say
    return f"{type(error).__name__}{said}" + (f", at {place}" if place else "")


def where_raised(error: BaseException, *, called: Callable[..., Any] | None) -> str:
    """Return "FILE:LINE in FUNCTION" of the last frame in the author's files.

    A method that was never entered, or that returned nonsense, is named by its first line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    trace = traceback.extract_tb(error.__traceback__)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(trace)]
    code = getattr(inspect.unwrap(called), "__code__", None) if called is not None else None
    if code is not None:  # behind the others: only for an error that has no frame of the author's
        frames.append((code.co_filename, code.co_firstlineno, code.co_name))
    return _place(frames)


def where_it_was(dump: str) -> str:
    """Return the place of the newest frame in a dump of `faulthandler`; "" if there is none."""
    current = dump.rpartition("Current thread")[2]
    return _place([(file, int(line), name) for file, line, name in DUMPED_FRAME.findall(current)])


def exit_text(code: int) -> str:
    """Describe an exit code: "exit code 3", "exit code -11 (SIGSEGV)"."""
    try:
        return (
            f"exit code {code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
        )
    except ValueError:
        return f"exit code {code}"


def keep(log: Path | None, text: str) -> None:
    """Append `text` to the log, under the time of day. Without a log it is printed."""
    stamped = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n"
    if log is None:
        print(printable(stamped, lines=True), end="", flush=True)
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", errors="backslashreplace") as file:
        file.write(stamped)


def log_hint(log: Path | None) -> str:
    """Return the end of a message that says where to read on. Return "" without a log, or before it
    is written.
    """
    return "" if log is None or not log.exists() else f"; log: {log}"


def full(error: BaseException) -> str:
    """Return the whole traceback."""
    return "".join(traceback.format_exception(error))


def _place(frames: Iterable[Frame]) -> str:
    """Return the first frame, newest first, that is the author's; else one of this folder, else of
    a library.
    """
    called = [frame for frame in frames if not _is_caller(frame[0])]
    authors = [frame for frame in called if not _is_library(frame[0])]
    users = [frame for frame in authors if not _is_ours(frame[0])]
    for file, line, name in users or authors or called:
        return f"{file}:{line} in {name}"
    return ""


def _is_ours(file: str) -> bool:
    """Tell whether a file is of this project's environments. A user's class may be made of them."""
    return file.startswith(f"{FOLDER}/")


def _is_caller(file: str) -> bool:
    path = Path(file).resolve()
    is_ours = path.parent == HOSTING or (path.parent == FOLDER and path.name in CALLER_FILES)
    return file.startswith("<") or is_ours


def _is_library(file: str) -> bool:
    return file.startswith(LIBRARY) or any(folder in Path(file).parts for folder in PACKAGES)

"""Write the logs of environments. A log that cannot be written costs no episode.

write_log(log, full_traceback(error))
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from envs.error_texts import message_of, told_by_author, type_name
from printable import printable

MAX_LOGGED_CHARACTERS = 1_000_000  # of one text

_unwritable: set[Path | None] = set()  # logs of which standard error was told already


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

    If the log cannot be opened, return None too, and say so once on standard error.
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

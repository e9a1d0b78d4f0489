"""Make text safe to show in a terminal. Every command prints through this module.

    say(text)                                 # one line
    fail(error)                               # "error: ..." on standard error, in one line
    console = plain_console(soft_wrap=True)   # for rich
    parser = ArgumentParser(...)              # its messages quote what it was given
    protect_terminal()                        # the first call of a process

A terminal obeys control characters. They can change what stands on the screen, and even what is in
the clipboard. Texts of a model, an environment, a file or a server may hold any of them.
This module imports nothing of the project, so that every package may import it.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Characters that a terminal obeys: C0 and C1 controls, marks that change the direction of text,
# line and paragraph separators, and halves of characters, which cannot be encoded.
OBEYED = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
# Invisible characters: two names that look the same would differ, and a name could hide a text.
# These are the soft hyphen, the grapheme joiner, fillers of Hangul, vowels of Khmer, the Mongolian
# vowel separator, the zero width space, the word joiner with invisible operators, deprecated
# formats, the byte order mark, annotations, formats of shorthand and of music, tags and the
# selectors after them, which can spell a text.
# The joiners U+200C and U+200D and the selectors U+FE00 to U+FE0F stay: emoji and the scripts of
# Persian and of India are written with them.
HIDDEN = (
    r"\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180e\u200b\u2060-\u2065\u206a-\u206f\u3164\ufeff\uffa0"
    r"\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e01ef"
)
SHOWN_CHARACTERS = 10_000  # of an error
REASON_CHARACTERS = 300  # of another program's reason in a message of ours
UNSAFE = re.compile(f"[{OBEYED}{HIDDEN}]")
FORMAT_WARNING = warnings.formatwarning  # Python's own


def shell_word(text: object, *, lines: bool = False) -> str:
    """Return the text quoted for a shell. Hidden characters are escapes that bash and zsh read.

    >>> print("gigpo fetch", shell_word("s3://bucket/run?region=x&rm"), "DIR")
    gigpo fetch 's3://bucket/run?region=x&rm' DIR

    Spaces beside each other, and all other white space, are escapes too: a message in one line has
    only single spaces. `lines`: they stay, and line feeds as well, in a text with lines of its own.
    """
    word = str(text)
    if lines:
        is_plain = not UNSAFE.search(word.replace("\n", ""))
    else:
        is_plain = not UNSAFE.search(word) and word == one_line(word)
    if is_plain:
        return shlex.quote(word)
    return "$'" + "".join(_shell_escape(each, lines=lines) for each in word) + "'"


def _shell_escape(character: str, *, lines: bool) -> str:
    if character == "\\":
        return "\\\\"
    if character == "'":
        return "\\047"  # other shells than bash would end the word at \'
    if "\udc80" <= character <= "\udcff":  # a byte of a file's name that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    if lines and character in " \n":
        return character
    if UNSAFE.match(character) or character.isspace():
        return f"\\U{ord(character):08x}"
    return character


def printable(text: object, *, lines: bool = False) -> str:
    """Return the text with visible escapes, as Python writes them, for what a terminal would obey.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'

    `lines`: line feeds are the caller's own and stay.
    """
    return UNSAFE.sub(_kept_line_feed if lines else _escape, str(text))


def one_line(text: object) -> str:
    """Return the text in one line: another program's message may have many."""
    return " ".join(str(text).split())


def counted(n: int, noun: str) -> str:
    """Return a number and its noun: `1 group`, `2 groups`, `2 trajectories`."""
    if n == 1:
        return f"{n} {noun}"
    if noun.endswith("y") and noun[-2] not in "aeo":
        return f"{n} {noun[:-1]}ies"
    return f"{n} {noun}s"


def printable_json(text: str) -> str:
    """Return JSON of the same value in which only escapes stand for what a terminal would obey."""

    def escape(found: re.Match[str]) -> str:
        units = found[0].encode("utf-16-be", "surrogatepass")  # JSON has escapes of 16 bits
        return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))

    return UNSAFE.sub(escape, text)


def did_you_mean(wrong: object, known: Iterable[object]) -> str:
    """Return `, did you mean '...'?` with the nearest known name, or "" if none is near.

    A name with dots also matches by its last part: `lr` of `learner.lr`.
    """
    names = [str(name) for name in known]
    last_of = {name.rpartition(".")[2]: name for name in reversed(names)}
    for text, choices in ((str(wrong), names), (str(wrong).rpartition(".")[2], last_of)):
        if near := difflib.get_close_matches(text, choices, n=1):
            found = near[0] if near[0] in names else last_of[near[0]]
            return f", did you mean {found!r}?"
    return ""


def say(text: str) -> None:
    """Print a text in one line."""
    print(printable(text))


def fail(error: object) -> None:
    """Print an error in one line of at most SHOWN_CHARACTERS: it may quote a text of any length."""
    print(printable(f"error: {one_line(error)[:SHOWN_CHARACTERS]}"), file=sys.stderr)


def open_missing_streams() -> None:
    """Let standard streams that were closed at the start of this process lead nowhere.

    Libraries write to them without a look. A child that inherited none would open its first file
    under the number of its output. A number that a library has taken meanwhile is left alone.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)  # under the lowest free number
        if nowhere == descriptor:
            os.set_inheritable(nowhere, True)
        setattr(sys, name, open(nowhere, "r" if name == "stdin" else "w"))  # noqa: SIM115


def protect_terminal() -> None:
    """Escape tracebacks, warnings and the log lines of libraries in this process.

    Libraries quote what they read: transformers, for one, logs the names of a model's tensors.
    """
    sys.excepthook = _print_traceback
    logging.setLogRecordFactory(_printable_record)
    warnings.formatwarning = _printable_warning


class UserError(Exception):
    """Base of the errors that a user can mend. `gigpo` shows them in one line, no traceback."""


class ArgumentParser(argparse.ArgumentParser):
    """Escape the arguments that a message quotes: a shell completes names of files."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message, lines=True), file)


class PrintableStream:
    """Write to a stream what is printable of a text. Line feeds stay."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text, lines=True))


def plain_console(*, soft_wrap: bool, stderr: bool = False) -> Console:
    """Return a console that shows plain text as it is: no markup, no emoji, no control characters.

    A `rich.text.Text` is shown unchanged: make it of `printable(...)`.
    """
    from rich.console import Console  # here: most commands print without it
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **settings: Any) -> Text:
            """Make text of a string: printed, in a cell, a heading or a title of a table."""
            plain = {**settings, "markup": False, "emoji": False}
            return super().render_str(printable(text, lines=True), **plain)

    return PlainConsole(
        highlight=False, soft_wrap=soft_wrap, markup=False, emoji=False, stderr=stderr
    )


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _kept_line_feed(found: re.Match[str]) -> str:
    return "\n" if found[0] == "\n" else _escape(found)


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable(text, lines=True), end="", file=sys.stderr)


def _printable_record(*args: Any, **settings: Any) -> logging.LogRecord:
    record = logging.LogRecord(*args, **settings)
    try:
        text = record.getMessage()
    except (TypeError, ValueError):  # arguments that do not fit: the handler names the call
        return record
    record.msg, record.args = printable(text, lines=True), ()
    if record.exc_info:  # a formatter takes this text instead of making its own
        trace = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        record.exc_text = printable(trace, lines=True)
    return record


def _printable_warning(*args: Any, **settings: Any) -> str:
    return printable(FORMAT_WARNING(*args, **settings), lines=True)

"""Makes text fit to be shown in a terminal. Every program of this project prints through this module.

    print(printable(text))                    # one line
    fail(error)                               # "error: ..." on standard error, in one line
    console = plain_console(soft_wrap=True)   # for rich
    parser = ArgumentParser(...)              # its messages quote what it was given
    protect_terminal()                        # the first call of a program

A terminal obeys control characters. They can change what stands on the screen, and even what is in
the clipboard. Texts of a model, an environment, a file or a server may hold any of them.
This module imports nothing of the project, so that every folder may import it.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# C0 and C1 controls, marks that change the direction of text, other invisible formatting, line
# and paragraph separators, and halves of characters, which cannot be encoded.
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufff9-\ufffb\ud800-\udfff]")


def printable(text: object, *, lines: bool = False) -> str:
    """Return the text with visible escapes, as Python writes them, for what a terminal would obey.

    >>> printable("red \\x1b[31m")
    'red \\\\x1b[31m'

    `lines`: line feeds are the caller's own and stay.
    """
    return UNSAFE.sub(_kept_line_feed if lines else _escape, str(text))


def printable_json(text: str) -> str:
    """Return JSON of the same value in which only escapes stand for what a terminal would obey."""
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def fail(error: object) -> None:
    """Print an error in one line."""
    print(printable(f"error: {' '.join(str(error).split())}"), file=sys.stderr)


def protect_terminal() -> None:
    """Escape the traceback of an error that nobody catches."""
    sys.excepthook = _print_traceback


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


def plain_console(*, soft_wrap: bool) -> Console:
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

    return PlainConsole(highlight=False, soft_wrap=soft_wrap, markup=False, emoji=False)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def _kept_line_feed(found: re.Match[str]) -> str:
    return "\n" if found[0] == "\n" else _escape(found)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    print(printable(text, lines=True), end="", file=sys.stderr)

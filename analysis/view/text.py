"""Make texts of a run visible in HTML: nothing in them is obeyed, nothing in them is hidden.

A model or an environment wrote them. They may hold markup, control characters, marks that turn the
direction of text, and lines of a megabyte.
"""

from __future__ import annotations

import re
from itertools import islice

from markupsafe import Markup, escape

from printable import UNSAFE

SHORT_CHARACTERS = 300  # that are shown at once
LONG_CHARACTERS = 20_000  # that "show all" shows; the query gives the rest
# Of an action, which a page's query cuts: a page lists hundreds, and most are a few words long.
ACTION_CHARACTERS = 300
ENDS_LINE = "\n"
MOST_MARKS = 100  # of a text; each is 60 bytes of HTML
UNMARKED = "\N{REPLACEMENT CHARACTER}"  # stands for each hidden character after these


def visible(
    value: object, *, at_most: int = SHORT_CHARACTERS, at_most_all: int = LONG_CHARACTERS
) -> Markup:
    """Return a text as HTML in which control and hidden characters are shown as escapes.

    A longer text is cut, with a "show all" that shows up to `at_most_all`.
    """
    text = str(value)
    if len(text) <= at_most:
        return _marked(text)
    shown = text[:at_most_all]
    rest = "" if len(shown) == len(text) else f", the first {at_most_all:,} are here"
    return Markup(
        '<details class="long"><summary>{}<span class="more">… show all ({} characters{})</span>'
        '</summary><div class="all-text">{}</div></details>'
    ).format(_marked(text[:at_most]), f"{len(text):,}", rest, _marked(shown))


def plain(value: object, *, at_most: int = 80) -> str:
    """Return a short text of one line with visible escapes, for titles, charts and attributes."""
    text = UNSAFE.sub(lambda found: _code(found[0]), str(value)[: at_most + 1])
    return text if len(text) <= at_most else text[:at_most] + "…"


def _marked(text: str) -> Markup:
    """Return the text escaped, with each unsafe character in a mark of its own, up to MOST_MARKS.

    Lines stay: a page shows them with `white-space: pre-wrap`.
    """
    parts: list[Markup] = []
    end = 0
    hidden = (found for found in UNSAFE.finditer(text) if found[0] != ENDS_LINE)
    for found in islice(hidden, MOST_MARKS):
        parts.append(escape(text[end : found.start()]))
        name = f"U+{ord(found[0]):04X}"
        parts.append(
            Markup('<span class="hidden-character" title="{}">{}</span>').format(
                name, _code(found[0])
            )
        )
        end = found.end()
    rest = UNSAFE.sub(lambda found: ENDS_LINE if found[0] == ENDS_LINE else UNMARKED, text[end:])
    parts.append(escape(rest))
    return Markup("").join(parts)


def _code(character: str) -> str:
    return re.sub(r"^\\x0?([0-9a-f]{1,2})$", r"\\x\1", ascii(character)[1:-1])

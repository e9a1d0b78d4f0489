"""Match the lines of HTTP in linear time, where h11 0.16 takes quadratic time for blanks.

It reads what the viewer is sent, and what model servers answer.

Its patterns may give a blank at the end of a line to two parts. For a line that does not match, all
ways are tried: 120 KB of blanks held the whole process for a minute. Here each part keeps what it
took.
"""

from __future__ import annotations

import re

from h11 import _abnf, _readers

HEADER_FIELD = re.compile(
    rb"(?P<field_name>%b++):[ \t]*+" % _abnf.token.removesuffix("+").encode()
    + rb"(?P<field_value>(?:[^\x00\s]++(?:[ \t]++[^\x00\s]++)*+)?+)[ \t]*+"
)
CHUNK_HEADER = re.compile(
    rb"(?P<chunk_size>[0-9A-Fa-f]{1,20}+)(?P<chunk_ext>;[^\r\n]*+)?+[ \t]*+\r\n"
)


def use_linear_patterns() -> None:
    """Have h11 use these patterns in this process."""
    _readers.header_field_re = HEADER_FIELD
    _readers.chunk_header_re = CHUNK_HEADER

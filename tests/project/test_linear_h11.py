"""The patterns of a request's lines: as h11's, but linear."""

from __future__ import annotations

import re
import string

import h11._abnf
import h11._readers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linear_h11 import CHUNK_HEADER, HEADER_FIELD
from model_server import http_client

HEADER = re.compile(h11._abnf.header_field.encode())
CHUNK = re.compile(h11._abnf.chunk_header.encode())
LETTERS = st.text(alphabet="aZ09 \t:;-\0\r\n\x80\xff", max_size=12).map(
    lambda text: text.encode("latin-1")
)


def taken(pattern: re.Pattern[bytes], line: bytes) -> dict[str, bytes | None] | None:
    """Return the parts of a line, None if it is refused."""
    found = pattern.fullmatch(line)
    return None if found is None else found.groupdict()


@given(name=st.one_of(st.just(b"a"), LETTERS), value=LETTERS)
def test_a_header_is_taken_as_h11_takes_it(name: bytes, value: bytes) -> None:
    line = name + b":" + value
    assert taken(HEADER_FIELD, line) == taken(HEADER, line)


@pytest.mark.parametrize("name", [bytes([byte]) for byte in string.printable.encode()])
def test_a_name_has_the_characters_that_h11_allows(name: bytes) -> None:
    assert taken(HEADER_FIELD, name + b": x") == taken(HEADER, name + b": x")


@given(size=st.text(alphabet="09afAFg", max_size=22), rest=LETTERS)
def test_a_piece_begins_as_for_h11_or_is_refused(size: str, rest: bytes) -> None:
    """An extension with a carriage return in it is refused."""
    line = size.encode() + rest + b"\r\n"
    found, before = taken(CHUNK_HEADER, line), taken(CHUNK, line)
    if found is None:
        assert before is None or b"\r" in (before["chunk_ext"] or b"")
    else:
        assert before is not None and found["chunk_size"] == before["chunk_size"]


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (HEADER_FIELD, b"a:%b\0"),
        (HEADER_FIELD, b"a: x%b\0"),
        (CHUNK_HEADER, b"1;%b\n"),
        (CHUNK_HEADER, b"1%b\0"),
    ],
)
def test_a_line_of_blanks_is_refused_at_once(pattern: re.Pattern[bytes], line: bytes) -> None:
    """The attack: a line of blanks, here 10 MB, which would take days in quadratic time."""
    assert pattern.fullmatch(line % (b" " * 10_000_000)) is None


def test_the_clients_of_model_servers_match_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: an answer with a header of 100 KB of blanks held the asking process for 22 s."""
    monkeypatch.setattr(h11._readers, "header_field_re", HEADER)
    monkeypatch.setattr(h11._readers, "chunk_header_re", CHUNK)
    http_client()
    assert h11._readers.header_field_re is HEADER_FIELD
    assert h11._readers.chunk_header_re is CHUNK_HEADER

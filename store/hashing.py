"""Hash anchor states, and name things: 128-bit BLAKE2b, which is in the standard library.

Observations come from outside, so the hash must resist somebody who chooses them. DuckDB's hash()
changes between releases and must never be stored. Large files of weights have BLAKE3.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

MOST_MARKS = 30  # in a row, as in the Stream-Safe Text Format of UAX 15
# Looking for marks takes 0.2 us a character, with the interpreter's lock: heartbeats wait for it.
MOST_NORMALISED = 1 << 20  # characters
MARKS_FROM_TO = (0x300, 0x20000)
# Combining marks that came after Unicode 14, the version of Python 3.11. Every Python takes them
# for letters, as that one does: otherwise the hash of a state would depend on the Python that runs.
LATER_MARKS = re.compile(
    "([\U00010efd-\U00010eff\U00011f41\U00011f42\U0001e08f\U0001e4ec-\U0001e4ef])"
)
HASH_BYTES = 16  # 1e10 states collide with probability 1.5e-19
# Part of every state hash, so that a new canonical form never matches an old hash.
# No release hashed texts without the two limits above, so they are part of version 1.
CANONICALISER_VERSION = 1
_STATE_TAG = b"anchor-%d" % CANONICALISER_VERSION
_UID_TAG = b"uid-1"


def canonical(text: str) -> str:
    """Return the text that is hashed: NFC of Unicode 14 with LF line ends. Nothing else is changed.

    A text with more than 30 combining marks in a row, as no language has, keeps its form, and so
    does one of more than a million characters.

    >>> canonical("cafe\\u0301\\r\\n") == "caf\\u00e9\\n"
    True
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # Python sorts marks in quadratic time, with the interpreter's lock: 3 s for 80,000 of them.
    if text.isascii() or len(text) > MOST_NORMALISED or _has_many_marks(text):
        return text
    return "".join(unicodedata.normalize("NFC", part) for part in LATER_MARKS.split(text))


def _has_many_marks(text: str) -> bool:
    """Return whether more marks follow each other than Unicode's Stream-Safe Text Format allows."""
    mark, many_marks = _mark_patterns()
    # So many in a row have one at a multiple of their number.
    return bool(mark.search(text[:: MOST_MARKS + 1]) and many_marks.search(text))


@functools.cache
def _mark_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Match a mark, and more in a row than UAX 15 allows."""
    characters = map(chr, range(*MARKS_FROM_TO))
    marks = [
        each
        for each in characters
        if all(map(unicodedata.combining, unicodedata.normalize("NFD", each)))
        and not LATER_MARKS.match(each)
    ]
    mark = f"[{''.join(marks)}]"
    return re.compile(mark), re.compile(f"{mark}{{{MOST_MARKS + 1}}}")


def state_hash(text: str) -> bytes:
    """Return 16 bytes that identify an anchor state by its canonical text. Raises TypeError."""
    if not isinstance(text, str):
        raise TypeError(
            f"state_hash takes a text, not a value of type {type(text).__name__}; write the state "
            "as a text"
        )
    return hashlib.blake2b(
        canonical(valid_text(text)).encode(), digest_size=HASH_BYTES, person=_STATE_TAG
    ).digest()


def valid_text(text: str) -> str:
    """Return `text` with U+FFFD for every lone surrogate, which no file and no database takes.

    Two halves of one character that follow each other become that character. They come from JSON,
    as "\\ud83d".
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def uid(*parts: str | int | bytes | None) -> bytes:
    """Return 16 bytes that name a thing by its parts. A retry gets the same name, and collides.

    Each part is hashed with its type and length: uid("a", "b") differs from uid("ab"), and uid(1)
    from uid("1").
    """
    hasher = hashlib.blake2b(digest_size=HASH_BYTES, person=_UID_TAG)
    for part in parts:
        kind, data = _tagged(part)
        hasher.update(kind + len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def file_digest(data: bytes | memoryview) -> str:
    """Return the digest of a whole file in hex. The catalog has it, and the learner compares it."""
    return hashlib.blake2b(data, digest_size=HASH_BYTES).hexdigest()


def _tagged(part: str | int | bytes | None) -> tuple[bytes, bytes]:
    if part is None:
        return b"n", b""
    if isinstance(part, str):
        return b"s", part.encode()
    if isinstance(part, bytes):
        return b"b", part
    return b"i", str(int(part)).encode()


PIECE_BYTES = 16 << 20  # that are read at a time


def digest_of_open(file: BinaryIO) -> str:
    """Return the digest of an open file, as `files_digest`. It ends at the size that it has now.

    For a file of somebody else: whoever shortens one that is mapped ends the process.
    """
    digest, left = blake3(max_threads=blake3.AUTO), os.fstat(file.fileno()).st_size
    while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()


def files_digest(paths: Sequence[Path]) -> str:
    """Return the BLAKE3 digest, in hex, of large files as if they were one: `cat a b | b3sum`.

    Every engine verifies the weights of every version, and SHA-256 takes longer than writing them.
    """
    digest = blake3(max_threads=blake3.AUTO)
    for path in paths:
        digest.update_mmap(path)
    return digest.hexdigest()

"""A stranger makes a file longer after its size was looked at."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from store import digest_of_open, files_digest, hashing, open_storage
from store.untrusted import file_access
from store.untrusted.file_access import PIECE_BYTES, copy_first, read_bytes

GROWN_BYTES = 1 << 42  # all of it holes: hours to read, and no disk has room for a copy


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the owner of a file make it longer as soon as its size was looked at."""
    look = file_access._checked_size

    def attacked(descriptor: int, path: Path, *, at_most: int) -> int:
        n_bytes = look(descriptor, path, at_most=at_most)
        os.truncate(path, GROWN_BYTES)
        return n_bytes

    monkeypatch.setattr(file_access, "_checked_size", attacked)


@pytest.mark.usefixtures("grown")
def test_what_is_read_is_what_was_there_when_its_size_was_looked_at(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abc")
    assert read_bytes(tmp_path / "text", root=tmp_path, at_most=10) == b"abc"
    (tmp_path / "text").write_bytes(b"abc")
    assert open_storage(str(tmp_path)).read("text").to_pybytes() == b"abc"


def test_so_is_a_digest(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    content = os.urandom(2 * PIECE_BYTES + 3)
    (tmp_path / "weights").write_bytes(content)
    digest = open_storage(str(tmp_path)).digest("weights")
    request.getfixturevalue("grown")
    assert open_storage(str(tmp_path)).digest("weights") == digest


def test_a_file_that_is_shortened_while_it_is_hashed_ends_nothing(tmp_path: Path) -> None:
    """The attack: its owner did so while it was mapped, and the command ended with SIGBUS."""
    content = os.urandom(3_000_000)
    (tmp_path / "chats").write_bytes(content)
    with (tmp_path / "chats").open("rb") as file:
        assert digest_of_open(file) == files_digest([tmp_path / "chats"])
    with (tmp_path / "chats").open("rb", buffering=0) as file:
        read = file.read

        def shortened(n_bytes: int) -> bytes:
            os.truncate(tmp_path / "chats", 1_000_000)
            return read(n_bytes)

        with mock.patch.object(hashing, "PIECE_BYTES", 1 << 20):
            wrapped = mock.Mock(fileno=file.fileno, read=shortened)
            assert digest_of_open(wrapped) == hashing.blake3(content[:1_000_000]).hexdigest()


@pytest.mark.parametrize("n_bytes", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES + 3, 3 * PIECE_BYTES])
def test_a_copy_has_the_first_bytes(tmp_path: Path, n_bytes: int) -> None:
    content = bytes(PIECE_BYTES) + os.urandom(PIECE_BYTES) + b"end"
    (tmp_path / "source").write_bytes(content)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "copy").open("wb") as copy:
        copy_first(source.fileno(), copy, n_bytes=n_bytes)
    assert (tmp_path / "copy").read_bytes() == content[:n_bytes]


@pytest.mark.parametrize("n_written", [0, 64])
def test_a_copy_of_holes_takes_no_more_room(tmp_path: Path, n_written: int) -> None:
    """The attack: a byte in each megabyte, whose copy took a hundred times the room."""
    with (tmp_path / "source").open("wb") as source:
        for number in range(n_written):
            source.seek(number * PIECE_BYTES)
            source.write(b"x")
        source.truncate(64 * PIECE_BYTES)
    with (tmp_path / "source").open("rb") as source, (tmp_path / "copy").open("wb") as copy:
        copy_first(source.fileno(), copy, n_bytes=64 * PIECE_BYTES)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "source").read_bytes()
    assert (tmp_path / "copy").stat().st_blocks <= (tmp_path / "source").stat().st_blocks + 8


def test_a_copy_of_a_hole_takes_no_time(tmp_path: Path) -> None:
    """The attack: a file of 15 TiB without a byte, in a model that was shared, took a night."""
    with (tmp_path / "source").open("wb") as source:
        source.truncate(2**42)
        source.seek(2**41)
        source.write(b"x")
    with (tmp_path / "source").open("rb") as source, (tmp_path / "copy").open("wb") as copy:
        copy_first(source.fileno(), copy, n_bytes=2**42)
    with (tmp_path / "copy").open("rb") as copied:
        copied.seek(2**41)
        assert copied.read(2) == b"x\0"
    assert (tmp_path / "copy").stat().st_size == 2**42
    assert (tmp_path / "copy").stat().st_blocks <= (tmp_path / "source").stat().st_blocks + 8

"""Know the primary directory of a run whose files are in a storage: only there the run goes on.

    take(root, storage)         # while the run is made
    with taken(root, storage):  # while the run is brought to an empty disk
    check(root, uri)            # before a process owns the run, and by its owner again and again

PRIMARY has the same token in the directory and in the storage. Bringing the run to another disk
writes a new token. An owner on the old disk that is alive, or comes back, finds that and stops.
Otherwise two histories of one run would be written over one another. A copy of the directory has
the token too.

PRIMARY has all tokens before it, too. What a directory with one of these has shown readers is
older; what any other has shown is newer than this directory.

While a run is brought, its PRIMARY also has the PRIMARY of the directory where it was. If two
processes bring the run at once and both fail, the second one gives it back to that directory.

A token that was given up counts no more, because its PRIMARY may be written late: a network or a
server can hold a request for longer than anybody waits. The storage names it in a file of its own,
with the PRIMARY that counts instead.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from printable import shell_word
from store.atomic_write import READ_ONLY, write_atomically
from store.errors import FencedError, StoreError, UnavailableError
from store.run_names import GIVEN_UP, PRIMARY, UNFINISHED_BRING
from store.storage import Storage, open_storage
from store.untrusted import json_values
from store.untrusted.file_access import MAX_TEXT_BYTES, read_bytes, status

BEFORE = "before"  # in PRIMARY of a run that is being brought: that of the last whole one
PAST = "past"  # in PRIMARY of a run that was brought: the tokens before it
NOBODY = b""  # instead of the PRIMARY of a token that was given up: nobody's that is known
TOKEN = re.compile("[0-9a-f]{32}")
SHOWN_CHARACTERS = 200  # of a text that another machine wrote


def take(root: Path, storage: Storage, **more: object) -> None:
    """Make `root` the primary directory, and no other any longer. Raises StoreError.

    `more` is written into PRIMARY too.
    """
    content = {"token": uuid.uuid4().hex, "where": f"{root} on {socket.gethostname()}", **more}
    data = json.dumps(content).encode()
    # Killed in between, the directory is not the primary one, and the run is brought there again.
    write_atomically(root / PRIMARY, data, mode=READ_ONLY, beneath=root)
    _write(root, storage, data)


def _write(root: Path, storage: Storage, data: bytes) -> None:
    """Write PRIMARY of a directory into the storage. Raises StoreError: the token is given up."""
    try:
        storage.write(PRIMARY, data)
    except BaseException:
        with suppress(OSError, StoreError):
            give_up(root, storage)
        raise


@contextmanager
def taken(root: Path, storage: Storage) -> Iterator[None]:
    """Make `root` the primary directory. If the block fails, restore the one before it.

    Raises StoreError. `root` stays the primary directory if the storage does not answer then.
    """
    there = _read(storage, PRIMARY)
    found = _instead_of(storage, there) or there
    before = None if found is None else _last_whole(found)
    past = [token for data in (found, before) for token in _with_past(data)]
    try:
        more = {BEFORE: None if before is None else before.decode()}
        take(root, storage, **more, **{PAST: list(dict.fromkeys(past))})
        yield
        _finish(root, storage, write=_write)
    except BaseException:
        with suppress(OSError, StoreError):
            if _is_here(root, _read(storage, PRIMARY)):  # and no third directory is by now
                if before is None:
                    storage.remove(PRIMARY)
                else:
                    storage.write(PRIMARY, before)
        raise


def give_up(root: Path, storage: Storage, *, before: bytes | None = None) -> None:
    """Have the token of a directory count no more, but the one before it. Raises StoreError.

    `before`: the PRIMARY that counts instead, if that of the directory names none.
    """
    here = _here(root)
    token = _token(here)
    if token is not None:
        named = _content(here).get(BEFORE)
        instead = named.encode() if isinstance(named, str) else before or NOBODY
        storage.write(f"{GIVEN_UP}/{token}", instead)


def token_of(root: Path) -> str | None:
    """Return the token of a directory, None if it has none."""
    token = _token(_here(root))
    return None if token is None or TOKEN.fullmatch(token) is None else token


def is_past(root: Path, token: str) -> bool:
    """Return whether a token was that of a primary directory before this one."""
    return token in _with_past(_here(root))[1:]


def as_primary(token: str) -> bytes:
    """Return a PRIMARY with a token."""
    return json.dumps({"token": token}).encode()


def check(root: Path, uri: str) -> None:
    """Raise FencedError if the run at `uri` has another primary directory by now.

    A run of an earlier version has PRIMARY nowhere. Raises UnavailableError, also if only the
    storage has none: a volume that is not mounted looks like that.
    """
    storage = open_storage(uri)
    there, here = _there(storage), _here(root)
    if there is None and here:
        raise UnavailableError(
            f"{storage.locate(PRIMARY)} is not there; mount the volume, or check the "
            f"URI. If it was removed, copy {root / PRIMARY} there"
        )
    if there == NOBODY and here and not _is_given_up(storage, here):
        # Another run took the storage at the same time, and gave it up.
        storage.write(PRIMARY, here)
        return
    if there is not None and not _is_here(root, there):
        is_whole = _last_whole(there) == there
        how = "was brought" if is_whole else "was brought (whole or in part)"
        raise FencedError(
            f"the run of {root} {how} to {_where(there)} and goes on there; stop this one. "
            "To bring it back to this machine, stop that one: gigpo train --resume "
            f"{shell_word(uri)} run_dir=NEW"
        )
    is_whole = status(root / UNFINISHED_BRING, root=root) is None
    if is_whole and BEFORE in _content(here):  # it was brought, and killed before it said so
        _finish(root, storage, write=_write_again)


def _write_again(root: Path, storage: Storage, data: bytes) -> None:
    """Write PRIMARY of a directory where the run goes on already."""
    storage.write(PRIMARY, data)


def _finish(root: Path, storage: Storage, *, write: Callable[[Path, Storage, bytes], None]) -> None:
    """Forget the primary directory before this one. Raises FencedError if there is another now."""
    there = _there(storage)
    if not _is_here(root, there):
        raise FencedError(
            f"the run was brought to {_where(there or b'')} meanwhile, and goes on there"
        )
    content = json_values.parse_object(_here(root))
    data = json.dumps({name: content[name] for name in content if name != BEFORE}).encode()
    write(root, storage, data)
    write_atomically(root / PRIMARY, data, mode=READ_ONLY, beneath=root)


def _last_whole(data: bytes) -> bytes | None:
    """Return the primary directory before one that was not brought whole, else this one."""
    content = _content(data)
    if BEFORE not in content:
        return data
    before = content[BEFORE]
    return before.encode() if isinstance(before, str) else None


def is_primary(root: Path, storage: Storage) -> bool:
    """Return whether a directory is the primary one of a run in a storage. Raises StoreError."""
    there = _there(storage)
    return bool(there) and _is_here(root, there)


def _is_here(root: Path, there: bytes | None) -> bool:
    """Return whether PRIMARY of the storage is that of a directory."""
    here = _here(root)
    return there == here or _token(there) == _token(here) is not None


def _content(data: bytes) -> dict[str, object]:
    try:
        return json_values.parse_object(data)
    except ValueError:
        return {}


def _with_past(data: bytes | None) -> list[str]:
    """Return the token of a PRIMARY and those before it, newest first. None has none."""
    past = _content(data or b"").get(PAST)
    token = _token(data)
    older = past if isinstance(past, list) else []
    return [] if token is None else [token, *(one for one in older if isinstance(one, str))]


def _token(data: bytes | None) -> str | None:
    try:
        return json_values.text(_content(data or b""), "token")
    except ValueError:
        return None


def _instead_of(storage: Storage, data: bytes | None) -> bytes | None:
    """Return the PRIMARY that counts instead of one that was given up, None for any other."""
    token = _token(data)
    if token is None or TOKEN.fullmatch(token) is None:
        return None
    return _read(storage, f"{GIVEN_UP}/{token}")


def _is_given_up(storage: Storage, here: bytes) -> bool:
    return _instead_of(storage, here) is not None


def _there(storage: Storage) -> bytes | None:
    """Return PRIMARY of the storage as it counts, None if it has none. Raises UnavailableError."""
    data = _read(storage, PRIMARY)
    # Also for the directory whose token it is: it may be whole, of a bring that was killed then.
    instead = _instead_of(storage, data)
    return (data or None) if instead is None else instead


def _read(storage: Storage, path: str) -> bytes | None:
    """Return a small file of the storage, None if it is not there. Raises UnavailableError."""
    try:
        data: bytes = storage.read(path, at_most=MAX_TEXT_BYTES).to_pybytes()
    except UnavailableError:
        raise
    except StoreError:
        return None
    return data


def _here(root: Path) -> bytes:
    try:
        return read_bytes(root / PRIMARY, root=root, at_most=MAX_TEXT_BYTES)
    except FileNotFoundError:
        return b""


def _where(data: bytes) -> str:
    try:
        return json_values.text(json_values.parse_object(data), "where")[:SHOWN_CHARACTERS]
    except ValueError:
        return "another directory"

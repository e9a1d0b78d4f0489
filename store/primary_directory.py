"""Know the primary directory of a run with `store.uri`: the only directory that may write.

    take(root, storage)                  # while the run is made
    with taken(root, storage):           # while the run is brought to an empty disk
    repair(root, uri, check(root, uri))  # before a process owns the run, and again and again

PRIMARY (primary.json) has a token, in the directory and in the storage. A copy of the directory has
it too. `--resume URI` writes a new token. The old owner, alive or started again, finds that in the
storage and stops with FencedError. Otherwise two histories of one run would be written over one
another. Its other fields:

where     the directory and its machine, for people
past      the tokens of earlier directories; manifests that these wrote are older than this one
before    only while the run is brought: PRIMARY of the directory where it was. If the bring fails,
          that is written back

What a bring leaves, and where the run goes on then:

it fails                                    the previous directory
it is killed before the directory is whole  nowhere, until the same command is given again
it is killed when the directory is whole    the new directory, whose next owner drops `before`
a write of PRIMARY is not answered          the previous directory; the new token is revoked

Nobody can call back a request that a server or a network holds. So the storage keeps each revoked
token, as revoked/TOKEN, with the PRIMARY that replaces it. The PRIMARY in force is that of the
storage, or the one that replaces it.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from printable import shell_word
from store.atomic_write import READ_ONLY, write_atomically
from store.errors import FencedError, StoreError, UnavailableError
from store.run_names import BRING_MARKER, MANIFEST, PRIMARY, REVOKED
from store.storage import Storage, open_storage, read_or_none
from store.untrusted import json_values
from store.untrusted.file_access import MAX_MANIFEST_BYTES, MAX_TEXT_BYTES, read_bytes, status

BEFORE = "before"
TOKEN = re.compile("[0-9a-f]{32}")
SHOWN_CHARACTERS = 200  # of a text that another machine wrote


@dataclass(frozen=True, kw_only=True, slots=True)
class Primary:
    """The content of PRIMARY. Two are the same directory's if their tokens are equal."""

    token: str  # "" if the file is damaged: equal to no other
    where: str = ""
    past: tuple[str, ...] = ()
    is_whole: bool = True  # False while the run is brought
    before: Primary | None = None  # None also if the storage had none
    data: bytes = field(default=b"", compare=False)  # of the file

    @classmethod
    def new(cls, root: Path, **more: object) -> Primary:
        """Return a new one for a directory. `more` are further fields of the file."""
        where = f"{root} on {socket.gethostname()}"
        content = {"token": uuid.uuid4().hex, "where": where, **more}
        return cls.parse(json.dumps(content).encode())

    @classmethod
    def of_token(cls, token: str) -> Primary:
        return cls.parse(json.dumps({"token": token}).encode())

    @classmethod
    def parse(cls, data: bytes) -> Primary:
        try:
            content = json_values.parse_object(data)
        except ValueError:
            content = {}
        token, where, past = (content.get(name) for name in ("token", "where", "past"))
        before = content.get(BEFORE)
        older = past if isinstance(past, list) else []
        return cls(
            token=token if isinstance(token, str) and TOKEN.fullmatch(token) else "",
            where=where[:SHOWN_CHARACTERS] if isinstance(where, str) else "another directory",
            past=tuple(one for one in older if isinstance(one, str)),
            is_whole=BEFORE not in content,
            before=cls.parse(before.encode()) if isinstance(before, str) else None,
            data=data,
        )

    def is_same(self, other: Primary | None) -> bool:
        return other is not None and bool(self.token) and self.token == other.token

    def last_whole(self) -> Primary | None:
        """Return this one, or the one before it if this one is not whole."""
        return self if self.is_whole else self.before

    def finished(self) -> Primary:
        """Return it as that of a run that was brought whole."""
        content = json_values.parse_object(self.data)
        kept = {name: value for name, value in content.items() if name != BEFORE}
        return replace(self, is_whole=True, before=None, data=json.dumps(kept).encode())


# Replaces a revoked token: the storage had no PRIMARY, or it is not known whose.
NO_OWNER = Primary(token="", where="another directory")


def take(root: Path, storage: Storage, *, primary: Primary | None = None) -> None:
    """Make `root` the primary directory, and no other any longer. Raises StoreError."""
    primary = primary or Primary.new(root)
    # Killed in between, the directory is not the primary one, and the run is brought there again.
    write_atomically(root / PRIMARY, primary.data, mode=READ_ONLY, beneath=root)
    _write(root, storage, primary)


@contextmanager
def taken(root: Path, storage: Storage) -> Iterator[None]:
    """Make `root` the primary directory. If the block fails, restore the one before it.

    Raises StoreError. `root` stays the primary directory if the storage does not answer then.
    """
    found = _stored(storage)
    if (instead := _instead_of(storage, found)) not in (None, NO_OWNER):
        found = instead
    before = found.last_whole() if found is not None else None
    past = [token for one in (found, before) if one is not None for token in (one.token, *one.past)]
    more = {BEFORE: None if before is None else before.data.decode(errors="replace")}
    primary = Primary.new(root, **more, past=list(dict.fromkeys(filter(None, past))))
    try:
        take(root, storage, primary=primary)
        yield
        _finish(root, storage)
    except BaseException:
        with suppress(OSError, StoreError):
            here = _local(root)
            # and no third directory is by now
            if here is not None and here.is_same(_stored(storage)):
                if before is None:
                    storage.remove(PRIMARY)
                else:
                    storage.write(PRIMARY, before.data)
        raise


def _finish(root: Path, storage: Storage) -> None:
    """Forget the primary directory before this one. Raises FencedError if there is another now."""
    finished = _finished(root, storage)
    _write(root, storage, finished)
    write_atomically(root / PRIMARY, finished.data, mode=READ_ONLY, beneath=root)


def _finished(root: Path, storage: Storage) -> Primary:
    """Return PRIMARY without the one before it. Raises FencedError if another is in force."""
    in_force, here = _in_force(storage), _local(root)
    if here is None or not here.is_same(in_force):
        where = NO_OWNER.where if in_force is None else in_force.where
        raise FencedError(f"the run was brought to {where} meanwhile, and goes on there")
    return here.finished()


def _write(root: Path, storage: Storage, primary: Primary) -> None:
    """Write PRIMARY of a directory into the storage. Raises StoreError: the token is revoked."""
    try:
        storage.write(PRIMARY, primary.data)
    except BaseException:
        with suppress(OSError, StoreError):
            revoke(root, storage)
        raise


def revoke(root: Path, storage: Storage, *, instead: Primary | None = None) -> None:
    """Revoke the token of a directory: the PRIMARY before it is in force again.

    `instead` is, if PRIMARY of the directory names none before it. Raises StoreError.
    """
    here = _local(root)
    if here is not None and here.token:
        replaced_by = here.before or instead or NO_OWNER
        storage.write(f"{REVOKED}/{here.token}", replaced_by.data)


def shown_by(storage: Storage) -> str | None:
    """Return the token of the directory that has shown readers a run, None if none has.

    Raises UnavailableError.
    """
    data = read_or_none(storage, MANIFEST, at_most=MAX_MANIFEST_BYTES)
    try:
        return json_values.text(json_values.parse_object(data or b""), "primary")
    except ValueError:
        return None


def token_of(root: Path) -> str | None:
    """Return the token of a directory, None if it has none."""
    here = _local(root)
    return None if here is None else here.token or None


def is_past(root: Path, token: str) -> bool:
    """Return whether a token was that of a primary directory before this one."""
    here = _local(root)
    return here is not None and token in here.past


def is_primary(root: Path, storage: Storage) -> bool:
    """Return whether a directory is the primary one of a run in a storage. Raises StoreError."""
    here = _local(root)
    return here is not None and here.is_same(_in_force(storage))


def check(root: Path, uri: str) -> Primary:
    """Return the PRIMARY in force at `uri`. Raises FencedError if it is another directory's.

    Raises StoreError if neither says whose run it is. Raises UnavailableError, also if only the
    storage has no PRIMARY: a volume that is not mounted looks like that.
    """
    storage = open_storage(uri)
    in_force, here = _in_force(storage), _local(root)
    if here is None and in_force in (None, NO_OWNER):
        raise StoreError(
            f"{root / PRIMARY} is not there; restore it from a backup of the directory, or go on "
            f"in a new one: gigpo train --resume {shell_word(uri)} run_dir=NEW"
        )
    if in_force is None:
        raise UnavailableError(
            f"{storage.locate(PRIMARY)} is not there; mount the volume, or check the "
            f"URI. If it was removed, copy {root / PRIMARY} there"
        )
    if here is not None:
        is_free = in_force is NO_OWNER and _instead_of(storage, here) is None
        if is_free:  # and not of a directory where the run was before
            is_free = shown_by(storage) in (None, here.token, *here.past)
        if is_free or here.is_same(in_force) or here.data == in_force.data:
            return in_force
    how = "was brought" if in_force.is_whole else "was brought (whole or in part)"
    raise FencedError(
        f"the run of {root} {how} to {in_force.where} and goes on there; stop this one. "
        "To bring it back to this machine, stop that one: gigpo train --resume "
        f"{shell_word(uri)} run_dir=NEW"
    )


def repair(root: Path, uri: str, in_force: Primary) -> None:
    """Write PRIMARY of the primary directory as it is to be. `in_force`: see `check`.

    Raises StoreError.
    """
    storage, here = open_storage(uri), _local(root)
    assert here is not None, "`check` refuses a directory without PRIMARY"
    if in_force is NO_OWNER:  # another run took the storage at the same time, and was refused
        storage.write(PRIMARY, here.data)
    elif not here.is_whole and status(root / BRING_MARKER, root=root) is None:
        # It was brought whole, and killed before it said so. The token is not revoked if this
        # fails: the run goes on here.
        finished = _finished(root, storage)
        storage.write(PRIMARY, finished.data)
        write_atomically(root / PRIMARY, finished.data, mode=READ_ONLY, beneath=root)


def _in_force(storage: Storage) -> Primary | None:
    """Return the PRIMARY in force, None if the storage has none. Raises UnavailableError."""
    stored = _stored(storage)
    # Also for the directory whose token it is: it may be whole, of a bring that was killed then.
    return _instead_of(storage, stored) or stored


def _instead_of(storage: Storage, primary: Primary | None) -> Primary | None:
    """Return the PRIMARY that replaces a revoked one, None for any other."""
    instead: Primary | None = None
    seen: set[str] = set()
    # The one that replaces it may have been revoked as well: two brings of one outage.
    while primary is not None and primary.token and primary.token not in seen:
        seen.add(primary.token)
        data = read_or_none(storage, f"{REVOKED}/{primary.token}", at_most=MAX_TEXT_BYTES)
        if data is None:
            break
        primary = instead = Primary.parse(data) if data else NO_OWNER
    return instead


def _stored(storage: Storage) -> Primary | None:
    data = read_or_none(storage, PRIMARY, at_most=MAX_TEXT_BYTES)
    return Primary.parse(data) if data else None


def _local(root: Path) -> Primary | None:
    try:
        data = read_bytes(root / PRIMARY, root=root, at_most=MAX_TEXT_BYTES)
    except FileNotFoundError:
        return None
    return Primary.parse(data)

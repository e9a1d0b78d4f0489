"""Sign the runs that this user made. Settings are followed in signed runs only.

    sign_run(run)         # by the process that makes a run, or trusts one
    signed_texts(run)     # its settings, if this user made it; also of a copy, and after a move

The owner of a file proves nothing, because a run that was unpacked belongs to the user who unpacked
it. So each user has a key of 32 random bytes that nobody else can read. RUN/signed.json holds an
HMAC-SHA256 with that key of run.json, and of each config.yaml that the run was started with.
Somebody else can copy a signature only together with the very text that it signs, and it does not
fit in a directory of theirs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from store.atomic_write import PRIVATE, write_atomically_in, write_once
from store.errors import StoreError, UnsafePathError
from store.run_names import CONFIG_FILE, RUN_JSON, SIGNED
from store.untrusted import json_values
from store.untrusted.file_access import MAX_TEXT_BYTES, read_bytes_in
from store.untrusted.own_directory import (
    check_own_directory,
    is_other_user,
    make_own_directory,
    opened_by_own_links,
)

KEY_BYTES = 32
KEY_NAME = "key"
OWN_STATE = "set XDG_STATE_HOME to a directory of yours"
MAX_SIGNATURES = 1000  # of config.yaml: the newest starts, far more than a run has
MAX_SIGNED_BYTES = 1 << 20
SIGNATURE = re.compile(r"[0-9a-f]{64}")


def user_directory(variable: str, *, default: str) -> Path:
    """Return this user's directory for our state or cache: $VARIABLE, by default ~/`default`."""
    given = os.environ.get(variable, "")
    home = Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / default
    return home / "async-gigpo"


def state_directory() -> Path:
    """Return the directory of this user's key."""
    return user_directory("XDG_STATE_HOME", default=".local/state")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTexts:
    """The texts of a run that a signature is of."""

    run_json: bytes
    config: bytes | None  # None: config.yaml is not there (yet)


def signed_texts(run: Path) -> RunTexts | None:
    """Return the texts of a run if this user signed these very bytes.

    None if not, and for a run behind a link of another user. Use these bytes, and do not read the
    files again: others may lie there by then. Raises StoreError if others can read the user's key.
    """
    texts, signed = _texts_if_signed(run)
    return texts if signed == {RUN_JSON, CONFIG_FILE} else None


def is_config_changed(run: Path) -> bool:
    """Return whether this user made the run, and its config.yaml has other settings since.

    For an error only: nothing is to be followed in such a run. Raises StoreError if others can read
    the user's key.
    """
    _, signed = _texts_if_signed(run)
    return signed == {RUN_JSON}


def _texts_if_signed(run: Path) -> tuple[RunTexts | None, set[str]]:
    """Return the texts of a run, None if they cannot be read, and which of them this user signed.

    A text that is not there counts as signed.
    """
    key = _key()
    if key is None:
        return None, set()
    try:
        with opened_by_own_links(run) as (directory, place):
            signatures, texts = set(_signed(directory, place)), texts_in(directory, place)
            owner = _owner(directory)
    except OSError:  # also for a link
        return None, set()
    of_run_json = _signatures(key, owner, texts.run_json, None)
    of_config = _signatures(key, owner, None, texts.config)
    pairs = ((RUN_JSON, of_run_json), (CONFIG_FILE, of_config))
    return texts, {name for name, needed in pairs if signatures.issuperset(needed)}


def sign_run(run: Path) -> bool:
    """Sign run.json and config.yaml as they are. Return and raise as `sign_next`."""
    key = _key() or _new_key()
    if key is None:
        return False
    with _opened_to_sign(run) as (directory, place):
        with _unreadable_is_named(run):
            texts = texts_in(directory, place)
        _add(directory, place, _signatures(key, _owner(directory), texts.run_json, texts.config))
    return True


def sign_next(run: Path, *, run_json: bytes | None = None, config: bytes | None = None) -> bool:
    """Sign texts that will be written next, and nothing else, whatever lies there.

    A run that has these signatures already is left as it is. Return False if this user can have no
    key. Raises StoreError; OSError if another user signed the run, who alone can read and write its
    signed.json.
    """
    key = _key() or _new_key()
    if key is None:
        return False
    with _opened_to_sign(run) as (directory, place):
        _add(directory, place, _signatures(key, _owner(directory), run_json, config))
    return True


def add_signatures(run: Path, signed: bytes) -> None:
    """Add the signatures of another signed.json of this run. Raises StoreError."""
    with _opened_to_sign(run) as (directory, place):
        ours = _signed(directory, place)
        others = [one for one in _parsed(signed) if one not in ours]
        if others or not ours:
            _write(directory, place, others + ours)


@contextmanager
def _opened_to_sign(run: Path) -> Iterator[tuple[int, Path]]:
    """Give the descriptor of the run's directory, and its path without links.

    Whatever is read, compared and written belongs to this one descriptor. The owner of the path can
    lead it elsewhere at any moment, for example to a run whose signatures would be replaced.
    """
    with ExitStack() as opened:
        with _unreadable_is_named(run):
            directory, place = opened.enter_context(opened_by_own_links(run))
        yield directory, place


@contextmanager
def _unreadable_is_named(run: Path) -> Iterator[None]:
    try:
        yield
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot sign {run}: {error.strerror}; it is no run, or cannot be read"
        ) from error


def _add(directory: int, place: Path, new: list[str]) -> None:
    """Add signatures to a run, the newest last, if it has not got them all."""
    signed = _signed(directory, place)
    if not set(new) <= set(signed):
        _write(directory, place, [one for one in signed if one not in new] + new)


def _write(directory: int, place: Path, signatures: list[str]) -> None:
    content = json.dumps({"signatures": signatures[-MAX_SIGNATURES:]}, indent=1)
    # Whoever can copy it, with the two files that it signs, can build another run around them.
    write_atomically_in(directory, SIGNED, content.encode(), mode=PRIVATE, path=place / SIGNED)


def texts_in(directory: int, place: Path) -> RunTexts:
    """Return the texts of the run whose directory is open, and lies at `place`.

    Raises OSError, UnsafePathError for a link.
    """
    run_json, config = _read(directory, place / RUN_JSON, at_most=MAX_TEXT_BYTES), None
    with suppress(FileNotFoundError):
        config = _read(directory, place / CONFIG_FILE, at_most=MAX_TEXT_BYTES)
    return RunTexts(run_json=run_json, config=config)


def _owner(directory: int) -> str:
    """Return the owner of a run's directory for its signature, "" for this user and root.

    Somebody else can copy the signed files into a directory of their own, and build another run
    around them. It has another owner, so the signatures do not fit it.
    """
    uid = os.fstat(directory).st_uid
    return f"uid {uid} " if is_other_user(uid) else ""


def _signatures(key: bytes, owner: str, run_json: bytes | None, config: bytes | None) -> list[str]:
    texts = {RUN_JSON: run_json, CONFIG_FILE: config}
    return [
        _signature(key, name=f"{owner}{name}", text=text)
        for name, text in texts.items()
        if text is not None
    ]


def _signature(key: bytes, *, name: str, text: bytes) -> str:
    return hmac.new(key, f"async-gigpo {name}\0".encode() + text, hashlib.sha256).hexdigest()


def _signed(directory: int, place: Path) -> list[str]:
    try:
        return _parsed(_read(directory, place / SIGNED, at_most=MAX_SIGNED_BYTES))
    except FileNotFoundError:
        return []


def _read(directory: int, path: Path, *, at_most: int) -> bytes:
    return read_bytes_in(directory, path.name, path=path, at_most=at_most)


def _parsed(signed: bytes) -> list[str]:
    """Return the signatures of a signed.json. Skip malformed ones."""
    try:
        texts = json_values.texts(json_values.parse_object(signed), "signatures")
    except ValueError:
        return []
    return list(filter(SIGNATURE.fullmatch, texts))


def _key() -> bytes | None:
    """Return this user's key, None if there is none.

    Raises StoreError if others may know it, or could put another in its place.
    """
    path = state_directory() / KEY_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found, key = os.fstat(descriptor), file.read(KEY_BYTES + 1)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077 or len(key) != KEY_BYTES:
        raise StoreError(
            f"{path} is not this user's alone, or not a key; remove it: "
            "the next new run makes another"
        )
    check_own_directory(path.parent, with_ancestors=True, instead=OWN_STATE)
    return key


def _new_key() -> bytes | None:
    """Make this user's key. Return it, or the key that another process made meanwhile.

    Return None if no key can be kept. Raises StoreError if others could put another in its place.
    """
    directory = state_directory()
    key = secrets.token_bytes(KEY_BYTES)
    try:
        check_own_directory(directory, is_made=False, with_ancestors=True, instead=OWN_STATE)
    except StoreError:
        nearest = next(path for path in (directory, *directory.parents) if os.path.lexists(path))
        if os.access(nearest, os.W_OK | os.X_OK):
            raise
        return None  # it could not be made there anyway
    try:
        make_own_directory(directory)
        check_own_directory(directory, with_ancestors=True)
        with suppress(FileExistsError):  # another process was first; its key is read below
            write_once(directory / KEY_NAME, key, mode=PRIVATE, beneath=directory)
    except (OSError, StoreError):
        return None
    return _key()

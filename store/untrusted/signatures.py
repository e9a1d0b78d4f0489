"""Sign the runs that this user made. Settings are followed in signed runs only.

    sign_run(run)                      # by the process that makes a run, or trusts one
    made_by_this_user(run)             # True, also for a copy, and after a move

The owner of a file proves nothing, because a run that was unpacked belongs to the user who unpacked
it. So each user has a key of 32 random bytes that nobody else can read. RUN/signed.json holds an
HMAC-SHA256 with that key of run.json, and of each config.yaml that the run was started with.
Somebody else can copy a signature only together with the very text that it signs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from pathlib import Path

from store.atomic_write import PRIVATE, write_atomically
from store.errors import StoreError, UnsafePathError
from store.untrusted import json_values
from store.untrusted.file_access import MAX_TEXT_BYTES, read_bytes, status

SIGNED = "signed.json"
RUN_JSON, CONFIG = "run.json", "config.yaml"
KEY_BYTES = 32
KEY_NAME = "key"
MAX_SIGNATURES = 1000  # of config.yaml: the newest starts
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


def made_by_this_user(run: Path) -> bool:
    """Return whether this user made or trusted the run, and nobody changed its settings since.

    These are run.json and config.yaml. Raises StoreError if others can read the user's key.
    """
    key = _key()
    if key is None:
        return False
    run = run.absolute()
    try:
        signed, texts = _signed(run), _texts(run)
    except OSError:  # also for a link
        return False
    return all(_signature(key, name=name, text=text) in signed for name, text in texts)


def sign_run(run: Path, *, config: bytes | None = None, run_json: bytes | None = None) -> bool:
    """Sign run.json, config.yaml, and texts that are about to become the one or the other.

    Return False if this user can have no key. Raises StoreError.
    """
    key = _key() or _new_key()
    if key is None:
        return False
    run = run.absolute()
    try:
        texts = _texts(run) if run_json is None else [(RUN_JSON, run_json)]
    except UnsafePathError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot sign {run}: {error.strerror}; it is no run, or cannot be read"
        ) from error
    if config is not None:
        texts.append((CONFIG, config))
    new = [_signature(key, name=name, text=text) for name, text in texts]
    old = [signature for signature in _signed(run) if signature not in new]
    _write(run, old + new)
    return True


def add_signatures(run: Path, signed: bytes) -> None:
    """Add the signatures of another signed.json of this run. Raises StoreError."""
    ours = _signed(run)
    _write(run, [*(one for one in _parsed(signed) if one not in ours), *ours])


def _write(run: Path, signatures: list[str]) -> None:
    content = json.dumps({"signatures": signatures[-MAX_SIGNATURES:]}, indent=1)
    # Whoever can copy it, with the two files that it signs, can build another run around them.
    write_atomically(run / SIGNED, content.encode(), mode=PRIVATE, beneath=run)


def _texts(run: Path) -> list[tuple[str, bytes]]:
    """Return the names and texts that a signature is of: run.json, and config.yaml if there."""
    names = [RUN_JSON] if status(run / CONFIG, root=run) is None else [RUN_JSON, CONFIG]
    return [(name, read_bytes(run / name, root=run, at_most=MAX_TEXT_BYTES)) for name in names]


def _signature(key: bytes, *, name: str, text: bytes) -> str:
    return hmac.new(key, f"async-gigpo {name}\0".encode() + text, hashlib.sha256).hexdigest()


def _signed(run: Path) -> list[str]:
    try:
        return _parsed(read_bytes(run / SIGNED, root=run, at_most=MAX_SIGNED_BYTES))
    except FileNotFoundError:
        return []


def _parsed(signed: bytes) -> list[str]:
    """Return the signatures of a signed.json, without texts that are none."""
    try:
        texts = json_values.texts(json_values.parse_object(signed), "signatures")
    except ValueError:
        return []
    return list(filter(SIGNATURE.fullmatch, texts))


def _key() -> bytes | None:
    """Return this user's key, None if there is none. Raises StoreError if others may know it."""
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
    return key


def _new_key() -> bytes | None:
    """Make this user's key. Return it, or the key that another process made meanwhile.

    Return None if no key can be kept.
    """
    directory = state_directory()
    aside = directory / f".{KEY_NAME}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(aside, directory / KEY_NAME)
        except FileExistsError:
            pass  # another process was first; its key is read below
        finally:
            os.unlink(aside)
    except OSError:
        return None
    return _key()

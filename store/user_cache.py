"""This user's cache: directories that nobody else may enter.

directory = own_cache("runs", "a1b2")    # ~/.cache/async-gigpo/runs/a1b2
with private_directory("gigpo-") as directory: ...    # a new one, for a while
keep_compiled_code()                     # before anything imports transformers or vLLM
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from store.errors import StoreError
from store.untrusted.file_access import is_directory
from store.untrusted.own_directory import check_own_directory, make_own_directory
from store.untrusted.signatures import user_directory

# torch loads what is in this directory as code. Its default has a name in /tmp that another user
# can take first, and torch makes it when transformers or vLLM import it.
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
TEMPORARY = "gigpo-compiled-"  # how the name of a directory for it begins, if there is no cache


def own_cache(*names: str) -> Path:
    """Return the directory of these names in this user's cache, made if it is not there.

    Nobody else may enter it. Raises StoreError for a link, and for a directory of another user, or
    one in which everybody may exchange files, anywhere above it: they could put another in its
    place.
    """
    ours = user_directory("XDG_CACHE_HOME", default=".cache")
    directory = ours.joinpath(*names)
    instead = "set XDG_CACHE_HOME to a directory of yours"
    try:
        check_own_directory(ours, is_made=False, with_ancestors=True, instead=instead)
        make_own_directory(ours.parent)
        for made in accumulate(names, Path.joinpath, initial=ours):
            made.mkdir(mode=0o700, exist_ok=True)
            is_ours = is_directory(made, root=ours.parent)
            if not is_ours or made.stat().st_uid != os.geteuid():
                raise StoreError(
                    f"{made} is a link or another user's; remove it, or set XDG_CACHE_HOME"
                )
        check_own_directory(directory, with_ancestors=True, instead=instead)
    except OSError as error:
        raise StoreError(f"cannot make {directory}: {error.strerror}; {instead}") from error
    return directory


@contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """Give a new directory that nobody else may enter or exchange, and remove it at the end.

    It is a temporary one, or lies in this user's cache if somebody else may exchange what is in
    TMPDIR. Raises StoreError.
    """

    def made(place: Path | None) -> Path:
        return Path(opened.enter_context(TemporaryDirectory(prefix=prefix, dir=place)))

    with ExitStack() as opened:
        try:
            directory = made(None)
            try:
                check_own_directory(directory, with_ancestors=True)
            except StoreError:
                directory = made(own_cache("copies"))
        except OSError as error:
            text = f"no temporary directory can be made: {error.strerror}; set TMPDIR"
            raise StoreError(text) from error
        yield directory


def keep_compiled_code() -> None:
    """Have torch keep code in this user's cache, in this process and those that it starts.

    A value that is there is replaced: torch sets its default in a process that imports it, for all
    processes after it. A user without a cache gets a new directory in the temporary one, which
    nobody else may enter. It stays: another user could take its name while a process still uses it.
    Raises StoreError if that cannot be had either.
    """
    try:
        directory = own_cache("compiled")
    except StoreError:
        directory = _temporary()
    os.environ[COMPILED] = str(directory)


def _temporary() -> Path:
    """Return the temporary directory of the process that started this one, or a new one."""
    instead = "set XDG_CACHE_HOME to a directory of yours"
    given = Path(os.environ.get(COMPILED, ""))
    try:
        if not given.name.startswith(TEMPORARY) or not given.is_dir():
            given = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        check_own_directory(given, with_ancestors=True, instead=instead)
    except OSError as error:
        raise StoreError(f"cannot keep compiled code: {error.strerror}; {instead}") from error
    return given

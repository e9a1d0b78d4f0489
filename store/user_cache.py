"""This user's cache: directories that nobody else may enter.

directory = own_cache("runs", "a1b2")    # ~/.cache/async-gigpo/runs/a1b2
with private_directory("gigpo-") as directory: ...    # a new one, for a while
keep_compiled_code()                     # before anything imports transformers or vLLM
compile_elsewhere()                      # the same for Triton, where a model is computed
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from store.atomic_write import write_atomically
from store.errors import StoreError
from store.untrusted.file_access import is_directory
from store.untrusted.own_directory import check_own_directory, make_own_directory
from store.untrusted.signatures import user_directory

# torch loads what is in this directory as code. Its default has a name in /tmp that another user
# can take first, and torch makes it when transformers or vLLM import it.
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
COMPILER = "CC"  # Triton's, for its launchers
TEMPORARY = "gigpo-compiled-"  # how the name of a directory for it begins, if there is no cache
OWN_CACHE = "set XDG_CACHE_HOME to a directory of yours"
MAX_AGE_S = 24 * 3600.0  # of a copy that a command reads


def own_cache(*names: str) -> Path:
    """Return the directory of these names in this user's cache, made if it is not there.

    Nobody else may enter it. Raises StoreError for a link, and for a directory of another user, or
    one in which everybody may exchange files, anywhere above it: they could put another in its
    place.
    """
    ours = user_directory("XDG_CACHE_HOME", default=".cache")
    directory = ours.joinpath(*names)
    try:
        check_own_directory(ours, is_made=False, with_ancestors=True, instead=OWN_CACHE)
        make_own_directory(ours.parent)
        for made in accumulate(names, Path.joinpath, initial=ours):
            made.mkdir(mode=0o700, exist_ok=True)
            is_ours = is_directory(made, root=ours.parent)
            if not is_ours or made.stat().st_uid != os.geteuid():
                raise StoreError(
                    f"{made} is a link or another user's; remove it, or set XDG_CACHE_HOME"
                )
        check_own_directory(directory, with_ancestors=True, instead=OWN_CACHE)
    except OSError as error:
        raise StoreError(f"cannot make {directory}: {error.strerror}; {OWN_CACHE}") from error
    return directory


@contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """Give a new directory that nobody else may enter or exchange, and remove it at the end.

    It lies in this user's cache: where TMPDIR leads to a directory of a group, its members could
    put a link in its place. Without a cache it is a temporary one. Raises StoreError.
    """
    with ExitStack() as opened:
        try:
            place = own_cache("copies")
            _remove_old(place)
        except StoreError:
            place = None
        try:
            # NFS keeps a name for a file that is still mapped: `_remove_old` removes it later.
            made = Path(
                opened.enter_context(
                    TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True)
                )
            )
        except OSError as error:
            where = place or tempfile.gettempdir()
            raise StoreError(
                f"no directory can be made in {where}: {error.strerror}; {OWN_CACHE}"
            ) from error
        check_own_directory(made, with_ancestors=True, instead=OWN_CACHE)
        yield made


def _remove_old(place: Path) -> None:
    """Remove what commands that were killed left there."""
    for left in place.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > MAX_AGE_S:
                shutil.rmtree(left, ignore_errors=True)


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


def compile_elsewhere() -> None:
    """Have torch and Triton compile in this user's cache, in this process and those that it starts.

    Where nothing can be written there, Triton finds no compiler. Nothing needs it on a CPU. Raises
    StoreError as `keep_compiled_code`.
    """
    keep_compiled_code()
    try:
        os.environ.update(compiler_elsewhere(os.environ))
    except StoreError:
        os.environ[COMPILER] = str(Path(os.environ[COMPILED], "cannot be written"))


def compiler_elsewhere(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which Triton links in the directory of `keep_compiled_code`.

    It starts the compiler in the current directory, which may be a stranger's, and loads what comes
    out. A script of gcc's own names `libgcc_s.so.1`, and GNU ld looks in the current directory
    first for it. Returns no variables where Triton would find no compiler. Raises StoreError.
    """
    compiler = environ.get(COMPILER) or shutil.which("gcc") or shutil.which("clang")
    script = Path(environ[COMPILED], "cc")
    found = None if compiler is None else shutil.which(compiler)
    if found is None or found == str(script):  # Triton runs no program with arguments either
        return {}
    command = shlex.quote(os.path.abspath(found))
    text = f'#!/bin/sh\ncd {shlex.quote(str(script.parent))} && exec {command} "$@"\n'
    write_atomically(script, text.encode(), mode=0o700, beneath=script.parent)
    return {COMPILER: str(script)}


def _temporary() -> Path:
    """Return the temporary directory of the process that started this one, or a new one."""
    given = Path(os.environ.get(COMPILED, ""))
    try:
        if not given.name.startswith(TEMPORARY) or not given.is_dir():
            given = Path(tempfile.mkdtemp(prefix=TEMPORARY))
        check_own_directory(given, with_ancestors=True, instead=OWN_CACHE)
    except OSError as error:
        raise StoreError(f"cannot keep compiled code: {error.strerror}; {OWN_CACHE}") from error
    return given

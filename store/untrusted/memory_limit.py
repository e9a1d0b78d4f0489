"""Bound the memory of this process while it reads a run that somebody else made.

    with limited_memory([Path("runs/a")]):
        check_run(Path("runs/a"), quick=False)

Each reader has bounds of its own: for pages, rows, texts and files. This limit holds for what
they forget. On Linux it counts all private memory of the process. Other systems do not enforce it.
Child processes for queries set their own limit.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from store.errors import StoreError, is_out_of_memory
from store.untrusted.trust import is_trusted

SHARE_OF_FREE_MEMORY = 0.5
LEAST_BYTES = 1 << 30
GIB, KIB = 1 << 30, 1 << 10


@contextmanager
def limited_memory(places: Iterable[Path]) -> Iterator[None]:
    """Let this process allocate half of the free memory, if a place is not this user's run.

    It is 1 GiB at least. A limit that was set with ulimit stays, if it is below the machine's
    memory. Raises StoreError where memory does not suffice.
    """
    foreign = next((place for place in places if not _is_ours(place)), None)
    if foreign is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = _limit_bytes(soft)
    # Only the soft limit: it is lifted at the end, and children may set theirs.
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise StoreError(
            f"reading {foreign} takes more than {limit_bytes / GIB:.1f} GiB, the limit for a run "
            "that was not made by you on this machine; if you know who made it, add --trust where "
            f"the command has it, or set a limit of your own: ulimit -d {2 * limit_bytes // KIB}"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _is_ours(place: Path) -> bool:
    try:
        return is_trusted(place)
    except (OSError, StoreError):  # a key that others know vouches for nothing
        return False


def _limit_bytes(soft: int) -> int:
    """Return the limit of RLIMIT_DATA, which counts what the process has already too."""
    memory = psutil.virtual_memory()
    if soft != resource.RLIM_INFINITY and soft < memory.total:
        return soft
    more = max(LEAST_BYTES, int(memory.available * SHARE_OF_FREE_MEMORY))
    return more + getattr(psutil.Process().memory_info(), "data", 0)

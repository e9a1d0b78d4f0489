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
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from store.errors import StoreError, is_out_of_memory
from store.untrusted.trust import is_trusted

SHARE_OF_FREE_MEMORY = 0.5  # the other half is for a run that may be training beside it
LEAST_BYTES = 1 << 30  # a command takes a fifth of it for an ordinary run
GIB, KIB = 1 << 30, 1 << 10
CONTROL_GROUPS = Path("/sys/fs/cgroup")


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


def limit_memory() -> None:
    """Let this process allocate half of the free memory from now on: other users can ask it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_limit_bytes(soft), hard))


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
    return allowed_bytes() + getattr(psutil.Process().memory_info(), "data", 0)


def allowed_bytes() -> int:
    """Return the memory that a process which reads a stranger's run may take beside its own."""
    available = psutil.virtual_memory().available
    free = min(available, *_free_in_groups(CONTROL_GROUPS, Path("/proc/self/cgroup")))
    return max(LEAST_BYTES, int(free * SHARE_OF_FREE_MEMORY))


def _free_in_groups(root: Path, own: Path) -> list[int]:
    """Return what each control group of this process may still use, as a container has them.

    `own` is as /proc/self/cgroup. Groups without a limit, and systems without groups, give none.
    """
    free: list[int] = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, name = line.split(":", maxsplit=2)
            if "memory" in controllers.split(","):
                most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
                together = root / controllers  # several controllers may share a mount
                group = together if together.is_dir() else root / "memory"
            elif not controllers:
                most, used, group = "memory.max", "memory.current", root
            else:
                continue
            # In a container the name may be the host's, and the group is mounted at the top.
            for directory in (group, *_along(group, name)):
                with suppress(OSError, ValueError):  # no such group, or "max": no limit
                    limit = int((directory / most).read_text())
                    taken = int((directory / used).read_text()) - _cached_files(directory)
                    free.append(max(0, limit - taken))
    return free


def _cached_files(group: Path) -> int:
    """Return the bytes of a group's page cache that the kernel gives back first, 0 if unknown."""
    with suppress(OSError, ValueError):
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return 0


def _along(top: Path, name: str) -> Iterator[Path]:
    """Yield each directory from below `top` to the group of this name."""
    for part in Path(name).parts[1:]:
        top /= part
        yield top

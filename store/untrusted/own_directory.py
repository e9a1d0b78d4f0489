"""Look who could lead a path elsewhere: who owns a directory, and the links on the way to it.

check_own_directory(run)    # before anything is written or removed there
belongs_to_other_user(file)
links_and_end(file)         # where the path leads
make_own_directory(cache)   # for this user alone, with what is missing above it
with opened_by_own_links(run) as (directory, place): ...    # before its files are believed
with open(open_file_by_own_links(file), "rb") as model: ... # before it is copied
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from path_bounds import MAX_FILES, MAX_NAMES, leads_far
from store.errors import StoreError, UnsafePathError

MAX_LEVELS = 8  # of a model's directories; it has one or two
MAX_LINKS = 40  # on the way to a directory; Linux follows as many
NOBODY = 65534  # whom Linux shows as the owner if a user namespace does not know the user
ALL_USERS = ["0", "0", str(2**32 - 1)]  # /proc/self/uid_map outside of every user namespace
# Systems that do not have O_PATH open no link, so none is followed there.
_ON_THE_WAY = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A directory, or a link, through which a path leads."""

    path: Path
    is_link: bool
    owner: int
    anyone_may_add_beside_it: bool  # everybody may make files in the directory that has it
    anyone_may_exchange_in_it: bool  # everybody may exchange what is in it
    anyone_may_read_it: bool  # everybody may enter it, or read it if it is a file

    @property
    def is_another_users(self) -> bool:
        """Return whether its owner is neither this user nor root.

        For root it is False: what a container mounts has owners outside of it.
        """
        return is_other_user(self.owner)

    @property
    def is_nobodys(self) -> bool:
        """Return whether its owner has no number here: root's files in many containers."""
        return self.owner == NOBODY and _has_unknown_users()

    @property
    def can_be_led_elsewhere(self) -> bool:
        """Return whether another user could exchange what lies in it. For root it is False."""
        if os.geteuid() == 0 or self.is_link:
            return False
        return self.anyone_may_exchange_in_it or (self.is_another_users and not self.is_nobodys)


def check_own_directory(
    path: Path,
    *,
    may_be_anothers: bool = False,
    is_made: bool = True,
    with_ancestors: bool = False,
    instead: str = "give a directory of your own",
) -> None:
    """Raise StoreError for a directory of another user, or one behind a link of theirs.

    They could exchange what is in it, and links would lead what is written and removed there to
    other files. On the way to it, each link must be ours, and so must whatever lies in a directory
    in which everybody may make files, such as /tmp: `/tmp/ours` of `/tmp/ours/run`. With
    `may_be_anothers` the directory itself may be another user's, as of a run that this user trusts,
    but not in such a directory: there they could put a link in its place.

    Call it after the directory was made: somebody else may have made it just before. From then on
    nobody else can exchange it. If not `is_made`, it may be absent, and only what is on the way is
    looked at; the next call must come before anything is written or removed there. Root's
    directories pass. So does everything for root.

    If `with_ancestors`, every directory on the way must be ours or root's, and none may be one in
    which everybody may exchange files: with code or a key in it, its owner could wait for months.
    """
    entries, descriptor = _walk_to(path)
    if descriptor is not None:
        os.close(descriptor)
    for entry in entries:
        is_it = descriptor is not None and entry is entries[-1]
        must_be_ours = (
            entry.is_link or entry.anyone_may_add_beside_it or (is_it and not may_be_anothers)
        )
        is_refused = with_ancestors and entry.can_be_led_elsewhere
        if (must_be_ours or is_refused) and entry.is_another_users:
            raise StoreError(
                f"{entry.path} belongs to another user (uid {entry.owner}), who could exchange "
                f"what a run keeps there; {instead}"
            )
        if is_refused:
            raise StoreError(
                f"every user may write in {entry.path}, and could exchange what is kept there; "
                f"take that right away (chmod o-w), or {instead}"
            )
    if is_made and descriptor is None:
        # Not passed over: another user's may be there a moment later.
        raise StoreError(f"{path} is not there (any more), or no directory; {instead}")


def belongs_to_other_user(path: Path) -> bool:
    """Return whether what lies there, also a link, belongs to neither this user nor root.

    False for root, for whom everything passes, and if nothing is there.
    """
    try:
        owner = path.lstat().st_uid
    except OSError:
        return False
    return is_other_user(owner)


def is_other_user(owner: int) -> bool:
    """Return whether a user id is neither this user's nor root's. False for root."""
    me = os.geteuid()
    return me != 0 and owner not in (me, 0)


def links_and_end(path: Path) -> list[Path]:
    """Return the true path of each link through which `path` leads, in order, and of its end.

    What is named before a `..` is passed only if a link lies there.
    """
    links: list[Path] = []
    names, place = list(reversed(path.absolute().parts)), Path("/")
    while names:
        name = names.pop()
        at = place.parent if name == ".." else place / name
        if at.is_symlink() and len(links) < MAX_LINKS:
            links.append(at)
            names += reversed(Path(os.readlink(at)).parts)
        else:
            place = at
    return [*links, place]


def make_own_directory(directory: Path) -> None:
    """Make a directory, and those above it that are missing, for this user alone.

    Raises OSError. A umask of 000 would leave those above it to everybody.
    """
    for path in (*reversed(directory.parents), directory):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def opened_by_own_links(path: Path, *, may_lead_home: bool = False) -> Iterator[tuple[int, Path]]:
    """Give the descriptor of a directory, and its path without links.

    Raises UnsafePathError for a link of another user, anywhere on the way: they could lead it
    elsewhere between two looks. With `may_lead_home` it may lead to a directory of theirs, where
    they could show anything as well. Root's links pass. So does everything for root.
    """
    entries, descriptor = _walk_to(path)
    if descriptor is None:
        raise FileNotFoundError(errno.ENOENT, "no directory is there", str(path))
    try:
        owner = os.fstat(descriptor).st_uid if may_lead_home else None
        instead = f"give the path behind it: {entries[-1].path}"
        _check_links(entries, but_of=owner, instead=instead)
        yield descriptor, entries[-1].path
    finally:
        os.close(descriptor)


def open_file_by_own_links(path: Path) -> int:
    """Return the descriptor of a regular file, which the caller closes.

    The caller may copy the file to where others can read it. So a link of another user, anywhere on
    the way, may lead only to a file of theirs, or to one that everybody can read. Raises OSError;
    UnsafePathError for any other link of theirs, and for what is no regular file.
    """
    entries, descriptor = _walk_to(path, is_end=stat.S_ISREG)
    if descriptor is None:
        if os.path.exists(path):
            raise UnsafePathError(errno.EINVAL, f"{path} is no regular file; remove it")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        if not all(entry.anyone_may_read_it for entry in entries):
            instead = f"copy what you need of {path.parent} to a directory of your own"
            _check_links(entries, but_of=os.fstat(descriptor).st_uid, instead=instead)
        # Whoever has the file may hold up those who open it for 45 s, again and again: a lease.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            return os.open(f"/proc/self/fd/{descriptor}", flags)
        except BlockingIOError as error:
            text = f"{path} is held by a lease of another program; copy the model, or ask its owner"
            raise UnsafePathError(error.errno, text) from error
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def check_file_links(directory: Path) -> None:
    """Raise UnsafePathError for a file that `open_file_by_own_links` does not open, however deep.

    And for what is beyond the bounds of `all_in`. Files that this user may not read are passed
    over. Call it before a library opens files by their paths. It does not help if somebody
    exchanges one afterwards.
    """
    for path, is_directory in all_in(directory, skips_unreadable=True):
        with suppress(PermissionError):
            if not is_directory and path.is_file():
                os.close(open_file_by_own_links(path))


def all_in(directory: Path, *, skips_unreadable: bool = False) -> Iterator[tuple[Path, bool]]:
    """Yield what lies in a directory and in those below it, and whether it is a directory.

    Links are followed. A directory comes before its content. Raises OSError; UnsafePathError after
    MAX_FILES, below MAX_LEVELS, and for a link through more than MAX_NAMES, also if somebody makes
    more of them meanwhile.
    """
    passing_over = suppress(PermissionError) if skips_unreadable else nullcontext()
    waiting, n_found = [(directory, MAX_LEVELS)], 0
    while waiting:
        here, n_levels = waiting.pop()
        if n_levels == 0:
            text = f"{here} lies too deep, or links lead round in a circle; remove them"
            raise UnsafePathError(errno.ELOOP, text)
        names: list[str] = []
        with passing_over, os.scandir(here) as entries:
            names = [entry.name for entry in islice(entries, MAX_FILES + 1)]
        n_found += len(names)
        if n_found > MAX_FILES:
            text = f"{directory} has more than {MAX_FILES:,} files and directories"
            raise UnsafePathError(errno.EFBIG, f"{text}; give the one of the model alone")
        for path in (here / name for name in names):
            is_directory = False
            with passing_over:
                if path.is_symlink() and leads_far(path):
                    raise _far(path)
                is_directory = path.is_dir()
            yield path, is_directory
            if is_directory:
                waiting.append((path, n_levels - 1))


def _far(path: Path) -> UnsafePathError:
    text = f"{path} leads through more than {MAX_NAMES} names; give a shorter path"
    return UnsafePathError(errno.ELOOP, text)


def _check_links(entries: Sequence[_Entry], *, but_of: int | None, instead: str) -> None:
    """Raise UnsafePathError for a link of another user, unless they are `but_of`."""
    for entry in entries:
        if entry.is_link and entry.is_another_users and entry.owner != but_of:
            text = f"{entry.path} is a link of another user (uid {entry.owner})"
            raise UnsafePathError(errno.ELOOP, f"{text}, who can lead it elsewhere; {instead}")


def _walk_to(
    path: Path, *, is_end: Callable[[int], bool] = stat.S_ISDIR
) -> tuple[list[_Entry], int | None]:
    """Go to a directory one name after the other, as the system does. `is_end`: or to a file.

    Return what lies on the way, the directory itself at the end, and a descriptor of it, which the
    caller closes; None if no directory is there. Each name is looked up in the very directory that
    was looked at before, so nobody can exchange one meanwhile.
    """
    with suppress(OSError):
        os.stat(path)  # mounts what is mounted at its first use, which O_PATH does not
    entries: list[_Entry] = []
    names, n_links, n_names = list(reversed(path.absolute().parts)), 0, 0
    place, here = Path("/"), os.open("/", _ON_THE_WAY)
    try:
        while names:
            name = names.pop()
            n_names += 1
            below = os.open(name, _ON_THE_WAY | os.O_NOFOLLOW, dir_fd=here)
            try:
                if name == "..":
                    its_path, above = place.parent, os.stat("..", dir_fd=below)
                else:
                    its_path, above = place / name, os.fstat(here)
                entry = _entry_of(below, its_path, above=above)
                target = os.readlink("", dir_fd=below) if entry.is_link else ""
            except BaseException:
                os.close(below)
                raise
            if name != "/":  # where the path, or the target of a link, begins
                entries.append(entry)
            if entry.is_link:
                names += reversed(Path(target).parts)
                n_links += 1
                os.close(below)
            else:
                os.close(here)
                place, here = entry.path, below
            if n_names > MAX_NAMES:
                raise _far(path)
            if n_links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if not is_end(os.fstat(here).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if not entries or entries[-1].is_link:  # "/", or a link to "." or "/"
            entries.append(_entry_of(here, place, above=os.stat("..", dir_fd=here)))
    except (FileNotFoundError, NotADirectoryError):  # it is to be made, or a link leads nowhere
        os.close(here)
        return entries, None
    except BaseException:
        os.close(here)
        raise
    return entries, here


def _entry_of(descriptor: int, path: Path, *, above: os.stat_result) -> _Entry:
    """Describe what was opened. `above` is the status of the directory that has it."""
    found = os.fstat(descriptor)
    is_writable = found.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
    # Its group may be kept out of what the others may read.
    is_directory = stat.S_ISDIR(found.st_mode)
    rights = stat.S_IXGRP | stat.S_IXOTH if is_directory else stat.S_IRGRP | stat.S_IROTH
    return _Entry(
        path=path,
        is_link=stat.S_ISLNK(found.st_mode),
        owner=found.st_uid,
        anyone_may_add_beside_it=bool(above.st_mode & stat.S_IWOTH),
        anyone_may_exchange_in_it=is_writable,
        anyone_may_read_it=stat.S_ISLNK(found.st_mode) or found.st_mode & rights == rights,
    )


def _has_unknown_users() -> bool:
    """Return whether this is a user namespace, as that of a container without root."""
    try:
        return Path("/proc/self/uid_map").read_text().split() != ALL_USERS
    except OSError:
        return False

"""Open a published version once, to copy files of it: its run may be a stranger's.

    with opened_version(layout, version.path) as opened:
        with open(opened.open_file("config.json"), "rb") as file: ...

Whoever owns the run can exchange a directory, or put a link or a FIFO in place of a file, at any
moment. So every file is opened below the one descriptor, and nothing is written into the run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from store.catalog.ownership import check_consent
from store.errors import StoreError, UnsafePathError
from store.layout import RunLayout
from store.remote_directory import copy_published
from store.run_names import VERSION_PATH, checked_name
from store.untrusted.file_access import is_directory, open_file_in, read_opened
from store.untrusted.own_directory import open_file_by_own_links
from store.user_cache import OWN_CACHE, private_directory


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedVersion:
    """The directory of a version, which is open."""

    directory: int  # its descriptor
    path: Path  # for messages
    # Version 0 of an evaluation is a link to a model outside of the run, whose files may be links
    # too, as those of a cache of downloads are. The run is trusted then.
    follows_links: bool = False

    def names(self) -> list[str]:
        """Return the names in it, in order."""
        return sorted(os.listdir(self.directory))

    def has_file(self, name: str) -> bool:
        """Return whether a regular file of this name is there."""
        try:
            found = os.stat(name, dir_fd=self.directory, follow_symlinks=self.follows_links)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode)

    def open_file(self, name: str) -> int:
        """Return the descriptor of a file, which the caller closes.

        Raises OSError, and UnsafePathError for what is no regular file and for a link. If links are
        followed, it is raised only for those that `open_file_by_own_links` refuses.
        """
        if self.follows_links:
            return open_file_by_own_links(self.path / name)
        return open_file_in(self.directory, name, path=self.path / name)

    def read_file(self, name: str, *, at_most: int) -> bytes:
        """Return the content of a file. Raises as `open_file`, also beyond `at_most` bytes."""
        with open(self.open_file(name), "rb") as file:
            return read_opened(file, self.path / name, at_most=at_most)


@contextmanager
def opened_version(layout: RunLayout, path: str) -> Iterator[OpenedVersion]:
    """Give the version at `path`, as the catalog has it: weights/v000012.

    One that is only in a remote storage is copied to this user's cache first, and removed at the
    end. Raises StoreError and OSError: as `RunLayout.opened_directory`, as `check_consent`, for one
    that was removed, and for one behind a link in a run that is not trusted.
    """
    with ExitStack() as opened:
        try:
            version = opened.enter_context(_opened_version(layout, path))
        except FileNotFoundError as error:
            raise StoreError(
                f"{layout.root / path} is not there (any more); ask for a newer version"
            ) from error
        yield version


@contextmanager
def _opened_version(layout: RunLayout, path: str) -> Iterator[OpenedVersion]:
    check_consent(layout)
    here = layout.root / checked_name(path, VERSION_PATH, where=str(layout.catalog))
    if here.is_symlink():
        layout.check_trusted()
        with _opened(here, follows_links=True) as opened:
            yield opened
    elif layout.info.storage_uri is None or is_directory(here, root=layout.root):
        with layout.opened_directory(here) as directory:
            yield OpenedVersion(directory=directory, path=here)
    else:
        with private_directory("gigpo-weights-") as copy:
            try:
                copy_published(layout, path, copy)
            except UnsafePathError:
                raise
            except OSError as error:
                raise StoreError(
                    f"cannot copy {layout.storage.locate(path)} to {copy}: {error.strerror}; "
                    f"it needs room there, or {OWN_CACHE}"
                ) from error
            with _opened(copy, follows_links=False) as opened:
                yield opened


@contextmanager
def _opened(path: Path, *, follows_links: bool) -> Iterator[OpenedVersion]:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield OpenedVersion(directory=directory, path=path, follows_links=follows_links)
    finally:
        os.close(directory)

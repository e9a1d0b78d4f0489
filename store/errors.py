"""What can go wrong in the store.

StoreError            bad data, a wrong path, a broken file: the message names the value and the fix
├── FormatError       a run directory or file this code cannot read (not a run, or damaged)
│   ├── NewerFormatError  a run or a file that newer code wrote
│   └── ForeignSchemaError  a catalog with an object that this code never makes
├── DigestError       a segment's bytes are not the ones that were committed
├── UnavailableError  a file that may well be whole cannot be reached now; nothing may be concluded
from it
├── UnsafePathError   a path of a run that leads out of it, or to what is no regular file
├── LockedError       another live process owns the catalog
└── FencedError       the caller belongs to an older epoch; its lease is void and its data will be
played again
"""

from __future__ import annotations

from printable import UserError


class StoreError(UserError):
    """Base of every error the store raises for bad data or a bad request."""


class FormatError(StoreError):
    """The run directory or file is not one this code can read."""


class NewerFormatError(FormatError):
    """Newer code wrote the run or the file. Nothing is wrong with it: this code has to be
    updated.
    """


class ForeignSchemaError(FormatError):
    """The catalog has a table, view, trigger or index that this code never makes."""


class DigestError(StoreError):
    """A segment's bytes differ from the committed ones."""


class UnavailableError(StoreError):
    """Storage does not answer, or refuses: an outage, a time-out, permissions, an I/O error. What
    is there may be whole.
    """


class UnsafePathError(StoreError, OSError):
    """A path of a run is absolute, has "..", goes through a link, or names no regular file."""

    def __str__(self) -> str:
        return str(self.args[-1])  # after the number of the system's error, where there is one


class LockedError(StoreError):
    """Another live process owns the catalog."""


class FencedError(StoreError):
    """The caller holds a lease of an older epoch and must drop its work."""

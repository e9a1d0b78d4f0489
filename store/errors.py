"""Define the errors of the store. Each message is one line, and names the value and the remedy."""

from __future__ import annotations

from printable import UserError

# Libraries raise other classes, with the words of C++'s std::bad_alloc, of malloc or of a thread.
OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "malloc of size", "can't start new thread")


class StoreError(UserError):
    """Base of all errors for bad data or a bad request."""


class FormatError(StoreError):
    """The run directory or file is not one this code can read."""


class OtherFormatError(FormatError):
    """The run or the file has another format. Another version of this code reads it."""


class ForeignSchemaError(FormatError):
    """The catalog has a table, view, trigger or index that this code never makes."""


class DigestError(StoreError):
    """A segment's bytes differ from the committed ones."""


class UnavailableError(StoreError):
    """Storage does not answer or refuses: an outage, a time-out, permissions, an I/O error."""


class PrivateCatalogError(StoreError):
    """The run's owner lets nobody else read its catalog, as it is made."""


class UnsafePathError(StoreError, OSError):
    """A path of a run is absolute, has "..", goes through a link, or names no regular file."""

    def __str__(self) -> str:
        return str(self.args[-1])  # after the number of the system's error, where there is one


class LockedError(StoreError):
    """Another running process owns the catalog."""


class FencedError(StoreError):
    """The caller has a lease of an older epoch, or another directory has the run: drop the work."""


class QueryProcessError(StoreError):
    """The process that answers queries did not start, or it ended. It may be well the next time."""


class SqlTimeout(StoreError):
    """A query gave no result in time and was stopped."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised for, says that memory did not suffice."""
    cause: BaseException | None = error
    while cause is not None:
        is_duckdb = type(cause).__name__ == "OutOfMemoryException"  # DuckDB is slow to import
        if isinstance(cause, MemoryError) or is_duckdb:
            return True
        if any(words in str(cause) for words in OUT_OF_MEMORY):
            return True
        cause = cause.__cause__ or cause.__context__
    return False

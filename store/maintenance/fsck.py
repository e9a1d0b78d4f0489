"""fsck: whether a run is what its catalog says, asked beside a running job without disturbing it.

    check(layout, level=CATALOG)   the catalog agrees with itself
    check(layout, level=NAMES)     and every file it counts on is there, with its size; nothing else is
    check(layout, level=CONTENTS)  and holds what was committed: digests, page checksums, rows, state hashes

Nothing is locked. What looks wrong is asked for again, because the owner may have changed it in
between.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from store.catalog.database import is_damage
from store.catalog.migrate import in_todays_format
from store.catalog.time_travel import connect_read_only
from store.errors import ForeignSchemaError, StoreError
from store.layout import RunLayout
from store.maintenance import fsck_manifest, fsck_segments
from store.maintenance.finding import Finding, error
from store.maintenance.fsck_catalog import check_catalog, check_identity
from store.maintenance.fsck_exports import check_exported
from store.untrusted.file_access import is_file, status

CATALOG, NAMES, CONTENTS = 1, 2, 3
FATAL = frozenset(
    {"catalog_missing", "catalog_damaged", "catalog_foreign", "catalog_schema"}
)  # without a catalog nothing else can be judged
ATTEMPTS = 5  # an owner that changes the same thing as often while we look is not idle


def check(layout: RunLayout, *, level: int) -> list[Finding]:
    """What is wrong with the run, worst first; [] if nothing is. FormatError for a run of a newer
    format.
    """
    remedy = f"gigpo rebuild {layout.root}, or put a backup back"
    if status(layout.catalog, root=layout.run_directory) is None:
        return [
            error("catalog_missing", layout.catalog.name, "there is no such file", remedy=remedy)
        ]
    if not is_file(layout.catalog, root=layout.run_directory):
        detail = "it is a link, or no regular file"
        return [
            error(
                "catalog_damaged", layout.catalog.name, detail, remedy=f"remove it, then: {remedy}"
            )
        ]
    try:
        found = confirmed(lambda: _check_catalog(layout))
        if not FATAL.intersection(finding.what for finding in found) and level >= NAMES:
            contents = level >= CONTENTS
            found += fsck_segments.check_segments(
                lambda: open_catalog(layout), layout, contents=contents
            )
            found += confirmed(
                lambda: fsck_manifest.check_manifest(
                    lambda: open_catalog(layout), layout, contents=contents
                )
            )
            found += fsck_manifest.check_unfinished(layout)
            # else it would say the same again
            if contents and not any(finding.severity == "error" for finding in found):
                found += confirmed(lambda: check_exported(lambda: open_catalog(layout), layout))
    except sqlite3.OperationalError as problem:  # it cannot be opened: that is not damage
        raise StoreError(
            f"{layout.catalog} cannot be read ({problem}); fix the permissions, or stop what locks "
            "it"
        ) from problem
    return sorted(found, key=lambda finding: finding.severity)


def confirmed(ask: Callable[[], list[Finding]]) -> list[Finding]:
    """What `ask` finds twice in a row: a finding may be about a moment that has passed."""
    found = ask()
    for _ in range(ATTEMPTS):
        before, found = found, ask() if found else []
        if found == before:
            return found
    return [finding for finding in found if finding in before]


@contextmanager
def open_catalog(layout: RunLayout) -> Iterator[sqlite3.Connection]:
    """A connection that can only read. An older format is upgraded in memory: the file is its
    owner's.
    """
    with closing(connect_read_only(layout)) as connection:
        connection.row_factory = sqlite3.Row
        with in_todays_format(connection, path=layout.catalog) as catalog:
            yield catalog


def _check_catalog(layout: RunLayout) -> list[Finding]:
    try:
        with closing(connect_read_only(layout)) as connection:
            found = check_identity(connection, layout)
        if not found:
            with open_catalog(layout) as connection:
                connection.execute("BEGIN")  # one moment for all queries
                found = check_catalog(connection, layout)
    except ForeignSchemaError as problem:
        detail, _, remedy = str(problem).removeprefix(f"{layout.catalog}: ").rpartition("; ")
        return [error("catalog_schema", layout.catalog.name, detail, remedy=remedy)]
    except sqlite3.DatabaseError as problem:
        if not is_damage(problem):
            raise
        return _damaged(layout, problem)
    return found


def _damaged(layout: RunLayout, problem: sqlite3.Error) -> list[Finding]:
    remedy = f"gigpo rebuild {layout.root}, or put a backup back"
    return [error("catalog_damaged", layout.catalog.name, str(problem), remedy=remedy)]

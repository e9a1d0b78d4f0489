"""Check whether a run is what its catalog says, beside a running job and without disturbing it.

    check(layout, level=CATALOG)   the catalog agrees with itself
    check(layout, level=NAMES)     every file it counts on is there with its size, and no other
    check(layout, level=CONTENTS)  the files hold what was committed: digests, rows, state hashes

Nothing is locked. The owner may change the run meanwhile, so each finding is looked for twice.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable

from printable import counted
from store.catalog.connection import is_damage, raise_if_interrupted
from store.catalog.log_check import unread_commits_of
from store.errors import ForeignSchemaError, FormatError, StoreError
from store.layout import RunLayout
from store.maintenance.backup import check_backup
from store.maintenance.finding import REBUILD, Finding, found
from store.maintenance.fsck_catalog import check_catalog, check_identity, open_catalog
from store.maintenance.fsck_exports import check_exported_rows, check_manifest, check_unfinished
from store.maintenance.fsck_segments import check_segments
from store.untrusted.file_access import is_file, status

CATALOG, NAMES, CONTENTS = 1, 2, 3
# Without a catalog nothing else can be judged.
FATAL = frozenset({"catalog_missing", "catalog_damaged", "catalog_foreign", "catalog_schema"})
ATTEMPTS = 5  # an owner that changes the same thing as often while we look is not idle


def check(layout: RunLayout, *, level: int) -> list[Finding]:
    """Return what is wrong with the run, errors first. Raises FormatError for a newer format."""
    try:
        findings = _confirmed(lambda: _check_catalog(layout) + _check_log(layout))
        if level >= NAMES and not FATAL.intersection(finding.what for finding in findings):
            findings = findings + _check_files(layout, findings, contents=level >= CONTENTS)
    except sqlite3.OperationalError as problem:  # it cannot be opened: that is not damage
        raise_if_interrupted(problem)
        raise StoreError(
            f"{layout.catalog} cannot be read ({problem}); "
            "fix the permissions, or stop what locks it"
        ) from problem
    except sqlite3.DatabaseError as problem:  # it was sound when it was checked
        raise FormatError(
            f"{layout.catalog} was damaged while the run was checked ({problem}); only the run's "
            f"own driver may write it: gigpo fsck {layout.root}"
        ) from problem
    return [
        dataclasses.replace(finding, remedy=finding.remedy.replace("{root}", str(layout.root)))
        for finding in sorted(findings, key=lambda finding: finding.severity)
    ]


def _check_files(layout: RunLayout, of_catalog: list[Finding], *, contents: bool) -> list[Finding]:
    """Check the files. `of_catalog` are the findings about the catalog."""
    findings = check_segments(layout, contents=contents)
    findings += _confirmed(lambda: check_manifest(layout, contents=contents))
    findings += check_unfinished(layout)
    if not contents:
        return findings
    # After another error a comparison would only say the same again.
    if not any(finding.severity == "error" for finding in (*of_catalog, *findings)):
        findings += _confirmed(lambda: check_exported_rows(layout))
    return findings + _confirmed(lambda: check_backup(layout))


def _confirmed(ask: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what `ask` finds twice in a row: one finding may be about a moment that has passed."""
    findings = ask()
    for _ in range(ATTEMPTS):
        before, findings = findings, ask() if findings else []
        if findings == before:
            return findings
    return [finding for finding in findings if finding in before]


def _check_log(layout: RunLayout) -> list[Finding]:
    """Look for commits that SQLite does not read. The log is gone after a clean end."""
    n_unread = unread_commits_of(layout)
    if not n_unread:
        return []
    detail = f"{counted(n_unread, 'commit')} after a place that is not as it was written"
    subject = f"{layout.catalog.name}-wal"
    return [found("log_damaged", subject, f"{detail}: a byte was changed, or the power cut")]


def _check_catalog(layout: RunLayout) -> list[Finding]:
    name = layout.catalog.name
    if status(layout.catalog, root=layout.run_directory) is None:
        return [found("catalog_missing", name, "there is no such file")]
    if not is_file(layout.catalog, root=layout.run_directory):
        detail, remedy = "it is a link, or no regular file", f"remove it, then: {REBUILD}"
        return [found("catalog_damaged", name, detail, remedy=remedy)]
    try:
        with open_catalog(layout) as connection:
            connection.execute("BEGIN")  # one moment for all queries
            return check_identity(connection, layout) or check_catalog(connection)
    except ForeignSchemaError as problem:
        detail, _, remedy = str(problem).removeprefix(f"{layout.catalog}: ").rpartition("; ")
        return [found("catalog_schema", name, detail, remedy=remedy)]
    except sqlite3.DatabaseError as problem:
        if not is_damage(problem):
            raise
        return [found("catalog_damaged", name, str(problem))]

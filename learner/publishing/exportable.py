"""Find what a run has to export: published versions and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import store
from printable import UserError
from store import ADAPTER_CONFIG_FILE, RunLayout, VersionRecord, check_consent


class ExportError(UserError, ValueError):
    """The requested model cannot be exported. The message gives the reason and the alternatives."""


def find_version(layout: RunLayout, number: int | None) -> VersionRecord:
    """Return the published version `number`, the newest for None.

    Raises ExportError naming the versions whose files are there.
    """
    versions = {version.version: version for version in _versions(layout)}
    there = _whose_files_are_there(layout, versions.values())
    if number is None and there:
        return there[-1]
    if number is not None and versions.get(number) in there:
        return versions[number]
    asked = "its newest version" if number is None else f"version {number}"
    gone = "was never published"
    if number in versions:
        gone = "has no files: they were removed, or its learner was ended before it wrote them"
    raise ExportError(f"{asked} of {layout.root} {gone}; {_listed(layout, there)}")


def newest_checkpoint(layout: RunLayout) -> int:
    """Return the learner step of the newest checkpoint. Raises ExportError if there is none."""
    with store.open_run(layout.root, warn=False) as reader:
        rows = reader.rows(
            "SELECT learner_step FROM checkpoints WHERE live ORDER BY learner_step DESC"
        )
    for row in rows:
        if layout.checkpoint_dir(row["learner_step"]).is_dir():
            return int(row["learner_step"])
    raise ExportError(f"{layout.root} has no checkpoint yet; adapters are in checkpoints only")


def find_checkpoint(layout: RunLayout, learner_step: int) -> Path:
    """Return the directory of a checkpoint. Raises ExportError naming what is there."""
    found = layout.checkpoint_dir(learner_step)
    if found.is_dir():
        return found
    there = _whose_files_are_there(layout, _versions(layout))
    raise ExportError(
        f"{layout.root} has no checkpoint of learner step {learner_step}; {_listed(layout, there)}"
    )


def _versions(layout: RunLayout) -> list[VersionRecord]:
    """Return all versions ever announced, oldest first."""
    with store.open_run(layout.root, warn=False) as reader:
        return reader.records(
            "SELECT version, path, digest, learner_step FROM versions ORDER BY version",
            VersionRecord,
        )


def _whose_files_are_there(
    layout: RunLayout, versions: Iterable[VersionRecord]
) -> list[VersionRecord]:
    # For these very settings: `open_run` may have read others, which were put there meanwhile.
    check_consent(layout)
    exists = layout.storage.exists
    return [
        version
        for version in versions
        if exists(f"{version.path}/config.json") or exists(f"{version.path}/{ADAPTER_CONFIG_FILE}")
    ]


def _listed(layout: RunLayout, there: list[VersionRecord]) -> str:
    numbers = [str(version.version) for version in there]
    names = sorted(path.name for path in layout.checkpoints.glob("step*"))
    steps = [str(int(match[1])) for name in names if (match := re.fullmatch(r"step(\d+)", name))]
    return (
        f"there are versions {', '.join(numbers) or '(none)'} and checkpoints of learner steps "
        f"{', '.join(steps) or '(none)'}"
    )

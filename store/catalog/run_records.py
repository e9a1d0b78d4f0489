"""Record versions, checkpoints, metrics, heartbeats and episodes. Functions of one transaction."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence

from store.catalog.records import WHY_UNFINISHED, CheckpointRecord, Unfinished, VersionRecord
from store.catalog.transaction import Transaction, columns_of
from store.errors import StoreError
from store.run_names import CHECKPOINT_PATH, VERSION_PATH, checked_name
from url_secrets import without_secrets

VERSIONS = "SELECT version, path, digest, learner_step FROM version"


def record_version(tx: Transaction, record: VersionRecord) -> None:
    """Record an announced set of weights. Raises StoreError if its number is not a new one."""
    latest = latest_version(tx)
    if latest is not None and record.version <= latest.version:
        raise StoreError(
            f"policy version {record.version} is not after the latest, {latest.version}; announce "
            f"it as {latest.version + 1}"
        )
    tx.insert(
        "version",
        **columns_of(record),
        epoch=tx.epoch,
        published_us=tx.now_us,
        lsn=tx.lsn,
    )
    tx.touch("versions", "lineage")


def latest_version(tx: Transaction) -> VersionRecord | None:
    """Return the newest announced version."""
    row = tx.row(f"{VERSIONS} ORDER BY version DESC LIMIT 1")
    return None if row is None else checked_version(row)


def checked_version(row: sqlite3.Row) -> VersionRecord:
    """Return a row of VERSIONS. Raises FormatError for a path of no version."""
    checked_name(row["path"], VERSION_PATH, where="the catalog")
    return VersionRecord(**row)


def record_checkpoint(tx: Transaction, record: CheckpointRecord, *, lsn: int | None) -> None:
    """Record a checkpoint that is complete on disk. A restart begins there from now on.

    It has everything up to `lsn`; None: up to this transaction.
    """
    tx.insert(
        "checkpoint",
        **columns_of(record),
        lsn=tx.lsn if lsn is None else lsn,
        live=1,
        saved_us=tx.now_us,
    )
    tx.touch("checkpoints")


def live_checkpoints(tx: Transaction) -> tuple[CheckpointRecord, ...]:
    """Return every checkpoint that no roll-back went behind, oldest step first.

    The directory of an old one may have been removed.
    """
    rows = tx.rows(
        """SELECT learner_step, path, version FROM checkpoint WHERE live = 1
           ORDER BY learner_step, lsn"""
    )
    for row in rows:
        checked_name(row["path"], CHECKPOINT_PATH, where="the catalog")
    return tuple(CheckpointRecord(**row) for row in rows)


def record_metrics(
    tx: Transaction, *, learner_step: int, policy_version: int, values: Mapping[str, float]
) -> None:
    """Record figures of a learner step by name. Of several values of a name the latest counts.

    Raises StoreError for a value that is not a number.
    """
    for name, value in values.items():
        if math.isnan(value):
            raise StoreError(
                f"metric {name} of learner step {learner_step} is NaN; leave it out where it has "
                "no value"
            )
    tx.insert_many(
        "metric",
        [
            {
                "learner_step": learner_step,
                "policy_version": policy_version,
                "name": name,
                "value": float(value),
                "live": 1,
                "lsn": tx.lsn,
            }
            for name, value in values.items()
        ],
    )
    if values:
        tx.touch("metrics")


def latest_metrics(tx: Transaction) -> dict[str, float]:
    """Return the newest figure of every name that was not rolled back."""
    # Step from name to name by the index: the terminal asks twice a second, and the table has
    # millions of rows.
    rows = tx.rows(
        """WITH RECURSIVE names (name) AS (
               SELECT min(name) FROM metric WHERE live = 1
               UNION ALL
               SELECT (SELECT min(name) FROM metric m WHERE m.name > names.name)
               FROM names WHERE names.name IS NOT NULL)
           SELECT name, (SELECT value FROM metric m WHERE m.name = names.name AND live = 1
                         ORDER BY learner_step DESC, lsn DESC LIMIT 1) AS value
           FROM names WHERE name IS NOT NULL"""
    )
    return {row["name"]: row["value"] for row in rows if row["value"] is not None}


def learner_step(tx: Transaction) -> int:
    """Return the last settled learner step, 0 before the first."""
    return int(tx.value("SELECT coalesce(max(learner_step), 0) FROM batch WHERE state = 'trained'"))


def record_unfinished(tx: Transaction, episodes: Sequence[Unfinished], *, worker: str) -> None:
    """Record episodes that `worker` began and that gave no trajectory.

    Raises StoreError, and records none, if one is of a group that the run does not have.
    """
    for episode in episodes:
        if episode.why not in WHY_UNFINISHED:
            raise StoreError(
                f"an episode cannot end as {episode.why!r}; use one of {', '.join(WHY_UNFINISHED)}"
            )
    more = {"worker": worker, "lsn": tx.lsn}
    tx.insert_many("unfinished", [columns_of(episode) | more for episode in episodes])
    if episodes:
        tx.touch("unfinished")


def heartbeats(tx: Transaction, waiting_on: Mapping[str, str | None]) -> None:
    """Record that components are alive, and what each waits for. None: it is working."""
    # One statement, because there may be thousands of components.
    tx.run(
        """INSERT OR REPLACE INTO component (name, waiting_on, beat_us)
           SELECT key, value, :now_us FROM json_each(:waiting_on)""",
        waiting_on=json.dumps(
            {name: what and without_secrets(what) for name, what in waiting_on.items()}
        ),
        now_us=tx.now_us,
    )
    tx.touch("component")

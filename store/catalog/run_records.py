"""The smaller ledgers: versions, checkpoints, metrics, heartbeats, events. Functions of one
transaction each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from store.catalog.database import Transaction
from store.catalog.records import WHY_UNFINISHED, CheckpointRecord, Unfinished, VersionRecord
from store.errors import StoreError
from store.layout import CHECKPOINT_PATH, VERSION_PATH, checked_name


def record_version(
    tx: Transaction, *, version: int, path: str, digest: str, learner_step: int | None
) -> None:
    """A published set of weights. Its number must be new: versions are never reused."""
    latest = latest_version(tx)
    if latest is not None and version <= latest.version:
        raise StoreError(
            f"policy version {version} is not after the latest, {latest.version}; publish as "
            f"{latest.version + 1}"
        )
    tx.run(
        """INSERT INTO version (version, path, digest, learner_step, epoch, published_us, lsn)
           VALUES (:version, :path, :digest, :learner_step, :epoch, :now_us, :lsn)""",
        version=version,
        path=path,
        digest=digest,
        learner_step=learner_step,
        epoch=tx.epoch,
        now_us=tx.now_us,
        lsn=tx.lsn,
    )
    tx.touch("versions", "lineage")


def latest_version(tx: Transaction) -> VersionRecord | None:
    """The newest published weights."""
    row = tx.row(
        "SELECT version, path, digest, learner_step FROM version ORDER BY version DESC LIMIT 1"
    )
    if row is None:
        return None
    checked_name(row["path"], VERSION_PATH, where="the catalog")
    return VersionRecord(**row)


def record_checkpoint(tx: Transaction, *, learner_step: int, path: str, version: int) -> None:
    """A checkpoint that is complete on disk; from now on a restart begins here."""
    tx.run(
        """INSERT INTO checkpoint (lsn, learner_step, path, version, live, saved_us)
           VALUES (:lsn, :learner_step, :path, :version, 1, :now_us)""",
        lsn=tx.lsn,
        learner_step=learner_step,
        path=path,
        version=version,
        now_us=tx.now_us,
    )
    tx.touch("checkpoints")


def live_checkpoints(tx: Transaction) -> tuple[CheckpointRecord, ...]:
    """Every checkpoint that no roll-back went behind, whether or not its directory is still there;
    oldest step first.
    """
    rows = tx.rows(
        "SELECT learner_step, path, version FROM checkpoint WHERE live = 1 ORDER BY learner_step, "
        "lsn"
    )
    for row in rows:
        checked_name(row["path"], CHECKPOINT_PATH, where="the catalog")
    return tuple(CheckpointRecord(**row) for row in rows)


def record_metrics(
    tx: Transaction, *, learner_step: int, policy_version: int, values: Mapping[str, float]
) -> None:
    """Figures of one learner step by name; the same name again replaces the figure in the view."""
    for name, value in values.items():
        if math.isnan(value):
            raise StoreError(
                f"metric {name} of learner step {learner_step} is NaN; leave it out where it has "
                "no value"
            )
        tx.run(
            """INSERT OR REPLACE INTO metric (learner_step, policy_version, name, value, live, lsn)
               VALUES (:learner_step, :policy_version, :name, :value, 1, :lsn)""",
            learner_step=learner_step,
            policy_version=policy_version,
            name=name,
            value=float(value),
            lsn=tx.lsn,
        )
        tx.touch("metrics")


def latest_metrics(tx: Transaction) -> dict[str, float]:
    """The newest live figure of every name."""
    # from name to name by the index: the terminal asks twice a second, of a table of millions of
    # rows
    rows = tx.rows(
        """WITH RECURSIVE names (name) AS (
               SELECT min(name) FROM metric WHERE live = 1
               UNION ALL
               SELECT (SELECT min(name) FROM metric m WHERE m.name > names.name) FROM names WHERE names.name IS NOT NULL)
           SELECT name, (SELECT value FROM metric m WHERE m.name = names.name AND live = 1
                         ORDER BY learner_step DESC, lsn DESC LIMIT 1) AS value
           FROM names WHERE name IS NOT NULL"""
    )
    return {row["name"]: row["value"] for row in rows if row["value"] is not None}


def learner_step(tx: Transaction) -> int:
    """The last settled learner step; 0 before the first."""
    row = tx.row("SELECT coalesce(max(learner_step), 0) AS step FROM batch WHERE state = 'trained'")
    assert row is not None
    return int(row["step"])


def record_unfinished(tx: Transaction, episodes: Sequence[Unfinished], *, worker: str) -> None:
    """Enter episodes that gave no trajectory. Groups the run does not have are refused, all
    together.
    """
    for episode in episodes:
        if episode.why not in WHY_UNFINISHED:
            raise StoreError(
                f"an episode cannot end as {episode.why!r}; use one of {', '.join(WHY_UNFINISHED)}"
            )
    tx.run_many(
        """INSERT INTO unfinished (group_uid, number, worker, version, begun_us, ended_us, n_steps, n_response_tokens, why, lsn)
           VALUES (:group_uid, :number, :worker, :version, :begun_us, :ended_us, :n_steps, :n_response_tokens, :why, :lsn)""",
        [
            {name: getattr(episode, name) for name in Unfinished.__slots__}
            | {"worker": worker, "lsn": tx.lsn}
            for episode in episodes
        ],
    )
    if episodes:
        tx.touch("unfinished")


def heartbeats(tx: Transaction, waiting_on: Mapping[str, str | None]) -> None:
    """These components are alive now, and wait for this (None: they work)."""
    tx.run_many(
        "INSERT OR REPLACE INTO component (name, waiting_on, beat_us) VALUES (:name, :waiting_on, "
        ":now_us)",
        [
            {"name": name, "waiting_on": reason, "now_us": tx.now_us}
            for name, reason in waiting_on.items()
        ],
    )
    tx.touch("component")

"""Read from the catalog what each learner step was trained on, beside the catalog's owner.

    start = restart_points(layout)[0]                 # the newest checkpoint that counts
    step = trained_step(layout, start.learner_step + 1)
    rows = read_segments(layout, step.batch.segments)

    changes = metrics_since(layout, 0)                # all metrics
    changes = metrics_since(layout, changes.lsn)      # the new ones

A learner step that was rolled back and trained again is shown as it was trained last.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from store.catalog.batches import batch_of
from store.catalog.connection import check_pages, opened_read_only, raise_if_interrupted
from store.catalog.records import Batch, CheckpointRecord, VersionRecord
from store.catalog.run_records import VERSIONS, checked_version, live_checkpoints
from store.catalog.run_records import learner_step as last_step
from store.catalog.transaction import Transaction, pick
from store.clock import now_us
from store.errors import FormatError, StoreError
from store.layout import RunLayout
from store.records import uid_text
from store.untrusted.file_access import is_file
from store.untrusted.json_values import parse_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """One learner step that counts."""

    learner_step: int
    version_in: int  # the policy version it was trained at
    batch: Batch  # its groups as they were claimed, and the files that hold their rows now
    published: VersionRecord  # the weights after it
    figures: Mapping[str, float]  # recorded with it, by name
    # trajectory uid -> the critic's value of each step's state; {} without a critic
    values: Mapping[bytes, Sequence[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One row of the metrics view."""

    learner_step: int
    policy_version: int
    name: str
    value: float
    at_us: int  # UTC epoch: when its learner step was settled, or else its version published


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricChanges:
    """Metrics that the catalog took in after one lsn, up to another."""

    lsn: int  # of the catalog now
    rows: tuple[Metric, ...]  # the rows that count, by learner step
    # at lsn 0, and where rows were rolled back or replaced: then `rows` are all that the run has
    has_all_rows: bool


def trained_step(layout: RunLayout, learner_step: int) -> TrainedStep:
    """Return the last training of a learner step.

    Raises StoreError if the step was not trained, or if some of its rows are gone.
    """
    with _reading(layout) as tx:
        batch = tx.row(
            """SELECT batch_id, version_in, epoch FROM batch
               WHERE state = 'trained' AND learner_step = :learner_step""",
            learner_step=learner_step,
        )
        if batch is None:
            raise StoreError(
                f"{layout.root} was trained to learner step {last_step(tx)}; there is no "
                f"{learner_step}"
            )
        _check_rows_are_there(tx, batch["batch_id"], learner_step=learner_step)
        figures = tx.rows(
            """SELECT name, value FROM metric
               WHERE learner_step = :learner_step AND live = 1 ORDER BY lsn""",
            learner_step=learner_step,
        )
        return TrainedStep(
            learner_step=learner_step,
            version_in=batch["version_in"],
            batch=_claimed_under(batch["epoch"], batch_of(tx, batch["batch_id"])),
            # a learner step publishes one version, before it is settled
            published=_version(tx, batch["version_in"] + 1),
            figures={row["name"]: row["value"] for row in figures},
            values=_values(tx, batch["batch_id"]),
        )


def _values(tx: Transaction, batch_id: int) -> dict[bytes, list[float]]:
    """Return the critic's values that a batch was trained with. Raises FormatError."""
    # A run from before there were critics may be read without an owner that adds the table.
    if tx.value("SELECT count(*) FROM sqlite_schema WHERE name = 'critic_value'") == 0:
        return {}
    rows = tx.rows(
        "SELECT traj_uid, state_values FROM critic_value WHERE batch_id = :batch_id",
        batch_id=batch_id,
    )
    try:
        return {row["traj_uid"]: parse_numbers(row["state_values"]) for row in rows}
    except (ValueError, OverflowError) as error:
        raise FormatError(
            f"the values of batch {batch_id} are no lists of numbers ({error}); put a backup of "
            "catalog.sqlite back"
        ) from error


def _claimed_under(epoch: int, batch: Batch) -> Batch:
    """Return the batch as its claim did: its groups name the owner's epoch."""
    return replace(
        batch,
        groups=tuple(replace(group, epoch=epoch) for group in batch.groups),
        replayed=tuple(replace(group, epoch=epoch) for group in batch.replayed),
    )


def restart_points(layout: RunLayout) -> tuple[CheckpointRecord, ...]:
    """Return every checkpoint that counts, newest first. Its directory may be gone."""
    with _reading(layout) as tx:
        return live_checkpoints(tx)[::-1]


def metrics_since(layout: RunLayout, lsn: int) -> MetricChanges:
    """Return the metrics that changed after `lsn`, each row once, or all if some were withdrawn."""
    with _reading(layout) as tx:
        newest_lsn = tx.value("SELECT lsn FROM meta")
        changed = _changed_metrics(tx, lsn)
        has_all_rows = not lsn or any(not row["live"] or row["replaces"] for row in changed)
        if lsn and has_all_rows:
            changed = _changed_metrics(tx, 0)
    names = ("learner_step", "policy_version", "name", "value", "at_us")
    counting = [Metric(**pick(row, names)) for row in changed if row["live"]]
    newest = {(row.learner_step, row.policy_version, row.name): row for row in counting}
    return MetricChanges(lsn=newest_lsn, rows=tuple(newest.values()), has_all_rows=has_all_rows)


def _changed_metrics(tx: Transaction, lsn: int) -> list[sqlite3.Row]:
    """Return the rows that changed after `lsn`; `replaces` says that one stands for an older."""
    return tx.rows(
        """SELECT m.learner_step, m.policy_version, m.name, m.value, m.live,
                  coalesce(b.trained_us, v.published_us, 0) AS at_us,
                  EXISTS (
                      SELECT 1 FROM metric AS old
                      WHERE old.learner_step = m.learner_step
                        AND old.policy_version = m.policy_version
                        AND old.name = m.name AND old.live = 1 AND old.lsn < m.lsn
                  ) AS replaces
           FROM metric AS m
           LEFT JOIN batch AS b ON b.state = 'trained' AND b.learner_step = m.learner_step
           LEFT JOIN version AS v ON v.version = m.policy_version
           WHERE m.changed_lsn > :lsn ORDER BY m.learner_step, m.lsn, m.name""",
        lsn=lsn,
    )


def published_version(layout: RunLayout, version: int) -> VersionRecord:
    """Return a published version. Raises StoreError if there is none of this number."""
    with _reading(layout) as tx:
        return _version(tx, version)


@contextmanager
def _reading(layout: RunLayout) -> Iterator[Transaction]:
    """Give a transaction that reads one moment of the catalog."""
    if not is_file(layout.catalog, root=layout.root):
        raise StoreError(
            f"{layout.root} has no {layout.catalog.name}, which says what each step was trained "
            "on; use the run directory that gigpo train wrote, or, if the catalog was lost: "
            f"gigpo rebuild {layout.root}"
        )
    try:
        with opened_read_only(layout) as connection:
            check_pages(connection, layout)
            connection.row_factory = sqlite3.Row
            connection.execute("BEGIN")
            yield Transaction(
                connection, run_id=layout.info.run_id, epoch=0, lsn=0, now_us=now_us()
            )
    except sqlite3.Error as error:
        raise_if_interrupted(error)
        raise FormatError(
            f"{layout.catalog} cannot be read ({error}); gigpo fsck {layout.root} says what is "
            "wrong with it"
        ) from error


def _check_rows_are_there(tx: Transaction, batch_id: int, *, learner_step: int) -> None:
    """Raise StoreError if rows of the batch were removed or lost."""
    removed = tx.rows(
        """SELECT DISTINCT s.path, s.retired_why
           FROM batch_group l JOIN trajectory t USING (group_uid)
           JOIN segment s USING (segment_id)
           WHERE l.batch_id = :batch_id AND s.removed_us IS NOT NULL ORDER BY s.path""",
        batch_id=batch_id,
    )
    if removed:
        raise StoreError(
            f"rows of learner step {learner_step} were removed: {removed[0]['path']} is "
            f"{removed[0]['retired_why']} ({len(removed)} such files). Ask for a later "
            "step; store.keep_days and store.keep_versions say which rows a run keeps"
        )
    incomplete = tx.rows(
        """SELECT l.group_uid, g.n_members, count(t.traj_uid) AS here
           FROM batch_group l JOIN grp g USING (group_uid) LEFT JOIN trajectory t USING (group_uid)
           WHERE l.batch_id = :batch_id GROUP BY l.group_uid HAVING here < g.n_members""",
        batch_id=batch_id,
    )
    if incomplete:
        raise StoreError(
            f"group {uid_text(incomplete[0]['group_uid'])} of learner step {learner_step} has "
            f"{incomplete[0]['here']} of its {incomplete[0]['n_members']} trajectories; put the "
            "damaged file back, then: gigpo fsck --repair"
        )


def _version(tx: Transaction, number: int) -> VersionRecord:
    row = tx.row(f"{VERSIONS} WHERE version = :number", number=number)
    if row is None:
        raise StoreError(
            f"version {number} is not in the catalog; gigpo fsck says what is wrong with it"
        )
    return checked_version(row)

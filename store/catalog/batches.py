"""Move groups from complete to consumed: drop stale ones, claim, refill, settle, roll back.

Functions of one transaction. A batch may also replay wins: groups that were trained on before, and
stay trained. Such a use is a live row of `batch_group` with a `use` above 1, and nothing else.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from store.catalog import imported_groups
from store.catalog.groups import ROLLED_BACK, as_group, complete_by_version, reopen
from store.catalog.missing_members import open_incomplete
from store.catalog.records import Batch, ReusedGroups, RollBack
from store.catalog.transaction import Transaction, pick
from store.errors import StoreError
from store.records import uid_text
from store.segments import SegmentMeta

COMPONENT = "catalog"
WINS = Path(__file__).with_name("wins.sql").read_text().format(free_use=imported_groups.FREE_USE)
NONE_REUSED = ReusedGroups()
FIRST_REPLAY = 2  # use 1 is the batch that trained on the whole group
# A condition on a row `l` of batch_group.
_IS_REPLAYED = (
    """(l.use > 1 AND (SELECT source FROM grp WHERE grp.group_uid = l.group_uid) IS NULL)"""
)


def drop_stale(tx: Transaction, *, current_version: int, max_staleness: int) -> None:
    """Make complete groups stale whose oldest version is more than `max_staleness` behind.

    This is the bound on staleness. `claim` and `refill` begin with it, in the same transaction.
    """
    oldest_allowed = current_version - max_staleness
    n_stale = tx.run(
        """UPDATE grp SET state = 'stale',
                          reason = 'oldest version ' || version_min || ' is more than '
                                   || :max_staleness || ' behind the learner''s '
                                   || :current_version
           WHERE split = 'train' AND state = 'complete' AND version_min < :oldest_allowed""",
        max_staleness=max_staleness,
        current_version=current_version,
        oldest_allowed=oldest_allowed,
    )
    if n_stale:
        detail = f"{n_stale} groups older than version {oldest_allowed}"
        tx.log(component=COMPONENT, what="stale", detail=detail)
        tx.touch("groups")


def claim(
    tx: Transaction,
    *,
    n_groups: int,
    current_version: int,
    max_staleness: int,
    reused: ReusedGroups = NONE_REUSED,
) -> Batch | None:
    """Claim the oldest complete training groups as a batch. Return None if too few are there.

    Groups whose oldest version is more than `max_staleness` behind `current_version` become stale
    first, also if no batch follows. `current_version` is the version at which the learner will
    train on the batch: the newest, or the next one while the batch before is trained on. Raises
    StoreError for an older one. The `reused` groups follow: the least used offline ones, which
    never become stale, and the newest wins. A claim waits for the offline ones, and never for wins.
    """
    n_offline = reused.n_offline
    if n_groups < 0 or n_offline < 0 or n_groups + n_offline < 1:
        raise StoreError(
            f"n_groups {n_groups}, n_offline {n_offline}: a batch has at least one group"
        )
    _check_claimed_version(tx, current_version)
    drop_stale(tx, current_version=current_version, max_staleness=max_staleness)
    rows = _oldest_complete(tx, n_groups)
    # The learner asks many times a second, and finding the least used of many groups takes long.
    if len(rows) < n_groups:
        return None
    if n_offline:
        rows += imported_groups.least_used(tx, n_groups=n_offline, uses=reused.max_uses)
    if len(rows) < n_groups + n_offline:
        return None
    batch_id = tx.insert(
        "batch",
        epoch=tx.epoch,
        state="claimed",
        claimed_version=current_version,
        claimed_us=tx.now_us,
        claimed_lsn=tx.lsn,
    )
    _claim_rows(tx, batch_id, rows)
    if reused.n_replayed:
        wins = tx.rows(
            WINS,
            oldest_version=current_version - reused.max_age_versions,
            n_groups=reused.n_replayed,
            first_use=FIRST_REPLAY,
        )
        for row in wins:
            _enter_use(tx, batch_id, row)
    return batch_of(tx, batch_id)


def _check_claimed_version(tx: Transaction, current_version: int) -> None:
    """Raise StoreError for an older version than the newest.

    Its claim would admit groups beyond the bound on staleness. One for a later version, which the
    learner has not announced yet, only makes groups stale earlier.
    """
    newest = tx.value("SELECT max(version) FROM version")  # None before the first
    if newest is not None and current_version < newest:
        raise StoreError(
            f"a batch cannot be claimed for policy version {current_version}: the newest is "
            f"{newest}; claim for it, or in advance for {newest + 1}"
        )


def refill(
    tx: Transaction,
    batch_id: int,
    *,
    filtered: Collection[bytes],
    n_groups: int,
    current_version: int,
    max_staleness: int,
) -> Batch | None:
    """Claim `n_groups` more complete training groups for a claimed batch. Return the whole batch.

    `filtered` groups of the batch teach nothing. They stay in it, and are outstanding no more, so
    that others are played in their place. Other groups become stale as in `claim`, with the same
    `current_version`. Returns None if too few groups are complete, or none is asked for.
    """
    batch = tx.row("SELECT state, claimed_version FROM batch WHERE batch_id = :id", id=batch_id)
    if batch is None or batch["state"] != "claimed":
        raise StoreError(f"batch {batch_id} is not claimed, so it cannot be refilled")
    _check_same_version(batch_id, batch["claimed_version"], current_version)
    _mark_filtered(tx, batch_id, filtered)
    drop_stale(tx, current_version=current_version, max_staleness=max_staleness)
    rows = _oldest_complete(tx, n_groups)
    # All at once: the advantages of the whole batch are computed again for each refill.
    if not n_groups or len(rows) < n_groups:
        return None
    _claim_rows(tx, batch_id, rows)
    return batch_of(tx, batch_id)


def _mark_filtered(tx: Transaction, batch_id: int, group_uids: Collection[bytes]) -> None:
    """Record which own groups of a claimed batch teach nothing.

    The learner asks until others are there: only the first time there is something to change.
    """
    rows = tx.rows(
        """SELECT group_uid FROM batch_group JOIN grp USING (group_uid)
           WHERE batch_id = :batch_id AND outcome = 'claimed' AND source IS NULL""",
        batch_id=batch_id,
    )
    counted = {row["group_uid"] for row in rows}
    for group_uid in group_uids:
        if group_uid in counted:
            tx.run(
                """UPDATE batch_group SET outcome = 'filtered'
                   WHERE batch_id = :batch_id AND group_uid = :group_uid""",
                batch_id=batch_id,
                group_uid=group_uid,
            )
            tx.touch("lineage")


def _oldest_complete(tx: Transaction, n_groups: int) -> list[sqlite3.Row]:
    return tx.rows(
        """SELECT *, 1 AS use FROM grp
           WHERE split = 'train' AND state = 'complete'
           ORDER BY version_min, ordinal LIMIT :n_groups""",
        n_groups=n_groups,
    )


def _claim_rows(tx: Transaction, batch_id: int, rows: Sequence[sqlite3.Row]) -> None:
    """Claim groups for a batch."""
    for row in rows:
        _enter_use(tx, batch_id, row)
        _set_state(tx, row["group_uid"], state="claimed", reason=f"batch {batch_id}")
    tx.touch("groups", "lineage")


def _enter_use(tx: Transaction, batch_id: int, row: sqlite3.Row) -> None:
    """Enter one use of a group by a batch. The state of the group stays."""
    claimed = pick(row, ("group_uid", "version_min", "version_max", "use"))
    tx.insert("batch_group", batch_id=batch_id, live=1, outcome="claimed", **claimed)


def batch_of(tx: Transaction, batch_id: int) -> Batch:
    """Return a batch with its groups as they were claimed, in the order of their rows.

    The run's own groups come by age, then the offline ones by the number of their uses. Replayed
    groups come newest first.
    """
    query = f"""SELECT g.group_uid, g.split, g.ordinal, g.task_id, g.size, g.evaluated_version,
                      g.state, l.version_min, l.version_max, g.source, b.claimed_us, l.use,
                      {_IS_REPLAYED} AS is_replayed
               FROM batch b JOIN batch_group l USING (batch_id) JOIN grp g USING (group_uid)
               WHERE b.batch_id = :batch_id
               ORDER BY is_replayed, g.source IS NOT NULL,
                        CASE WHEN is_replayed THEN -l.version_min
                             WHEN g.source IS NULL THEN l.version_min ELSE l.use END, g.ordinal"""
    rows = tx.rows(query, batch_id=batch_id)
    groups = [row for row in rows if not row["is_replayed"]]
    return Batch(
        batch_id=batch_id,
        groups=tuple(replace(as_group(tx, row), state="claimed") for row in groups),
        segments=_segments(tx, batch_id, replayed=False),
        replayed=tuple(as_group(tx, row) for row in rows if row["is_replayed"]),
        replayed_segments=_segments(tx, batch_id, replayed=True),
        claimed_us=rows[0]["claimed_us"],
    )


def settle(
    tx: Transaction,
    batch_id: int,
    *,
    learner_step: int,
    filtered: Mapping[bytes, str],
    version_in: int,
    values: Mapping[bytes, Sequence[float]] | None = None,
) -> None:
    """Record that a claimed batch was trained as `learner_step` at policy version `version_in`.

    `filtered` groups were left out of the loss, for the reason given. `values` are a critic's, of
    the state of each step, by trajectory uid; None without a critic.
    """
    _check_settlement(tx, batch_id, learner_step=learner_step, version_in=version_in)
    rows = tx.rows(
        f"SELECT group_uid FROM batch_group l WHERE batch_id = :batch_id AND NOT {_IS_REPLAYED}",
        batch_id=batch_id,
    )
    groups = dict.fromkeys(row["group_uid"] for row in rows)  # in their order, quickly found
    unknown = [uid_text(group_uid) for group_uid in filtered if group_uid not in groups]
    if unknown:
        raise StoreError(
            f"groups {unknown} are not in batch {batch_id}; name only groups of the batch"
        )
    tx.run(
        """UPDATE batch SET state = 'trained', learner_step = :step, version_in = :version_in,
                            trained_us = :now_us, trained_lsn = :lsn WHERE batch_id = :batch_id""",
        step=learner_step,
        version_in=version_in,
        now_us=tx.now_us,
        lsn=tx.lsn,
        batch_id=batch_id,
    )
    if values:
        _record_values(tx, batch_id, values)
    tx.run(
        f"""UPDATE batch_group AS l SET outcome = 'trained'
            WHERE batch_id = :batch_id AND {_IS_REPLAYED}""",
        batch_id=batch_id,
    )
    for group_uid in groups:
        outcome, reason = "trained", f"learner step {learner_step}"
        if group_uid in filtered:
            outcome, reason = "filtered", f"{reason}: {filtered[group_uid]}"
        tx.run(
            """UPDATE batch_group SET outcome = :outcome
               WHERE batch_id = :batch_id AND group_uid = :group_uid""",
            outcome=outcome,
            batch_id=batch_id,
            group_uid=group_uid,
        )
        _set_state(tx, group_uid, state=outcome, reason=reason)
    tx.touch("groups", "lineage")


def _check_settlement(
    tx: Transaction, batch_id: int, *, learner_step: int, version_in: int
) -> None:
    """Raise StoreError unless the batch is claimed, for `version_in`, and the step is a new one."""
    batch = tx.row(
        "SELECT state, claimed_version FROM batch WHERE batch_id = :batch_id", batch_id=batch_id
    )
    if batch is None or batch["state"] != "claimed":
        state = "unknown" if batch is None else batch["state"]
        raise StoreError(
            f"batch {batch_id} is {state}, only a claimed batch can be settled; claim a new one"
        )
    _check_same_version(batch_id, batch["claimed_version"], version_in)
    taken = tx.row(
        """SELECT batch_id FROM batch WHERE state = 'trained' AND learner_step >= :step
           ORDER BY learner_step DESC""",
        step=learner_step,
    )
    if taken is not None:
        raise StoreError(
            f"learner step {learner_step} is not after the last settled one (batch "
            f"{taken['batch_id']}); roll back to the checkpoint before training again"
        )


def _check_same_version(batch_id: int, claimed_version: int, version: int) -> None:
    """Raise StoreError unless a batch is trained on at the version for which it was claimed.

    The bound on staleness was checked for that version.
    """
    if version != claimed_version:
        raise StoreError(
            f"batch {batch_id} was claimed for policy version {claimed_version}, not {version}; "
            "train on it at that version"
        )


def _record_values(tx: Transaction, batch_id: int, values: Mapping[bytes, Sequence[float]]) -> None:
    tx.insert_many(
        "critic_value",
        [
            {
                "batch_id": batch_id,
                "traj_uid": traj_uid,
                "state_values": json.dumps(list(of_steps), allow_nan=False),
                "lsn": tx.lsn,
            }
            for traj_uid, of_steps in values.items()
        ],
    )
    tx.touch("critic")


def roll_back(tx: Transaction, learner_step: int) -> RollBack:
    """Make every group that was claimed or trained after `learner_step` available again.

    Append-only tables keep their rows. Versions stay, because they were announced and their numbers
    are never used again. Stale groups stay stale.
    """
    batches = tx.rows(
        """SELECT batch_id, state FROM batch
           WHERE state = 'claimed' OR (state = 'trained' AND learner_step > :step)""",
        step=learner_step,
    )
    why = f"rolled back to learner step {learner_step}"
    n_groups = sum(release(tx, batch["batch_id"], why=why) for batch in batches)
    if batches:
        open_incomplete(tx, why=f"the run was {why}")
    n_checkpoints = tx.run(
        "UPDATE checkpoint SET live = 0 WHERE live = 1 AND learner_step > :step", step=learner_step
    )
    n_metrics = tx.run(
        "UPDATE metric SET live = 0 WHERE live = 1 AND learner_step > :step", step=learner_step
    )
    n_heldout = _abandon_rounds(tx, learner_step)
    if batches or n_checkpoints or n_metrics or n_heldout:
        detail = (
            f"to learner step {learner_step}: {len(batches)} batches, "
            f"{n_groups} groups complete again"
        )
        tx.log(component=COMPONENT, what="roll_back", detail=detail)
        tx.touch("groups", "lineage", "checkpoints", "metrics")
    return RollBack(
        batches=len(batches),
        groups=n_groups,
        checkpoints=n_checkpoints,
        learner_steps=sum(batch["state"] == "trained" for batch in batches),
        complete=complete_by_version(tx),
    )


def _abandon_rounds(tx: Transaction, learner_step: int) -> int:
    """Abandon the open held-out groups of versions after `learner_step`. Return their number.

    They would be played with other weights than those of their round.
    """
    return tx.run(
        """UPDATE grp SET state = 'abandoned', reason = :rolled_back,
                          lease_worker = NULL, lease_until_us = NULL
           WHERE split = 'heldout' AND state = 'open'
             AND evaluated_version IN (SELECT version FROM version WHERE learner_step > :step)""",
        rolled_back=ROLLED_BACK,
        step=learner_step,
    )


def release(tx: Transaction, batch_id: int, *, why: str) -> int:
    """Make the groups of one batch available again, and return their number.

    A group that lost trajectories since (fsck) is opened again: it cannot be trained on until the
    missing members are played.
    """
    incomplete = tx.rows(
        """SELECT DISTINCT group_uid FROM batch_group JOIN lost_trajectory l USING (group_uid)
           JOIN grp USING (group_uid)
           WHERE batch_id = :batch_id AND live = 1 AND use = 1 AND source IS NULL
             AND l.traj_uid NOT IN (SELECT traj_uid FROM trajectory)""",
        batch_id=batch_id,
    )
    n_groups = tx.run(
        """UPDATE grp SET state = 'complete', reason = 'batch ' || :batch_id || ' was ' || :why
           WHERE source IS NULL
             AND group_uid IN (
                 SELECT group_uid FROM batch_group
                 WHERE batch_id = :batch_id AND live = 1 AND use = 1)""",
        batch_id=batch_id,
        why=why,
    )
    n_groups += tx.value(
        """SELECT count(*) FROM batch_group JOIN grp USING (group_uid)
           WHERE batch_id = :batch_id AND live = 1 AND source IS NOT NULL""",
        batch_id=batch_id,
    )
    tx.run("UPDATE batch_group SET live = 0 WHERE batch_id = :batch_id", batch_id=batch_id)
    tx.run(
        "UPDATE batch SET state = 'rolled_back', rolled_back_lsn = :lsn WHERE batch_id = :batch_id",
        lsn=tx.lsn,
        batch_id=batch_id,
    )
    reason = f"batch {batch_id} was {why}, and trajectories of it were lost"
    for row in incomplete:
        reopen(tx, row["group_uid"], reason=reason)
    tx.touch("groups", "lineage")
    return n_groups


def _set_state(tx: Transaction, group_uid: bytes, *, state: str, reason: str) -> None:
    """Set the state of a group of this run. An offline group stays complete."""
    tx.run(
        """UPDATE grp SET state = :state, reason = :reason
           WHERE group_uid = :group_uid AND source IS NULL""",
        state=state,
        reason=reason,
        group_uid=group_uid,
    )


def _segments(tx: Transaction, batch_id: int, *, replayed: bool) -> tuple[SegmentMeta, ...]:
    """Return the files that hold the trajectories of a batch, each with only those trajectories."""
    rows = tx.rows(
        f"""SELECT t.*, s.path, s.digest, s.n_steps AS file_steps, s.n_bytes, s.worker
            FROM batch_group l JOIN trajectory t USING (group_uid)
            JOIN segment s USING (segment_id)
            WHERE l.batch_id = :batch_id AND {_IS_REPLAYED} = :replayed
            ORDER BY s.lsn, t.segment_id, t.group_uid, t.member""",
        batch_id=batch_id,
        replayed=replayed,
    )
    of_segment: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of_segment.setdefault(row["segment_id"], []).append(dict(row))
    return tuple(
        SegmentMeta.of_rows({**rows[0], "n_steps": rows[0]["file_steps"]}, rows)
        for rows in of_segment.values()
    )

"""What a group knows of its trajectories, brought back in line after some of them were lost."""

from __future__ import annotations

from store.catalog.database import Transaction


def recompute(tx: Transaction, group_uid: bytes) -> None:
    """Set the group's figures to those of its trajectories."""
    tx.run(
        """UPDATE grp SET (n_members, n_steps, n_won, return_sum, version_min, version_max) = (
               SELECT count(*), coalesce(sum(n_steps), 0), coalesce(sum(won), 0), coalesce(sum(episode_return), 0.0),
                      min(version_min), max(version_max)
               FROM trajectory t WHERE t.group_uid = grp.group_uid)
           WHERE group_uid = :group_uid""",
        group_uid=group_uid,
    )
    tx.touch("groups")


def recompute_if_whole(tx: Transaction, group_uid: bytes) -> None:
    """The same, unless the group lacks members: a consumed one keeps the figures of what the
    learner saw.
    """
    row = tx.row(
        """SELECT n_members, (SELECT count(*) FROM trajectory t WHERE t.group_uid = g.group_uid) AS here
           FROM grp g WHERE group_uid = :group_uid""",
        group_uid=group_uid,
    )
    assert row is not None
    if row["here"] >= row["n_members"]:
        recompute(tx, group_uid)


def withhold_half(tx: Transaction, group_uid: bytes, *, why: str) -> None:
    """A stored group that lacks trajectories is not trained on again: half of it cannot be
    compared. Others stay.
    """
    lacks = tx.row(
        """SELECT 1 FROM grp g WHERE group_uid = :group_uid AND source IS NOT NULL AND state = 'complete'
           AND size > (SELECT count(*) FROM trajectory t WHERE t.group_uid = g.group_uid)""",
        group_uid=group_uid,
    )
    if lacks is not None:
        tx.run(
            "UPDATE grp SET state = 'abandoned', reason = :why, completed_lsn = NULL, completed_us "
            "= NULL WHERE group_uid = :g",
            why=f"trajectories of it were lost: {why}",
            g=group_uid,
        )
        recompute(tx, group_uid)


def reopen(tx: Transaction, group_uid: bytes, *, reason: str) -> None:
    """The members it lacks are to be played again; those it has stay."""
    tx.run(
        """UPDATE grp SET state = 'open', reason = :reason, completed_lsn = NULL, completed_us = NULL,
                          lease_worker = NULL, lease_until_us = NULL
           WHERE group_uid = :group_uid""",
        group_uid=group_uid,
        reason=reason,
    )
    recompute(tx, group_uid)

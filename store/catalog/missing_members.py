"""Open groups again whose members are in no file any more. Functions of one transaction.

A group that comes back, because a batch is rolled back or a run is forked, may have lost members
since: a repair set their file aside, or retention dropped it. It could be claimed, but not read.
"""

from __future__ import annotations

from store.catalog.groups import abandon_incomplete_offline, recompute, reopen
from store.catalog.transaction import Transaction

# The learner still needs the rows of these groups. The result of a held-out group is its sums.
_WANTED = """(split = 'train' AND state IN ('open', 'complete', 'claimed')
    OR source IS NOT NULL AND state = 'complete')"""
_MEMBERS_OF_DROPPED_FILES = f"""
    SELECT traj_uid, group_uid, member, segment_id
    FROM trajectory t JOIN grp USING (group_uid) JOIN segment s USING (segment_id)
    WHERE s.retired_lsn IS NOT NULL AND {_WANTED}"""


def open_incomplete(tx: Transaction, *, why: str) -> None:
    """Open all training groups that are still to be consumed and lack members.

    Members in files that retention dropped are listed as lost. Incomplete offline groups are
    abandoned: this run cannot play them.
    """
    for row in tx.rows(_MEMBERS_OF_DROPPED_FILES):
        reason = f"its file was dropped before {why}"
        tx.insert("lost_trajectory", **row, reason=reason, lsn=tx.lsn)
        tx.run("DELETE FROM trajectory WHERE traj_uid = :traj_uid", traj_uid=row["traj_uid"])
    incomplete = tx.rows(
        f"""SELECT group_uid, state, source FROM (
                SELECT *, (SELECT count(*) FROM trajectory t
                           WHERE t.group_uid = grp.group_uid) AS n_there
                FROM grp WHERE {_WANTED})
            WHERE n_there <> n_members OR state <> 'open' AND n_there < size"""
    )
    for row in incomplete:
        if row["source"] is not None:
            abandon_incomplete_offline(tx, row["group_uid"], why=why)
        elif row["state"] == "open":
            recompute(tx, row["group_uid"])
        else:
            reason = f"to be played again: members were lost before {why}"
            reopen(tx, row["group_uid"], reason=reason)

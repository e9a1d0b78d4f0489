"""Stored groups: imported ones that are trained on, perhaps several times. Functions of one
transaction each.

A stored group is whole, of split "imported", and names the run that played it as its `source`. It
is never leased, nor outstanding, nor stale, and stays `complete`: each use of it is a live row of
`batch_group` with a number of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from store.catalog.database import Transaction
from store.errors import StoreError
from store.records import uid_text

COMPONENT = "stored"
TAKEN = "sources taken"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """A group to be trained on, and the id of the run that played it."""

    group_uid: bytes
    source: str


def take(tx: Transaction, groups: Sequence[StoredGroup], *, detail: str) -> None:
    """These imported, complete groups are trained on from now on, in this order. Once for a run,
    and all at once.
    """
    if is_taken(tx):
        raise StoreError(
            "the stored groups of this run were chosen already; start a new run to choose others"
        )
    row = tx.row("SELECT coalesce(max(ordinal) + 1, 0) AS next FROM grp WHERE split = 'imported'")
    assert row is not None
    for ordinal, group in enumerate(groups, start=row["next"]):
        n = tx.run(
            """UPDATE grp SET ordinal = :ordinal, source = :source
               WHERE group_uid = :group_uid AND split = 'imported' AND state = 'complete'""",
            ordinal=ordinal,
            source=group.source,
            group_uid=group.group_uid,
        )
        if n != 1:
            raise StoreError(
                f"group {uid_text(group.group_uid)} is no whole imported group; import it before "
                "it is taken"
            )
    tx.log(component=COMPONENT, what=TAKEN, detail=detail)
    tx.touch("groups")


def is_taken(tx: Transaction) -> bool:
    """Whether the run has its stored groups."""
    return tx.row("SELECT 1 FROM grp WHERE source IS NOT NULL LIMIT 1") is not None


def least_used(tx: Transaction, *, n_groups: int, uses: int) -> list[sqlite3.Row]:
    """The next `n_groups` to be trained on, fewer if fewer are left: by how often they were used,
    then by their order.

    `use` is the smallest number that no live use of the group has: the next one, or that of a batch
    that was released.
    """
    return tx.rows(
        """WITH used AS NOT MATERIALIZED (SELECT group_uid, use FROM batch_group WHERE live = 1), chosen AS (
               SELECT g.group_uid, task_id, ordinal, version_min, version_max, source, count(use) AS n_uses
               FROM grp g LEFT JOIN used USING (group_uid) WHERE source IS NOT NULL AND state = 'complete'
               GROUP BY g.group_uid HAVING n_uses < :uses ORDER BY n_uses, ordinal LIMIT :n_groups)
           SELECT *, (SELECT min(number) FROM (SELECT 1 AS number UNION SELECT use + 1 FROM used WHERE group_uid = c.group_uid)
                      WHERE number NOT IN (SELECT use FROM used WHERE group_uid = c.group_uid)) AS use
           FROM chosen c ORDER BY n_uses, ordinal""",
        uses=uses,
        n_groups=n_groups,
    )


def in_batch(tx: Transaction, batch_id: int) -> int:
    """How many groups of a batch are stored ones."""
    row = tx.row(
        """SELECT count(*) AS n FROM batch_group JOIN grp USING (group_uid)
           WHERE batch_id = :batch_id AND live = 1 AND source IS NOT NULL""",
        batch_id=batch_id,
    )
    assert row is not None
    return int(row["n"])


def batches_left(tx: Transaction, *, n_groups: int, uses: int) -> int:
    """How many more batches of `n_groups` different stored groups there are."""
    rows = tx.rows(
        """SELECT :uses - count(use) AS n FROM grp g LEFT JOIN batch_group l ON l.group_uid = g.group_uid AND l.live = 1
           WHERE source IS NOT NULL AND state = 'complete' GROUP BY g.group_uid""",
        uses=uses,
    )
    return rounds([row["n"] for row in rows], n_groups)


def rounds(left: Sequence[int], n: int) -> int:
    """How often `n` different things can be taken when thing i can be taken left[i] times, those
    with most left first.

    k times can, if and only if sum(min(left[i], k)) >= k n: three things, twice each, n = 2 give 3;
    left (5, 1), n = 2 give 1.
    """
    k = sum(max(0, one) for one in left) // n
    while k * n > sum(min(max(0, one), k) for one in left):
        k -= 1
    return k

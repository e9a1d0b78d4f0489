"""Read the results of training tasks, by which later groups choose theirs.

A choice counts the results up to the lsn at which the newest learner step was first announced. That
lsn never goes back, and a restart finds it again. Functions of one transaction.
"""

from __future__ import annotations

from store.catalog.records import KnownResults, WholeGroup
from store.catalog.transaction import Transaction

ENVIRONMENT = "substr(task_id, 1, instr(task_id, '/') - 1)"


def known_results(tx: Transaction) -> KnownResults:
    """Return up to which lsn results count now.

    After a roll-back to an earlier learner step it stays, so the draws go on where they were.
    """
    row = tx.row(
        """SELECT lsn, version FROM version
           WHERE learner_step = (SELECT max(learner_step) FROM version)
           ORDER BY lsn LIMIT 1"""
    )
    return KnownResults(lsn=0, version=0) if row is None else KnownResults(**row)


def whole_groups(tx: Transaction, *, since: int, until: int) -> list[WholeGroup]:
    """Return the training groups that became whole after lsn `since` and up to `until`, in order.

    Stale and filtered groups are among them: their episodes say as much about the task.
    """
    rows = tx.rows(
        """SELECT task_id, size, n_won, return_sum, version_max FROM grp
           WHERE completed_lsn > :since AND completed_lsn <= :until AND split = 'train'
           ORDER BY completed_lsn, ordinal""",
        since=since,
        until=until,
    )
    return [WholeGroup(**row) for row in rows]


def handed_out(tx: Transaction, *, first: int, until: int) -> list[tuple[int, str]]:
    """Return ordinal and task of the training groups opened up to lsn `until`, from `first` on."""
    rows = tx.rows(
        """SELECT ordinal, task_id FROM grp
           WHERE split = 'train' AND evaluated_version IS NULL AND ordinal >= :first
             AND opened_lsn <= :until
           ORDER BY ordinal""",
        first=first,
        until=until,
    )
    return [(row["ordinal"], row["task_id"]) for row in rows]


def first_weighed(tx: Transaction, *, lsn: int, ordinal: int) -> int:
    """Return the first ordinal of the groups just before `ordinal` that were weighed at `lsn`.

    Returns `ordinal` if there is none.
    """
    row = tx.row(
        # The index is walked from its end, back to the first group that was weighed earlier.
        """SELECT ordinal FROM grp
           WHERE split = 'train' AND evaluated_version IS NULL AND ordinal < :ordinal
             AND weighed_lsn IS NOT :lsn
           ORDER BY ordinal DESC LIMIT 1""",
        lsn=lsn,
        ordinal=ordinal,
    )
    return 0 if row is None else int(row["ordinal"]) + 1


def batch_success(tx: Transaction, batch_id: int) -> dict[str, float]:
    """Return by environment the fraction won of a batch's episodes that were played for it.

    For a run of several environments, whose task ids begin with the environment's name. Groups of
    other runs and replayed wins are left out.
    """
    rows = tx.rows(
        f"""SELECT {ENVIRONMENT} AS environment, sum(n_won) * 1.0 / sum(n_members) AS success
            FROM batch_group JOIN grp USING (group_uid)
            WHERE batch_id = :batch_id AND split = 'train' AND use = 1 GROUP BY 1""",
        batch_id=batch_id,
    )
    return {row["environment"]: row["success"] for row in rows}


def round_success(tx: Transaction, version: int) -> dict[str, float]:
    """Return by environment the fraction of an evaluation round's episodes that were won."""
    rows = tx.rows(
        f"""SELECT {ENVIRONMENT} AS environment, sum(n_won) * 1.0 / sum(n_members) AS success
            FROM grp WHERE split = 'heldout' AND evaluated_version = :version AND n_members > 0
            GROUP BY 1""",
        version=version,
    )
    return {row["environment"]: row["success"] for row in rows}


def record_weight(
    tx: Transaction, group_uid: bytes, *, weight: float, success_before: float | None, lsn: int
) -> None:
    """Record by which weight the task of a new group was drawn.

    Call it in the transaction that opens the group: an export of an earlier one would lack it.
    """
    tx.run(
        """UPDATE grp SET weight = :weight, success_before = :success_before, weighed_lsn = :lsn
           WHERE group_uid = :group_uid""",
        weight=weight,
        success_before=success_before,
        lsn=lsn,
        group_uid=group_uid,
    )

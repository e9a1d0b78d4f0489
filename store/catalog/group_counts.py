"""Count groups by state, and sum up finished evaluation rounds."""

from __future__ import annotations

from store.catalog.database import Transaction, pick
from store.catalog.records import Counts, Evaluation, SuccessRate

# Reason of a held-out group that was abandoned in a roll-back: its round has no result.
ROLLED_BACK = "the evaluated version was rolled back"


def counts(tx: Transaction) -> Counts:
    """Return the training groups by state, at a cost that does not grow: see group_counts.sql."""
    rows = tx.rows(
        "SELECT state, n_groups AS n, n_members, n_steps FROM group_count WHERE split = 'train'"
    )
    n = {row["state"]: row["n"] for row in rows}
    states = ("open", "complete", "claimed", "trained", "stale", "filtered")
    return Counts(
        **{state: n.get(state, 0) for state in states},
        leased=tx.value(
            """SELECT count(*) FROM grp
               WHERE lease_until_us > :now_us AND lease_until_us IS NOT NULL
                 AND split = 'train' AND state = 'open'""",
            now_us=tx.now_us,
        ),
        trajectories=sum(row["n_members"] for row in rows),
        steps=sum(row["n_steps"] for row in rows),
    )


def complete_by_version(tx: Transaction) -> dict[int, int]:
    """Count the complete training groups by their oldest version."""
    rows = tx.rows(
        """SELECT version_min, count(*) AS n FROM grp WHERE split = 'train' AND state = 'complete'
           GROUP BY version_min"""
    )
    return {row["version_min"]: row["n"] for row in rows}


def outstanding(tx: Transaction) -> int:
    """Return the training groups handed out and not yet trained on, which admission bounds.

    It equals `counts().outstanding`, and reads the index only.
    """
    return int(
        tx.value(
            """SELECT count(*) FROM grp
               WHERE split = 'train' AND state IN ('open', 'complete', 'claimed')"""
        )
    )


def open_heldout(tx: Transaction) -> int:
    """Return the number of held-out groups still to be played, over all evaluation rounds."""
    return int(tx.value("SELECT count(*) FROM grp WHERE split = 'heldout' AND state = 'open'"))


def finished_evaluations(tx: Transaction) -> list[Evaluation]:
    """Return evaluation rounds that are played to the end and have no figure `heldout/success` yet.

    A round whose version was rolled back is not returned. Episodes whose environment failed are
    only counted.
    """
    rows = tx.rows(
        # Step from round to round by the index. Look only into the groups of rounds without a
        # figure, which are few.
        """WITH RECURSIVE round (version) AS (
               SELECT min(purpose_version) FROM grp WHERE split = 'heldout'
               UNION ALL
               SELECT (SELECT min(purpose_version) FROM grp
                       WHERE split = 'heldout' AND purpose_version > round.version)
               FROM round WHERE round.version IS NOT NULL)
           SELECT v.version, coalesce(v.learner_step, 0) AS learner_step,
                  sum(g.n_members) AS n_trajectories, sum(g.n_won) AS n_won,
                  sum(g.state = 'abandoned') AS n_abandoned,
                  coalesce(max(g.version_max), v.version) AS newest_version,
                  sum(g.return_sum) AS return_sum, sum(g.n_steps) AS n_steps
           FROM round CROSS JOIN version v ON v.version = round.version
           CROSS JOIN grp g ON g.split = 'heldout' AND g.purpose_version = round.version
           WHERE NOT EXISTS (
               SELECT 1 FROM metric m
               WHERE m.name = 'heldout/success' AND m.policy_version = round.version)
           GROUP BY round.version HAVING sum(g.state = 'open' OR g.reason = :rolled_back) = 0""",
        rolled_back=ROLLED_BACK,
    )
    fields = set(Evaluation.__slots__) - {"success"}
    return [
        Evaluation(
            success=SuccessRate(n_trajectories=row["n_trajectories"], n_won=row["n_won"]),
            **pick(row, fields),
        )
        for row in rows
    ]

"""What the catalog knows in sum: groups by state, and evaluation rounds."""

from __future__ import annotations

from store.catalog.database import Transaction
from store.catalog.records import Counts, Evaluation, SuccessRate

ROLLED_BACK = "the evaluated version was rolled back"  # why a round was abandoned that is no result


def counts(tx: Transaction) -> Counts:
    """Training groups by state; see Counts."""
    rows = tx.rows(
        """SELECT state, count(*) AS n, sum(n_members) AS trajectories, sum(n_steps) AS steps,
                  sum(lease_until_us > :now_us) AS leased
           FROM grp WHERE split = 'train' GROUP BY state""",
        now_us=tx.now_us,
    )
    n = {row["state"]: row["n"] for row in rows}
    return Counts(
        open=n.get("open", 0),
        leased=sum(row["leased"] or 0 for row in rows if row["state"] == "open"),
        complete=n.get("complete", 0),
        claimed=n.get("claimed", 0),
        trained=n.get("trained", 0),
        stale=n.get("stale", 0),
        no_signal=n.get("no_signal", 0),
        trajectories=sum(row["trajectories"] for row in rows),
        steps=sum(row["steps"] for row in rows),
    )


def complete_by_version(tx: Transaction) -> dict[int, int]:
    """Oldest version -> how many complete training groups have it as theirs."""
    rows = tx.rows(
        "SELECT version_min, count(*) AS n FROM grp WHERE split = 'train' AND state = 'complete' GROUP BY version_min"
    )
    return {row["version_min"]: row["n"] for row in rows}


def outstanding(tx: Transaction) -> int:
    """Training groups handed out and not yet trained on: `counts().outstanding`, from the index alone."""
    row = tx.row("SELECT count(*) AS n FROM grp WHERE split = 'train' AND state IN ('open', 'complete', 'claimed')")
    assert row is not None
    return int(row["n"])


def open_heldout(tx: Transaction) -> int:
    """Held-out groups still to be played, over all evaluation rounds."""
    row = tx.row("SELECT count(*) AS n FROM grp WHERE split = 'heldout' AND state = 'open'")
    assert row is not None
    return int(row["n"])


def finished_evaluations(tx: Transaction) -> list[Evaluation]:
    """Evaluation rounds that were played to the end and have no figure `heldout/success` under their version yet.

    What was rolled back is none; what was abandoned because its environment failed is left out, and counted.
    """
    rows = tx.rows(
        """SELECT v.version, coalesce(v.learner_step, 0) AS learner_step, r.n_trajectories, r.n_won, r.n_abandoned,
                  r.newest_version, r.return_sum, r.n_steps FROM (
               SELECT purpose_version, sum(n_members) AS n_trajectories, sum(n_won) AS n_won,
                      sum(return_sum) AS return_sum, sum(n_steps) AS n_steps,
                      sum(state = 'abandoned') AS n_abandoned, coalesce(max(version_max), purpose_version) AS newest_version
               FROM grp WHERE split = 'heldout'
               GROUP BY purpose_version HAVING sum(state = 'open' OR reason = :rolled_back) = 0) AS r
           JOIN version v ON v.version = r.purpose_version
           WHERE NOT EXISTS (
               SELECT 1 FROM metric m WHERE m.name = 'heldout/success' AND m.policy_version = r.purpose_version)""",
        rolled_back=ROLLED_BACK,
    )
    return [
        Evaluation(
            version=row["version"],
            learner_step=row["learner_step"],
            success=SuccessRate(n_trajectories=row["n_trajectories"], n_won=row["n_won"]),
            n_abandoned=row["n_abandoned"],
            newest_version=row["newest_version"],
            return_sum=row["return_sum"],
            n_steps=row["n_steps"],
        )
        for row in rows
    ]

"""Cut a batch's rows into optimizer updates, and count their staleness.

updates = cut_updates(rows, learner=config.learner, version=7, seed=8)
stats = ranks.train([update.micro_batches for update in updates])
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from configs import LearnerConfig
from learner.data.micro_batch import MicroBatch, micro_batches, split_updates
from store import IMPORTED

OFFLINE_STALENESS = -1  # an offline row's versions are another run's, so there is none to count


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One optimizer update: its rows, and micro-batches of those that have a response.

    `MicroBatch.rows_N` are indices into `rows`.
    """

    rows: pa.Table
    micro_batches: list[MicroBatch]


def cut_updates(rows: pa.Table, *, learner: LearnerConfig, version: int, seed: int) -> list[Update]:
    """Cut the rows into optimizer updates, shuffled by `seed`, to train at policy `version`.

    Parts without a response token are left out. Five rows of versions 6, 6, 7, 7, 7, cut into two
    updates at version 7: one of three rows and one of two. Rows of version 6 have staleness 1.
    """
    parts = split_updates(
        with_staleness(rows, version=version),
        updates=learner.updates_per_step,
        rows_per_update=learner.rows_per_update,
        seed=seed,
    )
    updates = []
    for part in parts:
        batches = micro_batches(
            part,
            micro_batch_tokens=learner.micro_batch_tokens,
            ranks=learner.ranks,
        )
        if batches:
            updates.append(Update(rows=part, micro_batches=batches))
    return updates


def with_staleness(rows: pa.Table, *, version: int) -> pa.Table:
    """Append the column `staleness` at policy `version`; OFFLINE_STALENESS for offline rows."""
    is_offline = pc.equal(rows["split"], IMPORTED)
    staleness = pc.subtract(version, rows["version_min"])
    return rows.append_column("staleness", pc.if_else(is_offline, OFFLINE_STALENESS, staleness))

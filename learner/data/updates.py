"""Cut a batch's rows into optimizer updates, and count their staleness.

The learner takes one learner step with all updates of a batch:

    updates = cut_updates(rows, learner=config.learner, version=7, seed=8)
    stats = ranks.train([update.micro_batches for update in updates])
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs import LearnerConfig, sequence_groups
from learner.data.micro_batch import MicroBatch, micro_batches
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
            ranks=sequence_groups(learner),
        )
        if batches:
            updates.append(Update(rows=part, micro_batches=batches))
    return updates


def split_updates(
    rows: pa.Table, *, updates: int, rows_per_update: int, seed: int
) -> list[pa.Table]:
    """Shuffle the rows by `seed` and cut them into the parts of several optimizer updates.

    Each part has `rows_per_update` rows, the last one the rest. With rows_per_update=0 there are
    `updates` parts of nearly equal length, at most one per row. Rows come group by group, and every
    update should see all groups: hence the shuffle. A single part is the table unchanged, also an
    empty one.

        five rows, updates=2               3 and 2 rows
        five rows, rows_per_update=2       2, 2 and 1 rows
    """
    n_rows = rows.num_rows
    n_parts = math.ceil(n_rows / rows_per_update) if rows_per_update else min(updates, n_rows)
    if n_parts <= 1:
        return [rows]
    order = np.random.default_rng(seed).permutation(n_rows)
    ends = np.arange(rows_per_update, n_rows, rows_per_update) if rows_per_update else n_parts
    return [rows.take(pa.array(part)) for part in np.array_split(order, ends)]


def share_of_update(n_rows: int, *, rows_per_update: int) -> float:
    """Return the weight of an update of `n_rows` rows: its share of a full one.

    With rows_per_update=256 an update of 88 rows weighs 88 / 256, as verl's last mini-batch does.
    With rows_per_update=0 each update weighs 1.
    """
    return min(1.0, n_rows / rows_per_update) if rows_per_update else 1.0


def with_staleness(rows: pa.Table, *, version: int) -> pa.Table:
    """Append the column `staleness` at policy `version`; OFFLINE_STALENESS for offline rows."""
    is_offline = pc.equal(rows["split"], IMPORTED)
    staleness = pc.subtract(version, rows["version_min"])
    return rows.append_column("staleness", pc.if_else(is_offline, OFFLINE_STALENESS, staleness))

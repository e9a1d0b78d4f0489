"""Makes the run in format-1.tar.gz. To be run with the code of commit 2f7c1e2, the last that wrote format 1:

mkdir /tmp/old && git archive 2f7c1e2 store tests/support/store_samples.py | tar x -C /tmp/old
cd /tmp/old && PYTHONPATH=. python <here>/make_format_1.py /tmp/format-1
tar --sort=name --owner=0 --group=0 -czf <here>/format-1.tar.gz -C /tmp format-1
"""

from __future__ import annotations

import sys
from pathlib import Path

from store import Catalog, RunLayout, export, write_open_sql, write_segment
from tests.support.store_samples import make_trajectory, open_train_group, play


def make(root: Path) -> None:
    """Groups that are trained, without signal, stale, complete, half open and held out; a duplicate; a roll-back."""
    layout = RunLayout.create(root, config_yaml="max_staleness: 4\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(
            layout, macros=["CREATE OR REPLACE MACRO twice(x) AS 2 * x;"], max_staleness=4
        )
        catalog.record_version(version=0, path="weights/v000000", digest="d0", learner_step=None)
        catalog.record_version(version=1, path="weights/v000001", digest="d1", learner_step=None)
        for ordinal in range(5):
            play(layout, catalog, open_train_group(catalog, ordinal))
        for step in (1, 2):
            batch = catalog.claim(n_groups=2, current_version=1, max_staleness=4)
            assert batch is not None
            no_signal = [batch.groups[0].group_uid] if step == 1 else []
            catalog.settle(batch.batch_id, learner_step=step, no_signal=no_signal, version_in=1)
            catalog.record_metrics(learner_step=step, policy_version=1, values={"loss": step / 2})
            catalog.record_checkpoint(
                learner_step=step, path=f"checkpoints/step{step:06d}", version=1
            )
        catalog.roll_back(1)
        assert (
            catalog.claim(n_groups=9, current_version=6, max_staleness=5) is None
        )  # makes none stale
        assert catalog.claim(n_groups=9, current_version=1, max_staleness=1) is None
        play(layout, catalog, open_train_group(catalog, 5), version=1)
        assert (
            catalog.claim(n_groups=9, current_version=5, max_staleness=4) is None
        )  # those of version 0 become stale
        group = open_train_group(catalog, 6, size=3)
        for members in ((1,), (0, 1)):  # the second holds a duplicate
            trajectories = [make_trajectory(group, member, version=1) for member in members]
            catalog.commit(
                write_segment(layout, trajectories, worker="w1", epoch=catalog.epoch),
                epoch=catalog.epoch,
            )
        play(
            layout,
            catalog,
            catalog.open_group(ordinal=0, task_id="h", split="heldout", size=1, purpose_version=1),
        )
        catalog.heartbeat("learner", waiting_on="groups")
        export(catalog, layout)


if __name__ == "__main__":
    make(Path(sys.argv[1]))

"""A small run of the store from start to end, in a process that tests kill or record.

Deterministic and repeatable: started again it recovers, asks for everything once more and reaches
the same end. What it was told is done it appends to a file outside the run, one JSON line each:
what must be there after any crash.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from store import (
    Catalog,
    CheckpointRecord,
    Group,
    RunLayout,
    VersionRecord,
    export,
    now_us,
    read_segment,
    write_open_sql,
    write_segment,
)
from store.atomic_write import make_directory
from store.maintenance import sweep
from store.maintenance.compact import CompactionPolicy
from store.maintenance.sweep import expire_old
from store.reading import manifest
from tests.support.store_runs import compact_once
from tests.support.store_samples import make_trajectory

RUN_ID = uuid.UUID(int=7)
GROUPS_PER_STEP = 2
ROUNDS = 6
EXPIRED_ROUNDS = 3  # what the first three learner steps were trained on is removed by retention
CHECKPOINT_EVERY = 3
NO_BOUND = 1_000  # staleness is not what is tested here
POLICY = CompactionPolicy(fan_in=3, max_live_files=500, min_file_bytes=1 << 20)


class Diary:
    """Write down each phase of the run, and each fact that was acknowledged."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def phase(self, name: str) -> None:
        """From here on it does this."""
        self._write({"phase": name})

    def done(self, what: str, **facts: object) -> None:
        """Write down a fact that was acknowledged."""
        self._write({"done": what, **facts})

    def _write(self, line: dict[str, object]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


def main(root: str, diary_path: str) -> None:
    """Play all rounds with two owners, one after the other: the second one recovers."""
    # nobody else has this run open, and what is removed can be lost
    sweep.ORPHAN_GRACE_S = manifest.GRACE_S = 0.0
    uuid.uuid4 = lambda: RUN_ID  # so that all uids are the same in each run
    diary = Diary(Path(diary_path))
    diary.phase("create")
    exists = RunLayout.exists(Path(root))
    layout = (
        RunLayout.open(Path(root)) if exists else RunLayout.create(Path(root), config_yaml="a: 1\n")
    )
    if not layout.open_sql.exists():
        write_open_sql(layout, macros=(), max_staleness=NO_BOUND)
    diary.done("create")
    own(layout, diary, rounds=EXPIRED_ROUNDS + 1)  # its last learner step has no checkpoint
    own(layout, diary, rounds=ROUNDS)


def own(layout: RunLayout, diary: Diary, *, rounds: int) -> None:
    """One owner of the catalog, from recovery to an orderly end."""
    diary.phase("recovery")
    opened_us = now_us()
    with Catalog.open(layout) as catalog:
        # A short run is to see what happens to a long one: the WAL begun anew, again and again.
        catalog._database._connection.execute("PRAGMA wal_autocheckpoint = 100")
        checkpoint = next(reversed(catalog.live_checkpoints()), None)
        step = checkpoint.learner_step if checkpoint is not None else 0
        catalog.roll_back(step)
        diary.done("recovery", epoch=catalog.epoch, step=step)
        show(layout, catalog, diary)
        # the samples need two to start with
        while (latest := catalog.latest_version()) is None or latest.version < 1:
            publish(catalog, diary, learner_step=None)
        for number in range(rounds):
            play(layout, catalog, diary, number=number)
            train(layout, catalog, diary, step=number + 1)
            if number + 1 == EXPIRED_ROUNDS or number + 1 == ROUNDS:
                keep_up(layout, catalog, diary, opened_us=opened_us)
            show(layout, catalog, diary)


def play(layout: RunLayout, catalog: Catalog, diary: Diary, *, number: int) -> None:
    """Play the groups of one learner step and one evaluation; some in two files, some twice."""
    diary.phase("open")
    with catalog.unsynced():  # no promise yet: it is one when readers are shown it
        large, small = (
            catalog.open_group(
                ordinal=ordinal,
                task_id=f"task-{ordinal}",
                split="train",
                size=size,
                evaluated_version=None,
            )
            for ordinal, size in ((GROUPS_PER_STEP * number, 3), (GROUPS_PER_STEP * number + 1, 2))
        )
        trial = catalog.open_group(
            ordinal=number, task_id="trial", split="heldout", size=1, evaluated_version=0
        )
    show(layout, catalog, diary)
    diary.done("open", groups=[group.group_uid.hex() for group in (large, small, trial)])
    write_and_commit(layout, catalog, diary, members=[(large, 0)], version=number, worker="w0")
    mixed = [(large, 0), (large, 1), (large, 2)]  # the first one is known by now
    write_and_commit(layout, catalog, diary, members=mixed, version=number, worker="w1")
    write_and_commit(
        layout,
        catalog,
        diary,
        members=[(small, 0), (small, 1), (trial, 0)],
        version=number,
        worker="w0",
    )
    write_and_commit(
        layout, catalog, diary, members=[(small, 1), (small, 0)], version=number, worker="w2"
    )


def write_and_commit(
    layout: RunLayout,
    catalog: Catalog,
    diary: Diary,
    *,
    members: list[tuple[Group, int]],
    version: int,
    worker: str,
) -> None:
    """Write a file and commit it; retry the commit although it was acknowledged."""
    diary.phase("write")
    trajectories = [
        make_trajectory(group, member, version=version, n_steps=1 + (group.ordinal + member) % 3)
        for group, member in members
    ]
    segment = write_segment(layout, trajectories, worker=worker, epoch=catalog.epoch)
    diary.phase("commit")
    with catalog.unsynced():
        catalog.heartbeats({worker: None})
    catalog.commit(segment, epoch=catalog.epoch)
    catalog.log(component=worker, what="wrote", detail=segment.path)
    diary.done("commit", trajectories=[trajectory.traj_uid.hex() for trajectory in trajectories])
    catalog.commit(segment, epoch=catalog.epoch)


def train(layout: RunLayout, catalog: Catalog, diary: Diary, *, step: int) -> None:
    """One learner step, if it was not settled already."""
    if step <= catalog.learner_step():
        return
    diary.phase("claim")
    latest = catalog.latest_version()
    assert latest is not None
    batch = catalog.claim(
        n_groups=GROUPS_PER_STEP, current_version=latest.version, max_staleness=NO_BOUND
    )
    assert batch is not None
    groups = [group.group_uid.hex() for group in batch.groups]
    diary.done("claim", batch=batch.batch_id, groups=groups)
    for meta in batch.segments:
        read_segment(layout, meta)
    diary.phase("settle")
    filtered = {batch.groups[0].group_uid: "alike"} if step % 2 else {}
    catalog.settle(batch.batch_id, learner_step=step, filtered=filtered, version_in=latest.version)
    diary.done("settle", batch=batch.batch_id, step=step)
    diary.phase("ledger")
    publish(catalog, diary, learner_step=step)
    catalog.record_metrics(
        learner_step=step, policy_version=latest.version, values={"loss": 1.0 / step}
    )
    diary.done("metrics", step=step)
    if step % CHECKPOINT_EVERY == 0:
        checkpoint = layout.checkpoint_dir(step)
        make_directory(checkpoint, beneath=layout.root)
        catalog.record_checkpoint(
            CheckpointRecord(
                learner_step=step, path=layout.relative(checkpoint), version=latest.version + 1
            )
        )
        diary.done("checkpoint", step=step)


def publish(catalog: Catalog, diary: Diary, *, learner_step: int | None) -> None:
    """Publish the next version. The number of a version that was rolled back is not used again."""
    latest = catalog.latest_version()
    version = 0 if latest is None else latest.version + 1
    catalog.record_version(
        VersionRecord(
            version=version,
            path=f"weights/v{version}",
            digest=f"{version:032x}",
            learner_step=learner_step,
        )
    )
    diary.done("version", version=version)


def keep_up(layout: RunLayout, catalog: Catalog, diary: Diary, *, opened_us: int) -> None:
    """Compaction, retention of what the first learner steps consumed, and removal of files that
    nobody needs.
    """
    diary.phase("compaction")
    while compact_once(catalog, layout, policy=POLICY, skip=()) is not None:
        diary.done("compaction")
    diary.phase("retention")
    newest = catalog.latest_version()
    assert newest is not None
    # The first rounds were sampled by versions up to EXPIRED_ROUNDS. The number of versions since
    # then depends on the crashes.
    expire_old(catalog, layout, keep_days=None, keep_versions=newest.version - EXPIRED_ROUNDS)
    diary.done("retention")
    diary.phase("sweep")
    # nothing leaves the disk that the manifest still names
    sweep.sweep_retired(catalog, layout, window_s=0.0)
    show(layout, catalog, diary)
    diary.phase("sweep")
    if layout.info.storage_uri is not None:  # nor the newest backup
        catalog.back_up()
    sweep.sweep_retired(catalog, layout, window_s=0.0)
    sweep.sweep_orphans(catalog, layout, opened_us=opened_us, before=None)
    diary.done("sweep")


def show(layout: RunLayout, catalog: Catalog, diary: Diary) -> None:
    """Export, and write down which lsn readers see."""
    diary.phase("manifest")
    diary.done("manifest", lsn=export(catalog, layout))

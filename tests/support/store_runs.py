"""A small run in which everything has happened once, for tests that damage it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path

from store import (
    Catalog,
    CheckpointRecord,
    Group,
    ReusedGroups,
    RunLayout,
    VersionRecord,
    export,
    write_open_sql,
    write_segment,
)
from store.maintenance.compact import CompactionPolicy, CompactionResult, merges
from tests.support.store_samples import (
    make_trajectory,
    make_unfinished,
    open_task_group,
    open_train_group,
    play,
)

MERGE_TWO = CompactionPolicy(fan_in=2, max_live_files=500, min_file_bytes=64 * 1024**2)


def compact_once(
    catalog: Catalog, layout: RunLayout, *, policy: CompactionPolicy, skip: Collection[str]
) -> CompactionResult | None:
    """Do the next merge; None if none is due."""
    return next(merges(catalog, layout, policy=policy, skip=skip), None)


def make_run(root: Path) -> RunLayout:
    """Train groups 0..6: trained (0), no signal (1), trained, rolled back and complete (2, 3),
    stale (4), complete (5, drawn by weight after a result of its task), open (6, one of three
    members); one held-out group; a critic's values; a replay of wins, rolled back; a duplicate; the
    first two files merged, and still there; two unfinished episodes; exported.
    """
    layout = RunLayout.create(root, config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        for version, learner_step in enumerate((None, None, 1)):
            publish(catalog, version, learner_step=learner_step)
        for ordinal in range(5):
            play(
                layout,
                catalog,
                open_train_group(catalog, ordinal),
                version=0 if ordinal == 4 else 1,
            )
        # group 4 is stale
        assert catalog.claim(n_groups=9, current_version=2, max_staleness=1) is None
        for step in (1, 2):
            batch = catalog.claim(
                n_groups=2,
                current_version=2,
                max_staleness=1,
                reused=ReusedGroups(n_replayed=1, max_age_versions=1),
            )
            assert batch is not None
            assert len(batch.replayed) == step - 1
            filtered = {batch.groups[1].group_uid: "alike"} if step == 1 else {}
            catalog.settle(
                batch.batch_id,
                learner_step=step,
                filtered=filtered,
                version_in=2,
                values={traj_uid: [0.5, 0.25, 2.0] for traj_uid in batch.groups[0].traj_uids},
            )
            catalog.record_metrics(learner_step=step, policy_version=2, values={"loss": step / 2})
            catalog.record_checkpoint(
                CheckpointRecord(learner_step=step, path=f"checkpoints/step{step:06d}", version=2)
            )
        publish(catalog, 3, learner_step=2)
        catalog.roll_back(1)
        assert compact_once(catalog, layout, policy=MERGE_TWO, skip=()) is not None
        play(layout, catalog, draw_again(catalog, "task-0"), version=1, worker="w1")
        group = open_train_group(catalog, 6, size=3)
        for members, worker in (((1,), "w1"), ((0, 1), "w2")):  # the second holds a duplicate
            trajectories = [make_trajectory(group, member, version=1) for member in members]
            catalog.commit(
                write_segment(layout, trajectories, worker=worker, epoch=catalog.epoch),
                epoch=catalog.epoch,
            )
        play(
            layout,
            catalog,
            catalog.open_group(
                ordinal=0, task_id="h", split="heldout", size=1, evaluated_version=2
            ),
            version=2,
        )
        lost = {"why": "worker_lost", "n_steps": None, "n_response_tokens": None}
        catalog.record_unfinished(
            [make_unfinished(group, 3), make_unfinished(group, 2, **lost)], worker="w1"
        )
        catalog.heartbeats({"learner": "groups"})
        export(catalog, layout)
    return layout


def publish(catalog: Catalog, version: int, *, learner_step: int | None) -> None:
    catalog.record_version(
        VersionRecord(
            version=version,
            path=f"weights/v{version}",
            digest=f"d{version}",
            learner_step=learner_step,
        )
    )


def draw_again(catalog: Catalog, task_id: str) -> Group:
    """The next group, of a task that won half of its episodes, as a queue that weighs draws it."""
    with catalog.unsynced():
        group = open_task_group(catalog, task_id)
        lsn = catalog.known_results().lsn
        catalog.record_weight(group.group_uid, weight=0.275, success_before=0.5, lsn=lsn)
    return group


def copy_run(source: RunLayout, root: Path) -> RunLayout:
    # With new times: files that nobody committed are swept after a while, and `source` may be old.
    shutil.copytree(source.root, root, copy_function=shutil.copy)
    return RunLayout.open(root)


def rewrite(path: Path, data: bytes) -> None:
    """Also where the file is read-only."""
    path.chmod(0o644)
    path.write_bytes(data)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    rewrite(path, bytes(data))


def fingerprint(root: Path, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    """Every file of a directory and a digest of its content. What SQLite keeps beside an open
    catalog is left out.
    """
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and (name := path.relative_to(root).as_posix()) not in but
        and not name.endswith(("-wal", "-shm"))
    }

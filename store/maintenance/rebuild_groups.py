"""Groups whose row is in no readable export: as their trajectories, the ledger and the lineage tell
them. For rebuild.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from store.catalog.rebuild_rows import FoundGroup
from store.catalog.records import IMPORTED
from store.hashing import uid
from store.maintenance.segment_rows import Played
from store.reading.exported import Exported, Row
from store.segments import TrajectoryMeta

ORDINALS_TRIED = 100_000  # beyond the largest exported one: groups dispatched since the last export
ROUNDS_TRIED = 1_000  # policy versions beyond the newest known one that may have been evaluated


def new_groups(
    run_id: str, exported: Exported, played: Iterable[Played], *, known: Container[bytes]
) -> Iterator[FoundGroup]:
    """Groups that the exports do not know. Their ordinals are found by trying: the uid is made of
    them.
    """
    members: dict[bytes, list[Played]] = {}
    for trajectory in played:
        if trajectory.meta.group_uid not in known:
            members.setdefault(trajectory.meta.group_uid, []).append(trajectory)
    wanted = {group_uid: rows[0].split for group_uid, rows in members.items()}
    places = dict(_places(run_id, exported, wanted))
    usual = {
        split: Counter(
            row["size"] for row in exported.tables["groups"] if row["split"] == split
        ).most_common(1)
        for split in ("train", "heldout")
    }
    largest = {
        split: max(
            (
                row.meta.member + 1
                for rows in members.values()
                for row in rows
                if row.split == split
            ),
            default=1,
        )
        for split in usual
    }
    taken = max(
        (row["ordinal"] for row in exported.tables["groups"] if row["split"] == IMPORTED),
        default=-1,
    )
    for group_uid, rows in members.items():
        # No group of this run has such a uid: it was imported. Only the members that are here are
        # ever expected.
        split, ordinal, round_ = places.get(group_uid, (IMPORTED, -1, None))
        if split == IMPORTED:
            ordinal = taken = taken + 1
            size = max(row.meta.member for row in rows) + 1
        else:
            size = usual[split][0][0] if usual[split] else largest[split]
        yield FoundGroup(
            group_uid=group_uid,
            split=split,
            ordinal=ordinal,
            task_id=rows[0].task_id,
            size=max(size, *(row.meta.member + 1 for row in rows)),
            purpose_version=round_,
        )


def _places(
    run_id: str, exported: Exported, wanted: Mapping[bytes, str]
) -> Iterator[tuple[bytes, tuple[str, int, int | None]]]:
    """(group, (split, ordinal, round)) of those wanted groups that are of this run."""
    left = {group_uid for group_uid, split in wanted.items() if split == "train"}
    ordinals = [row["ordinal"] for row in exported.tables["groups"] if row["split"] == "train"]
    for ordinal in range(max(ordinals, default=-1) + 1 + ORDINALS_TRIED):
        if not left:
            break
        group_uid = uid(run_id, "train", ordinal, None)
        if group_uid in left:
            left.remove(group_uid)
            yield group_uid, ("train", ordinal, None)
    left = {group_uid for group_uid, split in wanted.items() if split == "heldout"}
    rounds = [
        row["purpose_version"] for row in exported.tables["groups"] if row["split"] == "heldout"
    ]
    newest = (
        max([0, *rounds, *(row["version"] for row in exported.tables["versions"])]) + ROUNDS_TRIED
    )
    per_round = max(2 * max(Counter(rounds).values(), default=0), ORDINALS_TRIED // ROUNDS_TRIED)
    for version in range(newest, -1, -1):
        for ordinal in range(per_round if left else 0):
            group_uid = uid(run_id, "heldout", ordinal, version)
            if group_uid in left:
                left.remove(group_uid)
                yield group_uid, ("heldout", ordinal, version)


def as_exported(
    groups: Mapping[bytes, FoundGroup], exported: Exported, played: Iterable[Played]
) -> Iterator[tuple[bytes, Row]]:
    """(group, the row of the groups table that is lost) of those `groups` that are not new."""
    lines: dict[bytes, list[Row]] = {}
    for row in exported.tables["ledger"]:
        lines.setdefault(row["group_uid"], []).append(row)
    live = {row["group_uid"]: row for row in exported.tables["lineage"] if row["live"]}
    members: dict[bytes, dict[bytes, TrajectoryMeta]] = {}
    for trajectory in played:
        members.setdefault(trajectory.meta.group_uid, {})[trajectory.meta.traj_uid] = (
            trajectory.meta
        )
    for group_uid in groups.keys() & (lines.keys() | live.keys()):
        metas = list(members[group_uid].values())
        yield (
            group_uid,
            _row(
                groups[group_uid],
                lines.get(group_uid, []),
                live.get(group_uid),
                metas,
                lsn=exported.lsn,
            ),
        )


def _row(
    group: FoundGroup,
    lines: Sequence[Row],
    live: Row | None,
    metas: Sequence[TrajectoryMeta],
    *,
    lsn: int,
) -> Row:
    # of an offline group, whose state does not change when it is used
    source = live.get("source") if live else None
    state = "complete" if source else live["outcome"] if live else lines[-1]["state"]
    completed = [row["at"] for row in lines if row["state"] == "complete"]
    return {
        **{
            name: getattr(group, name)
            for name in ("group_uid", "split", "ordinal", "task_id", "size", "purpose_version")
        },
        "state": state,
        "reason": lines[-1]["reason"] if lines else None,
        # what files lack is found to be gone
        "n_members": len(metas) if state in ("open", "abandoned") else group.size,
        "n_steps": sum(meta.n_steps for meta in metas),
        "n_won": sum(meta.won for meta in metas),
        "return_sum": sum(meta.episode_return for meta in metas),
        "version_min": min(meta.version_min for meta in metas),
        "version_max": max(meta.version_max for meta in metas),
        "opened_at": lines[0]["at"] if lines else (live["claimed_at"] if live else 0),
        "completed_at": completed[-1] if completed else (live["claimed_at"] if live else None),
        "changed_lsn": lsn,
        "source": source,
    }

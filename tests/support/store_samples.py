"""Small honest trajectories and a writer process, for the store's tests."""

from __future__ import annotations

import sys
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from store import (
    Catalog,
    Counts,
    FinalObservation,
    Group,
    RunLayout,
    Step,
    StepImage,
    Trajectory,
    Unfinished,
    export,
    state_hash,
    write_open_sql,
    write_segment,
)

LOGPROBS = (-0.5, -0.25)  # exact in float32, so that a round trip can be compared with ==


def make_step(index: int, *, n_steps: int, version: int, **changes: object) -> Step:
    fields = {
        "step_index": index,
        "prompt_ids": (1, 2, 3 + index),
        "prompt_dropped_turns": index,
        "prompt_dropped_tokens": 10 * index,
        "response_ids": (7, 0),
        "response_logprobs": LOGPROBS,
        "version_min": version,
        "version_max": version + 1,
        "finish_reason": "stop",
        "obs_text": f"room {index}",
        "anchor_text": None if index == 1 else f"room {index}",
        "state_hash": None if index == 1 else state_hash(f"room {index}"),
        "admissible_actions": ("go north", "go south") if index else None,
        "action_text": "go north",
        "reward": float(index),
        "is_action_valid": index != 0,
        "terminated": index == n_steps - 1,
        "truncated": False,
        "t_start_us": 1_700_000_000_000_001 + index * 1_000,
        "gen_us": 500,
        "env_us": 20,
        "images": (StepImage(height=1, width=2, pixels=bytes([index] * 6)),) if index == 1 else (),
    }
    return Step(**{**fields, **changes})  # type: ignore[arg-type]


def in_play(counts: Counts) -> int:
    """Return the groups that were handed out and not yet trained on."""
    return counts.open + counts.complete + counts.claimed


END = FinalObservation(
    text="a dark room",
    anchor_text="dark",
    state_hash=state_hash("dark"),
    admissible_actions=("go back",),
)


def make_trajectory(group: Group, member: int, *, version: int = 0, n_steps: int = 3) -> Trajectory:
    return Trajectory(
        traj_uid=group.traj_uids[member],
        group_uid=group.group_uid,
        env_name="rooms",
        task_id=group.task_id,
        split=group.split,
        seed=5,
        member=member,
        won=member % 2 == 0,
        task_score=None if member else 0.5,
        steps=tuple(make_step(index, n_steps=n_steps, version=version) for index in range(n_steps)),
        final_observation=None if member else END,
    )


def open_train_group(catalog: Catalog, ordinal: int | None, *, size: int = 2) -> Group:
    """The group of this ordinal, by default the next one."""
    if ordinal is None:
        ordinal = catalog.next_ordinal("train", evaluated_version=None)
    return catalog.open_group(
        ordinal=ordinal, task_id=f"task-{ordinal}", split="train", size=size, evaluated_version=None
    )


def open_task_group(catalog: Catalog, task_id: str, *, size: int = 2) -> Group:
    """The next training group, of this task."""
    return catalog.open_group(
        ordinal=catalog.next_ordinal("train", evaluated_version=None),
        task_id=task_id,
        split="train",
        size=size,
        evaluated_version=None,
    )


def play(
    layout: RunLayout, catalog: Catalog, group: Group, *, version: int = 0, worker: str = "w0"
) -> None:
    trajectories = [make_trajectory(group, member, version=version) for member in group.missing]
    catalog.commit(
        write_segment(layout, trajectories, worker=worker, epoch=catalog.epoch), epoch=catalog.epoch
    )


def make_unfinished(group: Group, number: int, **changes: object) -> Unfinished:
    fields = {
        "group_uid": group.group_uid,
        "number": number,
        "version": 1,
        "begun_us": 1_700_000_000_000_000,
        "ended_us": 1_700_000_009_000_000,
        "n_steps": 7,
        "n_response_tokens": 70,
        "why": "straggler",
    }
    return Unfinished(**{**fields, **changes})  # type: ignore[arg-type]


def write_for_ever(root: Path) -> None:
    """Commits groups and exports after each; prints the ordinal of every group once its commit was
    acknowledged.
    """
    layout = (
        RunLayout.open(root)
        if RunLayout.exists(root)
        else RunLayout.create(root, config_yaml="a: 1\n")
    )
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        while True:
            group = catalog.lease_open_group(worker="w0", lease_s=60.0) or open_train_group(
                catalog, None
            )
            play(layout, catalog, group)
            print(group.ordinal, flush=True)
            export(catalog, layout)


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]))


def from_table(table: pa.Table) -> tuple[Trajectory, ...]:
    """Return the trajectories of a table, which holds each of them whole and in any order."""
    position = table.column_names.index("t_start")
    # a datetime would lose the unit
    table = table.set_column(position, "t_start_us", table["t_start"].cast(pa.int64()))
    rows_of: dict[bytes, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        row["images"] = [StepImage(**image) for image in row["images"] or ()]
        columns = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
        rows_of.setdefault(row["traj_uid"], []).append(columns)
    return tuple(map(_trajectory, rows_of.values()))


def _trajectory(rows: list[dict[str, Any]]) -> Trajectory:
    rows.sort(key=itemgetter("step_index"))
    assert rows[0]["episode_steps"] == len(rows)
    of_rows = ("steps", "final_observation")
    columns = {name: rows[0][name] for name in Trajectory.__slots__ if name not in of_rows}
    steps = (Step(**{name: row[name] for name in Step.__slots__}) for row in rows)
    final = FinalObservation(
        text=rows[-1]["final_observation"],
        anchor_text=rows[-1]["final_anchor_text"],
        state_hash=rows[-1]["final_state_hash"],
        admissible_actions=rows[-1]["final_admissible_actions"],
    )
    known = final.text is not None
    return Trajectory(**columns, steps=tuple(steps), final_observation=final if known else None)

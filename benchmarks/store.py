"""What the store costs: durable commits against bare encoding, verified reads, and GROUP BY over many segments.

    python benchmarks/store.py [--quick]

Groups of 8 trajectories of 40 steps, 150 prompt and 12 response tokens a step. MB are of the Arrow table, before
compression. Times are wall clock, one process. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from store import (  # noqa: E402
    Catalog,
    GroupRecord,
    RunLayout,
    Step,
    Trajectory,
    export,
    open_reader,
    read_segment,
    state_hash,
    to_table,
    write_open_sql,
    write_segment,
)

GROUP_SIZE, STEPS, PROMPT_TOKENS, RESPONSE_TOKENS, VOCABULARY, STATES = 8, 40, 150, 12, 2_000, 60
BATCH_GROUPS = 16
GROUP_BY = "SELECT count(*), max(n) FROM (SELECT group_uid, state_hash, count(*) AS n FROM steps GROUP BY ALL)"


def make_step(index: int, rng: random.Random) -> Step:
    text = f"You are in room {rng.randrange(STATES)}. There is a door to the north and a key on the table."
    return Step(
        step_index=index,
        prompt_ids=tuple(rng.choices(range(VOCABULARY), k=PROMPT_TOKENS)),
        response_ids=tuple(rng.choices(range(VOCABULARY), k=RESPONSE_TOKENS)),
        response_logprobs=tuple(-rng.random() for _ in range(RESPONSE_TOKENS)),
        version_min=0,
        version_max=0,
        finish_reason="stop",
        obs_text=text,
        anchor_text=text,
        state_hash=state_hash(text),
        action_text="go north",
        reward=0.0,
        is_action_valid=True,
        terminated=index == STEPS - 1,
        truncated=False,
        t_start_us=index,
        gen_us=1,
        env_us=1,
    )


def make_trajectories(group: GroupRecord, pool: list[tuple[Step, ...]]) -> list[Trajectory]:
    return [
        Trajectory(
            traj_uid=traj_uid,
            group_uid=group.group_uid,
            env_name="rooms",
            task_id=group.task_id,
            split="train",
            seed=0,
            member=member,
            won=True,
            task_score=None,
            steps=pool[(group.ordinal + member) % len(pool)],
        )
        for member, traj_uid in enumerate(group.traj_uids)
    ]


def median_s(call: Callable[[], object], *, times: int) -> float:
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def ingest(layout: RunLayout, catalog: Catalog, *, n_groups: int) -> dict[str, float]:
    """Encoding alone and write + commit, turn by turn, so that a slow moment of the machine meets both."""
    rng = random.Random(0)
    pool = [tuple(make_step(index, rng) for index in range(STEPS)) for _ in range(2 * GROUP_SIZE)]
    table_s, durable_s, commit_s, raw_bytes, disk_bytes = 0.0, 0.0, 0.0, 0, 0
    for ordinal in range(n_groups):
        group = catalog.open_group(ordinal=ordinal, task_id=f"t{ordinal}", split="train", size=GROUP_SIZE, purpose_version=None)
        trajectories = make_trajectories(group, pool)
        start = time.perf_counter()
        raw_bytes += to_table(trajectories).nbytes
        encoded = time.perf_counter()
        segment = write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch)
        written = time.perf_counter()
        catalog.commit(segment, epoch=catalog.epoch)
        done = time.perf_counter()
        table_s, commit_s, durable_s = table_s + encoded - start, commit_s + done - written, durable_s + done - encoded
        disk_bytes += segment.n_bytes
    return {
        "group_commits_per_s": n_groups / durable_s,
        "ingest_mb_per_s": raw_bytes / durable_s / 1e6,
        "to_table_share": table_s / durable_s,
        "catalog_commit_ms": 1e3 * commit_s / n_groups,
        "compression": raw_bytes / disk_bytes,
    }


def consume(layout: RunLayout, catalog: Catalog) -> dict[str, float]:
    start = time.perf_counter()
    batch = catalog.claim(n_groups=BATCH_GROUPS, current_version=0, max_staleness=0)
    claimed = time.perf_counter()
    assert batch is not None
    raw_bytes = sum(read_segment(layout, segment).nbytes for segment in batch.segments)
    done = time.perf_counter()
    return {"claim_ms": 1e3 * (claimed - start), "claim_and_read_mb_per_s": raw_bytes / (done - start) / 1e6}


def ask(layout: RunLayout) -> dict[str, float]:
    with open_reader(layout.root) as connection:
        group_by_s = median_s(lambda: connection.sql(GROUP_BY).fetchall(), times=5)
        count_s = median_s(lambda: connection.sql("SELECT count(*) FROM steps").fetchall(), times=5)
    shell = [sys.executable, "-m", "store", "sql", str(layout.root), GROUP_BY]
    command_s = median_s(lambda: subprocess.run(shell, cwd=REPOSITORY, check=True, capture_output=True), times=3)
    return {"group_by_ms": 1e3 * group_by_s, "count_ms": 1e3 * count_s, "command_line_s": command_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 segments instead of 500")
    n_groups = 100 if parser.parse_args().quick else 500
    with tempfile.TemporaryDirectory() as directory:
        layout = RunLayout.create(Path(directory) / "run", config_yaml="")
        write_open_sql(layout, macros=(), max_staleness=0)
        with Catalog.open(layout) as catalog:
            figures = ingest(layout, catalog, n_groups=n_groups)
            export_s = median_s(lambda: (catalog.heartbeat("benchmark", None), export(catalog, layout)), times=5)
            figures |= consume(layout, catalog)
            figures |= {"export_ms": 1e3 * export_s, "segments": n_groups, "steps": catalog.counts().steps}
            export(catalog, layout)
        figures |= ask(layout)
    for name, value in figures.items():
        print(f"{name:26} {value:12.3f}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()

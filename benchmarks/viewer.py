"""Measure how long the viewer's pages take with a long run: the first page, and each page at p95.

    python -m benchmarks.viewer --steps 1000000

The run is invented: groups of 8 episodes of 29 to 50 steps, 16 groups a file as after compaction,
learner steps of 8 groups with their metrics. Required: the first page below 1,000 ms, every page
below 500 ms at p95, on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.testclient import TestClient

from analysis.view.pages import PAGES
from analysis.view.server import make_app
from benchmarks.support import store_load
from configs import Config
from gigpo import AdvantageSettings, advantages_macro
from store import (
    SEGMENT_SCHEMA,
    Catalog,
    Group,
    RunLayout,
    TrajectoryMeta,
    export,
    now_us,
    open_run,
    to_table,
    write_open_sql,
)
from store.segments import write_rows

FILE_GROUPS, BATCH_GROUPS, GROUP_SIZE = 16, 8, store_load.GROUP_SIZE
TASKS = 500
METRICS = (
    *("train/success", "learner/idle_fraction", "time/step_s", "time/batch_wait_s"),
    *("time/publish_s", "time/checkpoint_s", "tokens/generated_per_s", "tokens/trained_per_s"),
    *("alarm/entropy", "alarm/ess"),
    *(f"loss/{number}" for number in range(50)),
)
VISITS = 12  # of each page, of another group or task each time
REQUIRED_MS = 500


def build(root: Path, *, n_steps: int) -> RunLayout:
    """Write a run of about so many steps."""
    layout = RunLayout.create(root, config_yaml="")
    macro = advantages_macro(AdvantageSettings.of(Config().algorithm))
    write_open_sql(layout, macros=[macro], max_staleness=9)
    played = store_load.invented(FILE_GROUPS, store_load.make_pool(seed=0))
    rows = to_table([trajectory for group in played for trajectory in group])
    rng = np.random.default_rng(0)
    version = 0
    with Catalog.open(layout) as catalog:
        for _ in range(max(1, n_steps // rows.num_rows)):
            groups = [_open(catalog, task) for task in rng.integers(0, TASKS, FILE_GROUPS)]
            _commit(layout, catalog, groups, played, rows, version=version)
            for _ in range(FILE_GROUPS // BATCH_GROUPS):
                batch = catalog.claim(
                    n_groups=BATCH_GROUPS, current_version=version, max_staleness=9
                )
                assert batch is not None
                version += 1
                catalog.record_version(
                    version=version, path=f"weights/v{version}", digest="d", learner_step=version
                )
                catalog.settle(
                    batch.batch_id, learner_step=version, filtered={}, version_in=version - 1
                )
                values = {name: float(rng.random()) for name in METRICS}
                catalog.record_metrics(
                    learner_step=version, policy_version=version - 1, values=values
                )
            if version % 50 == 0:
                export(catalog, layout)
        export(catalog, layout)
    return layout


def _open(catalog: Catalog, task: int) -> Group:
    return catalog.open_group(
        ordinal=None, task_id=f"task-{task}", split="train", size=GROUP_SIZE, purpose_version=None
    )


def _commit(
    layout: RunLayout,
    catalog: Catalog,
    groups: list[Group],
    played: Any,
    rows: pa.Table,
    *,
    version: int,
) -> None:
    """Commit one file: the same episodes as in the others, under new names."""
    metas, places = [], []
    for group, trajectories in zip(groups, played, strict=True):
        for member, trajectory in enumerate(trajectories):
            metas.append(
                TrajectoryMeta(
                    traj_uid=group.traj_uids[member],
                    group_uid=group.group_uid,
                    member=member,
                    n_steps=trajectory.n_steps,
                    episode_return=trajectory.episode_return,
                    won=trajectory.won,
                    task_score=trajectory.task_score,
                    invalid_steps=trajectory.invalid_steps,
                    version_min=version,
                    version_max=version,
                )
            )
            places += [len(metas) - 1] * trajectory.n_steps
    tasks = [group.task_id for group in groups for _ in range(GROUP_SIZE)]
    changed = {
        "traj_uid": [meta.traj_uid for meta in metas],
        "group_uid": [meta.group_uid for meta in metas],
        "task_id": tasks,
        "version_min": [version] * len(metas),
        "version_max": [version] * len(metas),
    }
    for name, values in changed.items():
        field = SEGMENT_SCHEMA.field(name)
        column = pa.array(values, field.type).take(pa.array(places))
        rows = rows.set_column(SEGMENT_SCHEMA.get_field_index(name), field, column)
    place = SEGMENT_SCHEMA.get_field_index("t_start")
    begun = rows.column(place)
    now = pa.scalar(now_us(), pa.int64()).cast(begun.type)
    moved = pc.add(begun, pc.subtract(now, pc.min(begun)))
    rows = rows.set_column(place, SEGMENT_SCHEMA.field(place), moved)
    catalog.commit(
        write_rows(layout, rows, trajectories=tuple(metas), worker="w0", epoch=catalog.epoch),
        epoch=catalog.epoch,
    )


def measure(run: Path) -> None:
    """Print the time of each page, of the first visit and at p95."""
    began = time.perf_counter()
    app = make_app([run], token="")
    print(f"opened in {1e3 * (time.perf_counter() - began):,.0f} ms")
    with TestClient(app, base_url="http://127.0.0.1") as client, open_run(run) as reader:
        for page in PAGES:
            addresses = [page.path] if page.is_start else []
            if page.example is not None:
                many = page.example.replace("LIMIT 1", f"LIMIT {VISITS}")
                addresses += [f"{page.path}?{urlencode(row)}" for row in reader.rows(many)]
            times = []
            for address in addresses:
                began = time.perf_counter()
                assert client.get(address).status_code == 200
                times.append(1e3 * (time.perf_counter() - began))
            p95 = statistics.quantiles(times, n=20)[-1] if len(times) > 1 else times[0]
            said = "" if p95 < REQUIRED_MS else f"  above {REQUIRED_MS} ms"
            print(f"{page.title:16} first {times[0]:7,.0f} ms   p95 {p95:7,.0f} ms{said}")


def main() -> None:
    """Build the run, or take one that is there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--run", type=Path, help="a run that is there")
    arguments = parser.parse_args()
    if arguments.run is not None and RunLayout.exists(arguments.run):
        measure(arguments.run)
        return
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        layout = build(arguments.run or Path(directory) / "run", n_steps=arguments.steps)
        print(f"built in {time.perf_counter() - began:.0f} s")
        measure(layout.root)


if __name__ == "__main__":
    main()

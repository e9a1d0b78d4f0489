"""Measure how long the pages of `gigpo view` take with a long run, and how fast it answers Arrow.

    python benchmarks/view.py [--quick] [--run DIR]

The run is invented: groups of 8 episodes of 29 to 50 steps, 16 groups a file as after compaction,
learner steps of 8 groups with their metrics. Each page is opened for several groups or tasks, with
everything that it fetches later. `first_page_ms` is the start page after the program started,
`p95_page_ms` is over all visits of all pages, `p95_later_ms` over the panels fetched afterwards.
The last line is JSON.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from starlette.testclient import TestClient

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import store_load
from support.figures import quick_parser, show_json, show_table

from analysis.view.pages import PAGES
from analysis.view.server import make_app
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

FILE_GROUPS = 16
BATCH_GROUPS = 8
GROUP_SIZE = store_load.GROUP_SIZE
TASKS = 500
METRICS = (
    *("train/success", "learner/idle_fraction", "time/step_s", "time/batch_wait_s"),
    *("time/publish_s", "time/checkpoint_s", "tokens/generated_per_s", "tokens/trained_per_s"),
    *("alarm/entropy", "alarm/ess"),
    *(f"loss/{number}" for number in range(50)),
)
VISITS = 12  # of each page, of another group or task each time
TOKEN = "benchmark"
ARROW_QUERY = "SELECT traj_uid, step_index, obs_text, action_text, reward FROM steps LIMIT 200000"
REQUIRED = {"first_page_ms": "< 1000", "p95_page_ms": "< 500"}
LATER = re.compile(r'data-later="([^"]+)"')


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


def measure(run: Path) -> dict[str, float]:
    """Open each page several times, and return the figures. Prints a line for each page."""
    figures: dict[str, float] = {}
    began = time.perf_counter()
    app = make_app([run], token=TOKEN)
    visits: list[float] = []
    fetched: list[float] = []
    with TestClient(app, base_url="http://127.0.0.1") as client, open_run(run) as reader:
        assert client.get("/").status_code == 200
        figures["first_page_ms"] = 1e3 * (time.perf_counter() - began)
        for page in PAGES:
            addresses = [page.path] if page.is_start else []
            if page.example is not None:
                many = page.example.replace("LIMIT 1", f"LIMIT {VISITS}")
                addresses += [f"{page.path}?{urlencode(row)}" for row in reader.rows(many)]
            times, later = [], []
            for address in addresses:
                times.append(_timed(client, address, later))
            print(
                f"{page.title:16} first {times[0]:7,.0f} ms   slowest {max(times):7,.0f} ms   "
                f"later {max(later, default=0.0):7,.0f} ms"
            )
            visits += times
            fetched += later
        began = time.perf_counter()
        answer = client.post(
            "/sql", content=ARROW_QUERY, headers={"authorization": f"Bearer {TOKEN}"}
        )
        seconds = time.perf_counter() - began
        assert answer.status_code == 200, answer.text
    figures["p95_page_ms"] = statistics.quantiles(visits, n=20)[-1]
    figures["p95_later_ms"] = statistics.quantiles(fetched, n=20)[-1]
    figures["sql_arrow_mb_per_s"] = len(answer.content) / 1e6 / seconds
    return figures


def _timed(client: TestClient, address: str, later: list[float]) -> float:
    """Return the milliseconds of a page, and add those of the panels that it fetches later."""
    began = time.perf_counter()
    page = client.get(address)
    took_ms = 1e3 * (time.perf_counter() - began)
    assert page.status_code == 200, address
    for panel in LATER.findall(page.text):
        began = time.perf_counter()
        assert client.get(panel.replace("&amp;", "&")).status_code == 200, panel
        later.append(1e3 * (time.perf_counter() - began))
    return took_ms


def main() -> None:
    """Build the run, or take one that is there, and measure."""
    parser = quick_parser(__doc__, quick="a run of 100,000 steps instead of a million")
    parser.add_argument("--run", type=Path, help="keep the run here, or take the one that is here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = options.run or Path(directory) / "run"
        if not RunLayout.exists(run):
            began = time.perf_counter()
            build(run, n_steps=100_000 if options.quick else 1_000_000)
            print(f"built in {time.perf_counter() - began:.0f} s", flush=True)
        figures = measure(run)
    show_table(figures, REQUIRED)
    show_json(figures, figures)


if __name__ == "__main__":
    main()

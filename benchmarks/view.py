"""Measure how long the pages of `gigpo view` take with a long run, and how fast it answers Arrow.

    python benchmarks/view.py [--quick] [--run DIR]

The run is invented: groups of 8 episodes of 29 to 50 steps, 16 groups a file as after compaction,
learner steps of 8 groups with their metrics. Each page is opened for several groups or tasks, with
everything that it fetches later. `first_page_ms` is the start page after the program started,
`p95_page_ms` is over all visits of all pages, `p95_later_ms` over the panels fetched afterwards.

`training_slowdown` is the share of its work that a training loses to a viewer whose page follows
it. The training keeps all cores busy and makes a learner step a second, with the coordinator's
exports and compaction; turns beside a viewer stand between turns without. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support import store_load
from support.figures import quick_parser, show_json, show_table

from analysis.view.connections import make_server
from analysis.view.pages import PAGES
from analysis.view.server import make_app
from configs import Config
from coordinator.export_schedule import Exporter, start_maintainer
from gigpo import AdvantageSettings, advantages_macro
from store import (
    SEGMENT_SCHEMA,
    Catalog,
    Group,
    RunLayout,
    TrajectoryMeta,
    VersionRecord,
    export,
    now_us,
    open_run,
    to_table,
    write_open_sql,
)
from store.segments import write_rows
from tests.support.store_samples import open_task_group

REPOSITORY = Path(__file__).resolve().parent.parent
FILE_GROUPS = 16  # of a segment
BATCH_GROUPS = 8  # of a learner step
GROUP_SIZE = store_load.GROUP_SIZE
TASKS = 500  # so that pages of tasks have lists to cut
METRICS = (
    *("train/success", "learner/idle_fraction", "time/step_s", "time/batch_wait_s"),
    *("time/publish_s", "time/checkpoint_s", "tokens/generated_per_s", "tokens/trained_per_s"),
    *("alarm/entropy", "alarm/ess"),
    *(f"loss/{number}" for number in range(50)),
)
VISITS = 12  # of each page, of another group or task each time
TOKEN = "benchmark"
ARROW_QUERY = "SELECT traj_uid, step_index, obs_text, action_text, reward FROM steps LIMIT 200000"
REQUIRED = {"first_page_ms": "< 1000", "p95_page_ms": "< 500", "training_slowdown": "< 0.02"}
# The training that is slowed down:
SMALL_STEPS = 4  # of an episode: its files stay small
FILE_S = 2.0  # between two files: as the quick start, it makes a learner step a second
UNIT_NUMBERS = 100_000  # a unit of work sorts so many: about a millisecond
TRIAL_UNITS = 100  # to see how long one takes
POLL_S = 3.0  # as a page asks for a newer lsn
LATER = re.compile(r'data-later="([^"]+)"')


class Training:
    """Learner steps of a run whose groups are always the same episodes, under new names."""

    def __init__(self, layout: RunLayout, catalog: Catalog, *, n_steps: int | None = None) -> None:
        """Make the episodes, each cut to its first `n_steps`; None cuts none."""
        self.layout, self.catalog = layout, catalog
        self.version = 0
        played = store_load.invented(FILE_GROUPS, store_load.make_pool(seed=0))
        self.played = []
        for group in played:
            cut = [dataclasses.replace(each, steps=each.steps[:n_steps]) for each in group]
            self.played.append(cut)
        self.rows = to_table(list(itertools.chain(*self.played)))
        self.random = np.random.default_rng(0)

    def train_file(self) -> None:
        """Commit one file of groups, and train on them batch by batch."""
        tasks = self.random.integers(0, TASKS, FILE_GROUPS)
        groups = [_open(self.catalog, task) for task in tasks]
        _commit(self.layout, self.catalog, groups, self.played, self.rows, version=self.version)
        for _ in range(FILE_GROUPS // BATCH_GROUPS):
            batch = self.catalog.claim(
                n_groups=BATCH_GROUPS, current_version=self.version, max_staleness=9
            )
            assert batch is not None
            self.version += 1
            self.catalog.record_version(
                VersionRecord(
                    version=self.version,
                    path=f"weights/v{self.version}",
                    digest="d",
                    learner_step=self.version,
                )
            )
            self.catalog.settle(
                batch.batch_id,
                learner_step=self.version,
                filtered={},
                version_in=self.version - 1,
            )
            values = {name: float(self.random.random()) for name in METRICS}
            self.catalog.record_metrics(
                learner_step=self.version, policy_version=self.version - 1, values=values
            )


def create(root: Path) -> RunLayout:
    """Make an empty run with its views."""
    layout = RunLayout.create(root, config_yaml="")
    macro = advantages_macro(AdvantageSettings.of(Config().algorithm))
    write_open_sql(layout, macros=[macro], max_staleness=9)
    return layout


def build(root: Path, *, n_steps: int) -> None:
    """Write a run of about so many steps."""
    layout = create(root)
    with Catalog.open(layout) as catalog:
        training = Training(layout, catalog)
        for _ in range(max(1, n_steps // training.rows.num_rows)):
            training.train_file()
            if training.version % 50 == 0:
                export(catalog, layout)
        export(catalog, layout)


def _open(catalog: Catalog, task: int) -> Group:
    return open_task_group(catalog, f"task-{task}", size=GROUP_SIZE)


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
    visits: list[float] = []
    fetched: list[float] = []
    with served(run) as client, open_run(run) as reader:
        assert client.get("/").status_code == 200
        figures["first_page_ms"] = 1e3 * (time.perf_counter() - began)
        for page in PAGES:
            addresses = [page.path] if page.is_start else []
            if page.example is not None:
                many = page.example.replace("LIMIT 1", f"LIMIT {VISITS}")
                addresses += [f"{page.path}?{urlencode(row)}" for row in reader.rows(many)]
            times: list[float] = []
            later: list[float] = []
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


@contextlib.contextmanager
def served(run: Path) -> Iterator[httpx2.Client]:
    """Answer over a socket as `gigpo view` does. Leaving ends it."""
    server = make_server(make_app([run], token=TOKEN))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx2.Client(base_url=address, timeout=120, follow_redirects=True) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


def _timed(client: httpx2.Client, address: str, later: list[float]) -> float:
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


def measure_slowdown(root: Path, *, turns: int, turn_s: float) -> float:
    """Return the share of its work that a training loses to a viewer that follows it."""
    context = multiprocessing.get_context("spawn")
    done = context.Array("d", len(os.sched_getaffinity(0)))  # units of work of each process
    busy = [context.Process(target=train, args=(root, done), daemon=True)]
    busy += [
        context.Process(target=work, args=(done, place), daemon=True)
        for place in range(1, len(done))
    ]
    with contextlib.ExitStack() as stack:
        for process in busy:
            process.start()
            stack.callback(process.kill)
        while not all(done):
            assert busy[0].is_alive(), "the training ended"
            time.sleep(0.1)
        alone, beside = [_rate(done, turn_s)], []
        for _ in range(turns):
            with followed(root):
                beside.append(_rate(done, turn_s))
            alone.append(_rate(done, turn_s))
            print(
                f"{alone[-2]:.1f} and {alone[-1]:.1f} units of work/s, "
                f"beside a viewer between them {beside[-1]:.1f}",
                flush=True,
            )
    # The machine's speed drifts: each turn is compared with those before and after it.
    without = [(before + after) / 2 for before, after in itertools.pairwise(alone)]
    return 1 - sum(beside) / sum(without)


def train(root: Path, done: SynchronizedArray[float]) -> None:
    """Train without an end: work, and write and maintain the store as a coordinator does."""
    layout = create(root)
    began = time.perf_counter()
    work(done, 0, n_units=TRIAL_UNITS)
    units = round(TRIAL_UNITS * FILE_S / (time.perf_counter() - began))
    with Catalog.open(layout) as catalog:
        training = Training(layout, catalog, n_steps=SMALL_STEPS)
        exporter = Exporter(catalog, layout)
        maintainer = start_maintainer(catalog, layout, config=Config().store)
        while True:
            maintainer.check()
            training.train_file()
            exporter.when_due()
            work(done, 0, n_units=units)


def work(done: SynchronizedArray[float], place: int, *, n_units: int | None = None) -> None:
    """Use one core, as actors and learner do, and count the units of work; None: without an end."""
    numbers = np.random.default_rng(0).random(UNIT_NUMBERS)
    for _ in itertools.count() if n_units is None else range(n_units):
        np.sort(numbers)
        done[place] += 1


@contextlib.contextmanager
def followed(root: Path) -> Iterator[None]:
    """Open `gigpo view` with a page that follows the run. Leaving closes it."""
    with contextlib.ExitStack() as stack:
        viewer = subprocess.Popen(
            [sys.executable, "-m", "cli", "view", str(root), "--no-browser", "--port", "0"],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(viewer.wait)
        stack.callback(viewer.send_signal, signal.SIGINT)
        assert viewer.stdout is not None
        address = viewer.stdout.readline().split()[0]
        client = stack.enter_context(httpx2.Client(base_url=address, timeout=120))
        _timed(client, "run", [])
        ends = threading.Event()
        page = threading.Thread(target=follow, args=(client, ends), daemon=True)
        page.start()
        stack.callback(page.join)
        stack.callback(ends.set)
        yield


def follow(client: httpx2.Client, ends: threading.Event) -> None:
    """Ask for the newest lsn and fetch the page again for a newer one, as an open page does."""
    shown = None
    while not ends.wait(POLL_S):
        if (lsn := client.get("lsn").json()["lsn"]) != shown:
            _timed(client, "run", [])
            shown = lsn


def _rate(done: SynchronizedArray[float], seconds: float) -> float:
    """Return the units of work for a second, of all processes together."""
    before, began = sum(done), time.perf_counter()
    time.sleep(seconds)
    return (sum(done) - before) / (time.perf_counter() - began)


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
        turns, turn_s = (1, 6.0) if options.quick else (2, 100.0)
        figures["training_slowdown"] = measure_slowdown(
            Path(directory) / "training", turns=turns, turn_s=turn_s
        )
    show_table(figures, REQUIRED)
    show_json(figures, figures)


if __name__ == "__main__":
    main()

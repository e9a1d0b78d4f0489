"""Time the advantages of a batch beside the same equations in a loop, numpy and polars.

    python benchmarks/advantages.py [--quick] [--large]

All compute in float64 and must agree. Times are wall clock, the best of several calls, taken in
turns; the first call of a process, which plans the query, is apart. Memory is what a call of
gigpo's adds to the process at its peak. The other estimators are timed beside gigpo. `--large` does
nothing but 64 million steps, by hash partition of their groups from Parquet files to Parquet files,
in a process of its own; without --quick it is done too. `--quick` leaves out what takes long. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import duckdb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.advantage_baselines import GROUP_STEPS, by_loop, by_numpy, by_polars, make_steps
from support.figures import quick_parser, show_json, show_table

from gigpo import ESTIMATORS, PUBLISHED_SETTINGS, compute_advantages, similarity_keys

SIZES = (800, 6_400, 64_000, 640_000, 6_400_000)  # steps; 6,400 are a batch of the paper's runs
LARGE_STEPS = 64_000_000  # beyond main memory, read from files in PARTITIONS parts
PARTITIONS = 8
FILE_STEPS = 3_200_000
TEXTS, CHARACTERS = 400, 300  # of one task, for similarity: 8 episodes of 50 steps
REQUIRED = {
    "gigpo_ms_6400": "<= 25",
    "exponent_64k_6m": "<= 1.15",
    "over_numpy_max": "<= 3, from 64,000 steps on",
    "loop_over_gigpo_64k": "",
    "similarity_400_s": "< 1",
    "estimators_over_gigpo_64k": "<= 3",
    "estimators_exponent_max": "<= 1.15, from 64,000 to 640,000 steps",
    "peak_gib_64m": "<= 8",
}

METHODS = ("gigpo", "numpy", "polars", "loop")
Method = Callable[[pa.Table], np.ndarray]


def by_gigpo(steps: pa.Table) -> np.ndarray:
    return compute_advantages(steps, PUBLISHED_SETTINGS)["advantage"].to_numpy()


def measure(rows: int, *, quick: bool) -> dict[str, float]:
    """Return milliseconds by method, in turns: a busy moment of the machine meets all of them."""
    steps = make_steps(rows, seed=0)
    methods: dict[str, Method] = {"gigpo": by_gigpo, "numpy": by_numpy}
    if not (quick and rows > 64_000):
        if importlib.util.find_spec("polars"):
            methods["polars"] = by_polars
        methods["loop"] = by_loop
    turns = {800: 60, 6_400: 15, 64_000: 7, 640_000: 3}.get(rows, 1 if quick else 2)
    gib = added_gib(lambda: by_gigpo(steps))
    best, results = dict.fromkeys(METHODS, math.inf), {}
    for turn in range(turns):
        for name, method in methods.items():
            if name == "loop" and turn > (2 if rows <= 64_000 else 0):
                continue
            start_s = time.perf_counter()
            results[name] = method(steps)
            best[name] = min(best[name], (time.perf_counter() - start_s) * 1e3)
    for name, advantages in results.items():
        np.testing.assert_allclose(results["gigpo"], advantages, rtol=1e-6, atol=1e-9, err_msg=name)
    cells = " ".join(f"{best[name]:>10,.1f}" for name in METHODS)  # inf was not measured
    over_numpy = best["gigpo"] / best["numpy"]
    print(f"{rows:>10,} {cells} {over_numpy:>11.2f} {gib * 1024:>12,.0f}", flush=True)
    return best


def estimators(*, quick: bool) -> dict[str, float]:
    """Return how much slower than gigpo the slowest estimator is, and how the slowest grows."""
    ms: dict[tuple[str, int], float] = {}
    for rows in (64_000, 640_000):
        steps = make_steps(rows, seed=0)
        steps = steps.append_column("value", steps["reward"])  # any numbers, as a critic's
        for _ in range(2 if quick else 5):
            for name in ESTIMATORS:
                settings = dataclasses.replace(PUBLISHED_SETTINGS, estimator=name)
                start_s = time.perf_counter()
                compute_advantages(steps, settings)
                taken_ms = (time.perf_counter() - start_s) * 1e3
                ms[name, rows] = min(ms.get((name, rows), math.inf), taken_ms)
    growth = {name: math.log10(ms[name, 640_000] / ms[name, 64_000]) for name in ESTIMATORS}
    over = {name: ms[name, 64_000] / ms["gigpo", 64_000] for name in ESTIMATORS}
    for name in ESTIMATORS:
        print(
            f"{name:>22} {ms[name, 64_000]:8,.0f} ms at 64,000 steps, exponent {growth[name]:.2f}"
        )
    return {
        "estimators_over_gigpo_64k": max(over.values()),
        "estimators_exponent_max": max(growth.values()),
    }


def added_gib(call: Callable[[], object]) -> float:
    """Return the resident memory at its highest during the call, less what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before_gib = psutil.Process().memory_info().rss / 2**30
    call()
    return peak_gib() - before_gib


def peak_gib() -> float:
    """Return the most memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


def similarity_s() -> dict[str, float]:
    """Return the seconds to compare one task's unrelated texts, by method."""
    rng = random.Random(0)
    letters = string.ascii_lowercase + " "
    texts = ["".join(rng.choices(letters, k=CHARACTERS)) for _ in range(TEXTS)]
    steps = pa.table({"group_uid": ["task"] * TEXTS, "anchor_text": texts})
    seconds = {}
    for method in ("linked", "greedy"):
        start_s = time.perf_counter()
        keys = similarity_keys(steps, threshold=PUBLISHED_SETTINGS.similarity, method=method)
        seconds[method] = time.perf_counter() - start_s
        assert keys.to_pylist() == texts
    return seconds


def large() -> dict[str, float]:
    """Write 64 million steps; read, compute and write them back by partitions of their groups."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for number in range(LARGE_STEPS // FILE_STEPS):
            pq.write_table(make_steps(FILE_STEPS, seed=number), folder / f"steps-{number}.parquet")
        command = [sys.executable, __file__, "--partitions-of", scratch]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        files = folder.glob("advantages-*.parquet")
        written = sum(pq.read_metadata(file).num_rows for file in files)
    assert written == LARGE_STEPS, f"{written} rows written"
    return json.loads(done.stdout.splitlines()[-1])


def partitions(folder: Path) -> dict[str, float]:
    """Compute the advantages of a large table by partitions, in a process of its own.

    A group is in one partition, so each partition is a table like any other.
    """
    start_s = time.perf_counter()
    names = ", ".join(make_steps(GROUP_STEPS, seed=0).column_names)
    for number in range(PARTITIONS):
        with duckdb.connect(config={"threads": 2, "memory_limit": "2GB"}) as connection:
            files = f"read_parquet('{folder}/steps-*.parquet')"
            query = f"SELECT {names} FROM {files} WHERE hash(group_uid) % {PARTITIONS} = {number}"
            steps = connection.sql(query).to_arrow_table()
        pq.write_table(
            compute_advantages(steps, PUBLISHED_SETTINGS), folder / f"advantages-{number}.parquet"
        )
    return {"gib": peak_gib(), "s": time.perf_counter() - start_s}


def main() -> None:
    parser = quick_parser(__doc__, quick="up to 64,000 steps, 6.4 million of gigpo and numpy alone")
    parser.add_argument(
        "--large", action="store_true", help="64 million steps by hash partition, nothing else"
    )
    parser.add_argument("--partitions-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.partitions_of:
        print(json.dumps(partitions(options.partitions_of)))
        return
    figures: dict[str, float | None] = dict.fromkeys(REQUIRED)
    if not options.large:
        figures |= side_by_side(quick=options.quick)
    if not options.quick:
        done = large()
        print(f"{LARGE_STEPS:,} steps in {PARTITIONS} partitions: {done['s']:.0f} s")
        figures["peak_gib_64m"] = done["gib"]
    show_table(figures, REQUIRED)
    show_json(figures, REQUIRED)


def side_by_side(*, quick: bool) -> dict[str, float | None]:
    start_s = time.perf_counter()
    by_gigpo(make_steps(GROUP_STEPS, seed=0))
    print(f"first call: {(time.perf_counter() - start_s) * 1e3:.0f} ms")
    names = " ".join(f"{name:>10}" for name in METHODS)
    print(f"{'steps':>10} {names}  over numpy     peak MiB   ms, best")
    ms = {rows: measure(rows, quick=quick) for rows in SIZES if not (quick and rows == 640_000)}
    large_over_small = ms[6_400_000]["gigpo"] / ms[64_000]["gigpo"]
    of_texts = similarity_s()
    print(f"{TEXTS} unrelated texts of {CHARACTERS} characters, in s: {of_texts}")
    return {
        "gigpo_ms_6400": ms[6_400]["gigpo"],
        "exponent_64k_6m": math.log(large_over_small, 6_400_000 / 64_000),
        "over_numpy_max": max(
            ms[rows]["gigpo"] / ms[rows]["numpy"] for rows in ms if rows >= 64_000
        ),
        "loop_over_gigpo_64k": ms[64_000]["loop"] / ms[64_000]["gigpo"],
        "similarity_400_s": of_texts["linked"],
    } | estimators(quick=quick)


if __name__ == "__main__":
    main()

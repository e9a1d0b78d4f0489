"""Measure the cost of our actors beside the engine, and how many actors one coordinator serves.

    python benchmarks/rollout.py [--quick]

Tokens: a real worker (Ray, vLLM, prompts, environment process, files, coordinator) plays key_room
with a random model of the tiny policy's size and the quick start's settings. Its requests are then
answered by a second, equal engine with nothing around it but a loop that keeps as many in flight;
the two take turns, the ratio is the median. Both are counted only while all places are taken.

Coordinator: simulated workers, each playing one group at a time of 8 episodes of 2 turns with
log-normal latency (sigma 1), as tasks of two processes; the coordinator is a real Ray actor, the
files are written, a simulated learner claims batches. Latencies are what a worker sees, from its
call to the answer. It takes the whole of a two-core machine. The last line is JSON.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.crowd import INSTANT, Load, hold
from support.figures import quick_parser, show_json, show_table
from support.real_worker import RawVLLM, RealWorker
from support.simulated_run import Pace, make_config

import configs
from actors import sample_chats
from configs import Config
from driver.cluster import ray_cluster
from learner import make_tiny_model, train_tokenizer
from tests.support.simulation import Delay

QUICK_START = Path(__file__).resolve().parent.parent / "configs" / "quickstart.yaml"
REQUIRED = {
    "over_raw_vllm": ">= 0.9",
    "simulated_actors": ">= 2000",
    "simulated_episodes_s": ">= 1000",
    "commit_p99_ms": "to be known",
}
MAX_STALENESS = 16
# (workers, groups per learner step, median seconds of an answer, seconds of warm-up, seconds)
FULL, QUICK = (2000, 256, 1.35, 45.0, 30.0), (300, 64, 0.4, 8.0, 6.0)


def over_raw(directory: Path, *, turns: int, groups: int) -> dict[str, float]:
    config = worker_config(directory / "run", groups=groups)
    model = directory / "model"
    tiny = config.model.tiny
    tokenizer = train_tokenizer(sample_chats(config), vocabulary_size=tiny.vocabulary_size)
    make_tiny_model(model, tokenizer=tokenizer, config=tiny, seed=0)
    in_flight = config.actors.groups_in_flight * config.algorithm.group_size
    raw = RawVLLM(config, model, in_flight=in_flight, log_path=directory / "raw.log")
    worker = RealWorker(config, model)
    worker.start()
    raw.wait_until_ready()
    ours, theirs = [], []
    for _ in range(turns + 1):
        turn = worker.turn()
        ours.append(turn.tokens_per_s)
        theirs.append(raw.tokens_per_s(turn.requests))
    worker.close()
    raw.close()
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    return {
        "requests_per_turn": float(len(turn.requests)),
        "tokens_s": statistics.median(ours[1:]),  # the first turn warms up
        "raw_vllm_tokens_s": statistics.median(theirs[1:]),
        "over_raw_vllm": statistics.median(ratios[1:]),
    }


def worker_config(run_dir: Path, *, groups: int) -> Config:
    """Return the quick start's config, but for the world: key_room needs no games."""
    config = configs.load(str(QUICK_START), [f"run_dir={run_dir}", "max_staleness=0"])
    return replace(
        config,
        env=replace(config.env, name="key_room", options={}),
        learner=replace(config.learner, groups_per_step=groups),
        evaluation=replace(config.evaluation, every=0),
    )


def many_actors(directory: Path, *, quick: bool) -> dict[str, float]:
    workers, groups_per_step, latency_s, warm_up_s, seconds = QUICK if quick else FULL
    environment, step_time = Delay(median_s=latency_s, sigma=1.0), Delay(median_s=0.5, sigma=0.1)
    pace = Pace(
        environment=environment,
        generation=INSTANT,
        step_time=step_time,
        workers=workers,
        groups_per_step=groups_per_step,
        group_size=8,
        max_steps=2,
    )
    config = make_config(directory / "crowd", pace, max_staleness=MAX_STALENESS, steps=10**6)
    load = Load(
        config=config,
        environment=environment,
        step_time=step_time,
        warm_up_s=warm_up_s,
        seconds=seconds,
    )
    return hold(load)


def main() -> None:
    parser = quick_parser(__doc__, quick="fewer turns and workers, for a run of about a minute")
    quick = parser.parse_args().quick
    turns, groups = (1, 24) if quick else (5, 48)
    with tempfile.TemporaryDirectory() as name, ray_cluster(name, processes=os.cpu_count() or 1):
        figures = many_actors(Path(name), quick=quick)
        figures |= over_raw(Path(name), turns=turns, groups=groups)
    show_table(figures, REQUIRED)
    show_json(figures, REQUIRED)


if __name__ == "__main__":
    main()

"""Measure WebShop: steps per second of one core, start-up, and equality with the original engine.

Steps: a random agent searches for the instruction, then clicks at random, 15 steps at most. All its
searches are new. Choosing the clicks is not timed. Start: from the first import to the first page
of results in a new process; median. Equality: with recorded episodes of the original engine, if
DATA/webshop has them. The original's speed is not measured, as it takes Java, Lucene's index and
spaCy: it was 19 steps/s on two busy cores.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from envs.webshop import WebShopEnv

ROOT = Path(__file__).resolve().parents[2]
ORIGINAL_STEPS_S = 19.0
MAX_STEPS = 15
START = """
import json, sys, time
begin = time.perf_counter()
from envs import environment_class
options = json.loads(sys.argv[1])
env = environment_class("webshop")(options)
env.reset(env.tasks("heldout", options)[0])
env.step("search[red shoes]")
print(time.perf_counter() - begin)
"""


def measure(*, quick: bool, data: Path) -> dict[str, float]:
    """Return all figures. `data` is the folder that has `webshop/`."""
    options = {
        "data": str(data / "webshop"),
        "catalogue": "small",
        "instructions": "synthetic",
        "heldout": "test",
        "train_tasks": 0,
        "heldout_tasks": 0,
        "seed": 0,
        "observation": "whole",
    }
    steps_s = statistics.median(
        random_steps_s(options, seed=seed, episodes=200 if quick else 1000)
        for seed in range(3 if quick else 9)
    )
    figures = {
        "webshop_steps_s": steps_s,
        "webshop_over_original": steps_s / ORIGINAL_STEPS_S,
        "webshop_start_s": statistics.median(start_s(options) for _ in range(1 if quick else 5)),
    }
    traces = data / "webshop" / "engine_traces.jsonl.xz"
    return figures | (equal_shares(options, traces) if traces.is_file() else {})


def random_steps_s(options: dict[str, object], *, seed: int, episodes: int) -> float:
    rng, env = random.Random(seed), WebShopEnv(options)
    tasks = rng.sample(list(WebShopEnv.tasks("train", options)), episodes)
    env.reset(tasks[0])
    env.step("search[red shoes]")  # the first search builds the index
    n_steps, seconds = 0, 0.0
    for task in tasks:
        begin = time.process_time()
        observation = env.reset(task)
        seconds += time.process_time() - begin
        action = f"search[{observation.objective} {seed}]"
        for _ in range(MAX_STEPS):
            begin = time.process_time()
            transition = env.step(action)
            seconds += time.process_time() - begin
            n_steps += 1
            if transition.terminated:
                break
            action = rng.choice(transition.observation.actions or ())
    return n_steps / seconds


def start_s(options: dict[str, object]) -> float:
    command = [sys.executable, "-c", START, json.dumps(options)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return float(done.stdout)


def equal_shares(options: dict[str, object], traces: Path) -> dict[str, float]:
    tasks = {}
    for role, split in (("train", "test"), ("heldout", "test"), ("heldout", "eval")):
        for task in WebShopEnv.tasks(role, {**options, "heldout": split}):
            tasks[int(task.data["goal"])] = task
    env = WebShopEnv(options)
    steps = []
    rewards = []
    pages = []
    for line in lzma.decompress(traces.read_bytes()).splitlines():
        episode = json.loads(line)
        observation = env.reset(tasks[episode["goal"]])
        score = 0.0
        is_over = False
        for step in episode["steps"]:
            if step["action"] is not None:
                transition = env.step(step["action"])
                observation, is_over = transition.observation, transition.terminated
                score = transition.task_score or 0.0
            text = observation.text
            if is_over:
                text = re.sub(r"(?<=1\.0\) \[SEP\] )\S+", str(step["reward"]), text)
            listed = step["actions"] or {"has_search_bar": False, "clickables": []}
            actions = ["search[<your query>]"] * listed["has_search_bar"] + [
                f"click[{name}]" for name in listed["clickables"]
            ]
            steps.append(
                (text, list(observation.actions or ()), is_over)
                == (step["observation"], actions, step["done"])
            )
            rewards.append(score == step["reward"])
            if (step["action"] or "").startswith("search["):
                pages.append(observation.text == step["observation"])
    return {
        "webshop_equal_steps": statistics.mean(steps),
        "webshop_equal_rewards": statistics.mean(rewards),
        "webshop_equal_first_pages": statistics.mean(pages),
    }

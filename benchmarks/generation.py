"""Measure one CPU engine: its requests per second, its CPU time, and a change of weights.

    python benchmarks/generation.py [--quick] [--cores 0]

The model is random, of the size of the project's own tiny policy. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import psutil

# our packages are run from a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.figures import quick_parser
from support.tiny_model import make_random_tiny

from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from actors.policy import Prompt
from configs import ActorsConfig, TinyModelConfig
from store import files_digest, weight_files

PROMPT_TOKENS = 120  # as a text game's prompt with two turns of history
RESPONSE_TOKENS = 8  # as an action of a text game
MAX_IN_FLIGHT = 64  # as 8 groups of 8 episodes


async def measure(policy: VLLMPolicy, *, in_flight: int, seconds: float) -> dict[str, float]:
    """Keep `in_flight` requests going for `seconds`. No prompt shares a prefix with another."""
    draw, vocabulary = random.Random(in_flight), range(2, TinyModelConfig().vocabulary_size)
    deadline_s = time.perf_counter() + seconds
    latencies_s: list[float] = []

    async def client() -> None:
        while time.perf_counter() < deadline_s:
            token_ids = tuple(draw.choices(vocabulary, k=PROMPT_TOKENS))
            prompt = Prompt(token_ids=token_ids, actions=None)
            start_s = time.perf_counter()
            await policy.generate(prompt, seed=draw.getrandbits(31), temperature=1.0)
            latencies_s.append(time.perf_counter() - start_s)

    front, engine = psutil.Process(), _engine_process()
    start_s = time.perf_counter()
    front_s = _cpu_s(front)
    engine_s = _cpu_s(engine)
    await asyncio.gather(*(client() for _ in range(in_flight)))
    wall_s = time.perf_counter() - start_s
    n = len(latencies_s)
    return {
        "requests_per_s": n / wall_s,
        "tokens_per_s": n * RESPONSE_TOKENS / wall_s,
        "latency_median_ms": statistics.median(latencies_s) * 1e3,
        "front_cpu_ms_per_request": (_cpu_s(front) - front_s) / n * 1e3,
        "engine_cpu_ms_per_request": (_cpu_s(engine) - engine_s) / n * 1e3,
    }


def _engine_process() -> psutil.Process:
    """Return the largest process below this one; a fork server may be its parent."""
    below = psutil.Process().children(recursive=True)
    return max(below, key=lambda process: process.memory_info().rss)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def benchmark(
    *, directory: Path, cores: str, seconds: float, loads: int
) -> dict[str, object]:
    for name, seed in (("base", 0), ("other", 1)):
        make_random_tiny(directory / name, seed=seed)
    actors = ActorsConfig(
        cpu_cores=cores,
        max_response_tokens=RESPONSE_TOKENS,
        kv_cache_gib=0.25,
    )
    start_s = time.perf_counter()
    policy = VLLMPolicy(
        model_path=directory / "base",
        dtype="float32",
        lora=None,
        actors=actors,
        max_model_tokens=512,
        gate=RequestGate(MAX_IN_FLIGHT),
        stop_token_ids=(),
        stop=(),
        tokenizer=None,
        log_path=directory / "engine.log",
        statistics=False,
    )
    await policy.start()
    results: dict[str, object] = {"start_s": time.perf_counter() - start_s}
    try:
        await measure(policy, in_flight=MAX_IN_FLIGHT, seconds=1.0)  # first batches are slower
        for in_flight in (1, 16, MAX_IN_FLIGHT):
            results[f"in_flight_{in_flight}"] = await measure(
                policy, in_flight=in_flight, seconds=seconds
            )
        busy = asyncio.ensure_future(measure(policy, in_flight=MAX_IN_FLIGHT, seconds=seconds))
        done = []
        for n in range(1, loads + 1):
            path = directory / ("other" if n % 2 else "base")
            digest = files_digest(weight_files(path))
            done.append(await policy.load_weights(version=n, path=path, digest=digest))
        await busy
        phases = [name for name in asdict(done[0]) if name.endswith("_ms")]
        results["load_weights"] = {
            name: statistics.median(map(attrgetter(name), done)) for name in phases
        }
    finally:
        await policy.close()
    return results


def main() -> None:
    parser = quick_parser(__doc__, quick="under a minute")
    parser.add_argument("--cores", default="0", help='cores of the engine, such as "0" or "0,2-3"')
    args = parser.parse_args()
    seconds, loads = (4.0, 5) if args.quick else (20.0, 20)
    with tempfile.TemporaryDirectory() as directory:
        results = asyncio.run(
            benchmark(directory=Path(directory), cores=args.cores, seconds=seconds, loads=loads)
        )
    print(json.dumps({"benchmark": "generation", **results}, default=float))


if __name__ == "__main__":
    main()

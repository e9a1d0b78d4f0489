"""Measure the time from a learner's publish to a vLLM engine's answer with the new weights.

    times_ms = publish_to_serve(base, publishes=5, cores="0", directory=directory)

The engine runs in another process. It checks what it read against the recorded digest, and answers
a request of PROMPT_TOKENS with one token of the new version before the clock stops. A worker's
delay until it notices a new version is not included.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

from actors.concurrency import RequestGate
from actors.inference.vllm_policy import VLLMPolicy
from actors.policy import Prompt
from configs import ActorsConfig, LearnerConfig, LossConfig, ModelConfig
from learner.files.atomic_directory import prune_oldest, sync_whole
from learner.publishing.publish import WeightsCopy
from learner.training.engine import Engine

PROMPT_TOKENS = 16
PATIENCE_S = 120.0
KEEP_VERSIONS = LearnerConfig().keep_versions
CHANGE = 1.0 + 1e-4  # of the weights, from one version to the next
_FORK = multiprocessing.get_context("fork")


def publish_to_serve(base: Path, *, publishes: int, cores: str, directory: Path) -> list[float]:
    """Return the milliseconds of each publish but the first, which warms up.

    Start it in a process that has computed nothing yet.
    """
    ours, theirs = _FORK.Pipe()
    learner = _FORK.Process(target=_learn, args=(base, theirs), daemon=True)
    learner.start()
    try:
        measuring = _measure(base, ours, publishes=publishes, cores=cores, directory=directory)
        return asyncio.run(measuring)[1:]
    finally:
        learner.kill()
        learner.join()


async def _measure(
    base: Path, learner: Connection, *, publishes: int, cores: str, directory: Path
) -> list[float]:
    policy = VLLMPolicy(
        model_path=base,
        dtype="float32",
        lora=None,
        actors=ActorsConfig(max_response_tokens=1, kv_cache_gib=0.25, cpu_cores=cores),
        max_model_tokens=256,
        gate=RequestGate(8),
        stop_token_ids=(),
        stop=(),
        tokenizer=None,
        log_path=directory / "engine.log",
        statistics=False,
    )
    await policy.start()
    times_ms = []
    try:
        for version in range(1, publishes + 2):
            _ask(learner, None)
            path = directory / f"v{version:06d}"
            started_s = time.perf_counter()
            digest = _ask(learner, path)
            await policy.load_weights(version=version, path=path, digest=digest)
            prompt = Prompt(token_ids=tuple(range(version, version + PROMPT_TOKENS)), actions=None)
            answer = await policy.generate(prompt, seed=0, temperature=1.0)
            times_ms.append((time.perf_counter() - started_s) * 1e3)
            if answer.version_min != version:
                raise RuntimeError(
                    f"version {version} was published, but version {answer.version_min} answered"
                )
    finally:
        await policy.close()
    return times_ms


def _ask(learner: Connection, path: Path | None) -> str:
    learner.send(path)
    if not learner.poll(PATIENCE_S):
        raise TimeoutError(f"the learner's process did not answer within {PATIENCE_S:g} s")
    return learner.recv()


def _learn(base: Path, connection: Connection) -> None:
    """Write the weights to each path that it is sent.

    None is the time between two publishes: the weights change, and the disk catches up.
    """
    engine = Engine(
        model_path=base,
        model=ModelConfig(),
        learner=LearnerConfig(),
        loss=LossConfig(),
        temperature=1.0,
        seed=0,
    )
    copy = WeightsCopy()
    last: Path | None = None
    while True:
        path = connection.recv()
        if path is None:
            for parameter in engine.policy.parameters():
                parameter.data.mul_(CHANGE)
            if last is not None:
                sync_whole(last)
                prune_oldest(last.parent, keep=KEEP_VERSIONS)
            connection.send("")
        else:
            digest = copy.take(engine.weights())
            copy.write(path, source_dir=base, send=None)
            connection.send(digest)
            last = path

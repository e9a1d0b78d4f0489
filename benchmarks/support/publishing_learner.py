"""Run the learner's real loop on a model, and read from its run what publishing costs it.

    figures = measured(base, steps=5, directory=directory)

Ranks, files, store and coordinator are the real ones, the coordinator without Ray. Groups are made
up: a stand-in for the workers commits as many as are leased. The loop runs in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from actors.inference.broadcast_receiver import Receiver
from configs import LearnerConfig, LossConfig, ModelConfig
from coordinator import Reply
from learner import Learner, LearnerSetup
from learner.distributed.deepspeed_setup import LOOPBACK
from learner.publishing.broadcast_sender import Broadcast
from learner.publishing.publish import WeightsCopy
from learner.training.engine import Engine
from store import RunLayout, weight_files
from tests.support.learner_loop import Handle, Silent, make_config, open_coordinator, play_all
from tests.support.run_views import connect

CHECKPOINT_EVERY = 2
# A learner step of 135 million parameters then takes some seconds on one core, so that files can be
# written behind it. In a real run it takes longer.
RESPONSE_TOKENS = 24
PATIENCE_S = 600.0
LORA_RANK = 16
SENDS = 5
_FORK = multiprocessing.get_context("fork")


def measured(base: Path, *, steps: int, directory: Path) -> dict[str, float]:
    """Return the figures of a run of `steps` learner steps.

    Start it in a process that has computed nothing yet.
    """
    return _in_a_process(partial(_loop, base, steps=steps, directory=directory))


def lora_over_full(base: Path) -> dict[str, float]:
    """Return the bytes that a version has with LoRA, over those without."""
    return _in_a_process(partial(_bytes, base))


def sent(base: Path, *, directory: Path) -> dict[str, float]:
    """Return how fast a version is written, sent to one engine's receiver, and verified there."""
    return _in_a_process(partial(_sent, base, directory=directory))


def _in_a_process(work: Any) -> dict[str, float]:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_send, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(PATIENCE_S):
            raise TimeoutError(f"no figures within {PATIENCE_S:g} s")
        figures: dict[str, float] = ours.recv()
        return figures
    finally:
        process.kill()
        process.join()


def _send(work: Any, connection: Connection) -> None:
    connection.send(work())


def _loop(base: Path, *, steps: int, directory: Path) -> dict[str, float]:
    run = directory / "run"
    config = make_config(run, max_staleness=1, steps=steps, checkpoint_every=CHECKPOINT_EVERY)
    coordinator = open_coordinator(config)
    handle = Handle(coordinator, playing=partial(play_all, n_response_tokens=RESPONSE_TOKENS))
    with (
        patch("learner.learner.Heartbeat", Silent),
        patch.object(Reply, "get", lambda reply, **patience: reply.reference),
    ):
        setup = LearnerSetup(run_id="unused", config=config, model_path=str(base))
        learner = Learner(setup, handle, stopping=threading.Event())
        learner.run()
        before = _at_once(learner, directory)
        learner.close()
    coordinator.close()
    with connect(RunLayout.open(run)) as connection:
        rows = connection.execute(
            "SELECT name, value FROM metrics ORDER BY learner_step"
        ).fetchall()

    def values(name: str) -> list[float]:
        return [value for found, value in rows if found == name]

    # The first step waits for version 0, whose files and memory are new.
    return before | {
        "learner_idle_s": statistics.median(values("time/publish_s")[1:]),
        "learner_idle_longest_s": max(values("time/publish_s")[1:]),
        "checkpoint_idle_s": statistics.median(filter(None, values("time/checkpoint_s"))),
        "learner_step_s": statistics.median(values("time/step_s")[1:]),
    }


def _at_once(learner: Learner, directory: Path) -> dict[str, float]:
    """Write a version and a checkpoint while the loop waits, as without a thread."""
    ranks, clock = learner.ranks, time.perf_counter
    times_s = []
    for number in range(3):
        ranks.copy_weights()
        began_s = clock()
        ranks.write_weights(directory / f"v{number}")
        times_s.append(clock() - began_s)
    began_s = clock()
    ranks.copy_checkpoint(learner_step=learner.step, version=learner.version, lsn=1)
    ranks.write_checkpoint(directory / "checkpoint")
    return {
        "learner_idle_at_once_s": statistics.median(times_s),
        "checkpoint_idle_at_once_s": clock() - began_s,
    }


def _sent(base: Path, *, directory: Path) -> dict[str, float]:
    cpu = torch.device("cpu")
    sender = Broadcast(LOOPBACK, device=cpu)
    receiver = Receiver(sender.address, device=cpu, asks=False)
    tensors = {name: t for file in weight_files(base) for name, t in load_file(file).items()}
    copy, times_s = WeightsCopy(), list[float]()
    digest = copy.take(tensors.items())
    while len(times_s) < 1 + SENDS:
        dest = directory / "sent"
        began_s = time.perf_counter()
        with sender.round() as send:
            copy.write(dest, source_dir=base, send=send)
        while receiver.is_busy:
            time.sleep(0.001)
        received = receiver.take(digest)
        took_s = time.perf_counter() - began_s
        shutil.rmtree(dest)
        if received is None:  # it had not joined yet
            time.sleep(0.1)
            continue
        receiver.release()
        times_s.append(took_s)
    receiver.close()
    # The first one has new memory.
    return {"sent_gb_per_s": copy.n_bytes / statistics.median(times_s[1:]) / 1e9}


def _bytes(base: Path) -> dict[str, float]:
    n_bytes = []
    for rank in (LORA_RANK, 0):
        engine = Engine(
            model_path=base,
            model=ModelConfig(lora_rank=rank),
            learner=LearnerConfig(),
            loss=LossConfig(),
            temperature=1.0,
            seed=0,
        )
        copy = WeightsCopy()
        copy.take(engine.published())
        n_bytes.append(copy.n_bytes)
        engine.close()
    return {"bytes_lora_over_full": n_bytes[0] / n_bytes[1]}

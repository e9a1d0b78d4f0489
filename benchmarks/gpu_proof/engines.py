"""Make the learner's engine of a random model, time its updates, compare its weights.

Importing this module loads DeepSpeed, which some sections do without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from configs import LearnerConfig, LossConfig, ModelConfig
from learner.data.micro_batch import MicroBatch
from learner.training.engine import Engine

from gpu_proof.models import model_directory
from gpu_proof.shapes import ModelShape, Proof

LEARNING_RATE = 1e-3  # so high that one update shows in bf16 weights
WARM_UP_UPDATES = 1


def make_engine(proof: Proof, shape: ModelShape, **settings: Any) -> Engine:
    """Return the learner's engine on the proof's device, with some settings of its config."""
    model, learner, loss = engine_configs(proof, **settings)
    return Engine(
        model_path=model_directory(proof, shape),
        model=model,
        learner=learner,
        loss=loss,
        temperature=1.0,
        seed=0,
    )


def engine_configs(proof: Proof, **settings: Any) -> tuple[ModelConfig, LearnerConfig, LossConfig]:
    """Return the three parts of a config that an engine is made of.

    A setting goes to the part that has one of its name, in the order of the result.
    """
    given = {
        "dtype": "bfloat16",
        "learning_rate": LEARNING_RATE,
        "gpus_per_rank": int(proof.on_gpu),
        **settings,
    }
    of_model = {item.name for item in fields(ModelConfig)} & given.keys()
    of_learner = {item.name for item in fields(LearnerConfig)} & given.keys() - of_model
    of_loss = given.keys() - of_model - of_learner
    return (
        ModelConfig(**{name: given[name] for name in of_model}),
        LearnerConfig(**{name: given[name] for name in of_learner}),
        LossConfig(**{name: given[name] for name in of_loss}),
    )


def copied_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Return a copy of the engine's weights on the CPU, by name."""
    return {name: tensor.detach().cpu().clone() for name, tensor in engine.weights()}


def distance(ones: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    """Return the 2-norm of the difference of two sets of weights."""
    squares = [(one.double() - others[name].double()).square().sum() for name, one in ones.items()]
    return float(torch.stack(squares).sum().sqrt())


def update_seconds(engine: Engine, batches: Sequence[MicroBatch], *, repeats: int) -> float:
    """Return the seconds of the median update."""
    # The clock is read after the statistics, which wait for the device.
    seconds = []
    for index in range(WARM_UP_UPDATES + repeats):
        started_s = time.perf_counter()
        (stats,) = engine.train([batches])
        seconds.append(time.perf_counter() - started_s)
        if stats.skipped:
            raise RuntimeError(
                f"update {index} was skipped: loss {stats.loss}, gradient norm {stats.grad_norm}"
            )
    return statistics.median(seconds[WARM_UP_UPDATES:])

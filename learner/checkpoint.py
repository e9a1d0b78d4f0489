"""What a run needs to go on bit for bit: weights, optimizer state, random states, and where it was.

    save_checkpoint(engine, Path("checkpoints/step000010"), learner_step=10, version=11)
    point = load_checkpoint(engine, Path("checkpoints/step000010"))      # point.learner_step == 10

A checkpoint is a directory that appears whole or not at all:

    deepspeed/state/    DeepSpeed's own files
    checkpoint.json     learner step, version, optimizer updates, random states of torch, numpy and python
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.engine import Engine
from learner.publish import prune_oldest, visible_last

STATE_DIR, STATE_TAG = "deepspeed", "state"
POINT_FILE = "checkpoint.json"
FORMAT_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message says which and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPoint:
    learner_step: int
    version: int  # policy version of these weights
    n_updates: int  # optimizer updates applied so far


def save_checkpoint(engine: Engine, dest: Path, *, learner_step: int, version: int) -> None:
    with visible_last(dest) as unfinished:
        engine.deepspeed.save_checkpoint(str(unfinished / STATE_DIR), tag=STATE_TAG, save_latest=False)
        content = {
            "format_version": FORMAT_VERSION,
            "learner_step": learner_step,
            "version": version,
            "n_updates": engine.n_updates,
            "zero_stage": engine.learner.zero_stage,
            "random_states": _random_states(),
        }
        (unfinished / POINT_FILE).write_text(json.dumps(content) + "\n")


def load_checkpoint(engine: Engine, source: Path) -> CheckpointPoint:
    """Restores the engine and the random states of this process; CheckpointError if it does not fit."""
    try:
        content = json.loads((source / POINT_FILE).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} is not a checkpoint (no {POINT_FILE} in it); choose another") from error
    if content["format_version"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{source} has format version {content['format_version']}, this code reads up to {FORMAT_VERSION}; update"
        )
    if content["zero_stage"] != engine.learner.zero_stage:
        raise CheckpointError(
            f"{source} was written with learner.zero_stage={content['zero_stage']}, not {engine.learner.zero_stage}; "
            "optimizer state is laid out by stage, so continue with the same one"
        )
    path, _ = engine.deepspeed.load_checkpoint(str(source / STATE_DIR), tag=STATE_TAG)
    if path is None:
        raise CheckpointError(f"DeepSpeed found no state in {source / STATE_DIR}; it is damaged, use an older checkpoint")
    engine.n_updates = content["n_updates"]
    _restore_random_states(content["random_states"])
    return CheckpointPoint(learner_step=content["learner_step"], version=content["version"], n_updates=content["n_updates"])


def prune_checkpoints(checkpoints_dir: Path, *, keep: int) -> list[str]:
    """Removes all but the newest `keep` checkpoints; returns the names removed."""
    return prune_oldest(checkpoints_dir, keep=keep)


def _random_states() -> dict[str, Any]:
    """As JSON: nothing of ours is pickled to disk."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": [_hex(state) for state in cuda],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def _restore_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(_from_hex(states["torch"]))
    for device, state in enumerate(states["cuda"]):
        torch.cuda.set_rng_state(_from_hex(state), device)
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

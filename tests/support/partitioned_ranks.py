"""Load a model on one of two ranks, and measure the memory that it takes.

# writes OUT/rank<RANK>.json
python -m tests.support.forked_ranks tests.support.partitioned_ranks 2 ADDRESS BASE SMALL OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from configs import LearnerConfig
from learner.distributed.deepspeed_setup import (
    full_parameter,
    join_ranks,
    own_elements,
    prepare_device,
)
from learner.model.policy_model import PolicyModel, load_policy

LEARNER = LearnerConfig(ranks=2, zero_stage=3)
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_bytes(name: str) -> int:
    """Return a line of the process's status: VmRSS is what it has now, VmHWM the most it had."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return the work's result, and the most bytes by which the process grew meanwhile."""
    CLEAR.write_text("5")  # the most memory is from now on
    before = memory_bytes("VmRSS")
    result = work()
    return result, memory_bytes("VmHWM") - before


def load(base: Path, learner: LearnerConfig | None) -> PolicyModel:
    return load_policy(
        base,
        dtype="float32",
        gradient_checkpointing=False,
        temperature=1.0,
        divided_by=learner,
    )


def main() -> None:
    rank, address, base, small, out = sys.argv[1:]
    prepare_device(LEARNER)
    join_ranks(int(rank), ranks=2, address=address)
    for learner in (LEARNER, None):  # what is loaded and compiled once is no part of the model
        load(Path(small), learner)
    divided, peak = peak_of(lambda: load(Path(base), LEARNER))
    written = load_file(Path(base) / "model.safetensors")
    are_equal, n_own = True, 0
    for name, parameter in divided.causal_lm.named_parameters():
        n_own += own_elements(parameter).numel()
        with full_parameter(parameter):
            are_equal &= torch.equal(parameter.detach(), written[name])
    del written
    _, whole_peak = peak_of(lambda: load(Path(base), None))
    found = {
        "peak": peak,
        "whole_peak": whole_peak,
        "are_equal": are_equal,
        "n_own": n_own,
        "is_trimmed": divided.is_trimmed,
    }
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(found))

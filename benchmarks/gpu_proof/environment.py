"""Prove that the versions are there, and that a group of one rank works.

Records versions, driver and device. Starts the learner's engine, whose group has one rank and a
store in memory (NCCL on a GPU, gloo on a CPU), then runs collectives of that group.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata

import torch
import torch.distributed as dist

from gpu_proof.engines import make_engine
from gpu_proof.models import make_batches
from gpu_proof.shapes import Proof

PACKAGES = (
    "torch", "transformers", "peft", "deepspeed", "triton", "pyarrow", "duckdb", "safetensors",
    "blake3", "omegaconf", "pydantic", "numpy", "ray", "vllm",
)  # fmt: skip
# Modules of the learner that a rank's process loads. None may need a package that is missing.
MODULES = (
    "checkpoint", "data.batch_loader", "data.micro_batch", "model.lora",
    "publishing.broadcast_sender", "publishing.publish", "training.engine",
)  # fmt: skip


def run(proof: Proof) -> None:
    report = proof.report
    report.figure("versions", versions())
    report.figure("device", device_figures(proof))
    with report.case("imports"):
        for module in MODULES:
            __import__(f"learner.{module}")
        report.is_true("the learner loads no vLLM", "vllm" not in sys.modules)
    with report.case("one rank"):
        engine = make_engine(proof, proof.shapes.trained, zero_stage=1)
        backend = dist.get_backend()
        report.figure("backend", backend)
        report.is_true("backend fits the device", backend == ("nccl" if proof.on_gpu else "gloo"))
        report.is_true("engine is on the device", engine.deepspeed.device.type == proof.device.type)
        _collectives(proof)
        shape = proof.shapes.trained
        batches = make_batches(proof, shape, budget_tokens=256, total_tokens=256)
        (stats,) = engine.train([batches])
        report.is_true("an update is applied", not stats.skipped and engine.n_updates == 1)
        engine.close()


def _collectives(proof: Proof) -> None:
    dist.barrier()
    ones = torch.ones(1000, device=proof.device)
    dist.all_reduce(ones)
    dist.broadcast(ones, src=0)
    gathered: list[object] = [None]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    proof.report.is_true("all_reduce over one rank", float(ones.sum()) == 1000.0)
    proof.report.is_true("all_gather_object over one rank", gathered == [{"rank": 0}])


def versions() -> dict[str, str | None]:
    """Return the version of Python and of each package; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["cuda"] = torch.version.cuda
    return found


def device_figures(proof: Proof) -> dict[str, object]:
    """Return what names the device: for a GPU its name, memory, capability and driver."""
    if not proof.on_gpu:
        return {"name": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(proof.device)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        check=True,
        capture_output=True,
        text=True,
    )
    return {
        "name": properties.name,
        "memory_gib": properties.total_memory / 2**30,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": driver.stdout.split()[0],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }

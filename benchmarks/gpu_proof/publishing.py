"""Time the parts of publishing a model apart: copy, write, sync, digest, load; then the whole.

On a GPU the copy from the device is timed into pageable and into pinned memory. On a CPU there is
no such copy. Files are written to the disk of the temporary directory, never to shared memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from learner.files.atomic_directory import sync_whole
from learner.publishing.publish import WeightsCopy
from safetensors.torch import load_file, save_file
from store import files_digest, weight_files

from gpu_proof.models import free_memory, model_directory, seconds_of
from gpu_proof.shapes import Proof

Tensors = Mapping[str, torch.Tensor]


def run(proof: Proof) -> None:
    source = model_directory(proof, proof.shapes.real)
    weights = loaded(source, device=proof.device)
    n_bytes = sum(tensor.nbytes for tensor in weights.values())
    proof.report.figure("bytes", n_bytes)

    def timed(name: str, work: Callable[[], object]) -> None:
        seconds = seconds_of(work, proof=proof)
        figures = {"seconds": seconds, "gb_per_s": n_bytes / seconds / 1e9}
        proof.report.figure(name, figures)

    with tempfile.TemporaryDirectory(prefix="gpu_proof_disk_") as directory:
        disk = Path(directory)
        with proof.report.case("copy"):
            _copies(proof, weights, timed)
        with proof.report.case("files"):
            _files(proof, weights, disk, timed)
        with proof.report.case("publish"):
            _publish(proof, weights, disk, source=source, timed=timed)


def _copies(proof: Proof, weights: Tensors, timed: Callable[..., None]) -> None:
    if not proof.on_gpu:
        proof.report.needs_cuda("copy from the device, pageable and pinned")
        return
    hosts = {name: torch.empty_like(tensor, device="cpu") for name, tensor in weights.items()}
    timed("copy to new pageable memory", lambda: {n: t.cpu() for n, t in weights.items()})
    timed("copy to pageable memory", lambda: [hosts[n].copy_(t) for n, t in weights.items()])
    pinned: dict[str, torch.Tensor] = {}
    timed(
        "make pinned memory",
        lambda: pinned.update({n: torch.empty_like(t).pin_memory() for n, t in hosts.items()}),
    )
    timed(
        "copy to pinned memory",
        lambda: [pinned[n].copy_(t, non_blocking=True) for n, t in weights.items()],
    )
    equal = all(torch.equal(pinned[name], tensor.cpu()) for name, tensor in weights.items())
    proof.report.is_true("pinned copy is equal", equal)
    timed("copy from pinned memory", lambda: [t.copy_(pinned[n]) for n, t in weights.items()])


def _files(proof: Proof, weights: Tensors, disk: Path, timed: Callable[..., None]) -> None:
    file = disk / "model.safetensors"
    hosts = {name: tensor.cpu() for name, tensor in weights.items()}
    timed("write a new file", lambda: save_file(hosts, file))
    timed("sync the file", lambda: _sync(file))
    timed("digest", lambda: files_digest([file]))
    timed("load to the device", lambda: load_file(file, device=str(proof.device)))
    back = load_file(file)
    equal = all(torch.equal(back[name], tensor) for name, tensor in hosts.items())
    proof.report.is_true("file holds the weights", equal)
    file.unlink()


def _publish(
    proof: Proof, weights: Tensors, disk: Path, *, source: Path, timed: Callable[..., None]
) -> None:
    """Publish as the learner does, from the device to a visible directory."""
    copy, digests = WeightsCopy(), []
    dest = disk / "v000001"
    timed("publish: first copy and digest", lambda: digests.append(copy.take(weights.items())))
    timed("publish: copy and digest", lambda: digests.append(copy.take(weights.items())))
    timed("publish: write", lambda: copy.write(dest, source_dir=source, send=None))
    timed("publish: until it is on the disk", lambda: sync_whole(dest))
    proof.report.is_true(
        "digest is that of the files", {*digests} == {files_digest(weight_files(dest))}
    )
    served: dict[str, Any] = {}
    timed("load what was published", lambda: served.update(loaded(dest, device=proof.device)))
    equal = all(torch.equal(served[name], tensor) for name, tensor in weights.items())
    proof.report.is_true("published weights are the device's", equal)
    served.clear()
    free_memory(proof)


def loaded(directory: Path, *, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the weights of a model directory on the device."""
    files = weight_files(directory)
    return {k: v for file in files for k, v in load_file(file, device=str(device)).items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

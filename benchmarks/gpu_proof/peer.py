"""The second process of `sharing.py`: hold numbered weights and hand them over piece by piece.

    sender    wait for a request, fill the buffer, hand it over; after the last piece the digest
    receiver  ask for a piece, take it; after the last one compare the digest

Ways: "ipc" shares one buffer (CUDA IPC on a GPU, shared memory on a CPU). "gloo pinned" broadcasts
through page-locked main memory, "gloo device" broadcasts the device's memory itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3

IPC, GLOO_PINNED, GLOO_DEVICE = "ipc", "gloo pinned", "gloo device"
SENDER, RECEIVER, N_RANKS = 0, 1, 2
LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=30)  # of a message, and of the group to form


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Describe one way of handing weights over; both processes have the same."""

    way: str
    device: str
    n_bytes: int
    piece_bytes: int
    store: Path  # a file, by which the two find each other

    def pieces(self) -> Iterator[slice]:
        for begin in range(0, self.n_bytes, self.piece_bytes):
            yield slice(begin, min(begin + self.piece_bytes, self.n_bytes))

    def buffer(self) -> torch.Tensor:
        """Return one piece's buffer: on the host for "gloo pinned", else on the device."""
        if self.way != GLOO_PINNED:
            return torch.empty(self.piece_bytes, dtype=torch.uint8, device=self.device)
        return torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=self.on_gpu)

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


def serve(link: Link, connection: Connection) -> None:
    """Hand over a version's weights whenever its number comes; return at None.

    Consumes version numbers and one request a piece, produces pieces and the digest.
    """
    buffer = link.buffer()
    # A handle, so that both processes see the same memory; else the word that this one is ready.
    connection.send(buffer if link.way == IPC else None)
    group = None if link.way == IPC else join(link, SENDER)
    while (version := connection.recv()) is not None:
        weights = numbered_weights(version, n_bytes=link.n_bytes, device=link.device)
        for piece in link.pieces():
            connection.recv()
            part = buffer[: piece.stop - piece.start]
            part.copy_(weights[piece])
            finish(link)
            if group is None:
                connection.send(piece.start)
            else:
                broadcast(group, part)
        connection.send(digest(weights))


def numbered_weights(version: int, *, n_bytes: int, device: str) -> torch.Tensor:
    """Return a version's weights as bytes of bf16 numbers, the same in both processes."""
    generator = torch.Generator(device=device).manual_seed(version)
    numbers = torch.randn(n_bytes // 2, generator=generator, device=device, dtype=torch.float32)
    return numbers.bfloat16().view(torch.uint8)


def join(link: Link, rank: int) -> Any:
    """Return a gloo group of the two processes over the loopback interface."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = TIMEOUT
    store = dist.FileStore(str(link.store), N_RANKS)
    store.set_timeout(TIMEOUT)
    return dist.ProcessGroupGloo(store, rank, N_RANKS, options)


def broadcast(group: Any, part: torch.Tensor) -> None:
    """Send or receive one piece; raise RuntimeError if the other process is gone."""
    options = dist.BroadcastOptions()
    options.rootRank = SENDER
    group.broadcast([part], options).wait()


def digest(weights: torch.Tensor) -> str:
    """Return the BLAKE3 digest of bytes, wherever they are."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update(memoryview(weights.cpu().numpy()))
    return hasher.hexdigest()


def finish(link: Link) -> None:
    """Wait until the device has done what it was asked."""
    if link.on_gpu:
        torch.cuda.synchronize()

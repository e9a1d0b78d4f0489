"""Bring new weights from another process on the same GPU to an engine that replays a CUDA graph.

This process is the engine's stand-in: a stack of matrices in one block of memory that a CUDA graph
has captured. The sender sends version 2, whose digest is verified before it is copied in place; the
graph must then compute with version 2. Then the sender is killed in the middle of version 3; the
engine must notice, and still compute with version 2. NCCL is not tried: it refuses two ranks on one
GPU. On a CPU shared memory takes the place of CUDA IPC, and nothing is captured.

    sender    wait for a request, fill the buffer, hand it over; after the last piece the digest
    receiver  ask for a piece, take it; after the last one compare the digest

Ways: "ipc" shares one buffer (CUDA IPC on a GPU, shared memory on a CPU). "gloo pinned" broadcasts
through page-locked main memory, "gloo device" broadcasts the device's memory itself.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from blake3 import blake3

from gpu_proof.shapes import Proof

IPC, GLOO_PINNED, GLOO_DEVICE = "ipc", "gloo pinned", "gloo device"
SENDER, RECEIVER, N_RANKS = 0, 1, 2
LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=30)  # of a message, and of the group to form
N_LAYERS, ROWS = 8, 16
START_S, PIECE_S = 90.0, 30.0  # for the sender to start, and to hand over a piece
NOTICED_S = 10.0  # after the sender was killed
SAME = 2e-2  # bf16; the captured graph and the reference may use different kernels
LOST = (EOFError, ConnectionError, RuntimeError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One way of handing weights over. Both processes have an equal one."""

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


class Engine:
    """Compute relu(x W / sqrt(D)) through a stack of matrices; on a GPU by replaying a graph."""

    def __init__(self, weights: torch.Tensor, *, on_gpu: bool) -> None:
        self.weights = weights.clone()  # bytes; the graph keeps their address
        size = int((len(weights) // 2 // N_LAYERS) ** 0.5)
        self._input = torch.linspace(-1, 1, ROWS * size, device=weights.device)
        self._input = self._input.view(ROWS, size).bfloat16()
        self._graph = torch.cuda.CUDAGraph() if on_gpu else None
        self._output = self._computed()
        if self._graph is not None:
            self._capture(self._graph)

    def answer(self) -> torch.Tensor:
        """Return what the engine computes with its weights as they are now."""
        if self._graph is None:
            return self._computed()
        self._graph.replay()
        return self._output.clone()

    def _capture(self, graph: torch.cuda.CUDAGraph) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # so that libraries have what they allocate
                self._computed()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            self._output = self._computed()

    def _computed(self) -> torch.Tensor:
        size = self._input.shape[1]
        hidden = self._input
        for matrix in self.weights.view(torch.bfloat16).view(N_LAYERS, size, size):
            hidden = torch.relu(hidden @ matrix / size**0.5)
        return hidden


def run(proof: Proof) -> None:
    ways = [IPC, GLOO_PINNED, GLOO_DEVICE]
    if not proof.on_gpu:
        ways.remove(GLOO_DEVICE)
        for part in ("CUDA IPC", "captured CUDA graph", "pinned memory", "gloo on device memory"):
            proof.report.needs_cuda(part)
    for way in ways:
        link = Link(
            way=way,
            device=str(proof.device),
            n_bytes=proof.shapes.shared_bytes,
            piece_bytes=proof.shapes.shared_piece_bytes,
            store=proof.work / f"sharing-{way.replace(' ', '-')}",
        )
        with proof.report.case(way):
            _by(link, proof)


def _by(link: Link, proof: Proof) -> None:
    context = mp.get_context("spawn")  # a forked process cannot use CUDA
    here, there = context.Pipe()
    sender = context.Process(target=serve, args=(link, there), daemon=True)
    sender.start()
    there.close()  # or its death would not be seen
    try:
        _rounds(Receiver(link, here, pid=sender.pid), proof)
    finally:
        sender.kill()
        sender.join()


class Receiver:
    """Take weights piece by piece into memory of its own."""

    def __init__(self, link: Link, connection: Connection, *, pid: int) -> None:
        self.link = link
        self.connection = connection
        self.pid = pid
        shared = self._answer(START_S)  # before the group forms, whose time-out is shorter
        self.buffer = link.buffer() if shared is None else shared
        self.group = None if link.way == IPC else join(link, RECEIVER)
        self.staging = torch.empty(link.n_bytes, dtype=torch.uint8, device=link.device)

    def take(self, version: int, *, kill_at: int | None = None) -> None:
        """Fill the staging memory with a version; kill the sender before piece `kill_at`.

        Raises one of LOST if the sender is gone.
        """
        self.connection.send(version)
        for index, piece in enumerate(self.link.pieces()):
            if index == kill_at:
                os.kill(self.pid, signal.SIGKILL)
            else:
                self.connection.send(index)
            part = self.buffer[: piece.stop - piece.start]
            if self.group is None:
                self._answer(PIECE_S)
            else:
                broadcast(self.group, part)
            self.staging[piece].copy_(part)
            finish(self.link)  # the sender fills the buffer again at the next request

    def sent_digest(self) -> str:
        """Return the digest that the sender computed of what it holds."""
        return str(self._answer(PIECE_S))

    def _answer(self, timeout_s: float) -> Any:
        if not self.connection.poll(timeout_s):
            raise TimeoutError(f"the sender did not answer within {timeout_s:g} s")
        return self.connection.recv()


def _rounds(receiver: Receiver, proof: Proof) -> None:
    link, report = receiver.link, proof.report
    first, second = (
        numbered_weights(version, n_bytes=link.n_bytes, device=link.device) for version in (1, 2)
    )
    engine = Engine(first, on_gpu=proof.on_gpu)
    old = engine.answer()
    seconds = {"hand over": _timed(link, lambda: receiver.take(2))}
    digests: list[str] = []
    seconds["digest"] = _timed(link, lambda: digests.append(digest(receiver.staging)))
    report.is_true(f"{link.way}: digest is the sender's", digests == [receiver.sent_digest()])
    seconds["copy in place"] = _timed(link, lambda: engine.weights.copy_(receiver.staging))
    rate = link.n_bytes / seconds["hand over"] / 1e9
    report.figure(link.way, {"seconds": seconds, "hand_over_gb_per_s": rate})
    new = engine.answer()
    report.is_true(f"{link.way}: weights are version 2", torch.equal(engine.weights, second))
    expected = Engine(second, on_gpu=False).answer()
    distance = float((new - expected).norm() / expected.norm())
    report.at_most(f"{link.way}: the engine computes with version 2", distance, SAME)
    report.is_true(f"{link.way}: the answer changed", not torch.equal(new, old))
    _killed(receiver, engine, new, proof=proof)


def _killed(receiver: Receiver, engine: Engine, before: torch.Tensor, *, proof: Proof) -> None:
    way, n_pieces = receiver.link.way, len(list(receiver.link.pieces()))
    lost, started_s = "", time.monotonic()
    try:
        receiver.take(3, kill_at=n_pieces // 2)
    except LOST as error:
        lost = type(error).__name__
    proof.report.figure(f"{way}: error after the kill", lost)
    proof.report.is_true(f"{way}: a killed sender is noticed", bool(lost))
    noticed_s = time.monotonic() - started_s
    proof.report.at_most(f"{way}: seconds to notice a killed sender", noticed_s, NOTICED_S)
    same = torch.equal(engine.answer(), before)
    proof.report.is_true(f"{way}: the engine still computes with version 2", same)


def _timed(link: Link, work: Callable[[], object]) -> float:
    finish(link)
    started_s = time.perf_counter()
    work()
    finish(link)
    return time.perf_counter() - started_s

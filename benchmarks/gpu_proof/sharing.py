"""Two processes share one GPU: new weights reach an engine that replays a captured CUDA graph.

This process is the engine's stand-in: a stack of matrices in one block of memory that a CUDA graph
has captured. `peer.py` sends version 2, whose digest is verified before it is copied in place; the
graph must then compute with version 2. Then the sender is killed in the middle of version 3; the
engine must notice, and still compute with version 2. NCCL is not tried: it refuses two ranks on one
GPU. On a CPU shared memory takes the place of CUDA IPC, and nothing is captured.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp

from gpu_proof import peer
from gpu_proof.peer import Link
from gpu_proof.shapes import Proof

N_LAYERS, ROWS = 8, 16
START_S, PIECE_S = 90.0, 30.0  # for the sender to start, and to hand over a piece
NOTICED_S = 10.0  # after the sender was killed
SAME = 2e-2  # bf16; the captured graph and the reference may use different kernels
LOST = (EOFError, ConnectionError, RuntimeError)


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
    ways = [peer.IPC, peer.GLOO_PINNED, peer.GLOO_DEVICE]
    if not proof.on_gpu:
        ways.remove(peer.GLOO_DEVICE)
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
    sender = context.Process(target=peer.serve, args=(link, there), daemon=True)
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
        self.link, self.connection, self.pid = link, connection, pid
        shared = self._answer(START_S)  # before the group forms, whose time-out is shorter
        self.buffer = link.buffer() if shared is None else shared
        self.group = None if link.way == peer.IPC else peer.join(link, peer.RECEIVER)
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
                peer.broadcast(self.group, part)
            self.staging[piece].copy_(part)
            peer.finish(self.link)  # the sender fills the buffer again at the next request

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
        peer.numbered_weights(version, n_bytes=link.n_bytes, device=link.device)
        for version in (1, 2)
    )
    engine = Engine(first, on_gpu=proof.on_gpu)
    old = engine.answer()
    seconds = {"hand over": _timed(link, lambda: receiver.take(2))}
    digests: list[str] = []
    seconds["digest"] = _timed(link, lambda: digests.append(peer.digest(receiver.staging)))
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
    peer.finish(link)
    started_s = time.perf_counter()
    work()
    peer.finish(link)
    return time.perf_counter() - started_s

"""Send weights from the learner to an engine, by the code that a run uses.

"one rank": a group of one rank on the device (NCCL on a GPU, gloo on a CPU). Bytes go from pinned
memory through the two buffers, and the contents of the buffers come back. "two processes": the
learner's sender and the engine's receiver, with NCCL if there are two GPUs. NCCL refuses two ranks
on one GPU, so there the two choose gloo. The sender is killed in the middle of the last version,
and the receiver must keep nothing of it.

    sender    wait for a version's number, write and send it, answer with its digest and seconds
    receiver  join, ask for versions, compare each with what it should be
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import weight_pieces
from blake3 import blake3

from gpu_proof import ray_stand_in
from gpu_proof.shapes import Proof

if TYPE_CHECKING:
    from actors.inference.broadcast_receiver import Receiver

LOOPBACK = "127.0.0.1"
N_TENSORS = 16
FILES = 4  # that a version is written in
START_S, PUBLISH_S = 90.0, 60.0  # for the sender to start, and to publish
MOST_VERSIONS = 20  # until the receiver has joined
NOTICED_S = weight_pieces.PIECE_S + 10.0  # after the sender was killed
KILLED = -1  # in place of a version's number: be killed in the middle of the next one
Tensors = dict[str, torch.Tensor]


def run(proof: Proof) -> None:
    weight_pieces.PIECE_BYTES = proof.shapes.shared_piece_bytes
    if not proof.on_gpu:
        proof.report.needs_cuda("NCCL of one rank, pinned memory, copies on a stream")
    if torch.cuda.device_count() < 2:
        proof.report.needs_cuda("NCCL between two processes, on two GPUs")
    with proof.report.case("one rank"):
        _one_rank(proof)
    with proof.report.case("two processes"):
        _two_processes(proof)


def _one_rank(proof: Proof) -> None:
    link = weight_pieces.form(
        dist.HashStore(),
        rank=0,
        size=1,
        host=LOOPBACK,
        device=proof.device,
        is_cancelled=lambda: False,
    )
    n_bytes, piece_bytes = proof.shapes.shared_bytes, proof.shapes.shared_piece_bytes
    sent = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=proof.on_gpu).random_()
    data = memoryview(sent.numpy())
    seconds = {"send": _seconds(lambda: link.send([data[:1000], data[1000:]]))}
    # With one rank a broadcast changes nothing. The buffers hold the last two pieces.
    in_buffers = weight_pieces.N_BUFFERS * piece_bytes
    back = torch.zeros(in_buffers, dtype=torch.uint8, pin_memory=proof.on_gpu)
    digest = blake3(max_threads=blake3.AUTO)
    seconds["receive"] = _seconds(lambda: link.receive(back, then=digest.update))
    proof.report.is_true(
        "one rank: the buffers hold the bytes", torch.equal(back, sent[-in_buffers:])
    )
    expected = blake3(data[-in_buffers:]).hexdigest()
    proof.report.is_true("one rank: digest", digest.hexdigest() == expected)
    rates = {"send": n_bytes / seconds["send"], "receive": in_buffers / seconds["receive"]}
    proof.report.figure("one rank: gb_per_s", {name: rate / 1e9 for name, rate in rates.items()})
    link.abort()
    refused = ""
    try:
        link.send([data])
    except weight_pieces.TransferError as error:
        refused = str(error)
    proof.report.is_true("one rank: an aborted group sends nothing", "aborted" in refused)


def _two_processes(proof: Proof) -> None:
    from actors.inference.broadcast_receiver import Receiver

    has_two = proof.on_gpu and torch.cuda.device_count() > 1
    theirs = torch.device("cuda", 1) if has_two else proof.device
    names = [weight_pieces.device_name(device) for device in (proof.device, theirs)]
    proof.report.figure("two processes: group", weight_pieces.common_device_type(names))
    context = mp.get_context("spawn")  # a forked process cannot use CUDA
    here, there = context.Pipe()
    n_bytes, piece_bytes = proof.shapes.shared_bytes, proof.shapes.shared_piece_bytes
    directory = proof.work / "transfer"
    directory.mkdir()
    arguments = (there, str(proof.device), n_bytes, piece_bytes, directory)
    sender = context.Process(target=_publish, args=arguments, daemon=True)
    sender.start()
    there.close()  # or its death would not be seen
    try:
        receiver = Receiver(_answer(here, START_S), device=theirs, asks=False)
        _versions(receiver, here, theirs, proof=proof)
        receiver.close()
    finally:
        sender.kill()
        sender.join()


def _versions(
    receiver: Receiver, sender: Connection, device: torch.device, *, proof: Proof
) -> None:
    n_received = 0
    for version in range(1, MOST_VERSIONS):
        sender.send(version)
        digest, sent_s = _answer(sender, PUBLISH_S)
        while receiver.is_busy:
            time.sleep(0.01)
        received = receiver.take(digest)
        if received is None:  # it had not joined yet
            time.sleep(0.1)
            continue
        expected = _weights(version, n_bytes=proof.shapes.shared_bytes, device=device)
        found = {name: tensor.to(device) for name, tensor in received.tensors()}
        equal = found.keys() == expected.keys() and all(
            torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
            for name, tensor in expected.items()
        )
        proof.report.is_true(f"two processes: version {version} arrived whole", equal)
        proof.report.figure(
            "two processes: send, gb_per_s", proof.shapes.shared_bytes / sent_s / 1e9
        )
        receiver.release()
        n_received += 1
        if n_received == 3:
            break
    proof.report.is_true("two processes: three versions came", n_received == 3)
    sender.send(KILLED)
    killed_s = time.monotonic()
    while not receiver.is_lost and time.monotonic() < killed_s + 2 * NOTICED_S:
        time.sleep(0.01)
    noticed_s = time.monotonic() - killed_s
    proof.report.at_most("two processes: seconds to notice a killed sender", noticed_s, NOTICED_S)
    kept = receiver.take(digest)
    proof.report.is_true("two processes: nothing of a version that was cut off", kept is None)


def _publish(
    connection: Connection, device: str, n_bytes: int, piece_bytes: int, directory: Path
) -> None:
    """Write and send a version whenever its number comes. The process is killed in the last one.

    Consumes version numbers, produces an address, then digests and seconds.
    """
    ray_stand_in.install()
    from learner.publishing.broadcast_sender import Broadcast
    from learner.publishing.publish import host_memory, send_files, write_shards

    weight_pieces.PIECE_BYTES = piece_bytes
    broadcast = Broadcast(LOOPBACK, device=torch.device(device))
    connection.send(broadcast.address)
    hosts: Tensors = {}

    def tensors(is_killed: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(hosts.items()):
            if is_killed and number == N_TENSORS // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    while True:
        version = connection.recv()
        for name, tensor in _weights(version, n_bytes=n_bytes, device=torch.device(device)).items():
            if name not in hosts:
                hosts[name] = host_memory(tensor)
            hosts[name].copy_(tensor)
        shard_bytes = n_bytes // FILES
        dest = directory / f"v{version}"
        dest.mkdir()
        written = write_shards(hosts.items(), dest, stem="model", shard_bytes=shard_bytes)
        started_s = time.perf_counter()
        with broadcast.round() as send:
            send_files(tensors(version == KILLED), send, shard_bytes=shard_bytes)
        connection.send((written.digest, time.perf_counter() - started_s))


def _weights(version: int, *, n_bytes: int, device: torch.device) -> Tensors:
    """Return a version's weights, the same in both processes."""
    size = n_bytes // 2 // N_TENSORS
    tensors = {}
    for number in range(N_TENSORS):
        generator = torch.Generator().manual_seed(1000 + N_TENSORS * version + number)
        noise = torch.randint(0, 255, (1024,), generator=generator, dtype=torch.uint8)
        data = noise.repeat(2 * size // len(noise)).view(torch.bfloat16)
        tensors[f"w{number}"] = data.to(device)
    return tensors


def _answer(connection: Connection, timeout_s: float) -> Any:
    if not connection.poll(timeout_s):
        raise TimeoutError(f"the sender did not answer within {timeout_s:g} s")
    return connection.recv()


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s

"""Test weights sent over gloo: they arrive whole, or the files are loaded instead.

CUDA differs in the device of the buffers only; `tests/project/test_weight_pieces.py` has stand-ins.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

import actors.inference.broadcast_receiver
import learner.publishing.broadcast_sender
import store.broadcast
import weight_pieces
from actors.inference.broadcast_receiver import Received, Receiver
from learner.distributed.deepspeed_setup import LOOPBACK
from learner.publishing.broadcast_sender import Broadcast
from learner.publishing.publish import send_files, write_shards
from store import files_digest

SHARD_BYTES = 10_000
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
Answer = TypeVar("Answer")
_made: list[Receiver] = []  # to be closed


@pytest.fixture
def sender() -> Broadcast:
    return Broadcast(LOOPBACK, device=CPU)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send a file in several pieces, and wait for engines of a busy machine."""
    monkeypatch.setattr(
        actors.inference.broadcast_receiver, "LISTEN_TIMEOUT", timedelta(seconds=0.1)
    )
    monkeypatch.setattr(weight_pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(learner.publishing.broadcast_sender, "READY_S", 20.0)
    yield
    while _made:
        _made.pop().close()


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Make four types, an empty tensor, and a scalar: about 30 kB."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {
        f"w{n}": torch.randn(30, 5 + n, generator=generator) for n in range(40)
    }
    tensors |= {
        "half": torch.randn(7, generator=generator).bfloat16(),
        "flag": torch.tensor([True]),
        "none": torch.empty(0, 3),
    }
    return tensors | {"scalar": torch.tensor(seed)}


def publish(sender: Broadcast, directory: Path, *, seed: int) -> str:
    """Write and send a version, in several files. Return its digest."""
    digest = written(directory, seed=seed)
    with sender.round() as send:
        send_files(weights(seed).items(), send, shard_bytes=SHARD_BYTES)
    return digest


def written(directory: Path, *, seed: int) -> str:
    directory.mkdir()
    shards = write_shards(weights(seed).items(), directory, stem="model", shard_bytes=SHARD_BYTES)
    return shards.digest


def soon(what: Callable[[], Answer | None]) -> Answer:
    deadline_s = time.monotonic() + 60
    while not (answer := what()):
        assert time.monotonic() < deadline_s, "not within 60 s"
        time.sleep(0.002)
    return answer


def joined(sender: Broadcast, n: int) -> None:
    soon(lambda: sender._store.add("joined", 0) >= n)


def receiver(sender: Broadcast, *, asks: bool = False) -> Receiver:
    _made.append(Receiver(sender.address, device=CPU, asks=asks))
    return _made[-1]


def receivers(sender: Broadcast, *, n: int) -> list[Receiver]:
    made = [receiver(sender) for _ in range(n)]
    joined(sender, n)
    return made


def assert_has(received: Received, *, seed: int) -> None:
    tensors = dict(received.tensors())
    assert tensors.keys() == weights(seed).keys()
    for name, tensor in weights(seed).items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
        assert received.shapes()[name] == list(tensor.shape)


def test_an_engine_receives_the_weights_that_were_written(
    sender: Broadcast, tmp_path: Path
) -> None:
    engines = receivers(sender, n=2)
    for seed in range(3):
        digest = publish(sender, tmp_path / f"v{seed}", seed=seed)
        assert files_digest(sorted((tmp_path / f"v{seed}").iterdir())) == digest
        assert len(list((tmp_path / f"v{seed}").iterdir())) > 2
        for engine in engines:
            assert_has(soon(lambda engine=engine, digest=digest: engine.take(digest)), seed=seed)
            engine.release()
            assert engine.take("another digest") is None
    assert sender._n_groups == 1  # one group for all of them


def test_an_engine_that_comes_late_gets_the_next_one(sender: Broadcast, tmp_path: Path) -> None:
    publish(sender, tmp_path / "v0", seed=0)  # nobody is there
    (first,) = receivers(sender, n=1)
    digest = publish(sender, tmp_path / "v1", seed=1)
    second = receiver(sender)
    joined(sender, 2)
    assert_has(soon(lambda: first.take(digest)), seed=1)
    assert second.take(digest) is None
    first.release()
    digest = publish(sender, tmp_path / "v2", seed=2)
    for engine in (first, second):
        assert_has(soon(lambda engine=engine: engine.take(digest)), seed=2)


@pytest.fixture
def leaves_out_soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After its first absence an engine is no longer waited for as long."""
    return lambda: monkeypatch.setattr(learner.publishing.broadcast_sender, "READY_S", 3.0)


def test_weights_that_are_being_loaded_are_not_overwritten(
    sender: Broadcast, tmp_path: Path, leaves_out_soon: Callable[[], None]
) -> None:
    slow, quick = receivers(sender, n=2)
    digest = publish(sender, tmp_path / "v0", seed=0)
    taken = soon(lambda: slow.take(digest))
    assert not slow.is_busy
    leaves_out_soon()
    next_digest = publish(sender, tmp_path / "v1", seed=1)  # without the slow one
    assert_has(taken, seed=0)
    assert_has(soon(lambda: quick.take(next_digest)), seed=1)
    for engine in (slow, quick):
        engine.release()
    joined(sender, 3)  # it was left out, and joins again
    digest = publish(sender, tmp_path / "v2", seed=2)
    for engine in (slow, quick):
        assert_has(soon(lambda engine=engine: engine.take(digest)), seed=2)


@pytest.mark.parametrize("at", [0, 9, 2500, -1], ids=["length", "head", "tensor", "last"])
def test_bytes_that_change_on_the_way_are_not_taken(
    sender: Broadcast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Flip one bit of the first file. The next version is received whole."""
    (engine,) = receivers(sender, n=1)
    send, n_flipped = weight_pieces.Link.send, 0

    def flipping(link: weight_pieces.Link, parts: Sequence[memoryview]) -> None:
        nonlocal n_flipped
        data = bytearray(b"".join(parts))
        if len(data) > store.broadcast.PREAMBLE_BYTES and not n_flipped:
            data[at] ^= 1
            n_flipped += 1
        send(link, [memoryview(data)])

    monkeypatch.setattr(weight_pieces.Link, "send", flipping)
    digest = publish(sender, tmp_path / "v0", seed=0)
    soon(lambda: engine._received is not None)
    assert soon(lambda: not engine.is_busy) and engine.take(digest) is None
    assert n_flipped == 1
    assert files_digest(sorted((tmp_path / "v0").iterdir())) == digest
    digest = publish(sender, tmp_path / "v1", seed=1)
    assert_has(soon(lambda: engine.take(digest)), seed=1)


def test_a_writer_that_fails_is_followed_by_one_that_does_not(
    sender: Broadcast, tmp_path: Path
) -> None:
    (engine,) = receivers(sender, n=1)

    def fail() -> None:
        with sender.round() as send:
            send_files(weights(0).items(), send, shard_bytes=SHARD_BYTES)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert soon(lambda: not engine.is_busy) and engine._received is None
    joined(sender, 2)  # again
    digest = publish(sender, tmp_path / "v1", seed=1)
    assert_has(soon(lambda: engine.take(digest)), seed=1)


def test_an_engine_that_came_in_time_is_sent_the_weights_if_another_took_all_of_it(
    sender: Broadcast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the store needs longer than what is left to ask for the second one."""
    sender._store.add("joined", 1)  # an engine that never comes
    engine = receiver(sender)
    joined(sender, 2)
    wait = store.broadcast.HiddenKeys.wait

    def busy(keys: store.broadcast.HiddenKeys, names: list[str], timeout: timedelta) -> None:
        if timeout < timedelta(seconds=0.05):
            raise dist.DistStoreError("it answered too late")
        wait(keys, names, timeout)

    monkeypatch.setattr(store.broadcast.HiddenKeys, "wait", busy)
    monkeypatch.setattr(learner.publishing.broadcast_sender, "READY_S", 2.0)
    digest = publish(sender, tmp_path / "v0", seed=0)
    assert_has(soon(lambda: engine.take(digest)), seed=0)


ENGINE = """
import sys, time, torch
import weight_pieces
from actors.inference.broadcast_receiver import Receiver
weight_pieces.PIECE_BYTES = 1000
receiver = Receiver(sys.argv[1], device=torch.device("cpu"), asks=False)
print("up", flush=True)
while not (receiver._received and not receiver.is_busy):
    time.sleep(0.01)
print(receiver._received.digest, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_ends_costs_the_others_at_most_that_version(
    sender: Broadcast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    leaves_out_soon: Callable[[], None],
    signal_sent: signal.Signals,
) -> None:
    """Receive in a child process, which ends in the middle of a version; publishing goes on."""
    (engine,) = receivers(sender, n=1)
    command = [sys.executable, "-c", ENGINE, sender.address]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        joined(sender, 2)
        digest = publish(sender, tmp_path / "v0", seed=0)
        assert other.stdout.readline().strip() == digest
        assert_has(soon(lambda: engine.take(digest)), seed=0)
        engine.release()
        monkeypatch.setattr(weight_pieces, "PIECE_S", 2.0)  # a message to a stopped engine

        def weights_and_end() -> Iterator[tuple[str, torch.Tensor]]:
            for number, item in enumerate(weights(1).items()):
                if number == 20:
                    os.kill(other.pid, signal_sent)
                yield item

        with sender.round() as send:
            send_files(weights_and_end(), send, shard_bytes=1_000)
        digest = written(tmp_path / "v1", seed=1)  # the files are there for everybody
        soon(lambda: not engine.is_busy)
        if engine._received is None:  # the other's end ended it for this one too
            joined(sender, 3)
        else:
            assert_has(soon(lambda: engine.take(digest)), seed=1)
            engine.release()
        leaves_out_soon()
        for seed in (2, 3):  # the first one finds out that it does not come any more
            digest = publish(sender, tmp_path / f"v{seed}", seed=seed)
            assert_has(soon(lambda digest=digest: engine.take(digest)), seed=seed)
            engine.release()
        other.kill()


LEARNER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_weight_broadcast as tests
import weight_pieces
weight_pieces.PIECE_BYTES = 1000
sender = tests.Broadcast(tests.LOOPBACK, device=tests.CPU)
print(sender.address, flush=True)
tests.joined(sender, 1)
print(tests.publish(sender, Path(sys.argv[1]) / "v0", seed=0), flush=True)
begin, begun = weight_pieces.Link._begin, []

def begin_or_end(link, number, n_bytes):
    begun.append(number)
    if len(begun) == 12:  # in the second of several files
        os.kill(os.getpid(), int(sys.argv[2]))
    begin(link, number, n_bytes)

weight_pieces.Link._begin = begin_or_end
tests.publish(sender, Path(sys.argv[1]) / "v1", seed=1)
print("published", flush=True)
"""


@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_that_ends_in_the_middle_of_a_version_leaves_nothing_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signal_sent: signal.Signals
) -> None:
    """The engine can load what it received before, and joins the learner that comes next."""
    code = LEARNER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, str(tmp_path), str(int(signal_sent))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as learner_process:
        assert learner_process.stdout is not None
        engine = Receiver(learner_process.stdout.readline().strip(), device=CPU, asks=False)
        _made.append(engine)
        digest = learner_process.stdout.readline().strip()
        assert_has(soon(lambda: engine.take(digest)), seed=0)
        monkeypatch.setattr(weight_pieces, "PIECE_S", 2.0)
        engine.release()
        soon(lambda: engine._received is None and not engine.is_busy)
        for of in (digest, written(tmp_path / "expected", seed=1)):
            assert engine.take(of) is None, "neither half a version nor one half overwritten"
        learner_process.kill()
    soon(lambda: engine.is_lost)
    following = Broadcast(LOOPBACK, device=CPU)
    (again,) = receivers(following, n=1)
    digest = publish(following, tmp_path / "v2", seed=2)
    assert_has(soon(lambda: again.take(digest)), seed=2)


def test_an_engine_of_several_processes_receives_when_it_is_allowed_to(
    sender: Broadcast, tmp_path: Path
) -> None:
    first, second = (receiver(sender, asks=True) for _ in range(2))
    joined(sender, 2)
    publishing = Thread(target=publish, args=(sender, tmp_path / "v0"), kwargs={"seed": 0})
    publishing.start()
    soon(lambda: first.is_busy and second.is_busy)
    assert first._received is None and first.allow(False), "nothing has begun"
    in_round: list[bool] = []
    receive = first._receive

    def noting(link: weight_pieces.Link) -> Received:
        in_round.append(first.allow(False))
        return receive(link)

    first._receive = noting  # type: ignore[method-assign]
    for engine in (first, second):
        assert engine.allow(True)
    publishing.join()
    digest = written(tmp_path / "expected", seed=0)
    for engine in (first, second):
        soon(lambda engine=engine: not engine.is_busy)
        assert engine.allow(False)
        assert_has(soon(lambda engine=engine: engine.take(digest)), seed=0)
    assert in_round == [False], "generation may not go on while bytes arrive"


def test_a_learner_that_is_gone_is_known_without_its_group(sender: Broadcast) -> None:
    """NCCL on one machine does not notice it: the receiver watches a connection of its own."""
    address = store.broadcast.Address.of(sender.address)
    with socket.create_connection((address.host, address.port)) as connection:
        connection.setblocking(False)
        assert not actors.inference.broadcast_receiver._is_gone(connection)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        assert not actors.inference.broadcast_receiver._is_gone(ours)
        theirs.close()
        assert actors.inference.broadcast_receiver._is_gone(ours)


def test_an_engine_knows_when_the_learner_is_gone(tmp_path: Path) -> None:
    sender = Broadcast(LOOPBACK, device=CPU)
    (engine,) = receivers(sender, n=1)
    digest = publish(sender, tmp_path / "v0", seed=0)
    del sender
    soon(lambda: engine.is_lost)
    assert_has(soon(lambda: engine.take(digest)), seed=0)  # what came is still good


def test_a_stranger_at_the_port_joins_nothing(sender: Broadcast, tmp_path: Path) -> None:
    """A member that never comes must not cost every version READY_S."""
    host, _, port = sender.address.rpartition("@")[2].rpartition(":")
    stranger = torch.distributed.TCPStore(host, int(port), is_master=False)
    stranger.add("joined", 1)
    (engine,) = receivers(sender, n=1)
    digest = publish(sender, tmp_path / "v0", seed=0)
    assert_has(soon(lambda: engine.take(digest)), seed=0)
    assert list(sender._calls) == [1], "the engine alone"


@pytest.mark.parametrize("attack", ["number", "many", "text"])
def test_a_stranger_who_lists_the_keys_learns_no_secret_and_ends_no_run(
    sender: Broadcast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    receivers(sender, n=1)
    secret, _, place = sender.address.rpartition("@")
    host, _, port = place.rpartition(":")
    stranger = torch.distributed.TCPStore(host, int(port), is_master=False)
    keys = [key for key in stranger.list_keys() if not key.startswith("init/")]
    assert keys and not any(secret in key for key in stranger.list_keys())
    monkeypatch.setattr(learner.publishing.broadcast_sender, "READY_S", 0.5)
    for key in keys:
        if attack == "text":
            stranger.set(key, "abc")
        else:
            stranger.add(key, 1 if attack == "number" else 30_000_000)
    publish(sender, tmp_path / "v0", seed=0)  # the files are there, whatever the engines were sent


@pytest.mark.parametrize("value", ["abc", "", "\0" * 7 + "\x10"], ids=["short", "empty", "huge"])
def test_a_stranger_who_writes_the_addresses_of_a_group_ends_no_process(
    sender: Broadcast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """The attack: gloo believed them. It ended the process, or there was no memory."""
    (engine,) = receivers(sender, n=1)
    host, _, port = sender.address.rpartition("@")[2].rpartition(":")
    stranger = torch.distributed.TCPStore(host, int(port), is_master=False)
    announced, form = sender._store.hidden(store.broadcast.round_key(1)), weight_pieces.form

    def write_first(*given: Any, **settings: Any) -> weight_pieces.Link:
        """Both sides have announced themselves, and neither has read the other's address."""
        stranger.wait([announced])
        known = set(stranger.list_keys())
        done.append(True)

        def write() -> None:
            while not (made := set(stranger.list_keys()) - known):
                time.sleep(0.001)
            for key in made:
                stranger.set(key, value)
                stranger.set(f"{key[:-1]}{1 - int(key[-1], 16) % 2}", value)

        writing = Thread(target=write, daemon=True)
        writing.start()
        return form(*given, **settings)

    done: list[bool] = []
    monkeypatch.setattr(weight_pieces, "FORM_S", 5.0)
    monkeypatch.setattr(learner.publishing.broadcast_sender.weight_pieces, "form", write_first)
    publish(sender, tmp_path / "v0", seed=0)
    assert done
    monkeypatch.undo()
    soon(lambda: not engine.is_busy)


def test_a_receiver_whose_thread_fails_is_lost_and_joins_again(
    sender: Broadcast, tmp_path: Path
) -> None:
    (engine,) = receivers(sender, n=1)
    sender._store.set("call/1/1", "no number")
    soon(lambda: engine.is_lost)
    receiver(sender)
    joined(sender, 2)

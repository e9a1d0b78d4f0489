"""Test the pieces in which weights move: over gloo, and with stand-ins for what needs a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import weight_pieces
from weight_pieces import Link, TransferError, common_device_type, form, pieces

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
PIECE_BYTES = 100


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_pieces, "PIECE_BYTES", PIECE_BYTES)
    # Gloo ends a message, or a group that does not form, only then. A thread that is in gloo when
    # Python ends would end the process with an error.
    monkeypatch.setattr(weight_pieces, "LIBRARY_TIMEOUT", timedelta(seconds=1))


def never() -> bool:
    return False


def linked(
    *, size: int = 2, is_cancelled: Callable[[], bool] = never
) -> tuple[dist.TCPStore, list[Link]]:
    """Form a group of `size` threads. Return the store, which has to live, and each end."""
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)

    def end(rank: int) -> Link:
        own = dist.TCPStore(LOOPBACK, store.port, is_master=False)
        return form(own, rank=rank, size=size, host=LOOPBACK, device=CPU, is_cancelled=is_cancelled)

    with ThreadPoolExecutor(size) as threads:
        return store, list(threads.map(end, range(size)))


def test_parts_are_cut_into_pieces() -> None:
    def cut(*parts: bytes) -> list[list[bytes]]:
        found = pieces([memoryview(part) for part in parts], piece_bytes=6)
        return [[bytes(part) for part in piece] for piece in found]

    assert cut(b"abcde", b"fghi") == [[b"abcde", b"f"], [b"ghi"]]
    assert cut(b"abcdef", b"", b"g") == [[b"abcdef"], [b"g"]]
    assert cut(b"abcdefghijklm") == [[b"abcdef"], [b"ghijkl"], [b"m"]]
    assert cut() == cut(b"") == []


@given(parts=st.lists(st.binary(max_size=20), max_size=6), piece_bytes=st.integers(1, 9))
def test_pieces_are_full_and_hold_every_byte_in_order(parts: list[bytes], piece_bytes: int) -> None:
    found = [b"".join(p) for p in pieces([memoryview(p) for p in parts], piece_bytes=piece_bytes)]
    assert b"".join(found) == b"".join(parts)
    assert all(len(piece) == piece_bytes for piece in found[:-1])
    assert all(found) and all(len(piece) <= piece_bytes for piece in found)


def test_nccl_is_for_gpus_that_are_all_different() -> None:
    first, second = "cuda GPU-1a", "cuda GPU-2b"
    assert common_device_type([first, second]) == "cuda"
    assert common_device_type([first]) == "cuda"
    assert common_device_type([first, second, first]) == "cpu", "NCCL refuses one GPU twice"
    assert common_device_type([first, "cpu"]) == common_device_type(["cpu", "cpu"]) == "cpu"
    assert weight_pieces.device_name(CPU) == "cpu"


@pytest.mark.parametrize("n_bytes", [0, 1, 99, 100, 101, 200, 201, 1234])
def test_all_ranks_get_the_bytes_in_order(n_bytes: int) -> None:
    store, (sender, *receivers) = linked(size=3)
    data = memoryview(bytearray(os.urandom(n_bytes)))
    for _ in range(2):  # the buffers are used again
        into = [torch.zeros(n_bytes, dtype=torch.uint8) for _ in receivers]
        seen: list[list[bytes]] = [[] for _ in receivers]
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(sender.send, [data[:7], data[7:]])]
            for link, memory, found in zip(receivers, into, seen, strict=True):
                calls.append(
                    threads.submit(
                        link.receive, memory, then=lambda piece, f=found: f.append(bytes(piece))
                    )
                )
            for call in calls:
                call.result()
        for memory, found in zip(into, seen, strict=True):
            assert memory.numpy().tobytes() == b"".join(found) == data
            assert all(len(piece) == PIECE_BYTES for piece in found[:-1])
    del store


def test_a_wait_ends_at_its_deadline_and_the_group_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store, (sender, receiver) = linked()
    monkeypatch.setattr(weight_pieces, "PIECE_S", 0.2)
    memory = torch.zeros(250, dtype=torch.uint8)
    with pytest.raises(TransferError, match=r"a piece did not pass: no end after 0.2 s"):
        receiver.receive(memory, then=pytest.fail)
    with pytest.raises(TransferError, match="form another one"):
        receiver.receive(memory, then=pytest.fail)
    assert not memory.any()
    del store, sender


def test_a_wait_ends_when_it_is_cancelled() -> None:
    closed: list[bool] = []
    store, (sender, receiver) = linked(is_cancelled=lambda: bool(closed))
    with ThreadPoolExecutor(1) as threads:
        memory = torch.zeros(10, dtype=torch.uint8)
        waiting = threads.submit(receiver.receive, memory, then=pytest.fail)
        closed.append(True)
        with pytest.raises(TransferError, match="a piece did not pass: it was cancelled"):
            waiting.result()
    del store, sender


def test_a_group_that_does_not_form_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_pieces, "FORM_S", 0.3)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    with pytest.raises(TransferError, match="the group was not formed: no end after 0.3 s"):
        form(store, rank=0, size=2, host=LOOPBACK, device=CPU, is_cancelled=never)
    for thread in threading.enumerate():
        if thread.name == "form-group":
            thread.join(60)
            assert not thread.is_alive()


class FakeGpu:
    """Stand in for a GPU, a stream, and NCCL. Copies and messages end some polls after they began.

    `order` lists what was asked of them.
    """

    def __init__(self, source: bytes) -> None:
        self.order: list[str] = []
        self.source = memoryview(source)  # which a broadcast brings
        self.errors = iter([0] * 1000)
        self.is_on_stream = False

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        assert stream is self
        self.is_on_stream = True
        yield
        self.is_on_stream = False

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        (tensor,) = tensors
        assert self.is_on_stream, "NCCL waits for the stream that is current, so for the copies"
        assert options.rootRank == 0
        self.order.append(f"broadcast {len(tensor)}")
        data, self.source = self.source[: len(tensor)], self.source[len(tensor) :]
        polls = iter([False, False, True])

        def is_completed() -> bool:
            is_done = next(polls, True)
            if is_done and data:
                tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return is_done

        return SimpleNamespace(is_completed=is_completed, wait=lambda: None)

    def get_error(self) -> Any:
        return SimpleNamespace(value=next(self.errors))

    def abort(self) -> None:
        self.order.append("abort")

    def event(self) -> Any:
        polls = iter([False, False, True])

        def query() -> bool:
            is_done = next(polls)
            self.order.append("copied" if is_done else "copying")
            return is_done

        return SimpleNamespace(record=lambda stream: None, query=query)


def on_fake_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(
        Link, "_memory", lambda link, n_bytes: torch.zeros(n_bytes, dtype=torch.uint8)
    )
    monkeypatch.setattr(weight_pieces, "_group", lambda *given, **more: gpu)
    device: Any = SimpleNamespace(type="cuda")
    link = Link(device, store=dist.HashStore(), is_cancelled=never)
    link.connect(rank=0, size=2, host="")
    gpu.order.clear()
    return link


def test_stand_in_a_piece_is_digested_when_its_copy_from_the_gpu_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = os.urandom(350)
    gpu = FakeGpu(b"x" + data)  # a first byte when the group forms
    link = on_fake_gpu(gpu, monkeypatch)
    memory = torch.zeros(350, dtype=torch.uint8)
    link.receive(memory, then=lambda piece: gpu.order.append(f"digest {len(piece)}"))
    assert memory.numpy().tobytes() == data
    copy = ["copying", "copying", "copied"]
    assert gpu.order == [
        *("broadcast 100", "broadcast 100"),
        *(*copy, "broadcast 100", "digest 100"),  # the third takes the buffer of the first
        *(*copy, "broadcast 50", "digest 100"),
        *(*copy, "digest 100"),
        *(*copy, "digest 50"),
    ]


def test_stand_in_two_buffers_are_sent_from_and_reused_when_their_broadcast_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(b"")
    link = on_fake_gpu(gpu, monkeypatch)
    sent: list[tuple[int, bytes]] = []
    broadcast = gpu.broadcast

    def noting(tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        assert len(link._under_way) < weight_pieces.N_BUFFERS, "this buffer is still being sent"
        sent.append((tensors[0].data_ptr(), tensors[0].numpy().tobytes()))
        return broadcast(tensors, options)

    monkeypatch.setattr(gpu, "broadcast", noting)
    data = bytearray(os.urandom(450))
    link.send([memoryview(data[:130]), memoryview(data[130:])])
    assert b"".join(piece for _, piece in sent) == data
    first, second = sent[0][0], sent[1][0]
    assert [place for place, _ in sent] == [first, second, first, second, first]
    assert first != second and not link._under_way


def test_stand_in_an_error_that_nccl_reports_ends_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(b"")
    link = on_fake_gpu(gpu, monkeypatch)
    gpu.errors = iter([0, 3])
    with pytest.raises(TransferError, match="NCCL reports"):
        link.receive(torch.zeros(350, dtype=torch.uint8), then=lambda piece: None)
    link.abort()
    assert gpu.order[-1] == "abort"


def test_stand_in_nccl_ends_no_process_and_leaves_the_gpu_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, seen = weight_pieces.ERROR_HANDLING, []

    class Group:
        Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            seen.append((os.environ[name], rank, size, options.config.max_ctas, options._timeout))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    store: Any = None
    for before in ("3", None):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        weight_pieces._group("cuda", store, rank=1, size=3, host="")
        assert os.environ.get(name) == before, "the groups of training keep their own"
    assert seen == [("0", 1, 3, 4, weight_pieces.LIBRARY_TIMEOUT)] * 2

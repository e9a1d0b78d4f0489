"""Move weights from the learner to its engines in pieces, through two buffers on a device.

    store = group_store(keys, "group/3", device_type=device.type)
    link = form(store, rank=0, size=3, host="10.0.0.1", device=device, is_cancelled=closed.is_set)
    link.send([head, first_tensor, second_tensor])     # rank 0, from main memory
    link.receive(memory, then=digest.update)           # the other ranks, into main memory
    link.abort()                                       # after an error

    rank 0         main memory -> buffer -> broadcast
    other ranks    broadcast -> buffer -> main memory -> `then`

The group is gloo for a CPU and NCCL for CUDA, and the buffers are on that device. Nothing else
differs. One buffer is copied, on a stream of its own, while the other one is broadcast. Main memory
should be pinned for CUDA. `store/broadcast.py` says which bytes are sent.

Every wait polls. It ends after a deadline, or when `is_cancelled` returns True: the group is
aborted, and TransferError is raised.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

CPU, CUDA = "cpu", "cuda"
PIECE_BYTES = 256 * 2**20  # of one buffer; a device needs two of them beside the model
N_BUFFERS = 2  # one is filled while the other is sent
# 256 MiB take 2 s at 1 Gbit/s, and log2(engines) times as long if gloo sends them on.
PIECE_S = 30.0
FORM_S = 60.0  # NCCL looks for its network interfaces and opens its connections
# After the deadlines above, so that the error names our deadline. Gloo ends a message only then.
LIBRARY_TIMEOUT = timedelta(seconds=2 * max(PIECE_S, FORM_S))
POLL_S = 0.0005  # 256 MiB take 1 ms over NVLink, 5 ms to main memory
# Streaming multiprocessors that NCCL takes from the engine, or from the learner, while it sends.
MAX_CTAS = 4
# 0: NCCL's watchdog thread reports errors and ends no process. It would end the engine.
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

_environment_lock = threading.Lock()


class Keys(Protocol):
    """Keys and values that nobody else can make: `store.broadcast.HiddenKeys`."""

    def hidden(self, key: str) -> str:
        """Return the name under which a key is kept in `store`."""

    @property
    def store(self) -> dist.Store: ...

    def add(self, key: str, amount: int) -> int: ...

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def wait(self, keys: list[str], timeout: timedelta) -> None: ...


def group_store(keys: Keys, prefix: str, *, device_type: str) -> dist.Store:
    """Return the store in which a group's ranks find each other.

    Gloo believes what it reads there: of an address of three bytes it ended the process. NCCL asks
    the store from threads of its own, also while Python ends, so it gets one that is not Python's.
    """
    if device_type == CPU:
        return _SealedStore(keys, prefix)
    return dist.PrefixStore(keys.hidden(prefix), keys.store)


class _SealedStore(dist.Store):
    def __init__(self, keys: Keys, prefix: str) -> None:
        super().__init__()
        self._keys, self._prefix = keys, prefix

    def set(self, key: str, value: bytes) -> None:
        self._keys.set(self._name(key), value)

    def get(self, key: str) -> bytes:
        return self._keys.get(self._name(key))

    def add(self, key: str, amount: int) -> int:
        return self._keys.add(self._name(key), amount)

    def check(self, keys: list[str]) -> bool:
        return self._keys.check(list(map(self._name, keys)))

    def wait(self, keys: list[str], timeout: timedelta = LIBRARY_TIMEOUT) -> None:
        self._keys.wait(list(map(self._name, keys)), timeout)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class TransferError(RuntimeError):
    """A piece did not come or go in time, or the other side failed."""


def device_name(device: torch.device) -> str:
    """Name a device so that two names are equal for one GPU only: "cpu", "cuda GPU-1a2b..."."""
    if device.type == CPU:
        return CPU
    return f"{CUDA} {torch.cuda.get_device_properties(device).uuid}"


def common_device_type(names: Sequence[str]) -> str:
    """Return "cuda" if all devices are different GPUs, else "cpu".

    NCCL refuses two ranks on one GPU. Gloo serves them, from main memory.
    """
    are_gpus = all(name.partition(" ")[0] == CUDA for name in names)
    return CUDA if are_gpus and len(set(names)) == len(names) else CPU


def pieces(parts: Sequence[memoryview], *, piece_bytes: int) -> Iterator[list[memoryview]]:
    """Cut parts, laid end to end, into pieces.

    Parts of 5 and 4 bytes, with 6 bytes a piece, are [5, 1] and [3].
    """
    piece: list[memoryview] = []
    left = piece_bytes
    for part in parts:
        while len(part):
            if not left:
                yield piece
                piece, left = [], piece_bytes
            piece.append(part[:left])
            left -= len(piece[-1])
            part = part[len(piece[-1]) :]
    if piece:
        yield piece


def form(
    store: dist.Store,
    *,
    rank: int,
    size: int,
    host: str,
    device: torch.device,
    is_cancelled: Callable[[], bool],
) -> Link:
    """Connect `size` processes, of which rank 0 sends. Return when a first byte has arrived.

    `host` is the address of this machine for gloo. Raises TransferError, or an error of the library
    (RuntimeError).
    """
    link = Link(device, store=store, is_cancelled=is_cancelled)
    outcome: Future[None] = Future()

    def connect() -> None:
        try:
            link.connect(rank=rank, size=size, host=host)
            outcome.set_result(None)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            outcome.set_exception(error)

    # Both libraries wait for all ranks inside one call, so the call needs its own thread.
    threading.Thread(target=connect, name="form-group", daemon=True).start()
    link.poll(outcome.done, seconds=FORM_S, what="the group was not formed")
    outcome.result()
    return link


class Link:
    """One process's end of a group that moves bytes from rank 0 to all others. See `form`."""

    def __init__(
        self, device: torch.device, *, store: dist.Store, is_cancelled: Callable[[], bool]
    ) -> None:
        self.device = device
        self._store = store  # the group does not keep the Python part of a store
        self._is_cancelled = is_cancelled
        self._group: Any = None
        self._is_aborted = False
        self._under_way: deque[Any] = deque()  # broadcasts, oldest first
        self._buffers = [self._memory(0) for _ in range(N_BUFFERS)]
        self._stream = torch.cuda.Stream(device) if device.type == CUDA else None

    def connect(self, *, rank: int, size: int, host: str) -> None:
        """Form the group, in this thread. NCCL connects at its first message."""
        with self._on_device():
            group = _group(self.device.type, self._store, rank=rank, size=size, host=host)
            if self._is_aborted:  # it took too long
                group.abort()
                return
            self._group = group
            self._begin(0, 1)
            self._finish_oldest()

    def send(self, parts: Sequence[memoryview]) -> None:
        """Send these bytes, end to end, from rank 0. They must not change meanwhile."""
        with self._on_device():
            for number, piece in enumerate(pieces(parts, piece_bytes=PIECE_BYTES)):
                if len(self._under_way) == N_BUFFERS:
                    self._finish_oldest()
                end = 0
                buffer = self._buffer(number, sum(map(len, piece)))
                for part in piece:
                    begin, end = end, end + len(part)
                    source = torch.frombuffer(part, dtype=torch.uint8)
                    buffer[begin:end].copy_(source, non_blocking=True)
                self._begin(number, end)
            while self._under_way:
                self._finish_oldest()

    def receive(self, into: torch.Tensor, *, then: Callable[[memoryview], object]) -> None:
        """Fill `into`, a uint8 tensor in main memory, with as many bytes.

        `then` is called with each piece when it is there, in order, while the next one arrives.
        """
        n_bytes = into.numel()
        cuts = [
            slice(begin, min(begin + PIECE_BYTES, n_bytes))
            for begin in range(0, n_bytes, PIECE_BYTES)
        ]
        with self._on_device():
            for number, cut in enumerate(cuts[:N_BUFFERS]):
                self._begin(number, cut.stop - cut.start)
            for number, cut in enumerate(cuts):
                self._finish_oldest()
                buffer = self._buffer(number, cut.stop - cut.start)
                into[cut].copy_(buffer, non_blocking=True)
                self.poll(self._is_copied(), seconds=PIECE_S, what="a piece was not copied")
                if number + N_BUFFERS < len(cuts):
                    following = cuts[number + N_BUFFERS]
                    self._begin(number, following.stop - following.start)
                then(memoryview(into[cut].numpy()))

    def abort(self) -> None:
        """End the group. Broadcasts under way may write into the buffers until they end.

        Gloo cannot interrupt a message. It ends at the death of the other process, or at its own
        time-out.
        """
        self._is_aborted = True
        group, under_way = self._group, self._under_way
        buffers, self._buffers = self._buffers, []
        self._group, self._under_way = None, deque()
        if group is None:
            return
        group.abort()
        if not all(work.is_completed() for work in under_way):
            # Gloo's destructor waits for its messages and keeps the interpreter's lock meanwhile.
            threading.Thread(
                target=_keep_until_done,
                args=(group, under_way, buffers),
                name="aborted-group",
                daemon=True,
            ).start()

    def poll(self, is_done: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Return when `is_done` returns True. Otherwise abort the group and raise TransferError."""
        deadline_s = time.monotonic() + seconds
        while not is_done():
            is_cancelled = self._is_cancelled()
            if is_cancelled or time.monotonic() >= deadline_s:
                self.abort()
                why = "it was cancelled" if is_cancelled else f"no end after {seconds:g} s"
                raise TransferError(f"{what}: {why}")
            time.sleep(POLL_S)

    def _begin(self, number: int, n_bytes: int) -> None:
        """Begin to broadcast a buffer: with NCCL after the copies on this thread's stream."""
        buffer = self._buffer(number, n_bytes)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = LIBRARY_TIMEOUT
        self._under_way.append(self._group.broadcast([buffer], options))

    def _finish_oldest(self) -> None:
        work = self._under_way[0]
        self.poll(work.is_completed, seconds=PIECE_S, what="a piece did not pass")
        self._under_way.popleft()
        work.wait()  # it has ended, so this does not wait; it raises gloo's error
        if self.device.type == CUDA and (error := self._group.get_error()).value:
            raise TransferError(f"NCCL reports {error}")

    def _buffer(self, number: int, n_bytes: int) -> torch.Tensor:
        """Return so much of one of the two buffers, which grows if it is smaller."""
        if self._is_aborted:
            raise TransferError("this group was aborted; form another one")
        slot = number % N_BUFFERS
        if self._buffers[slot].numel() < n_bytes:
            self._buffers[slot] = self._memory(n_bytes)
        return self._buffers[slot][:n_bytes]

    def _memory(self, n_bytes: int) -> torch.Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    def _is_copied(self) -> Callable[[], bool]:
        """Return a function that tells whether the copies so far are done."""
        if self._stream is None:
            return lambda: True
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.query

    def _on_device(self) -> AbstractContextManager[object]:
        """Make this thread use the device and the stream of the copies."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _group(device_type: str, store: dist.Store, *, rank: int, size: int, host: str) -> Any:
    if device_type == CPU:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = LIBRARY_TIMEOUT
        return dist.ProcessGroupGloo(store, rank, size, options)
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = LIBRARY_TIMEOUT
    options.config.max_ctas = MAX_CTAS
    with _variable(ERROR_HANDLING, "0"):
        return nccl(store, rank, size, options)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in this block. The groups of training keep their own setting."""
    with _environment_lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def _keep_until_done(group: Any, under_way: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
    """Hold references to an aborted group and its buffers until its last message has ended."""
    deadline_s = time.monotonic() + 2 * LIBRARY_TIMEOUT.total_seconds()
    while not all(work.is_completed() for work in under_way) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    del group, buffers

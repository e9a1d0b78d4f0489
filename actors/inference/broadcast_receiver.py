"""Receive weights that the learner sends directly; `store/broadcast.py` defines the broadcast.

    receiver = Receiver(address, device=device, asks=False)   # joins rounds in a thread
    if not receiver.is_busy:
        received = receiver.take(digest)          # the weights of that digest, if they are whole
    model.load_weights(received.tensors())
    receiver.release()                            # the next weights may overwrite these

The bytes arrive in main memory, which is pinned for an engine on a GPU, while the engine generates.
Their digest is that of the files.

With `asks=True` a call of the learner is answered only after `allow(True)`. An engine of several
processes generates with messages between its GPUs. NCCL may deadlock if two groups of one GPU have
messages at once. So such an engine pauses first:

    while receiver.is_busy:          # a call came
        ...                          # pause all processes of the engine, then
        receiver.allow(True)
    while not receiver.allow(False): # before generation goes on
        ...
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from blake3 import blake3

import weight_pieces
from store import SAFETENSORS_DTYPES, TensorEntry, broadcast, decode_safetensors_head

LISTEN_TIMEOUT = timedelta(seconds=1)  # how often the thread checks whether it was closed
DTYPES = {name: getattr(torch, dtype) for name, dtype in SAFETENSORS_DTYPES.items()}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    head_bytes: int
    data: torch.Tensor  # uint8: the file

    def entries(self) -> list[TensorEntry]:
        return decode_safetensors_head(self.data[: self.head_bytes].numpy().tobytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """All files of one version, as they would be on disk.

    Compare the digest before you read the files.
    """

    digest: str
    files: Sequence[_File]

    def shapes(self) -> dict[str, list[int]]:
        return {entry.name: entry.shape for file in self.files for entry in file.entries()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            body = file.data[file.head_bytes :]
            for entry in file.entries():
                data = body[entry.begin : entry.end]
                yield entry.name, data.view(DTYPES[entry.dtype]).view(entry.shape)


class Receiver:
    """Wait in a thread for the learner's rounds.

    `is_lost` becomes true, for good, when the connection with the learner ends.
    """

    def __init__(self, address: str, *, device: torch.device, asks: bool) -> None:
        self.address, self.is_lost = address, False
        self._device = device
        # held while bytes arrive, and while the engine reads them
        self._unused = threading.Lock()
        self._received: Received | None = None
        # kept: new memory would cost as much as what comes into it
        self._memory: list[torch.Tensor] = []  # of each file
        self._is_taken = self._is_closed = False
        self._is_called = self._is_in_round = False
        self._allowed = threading.Event()
        if not asks:
            self._allowed.set()
        self._beginning = threading.Lock()  # of a round: `allow(False)` sees it, or prevents it
        self._thread = threading.Thread(target=self._follow, name="receive-weights", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Return whether a call of the learner was received, or weights are arriving."""
        return (self._is_called or self._unused.locked()) and not self._is_taken

    def allow(self, is_allowed: bool) -> bool:
        """Begin rounds from now on, or begin none. Return False if one has begun already."""
        with self._beginning:
            if is_allowed:
                self._allowed.set()
            elif self._is_in_round:
                return False
            else:
                self._allowed.clear()
            return True

    def take(self, digest: str) -> Received | None:
        """Return the weights of that digest, unchanged until `release`; None if incomplete."""
        self.release()
        if not self._unused.acquire(blocking=False):
            return None
        if self._received is None or self._received.digest != digest:
            self._unused.release()
            return None
        self._is_taken = True
        return self._received

    def release(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._unused.release()

    def close(self) -> None:
        """Join no more rounds."""
        self._is_closed = True
        self._thread.join(2 * LISTEN_TIMEOUT.total_seconds())

    def _follow(self) -> None:
        address = broadcast.Address.of(self.address)
        host_port = (address.host, address.port)
        try:
            with socket.create_connection(
                host_port, timeout=broadcast.MESSAGE_TIMEOUT.total_seconds()
            ) as connection:
                connection.setblocking(False)  # for `_is_gone`
                store = dist.TCPStore(
                    *host_port, is_master=False, timeout=broadcast.MESSAGE_TIMEOUT
                )
                keys = broadcast.HiddenKeys(secret=address.secret, store=store)
                self._join_rounds(keys, connection)
        except Exception as error:  # noqa: BLE001 - after any error the engine joins again
            _log.warning(
                "lost touch with the learner at %s:%s, which sends weights: %s", *host_port, error
            )
        finally:
            self.is_lost = True

    def _join_rounds(self, store: broadcast.HiddenKeys, connection: socket.socket) -> None:
        member = n_calls = group_number = 0
        link: weight_pieces.Link | None = None
        while True:
            if link is None:
                member, n_calls = store.add(broadcast.JOINED, 1), 0
            n_calls += 1
            if (number := self._listen(store, broadcast.call_key(member, n_calls))) is None:
                return
            self._is_called = True
            try:
                with self._unused:
                    if not self._begin_round():
                        return
                    self._received = None
                    device = weight_pieces.device_name(self._device)
                    store.set(broadcast.ready_key(number, member), device)
                    about = json.loads(store.get(broadcast.round_key(number)))
                    try:
                        if about["group"] != group_number or link is None:
                            link, group_number = _without(link), about["group"]
                            link = self._form(store, about, member=member, connection=connection)
                        self._received = self._receive(link)
                    except (RuntimeError, ValueError) as error:
                        link = _without(link)
                        store.set(broadcast.gone_key(member), "")
                        _log.warning(
                            "weights that were sent did not arrive whole; the files are loaded "
                            "instead: %s",
                            error,
                        )
            finally:
                self._is_called = self._is_in_round = False

    def _begin_round(self) -> bool:
        """Return True when rounds are allowed; False if this receiver is closed."""
        while not self._is_closed:
            if self._allowed.wait(LISTEN_TIMEOUT.total_seconds()):
                with self._beginning:
                    self._is_in_round = self._allowed.is_set()
                if self._is_in_round:
                    return True
        return False

    def _listen(self, store: broadcast.HiddenKeys, key: str) -> int | None:
        """Wait for the number that the learner writes at `key`; None if this receiver is closed."""
        while not self._is_closed:
            with suppress(dist.DistStoreError):  # not written yet
                store.wait([key], LISTEN_TIMEOUT)
                return int(store.get(key))
        return None

    def _form(
        self,
        store: broadcast.HiddenKeys,
        about: dict[str, Any],
        *,
        member: int,
        connection: socket.socket,
    ) -> weight_pieces.Link:
        """Join the process group of a round. Raises ValueError for a member that came too late."""
        device_type = about["device"]
        return weight_pieces.form(
            weight_pieces.group_store(
                store, broadcast.group_prefix(about["group"]), device_type=device_type
            ),
            rank=1 + about["members"].index(member),
            size=1 + len(about["members"]),
            host=connection.getsockname()[0],
            device=self._device if device_type == self._device.type else torch.device(device_type),
            is_cancelled=lambda: self._is_closed or _is_gone(connection),
        )

    def _receive(self, link: weight_pieces.Link) -> Received:
        digest = blake3(max_threads=blake3.AUTO)
        files: list[_File] = []
        preamble = torch.empty(broadcast.PREAMBLE_BYTES, dtype=torch.uint8)
        while True:
            link.receive(preamble, then=lambda data: None)
            head_bytes, file_bytes = broadcast.decode_preamble(preamble.numpy().tobytes())
            if not head_bytes:
                return Received(digest=digest.hexdigest(), files=files)
            data = self._memory_of(len(files), file_bytes)
            link.receive(data, then=digest.update)
            files.append(_File(head_bytes=head_bytes, data=data))

    def _memory_of(self, number: int, n_bytes: int) -> torch.Tensor:
        if number == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8))
        if self._memory[number].numel() != n_bytes:
            self._memory[number] = torch.empty(
                n_bytes, dtype=torch.uint8, pin_memory=self._device.type == weight_pieces.CUDA
            )
        return self._memory[number]


def _is_gone(connection: socket.socket) -> bool:
    """Return whether the other end's process ended. It sends nothing.

    NCCL on one machine does not notice its death.
    """
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _without(link: weight_pieces.Link | None) -> weight_pieces.Link | None:
    """End a group, whose place is then empty."""
    if link is not None:
        link.abort()
    return None

"""The engine's end of weights that the learner sends directly (`store/broadcast.py` has the
protocol).

    receiver = Receiver(address)                  # takes part in every round from now on, in a thread
    if not receiver.is_busy:
        received = receiver.take(digest)          # the weights of that digest, if they are here whole
    model.load_weights(received.tensors())
    receiver.release()                            # from now on the next ones may overwrite them

Bytes come into main memory, as a file's would, also for an engine on a GPU; their digest is that of
the files.
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

from store import SAFETENSORS_DTYPES, decode_safetensors_head
from store import broadcast as protocol

# of one message, of a group to form, of the learner to say who takes part
MESSAGE_TIMEOUT = timedelta(seconds=60)
LISTEN_TIMEOUT = timedelta(seconds=1)  # then it looks whether it is to end, and listens again
DTYPES = {name: getattr(torch, dtype) for name, dtype in SAFETENSORS_DTYPES.items()}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int  # bytes from the end of the head
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    tensors: Sequence[_Tensor]
    body: torch.Tensor  # uint8: what follows the head


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """All files of one version, as they would be on disk."""

    digest: str
    files: Sequence[_File]

    def shapes(self) -> dict[str, list[int]]:
        return {tensor.name: tensor.shape for file in self.files for tensor in file.tensors}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            for tensor in file.tensors:
                yield (
                    tensor.name,
                    file.body[tensor.begin : tensor.end].view(tensor.dtype).view(tensor.shape),
                )


class Receiver:
    """PendingOperations, in its thread, for the learner's rounds. `is_lost` once it has lost touch with the
    learner, for good.
    """

    def __init__(self, address: str) -> None:
        self.address, self.is_lost = address, False
        self._unused = threading.Lock()  # the bytes: held while they come, and while they are read
        self._received: Received | None = None
        # kept: new memory would cost as much as what comes into it
        self._bodies: list[torch.Tensor] = []
        self._is_taken = self._is_closed = False
        self._thread = threading.Thread(target=self._follow, name="receive-weights", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether some are on their way."""
        return self._unused.locked() and not self._is_taken

    def take(self, digest: str) -> Received | None:
        """The weights of that digest, which stay as they are until `release`; None if they are not
        here whole.
        """
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
        """Takes part in no more rounds."""
        self._is_closed = True
        self._thread.join(2 * LISTEN_TIMEOUT.total_seconds())

    def _follow(self) -> None:
        address = protocol.Address.of(self.address)
        place = (address.host, address.port)
        try:
            with socket.create_connection(
                place, timeout=MESSAGE_TIMEOUT.total_seconds()
            ) as connection:
                own_host = connection.getsockname()[0]
            store = dist.TCPStore(*place, is_master=False, timeout=MESSAGE_TIMEOUT)
            self._take_part(protocol.HiddenKeys(secret=address.secret, store=store), own_host)
        except Exception as error:  # noqa: BLE001 - a thread's end: whatever it is, the engine joins again
            _log.warning(
                "lost touch with the learner at %s:%s, which sends weights: %s", *place, error
            )
        finally:
            self.is_lost = True

    def _take_part(self, store: protocol.HiddenKeys, own_host: str) -> None:
        member = n_calls = group_number = 0
        group: Any = None
        while True:
            if group is None:
                member, n_calls = store.add(protocol.JOINED, 1), 0
            n_calls += 1
            if (number := self._listen(store, protocol.call_key(member, n_calls))) is None:
                return
            with self._unused:
                self._received = None
                store.set(protocol.ready_key(number, member), "")
                about = json.loads(store.get(protocol.round_key(number)))
                try:
                    if about["group"] != group_number or group is None:
                        group, group_number = None, about["group"]
                        # ValueError: came too late
                        rank, size = 1 + about["members"].index(member), 1 + len(about["members"])
                        meeting = dist.PrefixStore(
                            store.hidden(protocol.group_prefix(group_number)), store.store
                        )
                        group = self._form(meeting, rank, size, own_host)
                    self._received = self._receive(group)
                except (RuntimeError, ValueError) as error:
                    group = None
                    store.set(protocol.gone_key(member), "")
                    _log.warning(
                        "weights that were sent did not arrive whole; the files are loaded "
                        "instead: %s",
                        error,
                    )

    def _listen(self, store: protocol.HiddenKeys, key: str) -> int | None:
        """The number that the learner writes there, whenever that is; None if this end was
        closed.
        """
        while not self._is_closed:
            with suppress(dist.DistStoreError):  # nothing yet
                store.wait([key], LISTEN_TIMEOUT)
                return int(store.get(key))
        return None

    def _form(self, store: dist.Store, rank: int, size: int, own_host: str) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        options._timeout = MESSAGE_TIMEOUT
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _receive(self, group: Any) -> Received:
        digest = blake3(max_threads=blake3.AUTO)
        files: list[_File] = []
        while n_head_bytes := int.from_bytes(self._bytes(group, protocol.N_BYTES), "little"):
            head = self._bytes(group, n_head_bytes)
            tensors = _tensors_of(head)
            body = self._body(len(files), max((tensor.end for tensor in tensors), default=0))
            for tensor in tensors:
                self._fill(group, body[tensor.begin : tensor.end])
            digest.update(head)
            digest.update(memoryview(body.numpy()))
            files.append(_File(tensors=tensors, body=body))
        return Received(digest=digest.hexdigest(), files=files)

    def _body(self, number: int, n_bytes: int) -> torch.Tensor:
        if number == len(self._bodies):
            self._bodies.append(torch.empty(0, dtype=torch.uint8))
        if self._bodies[number].numel() != n_bytes:
            self._bodies[number] = torch.empty(n_bytes, dtype=torch.uint8)
        return self._bodies[number]

    def _bytes(self, group: Any, n_bytes: int) -> bytes:
        data = torch.empty(n_bytes, dtype=torch.uint8)
        self._fill(group, data)
        return data.numpy().tobytes()

    def _fill(self, group: Any, data: torch.Tensor) -> None:
        for cut in protocol.cuts(data.numel()):
            group.broadcast([data[cut]], dist.BroadcastOptions()).wait()


def _tensors_of(head: bytes) -> list[_Tensor]:
    """From the header of a safetensors file; those without elements too."""
    entries = json.loads(head[8:])
    return [
        _Tensor(
            name=entry.name,
            dtype=DTYPES[entry.dtype],
            shape=entry.shape,
            begin=entry.begin,
            end=entry.end,
        )
        for entry in decode_safetensors_head(head)
    ]

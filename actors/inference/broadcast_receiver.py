"""Receive weights that the learner sends directly; `store/broadcast.py` defines the broadcast.

    receiver = Receiver(address)                  # joins every round from now on, in a thread
    if not receiver.is_busy:
        received = receiver.take(digest)          # the weights of that digest, if they are whole
    model.load_weights(received.tensors())
    receiver.release()                            # the next weights may overwrite these

The bytes arrive in main memory, also for an engine on a GPU. Their digest is that of the files.
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

from store import SAFETENSORS_DTYPES, TensorEntry, broadcast, decode_safetensors_head

LISTEN_TIMEOUT = timedelta(seconds=1)  # how often the thread checks whether it was closed
DTYPES = {name: getattr(torch, dtype) for name, dtype in SAFETENSORS_DTYPES.items()}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    tensors: Sequence[TensorEntry]
    body: torch.Tensor  # uint8: the bytes after the header


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """Hold all files of one version, as they would be on disk."""

    digest: str
    files: Sequence[_File]

    def shapes(self) -> dict[str, list[int]]:
        return {tensor.name: tensor.shape for file in self.files for tensor in file.tensors}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            for tensor in file.tensors:
                data = file.body[tensor.begin : tensor.end]
                yield tensor.name, data.view(DTYPES[tensor.dtype]).view(tensor.shape)


class Receiver:
    """Wait in a thread for the learner's rounds.

    `is_lost` becomes true, for good, when the connection with the learner ends.
    """

    def __init__(self, address: str) -> None:
        self.address, self.is_lost = address, False
        # held while bytes arrive, and while the engine reads them
        self._unused = threading.Lock()
        self._received: Received | None = None
        # kept: new memory would cost as much as what comes into it
        self._bodies: list[torch.Tensor] = []
        self._is_taken = self._is_closed = False
        self._thread = threading.Thread(target=self._follow, name="receive-weights", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Return whether weights are arriving."""
        return self._unused.locked() and not self._is_taken

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
                own_host = connection.getsockname()[0]
            store = dist.TCPStore(*host_port, is_master=False, timeout=broadcast.MESSAGE_TIMEOUT)
            self._join_rounds(broadcast.HiddenKeys(secret=address.secret, store=store), own_host)
        except Exception as error:  # noqa: BLE001 - after any error the engine joins again
            _log.warning(
                "lost touch with the learner at %s:%s, which sends weights: %s", *host_port, error
            )
        finally:
            self.is_lost = True

    def _join_rounds(self, store: broadcast.HiddenKeys, own_host: str) -> None:
        member = n_calls = group_number = 0
        group: Any = None
        while True:
            if group is None:
                member, n_calls = store.add(broadcast.JOINED, 1), 0
            n_calls += 1
            if (number := self._listen(store, broadcast.call_key(member, n_calls))) is None:
                return
            with self._unused:
                self._received = None
                store.set(broadcast.ready_key(number, member), "")
                about = json.loads(store.get(broadcast.round_key(number)))
                try:
                    if about["group"] != group_number or group is None:
                        group, group_number = None, about["group"]
                        # raises ValueError for a member that came too late
                        rank, size = 1 + about["members"].index(member), 1 + len(about["members"])
                        prefix = dist.PrefixStore(
                            store.hidden(broadcast.group_prefix(group_number)), store.store
                        )
                        group = self._form(prefix, rank=rank, size=size, own_host=own_host)
                    self._received = self._receive(group)
                except (RuntimeError, ValueError) as error:
                    group = None
                    store.set(broadcast.gone_key(member), "")
                    _log.warning(
                        "weights that were sent did not arrive whole; the files are loaded "
                        "instead: %s",
                        error,
                    )

    def _listen(self, store: broadcast.HiddenKeys, key: str) -> int | None:
        """Wait for the number that the learner writes at `key`; None if this receiver is closed."""
        while not self._is_closed:
            with suppress(dist.DistStoreError):  # not written yet
                store.wait([key], LISTEN_TIMEOUT)
                return int(store.get(key))
        return None

    def _form(self, store: dist.Store, *, rank: int, size: int, own_host: str) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        options._timeout = broadcast.MESSAGE_TIMEOUT
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _receive(self, group: Any) -> Received:
        digest = blake3(max_threads=blake3.AUTO)
        files: list[_File] = []
        while n_header_bytes := int.from_bytes(self._bytes(group, broadcast.N_BYTES), "little"):
            header = self._bytes(group, n_header_bytes)
            tensors = decode_safetensors_head(header)
            body = self._body(len(files), max((tensor.end for tensor in tensors), default=0))
            for tensor in tensors:
                self._fill(group, body[tensor.begin : tensor.end])
            digest.update(header)
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
        for cut in broadcast.cuts(data.numel()):
            group.broadcast([data[cut]], dist.BroadcastOptions()).wait()

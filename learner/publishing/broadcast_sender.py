"""Send weights directly to engines, on rank 0. The protocol is in `store/broadcast.py`.

    broadcast = Broadcast(host, device=device)   # engines join at `broadcast.address` at any time
    with broadcast.round() as send:              # to the engines that have joined by now
        copy.write(..., send=send)

The files remain the record. An engine that was not there, or received other bytes than the digest
says, loads the files. So no engine can fail a round. One that does not answer within READY_S is
left out, and joins again. One that stops in the middle of a version delays the word that its files
are there by at most `weight_pieces.PIECE_S`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import weight_pieces
from learner.distributed.deepspeed_setup import host_ranks
from learner.publishing.publish import Send
from store import broadcast

MOST_NEW = 10_000  # engines that join between two rounds
# An engine answers a call at once, or when it has loaded the version before.
READY_S = 5.0

_log = logging.getLogger(__name__)


class Broadcast:
    """Send files while they are written, to the engines that are there. None blocks it long."""

    def __init__(self, host: str, *, device: torch.device) -> None:
        self._host, self._device = host, device
        rendezvous = host_ranks(host)
        address = broadcast.Address.new(host, rendezvous.port)
        self.address = str(address)
        self._store = broadcast.HiddenKeys(secret=address.secret, store=rendezvous)
        self._calls: dict[int, int] = {}  # member -> number of calls to it
        self._n_joined = self._round = self._n_groups = 0
        self._members: list[int] = []  # of the group
        self._link: weight_pieces.Link | None = None

    @contextmanager
    def round(self) -> Iterator[Send]:
        """Yield a function that sends a file of one version. Call it for each file, in order.

        An error in the block ends the round for the engines.
        """
        self._gather()
        try:
            yield self._send_file
        except BaseException:
            self._drop_group("the weights were not written")
            raise
        self._send([memoryview(broadcast.encode_preamble(head_bytes=0, file_bytes=0))])

    def _gather(self) -> None:
        """Call all members and form a group of those that answer, unless it exists.

        The store can be disturbed by anyone on its port. If it fails, the round has no members.
        """
        try:
            self._call_members()
        # ValueError: a stranger wrote a value. MemoryError: NCCL believed one.
        except (RuntimeError, ValueError, MemoryError) as error:
            self._calls = {}
            self._drop_group(str(error))

    def _call_members(self) -> None:
        n_joined = self._store.add(broadcast.JOINED, 0)
        if n_joined - self._n_joined > MOST_NEW:
            raise RuntimeError(
                f"{n_joined - self._n_joined} engines joined at once, which no run has; they are "
                "not called"
            )
        self._calls |= dict.fromkeys(range(self._n_joined + 1, n_joined + 1), 0)
        self._calls = {
            member: n
            for member, n in self._calls.items()
            if not self._store.check([broadcast.gone_key(member)])
        }
        self._n_joined = n_joined
        self._round += 1
        for member in self._calls:
            self._calls[member] += 1
            self._store.set(broadcast.call_key(member, self._calls[member]), str(self._round))
        deadline_s = time.monotonic() + READY_S
        devices = {
            member: device
            for member in self._calls
            if (device := self._device_of_ready(member, deadline_s)) is not None
        }
        members = list(devices)
        if late := len(self._calls) - len(members):
            _log.warning(
                "%d engines did not come to be sent weights within %g s; they load the files",
                late,
                READY_S,
            )
        self._calls = {member: self._calls[member] for member in members}
        if members != self._members:
            self._drop_link()
        self._n_groups += self._link is None
        self._members = members
        device_type = weight_pieces.common_device_type(
            [weight_pieces.device_name(self._device), *devices.values()]
        )
        announced = {"group": self._n_groups, "members": members, "device": device_type}
        self._store.set(broadcast.round_key(self._round), json.dumps(announced))
        if members and self._link is None:
            self._link = self._form(device_type, size=1 + len(members))

    def _device_of_ready(self, member: int, deadline_s: float) -> str | None:
        """Return the name of a member's device; None if the member does not answer in time."""
        left = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
        key = broadcast.ready_key(self._round, member)
        try:
            self._store.wait([key], left)
        except dist.DistStoreError:
            # One before it took all the time, and a busy store does not answer in a millisecond.
            if not self._store.check([key]):
                return None
        return self._store.get(key).decode()

    def _form(self, device_type: str, *, size: int) -> weight_pieces.Link:
        prefix = broadcast.group_prefix(self._n_groups)
        return weight_pieces.form(
            weight_pieces.group_store(self._store, prefix, device_type=device_type),
            rank=0,
            size=size,
            host=self._host,
            device=self._device if device_type == self._device.type else torch.device(device_type),
            is_cancelled=lambda: False,  # a deadline ends it
        )

    def _send_file(self, parts: Sequence[memoryview]) -> None:
        preamble = broadcast.encode_preamble(
            head_bytes=len(parts[0]), file_bytes=sum(map(len, parts))
        )
        self._send([memoryview(preamble)])
        self._send(parts)

    def _send(self, parts: Sequence[memoryview]) -> None:
        if self._link is None:
            return
        try:
            self._link.send(parts)
        # An engine died or stopped. The others cannot go on without it, and load the files.
        except RuntimeError as error:
            self._drop_group(str(error))

    def _drop_group(self, why: str) -> None:
        if self._link is not None or self._members:
            _log.warning("weights were not sent to the engines, which load the files: %s", why)
        self._drop_link()
        self._members = []

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.abort()
        self._link = None

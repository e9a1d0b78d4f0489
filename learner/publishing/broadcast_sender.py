"""The learner's end of weights that are sent to engines directly (`store/broadcast.py` has the
protocol); rank 0 only.

    broadcast = Broadcast(host)                               # engines join at `broadcast.address`, whenever they come
    with broadcast.round() as send:                           # with those that are there now
        publish_weights(engine.weights(), directory, source_dir=base, behind=behind, send=send)

The files stay what counts: an engine that was not there, or got other bytes than the digest says,
loads them instead. So no engine can make a round fail; one that does not answer within READY_S is
left out, and joins again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from learner.distributed.deepspeed_setup import host_ranks
from learner.files.safetensors_writer import Send
from store import broadcast as protocol

MOST_NEW = 10_000  # engines that join between two rounds
# for an engine to say that it takes part: at once, or when it has loaded the weights before these
READY_S = 5.0
MESSAGE_TIMEOUT = timedelta(seconds=60)  # of one message, and of a group to form

_log = logging.getLogger(__name__)


class Broadcast:
    """Sends files while they are written. Waits for the engines that are there; none of them can
    stop it.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        rendezvous = host_ranks(host)
        address = protocol.Address.new(host, rendezvous.port)
        self.address = str(address)
        self._store = protocol.HiddenKeys(secret=address.secret, store=rendezvous)
        self._calls: dict[int, int] = {}  # how often each member was called
        self._n_joined = self._round = self._n_groups = 0
        self._members: list[int] = []  # of the group
        self._group: Any = None

    @contextmanager
    def round(self) -> Iterator[Send]:
        """One version. All its files go through what it yields, in order; an error on the way in
        ends it for the engines.
        """
        self._gather()
        try:
            yield self._send_file
        except BaseException:
            self._part("the weights were not written")
            raise
        self._send_all([memoryview(bytearray(protocol.N_BYTES))])

    def _gather(self) -> None:
        """Call all members, and make a group of those that answer, unless it is the one there is.

        Without an answer of the store itself, which anybody on the port can disturb, nobody is a
        member of this round.
        """
        try:
            self._call_members()
        # ValueError: a stranger wrote what is no number
        except (RuntimeError, ValueError) as error:
            self._calls = {}
            self._part(str(error))

    def _call_members(self) -> None:
        n_joined = self._store.add(protocol.JOINED, 0)
        if n_joined - self._n_joined > MOST_NEW:
            raise RuntimeError(
                f"{n_joined - self._n_joined} engines joined at once, which no run has; they are "
                "not called"
            )
        self._calls |= dict.fromkeys(range(self._n_joined + 1, n_joined + 1), 0)
        self._calls = {
            member: n
            for member, n in self._calls.items()
            if not self._store.check([protocol.gone_key(member)])
        }
        self._n_joined = n_joined
        self._round += 1
        for member in self._calls:
            self._calls[member] += 1
            self._store.set(protocol.call_key(member, self._calls[member]), str(self._round))
        deadline_s = time.monotonic() + READY_S
        for member in self._calls:
            self._await(member, deadline_s)
        members = [
            member
            for member in self._calls
            if self._store.check([protocol.ready_key(self._round, member)])
        ]
        if late := len(self._calls) - len(members):
            _log.warning(
                "%d engines did not come to be sent weights within %g s; they load the files",
                late,
                READY_S,
            )
        self._calls = {member: self._calls[member] for member in members}
        if members != self._members:
            self._group = None
        self._n_groups += self._group is None
        self._members = members
        self._store.set(
            protocol.round_key(self._round),
            json.dumps({"group": self._n_groups, "members": members}),
        )
        if members and self._group is None:
            self._group = self._form(size=1 + len(members))

    def _await(self, member: int, deadline_s: float) -> None:
        left = timedelta(seconds=max(0.001, deadline_s - time.monotonic()))
        with suppress(dist.DistStoreError):  # it did not come in time
            self._store.wait([protocol.ready_key(self._round, member)], left)

    def _form(self, *, size: int) -> Any:
        store = dist.PrefixStore(
            self._store.hidden(protocol.group_prefix(self._n_groups)), self._store.store
        )
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = MESSAGE_TIMEOUT
        return dist.ProcessGroupGloo(store, 0, size, options)

    def _send_file(self, pieces: Sequence[memoryview]) -> None:
        self._send_all(
            [memoryview(bytearray(len(pieces[0]).to_bytes(protocol.N_BYTES, "little"))), *pieces]
        )

    def _send_all(self, pieces: Sequence[memoryview]) -> None:
        try:
            for piece in pieces:
                for cut in protocol.cuts(len(piece)):
                    self._send(piece[cut])
        # an engine died: the others cannot go on without it, and load the files
        except RuntimeError as error:
            self._part(str(error))

    def _send(self, data: memoryview) -> None:
        if self._group is not None:
            self._group.broadcast(
                [torch.frombuffer(data, dtype=torch.uint8)], dist.BroadcastOptions()
            ).wait()

    def _part(self, why: str) -> None:
        if self._group is not None or self._members:
            _log.warning("weights were not sent to the engines, which load the files: %s", why)
        self._group, self._members = None, []

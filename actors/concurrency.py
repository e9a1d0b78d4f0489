"""Limit the requests that an engine gets at once, and the episodes that are played to keep it busy.

    gate = RequestGate(limit=64)
    async with gate: ...                             # one request; queues while 64 are inside
    concurrency = Concurrency(gate, group_size=8, groups=8, max_groups=16)
    concurrency.adapt(preempted=await engine.preempted())  # once in ADAPT_EVERY_S
    concurrency.episodes                             # how many the worker may play now

An engine whose cache is full preempts requests and computes them again later, so more requests
mean more repeated work. The gate therefore narrows at once after a preemption, and widens slowly
while there is none. An engine whose episodes mostly wait for their environments is idle, so more
groups are played while it is not full.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from configs import Config

# Additive increase, multiplicative decrease. The numbers follow from the reasons beside them; they
# were not tuned on an engine with a full cache.
ADAPT_EVERY_S = 1.0  # many decoding steps of an engine, few of an episode's turns
NARROWING = 0.8  # factor on the requests inside, after a preemption: frees a fifth of the cache
# Fraction of the largest limit, added after each WIDEN_AFTER: 100 s from nothing to the whole, so
# that a full cache is met again rarely.
WIDENING = 0.05
WIDEN_AFTER = 5  # calls of `adapt` in a row without a preemption: longer than one slow request
# Fraction of the limit. Requests end and begin all the time, so a full gate's mean is below 1; an
# engine with fewer requests on average can take more.
BUSY = 0.85
MORE_AFTER = 5  # calls of `adapt` in a row with an engine below BUSY: as patient as WIDEN_AFTER


class RequestGate:
    """Let `limit` requests in at a time, first come first served. `limit` may change."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        # integral of `inside` over time since the last `mean_inside`
        self._since_s = time.monotonic()
        self._request_seconds = 0.0
        self._counted_s = 0.0

    @property
    def waiting(self) -> int:
        """Return the number of queued requests."""
        return sum(not entry.done() for entry in self._queue)

    async def __aenter__(self) -> None:
        entry = asyncio.get_running_loop().create_future()
        self._queue.append(entry)
        self.let_in()
        try:
            await entry
        except asyncio.CancelledError:
            if entry.done() and not entry.cancelled():  # let in and cancelled in the same moment
                self._leave()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def let_in(self) -> None:
        """Let queued requests in as far as there is room. Call it after raising the limit."""
        while self._queue and self.inside < self.limit:
            entry = self._queue.popleft()
            if not entry.done():
                self._count(+1)
                entry.set_result(None)

    def mean_inside(self) -> float:
        """Return the time average of the requests inside since the last call."""
        self._count(0)
        mean = self._request_seconds / self._counted_s if self._counted_s else float(self.inside)
        self._request_seconds = self._counted_s = 0.0
        return mean

    def _leave(self) -> None:
        self._count(-1)
        self.let_in()

    def _count(self, change: int) -> None:
        now_s = time.monotonic()
        self._request_seconds += self.inside * (now_s - self._since_s)
        self._counted_s += now_s - self._since_s
        self._since_s = now_s
        self.inside += change


class Concurrency:
    """Adapt the number of `episodes` played at once, between `groups` and `max_groups` groups.

    The gate's limit at construction is the largest that it will have: the engine starts for it.
    """

    def __init__(self, gate: RequestGate, *, group_size: int, groups: int, max_groups: int) -> None:
        self.gate, self.max_requests = gate, gate.limit
        self._group_size = group_size
        self._fewest, self._most = groups * group_size, max_groups * group_size
        self.episodes = self._fewest
        # calls of `adapt` in a row without a preemption, and with an engine below BUSY
        self._n_calm = self._n_idle = 0

    @classmethod
    def of(cls, config: Config) -> Concurrency:
        if config.endpoint.url:  # one request per episode; the server has a queue of its own
            n = config.endpoint.requests
            return cls(RequestGate(n), group_size=1, groups=n, max_groups=n)
        actors, episodes = config.actors, config.algorithm.group_size + config.actors.extra_members
        return cls(
            RequestGate(actors.groups_in_flight * episodes),
            group_size=episodes,
            groups=actors.groups_in_flight,
            max_groups=max(actors.groups_in_flight, actors.max_groups_in_flight),
        )

    def adapt(self, *, preempted: int) -> None:
        """Adapt limit and episodes; `preempted` requests were preempted since the last call."""
        inside = self.gate.mean_inside()
        if preempted:
            self._n_calm = self._n_idle = 0
            used = min(self.gate.limit, max(inside, self.gate.inside))
            self.gate.limit = max(1, int(NARROWING * used))
            self._play_fewer()
            return
        self._n_calm += 1
        if self._n_calm % WIDEN_AFTER == 0 and self.gate.limit < self.max_requests:
            more = max(1, round(WIDENING * self.max_requests))
            self.gate.limit = min(self.max_requests, self.gate.limit + more)
            self.gate.let_in()
        if self.gate.waiting:
            self._n_idle = 0
            self._play_fewer()
        elif inside < BUSY * self.gate.limit:
            self._n_idle += 1
            if self._n_idle % MORE_AFTER == 0:
                self.episodes = min(self._most, self.episodes + self._group_size)
        else:
            self._n_idle = 0

    def _play_fewer(self) -> None:
        self.episodes = max(self._fewest, self.episodes - self._group_size)

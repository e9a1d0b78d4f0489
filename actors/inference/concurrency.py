"""How many requests an engine gets at once, and how many episodes are played to keep it busy.

    gate = RequestGate(limit=64)
    async with gate: ...                             # one request; waits in line while 64 are inside
    concurrency = Concurrency(gate, group_size=8, groups=8, max_groups=16)
    concurrency.adapt(preempted=engine.preempted())  # once in ADAPT_EVERY_S
    concurrency.episodes                             # how many the worker may play now

An engine whose cache is full puts requests back and computes them again later; the more it is
given, the more it repeats. So the gate narrows after a preemption, at once and by a part, and
widens slowly while there is none. An engine whose episodes wait for their environments most of the
time has nothing to do; so more groups are played while it is not full.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType

from configs import Config

ADAPT_EVERY_S = 1.0
NARROWER = 0.8  # times the requests inside, after a preemption
WIDER = 0.05  # of the most requests, after each WIDEN_AFTER looks in a row without one
WIDEN_AFTER = 5
BUSY = 0.85  # fraction of the most requests; an engine with fewer, on average, could work on more
MORE_AFTER = 5  # looks in a row at an engine with fewer than that


class RequestGate:
    """Lets `limit` requests in at a time, first come first served. `limit` may change at any
    moment.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._since_s, self._request_seconds, self._counted_s = time.monotonic(), 0.0, 0.0

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return sum(not place.done() for place in self._line)

    async def __aenter__(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        self.let_in()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # let in and cancelled in the same moment
                self._leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def let_in(self) -> None:
        """Whoever is in line, as far as there is room; to be called after the limit was raised."""
        while self._line and self.inside < self.limit:
            place = self._line.popleft()
            if not place.done():
                self._count(+1)
                place.set_result(None)

    def mean_inside(self) -> float:
        """Requests inside at once since the last call, on average over time."""
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
    """`episodes` to play at once: those of `groups` groups at least, of `max_groups` at most. The
    gate's limit only falls below its first value, `max_requests`, which is what the engine was
    started for.
    """

    def __init__(self, gate: RequestGate, *, group_size: int, groups: int, max_groups: int) -> None:
        self.gate, self.max_requests = gate, gate.limit
        self.episodes = groups * group_size
        self._group_size, self._least, self._most = (
            group_size,
            groups * group_size,
            max_groups * group_size,
        )
        # looks in a row without a preemption, and at an engine that could do more
        self._calm = self._idle = 0

    @classmethod
    def of(cls, config: Config) -> Concurrency:
        if config.endpoint.url:  # a request each: the others' server has a line of its own
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
        """`preempted`: requests that the engine put back since the last look."""
        inside = self.gate.mean_inside()
        if preempted:
            self._calm, self._idle = 0, 0
            self.gate.limit = max(
                1, int(NARROWER * min(self.gate.limit, max(inside, self.gate.inside)))
            )
            self.episodes = max(self._least, self.episodes - self._group_size)
            return
        self._calm += 1
        if self._calm % WIDEN_AFTER == 0 and self.gate.limit < self.max_requests:
            self.gate.limit = min(
                self.max_requests, self.gate.limit + max(1, round(WIDER * self.max_requests))
            )
            self.gate.let_in()
        if self.gate.waiting:
            self._idle = 0
            self.episodes = max(self._least, self.episodes - self._group_size)
        elif inside < BUSY * self.gate.limit:
            self._idle += 1
            if self._idle % MORE_AFTER == 0:
                self.episodes = min(self._most, self.episodes + self._group_size)
        else:
            self._idle = 0

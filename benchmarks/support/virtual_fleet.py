"""Simulate thousands of workers around one real coordinator, in virtual time; for `scale.py`.

    fleet = Fleet(directory, Load(...))
    fleet.run(until_s=60.0)          # warms up
    fleet.measure(seconds=60.0)      # -> {verb: Calls}

Coordinator, catalog and their files are real, and each call is really made and timed. Workers,
nodes, object store and learner are events: they only say when which call comes. The coordinator
answers one call at a time, so calls queue while it works. A call takes the CPU time that it took
here, and what was measured beside it: `Load.call_s` for Ray, and `Load.sync_s` for the disk where
the call is durable. So another process on this machine changes no figure by much.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import pickle
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import configs
from actors.rollout.group import COMMIT_EVERY_S
from actors.rollout.runner import CALLS_PER_S, LEASE_POLL_S, LONGEST_LEASE_POLL_S
from configs import Config
from coordinator import Coordinator, Lease, Settlement
from coordinator.weight_update_lock import WEIGHT_UPDATE_S
from driver.supervisor import POLL_S as STATUS_EVERY_S
from store import RunLayout, SegmentMeta, TrajectoryMeta, VersionRecord, export, uid, write_open_sql
from tests.support.simulation import Delay

US_PER_S = 1e6
# Calls whose answer waits for the disk; a claim does if it gives a batch.
DURABLE = ("commit", "settle", "publish", "remove")
CLAIM_EVERY_S = 0.5  # the learner's longest wait between two requests for a batch
NETWORK_S = 0.0005  # one way, within a data centre
NODE_RETURNS_S = 180.0  # from the loss of a node to the workers of another one
STEPS_PER_EPISODE = 10
LOADED_DETAIL = '{"version": 7, "digest": "0123456789abcdef0123456789abcdef", "received": true}'
BYTES_PER_STEP = 1_300  # of a segment, compressed, with text and tokens of about 1,100


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    config: Config
    nodes: int
    episode: Delay
    upload: Delay  # of one segment to the object store
    loading: Delay  # of a version's weights into an engine
    lock_poll_s: tuple[float, float]  # between two requests for its lock: first, longest
    lost_nodes_per_hour: float  # as a fraction of the nodes
    heartbeat_s: float  # between two of one worker
    call_s: float  # of the coordinator's CPU that Ray takes for one call
    sync_s: float  # until the disk has what a transaction wrote


@dataclass(kw_only=True, slots=True)
class Calls:
    """The measured calls of one verb, or measured work that a call does for all."""

    taken_s: list[float] = field(default_factory=list)  # of the coordinator, less work for all
    answered_s: list[float] = field(default_factory=list)  # with the queue and the network


class NoMaintainer:
    """Stand for the thread that compacts segments: the files of this simulation are not written."""

    def check(self) -> None: ...

    def close(self) -> None: ...


class Fleet:
    """Hold the events of one simulated run. Close it with `close`."""

    def __init__(self, directory: Path, load: Load) -> None:
        self.load, self.config = load, load.config
        self.random = random.Random(load.config.seed)
        self.now_s = self.free_at_s = 0.0  # virtual; when the coordinator is done with all calls
        self.calls: defaultdict[str, Calls] = defaultdict(Calls)
        self.n_stale = self.n_episodes = 0
        self._call_began_s: float | None = None  # CPU time, of the call that is being made
        self._for_all_s: dict[str, float] = {}  # within that call
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._patches = ExitStack()
        for patched in self._patched():
            self._patches.enter_context(patched)
        layout = RunLayout.create(directory, config_yaml=configs.as_yaml(self.config))
        write_open_sql(layout, macros=(), max_staleness=self.config.max_staleness)
        self.coordinator = Coordinator(self.config, learns=True)
        catalog: Any = self.coordinator.catalog
        catalog.heartbeats = self._apart("heartbeats written", catalog.heartbeats)
        catalog.renew_leases = self._apart("leases renewed", catalog.renew_leases)
        self.workers = [
            Worker(self, number) for number in range(configs.most_workers(self.config.actors))
        ]
        self.version = 0
        self._publish()
        for worker in self.workers:
            self.at(self.random.uniform(0.0, 10.0), worker.join)
        self.at(0.0, self._ask_for_status)
        self.at(0.0, self._claim)
        self.at(self._until_a_loss_s() / 2, self._lose_node)

    def run(self, *, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        self.now_s = until_s

    def measure(self, *, seconds: float) -> dict[str, Calls]:
        """Go on for so many virtual seconds. Return the calls that came meanwhile."""
        self.calls.clear()
        self.run(until_s=self.now_s + seconds)
        return dict(self.calls)

    @property
    def backlog_s(self) -> float:
        """Return how long a call that comes now waits for the coordinator."""
        return max(0.0, self.free_at_s - self.now_s)

    def at(self, after_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._order), event))

    def call(
        self, verb: str, *given: Any, then: Callable[[Any], None] | None = None, **named: Any
    ) -> None:
        """Send a call. `then` gets the answer when the caller has it."""
        sent_s = self.now_s

        def arrive() -> None:
            begins_s = max(self.now_s, self.free_at_s)
            answer, taken_s = self._make(verb, given, named, at_s=begins_s)
            self.free_at_s = begins_s + taken_s
            after_s = self.free_at_s + NETWORK_S - self.now_s
            for work, of_it_s in self._for_all_s.items():
                self.calls[work].taken_s.append(of_it_s)
                taken_s -= of_it_s
            self.calls[verb].taken_s.append(taken_s)
            self.calls[verb].answered_s.append(self.now_s + after_s - sent_s)
            if then is not None:
                self.at(after_s, lambda: then(answer))

        self.at(NETWORK_S, arrive)

    def close(self) -> None:
        self.coordinator.close()
        self._patches.close()

    def _make(
        self, verb: str, given: tuple[Any, ...], named: dict[str, Any], *, at_s: float
    ) -> tuple[Any, float]:
        """Make a call at a virtual time. Return its answer, and the seconds that it takes."""
        sent = pickle.dumps((given, named))  # by the caller
        event_s, self.now_s = self.now_s, at_s
        self._for_all_s = {}
        began_s = self._call_began_s = time.thread_time()
        given, named = pickle.loads(sent)
        answer = getattr(self.coordinator, verb)(*given, **named)
        pickle.dumps(answer)
        taken_s = time.thread_time() - began_s + self.load.call_s
        if verb in DURABLE or (verb == "claim" and answer is not None):
            taken_s += self.load.sync_s
        self._call_began_s, self.now_s = None, event_s
        return answer, taken_s

    def _clock_s(self) -> float:
        """Return the virtual time, which goes on within a call as its CPU time does."""
        began_s = self._call_began_s
        return self.now_s + (0.0 if began_s is None else time.thread_time() - began_s)

    def _apart(self, work: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time is counted apart from the call that needs it."""

        def timed(*given: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            answer = function(*given, **named)
            took_s = time.thread_time() - began_s
            self._for_all_s[work] = self._for_all_s.get(work, 0.0) + took_s
            return answer

        return timed

    def _patched(self) -> Iterator[Any]:
        clock = SimpleNamespace(monotonic=self._clock_s)
        for module in ("heartbeats", "export_schedule", "weight_update_lock"):
            yield patch(f"coordinator.{module}.time", clock)
        for module in ("coordinator.leases", "store.catalog.database"):
            yield patch(f"{module}.now_us", lambda: 1 + round(self._clock_s() * US_PER_S))
        yield patch("coordinator.export_schedule.export", self._apart("exports", export))
        yield patch("coordinator.coordinator.start_maintainer", lambda *_, **__: NoMaintainer())

    def _ask_for_status(self) -> None:
        self.call("driver_tick")
        self.at(STATUS_EVERY_S, self._ask_for_status)

    def _claim(self) -> None:
        self.call("claim", self.version, then=self._train)

    def _train(self, batch: Any) -> None:
        if batch is None:
            self.at(CLAIM_EVERY_S, self._claim)
            return
        step = self.version + 1
        self.version = step
        self._publish()
        self.call(
            "settle",
            Settlement(
                batch_id=batch.batch_id,
                learner_step=step,
                filtered={},
                version_in=step - 1,
                metrics={"loss/policy": 0.0},
            ),
            then=lambda _: self._claim(),
        )

    def _publish(self) -> None:
        version = VersionRecord(
            version=self.version,
            path=f"weights/v{self.version}",
            digest="simulated",
            learner_step=self.version,
        )
        self.call("publish", version)

    def _until_a_loss_s(self) -> float:
        return 3600.0 / (self.load.lost_nodes_per_hour * self.load.nodes)

    def _lose_node(self) -> None:
        """Lose a node. The supervisor removes each of its workers when it has been silent."""
        node = self.random.randrange(self.load.nodes)
        silent_s = self.config.supervision.silent_s
        for worker in self.workers[node :: self.load.nodes]:
            worker.lose()
            self.at(
                silent_s, lambda worker=worker: self.call("remove", worker.name, "its node left")
            )
            self.at(NODE_RETURNS_S, worker.join)
        self.at(self._until_a_loss_s(), self._lose_node)


class Worker:
    """Hold one worker, which plays one group at a time."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.name = fleet, f"worker-{number}"
        self._life = 0  # events of an earlier life do nothing
        self._poll_s = LEASE_POLL_S
        self._serves, self._is_loading = -1, False  # version; a newer one
        self._n_segments = 0
        # A part of its first group counts as played, so that groups end at an even rate at once.
        self._played = fleet.random.random()

    def join(self) -> None:
        self._life += 1
        self._serves, self._is_loading = -1, False
        self._alive(self.fleet.random.uniform(0.0, self.fleet.load.heartbeat_s), self._beat)
        self._alive(self.fleet.random.uniform(0.0, self._spread_s()), self._ask_for_version)
        self._ask()

    def lose(self) -> None:
        self._life += 1

    def _alive(self, after_s: float, event: Callable[[], None]) -> None:
        """Plan an event that does not come if the worker is lost before."""
        life = self._life
        self.fleet.at(after_s, lambda: event() if life == self._life else None)

    def _then(self, event: Callable[[Any], None]) -> Callable[[Any], None]:
        life = self._life
        return lambda answer: event(answer) if life == self._life else None

    def _beat(self) -> None:
        self.fleet.call("heartbeat", self.name, None, waits_s=0.0)
        self._alive(self.fleet.load.heartbeat_s, self._beat)

    def _spread_s(self) -> float:
        return len(self.fleet.workers) / CALLS_PER_S * self.fleet.random.uniform(0.5, 1.5)

    def _ask_for_version(self) -> None:
        self.fleet.call("newest_version", then=self._then(self._load))
        self._alive(self._spread_s(), self._ask_for_version)

    def _load(self, newest: VersionRecord) -> None:
        """Load a version that is newer, when it is this worker's turn."""
        if newest.version > self._serves and not self._is_loading:
            self._is_loading = True
            first_s, _ = self.fleet.load.lock_poll_s
            self._ask_for_lock(
                newest.version, poll_s=first_s, until_s=self.fleet.now_s + WEIGHT_UPDATE_S
            )

    def _ask_for_lock(self, version: int, *, poll_s: float, until_s: float) -> None:
        def answered(has_it: bool) -> None:
            if has_it or self.fleet.now_s >= until_s:
                load_s = self.fleet.load.loading.draw(self.fleet.random)
                self._alive(load_s, lambda: self._loaded(version))
                return
            _, longest_s = self.fleet.load.lock_poll_s
            next_s = min(2 * poll_s, longest_s)
            self._alive(poll_s, lambda: self._ask_for_lock(version, poll_s=next_s, until_s=until_s))

        self.fleet.call("begin_weight_update", self.name, then=self._then(answered))

    def _loaded(self, version: int) -> None:
        self._serves, self._is_loading = version, False
        self.fleet.call("end_weight_update", self.name)
        self.fleet.call("record_event", self.name, "weights loaded", detail=LOADED_DETAIL)

    def _ask(self) -> None:
        self.fleet.call("lease", self.name, self._serves, then=self._then(self._leased))

    def _leased(self, lease: Lease | None) -> None:
        if lease is None:
            wait_s = max(self._poll_s * self.fleet.random.uniform(0.5, 1.5), self._spread_s())
            self._poll_s = min(2 * self._poll_s, LONGEST_LEASE_POLL_S)
            self._alive(wait_s, self._ask)
            return
        self._poll_s = LEASE_POLL_S
        self._load(lease.version)
        draw = self.fleet.load.episode.draw
        ends = sorted((draw(self.fleet.random), member) for member in lease.group.missing)
        last_s = ends[-1][0]
        played_s, self._played = self._played * last_s, 0.0
        # Every COMMIT_EVERY_S what has ended, and the rest when the last one ends.
        for _, ended in itertools.groupby(ends, key=lambda end: end[0] // COMMIT_EVERY_S):
            part = list(ended)
            due_s = min(last_s, COMMIT_EVERY_S * (part[-1][0] // COMMIT_EVERY_S + 1))
            due_s = max(0.0, due_s - played_s)
            upload_s = self.fleet.load.upload.draw(self.fleet.random)
            members = [member for _, member in part]
            is_last = part[-1][0] == last_s
            self._alive(
                due_s + upload_s,
                lambda members=members, is_last=is_last: self._commit(
                    lease, members, is_last=is_last
                ),
            )

    def _commit(self, lease: Lease, members: list[int], *, is_last: bool) -> None:
        self.fleet.n_episodes += len(members)
        then = self._then(lambda _: self._ask()) if is_last else None
        self.fleet.call("commit", self._segment(lease, members), lease.epoch, then=then)

    def _segment(self, lease: Lease, members: list[int]) -> SegmentMeta:
        """Describe a file that is not written."""
        self._n_segments += 1
        name = f"{self.name}-{self._life}-{self._n_segments}"
        digest = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
        n_steps = STEPS_PER_EPISODE * len(members)
        return SegmentMeta(
            segment_id=name,
            path=f"segments/{self.name}/{digest}.parquet",
            digest=digest,
            n_steps=n_steps,
            n_bytes=n_steps * BYTES_PER_STEP,
            worker=self.name,
            trajectories=tuple(self._trajectory(lease, member) for member in members),
        )

    def _trajectory(self, lease: Lease, member: int) -> TrajectoryMeta:
        won = self.fleet.random.random() < 0.5
        return TrajectoryMeta(
            traj_uid=uid(lease.group.group_uid, member),
            group_uid=lease.group.group_uid,
            member=member,
            n_steps=STEPS_PER_EPISODE,
            episode_return=10.0 * won,
            won=won,
            task_score=None,
            invalid_steps=0,
            version_min=lease.version.version,
            version_max=self.fleet.version,
        )

"""What an actor does, whatever engine and environments it has: plays leased groups, follows the
weights, commits.

_play_groups     consumes leases, starts one task per group
                 waits for "admission" when it has nothing to play (the learner unblocks it by training)
_play_group      plays the group's episodes at once and commits them (`group.py`)
_follow_weights  consumes published versions, looking for news many times a second; gives up what
they make too old, and
                 has them served under the running requests
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from actors.inference.concurrency import Concurrency
from actors.inference.vllm_engine import EngineLostError
from actors.rollout.attempts import Attempts
from actors.rollout.group import EpisodeFailed, as_surplus, play_group
from configs import Config
from coordinator import CoordinatorClient, Lease
from envs import PendingOperations
from store import FencedError, RunLayout, SegmentMeta, Trajectory, VersionRecord, write_segment

LEASE_POLL_S = 0.1  # between two requests for a lease while none is free
VERSION_POLL_S = 0.05  # how soon newer weights are noticed
# of each of these two, all workers together: with many of them each asks more seldom
CALLS_PER_S = 100.0
STORAGE_TIMEOUT_S = 300.0  # of writing one segment
LONG_S = 5.0  # who waits for longer than this says what for


class StorageSilent(RuntimeError):
    """A segment could not be written in time; the worker ends, and another one plays what it
    played.
    """


class Weights(Protocol):
    async def serve(self, version: VersionRecord) -> None:
        """Returns when the policy is at `version` or newer, or has refused it."""


class RolloutRunner:
    """`await run()` until `stop()`; a failure of any part is raised by `run` with its cause.

    `play(lease, number, attempts)` plays one episode, and begins every attempt at it in `attempts`.
    `weights` is None for a policy that never changes.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        config: Config,
        *,
        play: Callable[[Lease, int, Attempts], Awaitable[Trajectory]],
        weights: Weights | None,
        concurrency: Concurrency,
    ) -> None:
        self.coordinator, self.config, self.concurrency = coordinator, config, concurrency
        self.layout = RunLayout.open(Path(config.run_dir))
        self.stopping = False
        self.waits = PendingOperations()
        self.weights = weights
        self._play = play
        self._playing: dict[asyncio.Task[None], Lease] = {}
        self._too_old: dict[bytes, str] = {}  # groups that are being given up, and why
        # event loop's clock; None: it has something to play
        self._idle_since_s: float | None = None
        self._has_leased = False  # since the newest version was asked for, which every lease names
        # a group has ended, there may be more of them, or it is to stop
        self._news = asyncio.Event()
        self._random = random.Random(coordinator.component)

    def waiting(self) -> tuple[str, float] | None:
        """Return what the player has waited for longest, and for how many seconds; None: it
        works.
        """
        if self._idle_since_s is not None:
            return "admission", asyncio.get_running_loop().time() - self._idle_since_s
        what, seconds = self.waits.oldest() or ("", 0.0)
        return (what, seconds) if seconds > LONG_S else None

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            following = loops.create_task(self._follow_weights())
            await self._play_groups(loops)
            following.cancel()

    def stop(self) -> None:
        """Finished episodes are committed, the others given up: their groups stay open for
        others.
        """
        self.stopping = True
        self._news.set()

    def adapt(self, *, preempted: int) -> None:
        """See `Concurrency.adapt`."""
        self.concurrency.adapt(preempted=preempted)
        self._news.set()

    async def _play_groups(self, loops: asyncio.TaskGroup) -> None:
        while not self.stopping:
            self._news.clear()
            if self._n_episodes() >= self.concurrency.episodes:
                # busy, not waiting: the engine has all it was meant to have
                await self._news.wait()
            elif (lease := await self.coordinator.lease()) is None:
                self._note_idle()
                await self._pause(LEASE_POLL_S)
            else:
                self._idle_since_s, self._has_leased = None, True
                await self._follow(lease.version)
                await self._begin(lease, loops)
        for task in self._playing:
            task.cancel()

    def _note_idle(self) -> None:
        """Note that no group was to be had: without one to play, the player waits from then on."""
        if self._playing:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = asyncio.get_running_loop().time()

    async def _begin(self, lease: Lease, loops: asyncio.TaskGroup) -> None:
        task = loops.create_task(self._play_group(lease))
        # a task that is cancelled before it has begun could not give its group up
        await asyncio.sleep(0)
        self._playing[task] = lease
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._playing[task]
        self._news.set()

    def _n_episodes(self) -> int:
        return sum(
            len(lease.group.missing) + len(self._spares(lease)) for lease in self._playing.values()
        )

    def _spares(self, lease: Lease) -> range:
        """Numbers of the episodes that may take a member's place. An evaluation has none: it is not
        of the quickest.
        """
        size = lease.group.size
        return range(
            size, size + self.config.actors.spare_members if lease.group.split == "train" else size
        )

    async def _play_group(self, lease: Lease) -> None:
        group_uid = lease.group.group_uid
        attempts = Attempts(lease)
        try:
            await play_group(
                lease.group.missing,
                spares=self._spares(lease),
                play=lambda number: self._play(lease, number, attempts),
                commit=partial(self._commit, lease),
                keep_surplus=partial(self._keep_surplus, lease),
                ended=attempts.end,
            )
            await self.record_unfinished(lease, attempts, why="straggler")
        except EpisodeFailed as error:
            await self.record_unfinished(lease, attempts, why="group_failed")
            await self.coordinator.abandon(lease, f"task {lease.task.id!r}: {error}")
        except FencedError:
            return  # another coordinator has taken over: it leases the group anew
        except asyncio.CancelledError:
            if group_uid not in self._too_old:
                await self.record_unfinished(
                    lease, attempts, why="stopped" if self.stopping else "worker_failed"
                )
                raise
            await self.record_unfinished(lease, attempts, why="too_old")
            await self.coordinator.give_up(lease, self._too_old.pop(group_uid))
        except EngineLostError:
            await self.record_unfinished(lease, attempts, why="worker_failed")
            raise

    async def record_unfinished(self, lease: Lease, attempts: Attempts, *, why: str) -> None:
        """Report the attempts that gave no trajectory.

        Comes before the group is given up, as another worker may lease it from then on.
        """
        if episodes := attempts.give_up(why):
            await self.coordinator.record_unfinished(lease, episodes)

    async def _commit(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        await self.coordinator.commit(await self.write(lease, trajectories), lease.epoch)

    async def _keep_surplus(self, lease: Lease, trajectories: Sequence[Trajectory]) -> None:
        alone = [as_surplus(trajectory) for trajectory in trajectories]
        await self.coordinator.keep_extra(lease, await self.write(lease, alone))

    async def write(self, lease: Lease, trajectories: Sequence[Trajectory]) -> SegmentMeta:
        """One segment. Raises StorageSilent."""
        with self.waits.on("the storage, to write a segment"):
            worker = self.coordinator.component
            writing = asyncio.to_thread(
                write_segment, self.layout, trajectories, worker=worker, epoch=lease.epoch
            )
            try:
                async with asyncio.timeout(STORAGE_TIMEOUT_S):
                    return await writing
            except TimeoutError:
                raise StorageSilent(
                    f"{worker} could not write a segment within {STORAGE_TIMEOUT_S:g} s"
                ) from None

    async def _follow_weights(self) -> None:
        while self.weights is not None:
            if (
                not self._has_leased
                and (newest := await self.coordinator.newest_version()) is not None
            ):
                await self._follow(newest)
            self._has_leased = False
            await self._pause(VERSION_POLL_S)

    async def _follow(self, newest: VersionRecord) -> None:
        if self.weights is not None:
            self._give_up_too_old(newest.version)
            with self.waits.on(f"the weights of version {newest.version}"):
                await self.weights.serve(newest)

    def _give_up_too_old(self, newest: int) -> None:
        """Groups that no learner step can train on any more make room, before their requests are
        taken along.
        """
        for task, lease in self._playing.items():
            age = newest - lease.version.version
            if (
                lease.group.split == "train"
                and age > self.config.max_staleness
                and lease.group.group_uid not in self._too_old
            ):
                self._too_old[lease.group.group_uid] = (
                    f"still played at version {newest}, begun at {lease.version.version}: "
                    f"more than max_staleness={self.config.max_staleness} apart"
                )
                task.cancel()

    async def _pause(self, seconds: float) -> None:
        """About so long, or so much longer that all workers together call CALLS_PER_S times; not
        all at one moment.
        """
        longer = max(seconds, self.config.actors.workers / CALLS_PER_S)
        await asyncio.sleep(longer * self._random.uniform(0.5, 1.5))

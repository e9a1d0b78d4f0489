"""Lease groups, play each in a task of its own, and keep the weights new. Knows no Ray or vLLM.

`worker.py` makes one for its process:

    runner = RolloutRunner(coordinator, config, committer=..., episodes=..., weights=..., ...)
    await runner.run()      # until runner.stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Protocol

from actors.concurrency import Concurrency
from actors.rollout.committer import Committer
from actors.rollout.episode import EpisodeRunner
from actors.rollout.group import GroupRollout
from configs import Config, environment_config, most_workers
from coordinator import CoordinatorClient, Lease
from envs import PendingOperations
from store import TRAIN, VersionRecord

# Between two requests for a lease while none is free: twice as long each time. A lease becomes free
# soon after a version is announced, so a new version begins with the first again.
LEASE_POLL_S, LONGEST_LEASE_POLL_S = 0.1, 1.0
# How soon newer weights are noticed: VERSION_POLL_SHARE of the time since the last ones came.
VERSION_POLL_S, LONGEST_VERSION_POLL_S = 0.1, 0.5
VERSION_POLL_SHARE = 0.02
# Limit of polls for leases, and of polls for versions, of all workers together. With many workers
# each polls less often.
CALLS_PER_S = 100.0
REPORT_AFTER_S = 5.0  # a wait is reported once it lasts longer


class Weights(Protocol):
    version: int  # that the policy serves

    async def sync(self, version: VersionRecord) -> None:
        """Return when the policy has `version` or a newer one, or has refused it.

        Returns at once if the version is not written yet.
        """


class RolloutRunner:
    """Run groups until `stop()`. The first error of any group is raised by `run`.

    `weights` is None for a policy that never changes. Waits are recorded in `pending`.
    """

    def __init__(
        self,
        coordinator: CoordinatorClient,
        config: Config,
        *,
        committer: Committer,
        episodes: EpisodeRunner,
        weights: Weights | None,
        concurrency: Concurrency,
        pending: PendingOperations,
    ) -> None:
        self.coordinator = coordinator
        self.config = config
        self.concurrency = concurrency
        self.pending = pending
        self._committer = committer
        self._episodes = episodes
        self._weights = weights
        self._groups: dict[asyncio.Task[None], GroupRollout] = {}
        self._stopping = False
        self._grace_s = 0.0  # for episodes that are being played when it stops
        self._idle_since_s: float | None = None  # event loop's clock; None: a group is played
        # A lease names the newest version, so that it need not be asked for again at once.
        self._leased_lately = False
        self._lease_poll_s = LEASE_POLL_S
        self._newest, self._newest_since_s = -1, 0.0  # version; event loop's clock
        # a group ended, more may be played, a version was announced, or `stop` was called
        self._changed = asyncio.Event()
        self._random = random.Random(coordinator.component)

    async def run(self) -> None:
        """Lease groups and start one task for each; the task plays and commits its group.

        Consumes leases and announced versions. Produces committed groups. Waits for a running group
        to end while the engine is busy, for weights that are not written yet, and for admission
        while no group is free; the learner unblocks both when it writes and trains.
        """
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow_versions())
            while not self._stopping:
                self._changed.clear()
                n_episodes = sum(len(group.numbers) for group in self._groups.values())
                if n_episodes >= self.concurrency.episodes:
                    await self._changed.wait()
                elif (lease := await self.coordinator.lease(self._serves())) is None:
                    self._note_idle()
                    await self._wait_for_lease()
                else:
                    self._idle_since_s, self._leased_lately = None, True
                    self._note_version(lease.version)
                    self._lease_poll_s = LEASE_POLL_S
                    await self._sync_weights(lease.version)
                    await self._start_group(lease, tasks)
            if self._groups and self._grace_s:
                await asyncio.wait(self._groups, timeout=self._grace_s)
            for task, group in self._groups.items():
                group.stopping = True
                task.cancel()
            following.cancel()

    def stop(self) -> None:
        """Make `run` end. Finished episodes are committed, the others given up.

        Unfinished groups stay open for other workers.
        """
        self._stopping = True
        self._changed.set()

    def leave(self, *, within_s: float) -> None:
        """Make `run` end as `stop` does, but let the groups in play go on for `within_s` before."""
        self._grace_s = within_s
        self.stop()

    def waiting(self) -> tuple[str, float] | None:
        """Return the longest wait and its seconds, if it is worth a report; None while working."""
        if self._idle_since_s is not None:
            serves = self._serves()
            is_late = serves is not None and serves < self._newest
            reason = f"the weights of version {self._newest}" if is_late else "admission"
            return reason, asyncio.get_running_loop().time() - self._idle_since_s
        reason, seconds = self.pending.oldest() or ("", 0.0)
        return (reason, seconds) if seconds > REPORT_AFTER_S else None

    def adapt(self, *, preempted: int) -> None:
        """Adapt the number of groups to the engine's load; see `Concurrency.adapt`."""
        self.concurrency.adapt(preempted=preempted)
        self._changed.set()

    def _note_idle(self) -> None:
        """Note that no lease was free. Without a running group, idle time begins now."""
        if self._groups:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = asyncio.get_running_loop().time()

    async def _start_group(self, lease: Lease, tasks: asyncio.TaskGroup) -> None:
        group = GroupRollout(
            lease,
            environment_config(self.config, lease.task.id),
            coordinator=self.coordinator,
            committer=self._committer,
            episodes=self._episodes,
        )
        task = tasks.create_task(group.run())
        # A task that is cancelled before its first step could not report its group.
        await asyncio.sleep(0)
        self._groups[task] = group
        task.add_done_callback(self._end_group)

    def _end_group(self, task: asyncio.Task[None]) -> None:
        del self._groups[task]
        self._changed.set()

    async def _wait_for_lease(self) -> None:
        """Wait for a new version or a group's end, at most until it is time to ask again."""
        wait_s = self._spread(self._lease_poll_s)
        self._lease_poll_s = min(2 * self._lease_poll_s, LONGEST_LEASE_POLL_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    async def _follow_versions(self) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            if not self._leased_lately:
                newest = await self.coordinator.newest_version()
                if newest is not None:
                    self._note_version(newest)
                    await self._sync_weights(newest)
            self._leased_lately = False
            poll_s = VERSION_POLL_SHARE * (now_s() - self._newest_since_s)
            poll_s = min(max(VERSION_POLL_S, poll_s), LONGEST_VERSION_POLL_S)
            await asyncio.sleep(self._spread(poll_s))

    def _note_version(self, newest: VersionRecord) -> None:
        if newest.version > self._newest:
            self._newest = newest.version
            self._newest_since_s = asyncio.get_running_loop().time()
            self._lease_poll_s = LEASE_POLL_S
            self._changed.set()

    async def _sync_weights(self, newest: VersionRecord) -> None:
        if self._weights is None:
            return
        # First, so that their requests need not be carried over to the new weights.
        self._give_up_too_old(newest.version)
        before = self._weights.version
        with self.pending.on(f"the weights of version {newest.version}"):
            await self._weights.sync(newest)
        if self._weights.version > before:  # a lease may have waited for it
            self._lease_poll_s = LEASE_POLL_S
            self._changed.set()

    def _serves(self) -> int | None:
        """Return the version that the policy serves; None if it never changes."""
        return None if self._weights is None else self._weights.version

    def _give_up_too_old(self, newest: int) -> None:
        """Cancel the groups that are too old for any learner step to train on."""
        for task, group in self._groups.items():
            begun = group.lease.version.version
            is_training = group.lease.group.split == TRAIN
            if is_training and newest - begun > self.config.max_staleness and not group.too_old:
                apart = f"more than max_staleness={self.config.max_staleness} apart"
                group.too_old = f"still played at version {newest}, begun at {begun}: {apart}"
                task.cancel()

    def _spread(self, seconds: float) -> float:
        """Return a random wait of about `seconds`, longer with many workers.

        All workers together stay below CALLS_PER_S, and they do not call at the same moment.
        """
        longer = max(seconds, most_workers(self.config.actors) / CALLS_PER_S)
        return longer * self._random.uniform(0.5, 1.5)

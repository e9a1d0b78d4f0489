"""Play one leased group: all its episodes at once, committed as they end.

    group = GroupRollout(lease, config, coordinator=..., committer=..., episodes=...)
    await group.run()

A member is played again from its start under the same uid if its environment fails, so that a
second attempt can never become a second trajectory.

Extra episodes (`actors.extra_members`) are played beyond the missing ones, so that the group need
not wait for its slowest. The group is complete with the first episodes that end, as many as were
missing. An extra episode among them gets the number and uid of a member that has not ended. The
remaining episodes are cancelled. One that ended in the same moment is kept beside the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from actors.policy import EngineLostError
from actors.rollout.committer import Committer
from actors.rollout.episode import AttemptProgress, EpisodeOverdue, EpisodeRules, EpisodeRunner
from actors.rollout.step_records import EpisodeIds
from configs import Config
from coordinator import CoordinatorClient, Lease
from envs import EnvironmentDied
from printable import counted
from store import TRAIN, FencedError, Trajectory, Unfinished, now_us, uid

COMMIT_EVERY_S = 20.0  # a killed worker loses at most the episodes that ended within this time
# Groups that may end the environment process while an episode is played, each `env.attempts` times.
# So many bad tasks in a row mean that the environment itself does not work. A server could blame
# others for ever.
MAX_BAD_NEIGHBOURS = 30


class EpisodeFailed(RuntimeError):
    """An episode's environment failed at every attempt. The message has the last reason."""


class Attempts:
    """Keep how far the episodes of one leased group got that never became a trajectory."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._running: dict[int, AttemptProgress] = {}
        self._failed: list[Unfinished] = []

    def begin(self, number: int) -> AttemptProgress:
        """Begin an attempt at the episode `number`. Its steps are counted in the answer."""
        self._running[number] = progress = AttemptProgress()
        return progress

    def end(self, number: int) -> None:
        """Drop the episode `number`: it is kept as a trajectory."""
        self._running.pop(number, None)

    def fail(self, number: int) -> None:
        progress = self._running.pop(number)
        self._failed.append(self._unfinished(number, progress, why="failed"))

    def close(self, why: str) -> list[Unfinished]:
        """Return every attempt that gave no trajectory, and drop them all.

        Attempts that are still running end now, for the reason `why`.
        """
        running = self._running.items()
        rows = self._failed + [self._unfinished(n, progress, why=why) for n, progress in running]
        self._running, self._failed = {}, []
        return rows

    def _unfinished(self, number: int, progress: AttemptProgress, *, why: str) -> Unfinished:
        return Unfinished(
            group_uid=self._lease.group.group_uid,
            number=number,
            version=self._lease.version.version,
            begun_us=progress.begun_us,
            ended_us=max(progress.begun_us, now_us()),
            n_steps=progress.n_steps,
            n_response_tokens=progress.n_response_tokens,
            why=why,
        )


class GroupRollout:
    """Play one lease with `await run()`; cancel that task to stop.

    Set `too_old` or `stopping` before the cancellation, so that it is reported with its reason.
    """

    def __init__(
        self,
        lease: Lease,
        config: Config,
        *,
        coordinator: CoordinatorClient,
        committer: Committer,
        episodes: EpisodeRunner,
    ) -> None:
        size = lease.group.size
        # An evaluation must not prefer the quickest episodes, so it has no extra ones.
        n_extra = config.actors.extra_members if lease.group.split == TRAIN else 0
        self.lease = lease
        self.numbers = (*lease.group.missing, *range(size, size + n_extra))
        self.too_old = ""  # why the learner cannot train on this group any more
        self.stopping = False
        self._coordinator = coordinator
        self._committer = committer
        self._episodes = episodes
        self._rules = EpisodeRules.of(config, temperature=lease.temperature)
        self._max_attempts = config.env.attempts
        self._attempts = Attempts(lease)
        self._n_ended_processes = 0  # by all episodes of the group
        self._free = list(lease.group.missing)  # members without a trajectory
        self._finished: list[Trajectory] = []  # members to be committed
        self._extra: list[Trajectory] = []  # ended when no member was free

    async def run(self) -> None:
        """Play and commit the group, and report the episodes that gave no trajectory.

        Consumes one lease; produces segments. Waits for its episodes, which have deadlines of their
        own. Raises EngineLostError, StorageSilent and other errors that end the worker.
        """
        lease = self.lease
        try:
            await self._play()
            await self._report_unfinished("straggler")
        except EpisodeFailed as error:
            await self._report_unfinished("group_failed")
            await self._coordinator.abandon(lease, f"task {lease.task.id!r}: {error}")
        except FencedError:
            return  # a new coordinator has taken over: it leases the group again
        except asyncio.CancelledError:
            if not self.too_old:
                await self._report_unfinished("stopped" if self.stopping else "worker_failed")
                raise
            await self._report_unfinished("too_old")
            await self._coordinator.give_up(lease, self.too_old)
        except EngineLostError:
            await self._report_unfinished("worker_failed")
            raise

    async def _play(self) -> None:
        """Play all episodes; commit what is finished also when cancelled, or when one fails."""
        playing = {asyncio.ensure_future(self._play_episode(number)) for number in self.numbers}
        errors: list[BaseException] = []
        now_s = asyncio.get_running_loop().time
        commit_at_s = now_s() + COMMIT_EVERY_S
        try:
            while self._free:
                done, _ = await asyncio.wait(
                    playing,
                    timeout=max(0.0, commit_at_s - now_s()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                playing -= done
                self._take(done)
                errors += [error for task in done if (error := _error_of(task))]
                # A failed episode ends the group only if the others cannot fill all free members.
                too_few = len(playing) < len(self._free)
                fatal = [e for e in errors if too_few or not isinstance(e, EpisodeFailed)]
                if fatal or not self._free or now_s() >= commit_at_s:
                    commit_at_s = now_s() + COMMIT_EVERY_S
                    await _finish_despite_cancel(self._commit())
                if fatal:
                    raise fatal[0]
        except asyncio.CancelledError:
            self._take(task for task in playing if task.done())
            await _finish_despite_cancel(self._commit())
            raise
        finally:
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _play_episode(self, number: int) -> Trajectory:
        """Play one episode, and again if its environment fails, `env.attempts` times in all.

        An attempt does not count if its process died through another episode's fault. The group
        may end its process `env.attempts` times in all, whichever episode it is: each time, all
        episodes in it begin again.
        """
        lease = self.lease
        ids = EpisodeIds.of(lease.group.group_uid, number)
        at_fault = not_at_fault = 0
        while True:
            progress = self._attempts.begin(number)
            try:
                return await self._episodes.run(lease.task, ids, self._rules, progress=progress)
            except (EnvironmentDied, EpisodeOverdue) as error:
                self._attempts.fail(number)
                episode = f"{lease.task.env_name} task {lease.task.id!r}, member {number}"
                await self._coordinator.record("episode failed", f"{episode}: {error}")
                died = error if isinstance(error, EnvironmentDied) else None
                if died is not None and not died.at_fault:
                    not_at_fault += 1
                    is_last = not_at_fault >= MAX_BAD_NEIGHBOURS * self._max_attempts
                else:
                    at_fault += 1
                    if died is not None and died.ended_process:
                        self._n_ended_processes += 1
                    is_last = max(at_fault, self._n_ended_processes) >= self._max_attempts
                if is_last:
                    failed = f"{counted(at_fault + not_at_fault, 'attempt')} failed"
                    if self._n_ended_processes >= self._max_attempts:
                        times = counted(self._n_ended_processes, "time")
                        failed = f"its group ended the environment process {times}"
                    raise EpisodeFailed(f"{failed}, the last one because: {error}") from error

    def _take(self, tasks: Iterable[asyncio.Future[Trajectory]]) -> None:
        """Give each finished trajectory a free member's number and uid, its own if that is free."""
        ended = [t.result() for t in tasks if not t.cancelled() and t.exception() is None]
        for trajectory in sorted(ended, key=lambda trajectory: trajectory.member):
            number = trajectory.member
            self._attempts.end(number)
            if not self._free:
                self._extra.append(trajectory)
                continue
            if number not in self._free:
                number = self._free[-1]
                traj_uid = uid(trajectory.group_uid, number)
                trajectory = replace(trajectory, member=number, traj_uid=traj_uid)
            self._free.remove(number)
            self._finished.append(trajectory)

    async def _commit(self) -> None:
        """Write the episodes that ended since the last time, and those beside the whole group."""
        finished = sorted(self._finished, key=lambda trajectory: trajectory.member)
        extra = self._extra
        self._finished = []
        self._extra = []
        if finished:
            await self._committer.commit(self.lease, finished)
        if extra:
            await self._committer.keep_extra(self.lease, extra)

    async def _report_unfinished(self, why: str) -> None:
        await self._committer.record_unfinished(self.lease, self._attempts.close(why))


def _error_of(episode: asyncio.Future[Trajectory]) -> BaseException | None:
    """Return the error of an ended episode that nobody here has cancelled."""
    if episode.cancelled():
        return EpisodeFailed("its own code cancelled the task in which it was played")
    return episode.exception()


async def _finish_despite_cancel(work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, and finish it also if this task is cancelled meanwhile."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await working
        raise

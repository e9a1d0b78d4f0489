"""One leased group: all its episodes at once, each with another try if its environment fails.

play_group  consumes one lease, produces trajectories, a portion every COMMIT_EVERY_S
            waits for its episodes, each of which has deadlines of its own (`EpisodeRules`)

A member is played again from the start under the same uid, so that a second attempt can never be a
second trajectory.

Spares are episodes beyond those that are missing, so that the slowest need not be waited for. A
group is whole with the first episodes that end, as many as were missing; a spare among them takes
the place of a member that has not ended, with its number and uid. The others are cancelled; one
that had ended by then is extra, and kept beside the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from actors.rollout.episode import EpisodeOverdue
from envs import EnvironmentDied
from store import Trajectory, uid

COMMIT_EVERY_S = 20.0  # what a death can cost of a long group: episodes that ended within this time
# an episode whose process died through another's fault is played again this often
MAX_BYSTANDER_ATTEMPTS = 20


class EpisodeFailed(RuntimeError):
    """An episode's environment failed at every attempt; the message has the task and the last
    reason.
    """


async def play_group(
    members: Sequence[int],
    *,
    spares: Sequence[int] = (),
    play: Callable[[int], Awaitable[Trajectory]],
    commit: Callable[[Sequence[Trajectory]], Awaitable[None]],
    keep_extra: Callable[[Sequence[Trajectory]], Awaitable[None]],
    ended: Callable[[int], None],
) -> None:
    """Plays `members` and commits them; also what is finished when it is cancelled, or when another
    member fails.

    `spares` are numbers of episodes that no member has. `ended` hears the number of each episode
    that is committed or kept as extra; all others were given up. Raises what `play` raises, of
    which EpisodeFailed is the group's own misfortune.
    """
    places = _Places(members, ended)
    playing = {asyncio.ensure_future(play(number)) for number in (*members, *spares)}
    finished: list[Trajectory] = []
    failed: list[BaseException] = []
    now_s = asyncio.get_running_loop().time
    commit_at_s = now_s() + COMMIT_EVERY_S
    try:
        while places.free:
            patience_s = max(0.0, commit_at_s - now_s())
            done, _ = await asyncio.wait(
                playing, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            playing -= done
            finished += places.take(_results(done))
            failed += [error for task in done if (error := task.exception())]
            # A spare that fails, or makes good for a member that does, is no misfortune.
            fatal = [
                error
                for error in failed
                if not isinstance(error, EpisodeFailed) or len(playing) < len(places.free)
            ]
            if fatal or not places.free or now_s() >= commit_at_s:
                finished, portion = [], finished
                commit_at_s = now_s() + COMMIT_EVERY_S
                await _shielded(portion, commit)
            if fatal:
                raise fatal[0]
        await _shielded(places.extra, keep_extra)
    except asyncio.CancelledError:
        finished += places.take(_results(task for task in playing if task.done()))
        await _shielded(finished, commit)
        await _shielded(places.extra, keep_extra)
        raise
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


class _Places:
    """Which member each finished episode is. `free` are those that none is yet, `extra` what came
    when none was left.
    """

    def __init__(self, members: Sequence[int], ended: Callable[[int], None]) -> None:
        self.free = list(members)
        self._ended = ended
        self.extra: list[Trajectory] = []

    def take(self, finished: Iterable[Trajectory]) -> list[Trajectory]:
        """Those that are members, under their numbers and uids."""
        taken = []
        for trajectory in sorted(finished, key=lambda trajectory: trajectory.member):
            self._ended(trajectory.member)
            if not self.free:
                self.extra.append(trajectory)
                continue
            place = trajectory.member if trajectory.member in self.free else self.free[-1]
            self.free.remove(place)
            own = place == trajectory.member
            taken.append(
                trajectory
                if own
                else replace(trajectory, member=place, traj_uid=uid(trajectory.group_uid, place))
            )
        return taken


def as_extra(trajectory: Trajectory) -> Trajectory:
    """The trajectory as a group of its own, which nobody trains on."""
    group_uid = uid(trajectory.traj_uid, "extra")
    return replace(
        trajectory, group_uid=group_uid, traj_uid=uid(group_uid, 0), member=0, split="imported"
    )


async def with_attempts(
    play: Callable[[], Awaitable[Trajectory]],
    *,
    attempts: int,
    failed: Callable[[str], Awaitable[None]],
) -> Trajectory:
    """`play()`, and again if its environment fails, `attempts` times in all; `failed` hears of each
    failure.

    An episode that merely lived in a process that another one broke does not use up an attempt.
    """
    at_fault = bystander = 0
    while True:
        try:
            return await play()
        except (EnvironmentDied, EpisodeOverdue) as error:
            await failed(str(error))
            if isinstance(error, EnvironmentDied) and not error.at_fault:
                bystander += 1
            else:
                at_fault += 1
            if at_fault >= attempts or bystander >= MAX_BYSTANDER_ATTEMPTS:
                raise EpisodeFailed(
                    f"{at_fault + bystander} attempts failed, the last one because: {error}"
                ) from error


def _results(tasks: Iterable[asyncio.Future[Trajectory]]) -> list[Trajectory]:
    return [task.result() for task in tasks if not task.cancelled() and task.exception() is None]


async def _shielded(
    finished: Sequence[Trajectory], commit: Callable[[Sequence[Trajectory]], Awaitable[None]]
) -> None:
    """Commits them also if it is cancelled meanwhile."""
    if finished:
        committing = asyncio.ensure_future(
            commit(sorted(finished, key=lambda trajectory: trajectory.member))
        )
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await committing
            raise

"""One leased group: all its episodes at once, each with another try if its environment fails.

play_group  consumes one lease, produces trajectories, a portion every COMMIT_EVERY_S
            waits for its episodes, each of which has deadlines of its own (`EpisodeRules`)

A member is played again from the start under the same uid, so that a second attempt can never be a second trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from actors.rollout import EpisodeOverdue
from envs import EnvironmentDied
from store import Trajectory

COMMIT_EVERY_S = 20.0  # what a death can cost of a long group: episodes that ended within this time
MAX_BYSTANDER_ATTEMPTS = 20  # an episode whose process died through another's fault is played again this often


class EpisodeFailed(RuntimeError):
    """An episode's environment failed at every attempt; the message has the task and the last reason."""


async def play_group(
    members: Sequence[int],
    *,
    play: Callable[[int], Awaitable[Trajectory]],
    commit: Callable[[Sequence[Trajectory]], Awaitable[None]],
) -> None:
    """Plays `members` and commits them; also what is finished when it is cancelled, or when another member fails.

    Raises what `play` raises, of which EpisodeFailed is the group's own misfortune.
    """
    playing = {asyncio.ensure_future(play(member)) for member in members}
    try:
        while playing:
            done, playing = await asyncio.wait(playing, timeout=COMMIT_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
            await _commit_finished(done, commit)
            for task in done:
                task.result()
    except asyncio.CancelledError:
        await _commit_finished([task for task in playing if task.done()], commit)
        raise
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)


async def with_attempts(
    play: Callable[[], Awaitable[Trajectory]],
    *,
    attempts: int,
    failed: Callable[[str], Awaitable[None]],
) -> Trajectory:
    """`play()`, and again if its environment fails, `attempts` times in all; `failed` hears of each failure.

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
                raise EpisodeFailed(f"{at_fault + bystander} attempts failed, the last one because: {error}") from error


async def _commit_finished(
    tasks: Iterable[asyncio.Future[Trajectory]], commit: Callable[[Sequence[Trajectory]], Awaitable[None]]
) -> None:
    finished = [task.result() for task in tasks if not task.cancelled() and task.exception() is None]
    if finished:
        committing = asyncio.ensure_future(commit(sorted(finished, key=lambda trajectory: trajectory.member)))
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            await committing
            raise

"""Record how far the episodes of one leased group got that never became a trajectory.

attempts = Attempts(lease)
progress = attempts.begin(3)      # for each attempt; `play_episode` adds every step to it
attempts.fail(3)                  # the attempt failed; the episode may begin again
attempts.end(3)                   # the episode is a trajectory
rows = attempts.close("stopped")  # failed attempts, and those that did not end
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator import Lease
from store import Step, Unfinished, now_us


@dataclass(kw_only=True, slots=True)
class Progress:
    """Count the steps and response tokens of one attempt."""

    begun_us: int = field(default_factory=now_us)  # UTC epoch
    n_steps: int = 0
    n_response_tokens: int = 0

    def add(self, step: Step) -> None:
        self.n_steps += 1
        self.n_response_tokens += len(step.response_ids)


class Attempts:
    """Keep the attempts of one group that failed or are still running."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._running: dict[int, Progress] = {}
        self._failed: list[Unfinished] = []

    def begin(self, number: int) -> Progress:
        """Begin an attempt at the episode `number`."""
        self._running[number] = Progress()
        return self._running[number]

    def end(self, number: int) -> None:
        """Drop the episode `number`: it is kept as a trajectory."""
        self._running.pop(number, None)

    def fail(self, number: int) -> None:
        """Record that the current attempt at the episode `number` failed."""
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

    def _unfinished(self, number: int, progress: Progress, *, why: str) -> Unfinished:
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

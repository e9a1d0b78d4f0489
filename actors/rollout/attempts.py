"""Count how far the episodes of one leased group got, for those that never become a trajectory.

attempts = Attempts(lease)
progress = attempts.begin(3)        # for each attempt; `play_episode` adds every step to it
attempts.fail(3)                    # the attempt failed; the episode may be begun again
attempts.end(3)                     # it is a trajectory
rows = attempts.give_up("stopped")  # all that did not end
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator import Lease
from store import Step, Unfinished, now_us


@dataclass(kw_only=True, slots=True)
class Progress:
    """Steps and response tokens of one attempt so far."""

    begun_us: int = field(default_factory=now_us)  # UTC epoch
    n_steps: int = 0
    n_response_tokens: int = 0

    def add(self, step: Step) -> None:
        self.n_steps += 1
        self.n_response_tokens += len(step.response_ids)


class Attempts:
    """Keep the attempts of one group that gave no trajectory, or have given none yet."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._open: dict[int, Progress] = {}
        self._failed: list[Unfinished] = []

    def begin(self, number: int) -> Progress:
        """Begin an attempt at the episode `number`."""
        self._open[number] = Progress()
        return self._open[number]

    def end(self, number: int) -> None:
        """Forget the episode `number`: it is kept as a trajectory."""
        self._open.pop(number, None)

    def fail(self, number: int) -> None:
        """Note that the current attempt at the episode `number` failed."""
        self._failed.append(self._unfinished(number, self._open.pop(number), why="failed"))

    def give_up(self, why: str) -> list[Unfinished]:
        """Return every attempt that gave no trajectory, and forget them.

        Attempts that are still open end now, for the reason `why`.
        """
        rest = [
            self._unfinished(number, progress, why=why) for number, progress in self._open.items()
        ]
        rows = self._failed + rest
        self._open, self._failed = {}, []
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

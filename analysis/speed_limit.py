"""Say which side limits the speed of a run: the side that the other waits for."""

from __future__ import annotations

LEAST_SHARE = 0.1  # of its time; a side that waits less is not slowed down


def speed_limit(*, learner_waits: float, workers_wait: float | None) -> str:
    """Return the side that the other waits for, and for what share of its time it waits.

    `workers_wait` is None for a stored run: only a running one knows it.
    """
    if learner_waits >= max(LEAST_SHARE, workers_wait or 0.0):
        return f"actors (the learner waits {learner_waits:.0%})"
    if workers_wait is None:
        return f"learner (it waits {learner_waits:.0%})"
    if workers_wait >= LEAST_SHARE:
        return f"learner (the workers wait {workers_wait:.0%})"
    return "neither side"

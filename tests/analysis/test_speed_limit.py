"""The side that the other waits for limits the speed of a run."""

from __future__ import annotations

import pytest

from analysis import speed_limit


@pytest.mark.parametrize(
    ("learner_waits", "workers_wait", "limit"),
    [
        (0.63, 0.2, "actors (the learner waits 63%)"),
        (0.2, 0.63, "learner (the workers wait 63%)"),
        (0.09, 0.09, "neither side"),
        (0.2, None, "actors (the learner waits 20%)"),
        (0.09, None, "learner (it waits 9%)"),
    ],
)
def test_the_side_that_the_other_waits_for_is_the_limit(
    learner_waits: float, workers_wait: float | None, limit: str
) -> None:
    assert speed_limit(learner_waits=learner_waits, workers_wait=workers_wait) == limit

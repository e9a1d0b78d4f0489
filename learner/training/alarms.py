"""Compare the figures of a learner step with the bounds of the config.

An alarm is a figure beyond its bound. Its state is a metric itself, `alarm/<name>`, 1 or 0, so that
a resumed run knows it. Imports no torch: the driver describes alarms too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from configs import Config

LENGTH = "tokens/response_per_row"
START_LENGTH = "tokens/response_per_row_at_start"
START_STEPS = 5  # learner steps that define the run's usual response length


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarms:
    """Alarms of one learner step."""

    # `alarm/<name>`: 1 on, 0 off; and START_LENGTH. Recorded with the step's metrics.
    values: Mapping[str, float]
    began: list[str]  # one line per alarm; an alarm that stays on is not repeated
    ended: list[str]


def collapse_alarms(
    metrics: Mapping[str, float], *, before: Mapping[str, float], learner_step: int, config: Config
) -> Alarms:
    """Compare a learner step's `metrics` with the bounds, and with the figures of the step before.

    A missing figure (nothing was trained on) or one that is not finite (a bad update, reported
    already) leaves its alarm unchanged. Behaviour cloning has no alarms: it starts far from the
    policy it clones.
    """
    start_length = length_at_start(
        metrics[LENGTH], before=before.get(START_LENGTH), learner_step=learner_step
    )
    values = {START_LENGTH: start_length}
    began: list[str] = []
    ended: list[str] = []
    if config.loss.policy == "behaviour_cloning":
        return Alarms(values=values, began=began, ended=ended)
    checks = _checks(metrics, start_length=start_length, learner_step=learner_step, config=config)
    for name, beyond, figure, bound in checks:
        was_on = before.get(name, 0.0) > 0.0
        is_on = was_on if beyond is None else beyond
        values[name] = float(is_on)
        if is_on and not was_on:
            began.append(f"learner step {learner_step}: {figure} is {bound}")
        elif was_on and not is_on:
            ended.append(f"learner step {learner_step}: {figure} is no longer {bound}")
    return Alarms(values=values, began=began, ended=ended)


def describe_alarm(
    name: str, figures: Mapping[str, float], *, learner_step: int, config: Config
) -> tuple[str, float | None]:
    """Return a line on an alarm of a recorded learner step, and the figure that it watches.

    Example: "learner step 7: loss/ess 0.05 is below alarms.ess_below=0.1", 0.05.
    """
    checks = _checks(
        figures, start_length=figures[START_LENGTH], learner_step=learner_step, config=config
    )
    figure, bound = next((figure, bound) for each, _, figure, bound in checks if each == name)
    now = "is" if figures[name] else "is no longer"
    return f"learner step {learner_step}: {figure} {now} {bound}", figures.get(figure.split()[0])


def length_at_start(length: float, *, before: float | None, learner_step: int) -> float:
    """Return the mean response tokens per row over the run's first START_STEPS learner steps.

    It is updated from its value `before`, which the store has, so a resumed run continues it.
    Lengths 10, 20, 60, 10, 0, 99 give 10, 15, 30, 25, 20, 20. Without a value it starts at
    `length`.
    """
    if before is None:
        return length
    return before if learner_step > START_STEPS else before + (length - before) / learner_step


def _checks(
    metrics: Mapping[str, float], *, start_length: float, learner_step: int, config: Config
) -> Iterator[tuple[str, bool | None, str, str]]:
    """Yield name, beyond or not (None: unknown), figure and bound of each alarm.

    Example: "alarm/ess", True, "loss/ess 0.05", "below alarms.ess_below=0.1".
    """
    bounds = config.alarms
    for name, bound, is_below in (
        ("ess", bounds.ess_below, True),
        ("entropy", bounds.entropy_below, True),
        ("mismatch_kl", bounds.mismatch_kl_above, False),
    ):
        side = "below" if is_below else "above"
        value = metrics.get(f"loss/{name}", math.nan)
        beyond = None
        if math.isfinite(value):
            beyond = value < bound if is_below else value > bound
        limit = f"{side} alarms.{name}_{side}={bound:g}"
        yield f"alarm/{name}", beyond, f"loss/{name} {value:.3g}", limit
    length, factor = metrics[LENGTH], bounds.length_factor
    is_usual = start_length / factor <= length <= start_length * factor
    limit = (
        f"alarms.length_factor={factor:g} times longer or shorter than the first {START_STEPS} "
        f"steps' {start_length:.3g}"
    )
    is_beyond = learner_step > START_STEPS and not is_usual
    yield "alarm/length", is_beyond, f"{LENGTH} {length:.3g}", limit

"""Stop a run before it wastes time: bad updates, batches without an advantage, signs of a collapse.

A bad update has a loss or gradient that is not finite. The engine skips it; `bad_update_line` names
its rows in an event, and ROWS_QUERY finds them again. An alarm is a figure beyond a bound of the
config. Its state is a metric itself, `alarm/<name>`, 1 or 0, so that a resumed run knows it.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from configs import Config
from learner.data.batch_loader import PreparedBatch, Update
from learner.interface import BadUpdatesError, NonFiniteWeightsError, StarvationError
from learner.training.step_metrics import LENGTH, UpdateStats
from store import uid_text

BAD_UPDATE = "bad update"
ALARM, ALARM_ENDED = "alarm", "alarm ended"
MAX_ROWS_NAMED = 100  # of one bad update; if more rows are bad, the weights are, not the rows
# Updates in a row that are skipped because loss or gradient is not finite; one more ends the run.
MAX_BAD_UPDATES = 3
MAX_EMPTY_BATCHES = 10  # in a row, before the run ends
SOLVED = 0.99  # success above which batches may be empty: every episode of a group wins
# Counters recorded with each step's figures, because a resumed run continues them.
BAD_IN_A_ROW, EMPTY_IN_A_ROW = "learner/bad_updates_in_a_row", "learner/empty_batches_in_a_row"
START_STEPS = 5  # learner steps that define the run's usual response length
START_LENGTH = "tokens/response_per_row_at_start"
CHECKS_PER_TIMEOUT = 4  # of the held-out episodes, within one starvation timeout
# The rows that `bad_update_line` names. They are joined by their keys: comparing the event's text
# with every step of a run would take minutes.
ROWS_QUERY = (
    "SELECT DISTINCT s.group_uid, s.traj_uid, s.step_index, s.version_min, s.version_max, "
    "s.reward, s.action_text, s.response_ids, s.response_logprobs "
    "FROM (SELECT string_split(unnest(regexp_extract_all(detail, "
    "'trajectory ([-0-9a-f]{36} step [0-9]+)', 1)), ' step ') AS bad "
    "FROM events WHERE what = 'bad update') "
    "JOIN steps s ON s.traj_uid = bad[1]::UUID AND s.step_index = bad[2]::INT"
)
EVENTS_QUERY = "SELECT logged_at, detail FROM events WHERE what = 'bad update'"


class StarvationDeadline:
    """The end of the wait for a batch, put off while held-out episodes still finish.

    Those are played before training groups, and an evaluation may take longer than `timeout_s`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._heldout_open = 0
        self._deadline_s = time.monotonic() + timeout_s
        self._check_at_s = time.monotonic() + timeout_s / CHECKS_PER_TIMEOUT

    def check_is_due(self) -> bool:
        return time.monotonic() > self._check_at_s

    def has_passed(self, heldout_open: int) -> bool:
        """Return whether time is up. A change of `heldout_open` episodes starts it anew."""
        now_s = time.monotonic()
        self._check_at_s = now_s + self.timeout_s / CHECKS_PER_TIMEOUT
        if heldout_open != self._heldout_open:
            self._heldout_open, self._deadline_s = heldout_open, now_s + self.timeout_s
        return now_s > self._deadline_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarms:
    """Alarms of one learner step."""

    # `alarm/<name>`: 1 on, 0 off; and START_LENGTH. Recorded with the step's metrics.
    values: Mapping[str, float]
    began: list[str]  # one line per alarm; an alarm that stays on is not repeated
    ended: list[str]


class RunHealth:
    """Counters that end a run which goes wrong. A resumed run continues them from the store."""

    def __init__(self, config: Config, *, figures: Mapping[str, float]) -> None:
        """`figures` are those of the last learner step, as the store has them."""
        self.config, self._figures = config, figures
        self._bad_updates = int(figures.get(BAD_IN_A_ROW, 0))
        self._empty_batches = int(figures.get(EMPTY_IN_A_ROW, 0))

    def check_batch(self, batch: PreparedBatch) -> None:
        """Raise StarvationError after too many batches in a row without an advantage."""
        self._empty_batches = 0 if batch.rows.num_rows else self._empty_batches + 1
        check_batches(self._empty_batches, success=batch.success, filtered=batch.filtered)

    def bad_updates(
        self, batch: PreparedBatch, updates: list[UpdateStats], *, learner_step: int
    ) -> Iterator[str]:
        """Yield a line per bad update. Raises BadUpdatesError after too many in a row."""
        for number, (update, stats) in enumerate(zip(batch.updates, updates, strict=True), start=1):
            if not stats.skipped:
                self._bad_updates = 0
                continue
            self._bad_updates += 1
            yield bad_update_line(update, stats, learner_step=learner_step, number=number)
            if self._bad_updates > MAX_BAD_UPDATES:
                query = ROWS_QUERY if stats.bad_rows else EVENTS_QUERY
                # The last part is a command line.
                raise BadUpdatesError(
                    f"{self._bad_updates} optimizer updates in a row, the last in learner step "
                    f"{learner_step}, had a loss or gradient that is not finite; all were skipped. "
                    "Look at what they have in common, and lower learner.learning_rate if it is "
                    "nothing: "
                    f'gigpo sql {shlex.quote(self.config.run_dir)} "{query}"'
                )

    def judge(
        self, metrics: Mapping[str, float], *, learner_step: int
    ) -> tuple[dict[str, float], Alarms]:
        """Return all figures to record for the step, and its alarms."""
        alarms = collapse_alarms(
            metrics, before=self._figures, learner_step=learner_step, config=self.config
        )
        figures = {
            **metrics,
            **alarms.values,
            BAD_IN_A_ROW: float(self._bad_updates),
            EMPTY_IN_A_ROW: float(self._empty_batches),
        }
        self._figures = figures
        return figures, alarms


def bad_update_line(update: Update, stats: UpdateStats, *, learner_step: int, number: int) -> str:
    """Describe a bad update and name up to MAX_ROWS_NAMED rows; none if only their sum is bad.

    learner step 7, update 1: loss inf, gradient norm inf; of 40 rows these are not finite: group
    6f1c…-… trajectory 0b2a…-… step 3, group …
    """
    named = pa.array(stats.bad_rows[:MAX_ROWS_NAMED], pa.int64())
    keys = update.rows.select(["group_uid", "traj_uid", "step_index"]).take(named).to_pylist()
    names = [
        f"group {uid_text(row['group_uid'])} trajectory {uid_text(row['traj_uid'])} step "
        f"{row['step_index']}"
        for row in keys
    ]
    n_more = len(stats.bad_rows) - len(names)
    rows = "each by itself is finite"
    if names:
        rows = f"these are not finite: {', '.join(names)}"
        rows += f", and {n_more} more" if n_more else ""
    return (
        f"learner step {learner_step}, update {number}: loss {stats.loss:g}, gradient norm "
        f"{stats.grad_norm:g}; of {stats.n_rows} rows {rows}"
    )


def non_finite_weights(
    *, learner_step: int, checkpoint: int, config: Config
) -> NonFiniteWeightsError:
    """Make the error that ends the run. `checkpoint` is the newest's learner step, 0 if none."""
    start = f"the checkpoint of learner step {checkpoint}" if checkpoint else "the start"
    return NonFiniteWeightsError(
        f"the updates of learner step {learner_step} had finite gradients, but with "
        f"learner.learning_rate={config.learner.learning_rate:g} left weights that are not finite "
        "or give no finite log-probabilities. Nothing of this step was published or checkpointed: "
        f"the same command goes on from {start}. If it ends here again, use a lower "
        "learner.learning_rate"
    )


def check_batches(empty_in_a_row: int, *, success: float, filtered: Mapping[bytes, str]) -> None:
    """Raise StarvationError after too many empty batches, unless all tasks are solved.

    `filtered` maps the last batch's filtered groups to their reasons. Groups excluded by
    `offline.train_on` do not count as solved.
    """
    why, remedy = "every group's episodes were alike", "easier tasks, a larger algorithm.group_size"
    excluded = next((why for why in filtered.values() if "offline.train_on" in why), None)
    if excluded:
        why, remedy = excluded, "another offline.train_on, other groups"
    if empty_in_a_row > MAX_EMPTY_BATCHES and (success < SOLVED or excluded):
        raise StarvationError(
            f"{empty_in_a_row} batches in a row had no advantage to learn from, with success "
            f"{success:.2f}: {why}. Use {remedy}, or a better model"
        )


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
    checks = _checks(metrics, start_length=start_length, learner_step=learner_step, config=config)
    for name, beyond, figure, bound in [] if config.loss.policy == "behaviour_cloning" else checks:
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

"""What stops a run from going on blindly: updates that are not finite, batches without a signal,
and signs of a collapse. Pure functions.

A bad update (its loss or gradient is not finite) was skipped by the engine; `bad_update_line` names
its rows for the event, and `rows_query` finds them again. An alarm is a figure of a learner step
beyond a bound of the config; `collapse_alarms` says which began and which ended. Whether one is on
is itself a metric, `alarm/<name>`, 1 or 0, so that a resumed run knows it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from configs import Config
from learner.data.batch_loader import Update
from learner.training.engine import NonFiniteWeightsError
from learner.training.step_metrics import LENGTH
from learner.training.update_stats import UpdateStats
from store import uid_text

BAD_UPDATE = "bad update"
ALARM, ALARM_ENDED = "alarm", "alarm ended"
MAX_ROWS_NAMED = 100  # of one bad update; where more are bad it is the weights, not the rows
MAX_EMPTY_BATCHES = 10  # in a row; then nothing can be learned any more and the run says so
SOLVED = 0.99  # success above which empty batches are no trouble: every group wins in the same way
# What a resumed run has to know of the steps before it, recorded with their figures.
BAD_IN_A_ROW, EMPTY_IN_A_ROW = "learner/bad_updates_in_a_row", "learner/empty_batches_in_a_row"
START_STEPS = 5  # learner steps that say which response length is this run's
START_LENGTH = "tokens/response_per_row_at_start"
# Rows as `bad_update_line` names them, found by their keys: comparing texts with every step of a
# run would take minutes.
ROWS_QUERY = (
    "SELECT DISTINCT s.group_uid, s.traj_uid, s.step_index, s.version_min, s.version_max, "
    "s.reward, s.action_text, "
    "s.response_ids, s.response_logprobs FROM (SELECT "
    "string_split(unnest(regexp_extract_all(detail, "
    "'trajectory ([-0-9a-f]{36} step [0-9]+)', 1)), ' step ') AS bad FROM events WHERE what = 'bad "
    "update') "
    "JOIN steps s ON s.traj_uid = bad[1]::UUID AND s.step_index = bad[2]::INT"
)
EVENTS_QUERY = "SELECT logged_at, detail FROM events WHERE what = 'bad update'"


class StarvationError(RuntimeError):
    """No batch came in time, or none of the last batches had anything to learn from; the message
    says which and why.
    """


class BadUpdatesError(RuntimeError):
    """Too many optimizer updates in a row were not finite; the message ends with the query that
    shows their rows.
    """


class CollapseError(RuntimeError):
    """An alarm ended the run, as alarms.stop asked; the message says which. A checkpoint was
    written.
    """


def bad_update_line(update: Update, stats: UpdateStats, *, learner_step: int, number: int) -> str:
    """What was not finite, and the rows to blame: at most MAX_ROWS_NAMED, none where only their sum
    is not finite.

    learner step 7, update 1: loss inf, gradient norm inf; of 40 rows these are not finite: group
    6f1c…-… trajectory 0b2a…-… step 3, group …
    """
    names = [
        f"group {uid_text(row['group_uid'])} trajectory {uid_text(row['traj_uid'])} step "
        f"{row['step_index']}"
        for row in update.rows.select(["group_uid", "traj_uid", "step_index"])
        .take(pa.array(stats.bad_rows[:MAX_ROWS_NAMED], pa.int64()))
        .to_pylist()
    ]
    more = (
        f", and {len(stats.bad_rows) - len(names)} more" if len(stats.bad_rows) > len(names) else ""
    )
    rows = (
        f"these are not finite: {', '.join(names)}{more}" if names else "each by itself is finite"
    )
    return (
        f"learner step {learner_step}, update {number}: loss {stats.loss:g}, gradient norm "
        f"{stats.grad_norm:g}; "
        f"of {stats.n_rows} rows {rows}"
    )


def too_many_bad_updates(
    in_a_row: int, *, learner_step: int, rows_named: bool, config: Config
) -> BadUpdatesError:
    """The error to end the run with; its last part is a command line."""
    query = ROWS_QUERY if rows_named else EVENTS_QUERY
    return BadUpdatesError(
        f"{in_a_row} optimizer updates in a row, the last in learner step {learner_step}, had a "
        "loss or gradient that is not "
        f"finite, and learner.max_bad_updates={config.learner.max_bad_updates}; all were skipped. "
        "Look at what they have in "
        f"common, and lower learner.learning_rate if it is nothing: "
        f'gigpo sql {shlex.quote(config.run_dir)} "{query}"'
    )


def wrecked_policy(*, learner_step: int, checkpoint: int, config: Config) -> NonFiniteWeightsError:
    """The error to end the run with; `checkpoint` is the learner step of the newest, 0 without
    one.
    """
    rate = f"learner.learning_rate={config.learner.learning_rate:g}"
    return NonFiniteWeightsError(
        f"the updates of learner step {learner_step} had finite gradients, but with {rate} left "
        "weights that are not finite or "
        "give no finite log-probabilities. Nothing of this step was published or checkpointed: "
        "the same command goes on from "
        f"{f'the checkpoint of learner step {checkpoint}' if checkpoint else 'the start'}. If it "
        "ends here again, use a lower "
        "learner.learning_rate"
    )


def starved(config: Config, *, counts: object, waiting: Mapping[str, str]) -> StarvationError:
    """The error to end the run with; `waiting` says which component waits for what."""
    return StarvationError(
        f"no {config.learner.groups_per_step} complete groups within "
        f"{config.learner.starvation_timeout_s:g} s: "
        f"{counts}; waiting: {waiting}"
    )


def check_batches(empty_in_a_row: int, *, success: float, no_signal: Mapping[bytes, str]) -> None:
    """Raises StarvationError after too many batches without a signal, unless they have none because
    all is won.

    `no_signal`: of the last one, group uid -> why nothing of it is trained on. What is won and not
    wanted is not solved.
    """
    unwanted = next((why for why in no_signal.values() if "stored.train_on" in why), None)
    if empty_in_a_row > MAX_EMPTY_BATCHES and (success < SOLVED or unwanted):
        why = unwanted or "every group's episodes were alike"
        other = (
            "another stored.train_on, other groups"
            if unwanted
            else "easier tasks, a larger algorithm.group_size"
        )
        raise StarvationError(
            f"{empty_in_a_row} batches in a row had no advantage to learn from, with success "
            f"{success:.2f}: {why}. "
            f"Use {other}, or a better model"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarms:
    """Of one learner step."""

    # `alarm/<name>`: 1 on, 0 off; and the length at the start: to be recorded with its metrics
    values: Mapping[str, float]
    began: list[str]  # a line each; an alarm that goes on is not said again
    ended: list[str]


def collapse_alarms(
    metrics: Mapping[str, float], *, before: Mapping[str, float], learner_step: int, config: Config
) -> Alarms:
    """The alarms of a learner step with these `metrics`; `before` are the figures of the step
    before, as the store has them.

    A figure that is missing (nothing was trained on) or not finite (a bad update, which is said
    already) leaves its alarm as it was. Behaviour cloning has none: it starts far from the policy
    it clones.
    """
    length = metrics[LENGTH]
    values = {
        START_LENGTH: length_at_start(
            length, before=before.get(START_LENGTH), learner_step=learner_step
        )
    }
    began: list[str] = []
    ended: list[str] = []
    if config.loss.policy == "behaviour_cloning":
        return Alarms(values=values, began=began, ended=ended)
    for check in _checks(
        metrics, start_length=values[START_LENGTH], learner_step=learner_step, config=config
    ):
        was_on = before.get(check.name, 0.0) > 0.0
        is_on = was_on if check.beyond is None else check.beyond
        values[check.name] = float(is_on)
        if is_on and not was_on:
            began.append(f"learner step {learner_step}: {check.what} is {check.bound}")
        elif was_on and not is_on:
            ended.append(f"learner step {learner_step}: {check.what} is no longer {check.bound}")
    return Alarms(values=values, began=began, ended=ended)


def length_at_start(length: float, *, before: float | None, learner_step: int) -> float:
    """Mean response tokens per row over the run's first START_STEPS learner steps, or those there
    were until now.

    From what it was a step `before`, which the store has, so that a resumed run goes on with it:
    lengths 10, 20, 60, 10, 0, 99 give 10, 15, 30, 25, 20, 20. A run that has none yet begins with
    its length now.
    """
    if before is None:
        return length
    return before if learner_step > START_STEPS else before + (length - before) / learner_step


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    name: str
    beyond: bool | None  # None: nothing can be said
    what: str  # "loss/ess 0.05"
    bound: str  # "below alarms.ess_below=0.1"


def _checks(
    metrics: Mapping[str, float], *, start_length: float, learner_step: int, config: Config
) -> Iterator[_Check]:
    bounds = config.alarms
    for name, bound, is_below in (
        ("ess", bounds.ess_below, True),
        ("entropy", bounds.entropy_below, True),
        ("mismatch_kl", bounds.mismatch_kl_above, False),
    ):
        side = "below" if is_below else "above"
        value = metrics.get(f"loss/{name}", math.nan)
        beyond = (value < bound if is_below else value > bound) if math.isfinite(value) else None
        what, limit = f"loss/{name} {value:.3g}", f"{side} alarms.{name}_{side}={bound:g}"
        yield _Check(name=f"alarm/{name}", beyond=beyond, what=what, bound=limit)
    length, factor = metrics[LENGTH], bounds.length_factor
    yield _Check(
        name="alarm/length",
        beyond=learner_step > START_STEPS
        and not start_length / factor <= length <= start_length * factor,
        what=f"{LENGTH} {length:.3g}",
        bound=f"alarms.length_factor={factor:g} times longer or shorter than the first {START_STEPS} steps' {start_length:.3g}",
    )

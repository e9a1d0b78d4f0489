"""End a run before it wastes time: bad updates, and batches without an advantage.

A bad update has a loss or gradient that is not finite. The engine skips it. An event BAD_UPDATE
describes it for people. An event BAD_ROWS names its rows as a JSON object, for the view `bad_rows`:

    {"learner_step": 7, "number": 1, "rows": [{"traj_uid": "0b2a…", "step_index": 3}]}
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from configs import Config
from learner.data.batch_loader import PreparedBatch
from learner.data.updates import Update
from learner.interface import BadUpdatesError, NonFiniteWeightsError, StarvationError
from learner.training.alarms import Alarms, collapse_alarms
from learner.training.step_metrics import UpdateStats
from store import uid_text

BAD_UPDATE, BAD_ROWS = "bad update", "bad rows"
ALARM, ALARM_ENDED = "alarm", "alarm ended"
MAX_ROWS_NAMED = 100  # of one bad update; if more rows are bad, the weights are, not the rows
# Updates in a row that are skipped because loss or gradient is not finite; one more ends the run.
MAX_BAD_UPDATES = 3
MAX_EMPTY_BATCHES = 10  # in a row, before the run ends: it is starved, not unlucky
SOLVED = 0.99  # success above which batches may be empty: every episode of a group wins
# Counters recorded with each step's figures, because a resumed run continues them.
BAD_IN_A_ROW, EMPTY_IN_A_ROW = "learner/bad_updates_in_a_row", "learner/empty_batches_in_a_row"
CHECKS_PER_TIMEOUT = 4  # of the held-out episodes, within one starvation timeout
ROWS_QUERY = (
    "SELECT DISTINCT group_uid, traj_uid, step_index, version_min, version_max, reward, "
    "action_text, response_ids, response_logprobs "
    "FROM bad_rows JOIN steps USING (traj_uid, step_index)"
)
EVENTS_QUERY = "SELECT logged_at, detail FROM events WHERE what = 'bad update'"


class StarvationDeadline:
    """The end of the wait for a batch, put off while something else is done.

    Held-out episodes are played before training groups, and an evaluation may take longer than
    `timeout_s`. A batch that is refilled gets its groups one after the other.
    """

    def __init__(self, timeout_s: float, *, progress: Hashable) -> None:
        self.timeout_s, self._progress = timeout_s, progress
        self._deadline_s = time.monotonic() + timeout_s
        self._check_at_s = time.monotonic() + timeout_s / CHECKS_PER_TIMEOUT

    def check_is_due(self) -> bool:
        return time.monotonic() > self._check_at_s

    def has_passed(self, progress: Hashable) -> bool:
        """Return whether time is up. A change of `progress` starts it anew."""
        now_s = time.monotonic()
        self._check_at_s = now_s + self.timeout_s / CHECKS_PER_TIMEOUT
        if progress != self._progress:
            self._progress, self._deadline_s = progress, now_s + self.timeout_s
        return now_s > self._deadline_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BadUpdate:
    """A skipped update, as its two events describe it."""

    line: str  # of BAD_UPDATE
    rows: str | None  # of BAD_ROWS; None: each row by itself is finite


class RunHealth:
    """Counters that end a run which goes wrong. A resumed run continues them from the store."""

    def __init__(self, config: Config, *, figures: Mapping[str, float]) -> None:
        """Go on from `figures`, which are those of the last learner step as the store has them."""
        self.config, self._figures = config, figures
        self._bad_updates = int(figures.get(BAD_IN_A_ROW, 0))
        self._empty_batches = int(figures.get(EMPTY_IN_A_ROW, 0))

    def check_batch(self, batch: PreparedBatch) -> None:
        """Raise StarvationError after too many batches in a row without an advantage."""
        teaches = batch.rows.num_rows or batch.replayed.num_rows
        self._empty_batches = 0 if teaches else self._empty_batches + 1
        success = batch.summary.success
        check_batches(self._empty_batches, success=success, unselected=batch.unselected)

    def bad_updates(
        self, batch: PreparedBatch, updates: list[UpdateStats], *, learner_step: int
    ) -> Iterator[BadUpdate]:
        """Yield each bad update. Raises BadUpdatesError after too many in a row."""
        for number, (update, stats) in enumerate(zip(batch.updates, updates, strict=True), start=1):
            if not stats.skipped:
                self._bad_updates = 0
                continue
            self._bad_updates += 1
            yield describe_bad_update(update, stats, learner_step=learner_step, number=number)
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


def describe_bad_update(
    update: Update, stats: UpdateStats, *, learner_step: int, number: int
) -> BadUpdate:
    """Describe a bad update and name up to MAX_ROWS_NAMED rows; none if only their sum is bad.

    learner step 7, update 1: loss inf, gradient norm inf; 2 of 40 rows are not finite: see the view
    bad_rows
    """
    rows = None
    which = f"each of {stats.n_rows} rows by itself is finite"
    if stats.bad_rows:
        which = (
            f"{len(stats.bad_rows)} of {stats.n_rows} rows are not finite: see the view bad_rows"
        )
        named = pa.array(stats.bad_rows[:MAX_ROWS_NAMED], pa.int64())
        keys = update.rows.select(["traj_uid", "step_index"]).take(named).to_pylist()
        named_rows = [{**key, "traj_uid": uid_text(key["traj_uid"])} for key in keys]
        rows = json.dumps({"learner_step": learner_step, "number": number, "rows": named_rows})
    line = (
        f"learner step {learner_step}, update {number}: loss {stats.loss:g}, gradient norm "
        f"{stats.grad_norm:g}; {which}"
    )
    return BadUpdate(line=line, rows=rows)


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


def check_batches(empty_in_a_row: int, *, success: float, unselected: Mapping[bytes, str]) -> None:
    """Raise StarvationError after too many empty batches, unless all tasks are solved.

    `unselected` maps the last batch's groups that `offline.train_on` excludes to their reasons.
    They do not count as solved.
    """
    why, remedy = "every group's episodes were alike", "easier tasks, a larger algorithm.group_size"
    excluded = next(iter(unselected.values()), None)
    if excluded:
        why, remedy = excluded, "another offline.train_on, other groups"
    if empty_in_a_row > MAX_EMPTY_BATCHES and (success < SOLVED or excluded):
        raise StarvationError(
            f"{empty_in_a_row} batches in a row had no advantage to learn from, with success "
            f"{success:.2f}: {why}. Use {remedy}, or a better model"
        )

"""Say in a few sentences what a run did: the first panel of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from analysis.evaluation_stats import Z_95, interval, success
from analysis.report import END_STEPS, ENDS
from analysis.run_status import duration
from analysis.speed_limit import speed_limit
from analysis.view.heldout_rounds import heldout_tasks
from analysis.view.html import html, number, percent

# Intervals of training success go by how much groups differ: episodes of one task are alike.
SUMMARY = (
    """
WITH consumed AS (
    SELECT learner_step, n_won / n_members AS rate, staleness
    FROM lineage JOIN groups USING (group_uid)
    WHERE batch_state = 'trained' AND live AND lineage.source IS NULL AND n_members > 0),
ends AS (
    SELECT *,"""
    + ENDS
    + """
    FROM consumed),
training AS (
    SELECT avg(rate) FILTER (is_first) AS first_success,
           stddev_samp(rate) FILTER (is_first) / sqrt(count(*) FILTER (is_first)) AS first_error,
           avg(rate) FILTER (is_last) AS last_success,
           stddev_samp(rate) FILTER (is_last) / sqrt(count(*) FILTER (is_last)) AS last_error,
           max(learner_step) - min(learner_step) + 1 AS n_steps,
           max(staleness) AS oldest, avg(staleness) AS mean_staleness FROM ends),
heldout AS (
    FROM groups WHERE split = 'heldout' AND state = 'complete' AND n_members > 0),
evaluated AS (
    SELECT task_id, sum(n_won)::BIGINT AS won, sum(n_members)::BIGINT AS played
    FROM newest_results GROUP BY task_id),
before AS (
    SELECT sum(n_won) / sum(n_members) AS first_heldout,
           any_value(evaluated_version) AS first_version
    FROM heldout WHERE evaluated_version = (SELECT min(evaluated_version) FROM heldout)),
alarms AS (
    SELECT replace(name, 'alarm/', '') AS alarm, arg_max(value, learner_step) = 1 AS is_on,
           sum(value) AS steps_on FROM metrics WHERE name LIKE 'alarm/%' GROUP BY name),
times AS (
    SELECT sum(value) FILTER (name = 'time/step_s') AS step_s,
           avg(value) FILTER (name = 'learner/idle_fraction') AS waits FROM metrics),
played AS (
    SELECT count(*) AS n_groups, count(*) FILTER (state = 'trained') AS trained,
           count(*) FILTER (state = 'filtered') AS filtered,
           count(*) FILTER (state = 'stale') AS stale,
           count(*) FILTER (state = 'abandoned') AS abandoned
    FROM groups WHERE split <> 'heldout')
SELECT training.*, times.*, played.*, before.*,
       (SELECT max(learner_step) FROM lineage WHERE batch_state = 'trained' AND live)
           AS learner_step,
       (SELECT list({'task_id': task_id, 'won': won, 'played': played} ORDER BY task_id)
        FROM evaluated) AS heldout,
       (SELECT any_value(evaluated_version) FROM newest_results) AS heldout_version,
       (SELECT list(alarm ORDER BY alarm) FROM alarms WHERE is_on) AS alarms_on,
       (SELECT list(alarm ORDER BY alarm) FROM alarms WHERE steps_on > 0) AS alarms_ever,
       (SELECT count(*) FROM staleness_violations) AS too_stale,
       (SELECT count(*) FROM task_overlap) AS in_both_splits
FROM training, times, played, before
"""
)


def show_summary(table: pa.Table) -> Markup:
    """Show the sentences, each after the question that it answers."""
    (row,) = table.to_pylist()
    return html("report_summary.html", answers=answers(row))


def answers(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (question, answer) pairs for the row of SUMMARY."""
    return [
        ("Did it learn?", " ".join([_training(row), _heldout(row)])),
        ("Is it stable?", _stability(row)),
        ("What limits it?", _limit(row)),
        ("What was dropped?", _dropped(row)),
        ("Can it be trusted?", _trust(row)),
    ]


def _training(row: Mapping[str, Any]) -> str:
    if row["first_success"] is None:
        return "No batch of the run's own groups was trained on."
    last = _with_interval(row["last_success"], row["last_error"])
    if row["n_steps"] <= END_STEPS:
        steps = "learner step" if row["n_steps"] == 1 else "learner steps"
        return f"Training tasks: {last} won, over {row['n_steps']} {steps}."
    first = _with_interval(row["first_success"], row["first_error"])
    apart = abs(row["last_success"] - row["first_success"])
    error = Z_95 * ((row["last_error"] or 0) ** 2 + (row["first_error"] or 0) ** 2) ** 0.5
    certain = "" if apart > error else " The difference may be chance."
    return (
        f"Training tasks: {first} won in the first {END_STEPS} learner steps, {last} in the last "
        f"{END_STEPS} of {row['n_steps']}.{certain}"
    )


def _heldout(row: Mapping[str, Any]) -> str:
    if not row["heldout"]:
        return "Nothing was played on held-out tasks."
    tasks = heldout_tasks(row["heldout"])
    low, high = interval(tasks)
    won, played = sum(task.won for task in tasks), sum(task.played for task in tasks)
    before = ""
    if row["first_version"] != row["heldout_version"]:
        before = f", after {percent(row['first_heldout'])} by version {row['first_version']}"
    gap = ""
    last, error = row["last_success"], row["last_error"]
    if last is not None and error is not None and last - Z_95 * error > high:
        gap = " It does better on the tasks that it trains on."
    return (
        f"Held-out tasks: {percent(success(tasks))} won by version {row['heldout_version']} "
        f"({percent(low)} to {percent(high)}; {won} of {played} episodes){before}.{gap}"
    )


def _stability(row: Mapping[str, Any]) -> str:
    if row["alarms_on"]:
        return f"On at the newest learner step: {_named(row['alarms_on'])}."
    if row["alarms_ever"]:
        return f"No alarm is on now. Some were on before: {_named(row['alarms_ever'])}."
    return "No alarm was ever on."


def _limit(row: Mapping[str, Any]) -> str:
    if not row["step_s"] or row["waits"] is None:
        return "No learner step was timed."
    limit = speed_limit(learner_waits=row["waits"], workers_wait=None)
    return f"The {limit}, over {duration(row['step_s'])}."


def _dropped(row: Mapping[str, Any]) -> str:
    dropped = [(row[state], state) for state in ("filtered", "stale", "abandoned") if row[state]]
    if not dropped:
        return f"None of {number(row['n_groups'])} groups."
    parts = ", ".join(f"{number(count)} {state}" for count, state in dropped)
    total = sum(count for count, _ in dropped)
    return (
        f"{percent(total / row['n_groups'])} of {number(row['n_groups'])} groups: {parts}; "
        f"{number(row['trained'])} were trained on."
    )


def _trust(row: Mapping[str, Any]) -> str:
    faults = []
    if row["too_stale"]:
        faults.append(f"{row['too_stale']} groups were trained on although they were too stale")
    if row["in_both_splits"]:
        faults.append(f"{row['in_both_splits']} tasks were both trained on and held out")
    if faults:
        return f"No: {' and '.join(faults)}."
    staleness = ""
    if row["oldest"] is not None:
        staleness = (
            f" Weights that played were {row['mean_staleness']:.1f} versions old on average, "
            f"{row['oldest']} at most."
        )
    return f"No group was too stale, no task is in both splits.{staleness}"


def _named(alarms: Sequence[str]) -> str:
    return ", ".join(alarms)


def _with_interval(value: float, error: float | None) -> str:
    if error is None:
        return percent(value)
    low, high = max(0.0, value - Z_95 * error), min(1.0, value + Z_95 * error)
    return f"{percent(value)} ({percent(low)} to {percent(high)})"

"""Print the summary of a run: success on training and held-out tasks, and where its files are."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console

import store
from analysis.evaluation_stats import interval, newest_round
from analysis.run_status import duration, success_metric
from configs import Config, is_offline
from store import RunLayout, StoreError

END_STEPS = 5  # learner steps averaged at either end of the training curve

# Columns of a query with a row for each learner step, or some: is it at an end of the curve?
ENDS = f"""
    learner_step < min(learner_step) OVER () + {END_STEPS} AS is_first,
    learner_step > max(learner_step) OVER () - {END_STEPS} AS is_last"""
TRAINING = f"""
SELECT
    avg(value) FILTER (is_first),
    avg(value) FILTER (is_last),
    max(learner_step) - min(learner_step) + 1
FROM (SELECT *, {ENDS} FROM metrics WHERE name = '{{}}')
"""
TIMES = "SELECT count(*), sum(value), median(value) FROM metrics WHERE name = 'time/step_s'"
NEWEST = "SELECT arg_max(value, (learner_step, policy_version)) FROM metrics WHERE name = '{}'"
EVALUATED = """
SELECT count(*) FROM versions AS v JOIN metrics AS m ON m.policy_version = v.version
WHERE v.learner_step >= {} AND m.name = 'heldout/success'
"""
UNPLAYED = "SELECT count(*) FROM newest_round WHERE state <> 'complete'"
PLAYED = "SELECT count(*), sum(n_steps) FROM trajectories"


def trained_to(config: Config) -> int:
    """Return the newest checkpoint's learner step; 0 without one.

    It is also 0 for an unreadable catalog: the process that opens it next says why.
    """
    root = Path(config.run_dir)
    if RunLayout.exists(root):
        with suppress(StoreError):
            points = store.restart_points(RunLayout.open(root))
            return max((point.learner_step for point in points), default=0)
    return 0


def is_finished(config: Config) -> bool:
    """Return whether the run is at its last learner step and its last evaluation is done.

    A run that plays nothing has no evaluation.
    """
    if trained_to(config) < config.learner.steps:
        return False
    if is_offline(config):
        return True
    with store.open_run(config.run_dir) as reader:
        return bool(_row(reader, EVALUATED.format(config.learner.steps))[0])


def show_report(config: Config, console: Console, *, report_file: Path | None = None) -> None:
    """Print the summary of a run. `report_file` is the HTML file that shows more of it."""
    with store.open_run(config.run_dir) as reader:
        lines = [
            *_training_lines(config, reader),
            *_heldout_lines(config.run_dir, reader),
            *_time_lines(reader),
            *_file_lines(config, reader, report_file=report_file),
        ]
    console.print()
    for line in lines:
        console.print(line)


def _training_lines(config: Config, reader: store.Reader) -> list[str]:
    """Return the success at either end of training, and of each environment."""
    first, last, learner_steps = _row(reader, TRAINING.format(success_metric(config)))
    lines = []
    if first is not None:
        figures = f"{first:.2f} at the start, {last:.2f} at the end"
        if learner_steps <= END_STEPS:
            figures = f"{first:.2f}"
        whose = "of the offline groups trained on" if is_offline(config) else "on training tasks"
        lines.append(f"success {whose}: {figures}")
    return lines + [f"  {name}: {_of_environment(reader, name)}" for name in config.environments]


def _heldout_lines(run: str, reader: store.Reader) -> list[str]:
    """Return the success of the newest evaluation round, and how much of it was not played."""
    heldout = newest_round(reader)
    if not heldout:
        return [f"nothing was played on held-out tasks yet:  gigpo evaluate {run}"]
    low, high = interval(heldout)
    won, played = sum(task.won for task in heldout), sum(task.played for task in heldout)
    lines = [
        f"success on held-out tasks: {won / played:.2f}  "
        f"(95% interval {low:.2f} to {high:.2f}, {won} of {played} episodes)"
    ]
    (unplayed,) = _row(reader, UNPLAYED)
    if unplayed:
        lines.append(
            f"  of an unfinished round: {unplayed} episodes were not played, and won episodes "
            "end sooner"
        )
    return lines


def _time_lines(reader: store.Reader) -> list[str]:
    n_timed, total_s, step_s = _row(reader, TIMES)
    if not n_timed:
        return []
    took = f"{n_timed} learner steps took {duration(total_s)}"
    return [f"{took}, one of them {step_s:.2f} s (median)"]


def _file_lines(config: Config, reader: store.Reader, *, report_file: Path | None) -> list[str]:
    """Return what the run has stored, and the commands that look at it."""
    run, metric = config.run_dir, success_metric(config)
    trajectories, steps = _row(reader, PLAYED)
    curve = f"SELECT learner_step, value FROM metrics WHERE name = '{metric}' ORDER BY learner_step"
    shown = [] if report_file is None else [f"  report     {report_file} (open it in a browser)"]
    return [
        f"{trajectories} trajectories, {steps} steps in {run}",
        *shown,
        f"  look       gigpo view {run}",
        f'  ask        gigpo sql {run} "{curve}"',
        f"  curves     tensorboard --logdir {run}/tensorboard",
        f"  weights    {run}/weights (Hugging Face directories, newest last)",
        f"  evaluate   gigpo evaluate {run}",
        f"  logs       {run}/logs",
    ]


def _of_environment(reader: store.Reader, name: str) -> str:
    """Return the success of one environment as text: at the end of training, and held out."""
    _, trained, _ = _row(reader, TRAINING.format(f"train/success/{name}"))
    (heldout,) = _row(reader, NEWEST.format(f"heldout/success/{name}"))
    shown = []
    for value, whose in ((trained, "training"), (heldout, "held-out")):
        if value is not None:
            shown.append(f"{value:.2f} on {whose} tasks")
    return ", ".join(shown) or "nothing was played yet"


def _row(reader: store.Reader, query: str) -> tuple:
    table = reader.sql(query)
    assert table.num_rows == 1, "every query here is an aggregate"
    return tuple(column[0].as_py() for column in table.columns)

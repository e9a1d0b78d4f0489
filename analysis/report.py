"""What a run says at its end, asked of its store: success on training and held-out tasks, and where
everything is.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.console import Console

import store
from analysis import evaluation_stats as evaluation
from analysis.run_status import duration
from configs import Config, is_offline
from store import RunLayout, StoreError

FIRST_AND_LAST_STEPS = 5  # learner steps averaged at either end of the training curve

TRAINING = f"""
SELECT avg(value) FILTER (learner_step <= {FIRST_AND_LAST_STEPS}),
       avg(value) FILTER (learner_step > (SELECT max(learner_step) FROM metrics) - {FIRST_AND_LAST_STEPS}),
       count(DISTINCT learner_step)
FROM metrics WHERE name = '{{}}'
"""
TIMES = "SELECT count(*), sum(value), median(value) FROM metrics WHERE name = 'time/step_s'"
EVALUATED = """
SELECT count(*) FROM versions v JOIN metrics m ON m.policy_version = v.version
WHERE v.learner_step >= {} AND m.name = 'heldout/success'
"""

UNPLAYED = """SELECT count(*) FROM groups WHERE split = 'heldout' AND state <> 'complete'
AND purpose_version = (SELECT max(purpose_version) FROM groups WHERE split = 'heldout')"""


def trained_to(config: Config) -> int:
    """Learner step of the newest checkpoint; 0 without one, or where the catalog cannot be read:
    its next owner says why.
    """
    root = Path(config.run_dir)
    if RunLayout.exists(root):
        with suppress(StoreError):
            return max(
                (point.learner_step for point in store.restart_points(RunLayout.open(root))),
                default=0,
            )
    return 0


def is_finished(config: Config) -> bool:
    """Whether the run is at its last learner step and its held-out evaluation is done; one that
    plays nothing has none.
    """
    if trained_to(config) < config.learner.steps:
        return False
    if is_offline(config):
        return True
    with store.open_run(config.run_dir) as reader:
        return bool(_row(reader, EVALUATED.format(config.learner.steps))[0])


def show_report(config: Config, console: Console) -> None:
    success = "offline/success" if is_offline(config) else "train/success"
    with store.open_run(config.run_dir) as reader:
        heldout = evaluation.newest_round(reader)
        (unplayed,) = _row(reader, UNPLAYED)
        first, last, learner_steps = _row(reader, TRAINING.format(success))
        n_timed, total_s, step_s = _row(reader, TIMES)
        trajectories, steps = _row(reader, "SELECT count(*), sum(n_steps) FROM trajectories")
    console.print()
    if first is not None:
        is_one_window = learner_steps <= FIRST_AND_LAST_STEPS
        figures = (
            f"{first:.2f}" if is_one_window else f"{first:.2f} at the start, {last:.2f} at the end"
        )
        whose = "of the offline rollouts trained on" if is_offline(config) else "on training tasks"
        console.print(f"success {whose}: {figures}")
    if heldout:
        low, high = evaluation.interval(heldout)
        won, played = sum(task.won for task in heldout), sum(task.played for task in heldout)
        console.print(
            f"success on held-out tasks: {won / played:.2f}  "
            f"(95% interval {low:.2f} to {high:.2f}, {won} of {played} episodes)",
        )
        if unplayed:
            console.print(
                f"  of an unfinished round: {unplayed} episodes were not played, and those that "
                "are won end sooner"
            )
    else:
        console.print(f"nothing was played on held-out tasks yet:  gigpo evaluate {config.run_dir}")
    if n_timed:
        console.print(
            f"{n_timed} learner steps took {duration(total_s)}, one of them {step_s:.2f} s (median)"
        )
    run = config.run_dir
    curve = (
        f"SELECT learner_step, value FROM metrics WHERE name = '{success}' ORDER BY learner_step"
    )
    console.print(
        f"{trajectories} trajectories, {steps} steps in {run}\n"
        f'  ask        gigpo sql {run} "{curve}"\n'
        f"  curves     tensorboard --logdir {run}/tensorboard\n"
        f"  weights    {run}/weights (Hugging Face directories, newest last)\n"
        f"  evaluate   gigpo evaluate {run}\n"
        f"  logs       {run}/logs",
    )


def _row(reader: store.Reader, query: str) -> tuple:
    table = reader.sql(query)
    assert table.num_rows == 1, "every query here is an aggregate"
    return tuple(column[0].as_py() for column in table.columns)

"""Say how far a run is, for `gigpo status`: learner step, success, time left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import configs
import store
from configs import Config, ConfigError, is_offline
from store import RunLayout

RECENT_STEPS = 5  # learner steps that the shown success is averaged over
# A learner step's time is the median over the intervals between these, so a stop of the run
# counts as one interval.
TIMED_STEPS = 11
MINUTE_S, HOUR_S = 60.0, 3600.0

NEWEST = """
SELECT
    (SELECT coalesce(max(learner_step), 0) FROM lineage WHERE batch_state = 'trained' AND live)
        AS learner_step,
    (SELECT max(version) FROM versions) AS version,
    (SELECT count(*) FROM components WHERE name = 'learner') > 0 AS has_learner
"""
STEP_TIME = f"""
WITH settled AS (
    SELECT learner_step, epoch_us(max(trained_at)) / 1e6 AS at_s FROM lineage
    WHERE batch_state = 'trained' AND live
    GROUP BY learner_step ORDER BY learner_step DESC LIMIT {TIMED_STEPS}
),
intervals AS (SELECT at_s - lag(at_s) OVER (ORDER BY learner_step) AS step_s FROM settled)
SELECT median(step_s) AS step_s FROM intervals
"""
SUCCESS = """
SELECT avg(value) AS success FROM (
    SELECT value FROM metrics WHERE name = '{name}' ORDER BY learner_step DESC LIMIT {steps}
)
"""
HELDOUT = """
SELECT
    learner_step,
    any_value(value) FILTER (name = 'heldout/success') AS success,
    any_value(value) FILTER (name = 'heldout/episodes') AS episodes
FROM metrics WHERE name IN ('heldout/success', 'heldout/episodes')
GROUP BY learner_step, policy_version
ORDER BY learner_step DESC, policy_version DESC LIMIT 1
"""
ROUND = """
SELECT count(*) AS groups, count(*) FILTER (state = 'open') AS to_play FROM newest_round
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heldout:
    """The newest finished evaluation."""

    learner_step: int  # of the evaluated weights
    success: float
    episodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The progress of a run."""

    learner_step: int  # the newest trained one
    version: int | None  # of the newest weights
    learns: bool  # False: it only plays held-out tasks
    step_s: float | None  # time of a recent learner step, with waits; None before the second
    success: float | None  # over the last RECENT_STEPS learner steps
    heldout: Heldout | None
    round_groups: int  # groups of the newest evaluation round
    round_to_play: int  # groups of that round which are not played yet


def progress_lines(run: Path, reader: store.Reader, *, is_driven: bool) -> list[str]:
    """Return a line on the learner step and the time left, and a line on the success.

    `is_driven`: a process drives the run now. Raises StoreError.
    """
    try:
        config = config_of(run)
    except ConfigError as error:  # the figures of a run of another version can still be read
        standing = standing_of(reader, Config())
        return [
            f"learner step {standing.learner_step}, newest version {standing.version}",
            str(error),
        ]
    standing = standing_of(reader, config)
    return [
        _progress_line(standing, config, is_driven=is_driven),
        _success_line(standing, config),
    ]


def config_of(run: Path) -> Config:
    """Return the settings of the run's newest start. Raises ConfigError if they do not fit."""
    return configs.from_yaml(RunLayout.open(run).newest_settings())


def standing_of(reader: store.Reader, config: Config) -> Standing:
    """Read how far a run is. Raises StoreError."""
    (newest,) = reader.rows(NEWEST)
    (timed,) = reader.rows(STEP_TIME)
    (recent,) = reader.rows(SUCCESS.format(name=success_metric(config), steps=RECENT_STEPS))
    evaluated = reader.records(HELDOUT, Heldout)
    (newest_round,) = reader.rows(ROUND)
    return Standing(
        learner_step=newest["learner_step"],
        version=newest["version"],
        learns=newest["has_learner"] or newest["learner_step"] > 0,
        step_s=timed["step_s"],
        success=recent["success"],
        heldout=evaluated[0] if evaluated else None,
        round_groups=newest_round["groups"],
        round_to_play=newest_round["to_play"],
    )


def success_metric(config: Config) -> str:
    """Return the metric with the success of the groups that the run trains on."""
    return "offline/success" if is_offline(config) else "train/success"


def _progress_line(standing: Standing, config: Config, *, is_driven: bool) -> str:
    steps, step = config.learner.steps, standing.learner_step
    clones = config.loss.policy == "behaviour_cloning"
    at = f"learner step {step} of {steps}, newest version {standing.version}"
    n_played = standing.round_groups - standing.round_to_play
    evaluation = f"{n_played} of {standing.round_groups} held-out episodes played"
    if standing.version is None:
        state = "starting" if is_driven else "stopped"
        return f"{state}: there are no weights yet, so no learner step of {steps}"
    if not standing.learns and standing.round_groups:
        return f"evaluation: {evaluation}"
    if step < steps and not is_driven:
        return f"stopped: {at}"
    if step < steps:
        left = "not known yet"
        if standing.step_s is not None:
            left = f"about {duration((steps - step) * standing.step_s)}"
        return f"{'cloning' if clones else 'training'}: {at}; time left: {left}"
    is_evaluated = standing.heldout is not None and standing.heldout.learner_step >= steps
    if is_evaluated or is_offline(config) or clones:
        return f"finished: {at}"
    if not is_driven:
        return f"trained, not evaluated: {at}"
    if not standing.round_to_play:
        evaluation = "the held-out tasks are next"
    return f"evaluating: {at}; {evaluation}"


def _success_line(standing: Standing, config: Config) -> str:
    found = []
    if standing.success is not None:
        whose = "on training tasks"
        if config.loss.policy == "behaviour_cloning":
            whose = "of the episodes that are cloned"
        elif is_offline(config):
            whose = "of the offline groups trained on"
        found.append(
            f"{standing.success:.2f} {whose} (mean of the last {RECENT_STEPS} learner steps)"
        )
    if (heldout := standing.heldout) is not None:
        found.append(
            f"{heldout.success:.2f} on held-out tasks (learner step {heldout.learner_step}, "
            f"{heldout.episodes:.0f} episodes)"
        )
    return f"success: {', '.join(found) or 'not known before the first learner step'}"


def duration(seconds: float) -> str:
    """Return "90 s", "12 min" or "3 h 5 min"."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    minutes = round(seconds / MINUTE_S)
    return f"{minutes // 60} h {minutes % 60} min"

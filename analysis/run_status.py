"""Tells how far a run is, from its store: learner step of how many, success, time left. For
`gigpo status`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import configs
import store
from configs import Config, ConfigError, is_offline
from store import CONFIG_FILE, RunLayout, read_run_file

RECENT_STEPS = 5  # learner steps that the shown success is averaged over
# the median over their intervals is the time of a learner step: a stop in between is one interval
TIMED_STEPS = 11
MINUTE_S, HOUR_S = 60.0, 3600.0

NEWEST = """
SELECT (SELECT coalesce(max(learner_step), 0) FROM lineage WHERE batch_state = 'trained' AND live) AS learner_step,
       (SELECT max(version) FROM versions) AS version,
       (SELECT count(*) FROM components WHERE name = 'learner') > 0 AS learns
"""
STEP_TIME = f"""
WITH settled AS (
    SELECT learner_step, epoch_us(max(trained_at)) / 1e6 AS at_s FROM lineage
    WHERE batch_state = 'trained' AND live GROUP BY learner_step ORDER BY learner_step DESC LIMIT {TIMED_STEPS}
),
between_steps AS (SELECT at_s - lag(at_s) OVER (ORDER BY learner_step) AS step_s FROM settled)
SELECT median(step_s) AS step_s FROM between_steps
"""
SUCCESS = """
SELECT avg(value) AS success FROM (
    SELECT value FROM metrics WHERE name = '{name}' ORDER BY learner_step DESC LIMIT {steps})
"""
HELDOUT = """
SELECT learner_step, any_value(value) FILTER (name = 'heldout/success') AS success,
       any_value(value) FILTER (name = 'heldout/episodes') AS episodes
FROM metrics WHERE name IN ('heldout/success', 'heldout/episodes')
GROUP BY learner_step, policy_version ORDER BY learner_step DESC, policy_version DESC LIMIT 1
"""
ROUND = """
SELECT count(*) AS groups, count(*) FILTER (state = 'open') AS to_play FROM groups
WHERE split = 'heldout' AND purpose_version = (SELECT max(purpose_version) FROM groups WHERE split = 'heldout')
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heldout:
    """The newest finished evaluation."""

    learner_step: int  # that made the weights
    success: float
    episodes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How far a run is."""

    learner_step: int  # the last one that was trained
    version: int | None  # the newest weights
    learns: bool  # False: it only plays held-out tasks
    step_s: float | None  # time of a recent learner step, waits included; None before the second
    success: float | None  # over the last RECENT_STEPS learner steps
    heldout: Heldout | None
    round_groups: int  # in the newest evaluation
    round_to_play: int  # of those


def standing_of(reader: store.Reader, config: Config) -> Standing:
    """Ask the store. Raises StoreError."""
    (newest,) = reader.rows(NEWEST)
    (timed,) = reader.rows(STEP_TIME)
    name = "offline/success" if is_offline(config) else "train/success"
    (recent,) = reader.rows(SUCCESS.format(name=name, steps=RECENT_STEPS))
    evaluated = reader.rows(HELDOUT)
    (newest_round,) = reader.rows(ROUND)
    return Standing(
        learner_step=newest["learner_step"],
        version=newest["version"],
        learns=newest["learns"] or newest["learner_step"] > 0,
        step_s=timed["step_s"],
        success=recent["success"],
        heldout=Heldout(**evaluated[0]) if evaluated else None,
        round_groups=newest_round["groups"],
        round_to_play=newest_round["to_play"],
    )


def progress_lines(run: Path, reader: store.Reader, *, is_driven: bool) -> list[str]:
    """Say the learner step, the time left and the success, a line each. Raises StoreError."""
    try:
        config = config_of(run)
    except ConfigError as error:  # a run of older code: its figures are still there
        standing = standing_of(reader, Config())
        return [
            f"learner step {standing.learner_step}, newest version {standing.version}",
            str(error),
        ]
    standing = standing_of(reader, config)
    return [_where(standing, config, is_driven=is_driven), _success(standing, config)]


def _success(standing: Standing, config: Config) -> str:
    success = []
    if standing.success is not None:
        whose = "of the offline rollouts trained on" if is_offline(config) else "on training tasks"
        if config.loss.policy == "behaviour_cloning":
            whose = "of the episodes that are cloned"
        success.append(
            f"{standing.success:.2f} {whose} (mean of the last {RECENT_STEPS} learner steps)"
        )
    if standing.heldout is not None:
        found = standing.heldout
        success.append(
            f"{found.success:.2f} on held-out tasks (learner step {found.learner_step}, "
            f"{found.episodes:.0f} episodes)"
        )
    return "success: " + (", ".join(success) or "not known before the first learner step")


def _where(standing: Standing, config: Config, *, is_driven: bool) -> str:
    steps, step = config.learner.steps, standing.learner_step
    at = f"learner step {step} of {steps}, newest version {standing.version}"
    played = standing.round_groups - standing.round_to_play
    evaluation = f"{played} of {standing.round_groups} held-out tasks played"
    if standing.version is None:
        return f"{'starting' if is_driven else 'stopped'}: there are no weights yet, so no learner step of {steps}"
    if not standing.learns and standing.round_groups:
        return f"evaluation: {evaluation}"
    if step < steps:
        left = (
            "not known yet"
            if standing.step_s is None
            else f"about {duration((steps - step) * standing.step_s)}"
        )
        doing = "cloning" if config.loss.policy == "behaviour_cloning" else "training"
        return f"{doing}: {at}; time left: {left}" if is_driven else f"stopped: {at}"
    is_evaluated = standing.heldout is not None and standing.heldout.learner_step >= steps
    if is_evaluated or is_offline(config) or config.loss.policy == "behaviour_cloning":
        return f"finished: {at}"
    if not is_driven:
        return f"trained, not evaluated: {at}"
    return f"evaluating: {at}; {evaluation if standing.round_to_play else 'the held-out tasks are next'}"


def config_of(run: Path) -> Config:
    """Return the settings of the run's newest start. Raises ConfigError if they do not fit this
    code.
    """
    try:
        text = read_run_file(run, CONFIG_FILE)
    except (FileNotFoundError, NotADirectoryError):
        text = RunLayout.open(run).info.config_yaml
    return configs.from_yaml(text)


def duration(seconds: float) -> str:
    """Return "90 s", "12 min" or "3 h 5 min"."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.0f} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    minutes = round(seconds / MINUTE_S)
    return f"{minutes // 60} h {minutes % 60} min"

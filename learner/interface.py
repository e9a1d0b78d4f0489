"""Define what the driver shares with the learner: its setup, and the errors that end a run.

Nothing heavy is imported here. torch, DeepSpeed and transformers cost seconds of CPU, which only
the learner's own process pays.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs import Config
from printable import UserError

LEARNER_STEP = "learner step"  # in heartbeats while it trains: work, not a wait


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSetup:
    run_id: str  # another run in `config.run_dir` is refused: the learner's node may have one
    config: Config
    model_path: str  # Hugging Face directory of the base model: version 0


class RankError(UserError, RuntimeError):
    """A rank of the learner is lost, and a restart may help. The message names it and the reason.

    Either another rank died or failed, or the learner's own GPU was full at its start because a
    killed process had not given back its memory yet.
    """


class StarvationError(UserError, RuntimeError):
    """No batch came in time, or the last batches had no advantage to learn from."""


class BadUpdatesError(UserError, RuntimeError):
    """Too many optimizer updates in a row were not finite.

    The message ends with the command that shows their rows.
    """


class NonFiniteWeightsError(UserError, RuntimeError):
    """Updates with finite gradients left a policy whose weights or outputs are not finite."""


class CollapseError(UserError, RuntimeError):
    """An alarm ended the run because `alarms.stop` is true. A checkpoint was written before."""

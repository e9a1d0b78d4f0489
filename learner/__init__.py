"""The learner turns claimed groups into numbered weights.

`learner.py` is the loop. `source.py` makes rows with advantages of a claimed batch, `batch.py` (with `sequences.py` and
`packing.py`) tensors of the rows, `prefetch.py` does both beside the training. `ranks.py` trains: one `engine.py` (DeepSpeed
around `policy_model.py`) a process, minimising what `objective.py` reads off the config. `guards.py` looks at the outcome,
`metrics.py` and `stats.py` name it. `publish.py` writes weights, `checkpoint.py` what a restart needs, both with
`directories.py`. `lora.py` adapts, `tiny_model.py` makes a base policy where there is none. `export.py` and `replay.py` are
`python -m learner`: what was learned for other programs, and learner steps again, which `explain.py` shows by group.
"""

from learner.engine import WreckedPolicyError
from learner.export import export_checkpoint
from learner.guards import LEARNER_STEP, BadUpdatesError, CollapseError, StarvationError
from learner.learner import Learner, LearnerActor, LearnerSetup
from learner.objective import with_published
from learner.publish import copy_weights, write_weights
from learner.ranks import RankError
from learner.source import advantage_settings
from learner.tiny_model import make_tiny_model, train_tokenizer

__all__ = [
    "LEARNER_STEP",
    "BadUpdatesError",
    "CollapseError",
    "Learner",
    "LearnerActor",
    "LearnerSetup",
    "RankError",
    "StarvationError",
    "WreckedPolicyError",
    "advantage_settings",
    "copy_weights",
    "export_checkpoint",
    "make_tiny_model",
    "train_tokenizer",
    "with_published",
    "write_weights",
]

"""The learner turns claimed groups into numbered weights.

`learner.py` is the loop; `source.py` brings rows with advantages from the store, `batch.py` makes tensors of them,
`objective.py` reads off the config what to minimise, `engine.py` (DeepSpeed around `policy_model.py`) updates, `publish.py`
writes weights, `checkpoint.py` what a restart needs. `tiny_model.py` makes a base policy where there is none.
"""

from learner.learner import Learner, LearnerActor, LearnerSetup, StarvationError, advantage_settings
from learner.objective import with_published
from learner.publish import copy_weights, write_weights
from learner.tiny_model import make_tiny_model, train_tokenizer

__all__ = [
    "Learner",
    "LearnerActor",
    "LearnerSetup",
    "StarvationError",
    "advantage_settings",
    "copy_weights",
    "make_tiny_model",
    "train_tokenizer",
    "with_published",
    "write_weights",
]

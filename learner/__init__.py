"""The learner turns claimed groups into numbered weights.

`process.py` is what the driver sees of it, `learner.py` the loop. `source.py` makes rows with advantages of a claimed batch (of
stored ones, those that `selection.py` picks), `batch.py` (with `sequences.py` and `packing.py`) tensors of the rows,
`prefetch.py` does both beside the training. `ranks.py` trains: one `engine.py` (DeepSpeed around `policy_model.py`) a process,
minimising what `objective.py` reads off the config. `guards.py` looks at the outcome, `metrics.py` and `stats.py` name it.
`publish.py` writes weights (over old ones, `spare.py`), `broadcast.py` sends them, `checkpoint.py` writes what a restart needs,
with `directories.py` and `shards.py`. `vision.py` (with `row_images.py`) is for models that see images, `lora.py` adapts,
`tiny_model.py` makes a base policy where there is none. `export.py` and `replay.py` are `python -m learner`: what was learned
for other programs, and learner steps again, which `explain.py` shows. `ray_directory.py` is where a private Ray lives.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learner.engine import WreckedPolicyError
    from learner.export import export_checkpoint, export_version, find_version
    from learner.guards import BadUpdatesError, CollapseError, StarvationError
    from learner.learner import Learner
    from learner.objective import advantage_settings, with_published
    from learner.process import LEARNER_STEP, RAY_HIDES_GPUS, LearnerActor, LearnerSetup, RankError, ray_token
    from learner.publish import copy_weights, write_weights
    from learner.ray_directory import make_ray_directory, remove_ray_directories, started_ticks
    from learner.selection import check_train_on
    from learner.tiny_model import make_tiny_model, train_tokenizer
else:
    # Loaded when asked for (PEP 562): the driver starts and watches a learner without torch and DeepSpeed, 6 s of CPU.
    # `python -m learner --help` needs no Ray either.
    _MODULE_OF = {
        "LEARNER_STEP": "process",
        "BadUpdatesError": "guards",
        "CollapseError": "guards",
        "Learner": "learner",
        "LearnerActor": "process",
        "LearnerSetup": "process",
        "RAY_HIDES_GPUS": "process",
        "RankError": "process",
        "StarvationError": "guards",
        "WreckedPolicyError": "engine",
        "advantage_settings": "objective",
        "check_train_on": "selection",
        "copy_weights": "publish",
        "export_checkpoint": "export",
        "export_version": "export",
        "find_version": "export",
        "make_tiny_model": "tiny_model",
        "make_ray_directory": "ray_directory",
        "ray_token": "process",
        "remove_ray_directories": "ray_directory",
        "started_ticks": "ray_directory",
        "train_tokenizer": "tiny_model",
        "with_published": "objective",
        "write_weights": "publish",
    }

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


__all__ = [
    "LEARNER_STEP",
    "RAY_HIDES_GPUS",
    "BadUpdatesError",
    "CollapseError",
    "Learner",
    "LearnerActor",
    "LearnerSetup",
    "RankError",
    "StarvationError",
    "WreckedPolicyError",
    "advantage_settings",
    "check_train_on",
    "copy_weights",
    "export_checkpoint",
    "export_version",
    "find_version",
    "make_ray_directory",
    "make_tiny_model",
    "ray_token",
    "remove_ray_directories",
    "started_ticks",
    "train_tokenizer",
    "with_published",
    "write_weights",
]

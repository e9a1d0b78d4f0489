"""The learner turns claimed groups into numbered weights.

`process.py` is what the driver sees of it, `learner.py` the loop. `source.py` makes rows with
advantages of a claimed batch (of offline ones, those that `selection.py` picks), `batch.py` (with
`sequences.py` and `packing.py`) tensors of the rows, `prefetch.py` does both beside the training.
`ranks.py` trains: one `engine.py` (DeepSpeed around `policy_model.py`) a process, minimising what
`objective.py` reads off the config. `guards.py` looks at the outcome, `metrics.py` and `stats.py`
name it. `publish.py` writes weights (over old ones, `spare.py`), `broadcast.py` sends them,
`checkpoint.py` writes what a restart needs, with `directories.py` and `shards.py`. `vision.py`
(with `row_images.py`) is for models that see images, `lora.py` adapts, `tiny_model.py` makes a base
policy where there is none. `export.py` and `replay.py` are `gigpo export-model` and `gigpo replay`: what was learned
for other programs, and learner steps again, which `explain.py` shows. `ray_directory.py` is where a
private Ray lives.
"""

import lazy_loader

# The public names stand in `__init__.pyi`. Each is imported when it is first used: `--help` and
# errors of the command line need neither Arrow nor torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

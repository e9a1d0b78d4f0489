"""Options and tasks of environments that know nothing of splits: tasks are seeds, and which split a seed is of is said in the
options.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import Task
from envs.options import check_split

BEGIN = "Nothing has happened yet."  # the first observation where all there is to see is the objective
SEEDS = ("train_seeds", "heldout_seeds")  # each [first, last + 1]


def seeded_tasks(adapter: str, split: str, options: Mapping[str, object], *, name: str) -> list[Task]:
    """A task for each seed of the split's range. `name` is the wrapped environment's."""
    check_split(split)
    ranges = {key.removesuffix("_seeds"): _seeds(adapter, key, options[key]) for key in SEEDS}
    train, heldout = ranges["train"], ranges["heldout"]
    if train.start < heldout.stop and heldout.start < train.stop:
        raise ValueError(
            f"{adapter} options train_seeds={[train.start, train.stop]} and heldout_seeds={[heldout.start, heldout.stop]} "
            "have seeds in common; keep them apart"
        )
    return [Task(id=f"{adapter}-{name}-{split}-{seed}", env_name=adapter, split=split, seed=seed) for seed in ranges[split]]


def installed(adapter: str, module: str) -> Any:
    """The module of a package that not everybody has. Raises ValueError, in one line that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = PACKAGES[adapter]
        raise ValueError(f"environment {adapter!r} needs the package {package} ({error}): pip install {package}") from error


def import_all(adapter: str, modules: Sequence[str]) -> None:
    """Modules that register environments of their own. Raises ValueError, in one line."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{adapter} option imports={list(modules)}: {error}; is it on PYTHONPATH?") from error


PACKAGES = {"gymnasium": "gymnasium", "skyrl_gym": "skyrl-gym", "gem": "gem-llm"}


def _seeds(adapter: str, key: str, value: object) -> range:
    if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(bound, int) for bound in value):
        first, end = value
        if 0 <= first < end:
            return range(first, end)
    raise ValueError(f"{adapter} option {key}={value!r} must be [first, end], two whole numbers: first, first + 1 ... end - 1")

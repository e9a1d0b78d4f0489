"""Options and tasks of environments that know nothing of splits: tasks are seeds, and which split a seed is of is said in the
options.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from envs.base import Task

BEGIN = "Nothing has happened yet."  # the first observation where all there is to see is the objective
SEEDS = ("train_seeds", "heldout_seeds")  # each [first, last + 1]


def check_options(adapter: str, options: Mapping[str, object], known: Sequence[str]) -> dict[str, Any]:
    """All of `known`, and nothing else. Raises ValueError, in one line that names what is missing or unknown."""
    if set(options) != set(known):
        wrong = sorted(set(known).symmetric_difference(options))
        raise ValueError(f"{adapter} options missing or unknown: {', '.join(wrong)}; it takes {sorted(known)}")
    return dict(options)


def seeded_tasks(adapter: str, split: str, options: Mapping[str, object], *, name: str) -> list[Task]:
    """A task for each seed of the split's range. `name` is the wrapped environment's."""
    ranges = {key.removesuffix("_seeds"): _seeds(adapter, key, options[key]) for key in SEEDS}
    if split not in ranges:
        raise ValueError(f"split {split!r} is not one of {sorted(ranges)}")
    train, heldout = ranges["train"], ranges["heldout"]
    if train.start < heldout.stop and heldout.start < train.stop:
        raise ValueError(
            f"{adapter} options train_seeds={[train.start, train.stop]} and heldout_seeds={[heldout.start, heldout.stop]} "
            "have seeds in common; keep them apart"
        )
    return [Task(id=f"{adapter}-{name}-{split}-{seed}", env_name=adapter, split=split, seed=seed) for seed in ranges[split]]


def find(adapter: str, option: str, target: object) -> Any:
    """What `module:name` names. Raises ValueError, in one line that names the option."""
    module_name, _, name = str(target).partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{adapter} option {option}={target!r} cannot be loaded: {error}; write it module:name") from error


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


def close_soon(closing: Coroutine[Any, Any, object]) -> None:
    """For a `close` that has to be awaited, as the contract's is not: it ends by itself, if its event loop lives so long."""
    try:
        task = asyncio.get_running_loop().create_task(closing)
    except RuntimeError:  # the loop is gone, and its connections with it
        closing.close()
    else:
        _CLOSING.add(task)  # a loop forgets a task that nobody holds
        task.add_done_callback(_CLOSING.discard)


_CLOSING: set[asyncio.Task[object]] = set()

"""Options and tasks of environments that know nothing of splits: tasks are seeds, and which split a
seed is of is said in the options.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from envs.base import Task
from envs.options import OptionsError, check_options, check_split

# the first observation where all there is to see is the objective
BEGIN = "Nothing has happened yet."
PACKAGES = {"gymnasium": "gymnasium", "skyrl_gym": "skyrl-gym", "gem": "gem-llm"}
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "action": (
        lambda value: isinstance(value, str) and "{action}" in value,
        "a text with {action} in it",
    ),
    "imports": (
        lambda value: isinstance(value, Sequence) and not isinstance(value, str),
        "a list of modules",
    ),
    "anchor": (lambda value: value in ("suffix", "observation"), "'suffix' or 'observation'"),
    "shows": (lambda value: value in ("anchor", "text"), "'anchor' or 'text'"),
    "manager": (lambda value: isinstance(value, str) and ":" in value, "module:name"),
    "win_at": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool),
        "a number",
    ),
}
SEEDS = ("train_seeds", "heldout_seeds")  # each [first, last + 1]


def adapter_options(
    adapter: str, options: Mapping[str, object], known: Collection[str]
) -> dict[str, Any]:
    """As `check_options`; those that several adapters have are also what they must be. Raises
    OptionsError, in one line.
    """
    given = check_options(adapter, options, known)
    for name, (is_right, must_be) in KINDS.items():
        if name in given and not is_right(given[name]):
            raise OptionsError(f"{adapter} option {name}={given[name]!r} must be {must_be}")
    return given


def seeded_tasks(
    adapter: str, split: str, options: Mapping[str, object], *, name: str
) -> list[Task]:
    """A task for each seed of the split's range. `name` is the wrapped environment's."""
    check_split(split)
    ranges = {key.removesuffix("_seeds"): _seeds(adapter, key, options[key]) for key in SEEDS}
    train, heldout = ranges["train"], ranges["heldout"]
    if train.start < heldout.stop and heldout.start < train.stop:
        raise OptionsError(
            f"{adapter} options train_seeds={[train.start, train.stop]} and "
            f"heldout_seeds={[heldout.start, heldout.stop]} "
            "have seeds in common; keep them apart"
        )
    return [
        Task(id=f"{adapter}-{name}-{split}-{seed}", env_name=adapter, split=split, seed=seed)
        for seed in ranges[split]
    ]


def installed(adapter: str, module: str) -> Any:
    """The module of a package that not everybody has. Raises ValueError, in one line that says how
    to get it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = PACKAGES[adapter]
        raise ValueError(
            f"environment {adapter!r} needs the package {package} ({error}): pip install {package}"
        ) from error


def import_all(adapter: str, modules: Sequence[str]) -> None:
    """Modules that register environments of their own. Raises ValueError, in one line."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"{adapter} option imports={list(modules)}: {error}; is it on PYTHONPATH?"
            ) from error


def _seeds(adapter: str, key: str, value: object) -> range:
    if (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(bound, int) for bound in value)
    ):
        first, end = value
        if 0 <= first < end:
            return range(first, end)
    raise OptionsError(
        f"{adapter} option {key}={value!r} must be [first, end], two whole numbers: first, first + "
        "1 ... end - 1"
    )

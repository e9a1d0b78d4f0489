"""Share parts between adapters: options, tasks by seed, optional packages, late closing."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from envs.base import Task
from envs.options import OptionsError, check_options, check_split
from printable import printable

# the first observation of an environment whose objective is all there is to see
BEGIN = "Nothing has happened yet."
CLOSE_TIMEOUT_S = 5.0  # for an environment's own close
PACKAGES = {"gymnasium": "gymnasium", "skyrl_gym": "skyrl-gym", "gem": "gem-llm"}
SEEDS = ("train_seeds", "heldout_seeds")  # options, each [first, last + 1]

_CLOSING: set[asyncio.Task[None]] = set()  # an event loop keeps no reference to its tasks


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


# Options that several adapters have: a check, and a description of right values.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "action": (
        lambda value: isinstance(value, str) and "{action}" in value,
        "a text with {action} in it",
    ),
    "imports": (_is_list, "a list of modules"),
    "anchor": (lambda value: value in ("suffix", "observation"), "'suffix' or 'observation'"),
    "shows": (lambda value: value in ("anchor", "text"), "'anchor' or 'text'"),
    "manager": (lambda value: isinstance(value, str) and ":" in value, "module:name"),
    "deterministic": (lambda value: isinstance(value, bool), "true or false"),
    "win_at": (lambda value: type(value) in (int, float), "a number"),
}


def adapter_options(
    adapter: str, options: Mapping[str, object], known: Collection[str]
) -> dict[str, Any]:
    """Return the options if they are the known ones with right values. Raises OptionsError."""
    given = check_options(adapter, options, known)
    for name, (is_right, description) in CHECKS.items():
        if name in given and not is_right(given[name]):
            raise OptionsError(f"{adapter} option {name}={given[name]!r} must be {description}")
    return given


def seeded_tasks(
    adapter: str, split: str, options: Mapping[str, object], *, name: str
) -> list[Task]:
    """Return a task for each seed of the split. `name` is the wrapped environment's."""
    check_split(split)
    train, heldout = (_seed_range(adapter, option, options[option]) for option in SEEDS)
    if train.start < heldout.stop and heldout.start < train.stop:
        raise OptionsError(
            f"{adapter} options train_seeds={[train.start, train.stop]} and "
            f"heldout_seeds={[heldout.start, heldout.stop]} have seeds in common; keep them apart"
        )
    return [
        Task(id=f"{adapter}-{name}-{split}-{seed}", env_name=adapter, split=split, seed=seed)
        for seed in (train if split == "train" else heldout)
    ]


def import_package(adapter: str, module: str) -> Any:
    """Import an optional package. Raises ValueError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = PACKAGES[adapter]
        raise ValueError(
            f"environment {adapter!r} needs the package {package} ({error}): pip install {package}"
        ) from error


def import_all(adapter: str, modules: Sequence[str]) -> None:
    """Import a user's modules, which register environments. Raises ValueError."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"{adapter} option imports={list(modules)}: {error}; is it on PYTHONPATH?"
            ) from error


def close_soon(closing: Coroutine[Any, Any, object], *, name: str) -> None:
    """Run a `close` that has to be awaited in the background. The contract's `close` is not.

    Prints one line if it raises, or takes longer than CLOSE_TIMEOUT_S.
    """
    try:
        task = asyncio.get_running_loop().create_task(_close(closing, name))
    except RuntimeError:  # the event loop has ended, and its connections with it
        closing.close()
    else:
        _CLOSING.add(task)
        task.add_done_callback(_CLOSING.discard)


async def _close(closing: Coroutine[Any, Any, object], name: str) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await closing
    except Exception as error:  # noqa: BLE001 - nobody awaits this task
        is_late = isinstance(error, TimeoutError)
        reason = f"no answer within {CLOSE_TIMEOUT_S:g} s" if is_late else repr(error)
        print(printable(f"{name} was not closed: {reason}"), file=sys.stderr, flush=True)


def _seed_range(adapter: str, option: str, value: object) -> range:
    if _is_list(value):
        bounds = list(value)  # type: ignore[call-overload]  # a sequence, see above
        if len(bounds) == 2 and all(isinstance(bound, int) for bound in bounds):
            first, end = bounds
            if 0 <= first < end:
                return range(first, end)
    raise OptionsError(
        f"{adapter} option {option}={value!r} must be [first, end], two whole numbers: first, "
        "first + 1 ... end - 1"
    )

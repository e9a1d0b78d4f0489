"""Finding an environment class by name: one of ours, or anybody's `module:Class`."""

from __future__ import annotations

import difflib
import importlib

from envs.base import Environment

# A new environment is one file in this folder and one line here. Named, not imported: an engine loads when it is used.
ENVIRONMENTS = {
    "key_room": "envs.key_room:KeyRoomEnv",
    "textworld": "envs.textworld:TextWorldEnv",
}


def environment_class(name: str) -> type[Environment]:
    """The class behind a registered name or `module:Class`; ValueError says what was wrong with the name."""
    target = name if ":" in name else ENVIRONMENTS.get(name)
    if target is None:
        nearest = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        known = ", ".join(sorted(ENVIRONMENTS))
        raise ValueError(f"unknown environment {name!r}: {hint}Known: {known}, or module:Class of your own")
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"environment {name!r}: no module {error.name!r}; run from its folder, install it or put it on PYTHONPATH"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ValueError(f"environment {name!r}: module {module_name!r} has no class {class_name!r}")
    missing = [method for method in ("tasks", "reset", "step", "close") if not callable(getattr(found, method, None))]
    if missing:
        raise ValueError(f"environment {name!r}: the class lacks {', '.join(missing)}; see envs/base.py")
    return found

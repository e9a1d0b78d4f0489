"""Find the class of an environment or agent program by name: one of ours, or a `module:Class`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from envs.base import Environment, Program
from envs.error_texts import describe_error

# To add an environment, write one file in this package and one line here. Classes are named and not
# imported, so that an engine loads only when it is used.
ENVIRONMENTS = {
    "alfworld": "envs.alfworld:AlfWorldEnv",
    "gem": "envs.adapters.from_gem:GemEnv",
    "gymnasium": "envs.adapters.from_gymnasium:GymnasiumEnv",
    "key_room": "envs.key_room:KeyRoomEnv",
    "openenv": "envs.adapters.from_openenv:OpenEnvEnv",
    "remote": "envs.adapters.http_client:RemoteEnv",
    "search": "envs.search:SearchEnv",
    "search_local": "envs.search:LocalSearchEnv",
    "skyrl_gym": "envs.adapters.from_skyrl_gym:SkyRLGymEnv",
    "sokoban": "envs.sokoban:SokobanEnv",
    "textworld": "envs.textworld:TextWorldEnv",
    "verl_agent": "envs.adapters.from_verl_agent:VerlAgentEnv",
    "webshop": "envs.webshop:WebShopEnv",
}

# Modules that a plain installation lacks, and the argument of `pip install` that brings them.
EXTRA_PACKAGES = {
    "alfworld": (("alfworld", "fast_downward"), "-e '.[alfworld]'"),
    "gem": (("gem",), "gem-llm"),
    "skyrl_gym": (("skyrl_gym",), "skyrl-gym"),
}


def missing_packages(name: str) -> str | None:
    """Return one line that says how to install what an environment lacks; None if it has all."""
    modules, package = EXTRA_PACKAGES.get(name, ((), ""))
    missing = [module for module in modules if find_spec(module) is None]
    if not missing:
        return None
    return f"env.name={name} needs {' and '.join(missing)}: pip install {package}"


def is_users_class(name: str) -> bool:
    """Return whether a name is a `module:Class`, and so may be of code that nobody here knows."""
    return ":" in name


def environment_class(name: str) -> type[Environment]:
    """Return the class of a registered name or `module:Class`. Raises ValueError."""
    return _class_with(
        name, ("tasks", "reset", "step", "close"), hint="; an agent program has `tasks` and `run`"
    )


def program_class(name: str) -> type[Program]:
    """Return the class of an agent program, named `module:Class`. Raises ValueError."""
    return _class_with(name, ("tasks", "run"), hint="")


def is_program(name: str) -> bool:
    """Return whether a class is an agent program. Raises ValueError if there is no such class."""
    found = _find_class(name)
    return hasattr(found, "run") and not hasattr(found, "step")


def _class_with(name: str, methods: Sequence[str], *, hint: str) -> Any:
    found = _find_class(name)
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise ValueError(
            f"environment {name!r}: the class lacks {', '.join(missing)}; see envs/base.py{hint}"
        )
    return found


def _find_class(name: str) -> type:
    target = name if is_users_class(name) else ENVIRONMENTS.get(name)
    if target is None:
        nearest = difflib.get_close_matches(name, ENVIRONMENTS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        known = ", ".join(sorted(ENVIRONMENTS))
        raise ValueError(
            f"unknown environment {name!r}: {hint}Known: {known}, or module:Class of your own"
        )
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the border to a user's own code
        if isinstance(error, ModuleNotFoundError) and _contains(str(error.name), module_name):
            how = "put its folder into PYTHONPATH, or install it"
            raise ValueError(f"environment {name!r}: no module {error.name!r}; {how}") from None
        reason = describe_error(error, called=None)
        raise ValueError(
            f"environment {name!r}: importing {module_name!r} failed: {reason}"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ValueError(
            f"environment {name!r}: module {module_name!r} has no class {class_name!r}"
        )
    return found


def _contains(package: str, module_name: str) -> bool:
    """Return whether `package` is the module or a package around it, and nothing it imports."""
    return f"{module_name}.".startswith(f"{package}.")

"""Finding an environment class by name: one of ours, or anybody's `module:Class`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from envs.base import Environment
from envs.errors import one_line

if TYPE_CHECKING:
    from envs.hosting.program_pool import Program  # which finds its class here

# A new environment is one file in this folder and one line here. Named, not imported: an engine
# loads when it is used.
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
    "sokoban": "envs.sokoban.world:SokobanEnv",
    "textworld": "envs.textworld.world:TextWorldEnv",
    "verl_agent": "envs.adapters.from_verl_agent:VerlAgentEnv",
    "webshop": "envs.webshop:WebShopEnv",
}

# Modules that an environment needs and that come with no plain installation, and what to give to
# pip.
PACKAGES = {
    "alfworld": (("alfworld", "fast_downward"), "-e '.[alfworld]'"),
    "gem": (("gem",), "gem-llm"),
    "skyrl_gym": (("skyrl_gym",), "skyrl-gym"),
}


def missing_packages(name: str) -> str | None:
    """Say in one line which modules an environment would not find, and how to install them. None if
    it finds all.
    """
    modules, package = PACKAGES.get(name, ((), ""))
    lacking = [module for module in modules if find_spec(module) is None]
    return (
        f"env.name={name} needs {' and '.join(lacking)}: pip install {package}" if lacking else None
    )


def environment_class(name: str) -> type[Environment]:
    """The class behind a registered name or `module:Class`; ValueError says what was wrong with the
    name.
    """
    return _with_methods(
        name,
        ("tasks", "reset", "step", "close"),
        see="envs/base.py; or `tasks` and `run`, envs/hosting/program_pool.py",
    )


def program_class(name: str) -> type[Program]:
    """The same for an agent program."""
    return _with_methods(name, ("tasks", "run"), see="envs/hosting/program_pool.py")


def is_program(name: str) -> bool:
    """Whether it is run instead of being stepped; ValueError as for `environment_class`."""
    found = _class(name)
    return hasattr(found, "run") and not hasattr(found, "step")


def _with_methods(name: str, methods: Sequence[str], *, see: str) -> Any:
    found = _class(name)
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise ValueError(f"environment {name!r}: the class lacks {', '.join(missing)}; see {see}")
    return found


def _class(name: str) -> type:
    target = name if ":" in name else ENVIRONMENTS.get(name)
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
        if isinstance(error, ModuleNotFoundError) and _is_or_holds(str(error.name), module_name):
            how = "run from its folder, install it or put it on PYTHONPATH"
            raise ValueError(f"environment {name!r}: no module {error.name!r}; {how}") from None
        why = one_line(error, called=None)
        raise ValueError(
            f"environment {name!r}: importing {module_name!r} failed: {why}"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ValueError(
            f"environment {name!r}: module {module_name!r} has no class {class_name!r}"
        )
    return found


def _is_or_holds(found: str, module_name: str) -> bool:
    """Tell whether `found` is the module itself or a package around it, so not something that it
    imports.
    """
    return f"{module_name}.".startswith(f"{found}.")

"""Stand in for Ray where it is not installed, so that the learner's modules can be imported.

The proof starts no actor. The learner's package only names Ray at import: `ray.remote` around a
class, `ray.method` around a method, `ActorHandle` in annotations, three exceptions in `except`
clauses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class ActorHandle:
    """Take the place of `ray.actor.ActorHandle` in annotations."""


class RayError(Exception):
    """Take the place of `ray.exceptions.RayError`; nothing raises it."""


class GetTimeoutError(RayError, TimeoutError):
    """Take the place of `ray.exceptions.GetTimeoutError`; nothing raises it."""


class RayTaskError(RayError):
    """Take the place of `ray.exceptions.RayTaskError`; nothing raises it."""


def remote(actor_class: Any = None, **options: object) -> Any:
    """Return the class unchanged; without Ray it cannot become an actor."""
    return remote if actor_class is None else actor_class


def method(**options: object) -> Callable[[Any], Any]:
    """Return a decorator that leaves a method unchanged."""
    return lambda decorated: decorated


def install() -> bool:
    """Put the stand-in into `sys.modules` unless Ray can be imported. Return whether it was put."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":  # a broken Ray must not be hidden
            raise
    else:
        return False
    ray, actor, exceptions = (
        ModuleType("ray"),
        ModuleType("ray.actor"),
        ModuleType("ray.exceptions"),
    )
    vars(ray).update(remote=remote, method=method, actor=actor, exceptions=exceptions)
    vars(actor).update(ActorHandle=ActorHandle)
    vars(exceptions).update(
        RayError=RayError, GetTimeoutError=GetTimeoutError, RayTaskError=RayTaskError
    )
    sys.modules |= {"ray": ray, "ray.actor": actor, "ray.exceptions": exceptions}
    return True

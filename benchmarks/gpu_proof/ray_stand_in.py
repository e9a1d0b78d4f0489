"""Stand in for Ray where it is not installed, so that the learner's modules can be imported.

The proof starts no actor. The learner's package only names Ray at import: `ray.remote` around a
class, `ActorHandle` in annotations, three exceptions in `except` clauses.
"""

from __future__ import annotations

import sys
from types import ModuleType


class ActorHandle:
    """Take the place of `ray.actor.ActorHandle` in annotations."""


class RayError(Exception):
    """Take the place of `ray.exceptions.RayError`; nothing raises it."""


class GetTimeoutError(RayError, TimeoutError):
    """Take the place of `ray.exceptions.GetTimeoutError`; nothing raises it."""


class RayTaskError(RayError):
    """Take the place of `ray.exceptions.RayTaskError`; nothing raises it."""


def remote(actor_class: type) -> type:
    """Return the class unchanged; without Ray it cannot become an actor."""
    return actor_class


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
    vars(ray).update(remote=remote, actor=actor, exceptions=exceptions)
    vars(actor).update(ActorHandle=ActorHandle)
    vars(exceptions).update(
        RayError=RayError, GetTimeoutError=GetTimeoutError, RayTaskError=RayTaskError
    )
    sys.modules |= {"ray": ray, "ray.actor": actor, "ray.exceptions": exceptions}
    return True

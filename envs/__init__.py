"""Text worlds behind one contract. `base.py` is the contract (Task, Observation, Transition, Environment); one file per
world (`textworld.py` with its games in `textworld_games.py`, `key_room.py`, the one to copy for a world of your own);
`registry.py` finds a class by name, `check.py` refuses a broken one early, `pool.py` runs many in processes of their own.
Nothing here knows tokens, prompts or models. Worlds are reached by name, so that importing this package loads no engine.
"""

from envs.base import Environment, Observation, Task, Transition
from envs.check import EnvironmentFailed, list_tasks, try_environment
from envs.pool import EnvironmentDied, EnvironmentPool, PooledEnvironment
from envs.registry import ENVIRONMENTS, environment_class

__all__ = [
    "ENVIRONMENTS",
    "Environment",
    "EnvironmentDied",
    "EnvironmentFailed",
    "EnvironmentPool",
    "Observation",
    "PooledEnvironment",
    "Task",
    "Transition",
    "environment_class",
    "list_tasks",
    "try_environment",
]

"""Text worlds behind one contract. `base.py` is the contract (Task, Observation, Transition,
Environment); one file per world (`textworld.py` with its games in `textworld_games.py`,
`sokoban.py`, `key_room.py`, the one to copy for a world of your own), or one package (`alfworld/`,
`webshop/`, `search/`); `adapters/` wraps environments of other packages, `remote.py` plays over
HTTP what `server.py` serves; `registry.py` finds a class by name, `check.py` refuses a broken one
early, `pool.py` runs many, each `process.py` holding some. `options.py` checks what a world is
given, `images.py` what it shows, `closing.py` closes what may be broken. `bm25/` is the search of
two worlds. `listing.py` lists the tasks of a user's class in a child process. `failures.py` finds
the author's line of an error. `programs.py` is for an agent that calls a chat model by itself
instead of being stepped (docs/agent_programs.md). `child.py` starts and ends the processes of both,
`waits.py` names what is waited for. Nothing here knows tokens, prompts or models. Worlds are
reached by name, so that importing this package loads no engine.
"""

from envs.base import Environment, Observation, Task, Transition
from envs.errors import log_hint
from envs.hosting.environment_process import EnvironmentDied
from envs.hosting.pending import PendingOperations, run_in_thread
from envs.hosting.pool import EnvironmentPool, PooledEnvironment, try_environment
from envs.hosting.program_pool import ClientSettings, Outcome, Program, ProgramPool
from envs.hosting.task_listing import list_tasks_apart
from envs.options import OptionsError
from envs.registry import (
    ENVIRONMENTS,
    environment_class,
    is_program,
    missing_packages,
    program_class,
)
from envs.validation import EnvironmentFailed, list_tasks

__all__ = [
    "ENVIRONMENTS",
    "ClientSettings",
    "Environment",
    "EnvironmentDied",
    "EnvironmentFailed",
    "EnvironmentPool",
    "Observation",
    "OptionsError",
    "Outcome",
    "PooledEnvironment",
    "Program",
    "ProgramPool",
    "Task",
    "Transition",
    "PendingOperations",
    "environment_class",
    "is_program",
    "list_tasks",
    "list_tasks_apart",
    "log_hint",
    "missing_packages",
    "program_class",
    "run_in_thread",
    "try_environment",
]

"""ALFWorld on its real engine: household tasks of six types, played in text (docs/alfworld.md).

`world.py` is the environment: options, tasks, reset, step. `games.py` finds a game: in the official
data directory, in one packed file for each split, or from `generated.py`, which makes small ones
when there are no data. `engine.py` plays a game on the planner that ALFWorld plays on, `texts.py`
says what happened with ALFWorld's own grammar, `translation.py` is what both need of a game and
what is kept of it for its next reset.
"""

from envs.alfworld.world import AlfWorldEnv

__all__ = ["AlfWorldEnv"]

"""ALFWorld on its real engine: household tasks of six types, played in text (docs/alfworld.md).

world.py        the environment
games.py        read games from the official data or from packed files
generated.py    make small games without data
engine.py       translate a game for the planner, and play it
grammar.py      the texts of a game, by ALFWorld's own grammar
expressions.py  evaluate the grammar's expressions without running them as Python
"""

from envs.alfworld.world import AlfWorldEnv

__all__ = ["AlfWorldEnv"]

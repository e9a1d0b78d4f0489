"""TextWorld: Inform 7 games made by this project and played on TextWorld's own engine.

world.py  the environment
games.py  draw games from a seed, compile and cache them
"""

from envs.textworld.world import TextWorldEnv

__all__ = ["TextWorldEnv"]

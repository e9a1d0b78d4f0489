"""Environments of other packages behind the contract of `envs/base.py`, one file each:
`from_gymnasium.py`, `from_verl_agent.py`, `from_skyrl_gym.py`, `from_openenv.py`, `from_gem.py`.
`common.py` is what they share; `toy_text.py` puts Gymnasium's FrozenLake and Taxi into words. Each
file loads the package it is for when an environment is made, not before. docs/adapters.md has their
options.
"""

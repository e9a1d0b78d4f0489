"""Environments of other packages behind the contract of `envs/base.py` (docs/adapters.md).

from_gymnasium.py, from_gem.py, from_openenv.py, from_skyrl_gym.py, from_verl_agent.py
                one package each, loaded when an environment is made
http_client.py  any environment on a server
toy_text.py     Gymnasium's FrozenLake and Taxi in words
common.py       parts that several adapters share
"""

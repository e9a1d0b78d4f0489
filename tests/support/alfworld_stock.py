"""The engine as ALFWorld builds it, to compare with: no part of it is ours."""

from __future__ import annotations

import random
import sys
from typing import Any

import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv

from envs import Observation, Task
from envs.alfworld import AlfWorldEnv
from envs.alfworld.games import TASK_MARK, Game

NONSENSE = ("fly", "", "take it", "go to nowhere 1", "Look", "help", "look ", "inventory")


def stock_engine() -> Any:
    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))


def load_stock(engine: Any, game: Game) -> Any:
    """Loads the game and resets to it; returns the first state."""
    arguments = sys.argv
    try:
        engine.load(
            {
                "pddl_domain": game.domain,
                "grammar": game.grammar.replace(TASK_MARK, game.task),
                "pddl_problem": game.problem,
                "walkthrough": list(game.walkthrough),
            }
        )
        return engine.reset()
    finally:
        sys.argv = arguments


def assert_equal_to_stock(
    env: AlfWorldEnv, engine: Any, task: Task, game: Game, *, steps: int, seed: int
) -> None:
    """A random walk, then the walkthrough, which wins unless the walk has used up what it needs; on
    both, step by step.
    """
    draw = random.Random(seed)
    state = load_stock(engine, game)
    seen = env.reset(task)
    assert (seen.text, seen.actions) == (state.feedback, _listed(state)), task.id
    for planned in (*[None] * steps, *game.walkthrough):
        command = planned or _drawn(seen, draw)
        state, score, done = engine.step(command)
        transition = env.step(command)
        seen = transition.observation
        assert (seen.text, seen.actions) == (state.feedback, _listed(state)), (task.id, command)
        assert (transition.reward, transition.won, transition.terminated) == (
            score,
            state.won,
            done,
        ), (task.id, command)
        if done:
            return


def _listed(state: Any) -> tuple[str, ...]:
    return tuple(command for command in state.admissible_commands if command != "help")


def _drawn(seen: Observation, draw: random.Random) -> str:
    """Return one listed command, or sometimes nonsense."""
    assert seen.actions
    # Most commands only go somewhere or examine something; half of the draws leave those out.
    acts = [command for command in seen.actions if not command.startswith(("go to", "examine"))]
    return draw.choice(
        NONSENSE if draw.random() < 0.1 else acts if draw.random() < 0.5 else seen.actions
    )

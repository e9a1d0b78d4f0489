"""Texts as a model will see and write them, to train a tokenizer on before there is a model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from actors.prompting.prompt import answer_text, turns_shown
from actors.prompting.template import Turn, find_template, render, render_next
from configs import Config, PromptConfig
from envs import (
    EnvironmentDied,
    EnvironmentFailed,
    EnvironmentPool,
    Observation,
    PooledEnvironment,
    Task,
    list_tasks,
)

SAMPLED_TASKS = 1000  # more say hardly anything new, and each has to be reset once


def sample_chats(config: Config, *, log: Path | None = None) -> list[str]:
    """Message and answer of every step of one episode of each training task, of SAMPLED_TASKS at
    most, as the scripted player plays it.

    What the environment prints goes to `log`. Raises EnvironmentFailed. Not for an event loop: it
    has one of its own.
    """
    return asyncio.run(_sampled(config, log))


async def _sampled(config: Config, log: Path | None) -> list[str]:
    env, found = config.env, []
    draw = random.Random(config.seed)
    pool = EnvironmentPool(
        env.name, env.options, processes=1, answer_timeout_s=env.answer_timeout_s, log=log
    )
    try:
        for task in list_tasks(env.name, env.options)["train"][:SAMPLED_TASKS]:
            async with pool.environment() as environment:
                found += await _episode(config, environment, task, draw)
    except EnvironmentDied as error:
        raise EnvironmentFailed(f"env.name={env.name}: {error}") from error
    finally:
        pool.close()
    return found


async def _episode(
    config: Config, environment: PooledEnvironment, task: Task, draw: random.Random
) -> list[str]:
    template = find_template(config.prompt.template)
    observation, over = await environment.reset(task), False
    history: list[Turn] = []
    texts = []
    while not over and len(history) < config.env.max_steps:
        if not observation.actions:
            raise EnvironmentFailed(
                f"env.name={config.env.name} lists no admissible actions to clone from; set "
                "model.path"
            )
        action = observation.demonstrated or draw.choice(observation.actions)
        texts.append(
            _message(config.prompt, observation, history)
            + answer_text(template, action, parser=config.prompt.parser)
        )
        history.append(Turn(observation=observation.text, action=action))
        transition = await environment.step(action)
        observation, over = transition.observation, transition.terminated or transition.truncated
    return texts


def _message(config: PromptConfig, observation: Observation, history: Sequence[Turn]) -> str:
    template = find_template(config.template)
    if config.style == "chat" and history:
        return render_next(template, observation, step=len(history) + 1)
    return render(
        template, observation, history, kept=turns_shown(config.history_length, len(history))
    )

"""Sample chats of an environment to train a tokenizer on before there is a model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from actors.prompting.prompt import answer_text, turns_shown
from actors.prompting.template import Template, Turn, find_template, render, render_next
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

MAX_SAMPLED_TASKS = 1000  # more add hardly any new words, and each one costs a reset
# Of a message, and of an answer: a word of millions of letters would take minutes.
MAX_CHARACTERS = 100_000


def sample_chats(config: Config, *, log: Path | None = None) -> list[str]:
    """Play one scripted episode of up to MAX_SAMPLED_TASKS training tasks.

    Returns message and answer of every step. The environment prints to `log`. Raises
    EnvironmentFailed. Not for use on an event loop: it runs its own.
    """
    return asyncio.run(_sample(config, log))


async def _sample(config: Config, log: Path | None) -> list[str]:
    env = config.env
    texts: list[str] = []
    draw = random.Random(config.seed)
    pool = EnvironmentPool(
        env.name,
        env.options,
        processes=1,
        answer_timeout_s=env.answer_timeout_s,
        log=log,
        isolated=True,  # the driver calls this
    )
    try:
        for task in list_tasks(env.name, env.options)["train"][:MAX_SAMPLED_TASKS]:
            async with pool.environment() as environment:
                texts += await _play(config, environment, task=task, draw=draw)
    except EnvironmentDied as error:
        raise EnvironmentFailed(f"env.name={env.name}: {error}") from error
    finally:
        pool.close()
    return texts


async def _play(
    config: Config, environment: PooledEnvironment, *, task: Task, draw: random.Random
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
        message = _message(config.prompt, template, observation=observation, history=history)
        answer = answer_text(template, action, parser=config.prompt.parser)
        texts.append(message[:MAX_CHARACTERS] + answer[:MAX_CHARACTERS])
        history.append(Turn(observation=observation.text, action=action))
        transition = await environment.step(action)
        observation, over = transition.observation, transition.terminated or transition.truncated
    return texts


def _message(
    config: PromptConfig, template: Template, *, observation: Observation, history: Sequence[Turn]
) -> str:
    if config.style == "chat" and history:
        return render_next(template, observation, step=len(history) + 1)
    kept = turns_shown(config.history_length, len(history))
    return render(template, observation, history=history, kept=kept)

"""Texts as a model will see and write them, to train a tokenizer on before there is a model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from actors.prompt import answer_text, turns_shown
from actors.template import Turn, find_template, render, render_next
from configs import Config, PromptConfig
from envs import EnvironmentFailed, Observation, environment_class, list_tasks


def sample_chats(config: Config) -> Iterator[str]:
    """Message and answer of every step of one episode of each training task, as the scripted player plays it."""
    template = find_template(config.prompt.template)
    environment = environment_class(config.env.name)(config.env.options)
    draw = random.Random(config.seed)
    for task in list_tasks(config.env.name, config.env.options)["train"]:
        observation, over = environment.reset(task), False
        history: list[Turn] = []
        while not over and len(history) < config.env.max_steps:
            if not observation.actions:
                raise EnvironmentFailed(f"env.name={config.env.name} lists no admissible actions to clone from; set model.path")
            action = observation.demonstrated or draw.choice(observation.actions)
            yield _message(config.prompt, observation, history) + answer_text(template, action, parser=config.prompt.parser)
            history.append(Turn(observation=observation.text, action=action))
            transition = environment.step(action)
            observation, over = transition.observation, transition.terminated or transition.truncated
    environment.close()


def _message(config: PromptConfig, observation: Observation, history: Sequence[Turn]) -> str:
    template = find_template(config.template)
    if config.style == "chat" and history:
        return render_next(template, observation, step=len(history) + 1)
    return render(template, observation, history, kept=turns_shown(config.history_length, len(history)))

"""Texts as a model will see and write them, to train a tokenizer on before there is a model."""

from __future__ import annotations

import random
from collections.abc import Iterator

from actors.prompt import TEMPLATES, Turn, render
from configs import Config
from envs import EnvironmentFailed, environment_class, list_tasks


def sample_chats(config: Config) -> Iterator[str]:
    """Prompt and answer of every step of one uniformly random episode of each training task."""
    template = TEMPLATES[config.prompt.template]
    environment = environment_class(config.env.name)(config.env.options)
    draw = random.Random(config.seed)
    for task in list_tasks(config.env.name, config.env.options)["train"]:
        observation, over = environment.reset(task), False
        history: list[Turn] = []
        while not over and len(history) < config.env.max_steps:
            if not observation.actions:
                raise EnvironmentFailed(f"env.name={config.env.name} lists no admissible actions to clone from; set model.path")
            action = draw.choice(observation.actions)
            kept = min(config.prompt.history_length, len(history))
            yield render(template, observation, history, kept=kept) + template.answer.format(action=action)
            history.append(Turn(observation=observation.text, action=action))
            transition = environment.step(action)
            observation, over = transition.observation, transition.terminated or transition.truncated
    environment.close()

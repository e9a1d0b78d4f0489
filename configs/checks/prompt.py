"""Check the section `prompt`, of one environment."""

from __future__ import annotations

from pathlib import Path

from configs.checks.values import check_is_list
from configs.errors import ConfigError
from configs.schema import Config, PromptConfig
from printable import did_you_mean

TEMPLATES = (  # the files in actors/templates
    "alfworld",
    "compact",
    "direct",
    "search",
    "sokoban",
    "sokoban_image",
    "think",
    "webshop",
)


def check_prompt(config: Config) -> None:
    """Check the template, the history and the texts that end a response."""
    prompt = config.prompt
    if prompt.template not in TEMPLATES and not Path(prompt.template).is_file():
        raise ConfigError(
            f"prompt.template={prompt.template!r} is not one of {', '.join(map(repr, TEMPLATES))}, "
            f"nor a file of your own{did_you_mean(prompt.template, TEMPLATES)}"
        )
    if prompt.history_length < -1:
        raise ConfigError(
            f"prompt.history_length={prompt.history_length} is below -1; use 0 for no history, -1 "
            "for all of it"
        )
    if prompt.style == "chat" and prompt.history_length not in (-1, PromptConfig().history_length):
        raise ConfigError(
            f"prompt.history_length={prompt.history_length} does nothing with prompt.style='chat', "
            "which shows all turns; use -1"
        )
    check_is_list("prompt.stop", prompt.stop)
    if "" in prompt.stop:
        raise ConfigError(
            "prompt.stop has an empty text, which would end every response at once; leave it out"
        )

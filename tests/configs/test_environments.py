"""Several environments in one run: what each takes, and every mistake in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from configs import Config, ConfigError, EnvConfig

TWO = """
env: {name: key_room, max_steps: 16}
prompt: {template: compact, max_prompt_tokens: 120}
environments:
  rooms: {}
  lakes:
    weight: 3
    env: {name: textworld, options: {games: 4}, max_steps: 30}
    prompt: {history_length: 0}
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(TWO)
    return path


def test_each_environment_changes_what_it_names(two: Path) -> None:
    config = configs.load(two, ["environments.lakes.env.win_reward=5", "env.options.x=1"])
    own = configs.environments(config)
    assert list(own) == ["rooms", "lakes"]
    assert own["rooms"].env == config.env
    lakes = own["lakes"]
    assert lakes.env == EnvConfig(
        name="textworld", options={"games": 4}, max_steps=30, win_reward=5
    )
    assert (lakes.prompt.template, lakes.prompt.history_length) == ("compact", 0)
    assert configs.environment_config(config, "lakes/a/b") == lakes
    assert configs.environment_weights(config) == {"rooms": 1.0, "lakes": 3.0}
    assert configs.from_yaml(configs.as_yaml(config)) == config
    plan = configs.describe_plan(config)
    assert "at most 30 steps" in plan and "25% rooms, 75% lakes" in plan


def test_another_environment_takes_no_options_of_the_first(two: Path) -> None:
    two.write_text(TWO.replace("options: {games: 4}, ", ""))
    config = configs.load(two, ["env.options.x=1"])
    assert configs.environments(config)["lakes"].env.options == {}


def test_a_run_with_one_environment_is_as_it_was() -> None:
    config = Config()
    assert configs.environments(config) == {"textworld": config}
    assert configs.environment_config(config, "a/b") is config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("environments.Lakes.weight=1", ["environments.Lakes", "lower-case"]),
        ("environments.lake.weight=3", ["has no environment lake", "did you mean", "lakes"]),
        ("environments.lakes.weight=0", ["environments.lakes.weight=0", "above 0"]),
        ("environments.lakes.weight=often", ["often", "not a number"]),
        ("environments.lakes.share=1", ["environments.lakes.share", "weight, env and prompt"]),
        ("environments.lakes.env=textworld", ["environments.lakes.env.name=textworld"]),
        ("environments=[lakes]", ["a section for each", "{rooms: {weight: 1, env:"]),
        ("environments.lakes=textworld", ["a section for each", "{rooms: {weight: 1, env:"]),
        ("environments.lakes.env.max_stps=3", ["max_stps", "max_steps"]),
        ("environments.lakes.env.max_steps=many", ["environments.lakes.env", "many"]),
        ("environments.lakes.env.max_steps=0", ["env.max_steps=0", "above 0"]),
        ("environments.lakes.env.win_reward=1e7", ["env.win_reward=1e+07", "above 1e+06"]),
        ("environments.lakes.prompt.stop=[a]", ["one engine", "prompt.stop"]),
        ("environments.lakes.prompt.parser=tag", ["prompt.parser", "'tags'"]),
        ("environments.lakes.prompt.template=mine.yaml", ["mine.yaml", "absolute path"]),
    ],
)
def test_a_mistake_is_one_line(two: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load(two, [override])
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)

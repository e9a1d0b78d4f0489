"""Show settings without secrets, and know when there are some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import configs
from configs import Config, holds_secrets, shown


def with_options(options: dict[str, object]) -> Config:
    config = Config()
    return replace(config, env=replace(config.env, options=options))


@pytest.mark.parametrize(
    ("options", "is_secret"),
    [
        ({"api_key": "s3cret"}, True),
        ({"servers": [{"auth": {"name": "x"}}]}, True),
        ({"url": "http://me:s3cret@host/x"}, True),
        ({"url": "http://host/x?k=s3cret"}, True),
        ({"url": "http://host/a@b", "data": "runs/games"}, False),
        ({"n_keys": 3}, False),
        ({}, False),
    ],
)
def test_a_secret_has_a_name_or_is_part_of_a_url(
    options: dict[str, object], is_secret: bool
) -> None:
    assert holds_secrets(with_options(options)) is is_secret


def test_a_storage_has_its_parameters_behind_a_question_mark() -> None:
    """Keep a run with such a storage open to others: no key may stand there."""
    config = Config()
    uri = "s3://bucket/run?endpoint_override=localhost:9000"
    assert not holds_secrets(replace(config, store=replace(config.store, uri=uri)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("see http://me:s3@cret@h/y?k=1#2 and ftp://x:y@z", "see http://h/y and ftp://z"),
        ("a@b is no URL?", "a@b is no URL?"),
        (["http://x?y", 3], ["http://x", 3]),
        ("://" * 100_000, "://" * 100_000),  # in linear time
    ],
)
def test_a_url_is_shown_without_password_and_query(value: object, expected: object) -> None:
    assert list(shown("model.path", value)) == [("model.path", expected)]


def test_every_setting_of_the_shipped_configs_is_shown() -> None:
    config = configs.load(Path(configs.__file__).parent / "quickstart.yaml")
    settings = configs.shown_settings(config)
    assert settings["env.options.train_games"] == config.env.options["train_games"]
    assert settings["env.options.cache_dir"] == "(not shown)"
    assert settings["learner.steps"] == config.learner.steps

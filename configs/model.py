"""The directory of a model that a run is to begin with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from configs.check import ConfigError
from configs.schema import Config

# Values of model_type in a model's config.json: whose images we know how to give to vLLM, and where
# the learner puts them.
VISION_MODEL_TYPES = ("qwen2_5_vl", "qwen2_vl")
Part = TypeVar("Part")
SHOWN_REASON = 400  # characters of a message of transformers, which may list every model it knows


def check_model_path(config: Config) -> None:
    """Check that model.path is the directory of a model we can train. Raises ConfigError."""
    path = config.model.path
    if path and not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={path!r} is not a Hugging Face model directory (no config.json in it); "
            "give one, or a repository of "
            "the Hugging Face Hub such as Qwen/Qwen2.5-1.5B-Instruct, which is downloaded"
        )
    if path and config.learner.zero_stage == 3 and model_type(path) in VISION_MODEL_TYPES:
        raise ConfigError(
            f"learner.zero_stage=3 with the vision model in model.path={path!r} is not supported; "
            "use 1 or 2"
        )


def model_type(path: str) -> str:
    """What the config.json of a Hugging Face model's directory calls its kind; "" if it does not
    say. Raises ConfigError.
    """
    file = Path(path) / "config.json"
    try:
        return str(dict(json.loads(file.read_text())).get("model_type", ""))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable ({error}); download the model again") from error


def loaded(name: str, path: Path | str, load: Callable[[], Part]) -> Part:
    """Return `load()`, which reads the part `name` of the model directory `path` with transformers.

    Raises ConfigError in one line, whatever transformers raises for files that are damaged or made
    to be.
    """
    try:
        return load()
    except Exception as error:
        reason = " ".join(str(error).split())[:SHOWN_REASON]
        raise ConfigError(
            f"the {name} in {path} cannot be loaded ({type(error).__name__}: {reason}); download "
            "the model again, or give "
            "another model.path"
        ) from error

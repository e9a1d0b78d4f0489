"""Check the directory of the model that a run starts from, and load parts of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from configs.check import ConfigError
from configs.schema import Config

# Values of `model_type` in a model's config.json for which images are supported.
VISION_MODEL_TYPES = ("qwen2_5_vl", "qwen2_vl")
MAX_REASON_CHARACTERS = 400  # transformers may list every model it knows
Loaded = TypeVar("Loaded")


def check_model_path(config: Config) -> None:
    """Raise ConfigError unless model.path is the directory of a model that can be trained."""
    path = config.model.path
    if not path:
        return
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={path!r} is not a Hugging Face model directory (no config.json in it); "
            "give one, or a repository of the Hugging Face Hub such as Qwen/Qwen2.5-1.5B-Instruct, "
            "which is downloaded"
        )
    if config.learner.zero_stage == 3 and model_type(path) in VISION_MODEL_TYPES:
        raise ConfigError(
            f"learner.zero_stage=3 with the vision model in model.path={path!r} is not supported; "
            "use 1 or 2"
        )


def model_type(path: str) -> str:
    """Return `model_type` of a model directory's config.json, or "". Raises ConfigError."""
    file = Path(path) / "config.json"
    try:
        return str(dict(json.loads(file.read_text())).get("model_type", ""))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is not readable ({error}); download the model again") from error


def loaded(name: str, path: Path | str, load: Callable[[], Loaded]) -> Loaded:
    """Return `load()`, which reads the part `name` of the model directory `path`.

    Raises ConfigError, in one line, for whatever transformers raises on damaged or hostile files.
    """
    try:
        return load()
    except Exception as error:
        reason = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
        raise ConfigError(
            f"the {name} in {path} cannot be loaded ({type(error).__name__}: {reason}); download "
            "the model again, or give another model.path"
        ) from error

"""Check the directory of the model that a run starts from, and load parts of it.

    check_model_directory(path)     # before anything of a directory is loaded
    tokenizer = loaded("tokenizer", path, load=lambda: AutoTokenizer.from_pretrained(path))

A directory may come with a stranger's run. transformers joins the names in a weight index to the
directory as they are, and asks the Hugging Face Hub for a backbone that a configuration names.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from configs.check import ConfigError
from configs.schema import Config
from printable import REASON_CHARACTERS, one_line

# Values of `model_type` in a model's config.json for which images are supported.
VISION_MODEL_TYPES = ("qwen2_5_vl", "qwen2_vl")
# Arguments of from_pretrained. A model's own code never runs here.
FROM_FILES = {"local_files_only": True, "trust_remote_code": False}
ADAPTER_FILE = "adapter_config.json"  # of peft
# Such files map tensors to weight files. transformers reads two by their names, and others that a
# configuration names. Those of other frameworks have other endings.
INDEX_ENDINGS = (".safetensors.index.json", ".bin.index.json")
WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.(safetensors|bin)")
# Keys of config.json, at any depth, by which transformers looks for a model or a configuration
# elsewhere.
FOLLOWED_KEYS = (
    "backbone",
    "configuration_files",
    "transformers_weights",
    "use_pretrained_backbone",
)
# The keys of these two files become arguments of the tokenizer's class. Some are paths of files; of
# IGNORED_FILE_KEYS, which old tokenizers have, transformers opens none.
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
FILE_KEY = re.compile(r".*_files?|vocab|merges|init_inputs", re.DOTALL)
IGNORED_FILE_KEYS = ("tokenizer_file", "special_tokens_map_file")
CODE_KEY = "auto_map"  # of a model's own code; at the top it is ignored
Loaded = TypeVar("Loaded")
_offline = threading.RLock()


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


def check_model_directory(path: Path | str) -> None:
    """Raise ConfigError if loading the directory would read other files, or ask the Hub."""
    path = Path(path)
    if os.path.lexists(path / ADAPTER_FILE):
        # transformers passes it to peft, which may import modules that it names. No argument of
        # from_pretrained prevents that.
        raise ConfigError(
            f"{path} has {ADAPTER_FILE}, so it is no whole model; merge the adapter into its model "
            "first"
        )
    for index in index_files(path):
        try:
            indexed_files(index)
        except ValueError as error:
            raise ConfigError(
                f"{index} cannot be used: {error}; download the model again"
            ) from None
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        _check_tokenizer(path / name)
    if (path / "config.json").is_file():
        _check_kind(path)


def _check_tokenizer(file: Path) -> None:
    """Raise ConfigError if a tokenizer's description names other files."""
    if not file.is_file():
        return
    try:
        content = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{file} is not readable ({error!s:.200}); download the model again"
        ) from error
    # What SPECIAL_TOKENS says replaces the paths that transformers has found.
    ignored = IGNORED_FILE_KEYS if file.name == TOKENIZER_CONFIG else ()
    for key, value in content.items():
        if value and key not in ignored and FILE_KEY.fullmatch(key):
            raise ConfigError(
                f"{file} has the key {key!r:.80}, which names another file; nothing of it was "
                "loaded. Remove the key, or give another model.path"
            )


def index_files(directory: Path) -> list[Path]:
    """Return every weight index in a directory, whatever its name is."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name.endswith(INDEX_ENDINGS))


def indexed_files(index: Path) -> set[str]:
    """Return the weight files that an index names. Raises ValueError for others than beside it."""
    try:
        names = list(dict(dict(json.loads(index.read_bytes()))["weight_map"]).values())
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is not readable ({type(error).__name__}: {error!s:.200})") from None
    files = {name for name in names if isinstance(name, str) and WEIGHT_FILE.fullmatch(name)}
    if strange := [name for name in names if not isinstance(name, str) or name not in files]:
        raise ValueError(f"weight_map names {strange[0]!r:.80}, not a .safetensors file beside it")
    return files


def _check_kind(path: Path) -> None:
    """Raise ConfigError unless config.json is of a kind that is trained, and names nothing else."""
    # Imported here: it takes a second.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file, kind = path / "config.json", model_type(str(path))
    if kind not in VISION_MODEL_TYPES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"the configuration in {path} cannot be loaded: its model_type {kind!r:.80} is no "
            "causal language model, nor one of "
            f"{', '.join(VISION_MODEL_TYPES)}; give another model.path"
        )
    content = json.loads(file.read_bytes())
    inside = [key for value in content.values() for key in _keys(value)]
    followed = [key for key in [*content, *inside] if key in FOLLOWED_KEYS]
    if followed or CODE_KEY in inside:
        raise ConfigError(
            f"{file} has the key {[*followed, CODE_KEY][0]!r}, which names another model or code; "
            "nothing of it was loaded. Give another model.path"
        )


def _keys(value: object) -> Iterator[str]:
    """Yield the keys of all mappings in a value of JSON."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


@contextmanager
def _without_network() -> Iterator[None]:
    """Keep huggingface_hub from asking the Hub; local_files_only does not cover every request."""
    from huggingface_hub import constants

    with _offline:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


def loaded(name: str, path: Path | str, *, load: Callable[[], Loaded]) -> Loaded:
    """Return `load()`, which reads the part `name` of the model directory `path`.

    Raises ConfigError, in one line, for whatever transformers raises on damaged or hostile files.
    The Hub is not asked meanwhile.
    """
    check_model_directory(path)
    try:
        with _without_network():
            return load()
    except Exception as error:
        reason = one_line(error)[:REASON_CHARACTERS]
        raise ConfigError(
            f"the {name} in {path} cannot be loaded ({type(error).__name__}: {reason}); download "
            "the model again, or give another model.path"
        ) from error

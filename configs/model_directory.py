"""Check the directory of the model that a run starts from, and load parts of it.

    check_model_directory(path)     # before anything of a directory is loaded
    tokenizer = load_safely("tokenizer", path, load=lambda: AutoTokenizer.from_pretrained(path))

A directory may come with a stranger's run. transformers joins the names in a weight index to the
directory as they are, and asks the Hugging Face Hub for a backbone that a configuration names.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from bounded_json import read_value
from configs.derived import serves_adapters
from configs.errors import ConfigError
from configs.schema import Config
from path_bounds import MAX_FILES, MAX_NAMES, leads_far
from printable import REASON_CHARACTERS, one_line

# Values of `model_type` in a model's config.json for which images are supported.
VISION_MODEL_TYPES = ("qwen2_5_vl", "qwen2_vl")
VISION_NAME = re.compile(r"Qwen2(\.5)?-VL\b")  # of their repositories
# Of a JSON file that is read here. The weight index of 1,000 files has 2 MiB.
MAX_DESCRIPTION_BYTES = 64 << 20
# Of such a file. The weight index of a model with 384 experts has 211,000. So many are read in
# seconds, and 64 MiB of empty lists in minutes.
MAX_DESCRIPTION_VALUES = 2**19
# Arguments of from_pretrained. A model's own code never runs here.
SAFE_LOADING = {"local_files_only": True, "trust_remote_code": False}
ADAPTER_FILE = "adapter_config.json"  # of peft
# Such files map tensors to weight files. transformers reads two by their names, and others that a
# configuration names. Those of other frameworks have other endings.
INDEX_ENDINGS = (".safetensors.index.json", ".bin.index.json")
MAX_INDEXES = 8  # of a directory, which has one or two: a large one takes a second to be read
WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.(safetensors|bin)")
# Keys of config.json, at any depth, by which transformers or vLLM look for a model or a
# configuration elsewhere.
FOLLOWED_KEYS = (
    "backbone",
    "configuration_files",
    "feature_extractor_type",
    "image_processor_type",
    # vLLM would load the model that these name instead of this one.
    "speculators_config",
    "speculators_model_type",
    "transformers_weights",
    "use_pretrained_backbone",
)
# The keys of these files become arguments of transformers' classes, and any text among them may be
# opened as a file. So text is allowed only where a tokenizer or an image processor needs it.
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
TOKENIZER_TEXT = re.compile(
    r".*_token|added_tokens_decoder|(additional|extra)_special_tokens|(chat|response)_template|"
    r"response_schema|tool_parser_type|tokenizer_(class|type)|processor_class|auto_map|backend|"
    r"name_or_path|model_input_names|(padding|truncation)_side|truncation_strategy|errors",
    re.DOTALL,
)
# Paths in tokenizer_config.json of old tokenizers, of which transformers opens none. Paths in the
# other file replace those that it has found.
IGNORED_FILE_KEYS = ("tokenizer_file", "special_tokens_map_file")
IMAGE_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
IMAGE_TEXT = re.compile(
    r"(image_processor|video_processor)_type|processor_class|chat_template|"
    r"(input_)?data_format|return_tensors"
)
IMAGE_CLASS = re.compile(r"Qwen2(_5_)?VL(Image|Video)?Processor(Fast|Pil)?")
# A number under such a key would be opened as a descriptor.
FILE_KEY = re.compile(r".*(file|files|path|spm)|vocab|merges|init_inputs", re.DOTALL)
TOKENIZER_CLASS = "tokenizer_class"
IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation")
CODE_KEY = "auto_map"  # of a model's own code; at the top it is ignored
Loaded = TypeVar("Loaded")
_loading = threading.RLock()


def check_model_path(config: Config) -> None:
    """Raise ConfigError unless model.path and critic.path are directories of trainable models."""
    critic = config.critic.path
    if critic and not (Path(critic) / "config.json").is_file():
        raise ConfigError(
            f"critic.path={critic!r} is not a Hugging Face model directory (no config.json in it); "
            "give one, or leave it out for a copy of the policy's base model"
        )
    path = config.model.path
    if not path:
        return
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"model.path={path!r} is not a Hugging Face model directory (no config.json in it); "
            "give one, or a repository of the Hugging Face Hub such as Qwen/Qwen2.5-1.5B-Instruct, "
            "which is downloaded"
        )
    refused = refused_for_vision(config)
    if refused and model_type(path) in VISION_MODEL_TYPES:
        setting, why = next(iter(refused.items()))
        raise ConfigError(f"{setting} with the vision model in model.path={path!r}{why}")


def refused_for_vision(config: Config) -> dict[str, str]:
    """Return the settings that go with no vision model, each with the reason and the fix."""
    learner, refused = config.learner, {}
    if learner.zero_stage == 3:
        refused["learner.zero_stage=3"] = " is not supported; use 1 or 2"
    if learner.sequence_parallel > 1:
        setting = f"learner.sequence_parallel={learner.sequence_parallel}"
        refused[setting] = " is not supported; use 1"
    if serves_adapters(config.model):
        refused[f"model.lora_rank={config.model.lora_rank}"] = (
            ": vLLM would serve the adapters of its language layers only, not those of its vision "
            "tower; use model.lora_serving=merged"
        )
    return refused


def model_type(path: str) -> str:
    """Return `model_type` of a model directory's config.json, or "". Raises ConfigError."""
    file = Path(path) / "config.json"
    try:
        return str(dict(_read_json(file)).get("model_type", ""))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} is not readable ({error}); download the model again") from error


def is_vision_model(path: str) -> bool:
    """Return whether a model reads images; of one that is not here, by its name."""
    if (Path(path) / "config.json").is_file():
        return model_type(path) in VISION_MODEL_TYPES
    return bool(VISION_NAME.search(path))


def read_description(file: Path) -> bytes:
    """Return the content of a JSON file of a model directory. Raises OSError, ValueError.

    A link is followed: downloaded models consist of links. A FIFO would block for ever. Raises
    ConfigError for a file that its owner holds by a lease.
    """
    check_regular(file)
    try:
        with open(file, "rb", opener=_open_now) as opened:
            data = opened.read(MAX_DESCRIPTION_BYTES + 1)
    except BlockingIOError:
        raise ConfigError(
            f"{file} is held by a lease of another program; copy the model, or ask its owner"
        ) from None
    if len(data) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"it has more than {MAX_DESCRIPTION_BYTES:,} bytes")
    return data


def _open_now(path: str, flags: int) -> int:
    # A program of the owner's may have a lease on a file. Whoever opens it waits for 45 s then.
    return os.open(path, flags | os.O_NONBLOCK)


def _read_json(file: Path) -> Any:
    """Return the value of a JSON file of a model directory. Raises OSError, ValueError."""
    return read_value(read_description(file), max_values=MAX_DESCRIPTION_VALUES)


def check_regular(file: Path) -> None:
    """Raise ValueError for a FIFO, a socket or a device: reading it may never end."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError(f"{file.name} is no regular file")


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
    if leads_far(path):
        raise ConfigError(
            f"{path} leads through more than {MAX_NAMES} names; give the directory behind it"
        )
    home = Path(os.path.realpath(path))
    entries = list(islice(path.iterdir(), MAX_FILES + 1)) if path.is_dir() else []
    if len(entries) > MAX_FILES:
        raise ConfigError(
            f"{path} has more than {MAX_FILES:,} files; give a directory of the model alone"
        )
    for file in entries:
        if file.is_symlink() and leads_far(home / file.name):
            raise ConfigError(
                f"{file} leads through more than {MAX_NAMES} names; put the file in its place"
            )
        if file.exists() and not (file.is_file() or file.is_dir()):  # a missing file is told later
            raise ConfigError(
                f"{file} is no regular file but a FIFO, a socket or a device; remove it"
            )
    indexes = weight_indexes(path)
    if len(indexes) > MAX_INDEXES:
        raise ConfigError(
            f"{path} has {len(indexes)} weight indexes, more than {MAX_INDEXES}; remove those of "
            "other variants of the model"
        )
    for index in indexes:
        try:
            files_of_index(index)
        except ValueError as error:
            raise ConfigError(
                f"{index} cannot be used: {error}; download the model again"
            ) from None
    for name in TOKENIZER_FILES:
        _check_tokenizer(path / name)
    if (path / "config.json").is_file():
        _check_kind(path)
        if model_type(str(path)) in VISION_MODEL_TYPES:
            for name in IMAGE_FILES:
                _check_image_processor(path / name)


def _check_tokenizer(file: Path) -> None:
    """Raise ConfigError if a tokenizer's description names other files, or is no tokenizer's."""
    content = description(file)
    ignored = IGNORED_FILE_KEYS if file.name == TOKENIZER_FILES[0] else ()
    for name, value in content.items():
        if not TOKENIZER_TEXT.fullmatch(name) and name not in ignored:
            _check_no_text(file, _leaves(name, value))
    if TOKENIZER_CLASS in content:
        _check_tokenizer_class(file, content[TOKENIZER_CLASS])


def _check_image_processor(file: Path) -> None:
    """Raise ConfigError if an image processor's description names other files or classes."""
    leaves = list(_leaves("", description(file)))
    _check_no_text(file, [leaf for leaf in leaves if not IMAGE_TEXT.fullmatch(leaf[0])])
    for key, value in leaves:
        if value and key.endswith(("_type", "_class")) and not IMAGE_CLASS.fullmatch(str(value)):
            raise ConfigError(
                f"{file} has {key}={value!r:.80}, which is not of a Qwen2-VL model; give another "
                "model.path"
            )


def description(file: Path) -> dict[str, object]:
    """Return a description's keys, none of a file that is missing. Raises ConfigError."""
    if not file.exists():
        return {}
    try:
        return dict(_read_json(file))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file} is not readable ({error!s:.200}); download the model again"
        ) from error


def _check_no_text(file: Path, leaves: Iterable[tuple[str, object]]) -> None:
    """Raise ConfigError if one of the values may name a file."""
    for key, value in leaves:
        if value not in (None, "") and (isinstance(value, str) or FILE_KEY.fullmatch(key)):
            raise ConfigError(
                f"{file} has the key {key!r:.80}, which may name another file; nothing of it was "
                "loaded. Remove the key, or give another model.path"
            )


def _check_tokenizer_class(file: Path, name: object) -> None:
    """Raise ConfigError if a name is that of a class of transformers that is no tokenizer.

    Such a class would be loaded without SAFE_LOADING, so it may ask on the terminal whether to run
    the directory's code, or load what it likes. Another name means the usual tokenizer.
    """
    # Imported here: they take a second.
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name is None:
        return
    plain = str(name).removesuffix("Fast")
    for each in (str(name), plain, f"{plain}Fast"):  # transformers tries them all
        found = tokenizer_class_from_name(each)
        is_one = isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)
        if not isinstance(name, str) or (found is not None and not is_one):
            raise ConfigError(
                f"{file} has {TOKENIZER_CLASS}={name!r:.80}, which is no tokenizer; nothing of it "
                "was loaded. Give another model.path"
            )


def weight_indexes(directory: Path) -> list[Path]:
    """Return every weight index in a directory, whatever its name is."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if path.name.endswith(INDEX_ENDINGS))


def files_of_index(index: Path) -> set[str]:
    """Return the weight files that an index names. Raises ValueError for others than beside it."""
    try:
        names = list(dict(dict(_read_json(index))["weight_map"]).values())
    except (OSError, ValueError, TypeError, KeyError) as error:
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
    content = description(file)
    # vLLM goes by this name. Some of its classes load further models, which a key names.
    architectures = content.get("architectures")
    usual = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, ())
    if kind not in VISION_MODEL_TYPES and architectures is not None:
        known = [usual] if isinstance(usual, str) else list(usual)
        if not isinstance(architectures, list) or any(one not in known for one in architectures):
            raise ConfigError(
                f"{file} has architectures={str(architectures)!r:.80}, which for model_type "
                f"{kind!r} must be {' or '.join(known)}; give another model.path"
            )
    items = list(_items(content))
    followed = [key for key, _ in items if key in FOLLOWED_KEYS]
    inside = [key for value in content.values() for key, _ in _items(value)]
    # transformers would load a kernel's code from the Hub
    kernels = [key for key, value in items if IMPLEMENTATION.fullmatch(key) and "/" in str(value)]
    if followed or kernels or CODE_KEY in inside:
        raise ConfigError(
            f"{file} has the key {[*followed, *kernels, CODE_KEY][0]!r}, which names another model "
            "or code; nothing of it was loaded. Give another model.path"
        )
    for key, value in items:
        if key == TOKENIZER_CLASS:
            _check_tokenizer_class(file, value)


def _items(value: object) -> Iterator[tuple[str, object]]:
    """Yield the keys and values of all mappings in a value of JSON."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from one.items()
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what is no list and no mapping in a value of JSON, with the innermost key."""
    waiting = [(key, value)]
    while waiting:
        name, one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.items()
        elif isinstance(one, list):
            waiting += [(name, each) for each in one]
        else:
            yield name, one


@contextmanager
def _alone() -> Iterator[None]:
    """Keep transformers from asking the Hub, and from asking the user whether to run code.

    SAFE_LOADING does not cover every request: some classes do not pass it on.
    """
    from huggingface_hub import constants
    from transformers import dynamic_module_utils

    with _loading:
        offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        wait_s = dynamic_module_utils.TIME_OUT_REMOTE_CODE
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # it refuses and does not read stdin
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = offline
            dynamic_module_utils.TIME_OUT_REMOTE_CODE = wait_s


def load_safely(name: str, path: Path | str, *, load: Callable[[], Loaded]) -> Loaded:
    """Return `load()`, which reads the part `name` of the model directory `path`.

    Raises ConfigError, in one line, for whatever transformers raises on damaged or hostile files.
    Neither the Hub nor the user is asked meanwhile.
    """
    check_model_directory(path)
    try:
        with _alone():
            return load()
    except Exception as error:
        reason = one_line(error)[:REASON_CHARACTERS]
        raise ConfigError(
            f"the {name} in {path} cannot be loaded ({type(error).__name__}: {reason}); download "
            "the model again, or give another model.path"
        ) from error

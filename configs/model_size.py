"""Return the sizes of the models of a run: parameters, and the shape of their layers."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.derived import n_workers
from configs.engine_arguments import TENSOR, parallel_sizes
from configs.errors import ConfigError
from configs.model_directory import description
from configs.schema import Config

BYTES = {"float32": 4, "bfloat16": 2}
TINY_HEAD = 32  # the size of a head of a tiny model, see learner/model/tiny_model.py
LARGEST_SIZE = 1 << 32  # of a layer, a vocabulary or a number of layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a language model's layers."""

    layers: int
    hidden: int
    heads: int  # of the attention's queries
    queries: int  # these heads times their size
    key_values: int  # heads of keys times their size
    feed_forward: int
    vocabulary: int

    @property
    def key_value_heads(self) -> int:
        return self.key_values * self.heads // self.queries


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Parts of a layer, beside its matrices and two norms, of one kind of model."""

    query_bias: bool = False  # queries, keys and values have biases
    bias_keys: tuple[str, ...] = ()  # of config.json: `attention_bias`, `mlp_bias`
    norms_heads: bool = False  # queries and keys are normed, each head by itself


# By `model_type`. Kinds with other parts, such as experts or a vision tower, are not in it.
LAYERS = {
    "llama": Layer(bias_keys=("attention_bias", "mlp_bias")),
    "mistral": Layer(),
    "qwen2": Layer(query_bias=True),
    "qwen3": Layer(bias_keys=("attention_bias",), norms_heads=True),
}

# Of models that may not be downloaded yet, from their config.json on the Hugging Face Hub.
SHAPES = {
    "SmolLM2-135M": Shape(
        layers=30,
        hidden=576,
        heads=9,
        queries=576,
        key_values=192,
        feed_forward=1536,
        vocabulary=49_152,
    ),
    "Qwen2.5-1.5B": Shape(
        layers=28,
        hidden=1536,
        heads=12,
        queries=1536,
        key_values=256,
        feed_forward=8960,
        vocabulary=151_936,
    ),
    "Qwen2.5-3B": Shape(
        layers=36,
        hidden=2048,
        heads=16,
        queries=2048,
        key_values=256,
        feed_forward=11_008,
        vocabulary=151_936,
    ),
    "Qwen2.5-VL-3B": Shape(
        layers=36,
        hidden=2048,
        heads=16,
        queries=2048,
        key_values=256,
        feed_forward=11_008,
        vocabulary=151_936,
    ),
    "Qwen2.5-7B": Shape(
        layers=28,
        hidden=3584,
        heads=28,
        queries=3584,
        key_values=512,
        feed_forward=18_944,
        vocabulary=152_064,
    ),
}


def model_shape(config: Config) -> Shape:
    """Return the sizes of the policy, from its directory or by its name. Raises ConfigError."""
    if not config.model.path:
        tiny = config.model.tiny
        return Shape(
            layers=tiny.layers,
            hidden=tiny.hidden_size,
            heads=max(1, tiny.hidden_size // TINY_HEAD),
            queries=tiny.hidden_size,
            key_values=tiny.hidden_size,
            feed_forward=2 * tiny.hidden_size,
            vocabulary=tiny.vocabulary_size,
        )
    file = Path(config.model.path) / "config.json"
    if file.is_file():
        return _shape_in(file)
    names = [name for name in SHAPES if name in config.model.path]
    if not names:
        raise ConfigError(
            f"model.path={config.model.path!r} is no local directory, and --plan knows the sizes "
            f"of {', '.join(SHAPES)} only; download it, and give its directory"
        )
    return SHAPES[max(names, key=len)]


def adapter_parameters(config: Config) -> float:
    """Return the parameters of a run's adapters, 0 without adapters or for an unknown model.

    Each layer has seven adapted matrices, of which a vision model's images have none here. One of
    n_in x n_out has rank (n_in + n_out) parameters. Example: rank 64 on Qwen2.5-1.5B gives
    28 x 64 x (2 (1536 + 1536) + 2 (1536 + 256) + 3 (1536 + 8960)) = 73.9 million.
    """
    shape = known_shape(config) if config.model.lora_rank else None
    if shape is None:
        return 0.0
    of_layer = (
        2 * (shape.hidden + shape.queries)  # queries, and the projection of the attention's result
        + 2 * (shape.hidden + shape.key_values)
        + 3 * (shape.hidden + shape.feed_forward)
    )
    return float(shape.layers * config.model.lora_rank * of_layer)


def check_heads(config: Config) -> None:
    """Check that GPUs of an engine, and of a sequence group, can divide the attention's heads.

    Raises ConfigError.
    """
    shape = known_shape(config)
    if shape is None:
        return
    shared_by = config.learner.sequence_parallel
    if shape.heads % shared_by:
        raise ConfigError(
            f"learner.sequence_parallel={shared_by} cannot divide the {shape.heads} attention "
            f"heads of {config.model.path or 'the tiny model'} evenly; use a divisor of "
            f"{shape.heads}"
        )
    if not n_workers(config):
        return
    n_parts, n_stages = parallel_sizes(config.actors)
    if not _divides(n_parts, shape):
        fitting = max(n for n in range(1, n_parts) if _divides(n, shape))
        setting = f"actors.engine.{TENSOR}={fitting}"
        if config.actors.gpus_per_worker:
            setting = f"actors.gpus_per_worker={fitting * n_stages}"
        raise ConfigError(
            f"an engine would split {shape.heads} attention heads of "
            f"{config.model.path or 'the tiny model'}, {shape.key_value_heads} heads of keys and "
            f"values, and {shape.feed_forward} feed-forward columns over {n_parts} GPUs, which "
            f"cannot be done evenly; set {setting}"
        )


def _divides(n_parts: int, shape: Shape) -> bool:
    """Return whether vLLM splits a layer over so many GPUs: fewer heads of keys are repeated."""
    n_heads = shape.key_value_heads
    return (
        shape.heads % n_parts == 0
        and (n_heads % n_parts == 0 or n_parts % n_heads == 0)
        and shape.feed_forward % n_parts == 0
    )


def known_shape(config: Config) -> Shape | None:
    """Return the sizes of the policy, or None for a model whose sizes are unknown."""
    try:
        return model_shape(config)
    except ConfigError:
        return None


def _shape_in(file: Path) -> Shape:
    """Return the sizes in a config.json; a vision model has its text model's in `text_config`."""
    try:
        content = description(file)
        sizes: Any = content.get("text_config", content)
        heads = _size(sizes["num_attention_heads"])
        hidden = _size(sizes["hidden_size"])
        head = _size(sizes.get("head_dim") or hidden // heads)
        return Shape(
            layers=_size(sizes["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            queries=heads * head,
            key_values=_size(sizes.get("num_key_value_heads") or heads) * head,
            feed_forward=_size(sizes["intermediate_size"]),
            vocabulary=_size(sizes["vocab_size"]),
        )
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} does not say the sizes of the model ({type(error).__name__}: {error!s:.80}); "
            "--plan needs them"
        ) from error


def vocabulary_size(directory: Path) -> int:
    """Return the number of tokens that a model has an embedding of. Raises ConfigError."""
    file = directory / "config.json"
    try:
        content = description(file)
        sizes: Any = content.get("text_config", content)
        return _size(sizes["vocab_size"])
    except (ArithmeticError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} does not say how many tokens the model has ({error!s:.80}); give another "
            "model.path"
        ) from error


def _size(value: Any) -> int:
    """Return a size as a whole number. Raises ValueError for one that no model has."""
    size = int(value)
    if not 1 <= size <= LARGEST_SIZE:
        raise ValueError(f"it has a size of {value!s:.40}")
    return size


def model_billions(config: Config) -> float:
    """Return the billions of parameters, counted in a local directory or read from the name."""
    if not config.model.path:
        tiny = config.model.tiny
        # four square matrices of the attention, three of the feed-forward layer twice as large
        layer_parameters = 10 * tiny.hidden_size**2
        return (tiny.vocabulary_size * tiny.hidden_size + tiny.layers * layer_parameters) / 1e9
    directory = Path(config.model.path)
    if directory.is_dir():
        return billions_in(directory)
    named = re.search(r"(\d+(?:\.\d+)?)([bm])\b", config.model.path, re.IGNORECASE)
    if not named:
        raise ConfigError(
            f"model.path={config.model.path!r} is no local directory and its name does not say its "
            "size (like '1.5B')"
        )
    return float(named.group(1)) * (1.0 if named.group(2).lower() == "b" else 1e-3)


def size_line(config: Config) -> str:
    """Say how many parameters the policy has, and if only its name tells. Raises ConfigError."""
    by_name = " by its name" if is_known_by_name(config) else ""
    return f"{model_billions(config):.3g} billion parameters{by_name}"


def is_known_by_name(config: Config) -> bool:
    """Return whether the policy is not here, so that its size is the rounded one of its name."""
    return bool(config.model.path) and not Path(config.model.path).is_dir()


def billions_in(directory: Path) -> float:
    """Return the billions of parameters of the model in a directory. Raises ConfigError.

    They are counted from the shapes in config.json. For a kind of model that is not in LAYERS they
    are the bytes of its weight files, divided by those of a parameter.
    """
    content = description(directory / "config.json")
    if layer := LAYERS.get(str(content.get("model_type"))):
        with suppress(ConfigError):  # it does not say the sizes
            return _counted(content, _shape_in(directory / "config.json"), layer) / 1e9
    dtype = str(content.get("dtype", content.get("torch_dtype", "bfloat16")))  # the older name
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return size / BYTES.get(dtype, 2) / 1e9


def _counted(content: dict[str, object], shape: Shape, layer: Layer) -> int:
    """Return the parameters of a model of LAYERS: embeddings, layers, and the last norm.

    Example: Qwen2.5-7B has 28 layers of 3584 (2 x 3584 + 2 x 512 + 3 x 18,944) weights, 3584 + 2 x
    512 biases and 2 x 3584 in norms; 2 x 152,064 x 3584 embeddings, and 3584 in the last norm:
    7,615,616,512.
    """
    given = [key for key in layer.bias_keys if content.get(key)]
    biases = 0
    if layer.query_bias or "attention_bias" in given:
        biases += shape.queries + 2 * shape.key_values
    if "attention_bias" in given:
        biases += shape.hidden
    if "mlp_bias" in given:
        biases += 2 * shape.feed_forward + shape.hidden
    norms = 2 * shape.hidden
    if layer.norms_heads:
        norms += 2 * (shape.queries // shape.heads)
    weights = shape.hidden * (2 * shape.queries + 2 * shape.key_values + 3 * shape.feed_forward)
    n_embeddings = 1 if content.get("tie_word_embeddings", False) else 2
    return (
        n_embeddings * shape.vocabulary * shape.hidden
        + shape.layers * (weights + biases + norms)
        + shape.hidden
    )

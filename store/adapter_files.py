"""Describe and check a published LoRA adapter: the directory that peft and vLLM read.

    weights/v000007/
      adapter_model.safetensors   A and B of each adapted layer; the version's digest is its
      adapter_config.json         peft's: rank, alpha, names of the adapted layers
      tokenizer.json              the base model's, for the viewer
      base.json                   {"digest": "ab12..."}: the weights that A and B belong to

    write_base(directory, digest=files_digest(weight_files(base)))
    check_adapter(directory, rank=16, alpha=32.0, base_shapes=..., base_digest=...)

The base model is not copied. Whoever serves or merges an adapter compares the base's digest first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from store.errors import UnsafePathError
from store.opened_version import OpenedVersion
from store.untrusted.file_access import MAX_TEXT_BYTES, copy_first, read_bytes
from store.weight_files import WeightFileError, tensor_shapes

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base.json"
AUTO_MAPPING = "auto_mapping"  # peft imports the module that it names
# Every name in an adapter file begins with the name of peft's wrapper around the model.
ADAPTER_PREFIX = "base_model.model."
WEIGHT_SUFFIX = ".weight"

Shapes = Mapping[str, list[int]]


def is_adapter(directory: Path) -> bool:
    """Return whether a version holds an adapter, not the weights of a whole model."""
    return (directory / ADAPTER_CONFIG_FILE).is_file()


def write_base(directory: Path, *, digest: str) -> None:
    """Record the digest of the base model's weight files beside an adapter."""
    (directory / BASE_FILE).write_text(json.dumps({"digest": digest}) + "\n")


def copy_adapter(version: OpenedVersion, dest: Path) -> None:
    """Copy an adapter's files, which may be a stranger's. The base model's tokenizer is left.

    Raises UnsafePathError for a link, a file that is not regular, and JSON beyond MAX_TEXT_BYTES:
    the copy would hold a file of the reader, or fill the disk. Raises FileNotFoundError, and
    WeightFileError for a configuration that names code.
    """
    for name in (ADAPTER_CONFIG_FILE, BASE_FILE):
        data = version.read_file(name, at_most=MAX_TEXT_BYTES)
        is_config = name == ADAPTER_CONFIG_FILE
        if is_config and _parsed(data, version.path / name).get(AUTO_MAPPING) is not None:
            raise WeightFileError(
                f"{version.path / name} has the key {AUTO_MAPPING!r}, which names code that peft "
                "would import; no run writes it. Export another version"
            )
        (dest / name).write_bytes(data)
    descriptor = version.open_file(ADAPTER_FILE)
    with open(descriptor, "rb"), (dest / ADAPTER_FILE).open("wb") as copied:
        copy_first(descriptor, copied, n_bytes=os.fstat(descriptor).st_size)


def check_adapter(
    directory: Path, *, rank: int, alpha: float, base_shapes: Shapes, base_digest: str
) -> None:
    """Raise WeightFileError unless the adapter is one of this rank, alpha and base model.

    `base_shapes` are those of the base model's tensors. vLLM would leave a layer without an adapter
    as it is, and would scale by any alpha, without an error.
    """
    if not is_adapter(directory):
        raise WeightFileError(
            f"{directory} has no {ADAPTER_CONFIG_FILE}, so it is no adapter: it was published with "
            "model.lora_serving=merged. Go on with that setting, or publish the adapter again"
        )
    settings = _json_object(directory / ADAPTER_CONFIG_FILE)
    for key, expected, setting in (
        ("r", rank, "model.lora_rank"),
        ("lora_alpha", alpha, "model.lora_alpha"),
    ):
        if settings.get(key) != expected:
            raise WeightFileError(
                f"{directory / ADAPTER_CONFIG_FILE} has {key}={settings.get(key)!r}, the run has "
                f"{setting}={expected}; publish the adapter of this run"
            )
    found = _json_object(directory / BASE_FILE).get("digest")
    if found != base_digest:
        raise WeightFileError(
            f"the adapter in {directory} belongs to a base model with digest {found}, and the base "
            f"model here has {base_digest}; give every node the same model.path"
        )
    targets = settings.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise WeightFileError(
            f"{directory / ADAPTER_CONFIG_FILE} has target_modules={targets!r}, which is no list "
            "of layers; publish the adapter again"
        )
    _check_shapes(
        tensor_shapes(directory / ADAPTER_FILE),
        expected=adapter_shapes(base_shapes, targets=targets, rank=rank),
        source=directory,
    )


def adapter_shapes(base_shapes: Shapes, *, targets: Sequence[str], rank: int) -> Shapes:
    """Return the tensors of an adapter on every layer whose name is or ends with a target.

    Example: model.layers.0.mlp.up_proj.weight of shape [O, I] gives [rank, I] for A and [O, rank]
    for B, with the target up_proj, mlp.up_proj or the whole name.
    """
    known = frozenset(targets)  # a stranger's list may have a million names
    shapes = {}
    for name, shape in base_shapes.items():
        layer = name.removesuffix(WEIGHT_SUFFIX)
        if layer != name and len(shape) == 2 and not known.isdisjoint(_endings(layer)):
            n_outputs, n_inputs = shape
            shapes[f"{ADAPTER_PREFIX}{layer}.lora_A{WEIGHT_SUFFIX}"] = [rank, n_inputs]
            shapes[f"{ADAPTER_PREFIX}{layer}.lora_B{WEIGHT_SUFFIX}"] = [n_outputs, rank]
    return shapes


def _endings(layer: str) -> Iterator[str]:
    """Yield the names that stand for a layer: a.b.c, b.c and c."""
    while layer:
        yield layer
        layer = layer.partition(".")[2]


def _check_shapes(found: Shapes, *, expected: Shapes, source: Path) -> None:
    names = found.keys() | expected.keys()
    wrong = sorted(name for name in names if found.get(name) != expected.get(name))
    if wrong:
        name = wrong[0]
        raise WeightFileError(
            f"the adapter in {source} does not fit the base model: {len(wrong)} tensors differ, "
            f"the first is {name}, of shape {found.get(name, 'missing')} here and "
            f"{expected.get(name, 'missing')} there. Publish an adapter of this base model, or use "
            "model.lora_serving=merged"
        )


def _json_object(path: Path) -> Mapping[str, Any]:
    try:
        data = read_bytes(path, root=path.parent, at_most=MAX_TEXT_BYTES)
    except FileNotFoundError as error:
        raise WeightFileError(f"{path} is not there; publish the adapter again") from error
    except (UnsafePathError, IsADirectoryError) as error:
        raise WeightFileError(f"{error}; publish the adapter again") from error
    return _parsed(data, path)


def _parsed(data: bytes, path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WeightFileError(f"{path} is not JSON ({error}); publish the adapter again") from error
    if not isinstance(found, dict):
        raise WeightFileError(f"{path} is no JSON object; publish the adapter again")
    return found

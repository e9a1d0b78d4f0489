"""Load a model for ZeRO 3 so that no rank ever holds the whole of it.

    causal_lm = load_partitioned(path, model_of=AutoModelForCausalLM, config=config, dtype=...,
                                 learner=learner)          # None: it has to be loaded whole
    with only_last_layer(causal_lm):
        causal_lm.get_decoder()(...)                       # before DeepSpeed's hooks are there

All ranks call these together, after `join_ranks`. The model is made without weights. Then rank 0
reads one weight after another and sends it to the others, and each rank keeps its part of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from configs import ConfigError, LearnerConfig, load_safely
from learner.distributed.deepspeed_setup import (
    accelerator,
    divide_parameter,
    full_parameter,
)
from printable import one_line
from store import weight_files

_log = logging.getLogger(__name__)


def load_partitioned(
    path: Path, *, model_of: Any, config: Any, dtype: torch.dtype, learner: LearnerConfig
) -> PreTrainedModel | None:
    """Return the model in `path`, divided among the ranks.

    `model_of` is one of transformers' auto classes. Return None, with a line in the log, unless the
    files have every weight by its name in the model and in its shape. transformers may find the
    weights of such a model under older names, or say which is missing. Raises ConfigError for files
    that cannot be read.
    """
    causal_lm, found = load_safely(
        "weights", path, load=lambda: (_empty(model_of, config, dtype=dtype), _shapes(path))
    )
    if why := _why_whole(causal_lm, found):
        _log.warning("every rank loads all of %s: %s", path, why)
        return None
    owners = _owners(causal_lm)
    first: nn.Parameter | None = None
    # One room for every weight in turn. Memory of its own for each would leave holes between the
    # kept parts, which the C library gives back to nobody: the peak was that of the whole model.
    room = torch.empty(max(each.numel() for each in causal_lm.parameters()), dtype=dtype)
    for name, empty in list(causal_lm.named_parameters()):
        file, _ = found[name]
        weight = room[: empty.numel()].view(empty.shape)
        if dist.get_rank() == 0:
            _read(file, name, into=weight)
        parameter = nn.Parameter(weight, requires_grad=empty.requires_grad)
        for module, own_name in owners[id(empty)]:
            module._parameters[own_name] = parameter
        divide_parameter(parameter, like=first, module=causal_lm, dtype=dtype, learner=learner)
        first = first if first is not None else parameter
    for module in causal_lm.modules():
        for own_name, buffer in module._buffers.items():
            # DeepSpeed leaves the buffers of a divided model where they are.
            module._buffers[own_name] = None if buffer is None else buffer.to(accelerator())
    return causal_lm


@contextlib.contextmanager
def only_last_layer(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Make a divided model compute its embedding, last layer and norm alone within this block.

    These are gathered on every rank meanwhile. A model that is not divided stays as it is.
    """
    decoder = causal_lm.get_decoder()
    if not is_partitioned(causal_lm):
        yield
        return
    layers = decoder.layers
    decoder.layers = nn.ModuleList([layers[-1]])
    try:
        with full_parameter(*decoder.parameters()):
            yield
    finally:
        decoder.layers = layers


def is_partitioned(module: nn.Module) -> bool:
    """Return whether ranks hold only their parts of the module's parameters."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def _empty(model_of: Any, config: Any, *, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model whose parameters have shapes and no values."""
    # The seed's numbers are for adapters, which are the same at every ZeRO stage.
    with torch.random.fork_rng(devices=[]), _parameters_without_memory():
        causal_lm = model_of.from_config(config, dtype=dtype, trust_remote_code=False)
    assert isinstance(causal_lm, PreTrainedModel), "an auto class makes one"
    return causal_lm


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Make new parameters shapes without values within this block. Buffers have their values."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # One that is empty already is the embedding's, tied to an output layer.
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _shapes(path: Path) -> Mapping[str, tuple[Path, list[int]]]:
    """Return file and shape of each weight in the files of `path`."""
    found: dict[str, tuple[Path, list[int]]] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                found[name] = file, tensors.get_slice(name).get_shape()
    return found


def _why_whole(causal_lm: PreTrainedModel, found: Mapping[str, tuple[Path, list[int]]]) -> str:
    """Return why a model without weights cannot be filled one by one; "" if it can."""
    if getattr(causal_lm, "_keep_in_fp32_modules_strict", None):
        return "parts of it have a dtype of their own"
    if not isinstance(getattr(causal_lm.get_decoder(), "layers", None), nn.ModuleList):
        return "its decoder has no list of layers"
    parameters = dict(causal_lm.named_parameters())
    ids = {id(parameter) for parameter in parameters.values()}
    for name, tensor in causal_lm.state_dict(keep_vars=True).items():
        if id(tensor) not in ids:
            return f"{name} is no parameter"
        # transformers then ties them only if they are equal.
        if name not in parameters and name in found:
            return f"its files have {name}, which is tied to another weight"
    for name, parameter in parameters.items():
        if name not in found:
            return f"its files have no {name}"
        if found[name][1] != list(parameter.shape):
            return f"{name} is {found[name][1]} in its files"
    return ""


def _owners(module: nn.Module) -> Mapping[int, list[tuple[nn.Module, str]]]:
    """Return the modules that have a parameter, and its name there, by the parameter's id."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((each, name))
    return owners


def _read(file: Path, name: str, *, into: torch.Tensor) -> None:
    # Opened for each weight: a mapping that stays would count the pages of all that were read.
    try:
        with safe_open(file, framework="pt") as tensors:
            into.copy_(tensors.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{name} cannot be read from {file} ({one_line(error)}); download the model again, or "
            "give another model.path"
        ) from error

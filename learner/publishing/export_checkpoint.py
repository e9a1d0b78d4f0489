"""Write a checkpoint of a run as a model, or as LoRA adapters, for other programs."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

import configs
from learner.checkpoint import check_parameters, check_whole, read_content, saved_tensors
from learner.distributed.optimizer_state import MASTER, trainable
from learner.model.lora import merged, write_adapter
from learner.model.vision import checkpoint_names
from learner.publishing.base_model import base_model, load_base_model
from learner.publishing.exportable import ExportError, find_checkpoint
from learner.publishing.publish import write_weights
from store import RunLayout, files_digest, weight_files


def export_checkpoint(layout: RunLayout, learner_step: int, *, dest: Path) -> str:
    """Write a checkpoint's weights with the base model's other files. Return their digest.

    Raises ExportError and CheckpointError.
    """
    model, base = _restored(layout, learner_step)
    as_merged = (name.replace(".base_layer.", ".") for name in model.state_dict())
    names = checkpoint_names(base, as_merged)
    return write_weights(
        ((names.get(name, name), tensor) for name, tensor in merged(model)),
        dest,
        source_dir=base,
    )


def export_adapter(layout: RunLayout, learner_step: int, *, dest: Path) -> str:
    """Write a peft adapter directory. Return the digest of its weights.

    Raises ExportError and CheckpointError.
    """
    if not configs.from_yaml(layout.info.config_yaml).model.lora_rank:
        raise ExportError(
            f"{layout.root} has model.lora_rank=0: there are no adapters; leave out --adapter"
        )
    model, _ = _restored(layout, learner_step)
    write_adapter(model, dest)
    return files_digest(weight_files(dest))


def _restored(layout: RunLayout, learner_step: int) -> tuple[PreTrainedModel, Path]:
    """Return the model of a checkpoint, with its adapters, and the base model's directory.

    Raises StoreError for a stranger's run: its files are opened by path.
    """
    layout.check_trusted()
    source = find_checkpoint(layout, learner_step)
    config = configs.from_yaml(layout.info.config_yaml)
    content = read_content(source)
    check_whole(source, content)
    base = base_model(layout, config)
    model = load_base_model(base, config)
    parameters = trainable(model)
    check_parameters(source, saved=content.policy_parameters, parameters=parameters)
    saved = saved_tensors(source, content)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved(name, MASTER))
    return model, base

"""Check the section `model`, with the settings of the learner that it needs."""

from __future__ import annotations

from configs.derived import serves_adapters
from configs.errors import ConfigError
from configs.schema import Config

MOST_RANK = 512  # of an adapter, in vLLM's LoRAConfig
HEAD_SIZE = 32  # of the tiny model; the smallest that vLLM has kernels for


def check_precision(config: Config) -> None:
    """Refuse weights without float32 master weights, and a float32 head of float32."""
    model, zero_stage = config.model, config.learner.zero_stage
    if model.dtype == "bfloat16" and zero_stage == 0 and model.lora_rank == 0:
        raise ConfigError(
            "model.dtype='bfloat16' with learner.zero_stage=0 keeps no float32 master weights, so "
            "small updates would be rounded away; set learner.zero_stage=1"
        )
    if model.float32_head and model.dtype == "float32":
        raise ConfigError(
            "model.float32_head=true does nothing with model.dtype='float32', whose logits are "
            "float32 already; leave it out"
        )


def check_adapters(config: Config) -> None:
    """Check that vLLM can serve the adapter, and how it gets it."""
    model = config.model
    if not serves_adapters(model):
        return
    if model.lora_rank > MOST_RANK:
        raise ConfigError(
            f"model.lora_rank={model.lora_rank} is above {MOST_RANK}, the largest that vLLM serves "
            "as an adapter; use a smaller rank, or model.lora_serving=merged"
        )
    if config.actors.gpus_per_worker and model.dtype == "float32":
        raise ConfigError(
            f"model.lora_rank={model.lora_rank} with model.dtype='float32' on a GPU: vLLM's GPU "
            "kernels for adapters take bfloat16 only; use model.dtype=bfloat16, or "
            "model.lora_serving=merged"
        )
    if config.learner.transfer == "broadcast":
        raise ConfigError(
            f"learner.transfer='broadcast' with model.lora_rank={model.lora_rank} would do "
            "nothing: an adapter is small, and engines read its file; use learner.transfer=files, "
            "or model.lora_serving=merged to send whole weights"
        )


def check_tiny_model(config: Config) -> None:
    """Check the shape of the tiny model."""
    tiny = config.model.tiny
    if tiny.hidden_size % HEAD_SIZE:
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} is no multiple of {HEAD_SIZE}, the size of "
            "an attention head"
        )

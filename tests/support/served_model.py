"""The tiny model that tests of vLLM's engine serve."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY_SIZE = 256


def served_model(*, seed: int, **other: Any) -> Qwen2ForCausalLM:
    """Make a model with head size 32, the smallest of vLLM's CPU attention.

    `other`: fields of the config that shall differ.
    """
    torch.manual_seed(seed)
    fields: dict[str, Any] = {"initializer_range": 0.1, "tie_word_embeddings": True, **other}
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        dtype="float32",
        **fields,
    )
    return Qwen2ForCausalLM(config)

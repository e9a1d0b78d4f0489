"""The policy being trained: a Hugging Face causal LM whose output layer runs only where a response token is predicted.

    policy = load_policy(path, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    logprobs_N, entropy_N = policy(input_ids_BT, positions_N, response_ids_N)

Letters as in `batch.py`; H the hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Entries of a model's configuration that scale or cap the logits after the output layer. `PolicyModel` calls that layer
# itself, so a model that has one would get wrong log-probabilities without a word.
LOGIT_CHANGES = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class PolicyModel(nn.Module):
    """logprobs_N = log softmax(logits_NV / temperature)[response_ids_N], vLLM's processed log-probabilities."""

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature

    def forward(
        self, input_ids_BT: torch.Tensor, positions_N: torch.Tensor, response_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 log-probabilities and entropies (natural log) of N response tokens; positions index B * T."""
        decoder = self.causal_lm.base_model
        hidden_BTH = decoder(input_ids=input_ids_BT, use_cache=False).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, positions_N)
        logits_NV = self.causal_lm.get_output_embeddings()(hidden_NH).float() / self.temperature
        normaliser_N = logits_NV.logsumexp(-1)
        logprobs_N = logits_NV.gather(-1, response_ids_N.unsqueeze(-1)).squeeze(-1) - normaliser_N
        entropy_N = normaliser_N - (torch.softmax(logits_NV, -1) * logits_NV).sum(-1)
        return logprobs_N, entropy_N

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights by their Hugging Face names, each storage once: a tied output layer has no entry of its own."""
        seen: set[int] = set()
        weights = {}
        for name, tensor in self.causal_lm.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                weights[name] = tensor.detach()
        return weights


def load_policy(path: Path, *, dtype: str, gradient_checkpointing: bool, temperature: float) -> PolicyModel:
    """The model of a directory, without dropout: behaviour and learner log-probabilities must be of one function."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {sorted(DTYPES)}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} holds no config.json; model.path must be a Hugging Face model directory")
    config: Any = AutoConfig.from_pretrained(path, local_files_only=True)
    for name, neutral in LOGIT_CHANGES.items():
        if getattr(config, name, neutral) != neutral:
            raise ValueError(f"{path}: {name}={getattr(config, name)} changes the logits after the output layer; not supported")
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    causal_lm = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
    )
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    causal_lm.train()  # gradient checkpointing works in training mode only; without dropout the modes are the same
    return PolicyModel(causal_lm, temperature=temperature)

"""The policy being trained: a Hugging Face causal LM or vision model; its output layer runs where a
response is predicted.

    policy = load_policy(path, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    logprobs_N, entropy_N = policy(batch)

Letters as in `batch.py`; H the hidden size.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from configs import ConfigError, loaded
from learner.data.micro_batch import MicroBatch
from learner.model.chunked_logprobs import OutputLayer
from learner.model.last_layer import trim_last_layer
from learner.model.packed_attention import MIXED, are_same, packed_hidden, use_packed_attention
from learner.model.vision import Vision, load_vision

_log = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_config.json"  # of peft

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Entries of a model's configuration that scale or cap the logits after the output layer.
# `PolicyModel` calls that layer itself, so a model that has one would get wrong log-probabilities
# without a word.
LOGIT_CHANGES = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class PolicyModel(nn.Module):
    """logprobs_N = log softmax(logits_NV / temperature)[response_ids_N], vLLM's processed
    log-probabilities.
    """

    def __init__(
        self, causal_lm: PreTrainedModel, *, temperature: float, vision: Vision | None = None
    ) -> None:
        super().__init__()
        self.vision = vision
        use_packed_attention(causal_lm)
        self.trimmed = trim_last_layer(causal_lm)
        self.causal_lm = causal_lm
        # whether a forward pass compares the kernel of each layer, as `check_on_device` does
        self.compared = False
        self.output = OutputLayer(causal_lm.get_output_embeddings(), temperature=temperature)

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 log-probabilities and entropies (natural log) of the N response tokens.

        Without any (N = 0) the results are of length 0 and still depend on every parameter, with
        gradients of 0.
        """
        packed = (batch.input_ids_T, batch.position_ids_T, batch.bounds_S1)
        embedded = None if self.vision is None else self.vision.packed(self.causal_lm, batch)
        as_asked: dict[str, Any] = {"embedded": embedded, "compared": self.compared}
        if self.trimmed:
            hidden_NH = packed_hidden(
                self.causal_lm, *packed, **as_asked, positions_N=batch.positions_N
            )
        else:
            hidden_NH = packed_hidden(self.causal_lm, *packed, **as_asked).index_select(
                0, batch.positions_N
            )
        logprobs_N, entropy_N = self.output(hidden_NH, batch.response_ids_N)
        return logprobs_N, entropy_N

    def check_on_device(self, device: torch.device) -> None:
        """Repeat on `device`, where the model is by now, the checks made where it was loaded.
        Raises ValueError.

        A GPU has a kernel for packed sequences that no check on the CPU sees. All ranks of ZeRO 3
        call this together.
        """
        batch = probe().to(device)
        whole_TH = self._hidden(batch, trimmed=False)
        if not are_same(*whole_TH.chunk(2)):
            raise ValueError(f"model.path: {type(self.causal_lm).__name__} on {device} {MIXED}")
        if self.trimmed and not are_same(
            self._hidden(batch, trimmed=True), whole_TH[batch.positions_N]
        ):
            _log.warning(
                "on %s the last layer gives other rows when it is trimmed, so all its rows are "
                "computed",
                device,
            )
            self.trimmed = False

    def _hidden(self, batch: MicroBatch, *, trimmed: bool) -> torch.Tensor:
        """The decoder's last hidden states, [N, H] if `trimmed`, else [T, H]. Each layer's kernel
        is compared.

        By a whole forward pass: at ZeRO 3 a pass of a part would spoil the order in which weights
        are gathered.
        """
        before, was_training = self.trimmed, self.training
        seen: list[torch.Tensor] = []
        hook = self.causal_lm.get_decoder().register_forward_hook(
            lambda _decoder, _inputs, output: seen.append(output.last_hidden_state.squeeze(0))
        )
        self.eval()
        self.trimmed, self.compared = trimmed, True
        try:
            with torch.no_grad():
                self(batch)
        finally:
            self.trimmed, self.compared = before, False
            self.train(was_training)
            hook.remove()
        return seen[0]


def probe() -> MicroBatch:
    """Two equal sequences of three tokens, which predict one token each after the first two."""
    ids_T, positions_N = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1, 3, 4])
    zeros_N = torch.zeros(len(positions_N))
    return MicroBatch(
        input_ids_T=ids_T,
        position_ids_T=ids_T,
        bounds_S1=torch.tensor([0, 3, 6], dtype=torch.int32),
        positions_N=positions_N,
        response_ids_N=ids_T[positions_N],
        behaviour_logprobs_N=zeros_N,
        advantages_N=zeros_N,
        staleness_N=zeros_N.long(),
        rows_N=torch.tensor([0, 0, 1, 1]),
        n_rows=2,
    )


def load_policy(
    path: Path, *, dtype: str, gradient_checkpointing: bool, temperature: float
) -> PolicyModel:
    """The model of a directory, without dropout: behaviour and learner log-probabilities must be of
    one function.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {sorted(DTYPES)}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} holds no config.json; model.path must be a Hugging Face model directory"
        )
    if os.path.lexists(path / ADAPTER_FILE):
        # transformers hands it to peft, which may import what it names. No argument of
        # from_pretrained prevents that.
        raise ConfigError(
            f"{path} has {ADAPTER_FILE}, so it is no whole model; merge the adapter into its model "
            "first"
        )
    # a model's own code never runs here
    from_files = {"local_files_only": True, "trust_remote_code": False}
    config: Any = loaded(
        "configuration", path, lambda: AutoConfig.from_pretrained(path, **from_files)
    )
    for name, neutral in LOGIT_CHANGES.items():
        if getattr(config, name, neutral) != neutral:
            raise ValueError(
                f"{path}: {name}={getattr(config, name)} changes the logits after the output "
                "layer; not supported"
            )
    for part in (config, config.get_text_config()):  # one and the same, but for a vision model
        for name, value in part.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    vision = load_vision(path)
    of_its_kind = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    causal_lm = loaded(
        "weights",
        path,
        lambda: of_its_kind.from_pretrained(path, config=config, dtype=DTYPES[dtype], **from_files),
    )
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    # gradient checkpointing works in training mode only; without dropout the modes are the same
    causal_lm.train()
    return PolicyModel(causal_lm, temperature=temperature, vision=vision)

"""Define the policy in training: a Hugging Face causal language model or vision model.

    policy = load_policy(path, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    logprobs_N, entropy_N = policy(batch)

Its output layer runs only where a response token is predicted. Letters as in `micro_batch.py`; H
the hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
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

from configs import SAFE_LOADING, ConfigError, LearnerConfig, load_safely
from learner.data.micro_batch import MicroBatch
from learner.distributed.partitioned_load import load_partitioned, only_last_layer
from learner.distributed.sequence_group import SequenceGroup
from learner.model.chunked_logprobs import OutputLayer
from learner.model.packed_attention import (
    MIXED,
    are_same,
    packed_hidden,
    trim_last_layer,
    use_packed_attention,
)
from learner.model.vision import Vision, load_vision
from store import check_file_links

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Configuration entries that scale or cap the logits after the output layer. `PolicyModel` calls
# that layer itself, so log-probabilities of such a model would silently be wrong.
LOGIT_CHANGES = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class PolicyModel(nn.Module):
    """Compute logprobs_N = log softmax(logits_NV / temperature)[response_ids_N].

    These are vLLM's processed log-probabilities.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        temperature: float,
        vision: Vision | None = None,
        float32_head: bool = False,
    ) -> None:
        super().__init__()
        self.vision = vision
        # A divided model computes a forward pass only after `initialize`, but its last layer. The
        # others are checked by `check_on_device`.
        with only_last_layer(causal_lm):
            use_packed_attention(causal_lm)
            self.is_trimmed = trim_last_layer(causal_lm)
        self.causal_lm = causal_lm
        self.compared = False  # whether a forward pass compares each layer's kernel with the loop
        self.sequence_group: SequenceGroup | None = None  # see `share_tokens`
        # A critic has a value head instead.
        self.output: nn.Module = OutputLayer(
            causal_lm.get_output_embeddings(), temperature=temperature, float32=float32_head
        )

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 log-probabilities and entropies (in nats) of the N response tokens.

        With N = 0 the results are empty and still depend on every parameter, with gradients of 0.
        """
        if self.sequence_group is not None:
            return self._with_others(batch, self.sequence_group)
        embedded = None if self.vision is None else self.vision.packed(self.causal_lm, batch)
        hidden_NH = packed_hidden(
            self.causal_lm,
            input_ids_T=batch.input_ids_T,
            position_ids_T=batch.position_ids_T,
            bounds_Sp1=batch.bounds_Sp1,
            embedded=embedded,
            compared=self.compared,
            positions_N=batch.positions_N if self.is_trimmed else None,
        )
        if not self.is_trimmed:
            hidden_NH = hidden_NH.index_select(0, batch.positions_N)
        logprobs_N, entropy_N = self.output(hidden_NH, batch.response_ids_N)
        return logprobs_N, entropy_N

    def share_tokens(self, group: SequenceGroup) -> None:
        """Compute each micro-batch together with the other ranks of `group` from now on.

        Raises ValueError for a model whose attention heads they cannot divide, or of images.
        """
        asked = f"learner.sequence_parallel={group.ranks}"
        if self.vision is not None:
            raise ValueError(f"{asked} with a vision model is not supported; use 1")
        heads = self.causal_lm.config.num_attention_heads
        if heads % group.ranks:
            raise ValueError(
                f"{asked} cannot divide the {heads} attention heads of "
                f"{type(self.causal_lm).__name__}; use a divisor of {heads}"
            )
        self.sequence_group = group

    def _with_others(
        self, batch: MicroBatch, group: SequenceGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute this rank's tokens. Return the results of all, as `forward` does."""
        share = group.share_of(batch)
        hidden_YH = packed_hidden(
            self.causal_lm,
            input_ids_T=share.input_ids_K,
            position_ids_T=share.position_ids_K,
            bounds_Sp1=share.bounds_Sp1,
            positions_N=share.positions_Y if self.is_trimmed else None,
            group=group,
        )
        if not self.is_trimmed:
            hidden_YH = hidden_YH.index_select(0, share.positions_Y)
        results_2Y = torch.stack(self.output(hidden_YH, batch.response_ids_N[share.indices_Y]))
        logprobs_N, entropy_N = group.joined(
            results_2Y, indices_Y=share.indices_Y, n_tokens=batch.n_response_tokens
        )
        return logprobs_N, entropy_N

    def check_on_device(self, device: torch.device) -> None:
        """Repeat on `device`, where the model is now, the checks that were made at loading.

        A GPU has its own kernel for packed sequences, which the check on the CPU did not see. Each
        layer compares it with the loop. All ranks of ZeRO 3 call this together. Raises ValueError.
        """
        # two sequences, so that tokens of the first could wrongly reach the second
        batch = MicroBatch.blank(n_sequences=2, n_tokens=3, n_predicted=2).to(device)
        whole_TH = self._hidden(batch, is_trimmed=False)
        if not are_same(*whole_TH.chunk(2)):
            raise ValueError(f"model.path: {type(self.causal_lm).__name__} on {device} {MIXED}")
        if not self.is_trimmed:
            return
        if not are_same(self._hidden(batch, is_trimmed=True), whole_TH[batch.positions_N]):
            _log.warning("on %s a trimmed last layer computes other rows; all are computed", device)
            self.is_trimmed = False

    def _hidden(self, batch: MicroBatch, *, is_trimmed: bool) -> torch.Tensor:
        """Return the decoder's last hidden states: [N, H] if `is_trimmed`, else [T, H].

        Each layer's kernel is compared with the loop.
        """
        seen: list[torch.Tensor] = []
        # A whole forward pass: at ZeRO 3 a partial one would spoil the order in which weights are
        # gathered.
        hook = self.causal_lm.get_decoder().register_forward_hook(
            lambda _decoder, _inputs, output: seen.append(output.last_hidden_state.squeeze(0))
        )
        before, was_training = self.is_trimmed, self.training
        self.eval()
        self.is_trimmed, self.compared = is_trimmed, True
        try:
            with torch.no_grad():
                self(batch)
        finally:
            self.is_trimmed, self.compared = before, False
            self.train(was_training)
            hook.remove()
        return seen[0]


def _check_complete(path: Path, report: Mapping[str, Collection[Any]]) -> None:
    """Raise ConfigError for a tensor that the files lack: transformers fills it at random.

    A tied weight counts as present if the weight it is tied to is.
    """
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    wrong = sorted({*report["missing_keys"], *mismatched})
    if wrong:
        raise ConfigError(
            f"the weights in {path} lack {wrong[0]} in the shape of its config.json, and "
            f"{len(wrong) - 1} other tensors; download the model again, or give another model.path"
        )


def load_policy(
    path: Path,
    *,
    dtype: str,
    gradient_checkpointing: bool,
    temperature: float,
    float32_head: bool = False,
    divided_by: LearnerConfig | None = None,
) -> PolicyModel:
    """Load a model directory, without dropout.

    Behaviour and learner log-probabilities must come from one function. With `divided_by`, whose
    ranks have joined, ZeRO 3 divides the model while it is loaded, if it is one of text. Raises
    ConfigError for files that are damaged or incomplete, and UnsafePathError for a link of another
    user to a file that is not theirs: what is trained of it may be read by them.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is none of {sorted(DTYPES)}")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path} holds no config.json; model.path must be a Hugging Face model directory"
        )
    check_file_links(path)
    config: Any = load_safely(
        "configuration", path, load=lambda: AutoConfig.from_pretrained(path, **SAFE_LOADING)
    )
    for name, neutral in LOGIT_CHANGES.items():
        if getattr(config, name, neutral) != neutral:
            raise ValueError(
                f"{path}: {name}={getattr(config, name)} changes the logits after the output "
                "layer; not supported"
            )
    for part in (config, config.get_text_config()):  # two objects for a vision model only
        for name, value in part.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    vision = load_vision(path, config)
    causal_lm = None
    if divided_by is not None and vision is None:
        causal_lm = load_partitioned(
            path,
            model_of=AutoModelForCausalLM,
            config=config,
            dtype=DTYPES[dtype],
            learner=divided_by,
        )
    if causal_lm is None:
        causal_lm = _load_whole(path, config, dtype=DTYPES[dtype], sees=vision is not None)
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    # Gradient checkpointing works in training mode only. Without dropout both modes are the same.
    causal_lm.train()
    return PolicyModel(causal_lm, temperature=temperature, vision=vision, float32_head=float32_head)


def _load_whole(path: Path, config: Any, *, dtype: torch.dtype, sees: bool) -> Any:
    """Load all weights into main memory. `sees` is for a vision model. Raises ConfigError."""
    of_its_kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    # Mismatched tensors are left to `_check_complete`: the error of transformers names none.
    as_asked = {"dtype": dtype, "ignore_mismatched_sizes": True, **SAFE_LOADING}
    causal_lm, report = load_safely(
        "weights",
        path,
        load=lambda: of_its_kind.from_pretrained(
            path, config=config, output_loading_info=True, **as_asked
        ),
    )
    _check_complete(path, report)
    return causal_lm

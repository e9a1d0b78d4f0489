"""Count the bytes that a learner rank holds: weights, optimizer, other models, activations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from configs.derived import has_critic, is_served
from configs.model_size import (
    BYTES,
    Shape,
    adapter_parameters,
    billions_in,
    model_billions,
)
from configs.schema import Config

# Per parameter, always in float32: ZeRO's master weights, Adam's two moments, a gradient.
MASTER_BYTES, MOMENT_BYTES, GRADIENT_BYTES = 4, 8, 4
# gradients that ranks exchange at once, see learner/distributed/deepspeed_setup.py
BUCKET_ELEMENTS = 500_000_000
PARTITIONED = 3  # the ZeRO stage from which a rank holds only its part of the weights
# whole weights that ZeRO 3 has of a model at once during a pass: DeepSpeed's default
GATHERED_ELEMENTS = 1_000_000_000
# Tensors that a layer keeps of each token, in the model's dtype:
HIDDEN_KEPT = 8  # input, two normed copies, query, attention's result and projection, two sums
KEY_VALUES_KEPT = 2  # keys, values
FEED_FORWARD_KEPT = 4  # gate, its activation, and two more
NORMED_KEPT = 2  # in float32: a copy of each norm
# Inputs of a layer's adapters, in float32: six of the hidden size and one of the feed-forward size.
ADAPTED_HIDDEN, ADAPTED_FEED_FORWARD = 6, 1
RECOMPUTED = 2  # of one layer at a time, with checkpointing: the tensors and as many gradients
CHUNK_TOKENS = 512  # of the output layer, see learner/model/chunked_logprobs.py
CHUNK_TENSORS = 4  # float32, of a chunk's tokens times the vocabulary
FLOAT32_BYTES = 4


def rank_bytes(config: Config, *, parameters: float) -> float:
    """Return the most bytes that one learner rank holds on its device, without activations.

    Adapters take 16 bytes of each of their parameters. DeepSpeed 0.19.8 keeps at an optimizer
    step, in float32 unless said:

        ZeRO 0    weights, gradients, two moments
        ZeRO 1    weights, gradients; sharded: master weights, two moments. With bfloat16 also a
                  float32 gradient, not sharded; with float32 a copy of the sharded part
        ZeRO 2    weights; sharded: master weights, two moments, gradients and a copy of them
        ZeRO 3    the same with the weights sharded too, and those of a reference

    With learner.offload everything but the weights and their gradients is in main memory.
    Example: 1.5e9 bfloat16 parameters at ZeRO 1 on one rank: 2 + 2 + 4 + 4 + 8 = 20 bytes each,
    30 GB, and a buffer of 2 GB. A critic takes as much for its own parameters.
    """
    reference = _frozen_bytes(config, parameters=parameters) * keeps_reference(config)
    critic = _trained_bytes(config, parameters=critic_parameters(config))
    adapters = adapter_parameters(config) * (FLOAT32_BYTES + GRADIENT_BYTES + MOMENT_BYTES)
    return _trained_bytes(config, parameters=parameters) + adapters + reference + critic


def _frozen_bytes(config: Config, *, parameters: float) -> float:
    """Return the bytes of a model that is not trained on a rank, which at ZeRO 3 has its part."""
    ranks = config.learner.ranks if config.learner.zero_stage == PARTITIONED else 1
    return parameters * BYTES[config.model.dtype] / ranks


def _trained_bytes(config: Config, *, parameters: float) -> float:
    """Return the bytes of one trained model on a rank."""
    learner, weight = config.learner, BYTES[config.model.dtype]
    shares = {stage: learner.ranks if learner.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    held = weight / shares[3]
    if config.model.lora_rank:
        return parameters * held
    if learner.offload:
        held += weight / shares[2]
    elif learner.zero_stage == 0:
        held += weight + MOMENT_BYTES
    else:
        held += (MASTER_BYTES + MOMENT_BYTES) / shares[1]
        if learner.zero_stage > 1:
            held += 2 * GRADIENT_BYTES / shares[2]
        elif config.model.dtype == "bfloat16":
            held += weight + GRADIENT_BYTES
        else:
            held += weight + GRADIENT_BYTES / shares[1]
    buffer = GRADIENT_BYTES * min(BUCKET_ELEMENTS, parameters) if learner.zero_stage else 0
    return parameters * held + buffer


def keeps_reference(config: Config) -> bool:
    """Return whether the ranks keep a frozen copy of the base model for the KL term."""
    return bool(config.loss.kl_coef) and not config.model.lora_rank


def critic_parameters(config: Config) -> float:
    """Return the number of the critic's parameters, 0 without one."""
    if not has_critic(config):
        return 0.0
    path = config.critic.path or config.model.path
    return model_billions(replace(config, model=replace(config.model, path=path))) * 1e9


def has_teacher(config: Config) -> bool:
    """Return whether the learner loads a teacher."""
    return bool(config.loss.teacher) and not is_served(config.loss.teacher)


def teacher_bytes(config: Config) -> float:
    """Return the bytes of the teacher's weights on a rank."""
    if not has_teacher(config):
        return 0.0
    return _frozen_bytes(config, parameters=billions_in(Path(config.loss.teacher)) * 1e9)


def pass_bytes(config: Config, shape: Shape, *, parameters: float) -> float:
    """Return the most bytes on a rank that a micro-batch's passes need beside `rank_bytes`.

    These are the activations, and at ZeRO 3 the gathered weights of each model.
    """
    gathered = 0.0
    if config.learner.zero_stage == PARTITIONED:
        models = [parameters] * (1 + keeps_reference(config)) + [critic_parameters(config)]
        if has_teacher(config):
            models.append(billions_in(Path(config.loss.teacher)) * 1e9)
        width = BYTES[config.model.dtype]
        gathered = sum(width * min(GATHERED_ELEMENTS, each) for each in models)
    return activation_bytes(config, shape) + gathered


def activation_bytes(config: Config, shape: Shape) -> float:
    """Return the bytes of a micro-batch's activations on a rank, without the model's weights.

    Example: a layer of the 1.5B model in bfloat16 keeps 2 (8 x 1536 + 2 x 256 + 4 x 8960) + 8 x
    1536 = 109,568 bytes of each token. Adapters of a bfloat16 model also keep float32 copies of
    their inputs. With gradient checkpointing a layer keeps its input only, and one layer at a time
    is computed again. The output layer has a chunk of logits, and a float32 gradient of its weight
    unless only adapters are trained.

    Ranks that share a micro-batch have equal parts of its tokens. They also keep attention's result
    before it is exchanged, and as many heads of keys and values as they can divide.
    """
    shared_by = config.learner.sequence_parallel
    width = BYTES[config.model.dtype]
    hidden, key_values = HIDDEN_KEPT * shape.hidden, KEY_VALUES_KEPT * shape.key_values
    if shared_by > 1:
        key_heads = shape.key_values * shape.heads // shape.queries
        hidden += shape.hidden
        key_values *= math.lcm(key_heads, shared_by) // key_heads
    of_layer = width * (hidden + key_values + FEED_FORWARD_KEPT * shape.feed_forward)
    of_layer += FLOAT32_BYTES * NORMED_KEPT * shape.hidden
    if config.model.lora_rank and width < FLOAT32_BYTES:
        of_layer += FLOAT32_BYTES * (
            ADAPTED_HIDDEN * shape.hidden + ADAPTED_FEED_FORWARD * shape.feed_forward
        )
    if config.model.gradient_checkpointing:
        of_token = shape.layers * width * shape.hidden + RECOMPUTED * of_layer
    else:
        of_token = (shape.layers + 1) * of_layer
    output = CHUNK_TOKENS * CHUNK_TENSORS * FLOAT32_BYTES * shape.vocabulary
    if not config.model.lora_rank:
        output += FLOAT32_BYTES * shape.vocabulary * shape.hidden
    return config.learner.micro_batch_tokens / shared_by * of_token + output

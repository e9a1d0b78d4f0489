"""Compare the planned activations with what autograd keeps of a forward pass, counted in tensors.

The CPU's attention of one sequence keeps what the GPU's of several keeps: queries, keys, values,
the result, and one number a token and head.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs import Config, LearnerConfig, ModelConfig, Shape
from configs.learner_memory import activation_bytes
from learner.data.micro_batch import MicroBatch
from learner.model.lora import add_adapters
from learner.model.policy_model import load_policy
from tests.support.engine_samples import all_trained, kept_bytes

MOST_UNDER, MOST_OVER = 1.05, 1.3  # the plan may be so far from what is kept
SHAPE = Shape(
    layers=4, hidden=128, heads=4, queries=128, key_values=64, feed_forward=512, vocabulary=40
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.feed_forward,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_plan_has_room_for_what_the_layers_keep(base: Path, dtype: str, lora_rank: int) -> None:
    policy = load_policy(base, dtype=dtype, gradient_checkpointing=False, temperature=1.0)
    if lora_rank:
        add_adapters(policy.causal_lm, rank=lora_rank, alpha=8.0)
    few, many = all_trained(4), all_trained(16)
    # The difference leaves out what does not depend on the tokens.
    kept = kept_bytes(policy, many) - kept_bytes(policy, few)

    def planned(batch: MicroBatch) -> float:
        config = Config(
            model=ModelConfig(dtype=dtype, lora_rank=lora_rank),
            learner=LearnerConfig(micro_batch_tokens=batch.n_tokens),
        )
        return activation_bytes(config, SHAPE)

    # the plan counts one layer more: the embedding, the last norm, and the layer's gradients
    of_layers = (planned(many) - planned(few)) * SHAPE.layers / (SHAPE.layers + 1)
    assert kept / MOST_UNDER <= of_layers <= MOST_OVER * kept

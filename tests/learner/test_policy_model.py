"""Packed sequences are computed as if each were alone."""

from __future__ import annotations

import copy
import json
import math
import re
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from torch.nn.attention.varlen import varlen_attn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from configs import ConfigError, LearnerConfig, LossConfig, ModelConfig, load_safely
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.model import packed_attention as attention
from learner.model.lora import merged
from learner.model.packed_attention import (
    PackedSequences,
    _kernel_takes,
    _window,
    packed_attention,
    packed_hidden,
    use_packed_attention,
)
from learner.model.policy_model import PolicyModel, load_policy
from learner.publishing.copy_model import copy_weights
from learner.training.engine import Engine
from tests.support.learner_samples import one_step_each, table

V = 97  # a prime, so that nothing else has this size
TEMPERATURE = 0.7
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.05,
}
# The biases of Qwen2's attention start at 0 and its norms at 1; `random_model` moves them.
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "windowed qwen2": Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "windowed mistral": MistralConfig(**SIZES, sliding_window=4),
    "neox": GPTNeoXConfig(**SIZES, use_parallel_residual=True),
    "latent": DeepseekV3Config(  # queries and keys of 24, values of 12 for each head
        **SIZES | {"num_key_value_heads": 4},
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
}


def random_model(config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def make_policy(config: PreTrainedConfig, *, gradient_checkpointing: bool = False) -> PolicyModel:
    model = random_model(config)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(model.train(), temperature=TEMPERATURE)


def history_rows(*, seed: int = 0) -> pa.Table:
    """Three trajectories of one to four steps, each step's prompt all that came before it and a few
    tokens more.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, steps = [], []
    for trajectory, n_steps in enumerate((4, 1, 3)):
        history: list[int] = []
        for step in range(n_steps):
            n_prompt, n_response = (
                int(torch.randint(1, 8, (), generator=generator)) for _ in range(2)
            )
            prompt = history + torch.randint(0, V, (n_prompt,), generator=generator).tolist()
            response = torch.randint(0, V, (n_response,), generator=generator).tolist()
            history = prompt + response
            rows.append((prompt, response, [-1.0] * n_response, 0.0))
            steps.append((trajectory, step))
    return table(*rows, steps=steps)


def cut(
    rows: pa.Table, *, merge_steps: bool = False, micro_batch_tokens: int = 10_000
) -> list[MicroBatch]:
    rows = rows if merge_steps else one_step_each(rows)
    return micro_batches(rows, micro_batch_tokens=micro_batch_tokens, ranks=1)


def by_row(batches: list[MicroBatch], values: list[torch.Tensor]) -> torch.Tensor:
    """Values of the response tokens in the table's order, however they were packed."""
    rows = torch.cat([batch.rows_N for batch in batches])
    return torch.cat(values)[rows.argsort(stable=True)]


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    """To 1e-6, beside the last bit of a float32."""
    torch.testing.assert_close(one, other, rtol=torch.finfo(torch.float32).eps, atol=1e-6)


def plain(model: PreTrainedModel, rows: pa.Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row through transformers' own attention and output layer."""
    logprobs, entropies = [], []
    for prompt, response in zip(
        rows["prompt_ids"].to_pylist(), rows["response_ids"].to_pylist(), strict=True
    ):
        logits = (
            model(input_ids=torch.tensor([prompt + response]))
            .logits[0, len(prompt) - 1 : -1]
            .float()
            / TEMPERATURE
        )
        all_logprobs = torch.log_softmax(logits, -1)
        logprobs.append(all_logprobs[torch.arange(len(response)), torch.tensor(response)])
        entropies.append(-(all_logprobs.exp() * all_logprobs).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradient(policy: PolicyModel, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    """Return each parameter's gradient of a weighted sum over all response tokens.

    The sum adds log-probabilities and 0.3 entropies. Each token of the table has its own factor.
    """
    policy.zero_grad()
    n_tokens = sum(batch.n_response_tokens for batch in batches)
    order = torch.cat([batch.rows_N for batch in batches]).argsort(stable=True)
    factors = torch.empty(n_tokens)
    factors[order] = torch.linspace(-1.0, 2.0, n_tokens)
    for batch, factor_N in zip(
        batches, factors.split([b.n_response_tokens for b in batches]), strict=True
    ):
        logprobs_N, entropy_N = policy(batch)
        ((logprobs_N + 0.3 * entropy_N) * factor_N).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def assert_same_gradient(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, relative: float
) -> None:
    norm = torch.stack([g.norm() for g in one.values()]).norm()
    difference = torch.stack([(one[name] - other[name]).norm() for name in one]).norm()
    assert norm > 0 and difference <= relative * norm, f"{difference / norm:.1e}"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("merge_steps", [False, True])
def test_packed_equals_plain_transformers(name: str, merge_steps: bool) -> None:
    rows = history_rows()
    logprobs_N, entropy_N = plain(
        random_model(CONFIGS[name], attn_implementation="eager").eval(), rows
    )
    policy = make_policy(CONFIGS[name])
    batches = cut(rows, merge_steps=merge_steps)
    assert len(batches) == 1 and len(batches[0].bounds_Sp1) - 1 == (3 if merge_steps else 8)
    with torch.no_grad():
        packed = [policy(batch) for batch in batches]
    assert_close(by_row(batches, [p[0] for p in packed]), logprobs_N)
    assert_close(by_row(batches, [p[1] for p in packed]), entropy_N)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_is_the_same_however_rows_are_packed_merged_and_checkpointed(
    name: str,
) -> None:
    rows = history_rows()
    policy = make_policy(CONFIGS[name])
    row_by_row = gradient(policy, cut(rows, micro_batch_tokens=1))
    assert_same_gradient(row_by_row, gradient(policy, cut(rows)), relative=1e-5)
    assert_same_gradient(
        row_by_row, gradient(policy, cut(rows, micro_batch_tokens=40)), relative=1e-5
    )
    merged = cut(rows, merge_steps=True)
    assert_same_gradient(row_by_row, gradient(policy, merged), relative=1e-5)
    checkpointed = gradient(make_policy(CONFIGS[name], gradient_checkpointing=True), merged)
    assert_same_gradient(gradient(policy, merged), checkpointed, relative=1e-7)


def test_the_gradient_is_that_of_plain_transformers() -> None:
    rows = history_rows()
    model = random_model(CONFIGS["llama"], attn_implementation="eager")
    logprobs_N, entropy_N = plain(model, rows)
    ((logprobs_N + 0.3 * entropy_N) * torch.linspace(-1.0, 2.0, len(logprobs_N))).sum().backward()
    expected = {f"causal_lm.{name}": parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradient(
        expected,
        gradient(make_policy(CONFIGS["llama"]), cut(rows, merge_steps=True)),
        relative=1e-5,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_no_token_of_one_sequence_influences_another(name: str) -> None:
    rows = history_rows()
    policy = make_policy(CONFIGS[name])
    (batch,) = cut(rows, merge_steps=True)
    first, last = batch.bounds_Sp1[1:3].tolist()  # of the sequence in the middle
    inside_N = (batch.positions_N >= first) & (batch.positions_N < last)
    changed_ids_T = batch.input_ids_T.clone()
    changed_ids_T[first:last] = (changed_ids_T[first:last] + 41) % V
    changed = replace(batch, input_ids_T=changed_ids_T)
    with torch.no_grad():
        (before_N, _), (after_N, _) = policy(batch), policy(changed)
    assert torch.equal(before_N[~inside_N], after_N[~inside_N])
    assert (before_N[inside_N] - after_N[inside_N]).abs().min() > 1e-5

    embedded: list[torch.Tensor] = []
    hook = policy.causal_lm.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, out: embedded.append(out)
    )
    policy(batch)[0][inside_N].sum().backward(inputs=embedded)
    hook.remove()
    reaches_T = embedded[0].grad[0].abs().amax(-1) > 0
    assert (
        reaches_T[first:last].any() and not reaches_T[:first].any() and not reaches_T[last:].any()
    )


def test_without_response_tokens_every_parameter_has_a_gradient_of_zero() -> None:
    _, nothing = micro_batches(history_rows().slice(0, 1), micro_batch_tokens=100, ranks=2)
    for name in ("qwen2", "llama"):
        policy = make_policy(CONFIGS[name], gradient_checkpointing=True)
        logprobs_N, entropy_N = policy(nothing)
        assert logprobs_N.shape == entropy_N.shape == (0,)
        (0.0 * logprobs_N.sum() + 0.0 * entropy_N.sum()).backward()
        assert all(
            parameter.grad is not None and not parameter.grad.any()
            for parameter in policy.parameters()
        )


def test_bfloat16_weights_give_float32_results_close_to_those_in_float32() -> None:
    (batch,) = cut(history_rows())
    exact = make_policy(CONFIGS["qwen2"])
    rounded = PolicyModel(random_model(CONFIGS["qwen2"]).bfloat16(), temperature=TEMPERATURE)
    logprobs_N, entropy_N = rounded(batch)
    assert logprobs_N.dtype == entropy_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N, exact(batch)[0], rtol=0, atol=0.1)
    (logprobs_N.sum() + entropy_N.sum()).backward()
    assert {parameter.grad.dtype for parameter in rounded.parameters()} == {torch.bfloat16}


def stand_in_kernel(*, scale: float = 1.0, bounded: bool = True) -> Callable[..., torch.Tensor]:
    """The kernel's function on the CPU, right as it is; with torch 2.11's arguments, which have no
    `enable_gqa`.
    """

    def kernel(
        query_TAD: torch.Tensor,
        key_TAD: torch.Tensor,
        value_TAD: torch.Tensor,
        bounds_Sp1: torch.Tensor,
        _bounds: torch.Tensor,
        _longest: int,
        _longest_key: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert window_size[1] == 0
        heads = tuple(
            part.transpose(0, 1)[None] for part in (query_TAD * factor, key_TAD, value_TAD)
        )
        lengths = bounds_Sp1.diff().tolist() if bounded else [len(query_TAD)]
        window = None if window_size[0] < 0 else window_size[0] + 1
        sequences = PackedSequences(bounds_Sp1=bounds_Sp1, lengths=lengths)
        return attention._by_sequence(heads, sequences, scaling=scale, sliding_window=window)[0]  # type: ignore[arg-type]

    factor = scale
    return kernel


def on_a_device(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., torch.Tensor]) -> None:
    """From now on the CPU has a variable-length kernel."""
    monkeypatch.setattr(attention, "_kernel_takes", lambda query, value: True)
    monkeypatch.setattr(attention, "varlen_attn", kernel)


@pytest.mark.parametrize("name", ["qwen2", "windowed mistral", "neox"])
def test_a_model_on_a_device_whose_kernel_is_right_stays_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, (batch,) = make_policy(CONFIGS[name]), cut(history_rows(), merge_steps=True)
    trimmed, before = policy.is_trimmed, policy(batch)[0]
    on_a_device(monkeypatch, stand_in_kernel())
    policy.check_on_device(torch.device("cpu"))
    assert policy.is_trimmed == trimmed and not policy.compared and policy.causal_lm.training
    torch.testing.assert_close(policy(batch)[0], before)


def test_a_kernel_that_computes_something_else_is_found_out_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_policy(CONFIGS["qwen2"])
    on_a_device(monkeypatch, stand_in_kernel(scale=1.5))
    with pytest.raises(
        ValueError, match="kernel of torch .* computes Qwen2Attention unlike .*; update torch"
    ):
        policy.check_on_device(torch.device("cpu"))
    assert policy.is_trimmed and not policy.compared and policy.causal_lm.training
    on_a_device(monkeypatch, stand_in_kernel(bounded=False))
    with pytest.raises(ValueError, match="kernel of torch"):
        policy.check_on_device(torch.device("cpu"))


def test_sequences_that_mix_on_the_device_alone_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_policy(CONFIGS["llama"])
    pad = torch.nn.functional.pad
    policy.causal_lm.model.layers[0].mlp.register_forward_hook(
        lambda _m, _i, out: out + pad(out, (0, 0, 1, 0))[:, :-1]
    )
    with pytest.raises(
        ValueError, match="LlamaForCausalLM on cpu computes two equal sequences unequally"
    ):
        policy.check_on_device(torch.device("cpu"))


def test_a_last_layer_that_may_not_be_trimmed_on_the_device_is_computed_whole() -> None:
    policy, (batch,) = make_policy(CONFIGS["qwen2"]), cut(history_rows(), merge_steps=True)
    mlp = policy.causal_lm.base_model.layers[-1].mlp
    mlp.register_forward_hook(
        lambda _m, inputs, out: out * (1.0 if inputs[0].shape[1] in (6, batch.n_tokens) else 2.0)
    )
    policy.check_on_device(torch.device("cpu"))
    assert not policy.is_trimmed
    torch.testing.assert_close(policy(batch)[0], make_policy(CONFIGS["qwen2"])(batch)[0])


def test_an_engine_checks_the_kernel_of_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is loaded on the CPU: only behind DeepSpeed is it where it computes."""
    random_model(CONFIGS["qwen2"]).save_pretrained(tmp_path)
    with monkeypatch.context() as patched:
        on_a_device(patched, stand_in_kernel(scale=1.5))
        with pytest.raises(ValueError, match="kernel of torch"):
            Engine(
                model_path=tmp_path,
                model=ModelConfig(),
                learner=LearnerConfig(),
                loss=LossConfig(),
                temperature=1.0,
                seed=0,
            )


def test_only_a_kernel_that_has_the_argument_is_told_of_grouped_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []

    def newer(
        query_TAD: torch.Tensor, *_: Any, scale: Any, window_size: Any, enable_gqa: bool
    ) -> torch.Tensor:
        told.append({"enable_gqa": enable_gqa})
        return query_TAD

    def older(query_TAD: torch.Tensor, *_: Any, scale: Any, window_size: Any) -> torch.Tensor:
        told.append({})
        return query_TAD

    heads = (torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8))
    sequences = PackedSequences(bounds_Sp1=torch.tensor([0, 2], dtype=torch.int32), lengths=[2])
    for kernel in (newer, older):
        on_a_device(monkeypatch, kernel)
        packed_attention(torch.nn.Identity(), *heads, None, sequences=sequences)
    assert told == [{"enable_gqa": True}, {}]
    assert attention._is_told_of_groups(varlen_attn)


def test_the_policy_has_the_models_parameters_and_no_others() -> None:
    for name in ("qwen2", "llama"):
        policy = make_policy(CONFIGS[name])
        assert [f"causal_lm.{n}" for n, _ in policy.causal_lm.named_parameters()] == [
            n for n, _ in policy.named_parameters()
        ]
        assert [n for n, _ in merged(policy.causal_lm)] == [
            n for n, _ in policy.causal_lm.named_parameters()
        ]


SMALL: dict[str, Any] = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED = {
    "MambaForCausalLM": MambaConfig(**SMALL),
    "Lfm2ForCausalLM (its layers: conv)": Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"]
    ),
    "BloomForCausalLM": BloomConfig(vocab_size=V, hidden_size=32, n_layer=1, n_head=2),
    "LlamaForCausalLM with rope_type 'dynamic'": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_sequences_would_mix_is_refused_by_name(name: str, tmp_path: Path) -> None:
    random_model(REFUSED[name]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"^model.path: {re.escape(name)} "):
        load_policy(tmp_path, dtype="float32", gradient_checkpointing=False, temperature=1.0)


def test_attention_with_more_to_it_is_refused() -> None:
    with pytest.raises(ValueError, match="Gemma2Attention uses softcap"):
        make_policy(
            Gemma2Config(
                **SIZES, head_dim=16, attn_logit_softcapping=50.0, final_logit_softcapping=None
            )
        )
    with pytest.raises(ValueError, match="Qwen2Attention was not told its sequences"):
        make_policy(CONFIGS["qwen2"]).causal_lm(input_ids=torch.tensor([[1, 2]]))


def test_a_model_that_mixes_sequences_by_itself_is_found_out_when_it_is_loaded() -> None:
    model = random_model(CONFIGS["llama"])
    # Like a short convolution: each token takes something from the one before it, also from another
    # sequence.
    pad = torch.nn.functional.pad
    model.model.layers[0].mlp.register_forward_hook(
        lambda _module, _inputs, out: out + pad(out, (0, 0, 1, 0))[:, :-1]
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM computes two equal sequences unequally"):
        PolicyModel(model, temperature=1.0)


def test_dropout_is_not_taken_for_mixing() -> None:
    model = random_model(GPTNeoXConfig(**SIZES, hidden_dropout=0.5)).train()
    assert PolicyModel(model, temperature=1.0).causal_lm.training


def test_a_window_by_hand() -> None:
    queries = torch.zeros(1, 1, 3, 8)
    assert _window(queries, 2).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert _window(queries, 3) is None and _window(queries, None) is None


def test_four_heads_on_two_with_values_of_another_size_are_the_formula_within_each_sequence() -> (
    None
):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, a, 5, d, generator=generator) for a, d in ((4, 8), (2, 8), (2, 12))
    )
    sequences = PackedSequences(
        bounds_Sp1=torch.tensor([0, 3, 5], dtype=torch.int32), lengths=[3, 2]
    )
    found, _ = packed_attention(torch.nn.Identity(), query, key, value, None, sequences=sequences)
    assert found.shape == (1, 5, 4, 12)
    for first, last in ((0, 3), (3, 5)):
        for t in range(first, last):
            for head in range(4):
                scores = key[0, head // 2, first : t + 1] @ query[0, head, t] / math.sqrt(8)
                expected = scores.softmax(0) @ value[0, head // 2, first : t + 1]
                torch.testing.assert_close(found[0, t, head], expected)


def test_the_kernel_gets_only_what_it_computes() -> None:
    def takes(
        head_size: int,
        value_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        is_cuda: bool = True,
    ) -> bool:
        query, value = (
            SimpleNamespace(is_cuda=is_cuda, dtype=dtype, shape=(1, 4, 9, d))
            for d in (head_size, value_size)
        )
        return _kernel_takes(query, value)  # type: ignore[arg-type]

    assert takes(128, 128) and takes(256, 256) and takes(64, 64, dtype=torch.float16)
    assert not takes(192, 128), "latent attention"
    assert not takes(264, 264) and not takes(100, 100)
    assert not takes(128, 128, dtype=torch.float32) and not takes(128, 128, is_cuda=False)


@pytest.mark.parametrize(
    ("name", "trimmed"),
    [("qwen2", True), ("qwen3", True), ("llama", True), ("latent", True), ("neox", False)],
)
def test_the_last_layer_is_trimmed_where_it_is_of_the_usual_kind(name: str, trimmed: bool) -> None:
    policy = make_policy(CONFIGS[name])
    assert policy.is_trimmed == trimmed
    (batch,) = cut(history_rows(), merge_steps=True)
    seen: list[torch.Size] = []
    if trimmed:
        policy.causal_lm.base_model.layers[-1].mlp.register_forward_hook(
            lambda _, args, __: seen.append(args[0].shape)
        )
        policy(batch)
        assert (
            seen == [(1, batch.n_response_tokens, SIZES["hidden_size"])]
            and batch.n_response_tokens < batch.n_tokens
        )


def test_a_last_layer_that_computes_something_else_is_left_alone() -> None:
    model = random_model(CONFIGS["llama"])
    layer = model.base_model.layers[-1]
    usual = layer.forward
    layer.forward = lambda hidden, **keywords: usual(hidden, **keywords) + 0.1 * hidden
    own = layer.forward
    assert not PolicyModel(model, temperature=TEMPERATURE).is_trimmed
    assert layer.forward is own


Changed = Callable[[torch.nn.Module, torch.Tensor], Any]
OTHER_LAST_LAYERS: dict[str, Changed] = {
    # Like a mixture of experts, which returns its router's logits too: the usual last layer raises.
    "two results": lambda mlp, hidden: (mlp(hidden), None),
    # Like experts with room for a number of tokens: another function if only some positions are given.
    "by the number of tokens": lambda mlp, hidden: mlp(hidden) * (1.0 + 0.1 * hidden.shape[1]),
    "not without tokens": lambda mlp, hidden: mlp(hidden) + 0.0 * hidden.max(),
}


@pytest.mark.parametrize("name", OTHER_LAST_LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_a_last_layer_whose_feed_forward_half_is_of_another_kind_computes_as_before(
    name: str, training: bool
) -> None:
    def made() -> PreTrainedModel:
        model = random_model(CONFIGS["llama"]).train(training)
        last = model.base_model.layers[-1]
        last.mlp = Other(last.mlp, OTHER_LAST_LAYERS[name])
        last.forward = types.MethodType(unpacking, last)
        return model

    model = made()
    own = model.base_model.layers[-1].forward
    policy = PolicyModel(model, temperature=TEMPERATURE)
    assert (
        not policy.is_trimmed
        and model.base_model.layers[-1].forward is own
        and model.training == training
    )
    (batch,) = cut(history_rows())
    expected = made()
    use_packed_attention(expected)
    hidden_TH = packed_hidden(
        expected,
        input_ids_T=batch.input_ids_T,
        position_ids_T=batch.position_ids_T,
        bounds_Sp1=batch.bounds_Sp1,
    )
    logits_NV = expected.lm_head(hidden_TH[batch.positions_N]) / TEMPERATURE
    logprobs_N = logits_NV.log_softmax(-1).gather(1, batch.response_ids_N[:, None])[:, 0]
    assert_close(policy(batch)[0], logprobs_N)


class Other(torch.nn.Module):
    def __init__(self, mlp: torch.nn.Module, changed: Changed) -> None:
        super().__init__()
        self.mlp, self.changed = mlp, changed

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.changed(self.mlp, hidden)


def unpacking(layer: Any, hidden: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """The usual layer, for feed-forward halves with one result or several."""
    hidden = hidden + layer.self_attn(hidden_states=layer.input_layernorm(hidden), **keywords)[0]
    out = layer.mlp(layer.post_attention_layernorm(hidden))
    return hidden + (out[0] if isinstance(out, tuple) else out)


@pytest.mark.parametrize(
    "config_json",
    [
        "{}",
        "[]",
        "[" * 100_000,
        '{"model_type": "no such kind"}',
        '{"model_type": "llama", "hidden_size": "wide", "num_attention_heads": 0}',
        '{"model_type": "llama"}',  # without weights
        '{"model_type": "new", '
        '"auto_map": {"AutoConfig": "code.New", "AutoModelForCausalLM": "code.New"}}',
    ],
)
def test_a_model_directory_that_is_no_model_is_refused_in_one_line_and_runs_no_code(
    tmp_path: Path, config_json: str
) -> None:
    (tmp_path / "config.json").write_text(config_json)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")

    with pytest.raises(ConfigError, match="cannot be loaded|is not readable") as raised:
        load_policy(tmp_path, dtype="float32", gradient_checkpointing=False, temperature=1.0)

    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    "adapter",
    [
        {
            "megatron_config": {"a": 1},
            "megatron_core": "megatron.evil",
            "target_modules": ["q_proj"],
        },
        {"target_modules": "(([a-z_0-9.]+)+)+X"},
    ],
)
def test_an_adapter_beside_a_model_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: dict[str, object]
) -> None:
    """peft imports the module that it names, or matches its pattern for ever."""
    model = tmp_path / "megatron"
    random_model(LlamaConfig(**SIZES)).save_pretrained(model)
    (model / "evil.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "x",
        "r": 2,
        **adapter,
    }
    (model / "adapter_config.json").write_text(json.dumps(about))
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match="has adapter_config.json, so it is no whole model"):
        load_policy(model, dtype="float32", gradient_checkpointing=False, temperature=1.0)

    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("name", ["qwen2", "llama"])  # with tied weights, and without
def test_a_model_that_lacks_a_tensor_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    """Load no model that lacks a tensor: transformers would fill it with random numbers."""
    random_model(CONFIGS[name]).save_pretrained(tmp_path)
    load = {"dtype": "float32", "gradient_checkpointing": False, "temperature": TEMPERATURE}
    load_policy(tmp_path, **load)  # type: ignore[arg-type]
    file, lost = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    whole = dict(tensors)
    del tensors[lost]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack {re.escape(lost)} ") as refused:
        load_policy(tmp_path, **load)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    save_file({**whole, lost: torch.zeros(3, 3)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"lack {re.escape(lost)} .* download the model again"):
        load_policy(tmp_path, **load)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "dpt", "backbone": "owner/any-name"}, "model_type 'dpt' is no"),
        ({"backbone": "owner/any-name"}, "the key 'backbone'"),
        ({"text_config": [{"a": {"use_pretrained_backbone": True}}]}, "use_pretrained_backbone"),
        ({"vision_config": {"auto_map": {"AutoConfig": "code.New"}}}, "the key 'auto_map'"),
        ({"transformers_weights": "x.safetensors.index.json"}, "the key 'transformers_weights'"),
        ({"configuration_files": ["config.4.0.0.json"]}, "the key 'configuration_files'"),
        ({"image_processor_type": "OneFormerImageProcessor"}, "the key 'image_processor_type'"),
        ({"attn_implementation": "owner/kernel"}, "the key 'attn_implementation'"),
        ({"_attn_implementation": {"": "owner/kernel"}}, "the key '_attn_implementation'"),
        ({"text_config": {"tokenizer_class": "AutoModel"}}, "tokenizer_class='AutoModel'"),
    ],
)
def test_a_configuration_that_names_other_models_is_refused_before_the_hub_is_asked(
    tmp_path: Path, change: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    monkeypatch.setattr("huggingface_hub.HfApi.repo_exists", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=words) as refused:
        load_policy(tmp_path, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    assert "\n" not in str(refused.value)


def test_a_second_configuration_and_its_index_are_not_read(tmp_path: Path) -> None:
    """transformers reads the file that config.json names, and nobody checks that one's keys."""
    model = tmp_path / "model"
    random_model(LlamaConfig(**SIZES)).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    index = "w.safetensors.index.json"
    second = {**config, "transformers_weights": index}
    (model / "config.4.0.0.json").write_text(json.dumps(second))
    (model / "config.json").write_text(
        json.dumps({**config, "configuration_files": ["config.4.0.0.json"]})
    )
    names = load_file(model / "model.safetensors")
    save_file(
        {name: torch.zeros_like(tensor) for name, tensor in names.items()},
        tmp_path / "private.safetensors",
        metadata={"format": "pt"},
    )
    named = dict.fromkeys(names, "../private.safetensors")
    (model / index).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    with pytest.raises(ConfigError, match="weight_map names .*private"):
        load_policy(model, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    (model / index).unlink()
    with pytest.raises(ConfigError, match="the key 'configuration_files'"):
        load_policy(model, dtype="float32", gradient_checkpointing=False, temperature=1.0)


def test_the_hub_is_not_asked_while_files_are_loaded(tmp_path: Path) -> None:
    def is_offline() -> bool:
        return bool(constants.HF_HUB_OFFLINE)

    before = is_offline()
    assert load_safely("anything", tmp_path, load=is_offline)
    assert is_offline() == before


@pytest.mark.parametrize(
    "index",
    ["model.safetensors.index.json", "pytorch_model.bin.index.json", "w.safetensors.index.json"],
)
@pytest.mark.parametrize("place", ["{}/private.safetensors", "../private.safetensors"])
def test_weights_outside_of_the_directory_are_not_read(
    tmp_path: Path, index: str, place: str
) -> None:
    model = tmp_path / "model"
    random_model(LlamaConfig(**SIZES)).save_pretrained(model)
    (model / "model.safetensors").rename(tmp_path / "private.safetensors")
    names = load_file(tmp_path / "private.safetensors")
    named = dict.fromkeys(names, place.format(tmp_path))
    (model / index).write_text(json.dumps({"metadata": {}, "weight_map": named}))
    with pytest.raises(ConfigError, match="weight_map names .*(private|test_weights_outside)"):
        load_policy(model, dtype="float32", gradient_checkpointing=False, temperature=1.0)
    with pytest.raises(ConfigError, match="weight_map names .*(private|test_weights_outside)"):
        copy_weights(model, tmp_path / "copy", follow_links=True)
    assert not (tmp_path / "copy").exists()

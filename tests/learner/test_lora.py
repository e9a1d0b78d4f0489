"""Adapters: what they leave alone, what they learn, and that published weights and adapter files
are the same policy.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from configs import LearnerConfig
from learner.distributed.deepspeed_setup import initialize, join_ranks
from learner.model import lora
from learner.model.lora import adapters_off, add_adapters, merged, write_adapter
from learner.publishing.publish import write_weights

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
GPT2_SIZES = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
CONFIGS = {
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),  # its q, k and v have biases
    "qwen2-untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    # Its weights are [inputs, outputs], and q, k and v are one matrix.
    "gpt2": GPT2Config(**GPT2_SIZES, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}
IDS_BT = torch.arange(24).reshape(2, 12) * 7 % 64


@pytest.fixture(params=CONFIGS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_base(CONFIGS[request.param], tmp_path / "base")


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return make_base(CONFIGS["qwen2-tied"], tmp_path / "base")


def make_base(config: PretrainedConfig, path: Path) -> Path:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # biases start at 0, where one that is lost would not be seen
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def plain(path: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def adapted(
    path: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, tf32: bool = False
) -> PreTrainedModel:
    """Rank 4, alpha 6, so that the scale is 1.5; B as if trained, for untouched it is 0 and changes
    nothing.
    """
    model = plain(path, dtype=dtype)
    torch.manual_seed(seed)
    add_adapters(model, rank=4, alpha=6.0, tf32=tf32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS_BT).logits


def test_fresh_adapters_change_nothing_and_trained_ones_do(base: Path) -> None:
    fresh = plain(base)
    add_adapters(fresh, rank=4, alpha=6.0)
    assert torch.equal(logits(fresh), logits(plain(base)))
    assert (logits(adapted(base)) - logits(plain(base))).abs().max() > 0.1


def test_merged_weights_are_a_plain_model_with_the_adapted_ones_outputs(
    base: Path, tmp_path: Path
) -> None:
    model = adapted(base)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = dict(merged(model))
    expected = {name for name, _ in plain(base).named_parameters()}  # a tied output layer once
    assert weights.keys() == expected
    assert not any(tensor.requires_grad for tensor in weights.values())
    write_weights(weights.items(), tmp_path / "published", source_dir=base)
    torch.testing.assert_close(
        logits(plain(tmp_path / "published")), logits(model), atol=1e-5, rtol=1e-5
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), (
        "the live weights stay"
    )


def test_a_merged_weight_worked_by_hand(qwen2: Path) -> None:
    """The docstring's W + 2 B A with rank 1 and alpha 2, in the corner of a larger matrix that is
    otherwise 0.
    """
    model = plain(qwen2)
    add_adapters(model, rank=1, alpha=2.0)
    layer = model.get_submodule("model.layers.1.self_attn.o_proj")
    with torch.no_grad():
        for tensor in (
            layer.base_layer.weight,
            layer.lora_A["default"].weight,
            layer.lora_B["default"].weight,
        ):
            tensor.zero_()
        layer.base_layer.weight[:2, :2] = torch.eye(2)
        layer.lora_A["default"].weight[0, :2] = torch.tensor([1.0, 2.0])
        layer.lora_B["default"].weight[0, 0] = 3.0
    merged_OI = dict(merged(model))["model.layers.1.self_attn.o_proj.weight"]
    assert merged_OI[:2, :2].tolist() == [[7.0, 12.0], [0.0, 1.0]]
    assert merged_OI.count_nonzero() == 3


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(qwen2: Path) -> None:
    model = adapted(qwen2, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    A_rI, B_Or = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = (layer.base_layer.weight.double() + 1.5 * B_Or.double() @ A_rI.double()).bfloat16()
    found = dict(merged(model))["model.layers.0.mlp.down_proj.weight"]
    assert found.dtype == torch.bfloat16
    assert (found != expected).float().mean() < 0.01, "float64 rounds the other way now and then"
    assert {tensor.dtype for _, tensor in merged(model)} == {torch.bfloat16}


def test_without_the_adapters_it_is_the_base_model_bit_for_bit_and_then_itself_again(
    base: Path,
) -> None:
    model, expected = adapted(base), logits(plain(base))
    own = logits(model)
    with adapters_off(model):
        assert torch.equal(logits(model), expected)
        assert not model(IDS_BT).logits.requires_grad
    assert torch.equal(logits(model), own)
    with pytest.raises(KeyError), adapters_off(model):
        raise KeyError
    assert torch.equal(logits(model), own), "also after an error"
    assert all(
        parameter.requires_grad == (".lora_" in name)
        for name, parameter in model.named_parameters()
    )


def test_a_reference_pass_before_the_backward_pass_does_not_change_the_gradient(
    qwen2: Path,
) -> None:
    """Run the passes in the order of a KL loss: policy, reference, then the policy backward."""
    gradients = []
    for with_reference in (False, True):
        model = adapted(qwen2)
        loss = model(IDS_BT).logits.logsumexp(-1).sum()
        if with_reference:
            with adapters_off(model), torch.no_grad():
                model(IDS_BT)
        loss.backward()
        gradients.append(
            {
                name: parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        )
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@pytest.mark.parametrize("reentrant", [None, False])
def test_only_adapters_have_gradients_also_when_activations_are_recomputed(
    base: Path, reentrant: bool | None
) -> None:
    """Each equals the gradient of the merged weight taken apart: dA = s B^T dW, dB = s dW A^T."""
    model = adapted(base)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    model(IDS_BT).logits.logsumexp(-1).sum().backward()
    whole = plain(base)
    whole.load_state_dict(dict(merged(model)), strict=False)  # a tied output layer has no entry
    whole(IDS_BT).logits.logsumexp(-1).sum().backward()
    n_adapted = 0
    for name, parameter in model.named_parameters():
        if ".lora_A." not in name and ".lora_B." not in name:
            assert parameter.grad is None and not parameter.requires_grad
        elif ".lora_A." in name:
            n_adapted += 1
            layer_name = name.partition(".lora_A.")[0]
            layer = model.get_submodule(layer_name)
            dW_OI = whole.get_submodule(layer_name).weight.grad
            dW_OI = dW_OI.T if layer.fan_in_fan_out else dW_OI
            A_rI, B_Or = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            torch.testing.assert_close(A_rI.grad, 1.5 * B_Or.T @ dW_OI, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(B_Or.grad, 1.5 * dW_OI @ A_rI.T, atol=1e-4, rtol=1e-4)
    linear = [
        m
        for m in plain(base).modules()
        if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D"
    ]
    assert n_adapted == len(linear) - 1, "all but the output layer"


def test_the_torch_seed_decides_the_adapters(qwen2: Path) -> None:
    drawn = []
    for seed in (0, 0, 1):
        model = plain(qwen2)
        torch.manual_seed(seed)
        add_adapters(model, rank=2, alpha=1.0)
        drawn.append(
            torch.cat([p.flatten() for name, p in model.named_parameters() if ".lora_A." in name])
        )
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_an_adapter_directory_is_read_back_by_peft_as_the_same_policy(
    base: Path, tmp_path: Path
) -> None:
    model = adapted(base)
    write_adapter(model, tmp_path / "adapter")
    read = PeftModel.from_pretrained(plain(base), str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(read), logits(model))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        4,
        6.0,
        str(base),
    )
    assert config["target_modules"] == sorted(config["target_modules"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    # The names that vLLM asks for: two matrices a layer, and nothing beside them.
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    assert layers == set(config["target_modules"])
    assert tensors.keys() == {
        f"base_model.model.{layer}.lora_{m}.weight" for layer in layers for m in "AB"
    }
    assert all(
        torch.isfinite(tensor).all() and tensor.dtype == torch.float32
        for tensor in tensors.values()
    )


def test_weights_are_gathered_layer_by_layer(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(qwen2)
    gathered: list[set[int]] = []

    def noting(*parameters: torch.nn.Parameter) -> contextlib.AbstractContextManager[None]:
        gathered.append({id(parameter) for parameter in parameters})
        return contextlib.nullcontext()

    monkeypatch.setattr(lora, "full_parameter", noting)
    number_of = {name: len(gathered) for name, _ in merged(model)}
    assert number_of["model.embed_tokens.weight"] == 1
    for layer in (0, 1):
        numbers = {n for name, n in number_of.items() if f".layers.{layer}." in name}
        assert numbers == {2 + layer}
    assert number_of["model.norm.weight"] == 4
    of_layer = model.get_submodule("model.layers.1").parameters()
    assert gathered[2] == {id(parameter) for parameter in of_layer}, "with its adapters"


@pytest.mark.parametrize("tf32", [False, True])
def test_weights_that_zero_3_shares_out_are_gathered_to_be_merged(
    qwen2: Path, tmp_path: Path, tf32: bool
) -> None:
    """After an update of each: the same merged weights, the same adapter file, and the base model
    without the adapters.
    """
    join_ranks(0, ranks=1, address=None)
    found = []
    for zero_stage in (0, 3):
        model = adapted(qwen2, tf32=tf32)
        learner = LearnerConfig(zero_stage=zero_stage, learning_rate=0.01)
        engine = initialize(model, dtype="float32", learner=learner)
        outputs = engine(IDS_BT).logits.logsumexp(-1).sum()
        with adapters_off(model):
            assert torch.equal(logits(model), logits(plain(qwen2)))
        engine.backward(outputs)
        engine.step()
        write_adapter(model, tmp_path / f"adapter{zero_stage}")
        found.append({name: tensor.clone() for name, tensor in merged(model)})
        engine.destroy()
    before = dict(merged(adapted(qwen2)))
    assert found[0].keys() == found[1].keys() == before.keys()
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=1e-5, rtol=1e-5)
        assert torch.equal(tensor, before[name]) == ("_proj.weight" not in name), (
            "what is not adapted stays"
        )
    files = [
        load_file(tmp_path / f"adapter{stage}" / "adapter_model.safetensors") for stage in (0, 3)
    ]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, atol=1e-5, rtol=1e-5)


class Products(TorchDispatchMode):
    """Note the float32 precision at every matrix product, and the sizes that were multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[int]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            sizes = {size for tensor in args for size in tensor.shape}
            self.seen.append((torch.backends.cuda.matmul.fp32_precision, sizes))
        return function(*args, **(kwargs or {}))


def test_only_adapters_multiply_in_tf32_forward_and_backward(qwen2: Path) -> None:
    """Rank 5 is a size that nothing else has. A CPU has no TF32, so results and gradients are those
    without it.
    """
    rank, gradients = 5, []
    before = torch.backends.cuda.matmul.fp32_precision
    for tf32 in (False, True):
        model = plain(qwen2)
        torch.manual_seed(0)
        add_adapters(model, rank=rank, alpha=6.0, tf32=tf32)
        with Products() as products:
            model(IDS_BT).logits.logsumexp(-1).sum().backward()
            list(merged(model))
        assert {precision for precision, _ in products.seen} == (
            {before, "tf32"} if tf32 else {before}
        )
        of_adapters = [precision for precision, sizes in products.seen if rank in sizes]
        n_merges = sum(".lora_A." in name for name, _ in model.named_parameters())
        assert of_adapters[-n_merges:] == [before] * n_merges, "what is published has all bits"
        assert set(of_adapters[:-n_merges]) == {"tf32" if tf32 else before}
        assert all(precision == before for precision, sizes in products.seen if rank not in sizes)
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 4
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_a_model_that_cannot_be_adapted_is_refused(qwen2: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.lora_rank=0 must be at least 1"):
        add_adapters(plain(qwen2), rank=0, alpha=1.0)
    with pytest.raises(ValueError, match=r"model\.lora_alpha=-1\.0 must be above 0"):
        add_adapters(plain(qwen2), rank=1, alpha=-1.0)

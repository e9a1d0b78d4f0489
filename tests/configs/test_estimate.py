"""The estimate of `--dry-run --plan`, against numbers that were worked out by hand."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import configs
from cli.__main__ import main
from configs import (
    GIB,
    Config,
    ConfigError,
    describe_estimate,
    describe_plan,
    pass_bytes,
    rank_bytes,
)
from configs.assumptions import ASSUMED
from configs.engine_estimate import mean_lengths
from configs.estimate import better_split, estimate_run
from configs.learner_memory import CHUNK_TOKENS, activation_bytes
from configs.model_size import LAYERS, SHAPES, Shape, model_billions, model_shape
from configs.plan import checkpoint_bytes, version_bytes

ROOT = Path(__file__).resolve().parents[2]
ALFWORLD = ROOT / "configs/alfworld_qwen2.5_1.5b.yaml"
ON_GPUS = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if configs.load(path).learner.gpus_per_rank
]


def alfworld(*overrides: str) -> Config:
    return configs.load(ALFWORLD, list(overrides))


def test_the_engine_of_alfworld_is_worked_out_by_hand() -> None:
    """1.5e9 parameters of 2 bytes; prompts of 1,024 tokens, answers of 102.4, 25 agent steps."""
    estimate = estimate_run(alfworld())
    engine = estimate.engine
    assert engine is not None
    assert asdict(estimate.lengths) == pytest.approx(
        {"prompt": 1024, "new_prompt": 1024, "response": 102.4, "steps": 25}
    )
    # 0.85 x 80 GB, less 3 GB of weights and 2 GiB
    assert engine.cache_bytes == pytest.approx(68e9 - 3e9 - 2 * 2**30)
    # two heads of 128 keys and values, in 28 layers, of 2 bytes: 28,672 bytes a token
    assert engine.cache_tokens == pytest.approx((65e9 - 2 * 2**30) / 28_672)
    assert (engine.requests, engine.requests_limit) == (24 * 8, "actors.groups_in_flight")
    # 2 x 1.5e9 x 1,024 operations at 40 % of 989 TFLOP/s: 7.77 ms
    assert engine.prefill_s == pytest.approx(3e9 * 1024 / 395.6e12)
    # a pass reads 3 GB and 192 x 1,075.2 x 28,672 bytes, 8.92 GB, at 1.34 TB/s: 6.66 ms
    pass_s = (3e9 + 192 * 1075.2 * 28_672) / 1.34e12
    assert engine.decode_s == pytest.approx(102.4 * pass_s / 192) and pass_s > 0.005
    assert engine.steps_per_s == pytest.approx(88.4, rel=0.001)


def test_the_learner_step_of_alfworld_is_worked_out_by_hand() -> None:
    """16 groups of 8 episodes of 25 steps. Checkpointed layers and the reference: 10 N a token."""
    estimate = estimate_run(alfworld())
    assert estimate.n_trained == estimate.n_played == 3200
    assert estimate.train_steps_per_s == pytest.approx(395.6e12 / (15e9 * 1126.4))
    assert estimate.train_s == pytest.approx(136.7, rel=0.001)
    # a version is copied and hashed, a checkpoint of 18 GB copied every fifth step
    assert estimate.publish_s == pytest.approx(3e9 / 20e9 + 3e9 / 8e9)
    assert estimate.checkpoint_s == pytest.approx(18e9 / 20e9 / 5)
    assert estimate.write_s == pytest.approx((3e9 + 18e9 / 5) / 1.25e9)
    assert estimate.play_s == pytest.approx(3200 / 88.4 + 3e9 / 4e9, rel=0.001)
    # the learner is the slower side: engines wait
    assert estimate.step_s == estimate.learn_s == pytest.approx(136.7 + 0.525 + 0.18, rel=0.001)
    synchronous = estimate_run(alfworld("max_staleness=0"))
    assert synchronous.engine is not None and synchronous.engine.requests == 16 * 8
    assert synchronous.engine.requests_limit == "admission"
    assert synchronous.step_s == synchronous.learn_s + synchronous.play_s > estimate.step_s


def test_files_that_are_written_slower_than_a_step_trains_hold_it_up() -> None:
    """48 ranks train 3,200 agent steps in 2.8 s, and 6.6 GB take 5.3 s to write."""
    estimate = estimate_run(alfworld("learner.ranks=48"))
    assert estimate.train_s < 3 and estimate.learn_s == pytest.approx(6.6e9 / 1.25e9)


def test_the_activations_of_a_micro_batch_are_worked_out_by_hand() -> None:
    config = alfworld("learner.micro_batch_tokens=1000")
    shape = SHAPES["Qwen2.5-1.5B"]
    of_layer = 2 * (8 * 1536 + 2 * 256 + 4 * 8960) + 8 * 1536
    assert of_layer == 109_568
    output = 512 * 4 * 4 * 151_936 + 4 * 151_936 * 1536
    checkpointed = 1000 * (28 * 2 * 1536 + 2 * of_layer) + output
    assert activation_bytes(config, shape) == pytest.approx(checkpointed)
    whole = alfworld("learner.micro_batch_tokens=1000", "model.gradient_checkpointing=false")
    assert activation_bytes(whole, shape) == pytest.approx(1000 * 29 * of_layer + output)
    adapters = alfworld("learner.micro_batch_tokens=1000", "model.lora_rank=8", "loss.kl_coef=0")
    more = 4 * (6 * 1536 + 8960)
    assert activation_bytes(adapters, shape) == pytest.approx(
        checkpointed - 4 * 151_936 * 1536 + 1000 * 2 * more
    )


def test_zero_3_gathers_weights_for_a_pass_and_divides_the_reference() -> None:
    """7B has more than the 1e9 weights that are gathered at once, a critic of 0.5B has fewer."""
    config = alfworld(
        "model.path=org/Qwen2.5-7B", "learner.zero_stage=3", "learner.ranks=4", "loss.kl_coef=0.1"
    )
    shape = SHAPES["Qwen2.5-7B"]
    policy_and_reference = pass_bytes(config, shape, parameters=7e9) - activation_bytes(
        config, shape
    )
    assert policy_and_reference == pytest.approx(2 * 2 * 1e9)
    valued = replace(
        config,
        algorithm=replace(config.algorithm, estimator="turn_ppo"),
        critic=configs.CriticConfig(path="org/Qwen2.5-0.5B"),
    )
    with_critic = pass_bytes(valued, shape, parameters=7e9) - activation_bytes(valued, shape)
    assert with_critic == pytest.approx(2 * 2 * 1e9 + 2 * 0.5e9)
    whole = replace(config, learner=replace(config.learner, zero_stage=2))
    assert pass_bytes(whole, shape, parameters=7e9) == activation_bytes(whole, shape)
    without = replace(config, loss=replace(config.loss, kl_coef=0.0))
    for each, ranks in ((config, 4), (whole, 1)):
        alone = replace(each, loss=without.loss)
        reference = rank_bytes(each, parameters=7e9) - rank_bytes(alone, parameters=7e9)
        assert reference == pytest.approx(14e9 / ranks)


def test_the_plan_of_every_run_has_the_activations_of_a_model_whose_sizes_are_known() -> None:
    assert "; 11.3 GiB activations on top, for" in configs.describe_plan(alfworld())
    unknown = configs.describe_plan(alfworld("model.path=org/Other-3B"))
    assert "; activations on top, for" in unknown


def test_the_chunks_of_the_output_layer_are_those_of_the_learner() -> None:
    source = (ROOT / "learner/model/chunked_logprobs.py").read_text()
    assert f"\nCHUNK_TOKENS = {CHUNK_TOKENS}\n" in source


@pytest.mark.parametrize(("name", "column"), [("Qwen2.5-1.5B", 0), ("SmolLM2-135M", 1)])
def test_the_estimate_agrees_with_the_arithmetic_of_docs_performance(
    name: str, column: int
) -> None:
    """Prompts of 1,000 tokens and answers of 100, no prefix shared, 256 requests."""
    text = (ROOT / "docs/performance.md").read_text()

    def in_the_table(row: str) -> float:
        (cells,) = re.findall(
            rf"^\| {row} \|[^|]*\| ([\d,]+) per GPU \| ([\d,]+) per GPU \|", text, re.M
        )
        return float(cells[column].replace(",", ""))

    config = alfworld(
        f"model.path=org/{name}",
        "model.gradient_checkpointing=false",
        "loss.kl_coef=0",
        "prompt.max_prompt_tokens=2000",
        "actors.max_response_tokens=500",
        "actors.groups_in_flight=32",
    )
    estimate = estimate_run(config)
    assert estimate.engine is not None and estimate.engine.requests == 256
    assert 1 / estimate.engine.prefill_s == pytest.approx(in_the_table("prefill"), rel=0.03)
    assert estimate.engine.steps_per_s == pytest.approx(
        in_the_table("generation together"), rel=0.05
    )
    training = in_the_table("training, forward and backward")
    assert estimate.train_steps_per_s == pytest.approx(training, rel=0.02)


def test_whatever_is_slowest_is_named_with_who_waits() -> None:
    assert "the limit is: learner" in describe_estimate(alfworld())
    many = alfworld("learner.ranks=6")
    assert "the learner, " in (shown := describe_estimate(many)) and "limit is: engines" in shown
    slow = alfworld("learner.ranks=30", "actors.workers=10", "env.processes=1")
    estimate = estimate_run(slow)
    assert estimate.limits["environment processes"] == pytest.approx(10 / 0.003)
    assert estimate.limits["workers' event loops"] == pytest.approx(10 / 0.0007)
    assert estimate.slowest == "engines"
    assert "each other (max_staleness=0)" in describe_estimate(alfworld("max_staleness=0"))
    offline = replace(alfworld(), source=["runs/other"])
    assert "nothing is played" in describe_estimate(offline)


def test_two_gpus_of_an_engine_halve_its_weights_and_share_its_work() -> None:
    one, two = (estimate_run(alfworld(f"actors.gpus_per_worker={n}")).engine for n in (1, 2))
    assert one is not None and two is not None
    assert two.weights_bytes == one.weights_bytes / 2
    assert two.prefill_s == pytest.approx(one.prefill_s / 2)
    assert two.cache_tokens > 2 * one.cache_tokens


def test_a_shared_gpu_gives_each_side_its_part() -> None:
    shared = alfworld("actors.gpus_per_worker=0.5", "learner.gpus_per_rank=0.5")
    whole, half = estimate_run(alfworld()), estimate_run(shared)
    assert half.train_steps_per_s == pytest.approx(whole.train_steps_per_s / 2)
    assert half.engine is not None and half.engine.cache_bytes == GIB  # actors.kv_cache_gib
    (fault,) = half.faults
    assert "of 37.3; it fits with learner.micro_batch_tokens=8192, or " in fault
    assert f"does not fit  {fault}" in describe_estimate(shared)


SEVEN = ("model.path=org/Qwen2.5-7B", "actors.workers=2")  # GPUs: two engines, and the ranks
FOR_ACTIVATIONS = ("micro_batch_tokens", "gradient_checkpointing", "sequence_parallel")


@pytest.mark.parametrize(
    ("given", "advised"),
    [
        (
            ["learner.ranks=6"],
            [
                "model.lora_rank=64",
                "learner.zero_stage=3",
                "learner.ranks=12 learner.zero_stage=3",
                "learner.offload=true",
            ],
        ),
        # ZeRO 3 divides nothing on one rank
        (
            ["model.gradient_checkpointing=false", "learner.micro_batch_tokens=4096"],
            ["model.lora_rank=64", "learner.ranks=4 learner.zero_stage=3", "learner.offload=true"],
        ),
        (
            ["learner.ranks=2", "learner.zero_stage=3"],
            ["model.lora_rank=64", "learner.ranks=4", "learner.offload=true"],
        ),
        # nothing of an adapter's optimizer is worth an offload
        (
            [
                "model.lora_rank=8",
                "loss.kl_coef=0",
                "learner.micro_batch_tokens=4096",
                "learner.gpus_per_rank=0.1",
                "actors.gpus_per_worker=0.9",
                "actors.workers=1",
            ],
            ["learner.gpus_per_rank=1"],
        ),
    ],
    ids=["ZeRO 1", "one rank", "ZeRO 3", "adapters"],
)
def test_a_state_that_is_too_large_is_told_only_what_lowers_it_and_is_not_set(
    given: list[str], advised: list[str]
) -> None:
    run = alfworld(*SEVEN, *given)
    estimate = estimate_run(run)
    (fault,) = [each for each in estimate.faults if "learner rank" in each]
    state_gib = estimate.state_bytes / GIB
    assert f", {state_gib:.1f} of them for weights, gradients and optimizer alone; " in fault
    assert not any(name in fault for name in FOR_ACTIVATIONS)
    assert fault.partition("it fits with ")[2].split(", or ") == advised
    for change in advised:
        changed = estimate_run(alfworld(*SEVEN, *given, *change.split()))
        assert not any("learner rank" in each for each in changed.faults), change


def test_activations_that_are_too_large_are_told_what_lowers_them() -> None:
    """7B with adapters has 13 GiB of weights; a micro-batch of 131,072 tokens keeps the rest."""
    given = [*SEVEN, "model.lora_rank=64", "loss.kl_coef=0", "learner.micro_batch_tokens=131072"]
    (fault,) = estimate_run(alfworld(*given)).faults
    assert fault.endswith(
        "of 74.5; it fits with learner.micro_batch_tokens=32768, or "
        "learner.sequence_parallel=4 learner.ranks=4"
    )
    (fault,) = estimate_run(alfworld("model.gradient_checkpointing=false")).faults
    assert ", or model.gradient_checkpointing=true, or " in fault
    # a micro-batch has one sequence of 2,560 tokens at least
    tight = ["learner.gpus_per_rank=0.44", "actors.gpus_per_worker=0.5"]
    (fault,) = estimate_run(alfworld("learner.micro_batch_tokens=4096", *tight)).faults
    assert "micro_batch_tokens" not in fault


def test_what_no_setting_alone_makes_fit_is_told_what_helps() -> None:
    """A vision model takes neither ZeRO 3 nor shared sequences."""
    given = ["model.path=Qwen/Qwen2.5-VL-3B-Instruct", "model.gradient_checkpointing=false"]
    (fault,) = estimate_run(alfworld(*given)).faults
    assert fault.partition("none of these alone is enough, but each helps: ")[2].split(", ") == [
        "learner.micro_batch_tokens=16384",
        "model.gradient_checkpointing=true",
        "learner.ranks=2 learner.zero_stage=2",
        "learner.offload=true",
    ]


def test_an_engine_that_needs_more_than_its_part_is_said() -> None:
    """1.5B parameters are 2.8 GiB, and 2 GiB come on top: 29.8 GiB, 0.4 of a GPU, hold 25 more."""
    for cache_gib, fits in ((24.9, True), (25.1, False)):
        one = alfworld(
            "actors.gpus_per_worker=0.4",
            f"actors.kv_cache_gib={cache_gib}",
            "learner.gpus_per_rank=0.6",
            "learner.micro_batch_tokens=8192",
        )
        assert (estimate_run(one).faults == []) == fits


def test_a_model_that_an_engine_has_no_room_for_is_said() -> None:
    large = alfworld("model.path=org/Qwen2.5-7B", "actors.gpu_memory_utilization=0.2")
    assert any("too little for one request" in fault for fault in estimate_run(large).faults)


def test_a_growing_conversation_computes_each_prompt_once() -> None:
    chat = mean_lengths(alfworld("prompt.style=chat"))
    assert (chat.prompt, chat.new_prompt) == (1024, pytest.approx(1024 / 25))


def test_the_lengths_of_several_environments_are_weighted() -> None:
    given = "environments={a: {weight: 3, env: {max_steps: 10}}, b: {env: {max_steps: 30}}}"
    both = configs.load(ROOT / "configs/key_room.yaml", [given])
    assert mean_lengths(both).steps == 0.75 * 5 + 0.25 * 15


def test_a_better_division_of_the_gpus_is_found_and_is_better() -> None:
    """One engine feeds 88.4 / 23.4 = 3.8 ranks, so 8 GPUs are divided into 2 and 6."""
    uneven = alfworld("actors.workers=6", "learner.ranks=2")
    split = better_split(uneven)
    assert split is not None
    better, factor = split
    assert (better.actors.workers, better.learner.ranks) == (2, 6)
    assert factor == pytest.approx(estimate_run(uneven).step_s / estimate_run(better).step_s)
    assert "actors.workers=2 learner.ranks=6" in describe_estimate(uneven)
    assert better_split(better) is None
    assert better_split(alfworld("actors.gpus_per_worker=0.5", "learner.gpus_per_rank=0.5")) is None


def test_a_range_of_workers_stays_a_range_where_the_gpus_are_divided_better() -> None:
    """With min workers there are 8 GPUs; those that come later are not in the estimate."""
    ranged = alfworld("actors.workers.min=6", "actors.workers.max=16", "learner.ranks=2")
    assert "placement (8 GPUs at the start)\n" in describe_plan(ranged)
    shown = describe_estimate(ranged)
    assert shown.startswith("estimate for 8 GPUs (with actors.workers.min workers) of the kind")
    assert "as many GPUs: actors.workers.min=2 learner.ranks=6\n" in shown
    split = better_split(ranged)
    assert split is not None
    assert split[0].actors.workers == configs.WorkerRange(min=2, max=16)


def test_adapters_are_counted_by_hand() -> None:
    """Seven matrices of each of 28 layers: four of 1536 or 256 wide, three of 8960."""
    run = alfworld("model.lora_rank=64", "loss.kl_coef=0")
    n_adapters = 28 * 64 * (2 * (1536 + 1536) + 2 * (1536 + 256) + 3 * (1536 + 8960))
    assert n_adapters == 73_859_072
    assert checkpoint_bytes(run) == 12 * n_adapters
    assert version_bytes(run) == 4 * n_adapters
    base = rank_bytes(alfworld("model.lora_rank=1", "loss.kl_coef=0"), parameters=1e9)
    assert rank_bytes(run, parameters=1e9) - base == 16 * n_adapters * 63 / 64
    shown = configs.describe_plan(run)
    assert "3 x 0.8 GiB" in shown and "versions x 0.3 GiB" in shown
    assert "versions x 4.4 MiB" in configs.describe_plan(alfworld("model.lora_rank=1"))


@pytest.mark.parametrize(
    ("path", "n_heads", "n_gpus", "fitting"),
    [
        # 6 divides the heads, and not the 8960 feed-forward columns
        ("Qwen/Qwen2.5-1.5B-Instruct", 12, 8, 4),
        # 2 heads of keys and values
        ("Qwen/Qwen2.5-1.5B-Instruct", 12, 3, 2),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 9, 2, 1),
        # 7 divides the heads, and not the 4 of keys and values
        ("Qwen/Qwen2.5-7B-Instruct", 28, 8, 4),
        ("Qwen/Qwen2.5-7B-Instruct", 28, 7, 4),
    ],
)
def test_heads_that_the_gpus_of_an_engine_do_not_divide_are_refused(
    path: str, n_heads: int, n_gpus: int, fitting: int
) -> None:
    run = alfworld(f"model.path={path}", f"actors.gpus_per_worker={n_gpus}")
    with pytest.raises(
        ConfigError, match=f"{n_heads} attention heads.* over {n_gpus} GPUs"
    ) as told:
        configs.check_heads(run)
    assert str(told.value).endswith(f"set actors.gpus_per_worker={fitting}")
    configs.check_heads(alfworld(f"model.path={path}", f"actors.gpus_per_worker={fitting}"))


def test_heads_that_ranks_of_a_group_do_not_divide_are_refused() -> None:
    ranks = ["learner.ranks=8", "learner.sequence_parallel=8"]
    with pytest.raises(
        ConfigError, match="sequence_parallel=8 cannot divide the 12 attention heads"
    ):
        configs.check_heads(alfworld("model.path=Qwen/Qwen2.5-1.5B-Instruct", *ranks))
    configs.check_heads(alfworld("model.path=Qwen/Qwen2.5-3B-Instruct", *ranks))


def test_ranks_that_share_a_micro_batch_share_its_activations() -> None:
    ranks = ["learner.ranks=4", "learner.gpus_per_rank=1"]
    alone, shared = (
        alfworld(*ranks, f"learner.sequence_parallel={shared_by}") for shared_by in (1, 4)
    )
    shape = model_shape(alone)
    vocabulary = replace(alone, learner=replace(alone.learner, micro_batch_tokens=0))
    output = activation_bytes(vocabulary, shape)
    of_tokens = [activation_bytes(config, shape) - output for config in (alone, shared)]
    assert of_tokens[0] / 4 <= of_tokens[1] <= of_tokens[0] / 4 * 1.2
    assert "4 ranks share each micro-batch" in configs.describe_plan(shared)
    assert "its 1/4 of micro-batches of" in configs.describe_plan(shared)
    assert "share" not in configs.describe_plan(alone)


def test_a_shape_is_read_from_a_directory(tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 100,
        "vocab_size": 500,
    }
    wanted = Shape(
        layers=3, hidden=64, heads=4, queries=64, key_values=32, feed_forward=100, vocabulary=500
    )
    for content in (sizes, {"text_config": sizes}, {**sizes, "head_dim": 16}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert model_shape(alfworld(f"model.path={tmp_path}")) == wanted
    for broken in ("[]", '{"hidden_size": 64}', "nonsense"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match="does not say the sizes"):
            model_shape(alfworld(f"model.path={tmp_path}"))
    with pytest.raises(ConfigError, match=r"knows the sizes of SmolLM2-135M"):
        model_shape(alfworld("model.path=org/Other-3B"))
    assert model_shape(alfworld("model.path=Qwen/Qwen2.5-VL-3B-Instruct")).layers == 36


PUBLISHED = {  # parameters of models on the Hub, and what their config.json says
    "Qwen2.5-1.5B": (1_543_714_304, {"model_type": "qwen2", "tie_word_embeddings": True}),
    "Qwen2.5-7B": (7_615_616_512, {"model_type": "qwen2", "tie_word_embeddings": False}),
    "SmolLM2-135M": (134_515_008, {"model_type": "llama", "tie_word_embeddings": True}),
}


def test_the_rows_and_the_plan_of_docs_cluster_are_what_the_command_prints() -> None:
    text = (ROOT / "docs/cluster.md").read_text()
    command, shown = re.findall(
        r"^\$ gigpo train (\S+) --dry-run --plan\n(.+?)```", text, re.M | re.S
    )[0]
    assert describe_estimate(configs.load(ROOT / command)).startswith(f"{shown}assumed\n")
    rows = re.findall(r"^\| (one GPU|2|8|64|64, larger batches) \|(.+)\|$", text, re.M)
    assert len(rows) == 5
    for stage, row in rows:
        settings, _, learner, step, _ = (cell.strip() for cell in row.split(" | "))
        config = alfworld(*re.findall(r"[a-z_.]+=[\d.]+", settings))
        estimate = estimate_run(config)
        assert not estimate.faults
        assert better_split(config) is None, "the table has the best division of the GPUs"
        step_s = estimate.step_s * 3200 / estimate.n_trained
        assert float(step.split()[0]) == pytest.approx(step_s, rel=0.02), stage
        gib = (estimate.state_bytes + estimate.activation_bytes) / GIB
        assert float(learner.split()[0]) == pytest.approx(gib, abs=0.6), stage


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_that_is_here_is_counted_and_not_taken_by_its_name(
    tmp_path: Path, name: str
) -> None:
    n_parameters, content = PUBLISHED[name]
    shape, directory = SHAPES[name], tmp_path / name
    directory.mkdir()
    sizes = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_values * shape.heads // shape.queries,
        "intermediate_size": shape.feed_forward,
        "vocab_size": shape.vocabulary,
    }
    (directory / "config.json").write_text(json.dumps(content | sizes))
    run = alfworld(f"model.path={directory}")
    assert round(model_billions(run) * 1e9) == n_parameters
    assert version_bytes(run) == pytest.approx(2 * n_parameters)
    counted = f"{n_parameters / 1e9:.3g} billion parameters"
    assert f"({counted}, bfloat16" in describe_plan(run)
    assert f"  model         {counted}\n" in describe_estimate(run)
    by_name = alfworld(f"model.path=org/{name}")
    assert " billion parameters by its name, bfloat16, on" in describe_plan(by_name)
    estimate = describe_estimate(by_name)
    assert " billion parameters by its name, a rounded number; it is counted once" in estimate


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_dim": 8},
        {"attention_bias": True},
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_parameters_are_counted_as_transformers_makes_them(
    tmp_path: Path, kind: str, given: dict[str, Any]
) -> None:
    sizes = {**SIZES, "hidden_size": 96, "intermediate_size": 64, "vocab_size": 100}
    config = AutoConfig.for_model(kind, **{**sizes, "num_hidden_layers": 2, **given})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    counted = model_billions(alfworld(f"model.path={tmp_path}")) * 1e9
    assert round(counted) == sum(parameter.numel() for parameter in model.parameters())


def test_a_model_of_another_kind_is_counted_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "other", "dtype": "float32"}')
    (tmp_path / "model.safetensors").write_bytes(bytes(4_000))
    assert model_billions(alfworld(f"model.path={tmp_path}")) == 1e-6


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_every_config_for_gpus_fits_and_has_an_estimate(path: Path) -> None:
    shown = describe_estimate(configs.load(path))
    assert "does not fit" not in shown and "learner step" in shown
    assert all(line in shown for line in ASSUMED)


def test_the_command_shows_it_and_needs_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = ["train", str(ALFWORLD), f"run_dir={tmp_path / 'run'}", "--plan"]
    assert main([*given, "--dry-run"]) == 0
    assert "estimate for 2 GPUs of the kind H100 SXM" in capsys.readouterr().out
    too_large = ["model.path=org/Qwen2.5-7B", "--dry-run"]
    assert main([*given, *too_large]) == 1
    shown = capsys.readouterr().out
    assert "\n  does not fit  a learner rank needs " in shown
    last = shown.splitlines()[-1]
    assert last == "this does not fit its GPUs: see the lines `does not fit` above"
    without_plan = [word for word in given if word != "--plan"]
    assert main([*without_plan, *too_large]) == 0
    assert "does not fit" not in capsys.readouterr().out
    assert main(given) == 2
    assert "--plan starts nothing; give it with --dry-run" in capsys.readouterr().err
    cpu = ["train", str(ROOT / "configs/key_room.yaml"), f"run_dir={tmp_path / 'run'}"]
    assert main([*cpu, "--plan", "--dry-run"]) == 0
    assert "estimate: none, because" in capsys.readouterr().out


SIZES = {
    "num_attention_heads": 12,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151_936,
}
HOSTILE_SIZES = {
    "no heads": json.dumps({**SIZES, "num_attention_heads": 0}),
    "an infinity": json.dumps({**SIZES, "hidden_size": float("inf")}),
    "no number": json.dumps({**SIZES, "hidden_size": float("nan")}),
    "negative": json.dumps({**SIZES, "hidden_size": -5}),
    "huge": json.dumps(dict.fromkeys(SIZES, 10**300)),
    "zero": json.dumps({**dict.fromkeys(SIZES, 0), "num_attention_heads": 1}),
    "a list": "[1]",
    "a text": '"x"',
    "a list of sizes": '{"text_config": []}',
    "a list as its kind": '{"model_type": []}',
    "no heads of a known kind": json.dumps({**SIZES, "model_type": "llama", "hidden_size": 0}),
    "digits": '{"num_attention_heads": ' + "9" * 5000 + "}",
    "nested": "[" * 100_000,
    "no text": b"\xff\xfe".decode("latin-1"),
}


@pytest.mark.parametrize("what", HOSTILE_SIZES)
def test_sizes_that_no_model_has_are_one_line(tmp_path: Path, what: str) -> None:
    """Let a downloaded config.json end neither the plan nor the estimate by a traceback."""
    (tmp_path / "config.json").write_bytes(HOSTILE_SIZES[what].encode("latin-1"))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 100)
    config = alfworld(f"model.path={tmp_path}")
    with suppress(ConfigError):  # the plan of such a model needs no sizes
        describe_plan(config)
    with pytest.raises(ConfigError, match="config.json"):
        describe_estimate(config)

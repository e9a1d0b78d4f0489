"""Test which arguments of vLLM a run passes on, and with which reason it refuses the others."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from configs import ActorsConfig, Config, ConfigError, parallel_sizes
from configs.changes import forbidden_changes
from configs.engine_arguments import BY_REASON, REFUSED_ARGUMENTS

KEY_ROOM = Path(__file__).resolve().parents[2] / "configs/key_room.yaml"
ON_A_GPU = ("actors.gpus_per_worker=1", "learner.gpus_per_rank=1")


def given(*overrides: str) -> Config:
    return configs.load(KEY_ROOM, list(overrides))


@pytest.mark.parametrize("reason", BY_REASON)
def test_each_reason_is_given_for_each_of_its_arguments(reason: str) -> None:
    for name in BY_REASON[reason]:
        with pytest.raises(ConfigError) as refused:
            given(f"actors.engine.{name}=1")
        assert str(refused.value) == f"actors.engine.{name} {reason}"


def test_no_argument_has_two_reasons() -> None:
    assert len(REFUSED_ARGUMENTS) == sum(len(names) for names in BY_REASON.values())


@pytest.mark.parametrize(
    "name", ["logprobs_mode", "speculative_config", "quantization", "dtype", "seed", "tokenizer"]
)
def test_an_argument_that_would_make_the_record_wrong_is_refused(name: str) -> None:
    """Be independent of the table: these must never leave it."""
    with pytest.raises(ConfigError, match=f"actors.engine.{name} "):
        given(*ON_A_GPU, f"actors.engine.{name}=x")


def test_plain_values_are_passed_on_and_may_change_between_two_starts() -> None:
    config = given(
        *ON_A_GPU,
        "actors.engine={enforce_eager: true, attention_backend: FLASH_ATTN}",
        "actors.engine.cudagraph_capture_sizes=[1,2,4]",
    )
    assert config.actors.engine == {
        "enforce_eager": True,
        "attention_backend": "FLASH_ATTN",
        "cudagraph_capture_sizes": [1, 2, 4],
    }
    assert configs.from_yaml(configs.as_yaml(config)) == config
    assert forbidden_changes(given(*ON_A_GPU), config) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernel_config={x: 1}", "kernel_config has a section in it"),
        ("numa_bind_nodes=[[0]]", "numa_bind_nodes has a list in it"),
        ("model_impl=!!binary eA==", "model_impl has bytes in it"),
        ("model_impl=their.module:Class", "could name a file, a module or a server"),
        ("model_impl=/tmp/x", "could name a file, a module or a server"),
        ("numa_bind_cpus=['http://host']", "could name a file, a module or a server"),
    ],
)
def test_a_value_that_could_name_code_or_a_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        given(*ON_A_GPU, f"actors.engine.{text}")


def test_a_cpu_engine_computes_each_prompt_in_one_piece() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=64 would end a CPU engine"):
        given("actors.engine.max_num_batched_tokens=64")
    assert given(*ON_A_GPU, "actors.engine.max_num_batched_tokens=64").actors.engine


def test_batch_invariance_is_for_gpu_engines() -> None:
    with pytest.raises(ConfigError, match="no such mode for a CPU engine"):
        given("actors.batch_invariant=true")
    assert given(*ON_A_GPU, "actors.batch_invariant=true").actors.batch_invariant


def test_a_float32_head_is_for_a_model_that_is_not_float32() -> None:
    with pytest.raises(ConfigError, match="does nothing with model.dtype='float32'"):
        given("model.float32_head=true")
    chosen = ("model.dtype=bfloat16", "learner.zero_stage=1", "model.float32_head=true")
    assert given(*chosen).model.float32_head


def test_a_scripted_policy_has_no_engine_to_set() -> None:
    scripted = ("actors.scripted=true", "loss.policy=behaviour_cloning", "max_staleness=999")
    with pytest.raises(ConfigError, match=r"does nothing with actors\.scripted=true"):
        given(*scripted, "actors.engine.enforce_eager=true")


@pytest.mark.parametrize(
    ("gpus", "engine", "sizes"),
    [
        (0, {}, (1, 1)),
        (0, {"tensor_parallel_size": 2}, (2, 1)),  # processes of a CPU engine
        (0.5, {}, (1, 1)),
        (4, {}, (4, 1)),
        (8, {"pipeline_parallel_size": 2}, (4, 2)),
        (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, (2, 4)),
    ],
)
def test_the_gpus_of_an_engine_are_divided(
    gpus: float, engine: dict[str, int], sizes: tuple[int, int]
) -> None:
    actors = ActorsConfig(gpus_per_worker=gpus, engine=dict(engine))
    assert parallel_sizes(actors) == sizes


@pytest.mark.parametrize(
    ("gpus", "engine", "words"),
    [
        (2, "{tensor_parallel_size: 1}", r"1 times pipeline_parallel_size=1 is 1, .* has 2 with"),
        (1, "{tensor_parallel_size: 2}", r"2 times .* is 2, and an engine has 1 with"),
        (3, "{pipeline_parallel_size: 2}", r"1 times pipeline_parallel_size=2 is 2, .* has 3"),
        (0.5, "{pipeline_parallel_size: 2}", "an engine has 1 with actors.gpus_per_worker=0.5"),
        (2, "{tensor_parallel_size: 0}", "tensor_parallel_size=0 is no number of GPUs"),
        (2, "{pipeline_parallel_size: true}", "pipeline_parallel_size=True is no number of GPUs"),
    ],
)
def test_sizes_that_leave_a_gpu_idle_or_ask_for_more_are_refused(
    gpus: float, engine: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        given(f"actors.gpus_per_worker={gpus}", f"actors.engine={engine}")

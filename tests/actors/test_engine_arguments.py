"""Test `actors.engine` against the installed vLLM, without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors import unknown_argument_fault
from actors.inference import engine_process, vllm_engine
from actors.inference.vllm_engine import engine_args, placement
from cli.__main__ import main
from configs import REFUSED_ARGUMENTS, ActorsConfig, ConfigError

ROOT = Path(__file__).resolve().parents[2]
KEY_ROOM = str(ROOT / "configs/key_room.yaml")
# The names of vLLM 0.32 that are passed on. They change the speed, the memory, or the order of a
# sum; what is recorded stays what was sampled with.
PASSED = {
    *("aggregate_engine_logging", "async_scheduling", "attention_backend", "attention_config"),
    *("block_size", "cp_kv_cache_interleave_size", "cpu_distributed_timeout_seconds"),
    *("cudagraph_capture_sizes", "cudagraph_metrics", "custom_histogram_buckets"),
    *("dcp_comm_backend", "dcp_kv_cache_interleave_size", "dcp_q_replicate"),
    *("decode_context_parallel_size", "disable_cascade_attn", "disable_custom_all_reduce"),
    *("disable_hybrid_kv_cache_manager", "disable_sliding_window", "distributed_timeout_seconds"),
    *("enable_batch_sharded_sampling", "enable_chunked_prefill", "enable_flashinfer_autotune"),
    *("enable_log_requests", "enable_logging_iteration_details"),
    *("enable_mamba_cache_stochastic_rounding", "enable_mamba_shared_prefix_checkpoint"),
    *("enable_mfu_metrics", "enable_mm_processor_stats", "enable_prefix_caching"),
    *("enable_shm_tensor_arena", "enforce_eager", "fail_on_environ_validation"),
    *("gdn_prefill_backend", "ir_op_priority", "jit_monitor_mode", "jit_monitor_verbose"),
    *("kda_decode_backend", "kda_prefill_backend", "kernel_config", "kv_cache_dtype"),
    *("kv_cache_dtype_skip_layers", "kv_cache_metrics", "kv_cache_metrics_sample"),
    *("kv_sharing_fast_prefill", "linear_backend", "long_prefill_token_threshold"),
    *("long_prefill_token_threshold_adaptive", "mamba_backend", "mamba_block_size"),
    *("mamba_cache_dtype", "mamba_cache_mode", "mamba_cache_philox_rounds", "mamba_config"),
    *("mamba_ssm_cache_dtype", "mamba_ssu_algorithm", "max_cudagraph_capture_size"),
    *("max_num_batched_tokens", "max_num_scheduled_tokens", "max_parallel_loading_workers"),
    *("model_impl", "numa_bind", "numa_bind_cpus", "numa_bind_nodes", "optimization_level"),
    *("performance_mode", "pipeline_parallel_size", "prefill_schedule_interval"),
    *("prefix_cache_retention_interval", "prefix_caching_hash_algo", "prefix_match_unit"),
    *("replayssm_buffer_len", "safetensors_load_strategy", "safetensors_prefetch_block_size"),
    *("safetensors_prefetch_num_threads", "scheduler_reserve_full_isl", "shutdown_timeout"),
    *("show_hidden_metrics_for_version", "sparse_indexer_topk_backend", "swa_bounded_replay"),
    *("tensor_parallel_size", "use_fp64_gumbel", "use_replayssm", "watermark"),
}


def test_every_argument_of_vllm_is_either_passed_on_or_refused() -> None:
    """A new vLLM's arguments have to be put above, or in configs/engine_arguments.py."""
    names = engine_process._argument_names()
    assert set(names) == PASSED | REFUSED_ARGUMENTS.keys()
    assert not PASSED & REFUSED_ARGUMENTS.keys()


def test_the_names_are_those_that_vllm_takes() -> None:
    from dataclasses import fields

    from vllm import AsyncEngineArgs

    taken = {field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert set(engine_process._argument_names()) == taken


def test_a_wrong_name_ends_the_start_before_ray_and_without_importing_vllm() -> None:
    program = f"""
import sys
from cli.__main__ import main
code = main(["train", {KEY_ROOM!r}, "run_dir=/tmp/never", "actors.engine.enforce_eagre=true"])
assert code == 2 and "vllm" not in sys.modules
import ray
assert not ray.is_initialized()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "error: actors.engine.enforce_eagre is no argument of vLLM, did you mean "
        "'enforce_eager'?; leave it out\n"
    )


def test_a_dry_run_refuses_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", KEY_ROOM, "--dry-run", "actors.engine.no_such_thing=1"]) == 2
    assert "actors.engine.no_such_thing is no argument of vLLM" in capsys.readouterr().err


def test_a_worker_refuses_a_wrong_name(tmp_path: Path) -> None:
    actors = ActorsConfig(engine={"no_such_thing": 1})
    with pytest.raises(ValueError, match="no_such_thing is no argument of vLLM"):
        engine_process.engine_environment(actors, tmp_path, tmp_path / "engine.log")


def test_names_are_left_to_vllm_where_its_source_is_not_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process.importlib.util, "find_spec", lambda name: None)
    assert unknown_argument_fault(ActorsConfig(engine={"no_such_thing": 1})) == ""


def test_an_argument_takes_the_place_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_engine, "check_model_directory", lambda path: None)
    monkeypatch.setattr(vllm_engine, "image_arguments", lambda path: {})
    actors = ActorsConfig(engine={"block_size": 64, "async_scheduling": False})
    arguments = engine_args(
        model_path=tmp_path,
        dtype="bfloat16",
        float32_head=True,
        actors=actors,
        max_model_tokens=96,
        max_requests=3,
        statistics=False,
        adapters={},
    )
    assert (arguments.block_size, arguments.async_scheduling) == (64, False)
    assert arguments.hf_overrides == {"head_dtype": "float32"}
    assert arguments.logprobs_mode == "processed_logprobs" and arguments.max_model_len == 96


def test_an_argument_that_a_vision_model_needs_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_engine, "check_model_directory", lambda path: None)
    needed = {"enable_prefix_caching": False}
    monkeypatch.setattr(vllm_engine, "image_arguments", lambda path: needed)
    with pytest.raises(ConfigError, match="a vision model needs enable_prefix_caching=False"):
        engine_args(
            model_path=tmp_path,
            dtype="float32",
            float32_head=False,
            actors=ActorsConfig(engine={"enable_prefix_caching": True}),
            max_model_tokens=96,
            max_requests=3,
            statistics=False,
            adapters={},
        )


def test_batch_invariance_is_a_variable_of_the_engines_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(engine_process, "_is_cpu_build", lambda: False)
    for chosen in (False, True):
        actors = ActorsConfig(gpus_per_worker=1.0, batch_invariant=chosen)
        variables = engine_process.engine_environment(actors, tmp_path, tmp_path / "engine.log")
        assert variables.get("VLLM_BATCH_INVARIANT", "0") == str(int(chosen))
    # what vLLM calls it
    from vllm import envs

    assert "VLLM_BATCH_INVARIANT" in envs.environment_variables


def test_layers_and_stages_divide_the_gpus_of_an_engine() -> None:
    actors = ActorsConfig(gpus_per_worker=8.0, engine={"pipeline_parallel_size": 2})
    arguments = placement(actors, max_model_tokens=256)
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (4, 2)
    assert "distributed_executor_backend" not in arguments

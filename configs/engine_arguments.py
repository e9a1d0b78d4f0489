"""Check `actors.engine`: arguments of vLLM that a run passes on, and those that it refuses.

    next(engine_faults(config), "")         # one line with the reason
    tensor, pipeline = parallel_sizes(config.actors)

A run records the log-probabilities that tokens were sampled with, and the version and digest of the
weights that sampled them. An argument is refused if the record would then be wrong, if another
setting gives it, or if it would do nothing. `unknown_argument_fault` of the actors compares the
other names with the installed vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from configs.schema import ActorsConfig, Config

# Reason -> the arguments of vLLM 0.32 that it holds for. A text goes on "actors.engine.NAME ...".
BY_REASON: Mapping[str, Sequence[str]] = {
    "would record log-probabilities that tokens were not sampled with; leave it out": (
        *("logprobs_mode", "logits_processors", "watermark_config", "diffusion_config"),
        *("enable_trace_replay", "return_sampling_mask"),
    ),
    # vLLM gives the log-probabilities of the model itself then, but nobody compared them here.
    "would draft tokens with weights that no new version replaces; leave it out": (
        *("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    ),
    "would sample with other weights than the published ones that the record names; leave it out": (
        *("quantization", "quantization_config", "allow_deprecated_quantization"),
        *("load_format", "model_loader_extra_config", "ignore_patterns", "pt_load_map_location"),
        "weight_transfer_config",
    ),
    "would keep keys and values where they may outlive their weights; leave it out": (
        *("kv_offloading_size", "kv_offloading_backend", "kv_transfer_config"),
        *("ec_transfer_config", "ec_manager_config", "engram_config"),
    ),
    "would move weights to where new ones are not loaded; leave it out": (
        *("offload_backend", "cpu_offload_gb", "cpu_offload_params", "offload_group_size"),
        *("offload_num_in_group", "offload_prefetch_step", "offload_params"),
        *("enable_sleep_mode", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names"),
        *("enable_cumem_allocator", "enable_nccl_comm_suspend"),
    ),
    "would give texts, or count tokens otherwise; token ids go in and come out; leave it out": (
        *("skip_tokenizer_init", "tokenizer", "tokenizer_mode", "tokenizer_revision"),
        *("tokens_only", "stream_interval", "enable_prompt_embeds", "runner", "convert"),
        "pooler_config",
    ),
    "is model.path; set that": (
        *("model", "model_weights", "served_model_name", "revision", "code_revision"),
        *("hf_token", "download_dir", "hf_overrides", "hf_config_path", "config_format"),
    ),
    "is model.dtype; set that": ("dtype",),
    "is seed, which every request gets its own number from; set that": ("seed",),
    "is prompt.max_prompt_tokens + actors.max_response_tokens; set these": ("max_model_len",),
    "is actors.max_groups_in_flight, which follows the engine's load; set that": (
        *("max_num_seqs", "max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens"),
    ),
    "is actors.gpu_memory_utilization; set that": ("gpu_memory_utilization",),
    "is actors.kv_cache_gib; set that": ("kv_cache_memory_bytes", "num_gpu_blocks_override"),
    "is metrics_port; set that": ("disable_log_stats",),
    "is actors.temperature, and no other parameter of sampling may change; set that": (
        *("generation_config", "override_generation_config"),
    ),
    "would run code that is not vLLM's; leave it out": (
        *("trust_remote_code", "worker_cls", "worker_extension_cls", "scheduler_cls"),
        *("io_processor_plugin", "reasoning_parser_plugin", "model_class_overrides"),
        *("additional_config", "compilation_config"),
    ),
    "is for several engines or several nodes; set actors.workers, each worker has an engine": (
        *("data_parallel_size", "data_parallel_rank", "data_parallel_start_rank"),
        *("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port"),
        *("data_parallel_hybrid_lb", "data_parallel_external_lb"),
        *("data_parallel_multi_port_external_lb", "data_parallel_backend", "dp_sync_interval"),
        *("disable_nccl_for_dp_synchronization", "enable_elastic_ep", "elastic_ep_max_dp_size"),
        *("master_addr", "master_port", "nnodes", "node_rank", "prefill_context_parallel_size"),
    ),
    "is chosen by Ray, or by actors.gpus_per_worker; set that": (
        *("device_ids", "distributed_executor_backend", "ray_workers_use_nsight"),
    ),
    "is for mixtures of experts, which the learner does not train; leave it out": (
        *("enable_expert_parallel", "enable_eplb", "eplb_config", "expert_placement_strategy"),
        *("enable_ep_weight_filter", "moe_backend", "all2all_backend", "enable_hc_sp"),
        *("enable_dbo", "ubatch_size", "dbo_decode_token_threshold", "dbo_prefill_token_threshold"),
        "enable_return_routed_experts",
    ),
    "is for adapters, and published weights have them merged; leave it out": (
        *("enable_lora", "max_loras", "max_lora_rank", "default_mm_loras", "fully_sharded_loras"),
        *("max_cpu_loras", "lora_dtype", "lora_target_modules", "enable_tower_connector_lora"),
        *("specialize_active_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        "max_lora_cls_labels",
    ),
    "is for images and media, which are prepared before the engine; leave it out": (
        *("allowed_local_media_path", "allowed_media_domains", "language_model_only"),
        *("limit_mm_per_prompt", "enable_mm_embeds", "interleave_mm_strings", "media_io_kwargs"),
        *("mm_processor_kwargs", "mm_processor_cache_gb", "mm_processor_cache_type"),
        *("mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb", "mm_encoder_only"),
        *("mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_attn_dtype"),
        *("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path"),
        *("mm_encoder_fp8_scale_save_margin", "skip_mm_profiling", "video_pruning_rate"),
        *("video_pruning_method", "mm_tensor_ipc", "mm_processor_device", "mm_ipc_gpu_memory_gb"),
        *("mm_device_do_normalize", "renderer_num_workers", "disable_chunked_mm_input"),
    ),
    "would do nothing: no request asks for it; leave it out": (
        *("max_logprobs", "structured_outputs_config", "reasoning_parser", "reasoning_config"),
        *("scheduling_policy", "aux_output_config", "per_request_spec_decode_metrics"),
    ),
    "would change the engine's log, which its errors are read from; leave it out": (
        *("logging_config", "log_level", "log_config_file", "use_tqdm_on_load"),
    ),
    "would send figures or files out of the run; leave it out": (
        *("otlp_traces_endpoint", "collect_detailed_traces", "kv_events_config"),
        *("profiler_config", "enable_layerwise_nvtx_tracing"),
    ),
    "would restart parts of the engine, which the run's own supervision does; leave it out": (
        *("fault_tolerance_config", "enable_fault_tolerance"),
    ),
}
REFUSED_ARGUMENTS = {name: reason for reason, names in BY_REASON.items() for name in names}
TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"
# A text with a dot, a colon or a slash could name a module, a file or a server.
WORD = re.compile(r"[A-Za-z0-9_+-]{1,64}")
# A seeded request whose prompt is prefilled in two pieces kills a CPU engine.
NOT_ON_A_CPU = (
    *("enable_chunked_prefill", "max_num_batched_tokens", "max_num_scheduled_tokens"),
    *("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"),
)


def parallel_sizes(actors: ActorsConfig) -> tuple[int, int]:
    """Return over how many GPUs each layer of an engine is split, and into how many stages it is.

    Example: gpus_per_worker=8 is (8, 1), and with engine={pipeline_parallel_size: 2} it is (4, 2).
    A CPU engine has as many processes as `engine` says, one if it says nothing.
    """
    n_gpus = max(1, round(actors.gpus_per_worker))
    pipeline = int(actors.engine.get(PIPELINE, 1))
    return int(actors.engine.get(TENSOR, n_gpus // pipeline)), pipeline


def engine_faults(config: Config) -> Iterator[str]:
    """Yield a line for each argument that is refused, then for sizes that do not go together."""
    actors = config.actors
    for name, value in actors.engine.items():
        key = f"actors.engine.{name}"
        if reason := REFUSED_ARGUMENTS.get(name):
            yield f"{key} {reason}"
        elif name in NOT_ON_A_CPU and not actors.gpus_per_worker:
            yield (
                f"{key}={value} would end a CPU engine, which a prompt that is computed in two "
                "pieces kills; leave it out"
            )
        else:
            yield from _value_faults(key, value)
    if actors.engine and actors.scripted:
        yield (
            "actors.engine does nothing with actors.scripted=true, which has no engine; leave it "
            "out"
        )
    yield from _parallel_faults(actors)


def _value_faults(key: str, value: object) -> Iterator[str]:
    """Yield a line for a value that is no number, no word and no list of these."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict | list):
            yield (
                f"{key} has a {'section' if isinstance(item, dict) else 'list'} in it; only "
                "arguments that are numbers, words or lists of these are passed on"
            )
        elif isinstance(item, bytes):
            yield f"{key} has bytes in it; only numbers, words or lists of these are passed on"
        elif isinstance(item, str) and not WORD.fullmatch(item):
            yield (
                f"{key}={item!r} could name a file, a module or a server; only words of letters, "
                "digits, _, + and - are passed on"
            )


def _parallel_faults(actors: ActorsConfig) -> Iterator[str]:
    """Yield a line unless tensor and pipeline parallelism use each GPU of an engine once.

    A CPU engine may have two processes too, so that a machine without GPUs runs their code.
    """
    wrong = False
    for name in (TENSOR, PIPELINE):
        size = actors.engine.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            wrong = True
            yield f"actors.engine.{name}={size} is no number of GPUs; use 1 or more"
    if wrong:
        return
    tensor, pipeline = parallel_sizes(actors)
    n_gpus = max(1, round(actors.gpus_per_worker))
    if actors.gpus_per_worker and tensor * pipeline != n_gpus:
        yield (
            f"actors.engine: {TENSOR}={tensor} times {PIPELINE}={pipeline} is {tensor * pipeline}, "
            f"and an engine has {n_gpus} with actors.gpus_per_worker={actors.gpus_per_worker:g}; "
            "make them equal, or leave one size out"
        )

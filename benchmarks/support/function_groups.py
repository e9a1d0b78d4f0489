"""Name the group of functions that a stack belongs to, by parts of its frames; for `budget.py`.

    group_of("worker", ("play_episode (/home/me/actors/rollout/episode.py:157)", ...))  # "episodes"

The innermost frame that has one of the parts decides.
"""

from __future__ import annotations

NATIVE = "threads without Python"  # of Ray, ZeroMQ and gRPC
OTHER = "other"
GROUPS = {
    "worker": {
        "template": ("/jinja2/", "<template>", "chat_template_utils", "/prompting/template.py"),
        "tokenising": ("/tokenization_utils", "/tokenizers/"),
        "prompts, and their thread": ("/actors/prompting/", "_make_prompt", "submit (", "prompt_"),
        "request objects": (
            *("sampling_params.py", "input_processor.py", "add_request", "/vllm_policy.py"),
            *("copy.py", "AsyncLLM.generate", "/vllm/inputs/", "engine_request.py"),
        ),
        "serialisation": ("serial_utils.py", "/zmq/", "core_client.py"),
        "answers": (
            *("output_processor.py", "/engine/logprobs.py", "detokenizer.py", "/vllm/outputs.py"),
            "_run_output_handler",
        ),
        "vLLM's statistics": ("/vllm/v1/metrics/", "/prometheus_client/"),
        "environment": ("/envs/", "/multiprocessing/connection.py"),
        "encoding": ("/store/records.py", "/store/segments.py", "/pyarrow/", "/store/hashing.py"),
        "commit": ("/store/", "/actors/rollout/committer.py"),
        "coordinator calls": ("/coordinator/", "/ray/"),
        "episodes": ("/actors/rollout/", "/actors/concurrency.py"),
        "event loop": ("/asyncio/", "AsyncIO Thread"),
    },
    "engine": {
        "weights": ("vllm_weight_loader.py", "/weight_transfer/", "/model_loader/"),
        "serialisation": ("serial_utils.py", "/zmq/", "_sockets (", "/queue.py"),
        "scheduler": ("/vllm/v1/core/",),
        "sampling": ("/vllm/v1/sample/", "._sample ", "sample_tokens", "_bookkeeping_sync"),
        "forward": ("/model_executor/", "_model_forward", "/vllm/v1/attention/", "/torch/nn/"),
        "input preparation": ("/vllm/v1/worker/",),
        "engine loop": ("/vllm/v1/engine/",),
    },
}


def group_of(component: str, stack: tuple[str, ...]) -> str:
    if not stack:
        return NATIVE
    for frame in reversed(stack):
        for group, parts in GROUPS[component].items():
            if any(part in frame for part in parts):
                return group
    return OTHER

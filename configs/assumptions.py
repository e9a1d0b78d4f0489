"""Name the numbers that the estimate of a run on GPUs assumes. None was measured on a GPU."""

from __future__ import annotations

from configs.plan import GIB

GPU = "H100 SXM"
GPU_BYTES = 80e9
GPU_BYTES_PER_S = 3.35e12
GPU_FLOPS = {"bfloat16": 989e12, "float32": 67e12}
REACHED = 0.4  # of those peaks
SMALL_REACHED = 0.2  # by the training of models below SMALL_PARAMETERS, whose matrices are small
SMALL_PARAMETERS = 1e9
PASS_S = 0.005  # least time of a forward pass of the engine, which waits for its launches
ENGINE_BYTES = 2 * GIB  # of an engine beside weights and cache: activations, captured graphs
WORKER_S = 0.0007  # of a worker's event loop for an agent step
ENVIRONMENT_S = 0.003  # of an environment process for an agent step
COORDINATOR_S = 0.00022  # of the coordinator for an agent step
COPIED_BYTES_PER_S = 20e9  # from the device to pinned memory
HASHED_BYTES_PER_S = 8e9
WRITTEN_BYTES_PER_S = 1.25e9
LOADED_BYTES_PER_S = 4e9
# Means, as fractions of the limits in the settings. With ALFWorld's limits of 2,048 and 512 tokens
# they are the 1,000 and 100 tokens of docs/performance.md.
PROMPT_SHARE, RESPONSE_SHARE, STEPS_SHARE = 0.5, 0.2, 0.5
WORTH_IT = 1.1  # least gain of another split of the GPUs that is worth a line

ASSUMED = (
    f"{GPU}: 80 GB, 3.35 TB/s, 989 TFLOP/s in bfloat16 and 67 in float32 (data sheet)",
    "engine and learner reach 40 % of these, a learner below 1 billion parameters 20 %; a pass of "
    "the engine takes 5 ms at least (docs/performance.md, not measured)",
    f"prompts have half of prompt.max_prompt_tokens, answers {RESPONSE_SHARE:.0%} of "
    "actors.max_response_tokens, episodes half of env.max_steps (ALFWorld's shape)",
    "each episode in flight has a request in the engine; a slow environment needs more of them "
    "(actors.groups_in_flight)",
    "no prefix is shared between steps, but with prompt.style=chat (docs/performance.md)",
    "an agent step costs a worker's event loop 0.7 ms and the coordinator 0.22 ms (measured with "
    "the quick start), an environment process 3 ms (not measured)",
    "weights are copied at 20 GB/s, hashed at 8, written behind the next step at 1.25 and loaded "
    "at 4 (docs/gpu.md, not measured)",
    "left out: the upload to store.uri, communication between ranks, evaluations",
    "processes that share a GPU get their fraction of its speed (not measured)",
    "activations: what the layers keep, counted in configs/learner_memory.py (not measured)",
)

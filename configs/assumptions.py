"""Name the numbers that the estimate of a run on GPUs assumes. None was measured on a GPU."""

from __future__ import annotations

from configs.plan import GIB

GPU = "H100 SXM"
GPU_BYTES = 80e9  # of its data sheet, as the two below
GPU_BYTES_PER_S = 3.35e12
GPU_FLOPS = {"bfloat16": 989e12, "float32": 67e12}
REACHED = 0.4  # of those peaks
SMALL_REACHED = 0.2  # by the training of models below SMALL_PARAMETERS, whose matrices are small
SMALL_PARAMETERS = 1e9  # of a model
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
    f"{GPU}: {GPU_BYTES / 1e9:g} GB, {GPU_BYTES_PER_S / 1e12:g} TB/s, "
    f"{GPU_FLOPS['bfloat16'] / 1e12:g} TFLOP/s in bfloat16 and {GPU_FLOPS['float32'] / 1e12:g} in "
    "float32 (data sheet)",
    f"engine and learner reach {100 * REACHED:g} % of these, a learner below "
    f"{SMALL_PARAMETERS / 1e9:g} billion parameters {100 * SMALL_REACHED:g} %; a pass of the "
    f"engine takes {PASS_S * 1e3:g} ms at least (docs/performance.md, not measured)",
    f"prompts have {PROMPT_SHARE:.0%} of prompt.max_prompt_tokens, answers {RESPONSE_SHARE:.0%} of "
    f"actors.max_response_tokens, episodes {STEPS_SHARE:.0%} of env.max_steps (ALFWorld's shape)",
    "each episode in flight has a request in the engine; a slow environment needs more of them "
    "(actors.groups_in_flight)",
    "no prefix is shared between steps, but with prompt.style=chat (docs/performance.md)",
    f"an agent step costs a worker's event loop {WORKER_S * 1e3:g} ms and the coordinator "
    f"{COORDINATOR_S * 1e3:g} ms (measured with the quick start), an environment process "
    f"{ENVIRONMENT_S * 1e3:g} ms (not measured)",
    f"weights are copied at {COPIED_BYTES_PER_S / 1e9:g} GB/s, hashed at "
    f"{HASHED_BYTES_PER_S / 1e9:g}, written behind the next step at "
    f"{WRITTEN_BYTES_PER_S / 1e9:g} and loaded at {LOADED_BYTES_PER_S / 1e9:g} (docs/gpu.md, not "
    "measured)",
    "left out: the upload to store.uri, communication between ranks, evaluations",
    "processes that share a GPU get their fraction of its speed (not measured)",
    "activations: what the layers keep, counted in configs/learner_memory.py (compared with "
    "autograd's tensors on a CPU, not measured on a GPU)",
)

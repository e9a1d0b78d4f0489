"""Play tasks with the policy and commit the trajectories. Actors make data; they train nothing.

`worker.py`        the Ray actor: leases groups, plays them, commits them
`rollout/`         one group's way: `runner.py` leases it, `group.py` plays it, `episode.py` plays
                   one episode of it, `step_records.py` makes its rows, `committer.py` writes it;
                   `by_environment.py` finds the environment of a task where a run has several
`policy.py`        the policy interface, and the scripted policy
`concurrency.py`   limits of requests and episodes
`prompting/`       observation to token ids, and token ids to action
`inference/`       policies: `openai_policy.py`, and `vllm_policy.py`, whose requests go through
                   `vllm_requests.py`. New weights: `weight_sync.py` says when, `vllm_policy.py`
                   pauses the engine, `vllm_weight_loader.py` loads them inside the engine's
                   process, from files or from `broadcast_receiver.py`. `engine_worker.py`
                   prepares that process. LoRA adapters are added by `vllm_adapters.py`;
                   `vllm_cpu_adapters.py` multiplies by them on a CPU.
                   `vllm_step_pacing.py` makes the steps of a CPU engine fewer and fuller, and
                   `vllm_whole_answers.py` its messages
`endpoint/`        the OpenAI-compatible server that agent programs call; `tool_call_reader.py`
                   reads tool calls in a child process, with the parsers of `vllm_tool_calls.py`
`templates/`       prompt templates
`chat_data.py`     chats of a file as trajectories, for supervised fine-tuning

A group's way: `RolloutRunner.run` leases it, `GroupRollout.run` and `play_episode` play it, and
`Committer.commit` writes it and calls `Coordinator.commit`. The learner claims it from the store.

A version's way: its number comes with a lease. `WeightSync.sync` has the engine load it:
`VLLMPolicy.load_weights` from files, or `load_received` if the learner sent it. Inside the engine's
process `receive_weights` does so.
"""

from actors.chat_data import chat_texts, chat_trajectories, is_chat_file, read_chats
from actors.inference.engine_process import ENGINE_SOCKETS, engine_fault, unknown_argument_fault
from actors.inference.openai_policy import ChatPolicy
from actors.inference.vllm_engine import EngineMemoryError, EngineStartError
from actors.policy import EngineLostError
from actors.prompting.chat_template import load_tokenizer
from actors.prompting.images import sees_images
from actors.prompting.prompt import images_fault
from actors.prompting.prompt_thread import PromptStuckError
from actors.prompting.tokenizer_corpus import sample_chats
from actors.worker import WorkerActor, WorkerSetup

__all__ = [
    "ENGINE_SOCKETS",
    "ChatPolicy",
    "EngineLostError",
    "EngineMemoryError",
    "EngineStartError",
    "PromptStuckError",
    "WorkerActor",
    "WorkerSetup",
    "chat_texts",
    "chat_trajectories",
    "engine_fault",
    "images_fault",
    "is_chat_file",
    "load_tokenizer",
    "read_chats",
    "sample_chats",
    "sees_images",
    "unknown_argument_fault",
]

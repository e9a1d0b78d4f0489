"""Actors make data; they are never the network being trained.

`prompt.py` (observation to token ids and back, by `tokenizer.py`, `template.py`, `chat.py`,
`images.py` and `parsing.py`), `rollout.py` (one episode), `group.py` (all of a group) and
`attempts.py` (attempts without a trajectory) know no Ray; `policy.py` is what an agent needs of a
model, `vllm_policy.py` the real one with `vllm_images.py`, `weight_transfer.py`,
`weight_broadcast.py` and, for CPU engines, `engine_server.py`, `chat_policy.py` (with
`characters.py`) anybody's model behind an OpenAI-compatible server; `worker.py` (Ray) plays leased
groups, `coordinator.py` (Ray) owns the catalog and hands them out as `admission.py` allows, knowing
which task is next (`tasks.py`), what is played (`plays.py`) and who is alive (`pulse.py`);
`client.py` is how it is asked, `shared_handle.py` how many ask in one call. `program.py` and
`endpoint.py` play agents that call a chat model by themselves. `simulation.py` has doubles of all
of it that take time instead of working.
"""

from actors.inference.engine_environment import ENGINE_SOCKETS, engine_fault
from actors.inference.openai_policy import ChatPolicy, EndpointFailed
from actors.inference.vllm_engine import EngineLostError, EngineMemoryError, EngineStartError
from actors.inference.weight_files import weight_files
from actors.policy import Completion, Policy, Prompt, ScriptedPolicy
from actors.prompting.images import sees_images
from actors.prompting.prompt import (
    TEMPLATES,
    Answer,
    PromptForm,
    Template,
    Turn,
    images_fault,
    parse_action,
    render,
)
from actors.prompting.tokenizer_corpus import sample_chats
from actors.rollout.episode import (
    EpisodeIds,
    EpisodeRules,
    PromptStuckError,
    play_episode,
    request_seed,
)
from actors.worker import Worker, WorkerActor, WorkerSetup

__all__ = [
    "ENGINE_SOCKETS",
    "TEMPLATES",
    "Answer",
    "ChatPolicy",
    "Completion",
    "EndpointFailed",
    "EngineLostError",
    "EngineMemoryError",
    "EngineStartError",
    "EpisodeIds",
    "EpisodeRules",
    "Policy",
    "Prompt",
    "PromptForm",
    "PromptStuckError",
    "ScriptedPolicy",
    "Template",
    "Turn",
    "Worker",
    "WorkerActor",
    "WorkerSetup",
    "engine_fault",
    "images_fault",
    "parse_action",
    "play_episode",
    "render",
    "request_seed",
    "sample_chats",
    "sees_images",
    "weight_files",
]

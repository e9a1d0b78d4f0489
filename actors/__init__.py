"""Actors make data; they are never the network being trained.

`prompt.py` (observation to token ids and back) and `rollout.py` (one episode) are pure; `policy.py` is what an agent needs of
a model, `vllm_policy.py` the real one with `weight_transfer.py`; `worker.py` (Ray) plays leased groups, `coordinator.py` (Ray)
owns the catalog and hands them out as `admission.py` allows.
"""

from actors.admission import free_groups
from actors.coordinator import Coordinator, CoordinatorActor, Lease, ResumePoint, Status, task_index
from actors.policy import Completion, Policy, Prompt, ScriptedPolicy
from actors.prompt import TEMPLATES, Answer, PromptForm, Template, Turn, parse_action, render
from actors.rollout import EpisodeIds, EpisodeRules, play_episode, request_seed
from actors.texts import sample_chats
from actors.worker import Worker, WorkerActor, WorkerSetup

__all__ = [
    "TEMPLATES",
    "Answer",
    "Completion",
    "Coordinator",
    "CoordinatorActor",
    "EpisodeIds",
    "EpisodeRules",
    "Lease",
    "Policy",
    "Prompt",
    "PromptForm",
    "ResumePoint",
    "ScriptedPolicy",
    "Status",
    "Template",
    "Turn",
    "Worker",
    "WorkerActor",
    "WorkerSetup",
    "free_groups",
    "parse_action",
    "play_episode",
    "render",
    "request_seed",
    "sample_chats",
    "task_index",
]

"""Every knob of a run, with its unit and its default; the only place where defaults live.

`check` refuses what would hang, crash or mislead later, and says what would have happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    name: str = "textworld"  # a registered environment, or a class of your own as "module:Class"
    options: dict[str, Any] = field(default_factory=dict)  # given to the environment, e.g. the number of games
    max_steps: int = 10  # actions per episode, then it is truncated
    win_reward: float = 10.0  # factor on the environment's reward (the paper: 10 for a win)
    processes: int = 1  # environment processes beside each worker


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    template: str = (
        "think"  # a name in actors/prompt.py: "think" (as the paper), "direct" (no thinking), "compact" (tiny models)
    )
    history_length: int = 2  # (observation, action) pairs shown besides the current observation
    max_prompt_tokens: int = 2048  # longer prompts lose their oldest history first
    admissible_only: bool = False  # count a well-formed action outside the admissible ones as invalid


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelConfig:
    """A base policy the project makes by itself: random initialisation, then cloning of a scripted random player."""

    vocabulary_size: int = 1024
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    clone_steps: int = 30  # learner steps of cloning
    clone_episodes_per_step: int = 32
    clone_updates_per_step: int = 5
    clone_learning_rate: float = 2e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    path: str = ""  # a Hugging Face directory; empty makes a tiny model in the run directory
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    dtype: str = "float32"  # "float32" or "bfloat16"
    gradient_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorsConfig:
    workers: int = 1  # Ray workers, one vLLM engine each
    gpus_per_worker: int = 0
    groups_in_flight: int = 8  # per worker; each plays `group_size` episodes at once
    temperature: float = 1.0
    max_response_tokens: int = 512
    max_model_tokens: int = 2560  # prompt and response together, as the engine allocates it
    kv_cache_gib: float = 1.0  # CPU engines only; GPU engines use gpu_memory_utilization
    gpu_memory_utilization: float = 0.85
    cpu_cores: str = "auto"  # of a CPU engine: "0" or "0,2-3"; "auto" is all but the last, which the learner takes
    lease_s: float = 120.0  # a silent worker's groups are played by another after this long
    scripted: bool = False  # play the scripted random player instead of a model (to clone from)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    estimator: str = "gigpo"  # "gigpo" or "grpo"
    group_size: int = 8  # episodes per task, G
    gamma: float = 0.95  # discount per step, of the step returns
    omega: float = 1.0  # weight of the step advantage
    normalise: str = "mean_std"  # "mean_std" or "mean"
    weighting: str = "steps"  # episode statistics over "steps" (authors' code) or "trajectories" (paper Eq. 3)
    invalid_penalty: float = 0.1  # taken off an invalid step's own return and score
    penalty_is_signal: bool = True  # train on groups whose episodes differ in nothing but penalties (the authors do)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    policy: str = "ppo_clip"  # "ppo_clip" or "behaviour_cloning"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    tis_cap: float = 2.0  # cap of the token-level importance weight
    kl_coef: float = 0.0  # weight of the k3 KL to the base model; 0 keeps no reference model
    entropy_coef: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    steps: int = 100  # learner steps of the run
    groups_per_step: int = 8
    updates_per_step: int = 1  # optimizer updates per learner step, over consecutive parts of its rows
    learning_rate: float = 1e-6
    weight_decay: float = 0.01
    schedule: str = "constant"  # after the warm-up: "constant", or "linear" down to a tenth at the run's last step
    warmup_updates: int = 0
    grad_clip: float = 1.0
    micro_batch_tokens: int = 16384  # padded tokens per forward pass
    zero_stage: int = 0  # DeepSpeed ZeRO, 0 to 2 here
    gpus: int = 0
    threads: int = 1  # torch threads of a CPU learner
    checkpoint_every: int = 10  # learner steps
    keep_checkpoints: int = 2
    keep_versions: int = 4  # newest published weights kept on disk; a checkpoint has its own copy
    starvation_timeout_s: float = 600.0  # no batch for this long ends the run with the reason


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    every: int = 20  # learner steps between held-out evaluations; 0 evaluates at the end only
    episodes_per_task: int = 1  # at intervals
    final_episodes_per_task: int = 5
    temperature: float = 0.4  # as in the paper


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    run_dir: str = "runs/default"
    seed: int = 0
    max_staleness: int = 1  # versions between the learner and the oldest token it trains on; 0 is synchronous
    env: EnvConfig = field(default_factory=EnvConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

"""Define every setting of a run, with its unit and its default.

This is the only place where defaults live. `check` refuses values and combinations that would
hang, crash or mislead later. The settings that people change most:

    run_dir, seed, max_staleness, source
    env.name, env.options, env.max_steps, tasks.order
    prompt.template, prompt.history_length, prompt.max_prompt_tokens
    model.path, model.dtype, model.lora_rank
    actors.workers, actors.gpus_per_worker, actors.max_response_tokens
    algorithm.estimator, algorithm.group_size
    learner.steps, learner.groups_per_step, learner.learning_rate

Within a section, settings that rarely change stand below a line "Rarely changed".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    # a registered environment, or your own class as "module:Class"
    name: str = "textworld"
    # given to the environment, for example the number of games
    options: dict[str, Any] = field(default_factory=dict)
    max_steps: int = 10  # actions per episode; a longer episode is truncated
    win_reward: float = 10.0  # factor on the environment's reward; the paper has 10 for a win

    # Rarely changed.
    # environment processes beside each worker; for an agent program, its concurrent episodes
    processes: int = 1
    # seconds for one reset or step; a slower environment is killed and its episode is retried
    answer_timeout_s: float = 60.0
    # tries of an episode whose environment fails, and times that a group may end its process, which
    # others share; then the group is abandoned, with the reason
    attempts: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    # "think" (any text environment), "direct" (no reasoning), "compact" (tiny models), "alfworld",
    # "webshop", "search", "sokoban", "sokoban_image", or the path of your own YAML file
    template: str = "think"
    # "window": each step is a separate chat that shows the latest turns; "chat": the episode is
    # one growing conversation
    style: str = "window"
    # turns shown besides the current observation, with style "window"; -1 shows all
    history_length: int = 2
    # longer prompts lose their oldest turns first, then the middle of the rest. The engine's
    # context is this and actors.max_response_tokens
    max_prompt_tokens: int = 2048
    # where the action stands in a response: "tags", "upstream" (as in the authors' code), "text"
    # (the whole response)
    parser: str = "tags"
    # invalid actions: "form" (the parser finds none, as in the paper), "environment"
    # (also truncated responses and actions that the environment does not understand),
    # "admissible" (also actions that are not in the environment's list)
    invalid: str = "environment"

    # Rarely changed.
    # how tool calls of agent programs are read: vLLM's name of the model family's parser, such as
    # "hermes" or "llama3_json"; "auto" takes one that reads what the chat template writes
    tool_parser: str = "auto"
    # passed to the chat template as `enable_thinking`; null leaves the template's own choice
    thinking: bool | None = None
    stop: list[str] = field(default_factory=list)  # texts that end a response and stay in it


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelConfig:
    """The tiny policy that a run makes when `model.path` is empty.

    It starts from random weights and then imitates the environment's scripted policy.
    """

    vocabulary_size: int = 1024  # tokens of the tokenizer that is trained for it
    hidden_size: int = 128  # a multiple of 32, the size of an attention head
    layers: int = 2  # transformer layers
    clone_steps: int = 30  # learner steps of imitation


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    # a Hugging Face directory, or a repository of the Hugging Face Hub to download, such as
    # "Qwen/Qwen2.5-1.5B-Instruct"; empty makes a tiny model in the run directory
    path: str = ""
    dtype: str = "float32"  # "float32" or "bfloat16"
    # 0 trains all weights; otherwise the rank of LoRA adapters on all linear layers
    lora_rank: int = 0
    lora_alpha: float = 32.0  # adapters are scaled by lora_alpha / lora_rank
    # how engines get LoRA: "adapter" publishes A and B, which vLLM serves beside the base model;
    # "merged" publishes whole weights, for models whose layers vLLM cannot adapt
    lora_serving: str = "adapter"
    gradient_checkpointing: bool = False  # less memory, a forward pass more

    # Rarely changed.
    # logits of a bfloat16 model in float32, in the engines and in the learner: their
    # log-probabilities then differ by less
    float32_head: bool = False
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRange:
    """Bounds on the workers of a run that follows its cluster; see docs/cluster.md."""

    min: int  # workers that a start waits for
    max: int  # workers that Ray is asked for from then on


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorsConfig:
    # Ray workers, each with one vLLM engine: a number, or {min: 2, max: 16} to follow a cluster
    # that grows and shrinks. On one machine a range starts its min
    workers: int | WorkerRange = 1
    # per engine: 0 for a CPU engine, a fraction to share a GPU, above 1 for tensor parallelism,
    # unless `engine` divides the GPUs otherwise
    gpus_per_worker: float = 0.0
    # per worker at the start; a group has `algorithm.group_size` concurrent episodes
    groups_in_flight: int = 8
    # upper limit while the engine has room and episodes wait for their environments
    max_groups_in_flight: int = 16
    temperature: float = 1.0  # of sampling while training
    max_response_tokens: int = 512  # a longer response is cut
    # for CPU engines and engines that share a GPU; others use gpu_memory_utilization
    kv_cache_gib: float = 1.0

    # Rarely changed.
    # fraction of the GPU, or of the engine's share of it, that the engine fills
    gpu_memory_utilization: float = 0.85
    # more arguments of vLLM's engine, by vLLM's names, for example {enforce_eager: true,
    # pipeline_parallel_size: 2}. Those that would make the record wrong are refused; see
    # docs/cluster.md
    engine: dict[str, Any] = field(default_factory=dict)
    # extra episodes per training group: the first group_size to end form the group
    extra_members: int = 0
    # VLLM_BATCH_INVARIANT: a GPU engine gives a request the same tokens whatever else it computes
    # with it; slower
    batch_invariant: bool = False
    # cores of a CPU engine: "0" or "0,2-3"; "auto": as many as the other processes leave, and the
    # model gains from (one for each 40 MB of weights)
    cpu_cores: str = "auto"
    # seconds for one response, queueing included; then the episode is truncated
    turn_timeout_s: float = 300.0
    episode_timeout_s: float = 3600.0  # seconds for one episode; then it is truncated
    # seconds without an answer after which an engine is restarted
    engine_timeout_s: float = 20.0
    # actions come from the environment's scripted policy (or are random), not from a model;
    # needed to imitate that policy
    scripted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """Choose how episodes become advantages. gigpo/queries/ has the formulas and their sources.

    gigpo/settings.py has the bounds. A setting that the chosen estimator and anchor do not read is
    refused before a start, unless it is at its default.
    """

    # "gigpo", "grpo", "rloo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline", "hgpo",
    # "graphgpo", "g2po", "gagpo", or with a critic "turn_ppo" and, by tokens, "ppo"
    estimator: str = "gigpo"
    group_size: int = 8  # episodes per task, G
    # discount per step in step returns; read by gigpo, hgpo, g2po, gagpo and turn_ppo
    gamma: float = 0.95
    # decay of later temporal differences; read by gagpo and turn_ppo, and per token by ppo (the
    # paper's baseline: 1)
    gae_lambda: float = 0.95
    # discount per step to success, read by graphgpo; its authors: ALFWorld 0.1, WebShop 0.2,
    # Sokoban 0.8
    graph_gamma: float = 0.1
    omega: float = 1.0  # weight of the step advantage; read by gigpo, graphgpo and g2po
    # "mean_std", "mean" or "leave_one_out"; read by gigpo, grpo, hgpo, graphgpo, g2po and gagpo
    normalise: str = "mean_std"
    invalid_penalty: float = 0.1  # subtracted from the return and the score of an invalid step
    # groups to train on: those whose "advantages" are not all 0, whose "rewards" differ
    # (penalties ignored), whose "returns" differ (undiscounted, penalties ignored; DAPO), or all
    # of them with "none" (as in the authors' code)
    group_filter: str = "advantages"
    # at most so many more groups are claimed for a batch, in place of those that the filter leaves
    # out; 0 trains on smaller batches
    refill_groups: int = 0
    # steps that share a state: equal "state", "state_and_actions" (admissible actions too),
    # equal "suffix" of states, "similar" texts, "similar_greedy" (as in the authors' code)
    anchor: str = "state"

    # Rarely changed.
    # episode statistics over "steps" (authors' code) or "trajectories" (paper, eq. 3); not read by
    # hgpo, gagpo, turn_ppo and ppo
    weighting: str = "steps"
    anchor_history: int = 3  # states in the longest suffix, for anchor "suffix" and hgpo (K + 1)
    # for anchors "similar" and "similar_greedy": least fraction that two texts have in common
    similarity: float = 0.9
    # policy versions in one anchor group: "mixed", or at most version_window apart with "window"
    anchor_versions: str = "mixed"
    version_window: int = 1  # versions; 0 compares within one version


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Choose what an optimizer update minimises.

    gigpo/losses.py, corrections.py and objective.py have the formulas, their sources, and the
    numbers of each part with the published values. A number of a part that is not in use is
    refused.
    """

    # "ppo_clip", "gspo", "cispo", "dppo_tv", "sapo", "topr", "reinforce", "behaviour_cloning",
    # "distillation"
    policy: str = "ppo_clip"
    # any of token_tis, sequence_tis, token_icepop, sequence_mask, geometric_mask, k3_mask, opsm,
    # m2po; [] for none. [auto]: [token_tis] with ppo_clip, reinforce and distillation, else []
    corrections: list[str] = field(default_factory=lambda: ["auto"])
    kl_coef: float = 0.0  # weight of the KL to the base model; 0 keeps no reference model
    entropy_coef: float = 0.0  # weight of the entropy bonus

    # Rarely changed.
    # model that "distillation" learns from, with the policy's vocabulary: a directory, or the URL
    # of a server with that model alone, such as http://host:8000/v1
    teacher: str = ""
    kl: str = "k3"  # estimator of that KL: "k2" or "k3"
    # decoupled PPO: "recomputed" (a forward pass per learner step) or "interpolated" (A-3PO)
    proximal: str = "none"
    # "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum_norm" (Dr.GRPO).
    # "auto": sequence_mean_token_mean with gspo and sapo, token_mean with the others
    aggregation: str = "auto"
    # numbers that differ from the published ones, by the part they belong to, for example
    # {ppo_clip: {clip_high: 0.28}}. Dr.GRPO's aggregation needs its norm_tokens
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    """Set the network that values states, for the estimators turn_ppo and ppo.

    Its learning rate is constant. Everything else is as in `learner`: its optimizer, its updates
    and their rows, its devices.
    """

    # a Hugging Face directory with the policy's tokenizer, such as a smaller model of its family;
    # empty: a copy of the policy's base model
    path: str = ""
    learning_rate: float = 1e-5  # as in the paper's PPO baseline
    warmup_steps: int = 0  # learner steps that train the critic only, before the policy's first
    # a value that earlier updates of a learner step moved further than this towards its target is
    # not moved on; in units of returns. It acts with several updates per learner step only
    clip: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    steps: int = 100  # learner steps of the run
    groups_per_step: int = 8  # groups of one batch
    learning_rate: float = 1e-6  # of both schedules at full height
    # "constant", or "linear": from the first update down to a tenth at the last one
    schedule: str = "constant"
    # optimizer updates that multiply the schedule by a factor that rises to 1
    warmup_updates: int = 0
    # optimizer updates per learner step, on parts of its rows of equal size
    updates_per_step: int = 1
    # rows (steps) per optimizer update, as verl's mini-batches; the last update of a learner step
    # gets the rest, with less weight. 0 cuts the batch by updates_per_step
    rows_per_update: int = 0
    micro_batch_tokens: int = 16384  # tokens per forward pass
    # processes of the learner; each holds a copy, or with ZeRO a part, of the model
    ranks: int = 1
    # ranks that share the tokens of each micro-batch, for sequences that one GPU cannot hold; a
    # divisor of `ranks` and of the model's attention heads
    sequence_parallel: int = 1
    # 1, or 0 for a CPU learner, or with one rank a fraction to share a GPU
    gpus_per_rank: float = 0.0
    # DeepSpeed ZeRO: 1 shards the optimizer's state, 2 also gradients, 3 also weights
    zero_stage: int = 0
    checkpoint_every: int = 10  # learner steps

    # Rarely changed.
    weight_decay: float = 0.01  # of AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; larger ones are scaled down
    # scales the learning rate by the effective sample size (a fraction), for stale data
    ess_scaled: bool = False
    offload: bool = False  # keep the optimizer's state in main memory, with ZeRO stages 1 to 3
    # torch threads per rank of a CPU learner; with offload on a GPU, at least its share of cores
    threads: int = 1
    # on a GPU, only operations that give the same bits every time, which are slower; replay then
    # compares bit for bit, as it always does on a CPU
    deterministic: bool = False
    # FlashAttention's version for packed sequences on a GPU: 2 comes with torch, 3 needs a Hopper
    # GPU and the package flash-attn-3
    flash_attention: int = 2
    # the checkpoint of every so many learner steps is never removed; 0 keeps only the newest two
    keep_every: int = 0
    # newest published weights to keep on disk; a checkpoint has a copy of its own
    keep_versions: int = 4
    # how engines get new weights: from published "files", or by a "broadcast" as well, for nodes
    # that see the files late, through a network disk or `store.uri`; NCCL carries it if learner and
    # engines have a GPU each, else gloo
    transfer: str = "files"
    # seconds for one learner step; then the learner is killed and restarted
    step_timeout_s: float = 3600.0
    starvation_timeout_s: float = 600.0  # seconds without a batch; then the run ends


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmsConfig:
    """Set the signs of a collapse, checked after every learner step.

    Each alarm is an event in the store and a line on the screen.
    """

    stop: bool = False  # the first alarm ends the run, with a checkpoint; otherwise it warns
    ess_below: float = 0.1  # effective sample size of the importance ratios, as a fraction
    entropy_below: float = 0.0  # nats per token; 0 never warns: a policy may rightly become sure
    # nats per token, between the policy that sampled and the policy that learns
    mismatch_kl_above: float = 0.2
    # how many times longer or shorter the mean response is than in the run's first 5 steps
    length_factor: float = 4.0
    # environment variable with the URL that each alarm is posted to, which is never stored
    webhook_env: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionConfig:
    """Set what happens to a process that dies, stops or hangs."""

    silent_s: float = 15.0  # seconds without a heartbeat; then it is killed and restarted
    # restarts of one process within an hour; one more ends the run with the reason
    max_restarts: int = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    every: int = 20  # learner steps between evaluations; 0: only at the start and the end
    at_start: bool = False  # evaluate version 0 before anything is trained
    episodes_per_task: int = 1  # in evaluations before the last
    final_episodes_per_task: int = 5  # in the evaluation at the end
    temperature: float = 0.4  # as in the paper


@dataclass(frozen=True, kw_only=True, slots=True)
class TasksConfig:
    """Choose which training tasks are handed out; see docs/tasks.md."""

    # "uniform" (each pass over all tasks is shuffled), "band" (tasks that are sometimes won),
    # "variance" (a task whose result is uncertain comes more often), or your own SQL: a weight
    # for each task, over the columns of the table in docs/tasks.md
    order: str = "uniform"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """An external model for `gigpo evaluate`; see docs/evaluation.md."""

    # an OpenAI-compatible server, such as http://host:8000/v1; empty evaluates our own model
    url: str = ""
    model: str = ""  # the model's name at that server
    # environment variable with the API key, which is never stored; empty if none is needed
    api_key_env: str = ""
    # more fields for each request; null removes one of ours
    body: dict[str, Any] = field(default_factory=dict)
    requests: int = 16  # concurrent requests of each worker
    # tries of one response when the server is busy, fails or is absent; then the evaluation ends
    attempts: int = 8
    # seconds for one response, with queueing and all attempts; then the evaluation ends
    timeout_s: float = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    # location of segments, exports, weights, checkpoints and the catalog's backup, such as
    # s3://bucket/run; `gigpo train --resume URI` goes on from there; empty: run directory
    uri: str = ""
    keep_days: float = 0.0  # days after which consumed trajectories are removed; 0: never
    keep_versions: int = 0  # newest policy versions whose consumed trajectories are kept; 0: all


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineConfig:
    """Set how a run with a `source` trains on groups of other runs; see docs/offline_groups.md."""

    # fraction of each batch's groups; 1 needs no workers, no engine and no environment
    share: float = 1.0
    uses: int = 1  # learner steps that may train on one group; when all are used the run ends
    # order of use: SQL, as after ORDER BY, over a group's columns; empty: as they were played
    order: str = ""
    # SQL condition on a step's columns and advantage. Steps where it does not hold are not
    # trained on, but still count in their group's statistics; empty: train on all
    train_on: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """Set how a run trains again on its own earlier wins (SPEAR); see docs/algorithms.md."""

    # wins of so many earlier groups join each batch, as a fraction of the groups that it plays
    share: float = 0.0
    max_age: int = 5  # versions between the learner and the oldest token of a replayed group
    # learner steps until replayed wins weigh as much as new ones; 0: from the beginning
    warmup_steps: int = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    run_dir: str = "runs/default"  # directory of the run
    seed: int = 0  # of tasks, sampling, and a new base policy
    # versions between the learner and the oldest token that it trains on; 0 is synchronous
    max_staleness: int = 1
    # groups that reach that limit while they are played: "drop" retries or leaves them out,
    # "wait" makes the learner wait for them
    stragglers: str = "drop"
    # runs, or directories written by `gigpo export`, whose groups are trained on: "RUN" or
    # "RUN@where", an SQL condition on trajectories. One matching trajectory selects its group.
    # Or files of chats to clone, .jsonl or .parquet
    source: list[str] = field(default_factory=list)
    # where the metrics are shown: any of "tensorboard", "wandb", "trackio", "mlflow"
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    metrics_port: int = 0  # for Prometheus, on 127.0.0.1; 0 for none
    env: EnvConfig = field(default_factory=EnvConfig)
    # several environments in one run: name -> {weight, env: {...}, prompt: {...}}. Each takes the
    # settings of `env` and `prompt` and changes some; see docs/tasks.md. Empty: `env` is the only
    # one
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    offline: OfflineConfig = field(default_factory=OfflineConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    store: StoreConfig = field(default_factory=StoreConfig)

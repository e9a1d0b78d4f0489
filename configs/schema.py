"""Every knob of a run, with its unit and its default; the only place where defaults live.

`check` refuses what would hang, crash or mislead later, and says what would have happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig:
    name: str = "textworld"  # a registered environment, or a class of your own as "module:Class"
    # given to the environment, e.g. the number of games
    options: dict[str, Any] = field(default_factory=dict)
    max_steps: int = 10  # actions per episode, then it is truncated
    win_reward: float = 10.0  # factor on the environment's reward (the paper: 10 for a win)
    # environment processes beside each worker; of an agent program: its episodes at once
    processes: int = 1
    # of one reset or step; an environment that takes longer is killed, its episode played again
    answer_timeout_s: float = 60.0
    # at an episode whose environment fails; then its group is abandoned, with the reason
    attempts: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptConfig:
    # "think" (any text world), "direct" (no thinking), "compact" (tiny models), "alfworld",
    # "webshop", "search", "sokoban" (the paper's environments in words of our own, not the
    # authors'), or a YAML file of your own
    template: str = "think"
    # "window": each step is a chat of its own, with the latest turns in it; "chat": the episode is
    # one conversation that grows
    style: str = "window"
    # of style "window": turns shown besides the current observation; -1 shows all
    history_length: int = 2
    # longer prompts lose their oldest turns first, then the middle of what is shown
    max_prompt_tokens: int = 2048
    # given to the chat template as `enable_thinking`; null leaves it to the template
    thinking: bool | None = None
    stop: list[str] = field(default_factory=list)  # texts that end a response; they stay in it
    # how an action is read: within "tags", "upstream" (as the paper's code), or the whole "text"
    parser: str = "tags"
    # what makes an action invalid, in every environment: its "form" by the parser alone (as the
    # paper); "environment": that, a reply that was cut off, and what the environment does not
    # understand; "admissible": all this, and what it does not list
    invalid: str = "environment"


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModelConfig:
    """A base policy the project makes by itself: random initialisation, then cloning of the
    scripted player.
    """

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
    # a Hugging Face directory, or a repository of the Hub such as "Qwen/Qwen2.5-1.5B-Instruct",
    # which is downloaded; empty makes a tiny model in the run directory
    path: str = ""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    dtype: str = "float32"  # "float32" or "bfloat16"
    gradient_checkpointing: bool = False
    # 0 trains all weights; else adapters of this rank on all linear layers, published merged
    lora_rank: int = 0
    lora_alpha: float = 32.0  # an adapter's product is scaled by lora_alpha / lora_rank
    # on a GPU, beside a bfloat16 base: adapters multiply in TF32, on tensor cores; the rest does
    # not
    lora_tf32: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorsConfig:
    workers: int = 1  # Ray workers, one vLLM engine each
    # of each engine: 0 for a CPU engine, a fraction for a part of a GPU that others share, above 1
    # for tensor parallelism
    gpus_per_worker: float = 0.0
    # per worker; each plays `group_size` episodes at once, as many requests its engine takes
    groups_in_flight: int = 8
    # as long as its engine has room, because episodes wait for their environments
    max_groups_in_flight: int = 16
    # more episodes per training group; the first group_size that end are it, the others are given
    # up
    spare_members: int = 0
    temperature: float = 1.0
    max_response_tokens: int = 512
    max_model_tokens: int = 2560  # prompt and response together, as the engine allocates it
    # of CPU engines and of engines that share a GPU; others fill gpu_memory_utilization
    kv_cache_gib: float = 1.0
    # of a GPU, or of the fraction of it that gpus_per_worker is
    gpu_memory_utilization: float = 0.85
    # of a CPU engine: "0" or "0,2-3"; "auto" is all but the last, which the learner takes
    cpu_cores: str = "auto"
    # of one response, its place in line included; an episode that waits longer ends, truncated
    turn_timeout_s: float = 300.0
    episode_timeout_s: float = 3600.0  # likewise of a whole episode
    # an engine that says nothing for this long is taken for hung, and started again
    engine_timeout_s: float = 20.0
    # groups of a worker nobody has heard of are played by another after this long
    lease_s: float = 120.0
    # no model plays: what the environment demonstrates, else at random (to clone from)
    scripted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgorithmConfig:
    """How episodes become advantages; formulas and sources in gigpo/queries/. What the chosen
    estimator and anchor do not read is refused unless it is at its default.
    """

    # or grpo, rloo, dr_grpo, reinforce_pp, reinforce_pp_baseline, hgpo, graphgpo
    estimator: str = "gigpo"
    group_size: int = 8  # episodes per task, G
    gamma: float = 0.95  # discount per step, of the step returns; of gigpo and hgpo
    omega: float = 1.0  # weight of the step advantage, of gigpo and graphgpo
    # "mean_std", "mean" or "leave_one_out"; of gigpo, grpo, hgpo, graphgpo
    normalise: str = "mean_std"
    # episode statistics over "steps" (authors' code) or "trajectories" (paper Eq. 3); not of hgpo
    weighting: str = "steps"
    invalid_penalty: float = 0.1  # taken off an invalid step's own return and score
    # what the episodes of a group must differ in to be trained on: "advantages" (penalties count),
    # "rewards" (penalties do not count), "returns" (undiscounted, no penalties: DAPO), "none"
    # (nothing: all groups are, as by the paper's authors)
    signal: str = "advantages"
    # steps in the same state: same "state", "state_and_actions" (admissible ones), same "suffix" of
    # states, "similar" texts, or "similar_greedy" ones (as the authors' code groups them)
    anchor: str = "state"
    # states in the longest suffix, of anchor "suffix" and of hgpo (its K + 1)
    anchor_history: int = 3
    # of anchors "similar" and "similar_greedy": alike texts have this fraction in common, or more
    similarity: float = 0.9
    # policy versions in one anchor group: all "mixed", or within a "window"
    anchor_versions: str = "mixed"
    # of anchor_versions "window": versions apart; 0 compares within one version
    version_window: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What an update minimises; formulas and sources in gigpo/losses.py, corrections.py,
    objective.py.

    A number that is null is the published one; corrections and aggregation that are null are the
    loss's usual ones, which are the published ones but for [token_tis] (gigpo/objective.py). A
    number for what is not in use is refused.
    """

    policy: str = "ppo_clip"  # or gspo, cispo, dppo_tv, sapo, topr, reinforce, behaviour_cloning
    # token_tis, sequence_tis, token_icepop, sequence_mask, geometric_mask, k3_mask, opsm, m2po; []
    # for none. M2PO is [m2po] with policy "reinforce"
    # null: [token_tis] for ppo_clip and reinforce, [] for the others
    corrections: list[str] | None = None
    # decoupled PPO: "recomputed" (a forward pass per learner step) or "interpolated" (A-3PO)
    proximal: str = "none"
    # token_mean, sequence_mean_token_mean, sequence_mean_token_sum_norm (Dr.GRPO)
    # null: sequence_mean_token_mean for gspo and sapo, token_mean for the others
    aggregation: str | None = None
    kl: str = "k3"  # estimator of the KL to the base model: "k2" or "k3"
    kl_coef: float = 0.0  # its weight; 0 keeps no reference model
    entropy_coef: float = 0.0
    clip_low: float | None = None  # ppo_clip 0.2, gspo 3e-4, cispo 1
    clip_high: float | None = None  # ppo_clip 0.2, gspo 4e-4, cispo 4
    dual_clip: float | None = None  # ppo_clip 3; .inf for none
    delta_low: float | None = None  # dppo_tv 0.2, a difference of probabilities
    delta_high: float | None = None  # dppo_tv 0.2
    ratio_cap: float | None = None  # dppo_tv, no cap
    quadratic_coef: float | None = None  # dppo_tv 1e-3
    tau_positive: float | None = None  # sapo 1
    tau_negative: float | None = None  # sapo 1.05
    tis_cap: float | None = None  # token_tis and sequence_tis 2; .inf for none
    icepop_low: float | None = None  # token_icepop 0.5; 0 for none
    icepop_high: float | None = None  # token_icepop 5; .inf for none
    sequence_low: float | None = None  # sequence_mask 0.5; 0 for none
    sequence_high: float | None = None  # sequence_mask 2; .inf for none
    # geometric_mask 0.999, a bound of pi / mu (verl's is of mu / pi); 0 for none
    geometric_low: float | None = None
    geometric_high: float | None = None  # geometric_mask 1.001; .inf for none
    k3_max: float | None = None  # k3_mask 0.01
    opsm_delta: float | None = None  # opsm 1e-4
    m2_max: float | None = None  # m2po 0.04
    norm_tokens: float | None = None  # sequence_mean_token_sum_norm: actors.max_response_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    steps: int = 100  # learner steps of the run
    groups_per_step: int = 8
    # optimizer updates per learner step, over parts of its rows of equal size
    updates_per_step: int = 1
    # rows (steps) in each optimizer update, as verl's mini-batches; the last update of a learner
    # step gets the rest, and weighs so much less. 0 cuts by updates_per_step
    rows_per_update: int = 0
    learning_rate: float = 1e-6
    # learning rate times the update's effective sample size (a fraction), for stale data
    ess_scaled: bool = False
    weight_decay: float = 0.01
    # after the warm-up: "constant", or "linear" down to a tenth at the run's last step
    schedule: str = "constant"
    warmup_updates: int = 0
    grad_clip: float = 1.0
    # in a row with a loss or gradient that is not finite; one more ends the run
    max_bad_updates: int = 3
    micro_batch_tokens: int = 16384  # tokens per forward pass
    # a step whose prompt repeats the last one's tokens continues its sequence
    merge_steps: bool = True
    # processes of the learner; each has a copy, or with ZeRO a part, of the model and of every
    # batch
    ranks: int = 1
    # 1, 0 for a CPU learner, or, of one rank, a fraction of a GPU that others share
    gpus_per_rank: float = 0.0
    # DeepSpeed ZeRO: 1 shares out the optimizer's state, 2 also gradients, 3 also weights
    zero_stage: int = 0
    offload: bool = False  # the optimizer's state stays in main memory; ZeRO stages 1 to 3
    # torch threads of each rank of a CPU learner; beside a GPU, with offload, at least its share of
    # the cores
    threads: int = 1
    # on a GPU: operations that give the same bits every time, slower, so that replay compares bit
    # for bit; a CPU always does
    deterministic: bool = False
    checkpoint_every: int = 10  # learner steps
    keep_checkpoints: int = 2
    # learner steps; checkpoints of these are never removed; 0: only the newest keep_checkpoints
    # stay
    keep_every: int = 0
    keep_versions: int = 4  # newest published weights kept on disk; a checkpoint has its own copy
    # how engines get new weights: from the "files" that are published, or by a "broadcast" beside
    # that, so that only an engine that missed it reads files: for nodes to whom those come late,
    # through a network disk or `store.uri`
    transfer: str = "files"
    # a learner step that takes longer hangs: the learner is killed and started again
    step_timeout_s: float = 3600.0
    starvation_timeout_s: float = 600.0  # no batch for this long ends the run with the reason


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmsConfig:
    """Signs of a collapse, looked at after every learner step; each is an event in the store and a
    line on the screen.
    """

    stop: bool = False  # the first alarm ends the run, with a checkpoint; otherwise it warns
    ess_below: float = 0.1  # effective sample size of the importance ratios, fraction of the tokens
    # nats per token; 0 never warns, as a policy may become sure of itself for good reasons
    entropy_below: float = 0.0
    # nats per token, between the policy that sampled and the one that learns
    mismatch_kl_above: float = 0.2
    # mean response length, so many times longer or shorter than in the run's first 5 steps
    length_factor: float = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisionConfig:
    """What happens to a component that dies, stops or hangs."""

    silent_s: float = 15.0  # without a sign of life for this long it is killed and started again
    # of one component within restart_window_s; one more ends the run with the reason
    max_restarts: int = 5
    restart_window_s: float = 3600.0
    # who waits for longer than this is named on the screen, with what it waits for
    starving_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    at_start: bool = False  # evaluate version 0 first; nothing is trained before that is done
    every: int = 20  # learner steps between held-out evaluations; 0 for none between start and end
    episodes_per_task: int = 1  # at intervals
    final_episodes_per_task: int = 5
    temperature: float = 0.4  # as in the paper


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointConfig:
    """Somebody else's model for `cli/evaluate.py` to play with; docs/evaluation.md."""

    # of an OpenAI-compatible server, e.g. http://host:8000/v1; empty: a model of ours plays
    url: str = ""
    model: str = ""  # as the server names it
    # environment variable that holds the API key, which is written nowhere; empty: the server wants
    # none
    api_key_env: str = ""
    # more fields for each request; null leaves one of ours out
    body: dict[str, Any] = field(default_factory=dict)
    requests: int = 16  # at once, from each worker, which plays about so many episodes
    # at one response, where the server is busy, fails or is not there; then the evaluation ends
    attempts: int = 8
    # of one response, its place in line and all attempts included; then the evaluation ends
    timeout_s: float = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    # where segments, exports and weights are, e.g. s3://bucket/prefix; empty: the run directory
    uri: str = ""
    # AS OF lsn reaches back this long; replaced files are kept so long
    snapshot_window_s: float = 900.0
    # trajectories consumed and older than this are removed; 0 keeps them for ever
    keep_days: float = 0.0
    # the same for those of older policy versions than the newest so many; 0 keeps all
    keep_versions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConfig:
    """How a run with a `source` trains on groups that other runs have played;
    docs/offline_groups.md.
    """

    # of each batch's groups; 1 plays nothing: no workers, no engine, no environment
    share: float = 1.0
    uses: int = 1  # learner steps that may train on one group; when all are used up the run ends
    # which come first: SQL, as after ORDER BY, over columns of a group; empty: as they were played
    order: str = ""
    # SQL condition over a step's columns and its advantage: stored steps where it does not hold are
    # not trained on, but their group is compared with them as ever; empty: all are
    train_on: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    run_dir: str = "runs/default"
    seed: int = 0
    # versions between the learner and the oldest token it trains on; 0 is synchronous
    max_staleness: int = 1
    # groups that are still played when they reach that limit: "drop" plays them again or leaves
    # them out, "wait" has the learner wait for them
    stragglers: str = "drop"
    # runs, or directories that `python -m store export` wrote, whose training groups are trained
    # on: "RUN" or "RUN@where", an SQL condition on trajectories; a group is taken whole if it holds
    # for one of them
    source: list[str] = field(default_factory=list)
    env: EnvConfig = field(default_factory=EnvConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    stored: StoredConfig = field(default_factory=StoredConfig)

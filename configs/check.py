"""Refuse values and combinations that would hang, crash or mislead later, before a run starts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.derived import (
    WITH_CRITIC,
    WITHOUT_ADVANTAGES,
    draws_by_weight,
    groups_of_a_step,
    has_critic,
    is_offline,
    is_served,
    most_updates,
    replayed_groups,
    serves_adapters,
)
from configs.engine_arguments import engine_faults
from configs.per_environment import (
    NAME,
    OF_THE_ENGINE,
    SECTIONS,
    environments,
    setting_names,
)
from configs.schema import (
    Config,
    CriticConfig,
    LearnerConfig,
    OfflineConfig,
    PromptConfig,
    ReplayConfig,
    WorkerRange,
)
from printable import UserError, did_you_mean

MOST_RANK = 512  # of an adapter, in vLLM's LoRAConfig
# Key -> the meaning of 0, for the message about a negative value.
MAY_BE_ZERO = {
    "seed": "",
    "max_staleness": "; use 0 for synchronous training",
    "metrics_port": "; use 0 for no figures for Prometheus",
    "actors.gpus_per_worker": "; use 0 for a CPU engine",
    "actors.extra_members": "; use 0 for none",
    "algorithm.refill_groups": "; use 0 to train on smaller batches",
    "critic.warmup_steps": "; use 0 to train the policy from the first learner step on",
    "learner.weight_decay": "",
    "learner.warmup_updates": "",
    "learner.rows_per_update": "; use 0 to cut a batch by learner.updates_per_step",
    "learner.zero_stage": "",
    "learner.gpus_per_rank": "; use 0 for a CPU learner",
    "learner.keep_every": "; use 0 to keep the newest two only",
    "model.lora_rank": "; use 0 to train all weights",
    "alarms.ess_below": "; use 0 for no such alarm",
    "alarms.entropy_below": "; use 0 for no such alarm",
    "supervision.max_restarts": "; use 0 to end the run at the first death",
    "evaluation.every": "; use 0 for no evaluation between the start and the end",
    "evaluation.temperature": "; use 0 for greedy play",
    "replay.share": "; use 0 to replay nothing",
    "replay.warmup_steps": "; use 0 for the full weight from the beginning",
    "store.keep_days": "; use 0 to keep trajectories for ever",
    "store.keep_versions": "; use 0 to keep trajectories of all versions",
}
COUNTS_OF_GROUPS = ("algorithm.group_size", "algorithm.refill_groups")
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
MAX_WIN_REWARD = 1e6
LAST_PORT = 65535
VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
TEMPLATES = (  # the files in actors/templates
    "alfworld",
    "compact",
    "direct",
    "search",
    "sokoban",
    "sokoban_image",
    "think",
    "webshop",
)
DR_GRPO = "sequence_mean_token_sum_norm"  # its aggregation
HEAD_SIZE = 32  # of the tiny model; the smallest that vLLM has kernels for


class ConfigError(UserError, ValueError):
    """A mistake in a config; the message is one line that names the value and the fix."""


def check(config: Config) -> None:
    """Raise ConfigError, in one line, with the value, its consequence and the fix."""
    for own in _checked_environments(config):
        _check_choices(own)
        _check_numbers(own)
        _check_prompt(own)
    _check_scripted(config)
    _check_retention(config)
    _check_alarms(config)
    _check_trackers(config)
    _check_algorithm(config)
    _check_refill(config)
    _check_cloning(config)
    _check_critic(config)
    _check_updates(config)
    _check_precision(config)
    _check_adapters(config)
    _check_tiny_model(config)
    _check_norm(config)
    _check_teacher(config)
    _check_placement(config)
    _check_engine(config)
    _check_endpoint(config)
    _check_offline(config)
    _check_replay(config)


def check_is_list(key: str, value: object) -> None:
    """Raise ConfigError for a single name, which would be read letter by letter."""
    if isinstance(value, str):
        raise ConfigError(f"{key}={value} is not a list; use {key}=[{value}]")


def dotted_settings(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (`a.b.c`, value) for every setting of a config. A range of workers is one value."""
    if isinstance(value, WorkerRange):
        yield prefix[:-1], dataclasses.asdict(value)
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from dotted_settings(getattr(value, item.name), f"{prefix}{item.name}.")
    else:
        yield prefix[:-1], value


def _checked_environments(config: Config) -> list[Config]:
    """Return the settings of every environment, after a look at what `environments` holds."""
    for name, given in config.environments.items():
        key = f"environments.{name}"
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{key} is no name for an environment; use lower-case letters, digits and _, as in "
                "rooms_2"
            )
        for part, value in given.items():
            if part == "weight":
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise ConfigError(f"{key}.weight={value} is not a number")
                if not 0 < value < math.inf:
                    raise ConfigError(f"{key}.weight={value} must be above 0; or leave {name} out")
            elif part in SECTIONS and isinstance(value, dict):
                _check_section(f"{key}.{part}", value, section=part)
            elif part in SECTIONS:
                raise ConfigError(
                    f"{key}.{part}={value} is no section; write its settings, for example "
                    f"{key}.env.name={value if part == 'env' else 'sokoban'}"
                )
            else:
                raise ConfigError(f"{key}.{part} is none of weight, env and prompt")
        template = given.get("prompt", {}).get("template", "think")
        if template not in TEMPLATES and not Path(str(template)).is_absolute():
            raise ConfigError(
                f"{key}.prompt.template={template!r} is not one of "
                f"{', '.join(map(repr, TEMPLATES))}; give an absolute path to a file of your own"
            )
    return list(environments(config).values())


def _check_section(key: str, given: Mapping[str, object], *, section: str) -> None:
    """Check the names and types of the settings that an environment has of its own."""
    for name in given:
        if section == "prompt" and name in OF_THE_ENGINE:
            raise ConfigError(
                f"{key}.{name}: one engine serves all environments; set prompt.{name} instead"
            )
        known = setting_names(section)
        if name not in known:
            raise ConfigError(
                f"unknown key '{key}.{name}'{did_you_mean(name, known)}; configs/schema.py lists "
                "every key"
            )
    try:
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SECTIONS[section]), given))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {str(error).partition(chr(10))[0]}") from None


def _check_choices(config: Config) -> None:
    choices = {
        "prompt.style": (config.prompt.style, ("window", "chat")),
        "prompt.parser": (config.prompt.parser, ("tags", "upstream", "text")),
        "prompt.invalid": (config.prompt.invalid, ("form", "environment", "admissible")),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "model.lora_serving": (config.model.lora_serving, ("adapter", "merged")),
        "learner.schedule": (config.learner.schedule, ("constant", "linear")),
        "learner.transfer": (config.learner.transfer, ("files", "broadcast")),
        "learner.zero_stage": (config.learner.zero_stage, (0, 1, 2, 3)),
        "learner.flash_attention": (config.learner.flash_attention, (2, 3)),
        "stragglers": (config.stragglers, ("drop", "wait")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(
                f"{key}={value!r} is not one of "
                f"{', '.join(map(repr, allowed))}{did_you_mean(value, allowed)}"
            )


def _check_numbers(config: Config) -> None:
    for key, number in dotted_settings(config):
        # gigpo knows the bounds of losses and advantages, and the driver asks it before a start
        is_gigpos = key.startswith(("loss.", "algorithm.")) and key not in COUNTS_OF_GROUPS
        # -1 turns are all turns
        has_own_bounds = is_gigpos or key == "prompt.history_length"
        if has_own_bounds or isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not math.isfinite(number):
            raise ConfigError(f"{key}={number} is not a number")
        if key in MAY_BE_ZERO and number < 0:
            raise ConfigError(f"{key}={number} is below 0{MAY_BE_ZERO[key]}")
        if key not in MAY_BE_ZERO and number <= 0:
            raise ConfigError(f"{key}={number} must be above 0")
        if key.endswith("env.win_reward") and number > MAX_WIN_REWARD:
            raise ConfigError(
                f"{key}={number:g} is above {MAX_WIN_REWARD:g}, and learning squares rewards; use "
                "e.g. 10"
            )


def _check_scripted(config: Config) -> None:
    """Name everything that a scripted policy needs in one message."""
    if not config.actors.scripted or is_offline(config):  # _check_offline refuses the latter
        return
    last = config.learner.steps - 1
    policy = config.loss.policy
    staleness = config.max_staleness
    wanted = []
    if policy != "behaviour_cloning":
        wanted.append(f"loss.policy=behaviour_cloning, not {policy!r}")
    if staleness < last:
        wanted.append(
            f"max_staleness={last}: with {staleness} every group is too old from learner step "
            f"{staleness + 2} on"
        )
    if wanted:
        raise ConfigError(
            "actors.scripted=true plays at version 0 for ever, to be cloned; it needs "
            f"{'; '.join(wanted)}"
        )


def _check_retention(config: Config) -> None:
    learner = config.learner
    if learner.keep_every % learner.checkpoint_every:
        raise ConfigError(
            f"learner.keep_every={learner.keep_every} is no multiple of "
            f"learner.checkpoint_every={learner.checkpoint_every}, so most of those steps would "
            "have no checkpoint to keep; use a multiple"
        )
    least = config.max_staleness + 2
    # a scripted policy loads no weights
    if learner.keep_versions < least and not config.actors.scripted:
        raise ConfigError(
            f"learner.keep_versions={learner.keep_versions} could delete weights that an actor is "
            f"about to load; with max_staleness={config.max_staleness} keep at least {least}"
        )


def _check_alarms(config: Config) -> None:
    alarms = config.alarms
    if alarms.length_factor <= 1.0:
        raise ConfigError(
            f"alarms.length_factor={alarms.length_factor:g} would call every length a collapse; "
            "use more than 1, e.g. 4"
        )
    if alarms.ess_below > 1.0:
        raise ConfigError(
            f"alarms.ess_below={alarms.ess_below:g} would always warn: it is a fraction of the "
            "tokens; use at most 1, e.g. 0.1"
        )
    if alarms.webhook_env and not VARIABLE.fullmatch(alarms.webhook_env):
        raise ConfigError(  # the value is not shown: it may be the URL itself
            "alarms.webhook_env is no variable's name; give the name, e.g. GIGPO_WEBHOOK, never "
            "the URL itself"
        )


def _check_trackers(config: Config) -> None:
    check_is_list("trackers", config.trackers)
    for name in config.trackers:
        if name not in TRACKERS:
            raise ConfigError(
                f"trackers={name!r} is not one of {', '.join(map(repr, TRACKERS))}"
                f"{did_you_mean(name, TRACKERS)}"
            )
    if len(set(config.trackers)) < len(config.trackers):
        raise ConfigError(
            f"trackers={config.trackers} has a tracker twice, which would show all points twice; "
            "name each once"
        )
    if config.metrics_port > LAST_PORT:
        raise ConfigError(
            f"metrics_port={config.metrics_port} is no port; use at most {LAST_PORT}, e.g. 9400"
        )


def _check_algorithm(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.anchor == "anchor_key":
        raise ConfigError(
            "algorithm.anchor='anchor_key' is not possible in a run, which records no such column; "
            "use 'state' or 'similar', or compare offline with gigpo.compute_advantages"
        )
    if algorithm.anchor_versions == "weighted":
        raise ConfigError(
            "algorithm.anchor_versions='weighted' is not possible in a run: weights need a forward "
            "pass that comes after the advantages; use 'window', or weigh offline"
        )
    if algorithm.refill_groups and algorithm.group_filter == "none":
        raise ConfigError(
            f"algorithm.refill_groups={algorithm.refill_groups} does nothing with "
            "group_filter=none; leave it out, or use group_filter=advantages or rewards or returns"
        )
    reads_advantages = config.loss.policy not in WITHOUT_ADVANTAGES
    if algorithm.group_size == 1 and reads_advantages and not has_critic(config):
        raise ConfigError(
            f"algorithm.group_size=1 with {algorithm.estimator} leaves nothing to compare an "
            "episode with, so no advantage would be meaningful; use at least 2 (the paper: 8)"
        )


def _check_refill(config: Config) -> None:
    n_groups = config.algorithm.refill_groups
    reads_advantages = config.loss.policy not in WITHOUT_ADVANTAGES
    if n_groups and (not reads_advantages or is_offline(config)):
        why = "offline.share=1" if reads_advantages else f"loss.policy={config.loss.policy}"
        raise ConfigError(
            f"algorithm.refill_groups={n_groups} does nothing with {why}: "
            f"{'no group is played' if reads_advantages else 'no group is left out'}; leave it out"
        )


def _check_cloning(config: Config) -> None:
    clones = config.loss.policy == "behaviour_cloning"
    if clones and not config.actors.scripted and not is_offline(config):
        raise ConfigError(
            "loss.policy=behaviour_cloning would clone the model from itself; set "
            "actors.scripted=true, or clone another run: source=RUN with offline.share=1"
        )


def _check_critic(config: Config) -> None:
    critic, defaults = config.critic, CriticConfig()
    algorithm = config.algorithm
    estimator = f"algorithm.estimator={algorithm.estimator}"
    if not has_critic(config):
        for key, value in dotted_settings(critic):
            if value != getattr(defaults, key):
                raise ConfigError(
                    f"critic.{key}={value} does nothing with {estimator}; "
                    f"leave it out, or use {' or '.join(WITH_CRITIC)}"
                )
        return
    if config.loss.policy in WITHOUT_ADVANTAGES:
        raise ConfigError(
            f"{estimator} would train a critic for loss.policy="
            f"{config.loss.policy}, which reads no advantages; use algorithm.estimator=grpo"
        )
    if config.replay.share:
        raise ConfigError(
            f"replay.share={config.replay.share:g} with {estimator} would "
            "train on wins whose states the critic has not valued; leave it out"
        )
    if critic.learning_rate > 1.0:
        raise ConfigError(
            f"critic.learning_rate={critic.learning_rate:g} would wreck any critic at once; use "
            "e.g. 1e-5"
        )
    if critic.clip != defaults.clip and most_updates(config) == 1:
        raise ConfigError(
            f"critic.clip={critic.clip:g} does nothing with one update per learner step, before "
            "which no value has moved; leave it out, or set learner.updates_per_step to 2 or more"
        )
    if critic.warmup_steps >= config.learner.steps:
        raise ConfigError(
            f"critic.warmup_steps={critic.warmup_steps} of learner.steps={config.learner.steps} "
            "would leave no step for the policy; use fewer"
        )
    if algorithm.group_size == 1 and algorithm.group_filter in ("rewards", "returns"):
        raise ConfigError(
            f"algorithm.group_filter={algorithm.group_filter!r} leaves out every group of "
            "algorithm.group_size=1; use 'none' or 'advantages'"
        )


def _check_updates(config: Config) -> None:
    learner, most = config.learner, most_updates(config)
    if learner.learning_rate > 1.0:
        raise ConfigError(
            f"learner.learning_rate={learner.learning_rate:g} would wreck any model at once; use "
            "e.g. 1e-6"
        )
    sized = f"learner.rows_per_update={learner.rows_per_update}"
    counted = f"learner.updates_per_step={learner.updates_per_step}"
    if learner.rows_per_update and learner.updates_per_step != LearnerConfig().updates_per_step:
        raise ConfigError(f"{sized} and {counted} both cut a batch; leave one out")
    if learner.rows_per_update and learner.schedule == "linear":
        raise ConfigError(
            f"learner.schedule='linear' needs the run's number of updates, which {sized} leaves "
            "open; use learner.updates_per_step, or learner.schedule=constant"
        )
    warmup_steps = config.critic.warmup_steps
    if warmup_steps and learner.schedule == "linear":
        raise ConfigError(
            f"learner.schedule='linear' falls over all learner steps, and critic.warmup_steps="
            f"{warmup_steps} of them make no update of the policy; use learner.schedule=constant"
        )
    n_updates = (learner.steps - warmup_steps) * most
    if learner.warmup_updates > n_updates:
        raise ConfigError(
            f"learner.warmup_updates={learner.warmup_updates} would outlast the run's {n_updates} "
            f"updates (learner.steps={learner.steps} of at most {most} each), so "
            f"learner.learning_rate would never be reached; use at most {n_updates}"
        )
    if config.loss.proximal == "recomputed" and most == 1:
        raise ConfigError(
            f"loss.proximal='recomputed' with {sized if learner.rows_per_update else counted} "
            "costs a forward pass for a policy that is still the one being trained, so its clip "
            "would never act; set loss.policy=reinforce, the same without, or more updates"
        )


def _check_precision(config: Config) -> None:
    model, zero_stage = config.model, config.learner.zero_stage
    if model.dtype == "bfloat16" and zero_stage == 0 and model.lora_rank == 0:
        raise ConfigError(
            "model.dtype='bfloat16' with learner.zero_stage=0 keeps no float32 master weights, so "
            "small updates would be rounded away; set learner.zero_stage=1"
        )
    if model.float32_head and model.dtype == "float32":
        raise ConfigError(
            "model.float32_head=true does nothing with model.dtype='float32', whose logits are "
            "float32 already; leave it out"
        )
    if config.learner.offload and zero_stage == 0:
        raise ConfigError(
            "learner.offload=true with learner.zero_stage=0 would do nothing; set "
            "learner.zero_stage=1"
        )


def _check_adapters(config: Config) -> None:
    model = config.model
    if not serves_adapters(model):
        return
    if model.lora_rank > MOST_RANK:
        raise ConfigError(
            f"model.lora_rank={model.lora_rank} is above {MOST_RANK}, the largest that vLLM serves "
            "as an adapter; use a smaller rank, or model.lora_serving=merged"
        )
    if config.actors.gpus_per_worker and model.dtype == "float32":
        raise ConfigError(
            f"model.lora_rank={model.lora_rank} with model.dtype='float32' on a GPU: vLLM's GPU "
            "kernels for adapters take bfloat16 only; use model.dtype=bfloat16, or "
            "model.lora_serving=merged"
        )
    if config.learner.transfer == "broadcast":
        raise ConfigError(
            f"learner.transfer='broadcast' with model.lora_rank={model.lora_rank} would do "
            "nothing: an adapter is small, and engines read its file; use learner.transfer=files, "
            "or model.lora_serving=merged to send whole weights"
        )


def _check_tiny_model(config: Config) -> None:
    tiny = config.model.tiny
    if tiny.hidden_size % HEAD_SIZE:
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} is no multiple of {HEAD_SIZE}, the size of "
            "an attention head"
        )


def _check_norm(config: Config) -> None:
    response = config.actors.max_response_tokens
    norm = config.loss.numbers.get(DR_GRPO, {}).get("norm_tokens")
    if config.loss.aggregation == DR_GRPO and norm != response:
        raise ConfigError(
            f"loss.aggregation='{DR_GRPO}' divides by the longest response, as Dr.GRPO does; set "
            f"loss.numbers.{DR_GRPO}.norm_tokens={response}, which is actors.max_response_tokens"
            + ("" if norm is None else f", not {norm:g}")
        )


def _check_teacher(config: Config) -> None:
    teacher, distils = config.loss.teacher, config.loss.policy == "distillation"
    if distils and not teacher:
        raise ConfigError(
            "loss.policy='distillation' has no teacher; give the directory of one, or the URL of "
            "its server: loss.teacher=DIR"
        )
    if is_served(teacher):
        _check_url("loss.teacher", teacher)
        if config.actors.temperature != 1.0:
            raise ConfigError(
                f"loss.teacher={teacher} gives log-probabilities at temperature 1, and not at "
                f"actors.temperature={config.actors.temperature:g}; use 1, or the teacher's "
                "directory"
            )
    elif teacher and not (Path(teacher) / "config.json").is_file():
        raise ConfigError(
            f"loss.teacher={teacher!r} is not a Hugging Face model directory (no config.json in it)"
        )
    if teacher and not config.model.path:
        raise ConfigError(
            f"loss.teacher={teacher!r} needs a model with the same tokenizer; give model.path=DIR"
        )
    if teacher and not distils:
        raise ConfigError(
            f"loss.teacher={teacher!r} does nothing with loss.policy={config.loss.policy!r}; add "
            "loss.policy=distillation"
        )


def _check_prompt(config: Config) -> None:
    prompt = config.prompt
    if prompt.template not in TEMPLATES and not Path(prompt.template).is_file():
        raise ConfigError(
            f"prompt.template={prompt.template!r} is not one of {', '.join(map(repr, TEMPLATES))}, "
            f"nor a file of your own{did_you_mean(prompt.template, TEMPLATES)}"
        )
    if prompt.history_length < -1:
        raise ConfigError(
            f"prompt.history_length={prompt.history_length} is below -1; use 0 for no history, -1 "
            "for all of it"
        )
    if prompt.style == "chat" and prompt.history_length not in (-1, PromptConfig().history_length):
        raise ConfigError(
            f"prompt.history_length={prompt.history_length} does nothing with prompt.style='chat', "
            "which shows all turns; use -1"
        )
    check_is_list("prompt.stop", prompt.stop)
    if "" in prompt.stop:
        raise ConfigError(
            "prompt.stop has an empty text, which would end every response at once; leave it out"
        )


def _check_placement(config: Config) -> None:
    workers = config.actors.workers
    if isinstance(workers, WorkerRange) and not 1 <= workers.min <= workers.max:
        raise ConfigError(
            f"actors.workers={{min: {workers.min}, max: {workers.max}}} is no range: it needs "
            "1 <= min <= max"
        )
    cores, per_worker = config.actors.cpu_cores, config.actors.gpus_per_worker
    per_rank, ranks = config.learner.gpus_per_rank, config.learner.ranks
    if cores != "auto" and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cores):
        raise ConfigError(
            f"actors.cpu_cores={cores!r} is not 'auto' or a list of cores like '0' or '0,2-3'"
        )
    if per_worker > 1 and per_worker != int(per_worker):
        raise ConfigError(
            f"actors.gpus_per_worker={per_worker:g} is no whole number and no fraction of one GPU; "
            f"use e.g. {int(per_worker)}"
        )
    if per_rank > 1:
        raise ConfigError(
            f"learner.gpus_per_rank={per_rank:g} is more than one GPU; use 1, and more "
            "learner.ranks for more GPUs"
        )
    shared_by = config.learner.sequence_parallel
    if ranks % shared_by:
        raise ConfigError(
            f"learner.ranks={ranks} are no whole number of groups of "
            f"learner.sequence_parallel={shared_by}; set learner.ranks={shared_by}, or a multiple"
        )
    if config.learner.flash_attention != 2 and not (per_rank and config.model.dtype == "bfloat16"):
        raise ConfigError(
            f"learner.flash_attention={config.learner.flash_attention} does nothing without a GPU "
            "and model.dtype=bfloat16, which its kernels need; leave it out"
        )
    if 0 < per_rank < 1 < ranks:
        raise ConfigError(
            f"learner.gpus_per_rank={per_rank:g} with learner.ranks={ranks} could put two ranks on "
            "one GPU, which NCCL refuses; use learner.ranks=1, or learner.gpus_per_rank=1"
        )


def _check_engine(config: Config) -> None:
    if config.actors.batch_invariant and not config.actors.gpus_per_worker:
        raise ConfigError(
            "actors.batch_invariant=true with actors.gpus_per_worker=0: vLLM has no such mode for "
            "a CPU engine; leave it out"
        )
    if fault := next(engine_faults(config), ""):
        raise ConfigError(fault)


def _check_endpoint(config: Config) -> None:
    endpoint = config.endpoint
    if not endpoint.url:
        if endpoint.model:
            raise ConfigError(
                f"endpoint.model={endpoint.model!r} has no server; add "
                "endpoint.url=http://HOST:PORT/v1"
            )
        return
    _check_url("endpoint.url", endpoint.url)
    if endpoint.api_key_env and not VARIABLE.fullmatch(endpoint.api_key_env):
        raise ConfigError(
            "endpoint.api_key_env is no variable's name; give the name, e.g. OPENAI_API_KEY, never "
            "the key itself"
        )


def _check_url(key: str, url: str) -> None:
    if "@" in url:  # a password would be written into the run directory
        remedy = "leave them out"
        if key == "endpoint.url":
            remedy += ", and name a variable with the key: endpoint.api_key_env"
        raise ConfigError(f"{key} has a name or password in it; {remedy}")
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url) or not _has_host(url):
        raise ConfigError(f"{key}={url!r} is no URL like http://localhost:8000/v1")


def _has_host(url: str) -> bool:
    """Return whether a URL names a host, and a port below 65,536 if any."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # an address with one bracket, or a port that is no number
        return False


def _check_offline(config: Config) -> None:
    offline, defaults = config.offline, OfflineConfig()
    if not config.source:
        for key, value in dotted_settings(offline):
            if value != getattr(defaults, key):
                raise ConfigError(
                    f"offline.{key}={value} does nothing without source=RUN; add that"
                )
        return
    share = f"offline.share={offline.share:g}"
    if offline.share > 1.0:
        raise ConfigError(f"{share} is more than all of a batch; use 1 for offline groups only")
    n_own, n_offline = groups_of_a_step(config)
    if n_offline == 0 or (n_own == 0 and not is_offline(config)):
        raise ConfigError(
            f"{share} of learner.groups_per_step={config.learner.groups_per_step} is {n_offline} "
            f"offline and {n_own} own groups; use 1 for offline ones only, leave source out for "
            "own ones only, or take more groups"
        )
    if is_offline(config) and draws_by_weight(config):
        raise ConfigError(
            f"tasks.order={config.tasks.order} does nothing with offline.share=1, which plays no "
            "tasks; leave it out, or choose groups by offline.order"
        )
    if is_offline(config) and config.actors.scripted:
        raise ConfigError("actors.scripted=true plays nothing with offline.share=1; leave it out")
    if config.loss.proximal == "interpolated":
        raise ConfigError(
            "loss.proximal='interpolated' needs the staleness of every token, and the versions of "
            "an offline group are another run's; use 'recomputed' or 'none'"
        )


def _check_replay(config: Config) -> None:
    replay, defaults = config.replay, ReplayConfig()
    share = f"replay.share={replay.share:g}"
    if not replay.share:
        for key, value in dotted_settings(replay):
            if value != getattr(defaults, key):
                raise ConfigError(
                    f"replay.{key}={value} does nothing with {share}; raise the share"
                )
        return
    if config.loss.policy in WITHOUT_ADVANTAGES or is_offline(config):
        raise ConfigError(
            f"{share} has nothing to compare a win with: loss.policy={config.loss.policy} reads no "
            "advantages, or offline.share=1 plays nothing; leave it out"
        )
    if replay.share > 1.0:
        raise ConfigError(f"{share} would replay more than is played; use at most 1, e.g. 0.25")
    if not replayed_groups(config):
        raise ConfigError(
            f"{share} of {groups_of_a_step(config)[0]} groups is none; use a larger share, or more "
            "learner.groups_per_step"
        )
    if 0 < config.store.keep_versions <= replay.max_age:
        raise ConfigError(
            f"store.keep_versions={config.store.keep_versions} would remove wins before they are "
            f"replay.max_age={replay.max_age} versions old; keep more versions than that"
        )

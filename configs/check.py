"""What is refused before anything starts: values and combinations that would hang, crash or mislead
later.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from configs.endpoint import endpoint_fault
from configs.gpus import gpu_fault
from configs.roles import groups_of_a_step, is_offline
from configs.rules import (
    ESTIMATORS,
    MAY_BE_ZERO,
    MIN_SNAPSHOT_WINDOW_S,
    NOT_RECORDED,
    READ_WITH,
    TEMPLATES,
    read_with,
)
from configs.schema import AlgorithmConfig, Config, PromptConfig, StoredConfig
from configs.updates import most_updates, one_update, updates_fault
from printable import UserError


class ConfigError(UserError, ValueError):
    """A mistake in a config; the message is one line that names the value and the fix."""


def check(config: Config) -> None:
    """Raises ConfigError, in one line, with the value, what it would have done, and the fix."""
    _check_choices(config)
    _check_positive(config)
    _check_scripted(config)
    _check_staleness(config)
    _check_alarms(config)
    _check_algorithm(config)
    _check_cores(config)
    if fault := updates_fault(config):
        raise ConfigError(fault)
    _check_precision(config)
    _check_loss(config)
    _check_tiny_model(config)
    _check_lengths(config)
    _check_prompt(config)
    if fault := endpoint_fault(config.endpoint) or gpu_fault(config):
        raise ConfigError(fault)
    _check_store(config)
    _check_stored(config)


def _check_choices(config: Config) -> None:
    a = config.algorithm
    choices = {
        "algorithm.estimator": (a.estimator, ESTIMATORS),
        "algorithm.normalise": (a.normalise, ("mean", "mean_std", "leave_one_out")),
        "algorithm.weighting": (a.weighting, ("steps", "trajectories")),
        "algorithm.signal": (a.signal, ("advantages", "rewards", "returns", "none")),
        "algorithm.anchor": (
            a.anchor,
            ("state", "suffix", "similar", "similar_greedy", "state_and_actions"),
        ),
        "algorithm.anchor_versions": (a.anchor_versions, ("mixed", "window", "weighted")),
        "prompt.style": (config.prompt.style, ("window", "chat")),
        "prompt.parser": (config.prompt.parser, ("tags", "upstream", "text")),
        "prompt.invalid": (config.prompt.invalid, ("form", "environment", "admissible")),
        "model.dtype": (config.model.dtype, ("float32", "bfloat16")),
        "learner.schedule": (config.learner.schedule, ("constant", "linear")),
        "learner.transfer": (config.learner.transfer, ("files", "broadcast")),
        "learner.zero_stage": (config.learner.zero_stage, (0, 1, 2, 3)),
        "stragglers": (config.stragglers, ("drop", "wait")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(
                f"{key}={value!r} is not one of "
                f"{', '.join(map(repr, allowed))}{hint(value, allowed)}"
            )


def _check_positive(config: Config) -> None:
    """All numbers but those of the loss: their bounds are gigpo's."""
    for key, number in flat(config):
        if (
            isinstance(number, int | float)
            and not isinstance(number, bool)
            and not key.startswith(("loss.", "prompt.history_length"))
        ):
            if not math.isfinite(number):
                raise ConfigError(f"{key}={number} is not a number")
            if key in MAY_BE_ZERO and number < 0:
                raise ConfigError(f"{key}={number} is below 0{MAY_BE_ZERO[key]}")
            if key not in MAY_BE_ZERO and number <= 0:
                raise ConfigError(f"{key}={number} must be above 0")


def _check_scripted(config: Config) -> None:
    """All that goes with it in one message: it is nobody's usual setting."""
    if not config.actors.scripted or is_offline(config):  # then it is refused for that
        return
    last, policy, staleness = config.learner.steps - 1, config.loss.policy, config.max_staleness
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


def _check_staleness(config: Config) -> None:
    learner = config.learner
    if learner.keep_checkpoints < 2:
        raise ConfigError(
            "learner.keep_checkpoints=1 leaves none if the newest turns out to be damaged; keep at "
            "least 2"
        )
    if learner.keep_every % learner.checkpoint_every:
        raise ConfigError(
            f"learner.keep_every={learner.keep_every} is no multiple of "
            f"learner.checkpoint_every={learner.checkpoint_every}, "
            "so most of those steps would have no checkpoint to keep; use a multiple"
        )
    # who is scripted loads none
    if learner.keep_versions < config.max_staleness + 2 and not config.actors.scripted:
        raise ConfigError(
            f"learner.keep_versions={learner.keep_versions} could delete weights that an actor is "
            "about to load; "
            f"with max_staleness={config.max_staleness} keep at least {config.max_staleness + 2}"
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


def _check_algorithm(config: Config) -> None:
    a = config.algorithm
    if a.gamma > 1.0:
        raise ConfigError(f"algorithm.gamma={a.gamma} is outside [0, 1]; the paper uses 0.95")
    if a.similarity >= 1.0:
        raise ConfigError(
            f"algorithm.similarity={a.similarity} is outside (0, 1); for equal states use "
            "algorithm.anchor=state"
        )
    if a.estimator == "hgpo" and a.anchor != "state":
        raise ConfigError(
            f"algorithm.anchor={a.anchor!r} is not hgpo's, which groups by suffixes of states; use "
            "'state'"
        )
    for key, value in (("anchor", a.anchor), ("anchor_versions", a.anchor_versions)):
        if value in NOT_RECORDED:
            raise ConfigError(
                f"algorithm.{key}={value!r} is not possible in a run: {NOT_RECORDED[value]}"
            )
    _check_read(a)
    if a.group_size == 1 and config.loss.policy != "behaviour_cloning":
        raise ConfigError(
            f"algorithm.group_size=1 with {a.estimator} leaves nothing to compare an episode with, "
            "so no advantage "
            "would be meaningful; use at least 2 (the paper: 8)"
        )
    if (
        config.loss.policy == "behaviour_cloning"
        and not config.actors.scripted
        and not is_offline(config)
    ):
        raise ConfigError(
            "loss.policy=behaviour_cloning would clone the model from itself; set "
            "actors.scripted=true, or clone a stored run: "
            "source=RUN with stored.share=1"
        )


def _check_read(algorithm: AlgorithmConfig) -> None:
    """A setting that nothing reads would be taken for one that acts. At its default nobody has
    asked for it.
    """
    usual = AlgorithmConfig()
    for key, choices in READ_WITH.items():
        value, default = getattr(algorithm, key), getattr(usual, key)
        if value == default or any(
            getattr(algorithm, choice) in names for choice, names in choices.items()
        ):
            continue
        chosen, ways = read_with(key, algorithm)
        raise ConfigError(
            f"algorithm.{key}={value} does nothing with {chosen}; leave it out (its default is "
            f"{default}), or use {ways}"
        )


def _check_cores(config: Config) -> None:
    cores = config.actors.cpu_cores
    if cores != "auto" and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cores):
        raise ConfigError(
            f"actors.cpu_cores={cores!r} is not 'auto' or a list of cores like '0' or '0,2-3'"
        )


def _check_precision(config: Config) -> None:
    if (
        config.model.dtype == "bfloat16"
        and config.learner.zero_stage == 0
        and config.model.lora_rank == 0
    ):
        raise ConfigError(
            "model.dtype='bfloat16' with learner.zero_stage=0 keeps no float32 master weights, so "
            "small updates would be "
            "rounded away; set learner.zero_stage=1"
        )
    if config.learner.offload and config.learner.zero_stage == 0:
        raise ConfigError(
            "learner.offload=true with learner.zero_stage=0 would do nothing; set "
            "learner.zero_stage=1"
        )


def _check_loss(config: Config) -> None:
    """What other sections have to do with it. Its names and numbers, and which go together, gigpo
    says when a run's objective is made (`learner.fill_defaults`), before anything starts."""
    if config.loss.proximal == "recomputed" and most_updates(config) == 1:
        raise ConfigError(
            f"loss.proximal='recomputed' with {one_update(config.learner)} costs a forward pass "
            "for a policy that is still the "
            "one being trained, so its clip would never act; set loss.policy=reinforce, the same "
            "without, or more updates"
        )


def _check_tiny_model(config: Config) -> None:
    tiny = config.model.tiny
    if tiny.hidden_size % tiny.heads or tiny.hidden_size // tiny.heads not in (32, 64, 128):
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} over model.tiny.heads={tiny.heads} must "
            "give heads of 32, 64 or 128, "
            "the sizes vLLM has kernels for"
        )


def _check_lengths(config: Config) -> None:
    actors = config.actors
    room = actors.max_model_tokens - actors.max_response_tokens
    if room < config.prompt.max_prompt_tokens:
        raise ConfigError(
            f"prompt.max_prompt_tokens={config.prompt.max_prompt_tokens} and "
            "actors.max_response_tokens="
            f"{actors.max_response_tokens} do not fit into "
            f"actors.max_model_tokens={actors.max_model_tokens}; "
            f"raise the last to {config.prompt.max_prompt_tokens + actors.max_response_tokens}"
        )


def _check_prompt(config: Config) -> None:
    prompt = config.prompt
    if prompt.template not in TEMPLATES and not Path(prompt.template).is_file():
        raise ConfigError(
            f"prompt.template={prompt.template!r} is not one of {', '.join(map(repr, TEMPLATES))}, "
            "nor a file of your own"
            f"{hint(prompt.template, TEMPLATES)}"
        )
    if prompt.history_length < -1:
        raise ConfigError(
            f"prompt.history_length={prompt.history_length} is below -1; use 0 for no history, -1 "
            "for all of it"
        )
    if prompt.style == "chat" and prompt.history_length not in (-1, PromptConfig().history_length):
        raise ConfigError(
            f"prompt.history_length={prompt.history_length} does nothing with prompt.style='chat', "
            "which shows all turns; "
            "use -1"
        )
    check_is_list("prompt.stop", prompt.stop)
    if "" in prompt.stop:
        raise ConfigError(
            "prompt.stop has an empty text, which would end every response at once; leave it out"
        )


def _check_store(config: Config) -> None:
    if config.store.snapshot_window_s < MIN_SNAPSHOT_WINDOW_S:
        raise ConfigError(
            f"store.snapshot_window_s={config.store.snapshot_window_s:g} could remove a file that "
            "the learner was just told to "
            f"read; use at least {MIN_SNAPSHOT_WINDOW_S:g}"
        )


def _check_stored(config: Config) -> None:
    stored, usual = config.stored, StoredConfig()
    if not config.source:
        changed = [key for key, value in flat(stored) if value != getattr(usual, key)]
        if changed:
            raise ConfigError(
                f"stored.{changed[0]}={getattr(stored, changed[0])} does nothing without "
                "source=RUN; add that"
            )
        return
    if stored.share > 1.0:
        raise ConfigError(
            f"stored.share={stored.share:g} is more than all of a batch; use 1 for stored groups "
            "only"
        )
    n_live, n_stored = groups_of_a_step(config)
    if n_stored == 0 or (n_live == 0 and not is_offline(config)):
        raise ConfigError(
            f"stored.share={stored.share:g} of "
            f"learner.groups_per_step={config.learner.groups_per_step} is {n_stored} stored "
            f"and {n_live} live groups; use 1 for stored ones only, leave source out for live ones "
            "only, or take more groups"
        )
    if is_offline(config) and config.actors.scripted:
        raise ConfigError("actors.scripted=true plays nothing with stored.share=1; leave it out")
    if config.loss.proximal == "interpolated":
        raise ConfigError(
            "loss.proximal='interpolated' needs the staleness of every token, and the versions of "
            "a stored group are another "
            "run's; use 'recomputed' or 'none'"
        )


def check_is_list(key: str, value: object) -> None:
    """A name by itself would be read letter by letter. Raises ConfigError."""
    if isinstance(value, str):
        raise ConfigError(f"{key}={value} is not a list; use {key}=[{value}]")


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """(`a.b.c`, value) for every setting of a config."""
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from flat(getattr(value, item.name), f"{prefix}{item.name}.")
    else:
        yield prefix[:-1], value


def hint(value: object, allowed: Sequence[object]) -> str:
    """`, did you mean ...?` with the nearest of the allowed names, or nothing."""
    names = [str(name) for name in allowed]
    near = difflib.get_close_matches(str(value), names, n=1) or difflib.get_close_matches(
        str(value).rpartition(".")[2], [name.rpartition(".")[2] for name in names], n=1
    )
    full = [name for name in names if near and (name == near[0] or name.endswith("." + near[0]))]
    return f", did you mean {full[0]!r}?" if full else ""

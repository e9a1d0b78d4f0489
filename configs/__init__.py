"""Settings of a run: what they are, what they may be, and what follows from them.

schema.py           every setting with its unit and its default: start here
check.py            values that are refused before a run starts; the order of all checks
checks/             combinations that are refused: one module for each section of the settings
errors.py           the error of a setting that is refused
dotted.py           every setting of a config by its name, `learner.steps`
engine_arguments.py arguments of vLLM that a run passes on, and those that it refuses
load.py             YAML files, `base` files and key=value overrides -> Config, and back
settings_text.py    settings in a YAML text that may be a stranger's, within bounds
overrides.py        the key=value arguments of a command, as settings
changes.py          what differs from the defaults, and what a run may go on with changed
interpolations.py   a bound on the values that stand for others, `${section.setting}`
per_environment.py  the settings of each environment of a run
derived.py          own, offline and replayed groups, workers, GPUs and updates of settings
plan.py             placement, memory and disk of a run, as text
model_size.py       parameters and layers of the models of a run
learner_memory.py   bytes that a learner rank holds
memory_advice.py    settings that make a learner rank fit its GPU
assumptions.py      numbers that the estimate of a run on GPUs assumes
engine_estimate.py  memory and speed of an engine on GPUs
estimate.py         speed of a run on GPUs, by arithmetic, and what will wait for what
estimate_text.py    that estimate as text
shown_settings.py   settings as others may see them, without secrets
variants.py         configs of its tiny base policy's run, and of an external model's evaluation
model_directory.py  the directory of the model that a run starts from
*.yaml              the runs that we vouch for; `base: FILE` builds one on another
"""

from configs.changes import differences, forbidden_changes
from configs.check import check
from configs.checks.model import HEAD_SIZE
from configs.checks.values import check_is_list
from configs.derived import (
    KEPT_CHECKPOINTS,
    draws_by_weight,
    gpus_needed,
    groups_of_a_step,
    has_critic,
    is_offline,
    is_served,
    least_workers,
    max_model_tokens,
    most_updates,
    most_workers,
    n_workers,
    replayed_groups,
    sequence_groups,
    serves_adapters,
    used_group_filter,
)
from configs.dotted import dotted_settings
from configs.engine_arguments import PIPELINE, REFUSED_ARGUMENTS, TENSOR, parallel_sizes
from configs.errors import ConfigError
from configs.estimate import misfits
from configs.estimate_text import describe_estimate
from configs.learner_memory import BUCKET_ELEMENTS, pass_bytes, rank_bytes
from configs.load import as_yaml, from_yaml, load, load_saved, read_file
from configs.model_directory import (
    SAFE_LOADING,
    VISION_MODEL_TYPES,
    check_model_directory,
    check_model_path,
    files_of_index,
    is_vision_model,
    load_safely,
    model_type,
    read_description,
    refused_for_vision,
    weight_indexes,
)
from configs.model_size import Shape, check_heads, known_shape, vocabulary_size
from configs.overrides import split_run_dir
from configs.per_environment import environment_config, environment_weights, environments
from configs.plan import GIB, describe_plan, disk_bytes, size_text
from configs.schema import (
    ActorsConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    EndpointConfig,
    EnvConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    PromptConfig,
    ReplayConfig,
    StoreConfig,
    SupervisionConfig,
    TasksConfig,
    TinyModelConfig,
    WorkerRange,
)
from configs.settings_text import parse_saved
from configs.shown_settings import holds_secrets, shown, shown_name, shown_settings
from configs.variants import cloning_config, without_model

__all__ = [
    "BUCKET_ELEMENTS",
    "GIB",
    "HEAD_SIZE",
    "KEPT_CHECKPOINTS",
    "PIPELINE",
    "REFUSED_ARGUMENTS",
    "SAFE_LOADING",
    "TENSOR",
    "VISION_MODEL_TYPES",
    "ActorsConfig",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "EndpointConfig",
    "EnvConfig",
    "LearnerConfig",
    "LossConfig",
    "ModelConfig",
    "PromptConfig",
    "ReplayConfig",
    "Shape",
    "StoreConfig",
    "SupervisionConfig",
    "TasksConfig",
    "TinyModelConfig",
    "WorkerRange",
    "as_yaml",
    "check",
    "check_heads",
    "check_is_list",
    "check_model_directory",
    "check_model_path",
    "cloning_config",
    "describe_estimate",
    "describe_plan",
    "differences",
    "disk_bytes",
    "dotted_settings",
    "draws_by_weight",
    "environment_config",
    "environment_weights",
    "environments",
    "files_of_index",
    "forbidden_changes",
    "from_yaml",
    "gpus_needed",
    "groups_of_a_step",
    "has_critic",
    "holds_secrets",
    "is_offline",
    "is_served",
    "is_vision_model",
    "known_shape",
    "least_workers",
    "load",
    "load_safely",
    "load_saved",
    "max_model_tokens",
    "misfits",
    "model_type",
    "most_updates",
    "most_workers",
    "n_workers",
    "parallel_sizes",
    "parse_saved",
    "pass_bytes",
    "rank_bytes",
    "read_description",
    "read_file",
    "refused_for_vision",
    "replayed_groups",
    "sequence_groups",
    "serves_adapters",
    "shown",
    "shown_name",
    "shown_settings",
    "size_text",
    "split_run_dir",
    "used_group_filter",
    "vocabulary_size",
    "weight_indexes",
    "without_model",
]

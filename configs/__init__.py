"""Settings of a run: what they are, what they may be, and what follows from them.

schema.py           every setting with its unit and its default: start here
check.py            values and combinations that are refused before a run starts
load.py             YAML files, `base` files and key=value overrides -> Config, and back
per_environment.py  the settings of each environment of a run
derived.py          live, offline and replayed groups, workers, GPUs and updates of settings
plan.py             placement, memory and disk of a run
estimate.py         speed of a run on GPUs, by arithmetic, and what will wait for what
variants.py         configs of its tiny base policy's run, and of an external model's evaluation
model_directory.py  the directory of the model that a run starts from
model_server.py     a model server that is not trusted: what it is sent, and a bounded answer
*.yaml              the runs that we vouch for; `base: FILE` builds one on another
"""

from configs.check import (
    HEAD_SIZE,
    WITH_STEP_TERM,
    ConfigError,
    check,
    check_is_list,
    describe_readers,
    dotted_settings,
    has_effect,
)
from configs.derived import (
    KEPT_CHECKPOINTS,
    draws_by_weight,
    gpus_needed,
    groups_of_a_step,
    has_critic,
    is_offline,
    is_served,
    max_model_tokens,
    most_updates,
    n_workers,
    replayed_groups,
    serves_adapters,
    used_group_filter,
)
from configs.estimate import describe_estimate
from configs.load import (
    as_yaml,
    differences,
    forbidden_changes,
    from_yaml,
    load,
    load_saved,
    parse_saved,
)
from configs.model_directory import (
    SAFE_LOADING,
    VISION_MODEL_TYPES,
    check_model_directory,
    check_model_path,
    files_of_index,
    load_safely,
    model_type,
    weight_indexes,
)
from configs.model_server import MAX_ANSWER_BYTES, bound_answer, json_of, own_headers, quoted
from configs.per_environment import environment_config, environment_weights, environments
from configs.plan import (
    BUCKET_ELEMENTS,
    GIB,
    describe_plan,
    disk_bytes,
    rank_bytes,
)
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
)
from configs.variants import cloning_config, without_model

__all__ = [
    "BUCKET_ELEMENTS",
    "GIB",
    "HEAD_SIZE",
    "KEPT_CHECKPOINTS",
    "MAX_ANSWER_BYTES",
    "SAFE_LOADING",
    "VISION_MODEL_TYPES",
    "WITH_STEP_TERM",
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
    "StoreConfig",
    "SupervisionConfig",
    "TasksConfig",
    "TinyModelConfig",
    "as_yaml",
    "bound_answer",
    "check",
    "check_is_list",
    "check_model_directory",
    "check_model_path",
    "cloning_config",
    "describe_estimate",
    "describe_plan",
    "describe_readers",
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
    "has_effect",
    "is_offline",
    "is_served",
    "json_of",
    "load",
    "load_safely",
    "load_saved",
    "max_model_tokens",
    "model_type",
    "most_updates",
    "n_workers",
    "own_headers",
    "parse_saved",
    "quoted",
    "rank_bytes",
    "replayed_groups",
    "serves_adapters",
    "used_group_filter",
    "weight_indexes",
    "without_model",
]

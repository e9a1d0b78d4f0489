"""Settings of a run: what they are, what they may be, and what follows from them.

schema.py           every setting with its unit and its default: start here
bounded_yaml.py     the events of a YAML text that is not trusted
check.py            values and combinations that are refused before a run starts
load.py             YAML files, `base` files and key=value overrides -> Config, and back
derived.py          live and offline groups, workers, GPUs and updates that follow from settings
plan.py             placement, memory and disk of a run; configs derived from a config
model_directory.py  the directory of the model that a run starts from
*.yaml              the runs that we vouch for; `base: FILE` builds one on another
"""

from configs.bounded_yaml import MAX_CHARACTERS, TEXT_TAG, bounded_events
from configs.check import (
    HEAD_SIZE,
    WITH_STEP_TERM,
    ConfigError,
    check,
    check_is_list,
    flat,
    is_read,
    read_with,
)
from configs.derived import (
    KEPT_CHECKPOINTS,
    gpus_needed,
    groups_of_a_step,
    has_critic,
    is_offline,
    max_model_tokens,
    most_updates,
    n_workers,
)
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
    FROM_FILES,
    VISION_MODEL_TYPES,
    check_model_directory,
    check_model_path,
    index_files,
    indexed_files,
    loaded,
    model_type,
)
from configs.plan import (
    BUCKET_ELEMENTS,
    GIB,
    cloning_config,
    describe_plan,
    disk_bytes,
    rank_bytes,
    without_model,
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
    StoreConfig,
    SupervisionConfig,
    TinyModelConfig,
)

__all__ = [
    "BUCKET_ELEMENTS",
    "FROM_FILES",
    "GIB",
    "HEAD_SIZE",
    "KEPT_CHECKPOINTS",
    "MAX_CHARACTERS",
    "TEXT_TAG",
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
    "StoreConfig",
    "SupervisionConfig",
    "TinyModelConfig",
    "as_yaml",
    "bounded_events",
    "check",
    "check_is_list",
    "check_model_directory",
    "check_model_path",
    "cloning_config",
    "describe_plan",
    "differences",
    "disk_bytes",
    "flat",
    "forbidden_changes",
    "from_yaml",
    "gpus_needed",
    "groups_of_a_step",
    "has_critic",
    "index_files",
    "indexed_files",
    "is_offline",
    "is_read",
    "load",
    "load_saved",
    "loaded",
    "max_model_tokens",
    "model_type",
    "most_updates",
    "n_workers",
    "parse_saved",
    "rank_bytes",
    "read_with",
    "without_model",
]

"""`schema.py` holds every knob with its default, `check.py` refuses what would fail later,
`load.py` reads YAML and `key=value`, `plan.py` says what would run where, `gpus.py` on how many
GPUs, `stored.py` what of it is played, `model.py` looks at the model's directory, `endpoint.py` is
about models of others; one YAML per run we vouch for.
"""

from configs.check import ConfigError, check, check_is_list, hint
from configs.endpoint import without_model
from configs.gpus import gpus_needed
from configs.load import differences, from_yaml, load, load_stored, parse_stored, to_yaml
from configs.model import VISION_MODEL_TYPES, check_model_path, loaded, model_type
from configs.plan import (
    BUCKET_ELEMENTS,
    GIB,
    cloning_config,
    describe_plan,
    disk_bytes,
    model_billions,
    rank_bytes,
)
from configs.roles import groups_of_a_step, is_offline, n_workers
from configs.rules import WITH_STEP_TERM, is_read, read_with
from configs.schema import (
    ActorsConfig,
    AlgorithmConfig,
    Config,
    EndpointConfig,
    EnvConfig,
    EvaluationConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    OfflineConfig,
    PromptConfig,
    StoreConfig,
    SupervisionConfig,
    TinyModelConfig,
)

__all__ = [
    "BUCKET_ELEMENTS",
    "GIB",
    "VISION_MODEL_TYPES",
    "WITH_STEP_TERM",
    "ActorsConfig",
    "AlgorithmConfig",
    "Config",
    "ConfigError",
    "EndpointConfig",
    "EnvConfig",
    "EvaluationConfig",
    "LearnerConfig",
    "LossConfig",
    "ModelConfig",
    "OfflineConfig",
    "PromptConfig",
    "StoreConfig",
    "SupervisionConfig",
    "TinyModelConfig",
    "check",
    "check_is_list",
    "check_model_path",
    "cloning_config",
    "describe_plan",
    "differences",
    "disk_bytes",
    "from_yaml",
    "gpus_needed",
    "groups_of_a_step",
    "hint",
    "is_offline",
    "is_read",
    "load",
    "load_stored",
    "loaded",
    "model_billions",
    "model_type",
    "n_workers",
    "parse_stored",
    "rank_bytes",
    "read_with",
    "to_yaml",
    "without_model",
]

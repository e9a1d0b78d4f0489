"""What a setting may be, and what it takes to be read: the tables that `check.py` goes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAY_BE_ZERO = {  # key -> what 0 means, said when somebody goes below it
    "seed": "",
    "max_staleness": "; use 0 for synchronous training",
    "actors.gpus_per_worker": "; use 0 for a CPU engine",
    "actors.spare_members": "; use 0 for none",
    "algorithm.gamma": "; the paper uses 0.95",
    "algorithm.omega": "; use 0 for no step advantage",
    "algorithm.invalid_penalty": "; use 0 for no penalty",
    "algorithm.version_window": "; use 0 to compare within one version",
    "learner.weight_decay": "",
    "learner.warmup_updates": "",
    "learner.rows_per_update": "; use 0 to cut a batch by learner.updates_per_step",
    "learner.max_bad_updates": "; use 0 to end the run at the first",
    "learner.zero_stage": "",
    "learner.gpus_per_rank": "; use 0 for a CPU learner",
    "learner.keep_every": "; use 0 to keep the newest learner.keep_checkpoints only",
    "model.lora_rank": "; use 0 to train all weights",
    "alarms.ess_below": "; use 0 for no such alarm",
    "alarms.entropy_below": "; use 0 for no such alarm",
    "supervision.max_restarts": "; use 0 to end the run at the first death",
    "evaluation.every": "; use 0 for no evaluation between the start and the end",
    "evaluation.temperature": "; use 0 for greedy play",
    "store.keep_days": "; use 0 to keep trajectories for ever",
    "store.keep_versions": "; use 0 to keep trajectories of all versions",
}
ESTIMATORS = (
    "gigpo",
    "grpo",
    "rloo",
    "dr_grpo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "hgpo",
    "graphgpo",
)
WITHOUT_STEP_TERM = ("grpo", "rloo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline")
WITH_STEP_TERM = tuple(name for name in ESTIMATORS if name not in WITHOUT_STEP_TERM)
# Setting of `algorithm` -> the choices with which it is read, any one of them; with others it does
# nothing.
READ_WITH: Mapping[str, Mapping[str, Sequence[str]]] = {
    "gamma": {"estimator": ("gigpo", "hgpo")},
    "omega": {"estimator": ("gigpo", "graphgpo")},
    "normalise": {"estimator": ("gigpo", "grpo", "hgpo", "graphgpo")},
    "weighting": {"estimator": tuple(name for name in ESTIMATORS if name != "hgpo")},
    "anchor": {"estimator": WITH_STEP_TERM},
    "anchor_history": {"anchor": ("suffix",), "estimator": ("hgpo",)},
    "similarity": {"anchor": ("similar", "similar_greedy")},
    "anchor_versions": {"estimator": WITH_STEP_TERM},
    "version_window": {"anchor_versions": ("window",)},
}


def is_read(name: str, chosen: object) -> bool:
    """Whether a setting of `algorithm` acts with the choices of `chosen`, which has them as
    attributes.
    """
    choices = READ_WITH.get(name, {})
    return not choices or any(
        getattr(chosen, key) in names and is_read(key, chosen) for key, names in choices.items()
    )


def read_with(name: str, chosen: object) -> tuple[str, str]:
    """Say with which choices a setting does nothing, and with which it acts.

    >>> read_with("gamma", AlgorithmConfig(estimator="grpo"))
    ('estimator=grpo', 'estimator=gigpo or hgpo')
    """
    choices = READ_WITH[name]
    now = " and ".join(f"{key}={getattr(chosen, key)}" for key in choices)
    return now, ", or ".join(f"{key}={' or '.join(names)}" for key, names in choices.items())


NOT_RECORDED = {  # gigpo can, but a run cannot give it what it needs
    "weighted": "weights need a forward pass that comes after the advantages; use 'window', or weigh offline",
}
# The files in actors/templates.
TEMPLATES = (
    "alfworld",
    "compact",
    "direct",
    "search",
    "sokoban",
    "sokoban_image",
    "think",
    "webshop",
)
MIN_SNAPSHOT_WINDOW_S = 60.0  # for the learner, or a DuckDB shell, to open a file it was told of

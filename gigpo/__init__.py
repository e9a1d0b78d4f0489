"""GiGPO's mathematics: a table of steps in, advantages out; log-probabilities in, losses out.

Where to look: `queries/*.sql` are the equations, one idea a file; `advantages.py` composes them into one DuckDB macro
and runs it (`compute_advantages`; `advantages_macro` for a bare shell); `losses.py` has the losses per token and the
registry `POLICY_LOSSES`; `corrections.py` the importance ratios and weights; `diagnostics.py` what to watch. No I/O, no
logging, no trainer: this folder imports duckdb, pyarrow, numpy and torch, and nothing of ours.
"""

from __future__ import annotations

from gigpo.advantages import (
    ESTIMATORS,
    NORMALISATIONS,
    PUBLISHED_SETTINGS,
    WEIGHTINGS,
    AdvantageSettings,
    advantages_macro,
    compute_advantages,
)
from gigpo.corrections import ess, log_ratio, token_tis_weight
from gigpo.diagnostics import (
    anchor_size_histogram,
    clip_fraction,
    mismatch_kl,
    ratio_range,
    singleton_fraction,
    step_variance_share,
)
from gigpo.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFunction,
    behaviour_cloning,
    kl_k3,
    ppo_clip,
    token_mean,
)

__all__ = [
    "ESTIMATORS",
    "NORMALISATIONS",
    "POLICY_LOSSES",
    "PUBLISHED_SETTINGS",
    "WEIGHTINGS",
    "AdvantageSettings",
    "PolicyLoss",
    "PolicyLossFunction",
    "advantages_macro",
    "anchor_size_histogram",
    "behaviour_cloning",
    "clip_fraction",
    "compute_advantages",
    "ess",
    "kl_k3",
    "log_ratio",
    "mismatch_kl",
    "ppo_clip",
    "ratio_range",
    "singleton_fraction",
    "step_variance_share",
    "token_mean",
    "token_tis_weight",
]

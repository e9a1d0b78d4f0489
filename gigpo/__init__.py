"""Compute advantages from a table of steps, and losses from log-probabilities: GiGPO's mathematics.

queries/*.sql     the equations of the advantages, one idea a file
sql_macro.py      their composition into one DuckDB macro, also for a bare DuckDB shell
settings.py       the settings of an advantage
advantages.py     runs the macro over a table of steps
input_columns.py  reads the caller's columns
similarity.py     anchor keys for similar texts
group_filter.py   groups that nothing can be learnt from
tokens.py         the response tokens that losses read
losses.py, corrections.py, kl.py   one entry per published idea, and a registry each
objective.py      puts them together; compatibility.py refuses parts that do not go together
diagnostics.py    figures to watch

No I/O, no logging, no trainer. This folder imports duckdb, pyarrow, numpy, rapidfuzz and, when it
first computes a loss, torch (lazy_torch.py).
"""

from __future__ import annotations

from gigpo.advantages import compute_advantages, prepare_advantages
from gigpo.corrections import (
    CORRECTIONS,
    Correction,
    GeometricMask,
    K3Mask,
    M2po,
    Opsm,
    SequenceMask,
    SequenceTis,
    TokenIcepop,
    TokenTis,
)
from gigpo.diagnostics import (
    anchor_size_histogram,
    anchor_size_shares,
    ess,
    singleton_fraction,
    step_variance_share,
    token_diagnostics,
)
from gigpo.group_filter import GROUP_FILTERS, check_group_filter, filtered_groups
from gigpo.kl import KL_PENALTIES, kl_k1, kl_k2, kl_k3
from gigpo.losses import (
    POLICY_LOSSES,
    BehaviourCloning,
    Cispo,
    DppoTv,
    Gspo,
    Loss,
    PolicyLoss,
    PpoClip,
    Reinforce,
    Sapo,
    Topr,
)
from gigpo.objective import (
    AGGREGATIONS,
    DEFAULT_PAIRING,
    PROXIMAL_POLICIES,
    Aggregation,
    BatchTotals,
    Objective,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    Terms,
    TokenMean,
)
from gigpo.settings import (
    ANCHOR_VERSIONS,
    ANCHORS,
    ESTIMATORS,
    NORMALISATIONS,
    PUBLISHED_SETTINGS,
    WEIGHTINGS,
    WHITENED,
    AdvantageSettings,
)
from gigpo.similarity import similarity_keys
from gigpo.sql_macro import advantages_macro
from gigpo.tokens import Tokens, interpolated_proximal, log_ratio

__all__ = [
    "AGGREGATIONS",
    "ANCHORS",
    "ANCHOR_VERSIONS",
    "CORRECTIONS",
    "DEFAULT_PAIRING",
    "ESTIMATORS",
    "GROUP_FILTERS",
    "KL_PENALTIES",
    "NORMALISATIONS",
    "POLICY_LOSSES",
    "PROXIMAL_POLICIES",
    "PUBLISHED_SETTINGS",
    "WEIGHTINGS",
    "WHITENED",
    "AdvantageSettings",
    "Aggregation",
    "BatchTotals",
    "BehaviourCloning",
    "Cispo",
    "Correction",
    "DppoTv",
    "GeometricMask",
    "Gspo",
    "K3Mask",
    "Loss",
    "M2po",
    "Objective",
    "Opsm",
    "PolicyLoss",
    "PpoClip",
    "Reinforce",
    "Sapo",
    "SequenceMask",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSumNorm",
    "SequenceTis",
    "Terms",
    "TokenIcepop",
    "TokenMean",
    "TokenTis",
    "Tokens",
    "Topr",
    "advantages_macro",
    "anchor_size_histogram",
    "anchor_size_shares",
    "check_group_filter",
    "compute_advantages",
    "ess",
    "filtered_groups",
    "interpolated_proximal",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "log_ratio",
    "prepare_advantages",
    "similarity_keys",
    "singleton_fraction",
    "step_variance_share",
    "token_diagnostics",
]

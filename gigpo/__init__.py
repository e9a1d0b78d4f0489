"""GiGPO's mathematics: a table of steps in, advantages out; log-probabilities in, losses out.

Where to look: `queries/*.sql` are the equations, one idea a file; `macro.py` composes them into one
DuckDB macro (for a bare shell too), `advantages.py` runs it over what `columns.py` lets in,
`settings.py` names what it can do, `similarity.py` makes anchor keys of texts that are alike,
`signal.py` says which groups teach nothing; `tokens.py` is what losses read, `losses.py`,
`corrections.py` and `kl.py` have one entry per published idea and a registry each, `objective.py`
puts them together and `combinations.py` refuses what does not belong together; `diagnostics.py`
what to watch. No I/O, no logging, no trainer: this folder imports duckdb, pyarrow, numpy, rapidfuzz
and, when it first computes, torch (`lazy_torch.py`), and nothing of ours.
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
from gigpo.group_filter import GROUP_FILTERS, filtered_groups
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

"""Compute what to watch after a batch, from flat tokens [N] or from compute_advantages' table."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from gigpo.lazy_torch import torch
from gigpo.tokens import Tokens, policy_log_ratio, sequence_ratio

# (first, last) staleness of each class of tokens, in versions. Staleness 0 is "on_policy", below 0
# is "offline".
_STALENESS_CLASSES = ((1, 1), (2, 2), (3, 4), (5, 8), (9, math.inf))
# (first, last) anchor group size of each class of steps.
_ANCHOR_SIZE_CLASSES = ((1, 1), (2, 3), (4, 7), (8, math.inf))


def token_diagnostics(
    tokens: Tokens, *, factor_N: torch.Tensor, clipped_N: torch.Tensor, staleness_N: torch.Tensor
) -> dict[str, float]:
    """Return how far pi is from mu and its cost, over all tokens of an optimizer update.

    Computed in float64, with rho = pi / mu:

    ratio_min, ratio_mean, ratio_max, ratio_p99   of rho; 99% of the tokens are at or below p99
    ess, ess_sequence      effective sample size of rho, and of its product over each sequence, as a
                           fraction: 1 = on policy
    chi2, chi2_sequence    mean(rho^2) - 1, and the same of the products: the variance that
                           importance weights add
    mismatch_kl            mean of rho - 1 - log rho: estimates KL(mu || pi) in nats, as the tokens
                           come from mu
    mismatch_kl_on_policy  the same over tokens of staleness 0. In the first update of a learner
                           step it is the difference of the two engines' numerics; later pi moved
    mismatch_kl_stale_1, _2, _3_4, _5_8, _9_up    over tokens sampled so many versions ago
    mismatch_kl_offline    over tokens that another run sampled (staleness below 0)
    clip_fraction          tokens that the loss's own trust region leaves without gradient
    masked_fraction        tokens that a correction drops (factor 0)
    dropped_{positive,negative}_{low,high}   both together, as a fraction of all tokens: A > 0 or
                           A < 0, rho < 1 or rho > 1

    A class of staleness without tokens has no entry. A value that is not finite is inf. Raises
    ValueError for no tokens at all.
    """
    if not len(tokens.advantages_N):
        raise ValueError("token_diagnostics of no tokens are undefined; leave empty updates out")
    log_ratio_N = policy_log_ratio(tokens).double()
    dropped = _dropped_shares(
        tokens.advantages_N, log_ratio_N, factor_N=factor_N, clipped_N=clipped_N
    )
    found = (
        _ratio_figures(log_ratio_N)
        | _weight_figures(log_ratio_N, tokens.sequence_N)
        | _mismatch_figures(log_ratio_N, staleness_N)
        | dropped
    )
    return {
        name: float(value) if math.isfinite(value) else math.inf for name, value in found.items()
    }


def _ratio_figures(log_ratio_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the smallest, mean and largest ratio, and the 99th percentile. Float64 log-ratios."""
    ratio_N = torch.exp(log_ratio_N)
    return {
        "ratio_min": ratio_N.min(),
        "ratio_mean": ratio_N.mean(),
        "ratio_max": ratio_N.max(),
        "ratio_p99": torch.kthvalue(ratio_N, math.ceil(0.99 * len(ratio_N))).values,
    }


def _weight_figures(
    log_ratio_N: torch.Tensor, sequence_N: torch.Tensor
) -> dict[str, torch.Tensor | float]:
    """Return the cost of importance weights per token and per sequence. Float64 log-ratios."""
    ratio_S, _ = sequence_ratio(log_ratio_N, sequence_N)
    figures: dict[str, torch.Tensor | float] = {}
    for suffix, weights in (("", torch.exp(log_ratio_N)), ("_sequence", ratio_S)):
        figures[f"ess{suffix}"] = ess(weights)
        figures[f"chi2{suffix}"] = weights.square().mean() - 1.0
    return figures


def _mismatch_figures(
    log_ratio_N: torch.Tensor, staleness_N: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return estimates of KL(mu || pi): over all tokens, and over each class of staleness.

    `log_ratio_N` is float64, `staleness_N` is in versions. A class without tokens has no entry.
    """
    kl_N = torch.expm1(log_ratio_N) - log_ratio_N
    classes = {"on_policy": staleness_N == 0, "offline": staleness_N < 0} | {
        f"stale_{_class_name(low, high)}": (staleness_N >= low) & (staleness_N <= high)
        for low, high in _STALENESS_CLASSES
    }
    return {"mismatch_kl": kl_N.mean()} | {
        f"mismatch_kl_{name}": kl_N[members_N].mean()
        for name, members_N in classes.items()
        if members_N.any()
    }


def _dropped_shares(
    advantages_N: torch.Tensor,
    log_ratio_N: torch.Tensor,
    *,
    factor_N: torch.Tensor,
    clipped_N: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the fractions of all tokens that get no gradient, by cause and by side.

    `factor_N` is float, 0 for a masked token; `clipped_N` is bool.
    """
    masked_N = factor_N == 0.0
    dropped_N = masked_N | clipped_N
    members = {"clip_fraction": clipped_N, "masked_fraction": masked_N}
    for sign, side_N in (("positive", advantages_N > 0), ("negative", advantages_N < 0)):
        members[f"dropped_{sign}_low"] = dropped_N & side_N & (log_ratio_N < 0)
        members[f"dropped_{sign}_high"] = dropped_N & side_N & (log_ratio_N > 0)
    return {name: members_N.double().mean() for name, members_N in members.items()}


def ess(weights: torch.Tensor) -> float:
    """Return the effective sample size (sum w)^2 / (n sum w^2), in (0, 1]; 1 = all weights equal.

    `weights` has any shape, values >= 0. Raises ValueError for no weights, or only zeros.
    """
    if weights.numel() == 0:
        raise ValueError("ess of no weights is undefined; leave empty batches out")
    weights = weights.detach().double()
    total, squares = float(weights.sum()), float(weights.square().sum())
    if squares == 0.0:
        raise ValueError(
            f"ess of {weights.numel()} weights that are all 0 is undefined; leave them out"
        )
    return total * total / (weights.numel() * squares)


def _class_name(low: int, high: float) -> str:
    if high == math.inf:
        return f"{low}_up"
    return str(low) if low == high else f"{low}_{high}"


def anchor_size_histogram(advantages: pa.Table) -> dict[int, int]:
    """Return the number of steps by the size of their anchor group.

    {1: 40, 8: 24} is 40 steps alone and 24 in groups of 8. It counts steps, so it is right for any
    selection of rows; with all rows there are steps / size groups.
    """
    sizes, steps = np.unique(advantages["anchor_size"].to_numpy(), return_counts=True)
    return dict(zip(sizes.tolist(), steps.tolist(), strict=True))


def anchor_size_shares(advantages: pa.Table) -> dict[str, float]:
    """Return fractions of the steps by the size of their anchor group.

    They are size_1 (alone), size_2_3, size_4_7 and size_8_up. They add up to 1 for any selection of
    rows; without steps all are 0.
    """
    sizes = advantages["anchor_size"].to_numpy()
    classes = {
        _class_name(low, high): (sizes >= low) & (sizes <= high)
        for low, high in _ANCHOR_SIZE_CLASSES
    }
    return {
        f"size_{name}": float(members.sum()) / max(1, len(sizes))
        for name, members in classes.items()
    }


def step_variance_share(advantages: pa.Table) -> float:
    """Return Var(A - A_E) / (Var(A_E) + Var(A - A_E)) over steps, in [0, 1].

    It says how much of the advantages' variance is step-level. A - A_E is omega A_S for gigpo,
    graphgpo and g2po, A_S for hgpo and gagpo, and 0 without a step term. The covariance is left
    out, so that the shares of the two terms add up to 1. Without variance, or without steps, it is
    0.
    """
    if len(advantages) == 0:
        return 0.0
    episode = advantages["episode_advantage"].to_numpy()
    of_episode = float(np.var(episode))
    of_step = float(np.var(advantages["advantage"].to_numpy() - episode))
    return of_step / (of_episode + of_step) if of_episode + of_step > 0.0 else 0.0

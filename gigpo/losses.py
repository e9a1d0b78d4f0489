"""Define the policy losses: frozen records of settings that are called on Tokens.

    PpoClip(clip_high=0.28)(tokens).loss_N

The defaults are the published values of the system that each docstring names. `POLICY_LOSSES`
lists the losses by their names in configs. `objective.py` adds corrections, KL and entropy, and
takes the mean.

To add a loss:

1. here: its class, with a worked example, and its place in POLICY_LOSSES
2. `combinations.py`: its usual corrections and aggregation in DEFAULT_PAIRING; a line in
   _BOUNDED_ALREADY if it takes no factors of single tokens; `check_combination` for whatever else
   makes no sense with it
3. `__init__.pyi`: its class
4. `configs/schema.py`: its name in the comment of LossConfig.policy, then
   `python docs/make_reference.py`
5. `docs/algorithms.md`, section 8: a heading with its name, and its formula
6. `tests/gigpo/test_losses.py`: the worked example. Its last test fails while 1 to 5 are not whole

Letters are as in `tokens.py`:

    rho = pi / mu   the policy that sampled; log mu was recorded then, so no loss needs a forward
                    pass for it. docs/algorithms.md, section 8, lists the settings that add one
    sg(...)         no gradient flows through it

`KL_PENALTIES` estimate KL(pi || ref) per token, from tokens that pi sampled (Schulman 2020,
"Approximating KL Divergence"). Let u = log pi - log ref, clamped to +-20. Each estimate is
float32/64 [N] and differentiable in `logprobs_N`: a penalty in the loss, not in the reward. Worked:
pi is twice as likely as the reference, u = log 2: k1 = 0.693, k2 = 0.240, k3 = 0.193.

|    | value        | d / d log pi | as an estimate of the KL    | its gradient over pi's samples |
|----|--------------|--------------|-----------------------------|--------------------------------|
| k1 | u            | 1            | unbiased, may be negative   | mean 0: refused as a loss      |
| k2 | u^2 / 2      | u            | biased (second order), >= 0 | of KL(pi || ref), unbiased     |
| k3 | e^-u - 1 + u | 1 - e^-u     | unbiased, >= 0, least noise | of KL(ref || pi)               |

"Unbiased" holds for samples of pi. Training uses tokens of mu, and nothing here weighs by pi / mu.
So on stale data each estimate and its gradient is biased by how far pi has moved from mu. k3 is
also biased beyond its bound of 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Protocol

from gigpo.lazy_torch import torch
from gigpo.tokens import (
    Tokens,
    behaviour_log_ratio,
    check_cap,
    log_ratio,
    policy_log_ratio,
    sequence_mean,
)

# Bound on the k3 estimate, as in verl: one token far off the reference must not dominate the batch.
KL_BOUND: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """A policy loss per token.

    loss_N     float32/64 [N], differentiable in logprobs_N; corrections multiply it
    clipped_N  bool [N], True where the trust region leaves the token no gradient; None without one
    penalty_N  float32/64 [N] or None; added afterwards, so that no correction changes it
    """

    loss_N: torch.Tensor
    clipped_N: torch.Tensor | None = None
    penalty_N: torch.Tensor | None = None


class Loss(Protocol):
    """The interface of an entry of POLICY_LOSSES: settings by keyword, called on Tokens."""

    name: ClassVar[str]

    def __call__(self, tokens: Tokens) -> PolicyLoss: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PpoClip:
    """PPO-clip with dual clip; decoupled PPO where the tokens have a proximal policy pi_p.

        r    = pi / pi_p,  w = pi_p / mu        without a proximal policy: r = rho, w = 1
        L    = max(-A r, -A clip(r, 1 - low, 1 + high))     Schulman et al. 2017, eq. 7
        L    = min(L, -A dual_clip)   where A < 0           dual clip, Ye et al. 2020, eq. 5
        loss = sg(w) L                      Hilton et al. 2022; AReaL, arXiv 2505.24298

    For the usual case: one trust region around the policy that sampled the batch. Decoupled PPO is
    for batches so stale that this region would clip most tokens: the region then holds pi near
    pi_p, and w corrects for the staleness. The corrections `token_tis` and `token_icepop` bound w.
    dual_clip = math.inf switches the dual clip off. Defaults: 0.2, 0.2 and 3, GiGPO's authors and
    verl.

    Worked: A = -1, rho = 2.5: L = 2.5, d loss / d log pi = 2.5. A = 1, rho = 1.5: L = -1.2, no
    gradient.
    """

    name: ClassVar[str] = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if not self.dual_clip > 1.0:
            raise ValueError(
                f"dual_clip={self.dual_clip} must be above 1: else on-policy tokens with A < 0 "
                "would not learn"
            )

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        proximal_N, advantages_N = tokens.proximal_logprobs_N, tokens.advantages_N
        centre_N = tokens.behaviour_logprobs_N if proximal_N is None else proximal_N.detach()
        ratio_N = torch.exp(log_ratio(tokens.logprobs_N, centre_N))
        negative_N = advantages_N < 0
        surrogate_N = torch.maximum(
            -advantages_N * ratio_N, -advantages_N * torch.clamp(ratio_N, min=low, max=high)
        )
        surrogate_N = torch.where(
            negative_N & (ratio_N > self.dual_clip), -advantages_N * self.dual_clip, surrogate_N
        )
        if proximal_N is not None:
            surrogate_N = torch.exp(behaviour_log_ratio(tokens)) * surrogate_N
        detached_N = ratio_N.detach()
        clipped_N = torch.where(
            negative_N,
            (detached_N < low) | (detached_N > self.dual_clip),
            (detached_N > high) & (advantages_N > 0),
        )
        return PolicyLoss(loss_N=surrogate_N, clipped_N=clipped_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gspo:
    """Group sequence policy optimisation: PPO-clip on one ratio per sequence.

        s    = exp(mean over the sequence of log rho)       arXiv 2507.18071
        s_t  = sg(s / pi) pi            GSPO-token: its value is s, its gradient is per token
        loss = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))

    For long responses and mixture-of-experts models, whose single-token ratios are noise: a
    sequence is clipped whole or not at all. The mean makes s vary far less than rho, hence the
    narrow region. Published with the aggregation `sequence_mean_token_mean`. Defaults: 3e-4 and
    4e-4, as in verl's example and by GiGPO's authors. There is no dual clip, as in the paper's
    equation and by those authors; verl's example has one at 10.

    Worked: log rho = (0.0006, 0.0002) in one sequence, A = 1: s = e^0.0004 = 1.0004001 > 1.0004, so
    neither token learns.
    """

    name: ClassVar[str] = "gspo"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        advantages_N = tokens.advantages_N
        log_s_N = sequence_mean(policy_log_ratio(tokens), tokens.sequence_N)
        s_N = torch.exp(log_s_N + tokens.logprobs_N - tokens.logprobs_N.detach())
        loss_N = torch.maximum(
            -advantages_N * s_N, -advantages_N * torch.clamp(s_N, min=low, max=high)
        )
        s_N = s_N.detach()
        clipped_N = ((s_N < low) & (advantages_N < 0)) | ((s_N > high) & (advantages_N > 0))
        return PolicyLoss(loss_N=loss_N, clipped_N=clipped_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cispo:
    """Clipped importance sampling: the weight is clipped, no token loses its gradient.

        loss = -sg(clip(rho, 1 - low, 1 + high)) A log pi   MiniMax-M1; ScaleRL, arXiv 2510.13786

    For rare tokens that PPO clips at once although they change the answer ("however", "wait").
    Defaults: 1 and 4, so weights in [0, 5], SkyRL's ScaleRL recipe; ROLL has 0.1 and 0.1. Only the
    gradient of this loss has a meaning, not its value.

    Worked: A = 2, rho = 7: d loss / d log pi = -10, where rho itself would give -14 and PPO-clip 0.
    """

    name: ClassVar[str] = "cispo"
    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        _check_clip(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        ratio_N = torch.exp(policy_log_ratio(tokens))
        weight_N = torch.clamp(ratio_N, min=1.0 - self.clip_low, max=1.0 + self.clip_high)
        return PolicyLoss(loss_N=-weight_N * tokens.advantages_N * tokens.logprobs_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class DppoTv:
    """DPPO with the binary total-variation mask: a trust region on probabilities, not ratios.

        keep = not (A > 0 and pi - mu > delta_high) and not (A < 0 and pi - mu < -delta_low)
        loss = -keep A rho + quadratic_coef (log rho)^2     arXiv 2602.04879
                                            the square: Kimi-K2.5, arXiv 2602.02276

    A ratio clips a rare token that moved from 0.001 to 0.002, and lets one go from 0.5 to 0.6; this
    mask does the reverse. rho is differentiated. The quadratic term pulls every token back to mu,
    masked tokens too. Beyond ratio_cap the gradient's weight stays at the cap (verl: 20; prime-rl
    has none). Defaults: 0.2, 0.2, no cap, 1e-3, prime-rl's default loss.

    Worked: A = 1, mu = 0.5. pi = 0.6: loss = -1.2 + 0.001 (log 1.2)^2. pi = 0.75: masked, loss =
    0.001 (log 1.5)^2.
    """

    name: ClassVar[str] = "dppo_tv"
    delta_low: float = 0.2
    delta_high: float = 0.2
    ratio_cap: float = math.inf
    quadratic_coef: float = 1e-3

    def __post_init__(self) -> None:
        for name, delta in (("delta_low", self.delta_low), ("delta_high", self.delta_high)):
            if not 0.0 < delta < 1.0:
                raise ValueError(
                    f"{name}={delta} must be in (0, 1): it bounds a difference of probabilities"
                )
        check_cap("ratio_cap", self.ratio_cap)
        if not (math.isfinite(self.quadratic_coef) and self.quadratic_coef >= 0.0):
            raise ValueError(
                f"quadratic_coef={self.quadratic_coef} must be finite and >= 0: below 0 it would "
                "drive pi off mu"
            )

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        log_ratio_N = log_ratio(tokens.logprobs_N, tokens.behaviour_logprobs_N)
        ratio_N = torch.exp(log_ratio_N)
        detached_N, advantages_N = ratio_N.detach(), tokens.advantages_N
        moved_N = torch.exp(tokens.logprobs_N.detach()) - torch.exp(tokens.behaviour_logprobs_N)
        masked_N = ((advantages_N > 0) & (moved_N > self.delta_high)) | (
            (advantages_N < 0) & (moved_N < -self.delta_low)
        )
        capped_N = torch.clamp(detached_N, max=self.ratio_cap) / detached_N
        return PolicyLoss(
            loss_N=torch.where(masked_N, 0.0, -advantages_N * capped_N * ratio_N),
            clipped_N=masked_N,
            penalty_N=self.quadratic_coef * log_ratio_N.square() if self.quadratic_coef else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sapo:
    """Soft adaptive policy optimisation: a smooth gate instead of the clip.

        loss = -A sigmoid(tau (rho - 1)) 4 / tau            arXiv 2511.20347
                                    tau_positive where A > 0, else tau_negative

    The gradient's weight, rho times 4 sigmoid (1 - sigmoid), is 1 on policy and falls off smoothly
    on both sides. For runs whose clip fraction jumps. Published with the aggregation
    `sequence_mean_token_mean`. Defaults: 1.0 and 1.05 (a sharper gate for A < 0), the paper, verl
    and AReaL. On policy the value is -2 A / tau.

    Worked: A = 1, rho = 2, tau = 1: loss = -4 * 0.7311 = -2.924, d loss / d log pi = -2 * 4 *
    0.7311 * 0.2689 = -1.573.
    """

    name: ClassVar[str] = "sapo"
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        for name, tau in (("tau_positive", self.tau_positive), ("tau_negative", self.tau_negative)):
            if not (math.isfinite(tau) and tau > 0.0):
                raise ValueError(
                    f"{name}={tau} must be finite and above 0: it is the gate's steepness"
                )

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.behaviour_logprobs_N))
        tau_N = torch.full_like(ratio_N, self.tau_negative).masked_fill(
            tokens.advantages_N > 0, self.tau_positive
        )
        gate_N = torch.sigmoid(tau_N * (ratio_N - 1.0)) * 4.0 / tau_N
        return PolicyLoss(loss_N=-tokens.advantages_N * gate_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topr:
    """Tapered off-policy REINFORCE: imitate good actions, unlearn bad ones only while pi takes
    them.

        loss = -A log pi                      where A >= 0      arXiv 2503.14286, eq. 8
        loss = -sg(min(rho, 1)) A log pi      where A < 0

    For very stale or recorded data: no weight exceeds 1. The taper is per token and by the sign of
    the advantage, which each token has here. The paper tapers by the ratio and the sign of the
    whole trajectory's reward; ROLL's code by the token's ratio and the sign of the episode's score.
    No settings.

    Worked: A = 2: d loss / d log pi = -2 for every rho. A = -2: 1 at rho = 0.5, and 2 at rho = 3.
    """

    name: ClassVar[str] = "topr"

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        weight_N = torch.clamp(torch.exp(policy_log_ratio(tokens)), max=1.0).masked_fill(
            tokens.advantages_N >= 0, 1.0
        )
        return PolicyLoss(loss_N=-weight_N * tokens.advantages_N * tokens.logprobs_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reinforce:
    """Importance-weighted policy gradient: loss = -A rho, d loss / d log pi = -A rho. No settings.

    On policy (rho = 1) every loss here has this gradient, except behaviour_cloning and
    distillation, which read no advantage. There is no trust region: it is unbiased with unbounded
    variance, so bound rho by a correction. With `token_tis` at a cap of 2 to 10 it is AIPO
    (LlamaRL, arXiv 2505.24034) and verl's `bypass_pg_is`; with `token_icepop` it is verl's
    `bypass_pg_token_icepop`. Source: REINFORCE, Williams 1992, with a ratio per token: our form.

    Worked: A = 2, rho = 1.5: loss = -3, d loss / d log pi = -3.
    """

    name: ClassVar[str] = "reinforce"

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.behaviour_logprobs_N))
        return PolicyLoss(loss_N=-tokens.advantages_N * ratio_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class BehaviourCloning:
    """Compute the negative log-likelihood of the recorded tokens, -log pi, for any advantage.

    It is maximum likelihood, as in supervised fine-tuning: our form. No settings.

    Worked: pi = 0.25: loss = 1.386, d loss / d log pi = -1.
    """

    name: ClassVar[str] = "behaviour_cloning"

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        return PolicyLoss(loss_N=-tokens.logprobs_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distillation:
    """On-policy distillation: the reverse KL to a teacher, on tokens that the policy sampled.

        loss = sg(log pi - log q) rho,  d loss / d log pi = rho (log pi - log q)

    q is the teacher. Over tokens of mu the mean gradient is that of KL(pi || q) at each position,
    with what came before held fixed. On policy the mean value is that KL, in nats a token. For any
    advantage: the teacher judges every token, so nothing has to be won. By default with
    `token_tis`, because data is a little stale. No settings. Sources: MiniLLM, arXiv 2306.08543;
    GKD, arXiv 2306.13649, with the student's own samples only; per token as in Thinking Machines,
    "On-Policy Distillation" (2025).

    Worked: pi = 0.5, q = 0.25, rho = 1: loss = 0.693, d loss / d log pi = 0.693.
    """

    name: ClassVar[str] = "distillation"

    def __call__(self, tokens: Tokens) -> PolicyLoss:
        if tokens.teacher_logprobs_N is None:
            raise ValueError("distillation needs teacher_logprobs_N")
        ratio_N = torch.exp(log_ratio(tokens.logprobs_N, tokens.behaviour_logprobs_N))
        log_ratio_to_teacher_N = log_ratio(tokens.logprobs_N.detach(), tokens.teacher_logprobs_N)
        return PolicyLoss(loss_N=log_ratio_to_teacher_N * ratio_N)


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0.0 < clip_low <= 1.0:
        raise ValueError(
            f"clip_low={clip_low} must be in (0, 1]: ratios below 1 - clip_low are clipped"
        )
    if not clip_high > 0.0:
        raise ValueError(
            f"clip_high={clip_high} must be above 0: ratios above 1 + clip_high are clipped"
        )


POLICY_LOSSES: Final[Mapping[str, type[Loss]]] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            BehaviourCloning,
            Cispo,
            Distillation,
            DppoTv,
            Gspo,
            PpoClip,
            Reinforce,
            Sapo,
            Topr,
        )
    }
)


def kl_k1(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return log pi - log ref. As a loss it would only push every sampled token down."""
    return log_ratio(logprobs_N, reference_logprobs_N)


def kl_k2(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return (log pi - log ref)^2 / 2. Its gradient is the KL's own, for strong penalties."""
    return 0.5 * log_ratio(logprobs_N, reference_logprobs_N).square()


def kl_k3(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor) -> torch.Tensor:
    """Return exp(d) - d - 1 with d = log ref - log pi, at most 10 as in verl.

    It is the default of GRPO, verl and GiGPO's authors.
    """
    d_N = -log_ratio(logprobs_N, reference_logprobs_N)
    return torch.clamp(torch.exp(d_N) - d_N - 1.0, max=KL_BOUND)


KL_PENALTIES: Final[Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = (
    MappingProxyType({"k1": kl_k1, "k2": kl_k2, "k3": kl_k3})
)

"""Define the settings of an advantage, and the names that they may have.

The SQL in `queries/` says what each name means.

To add an estimator:

1. `queries/`: its part of the episode term (`episode_advantage.sql`) or step term, as a file of its
   own that `sql_macro.py` lists. Its name where these list estimators: `episode_advantage.sql`,
   `comparisons.sql` (what its step term compares), `step_terms.sql` (its step term, and the weight
   of it), `episode_terms.sql` (if it whitens), `checked.sql`; with a critic also
   `critic_values.sql` and `ppo_terms.sql`
2. here: its properties in _ESTIMATORS, with the settings that it reads; `advantages.py`: the
   columns that it reads
3. `configs/schema.py`: the comments of these settings, then `python docs/make_reference.py`; with a
   critic also WITH_CRITIC in `configs/derived.py`, because `configs/` imports nothing of ours
4. `docs/algorithms.md`, section 3: its formula, default and source, and when to prefer it
5. `analysis/view/pages/what_if.py`: a link to it in PRESETS
6. `tests/support/gigpo_oracle.py`: the same in plain Python; `tests/gigpo/test_estimators.py`: an
   example worked out by hand
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from printable import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """The properties of one estimator, from which the lists below are made."""

    reads: Sequence[str]  # the settings that not every estimator reads
    has_step_term: bool = False  # of anchor groups, or of the states that a group met
    has_critic: bool = False  # computed from the values of a critic, in the column `value`
    is_whitened: bool = False  # over the whole batch; the others use each group separately
    is_token_level: bool = False  # a response token has its own advantage: token_advantages.py
    is_unscaled: bool = False  # never divided by a deviation, whatever `normalise` says


_WITH_ANCHORS = ("anchor", "anchor_versions")
_ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "gigpo": Estimator(
        reads=("gamma", "omega", "normalise", "weighting", *_WITH_ANCHORS), has_step_term=True
    ),
    "grpo": Estimator(reads=("normalise", "weighting")),
    "rloo": Estimator(reads=("weighting",), is_unscaled=True),
    "reinforce_pp": Estimator(reads=("weighting",), is_whitened=True),
    "reinforce_pp_baseline": Estimator(reads=("weighting",), is_whitened=True),
    "dr_grpo": Estimator(reads=("weighting",), is_unscaled=True),
    "hgpo": Estimator(
        reads=("gamma", "normalise", "anchor_history", *_WITH_ANCHORS), has_step_term=True
    ),
    "graphgpo": Estimator(
        reads=("graph_gamma", "omega", "normalise", "weighting", *_WITH_ANCHORS),
        has_step_term=True,
    ),
    "g2po": Estimator(
        reads=("gamma", "omega", "normalise", "weighting", *_WITH_ANCHORS), has_step_term=True
    ),
    "gagpo": Estimator(
        reads=("gamma", "gae_lambda", "normalise", *_WITH_ANCHORS), has_step_term=True
    ),
    "turn_ppo": Estimator(reads=("gamma", "gae_lambda"), has_critic=True, is_whitened=True),
    "ppo": Estimator(reads=("gae_lambda",), has_critic=True, is_whitened=True, is_token_level=True),
}
ESTIMATORS: Final = tuple(_ESTIMATORS)
WITH_STEP_TERM: Final = tuple(name for name, each in _ESTIMATORS.items() if each.has_step_term)
WITH_CRITIC: Final = tuple(name for name, each in _ESTIMATORS.items() if each.has_critic)
WHITENED: Final = tuple(name for name, each in _ESTIMATORS.items() if each.is_whitened)
TOKEN_LEVEL: Final = tuple(name for name, each in _ESTIMATORS.items() if each.is_token_level)
UNSCALED: Final = tuple(name for name, each in _ESTIMATORS.items() if each.is_unscaled)
NORMALISATIONS: Final = ("mean", "mean_std", "leave_one_out")
WEIGHTINGS: Final = ("steps", "trajectories")
ANCHORS: Final = ("state", "state_and_actions", "suffix", "similar", "similar_greedy", "anchor_key")
ANCHOR_VERSIONS: Final = ("mixed", "window", "weighted")


def _readers(setting: str) -> tuple[str, ...]:
    """Return the estimators that read a setting."""
    return tuple(name for name, each in _ESTIMATORS.items() if setting in each.reads)


# Setting -> the choices that read it; any one of them is enough. All choices read the others.
READERS: Final[Mapping[str, Mapping[str, Sequence[str]]]] = {
    "gamma": {"estimator": _readers("gamma")},
    "gae_lambda": {"estimator": _readers("gae_lambda")},
    "graph_gamma": {"estimator": _readers("graph_gamma")},
    "omega": {"estimator": _readers("omega")},
    "normalise": {"estimator": _readers("normalise")},
    "weighting": {"estimator": _readers("weighting")},
    "anchor": {"estimator": _readers("anchor")},
    "anchor_history": {"anchor": ("suffix",), "estimator": _readers("anchor_history")},
    "similarity": {"anchor": ("similar", "similar_greedy")},
    "anchor_versions": {"estimator": _readers("anchor_versions")},
    "version_window": {"anchor_versions": ("window",)},
}
_REALS: Final = ("gamma", "gae_lambda", "graph_gamma", "omega", "invalid_penalty", "similarity")
_INTEGERS: Final = ("anchor_history", "version_window")
# differences of versions, and the window + 1, have to fit into 64 bits
_INTEGER_LIMIT: Final = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSettings:
    """Everything that decides an advantage.

    The macro's parameters have the same names, except `similarity`. numpy's numbers become
    Python's. Text, None, True and False are refused as numbers, and 3.0 as a whole number.

    estimator        'gigpo' (eq. 8); 'grpo', 'rloo', 'dr_grpo', 'reinforce_pp',
                     'reinforce_pp_baseline' (episode term only); 'hgpo' (nested anchor groups);
                     'graphgpo' (distance-to-success returns); 'g2po' (values of the states that a
                     group met, and their temporal differences); 'gagpo' (generalised advantage
                     estimation over such values); 'turn_ppo' (the same over a critic's values);
                     'ppo' (the same by tokens, see token_advantages.py)
    gamma            discount per step of the environment, in [0, 1] (eq. 5), in step returns and
                     values of states only
    gae_lambda       decay of later temporal differences, in [0, 1], for 'gagpo' and 'turn_ppo': 0
                     looks one step ahead, 1 to the end; per token for 'ppo'
    graph_gamma      discount per edge of the graph of 'graphgpo', in [0, 1]; its authors' step cost
    omega            weight of the step term (eq. 8), for 'gigpo', 'graphgpo' and 'g2po'
    normalise        'mean' (divide by 1), 'mean_std' (divide by the deviation + 1e-6) or
                     'leave_one_out' (the mean of the others is the baseline); for 'gigpo', 'grpo',
                     'hgpo', 'graphgpo', 'g2po' and 'gagpo'. The baseline leaves out the row's own
                     trajectory in the step term and, with weighting 'trajectories', in the episode
                     term
    weighting        episode statistics over 'steps' (authors' code) or 'trajectories' (eq. 3)
    invalid_penalty  subtracted from the return and the episode score of a row with an invalid
                     action; in reward units
    anchor           which steps share a state: 'state', 'state_and_actions', 'suffix', 'similar'
                     (method 'linked' of similarity.py), 'similar_greedy' (authors' code) or
                     'anchor_key'
    anchor_history   states in the longest suffix, this one included; for anchor 'suffix' and for
                     'hgpo' (its K + 1)
    similarity       threshold of anchors 'similar' and 'similar_greedy', in (0, 1)
    anchor_versions  anchor groups over policy versions: 'mixed', within a 'window', or 'weighted'
    version_window   most versions between members of one anchor group, for anchor_versions
                     'window'; 0 = the same version
    """

    estimator: str
    gamma: float
    gae_lambda: float
    graph_gamma: float
    omega: float
    normalise: str
    weighting: str
    invalid_penalty: float
    anchor: str
    anchor_history: int
    similarity: float
    anchor_versions: str
    version_window: int

    @classmethod
    def of(cls, record: object) -> AdvantageSettings:
        """Return the settings in a record that has their names, such as `config.algorithm`."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(cls)})

    def __post_init__(self) -> None:
        _check_name("estimator", self.estimator, known=ESTIMATORS)
        _check_name("normalise", self.normalise, known=NORMALISATIONS)
        _check_name("weighting", self.weighting, known=WEIGHTINGS)
        _check_name("anchor", self.anchor, known=ANCHORS)
        _check_name("anchor_versions", self.anchor_versions, known=ANCHOR_VERSIONS)
        for name in _REALS:
            object.__setattr__(self, name, _python_number(name, getattr(self, name), whole=False))
        for name in _INTEGERS:
            object.__setattr__(self, name, _python_number(name, getattr(self, name), whole=True))
            if getattr(self, name) >= _INTEGER_LIMIT:
                raise ValueError(f"{name}={getattr(self, name)} must be less than 2^62")
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(
                f"gamma={self.gamma} is outside [0, 1]: returns would grow with the episode's "
                "length"
            )
        if not 0.0 <= self.gae_lambda <= 1.0:
            raise ValueError(
                f"gae_lambda={self.gae_lambda} is outside [0, 1]: later differences would count "
                "for more than earlier ones"
            )
        if not 0.0 <= self.graph_gamma <= 1.0:
            raise ValueError(
                f"graph_gamma={self.graph_gamma} is outside [0, 1]: states further from success "
                "would be worth more"
            )
        if not (math.isfinite(self.omega) and self.omega >= 0.0):
            raise ValueError(
                f"omega={self.omega} must be finite and >= 0: below 0 it would reward the worse "
                "action"
            )
        if not (math.isfinite(self.invalid_penalty) and self.invalid_penalty >= 0.0):
            raise ValueError(
                f"invalid_penalty={self.invalid_penalty} must be finite and >= 0: it is "
                "subtracted, so below 0 it would reward invalid actions"
            )
        if self.anchor_history < 1:
            raise ValueError(
                f"anchor_history={self.anchor_history} must be at least 1: a step's own state is "
                "part of its suffix"
            )
        if not 0.0 < self.similarity < 1.0:
            raise ValueError(
                f"similarity={self.similarity} is outside (0, 1): at 1 use anchor='state', at 0 "
                "all texts are alike"
            )
        if self.version_window < 0:
            raise ValueError(
                f"version_window={self.version_window} must be at least 0: 0 compares within one "
                "version"
            )
        if self.estimator in ("g2po", "gagpo") and self.anchor_versions == "weighted":
            raise ValueError(
                f"estimator={self.estimator!r} values a state by the plain mean of its outcomes; "
                "choose anchor_versions='mixed' or 'window', not 'weighted'"
            )
        if self.estimator == "hgpo" and self.anchor != "state":
            raise ValueError(
                "estimator='hgpo' has anchors of its own, suffixes of states; leave "
                f"anchor='state', not {self.anchor!r}"
            )


def has_effect(name: str, chosen: AdvantageSettings) -> bool:
    """Return whether a setting has an effect with the other settings in `chosen`."""
    choices = READERS.get(name, {})
    return not choices or any(
        getattr(chosen, key) in names and has_effect(key, chosen) for key, names in choices.items()
    )


def describe_readers(name: str, chosen: AdvantageSettings) -> tuple[str, str]:
    """Return the choices that ignore a setting, and those that read it, as text.

    Example: gamma with estimator grpo gives 'estimator=grpo' and 'estimator=gigpo or hgpo or g2po
    or gagpo or turn_ppo'.
    """
    choices = READERS[name]
    now = " and ".join(f"{key}={getattr(chosen, key)}" for key in choices)
    return now, ", or ".join(f"{key}={' or '.join(names)}" for key, names in choices.items())


def check_no_unread(settings: AdvantageSettings, *, defaults: AdvantageSettings) -> None:
    """Raise ValueError for a changed setting without effect: it would be taken for one with."""
    for key in READERS:
        value, default = getattr(settings, key), getattr(defaults, key)
        if value != default and not has_effect(key, settings):
            chosen, ways = describe_readers(key, settings)
            raise ValueError(
                f"{key}={value} does nothing with {chosen}; leave it out (its default is "
                f"{default}), or use {ways}"
            )


def _check_name(field: str, value: object, *, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        names = ", ".join(known)
        raise ValueError(
            f"{field}={value!r} is unknown; it is one of {names}{did_you_mean(value, known)}"
        )


def _python_number(field: str, value: object, *, whole: bool) -> float:
    """Return `value` as the int or float that the SQL is written with."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value) if whole else float(value)
    if isinstance(value, numbers.Real) and not (whole or isinstance(value, bool)):
        return float(value)
    example = "whole number, such as 3" if whole else "number, such as 0.5"
    raise ValueError(f"{field}={value!r} is of type {type(value).__name__}; it must be a {example}")


# The authors' ALFWorld script. It does not use anchor_history, 3 as HGPO's K = 2, nor similarity,
# 0.9 as in the paper and in the search script, nor gae_lambda, 0.95 as PPO's authors have it, nor
# graph_gamma, 0.1 as in GraphGPO's ALFWorld script.
PUBLISHED_SETTINGS: Final = AdvantageSettings(
    estimator="gigpo",
    gamma=0.95,
    gae_lambda=0.95,
    graph_gamma=0.1,
    omega=1.0,
    normalise="mean_std",
    weighting="steps",
    invalid_penalty=0.1,
    anchor="state",
    anchor_history=3,
    similarity=0.9,
    anchor_versions="mixed",
    version_window=1,
)

"""The table of docs/algorithms.md, section 11, is what is refused: every row is, and
combinations.py refuses nothing else.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import configs
from configs import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    ReplayConfig,
)
from driver.preflight import check_algorithm
from gigpo import (
    CORRECTIONS,
    POLICY_LOSSES,
    PROXIMAL_POLICIES,
    DppoTv,
    GeometricMask,
    K3Mask,
    Objective,
    PpoClip,
    SequenceMask,
    SequenceTis,
    TokenIcepop,
    TokenTis,
)
from gigpo.combinations import check_combination
from learner import objective_of
from tests.support.gigpo_samples import settings

DOCS = (Path(__file__).resolve().parents[2] / "docs/algorithms.md").read_text()
# Beginning of a row of the table -> what check_combination says of it.
COMBINATIONS = {
    "`token_tis`, `sequence_tis`, `token_icepop` or `m2po` with `cispo`": [r"\w+ on top of \w+: "],
    "any correction with `behaviour_cloning`": [
        "with behaviour_cloning: it wants every recorded token"
    ],
    "`opsm` with `distillation`": ["opsm with distillation: it drops sequences by the sign"],
    "`token_tis` with `sequence_tis`; one correction twice": [
        "each set the whole weight",
        r"\w+ twice; the narrower",
    ],
    "`sequence_mask` with `geometric_mask`": ["both masks bound the same sum"],
    "`token_icepop` with a `token_tis.cap`": [
        "token_icepop drops what is above",
        "sequence_mask drops what is above",
    ],
    "`proximal` other than `none` without `ppo_clip`": ["proximal='[a-z]+' with (?!ppo_clip)"],
    "`ppo_clip` around mu": [
        "ppo_clip leaves no gradient above.* so token_tis.cap=.* would never act",
        "ppo_clip leaves no gradient above.* so token_icepop.high=.* would never act",
    ],
}


def config(**loss: Any) -> Config:
    return Config(loss=LossConfig(**loss))


# Beginning of a row -> what it says is refused.
OTHERS: dict[str, list[Callable[[], object]]] = {
    "`proximal=recomputed` with one update": [lambda: configs.check(config(proximal="recomputed"))],
    "`kl=k1` with `kl_coef`": [lambda: Objective(policy=PpoClip(), kl="k1", kl_coef=0.1)],
    "a number of a loss or correction that is not in use": [
        lambda: objective_of(LossConfig(numbers={"dppo_tv": {"delta_low": 0.1}})),
        lambda: objective_of(LossConfig(numbers={"m2po": {"limit": 0.1}})),
    ],
    "`hgpo` with another `anchor`": [lambda: settings(estimator="hgpo", anchor="suffix")],
    "a `critic.clip` that is not the default": [
        lambda: configs.check(
            Config(
                algorithm=AlgorithmConfig(estimator="turn_ppo"), critic=CriticConfig(clip=math.inf)
            )
        )
    ],
    "`learner.schedule=linear` with `critic.warmup_steps`": [
        lambda: configs.check(
            Config(
                algorithm=AlgorithmConfig(estimator="turn_ppo"),
                learner=LearnerConfig(schedule="linear"),
                critic=CriticConfig(warmup_steps=1),
            )
        )
    ],
    "a setting of `critic` with another estimator than `turn_ppo` and `ppo`": [
        lambda: configs.check(Config(critic=CriticConfig(clip=1.0))),
        lambda: configs.check(
            Config(
                algorithm=AlgorithmConfig(estimator="turn_ppo"),
                loss=LossConfig(policy="behaviour_cloning"),
                source=["runs/a"],
            )
        ),
        lambda: configs.check(
            Config(algorithm=AlgorithmConfig(estimator="turn_ppo"), replay=ReplayConfig(share=0.25))
        ),
    ],
    "a setting of `algorithm` that is not the default": [
        lambda: check_algorithm(Config(algorithm=AlgorithmConfig(estimator="rloo", omega=0.5))),
        lambda: check_algorithm(Config(algorithm=AlgorithmConfig(version_window=0))),
    ],
    "a mask with low 0 and high `.inf`": [
        lambda: TokenIcepop(low=0, high=math.inf),
        lambda: SequenceMask(low=0, high=math.inf),
        lambda: GeometricMask(low=0, high=math.inf),
    ],
    "a cap below 1, a band without 1 in it, a threshold of 0": [
        lambda: TokenTis(cap=0.9),
        lambda: SequenceTis(cap=0.9),
        lambda: DppoTv(ratio_cap=0.9),
        lambda: TokenIcepop(low=1.0),
        lambda: GeometricMask(high=1.0),
        lambda: K3Mask(limit=0.0),
    ],
    "`gamma`, `gae_lambda` or `graph_gamma` outside [0, 1]": [
        lambda: settings(gamma=1.1),
        lambda: settings(graph_gamma=1.1),
        lambda: settings(omega=-0.1),
        lambda: settings(invalid_penalty=-0.1),
        lambda: settings(similarity=0.0),
        lambda: settings(similarity=1.0),
    ],
    "text, None, True or False as a number": [
        lambda: settings(gamma="0.5"),
        lambda: settings(gamma=None),
        lambda: settings(omega=True),
        lambda: settings(anchor_history=2.0),
        lambda: settings(version_window=2.5),
        lambda: settings(version_window=2**62),
        lambda: settings(anchor_history=2**62),
    ],
}


def refusals() -> Iterator[str]:
    """Yield the refusals of every loss with every one or two corrections.

    Numbers are the usual ones and those at the bounds.
    """
    numbers = {
        "token_tis": ({}, {"cap": 8.0}, {"cap": math.inf}),
        "sequence_tis": ({}, {"cap": 8.0}),
        "token_icepop": ({}, {"low": 0.0}, {"low": 0.0, "high": 2.0}),
    }
    parts = [
        kind(**given) for name, kind in CORRECTIONS.items() for given in numbers.get(name, ({},))
    ]
    chosen = [(), *((part,) for part in parts), *itertools.product(parts, repeat=2)]
    for policy, corrections, proximal in itertools.product(
        POLICY_LOSSES.values(), chosen, PROXIMAL_POLICIES
    ):
        try:
            check_combination(policy(), corrections, proximal=proximal)
        except ValueError as error:
            yield str(error)


def test_every_row_of_the_table_has_its_examples_here() -> None:
    section = DOCS[DOCS.index("## 11. What is refused") : DOCS.index("## 12. ")]
    rows = [line.removeprefix("| ") for line in section.splitlines() if line.startswith("| ")][1:]
    examples = [*COMBINATIONS, *OTHERS]
    assert len(rows) == len(examples)
    assert all(sum(row.startswith(example) for row in rows) == 1 for example in examples)


def test_the_table_and_the_refusals_are_the_same() -> None:
    said = set(refusals())
    patterns = [pattern for ways in COMBINATIONS.values() for pattern in ways]
    found = {
        message: [pattern for pattern in patterns if re.search(pattern, message)]
        for message in said
    }
    assert {message: which for message, which in found.items() if len(which) != 1} == {}
    assert {which[0] for which in found.values()} == set(patterns)


@pytest.mark.parametrize("row", COMBINATIONS)
def test_the_names_in_a_row_are_those_that_are_refused(row: str) -> None:
    """Every loss and correction that a row names, every setting that would never act, and every
    pair of the first row.
    """
    (line,) = [line for line in DOCS.splitlines() if line.startswith(f"| {row}")]
    named = set(re.findall(r"`(\w+)`", line)) & {*POLICY_LOSSES, *CORRECTIONS}
    messages = [
        message
        for message in refusals()
        if any(re.search(pattern, message) for pattern in COMBINATIONS[row])
    ]
    assert named <= {name for message in messages for name in re.findall(r"\w+", message)}
    never_act = {name for message in messages for name in re.findall(r"so ([\w.]+)=", message)}
    assert all(f"`{name}`" in line for name in never_act)
    if row.startswith("`token_tis`, `sequence_tis`, "):
        pairs = {
            pair for message in messages for pair in re.findall(r"(\w+) on top of (\w+)", message)
        }
        of_corrections, of_losses = named & CORRECTIONS.keys(), named & POLICY_LOSSES.keys()
        assert pairs == set(itertools.product(of_corrections, of_losses))


@pytest.mark.parametrize("row", OTHERS)
def test_every_other_row_is_refused(row: str) -> None:
    for example in OTHERS[row]:
        with pytest.raises(ValueError):  # noqa: PT011
            example()

"""The settings of a loss become an objective; parts that do not go together are refused."""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import configs
from configs import (
    AlgorithmConfig,
    Config,
    ConfigError,
    LossConfig,
)
from driver.preflight import check_algorithm, check_loss
from gigpo import (
    AGGREGATIONS,
    CORRECTIONS,
    DEFAULT_PAIRING,
    POLICY_LOSSES,
    AdvantageSettings,
    Gspo,
    Objective,
    Opsm,
    PpoClip,
    SequenceMeanTokenMean,
    TokenTis,
)
from learner import objective_of

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    kind.name: kind
    for registry in (POLICY_LOSSES, CORRECTIONS, AGGREGATIONS)
    for kind in registry.values()
}


def config_of(**loss: Any) -> Config:
    return Config(loss=LossConfig(**loss))


def test_the_quick_start_trains_with_ppo_clip_and_truncated_importance_sampling() -> None:
    config = configs.load(ROOT / "configs/quickstart.yaml")
    assert objective_of(config.loss) == Objective(policy=PpoClip(), corrections=(TokenTis(),))


@pytest.mark.parametrize("policy", sorted(POLICY_LOSSES))
def test_a_loss_is_what_it_was_published_with(policy: str) -> None:
    names, aggregation = DEFAULT_PAIRING[policy]
    corrections = tuple(CORRECTIONS[name]() for name in names)
    expected = Objective(
        policy=POLICY_LOSSES[policy](),
        corrections=corrections,
        aggregation=AGGREGATIONS[aggregation](),
    )
    assert objective_of(LossConfig(policy=policy)) == expected
    written = LossConfig(policy=policy, corrections=list(names), aggregation=aggregation)
    assert objective_of(written) == expected


def test_a_number_of_the_config_is_the_one_that_counts() -> None:
    loss = LossConfig(
        policy="gspo",
        corrections=["opsm"],
        numbers={"gspo": {"clip_high": 5e-4}, "opsm": {"limit": 1e-3}},
    )
    assert objective_of(loss) == Objective(
        policy=Gspo(clip_high=5e-4),
        corrections=(Opsm(limit=1e-3),),
        aggregation=SequenceMeanTokenMean(),
    )


def test_an_infinite_bound_is_off_and_stays_off() -> None:
    infinite = float("inf")
    loss = LossConfig(numbers={"ppo_clip": {"dual_clip": infinite}, "token_tis": {"cap": infinite}})
    assert objective_of(loss) == Objective(
        policy=PpoClip(dual_clip=infinite), corrections=(TokenTis(cap=infinite),)
    )
    assert configs.from_yaml(configs.as_yaml(Config(loss=loss))).loss == loss


def test_the_constant_length_is_the_longest_response() -> None:
    name = "sequence_mean_token_sum_norm"
    config = config_of(aggregation=name, numbers={name: {"norm_tokens": 512}})
    configs.check(config)
    shorter = replace(config, actors=replace(config.actors, max_response_tokens=16))
    for wrong, words in (
        (shorter, "norm_tokens=16, .*, not 512"),
        (config_of(aggregation=name), "norm_tokens=512"),
    ):
        with pytest.raises(ConfigError, match=words):
            configs.check(wrong)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"policy": "ppo"}, "loss.policy='ppo' is none of"),
        ({"policy": "gsp"}, "sapo, topr, did you mean 'gspo'?"),
        ({"corrections": ["token_tiss"]}, "did you mean 'token_tis'?"),
        ({"aggregation": "token_sum"}, "loss.aggregation='token_sum' is none of"),
        (
            {"proximal": "recompute"},
            "loss.proximal='recompute' is none of none, recomputed, interpolated",
        ),
        ({"kl": "k4"}, "loss.kl='k4' is none of k1, k2, k3"),
        ({"corrections": ["tis"]}, "loss.corrections='tis' is none of"),
        (
            {"policy": "gspo", "corrections": ["token_tis"]},
            "loss.corrections=['token_tis']: token_tis on top of gspo",
        ),
        ({"policy": "gspo", "proximal": "recomputed"}, "loss.proximal='recomputed' with gspo"),
        ({"kl": "k1", "kl_coef": 0.1}, "loss.kl='k1' cannot be a penalty"),
        (
            {"corrections": "token_tis"},
            "loss.corrections=token_tis is not a list; use loss.corrections=[token_tis]",
        ),
        (
            {"corrections": ["k3_mask"], "numbers": {"k3_mask": {"limit": -1.0}}},
            "loss.numbers.k3_mask.limit=-1.0 must be finite and above 0",
        ),
        (
            {"corrections": ["k3_mask"], "numbers": {"k3_mask": {"limit": float("inf")}}},
            "loss.numbers.k3_mask.limit=inf must be finite",
        ),
        ({"kl_coef": -1.0}, "loss.kl_coef=-1.0 must be finite and >= 0"),
        ({"entropy_coef": float("nan")}, "loss.entropy_coef=nan must be finite"),
        (
            {"numbers": {"token_tis": {"cap": float("nan")}}},
            "loss.numbers.token_tis.cap=nan must be >= 1",
        ),
        (
            {"numbers": {"ppo_clip": {"dual_clip": float("-inf")}}},
            "loss.numbers.ppo_clip.dual_clip=-inf must be above 1",
        ),
        (
            {"numbers": {"token_tis": {"cap": 3.0}}},
            "loss.corrections=['token_tis']: ppo_clip leaves no gradient above dual_clip=3",
        ),
        (
            {"numbers": {"ppo_clip": {"clip_low": 1.5}}},
            "loss.numbers.ppo_clip.clip_low=1.5 must be in (0, 1]",
        ),
        (
            {"numbers": {"ppo_clip": {"dual_clip": 0.5}}},
            "loss.numbers.ppo_clip.dual_clip=0.5 must be above 1",
        ),
        ({"numbers": {"token_tis": {"cap": 0.5}}}, "loss.numbers.token_tis.cap=0.5 must be >= 1"),
        (
            {"policy": "behaviour_cloning", "corrections": ["opsm"]},
            "loss.corrections=['opsm'] with behaviour_cloning",
        ),
        (
            {"numbers": {"dppo_tv": {"delta_low": 0.1}}},
            "loss.numbers.dppo_tv.delta_low=0.1 does nothing: dppo_tv is not in use here (ppo_clip, "
            "token_tis, token_mean)",
        ),
        (
            {"corrections": [], "numbers": {"token_tis": {"cap": 4.0}}},
            "loss.numbers.token_tis.cap=4 does nothing: token_tis is not in use",
        ),
        (
            {"numbers": {"sequence_mean_token_sum_norm": {"norm_tokens": 5.0}}},
            "loss.numbers.sequence_mean_token_sum_norm.norm_tokens=5 does nothing",
        ),
        (
            {"aggregation": "sequence_mean_token_sum_norm"},
            "needs loss.numbers.sequence_mean_token_sum_norm.norm_tokens",
        ),
        (
            {"numbers": {"ppo_clap": {"clip_low": 0.1}}},
            "loss.numbers.ppo_clap is no loss, correction or aggregation, did you mean 'ppo_clip'",
        ),
        (
            {"numbers": {"ppo_clip": {"clip": 0.1}}},
            "loss.numbers.ppo_clip.clip is unknown; ppo_clip has clip_low, clip_high, dual_clip",
        ),
        ({"numbers": {"topr": {"clip": 0.1}}}, "topr has no numbers"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        objective_of(LossConfig(**loss))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


VALUES = [-1.0, 0.0, 0.5, 1.0, 1.001, 1.5, 2.0, 3.0, 5.0, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if fields(kind)], ids=lambda kind: kind.name
)
def test_a_loss_s_numbers_have_the_bounds_of_its_record_and_no_others(kind: type) -> None:
    """Through every check that a run passes before it starts."""
    registries = {"policy": POLICY_LOSSES, "corrections": CORRECTIONS, "aggregation": AGGREGATIONS}
    # reinforce takes any correction and any bound of it; ppo_clip's own clip is narrower than some.
    parts: dict[str, Any] = {"policy": "reinforce", "corrections": []}
    for name, registry in registries.items():
        if kind in registry.values():
            parts[name] = [kind.name] if name == "corrections" else kind.name
    for item, value in itertools.product(fields(kind), VALUES):
        loss = LossConfig(**parts, numbers={kind.name: {item.name: value}})
        if item.name != "norm_tokens":  # which has to be the longest response
            configs.check(Config(loss=loss))
        try:
            expected = kind(**{item.name: value})
        except ValueError as error:
            with pytest.raises(ConfigError, match=re.escape(f"loss.numbers.{kind.name}.{error}")):
                objective_of(loss)
        else:
            made = objective_of(loss)
            assert expected in (made.policy, *made.corrections, made.aggregation)


@pytest.mark.parametrize(
    ("key", "describe_readers"),
    [
        ("gamma", {}),
        ("omega", {}),
        ("invalid_penalty", {}),
        ("similarity", {"anchor": "similar"}),
        ("anchor_history", {"anchor": "suffix"}),
        ("version_window", {"anchor_versions": "window"}),
    ],
)
def test_an_algorithm_s_numbers_have_the_bounds_of_its_record_and_no_others(
    key: str, describe_readers: dict[str, Any]
) -> None:
    for value in VALUES if key not in ("anchor_history", "version_window") else [-1, 0, 1, 2]:
        config = Config(algorithm=AlgorithmConfig(**(describe_readers | {key: value})))
        try:
            AdvantageSettings.of(config.algorithm)
        except ValueError:
            with pytest.raises(ConfigError, match=f"algorithm.{key}"):
                check_algorithm(config)
        else:
            check_algorithm(config)
        configs.check(config)


def test_the_clone_of_a_base_policy_needs_none_of_it() -> None:
    config = config_of(policy="dppo_tv", numbers={"dppo_tv": {"delta_low": 0.1}}, kl_coef=0.5)
    assert objective_of(configs.cloning_config(config).loss) == objective_of(
        LossConfig(policy="behaviour_cloning")
    )
    clone = configs.cloning_config(
        replace(config, algorithm=AlgorithmConfig(anchor="suffix", omega=0.5))
    )
    configs.check(
        replace(clone, learner=replace(clone.learner, keep_versions=clone.max_staleness + 2))
    )
    adapted = replace(config, model=replace(config.model, lora_rank=4))
    assert configs.cloning_config(adapted).model.lora_rank == 0, "adapters need a whole base"


def test_nothing_starts_with_a_loss_that_makes_no_sense() -> None:
    check_loss(config_of(policy="gspo"))
    with pytest.raises(
        ConfigError, match=r"^loss.corrections=\['token_tis'\]: token_tis on top of"
    ):
        check_loss(config_of(policy="gspo", corrections=["token_tis"]))

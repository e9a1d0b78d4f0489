"""What a config says of its loss: published numbers written out, and what does not go together
refused before a run.
"""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import configs
from configs import AlgorithmConfig, Config, ConfigError, LossConfig
from gigpo import AGGREGATIONS, CORRECTIONS, POLICY_LOSSES, Objective, PpoClip, TokenTis
from learner import advantage_settings, fill_defaults
from learner.objective import objective_of

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    kind.name: kind
    for registry in (POLICY_LOSSES, CORRECTIONS, AGGREGATIONS)
    for kind in registry.values()
}


def published(**loss: Any) -> LossConfig:
    return fill_defaults(Config(loss=LossConfig(**loss))).loss


def test_the_quick_start_trains_with_ppo_clip_and_truncated_importance_sampling() -> None:
    config = fill_defaults(configs.load(ROOT / "configs/quickstart.yaml"))
    assert objective_of(config.loss) == Objective(policy=PpoClip(), corrections=(TokenTis(),))
    assert (
        config.loss.clip_low,
        config.loss.clip_high,
        config.loss.dual_clip,
        config.loss.tis_cap,
    ) == (0.2, 0.2, 3.0, 2.0)
    assert (config.loss.corrections, config.loss.aggregation) == (["token_tis"], "token_mean")


@pytest.mark.parametrize("policy", sorted(POLICY_LOSSES))
def test_a_loss_is_what_it_was_published_with(policy: str) -> None:
    loss = published(policy=policy)
    assert objective_of(loss) == objective_of(LossConfig(policy=policy)), (
        "writing it out changes nothing"
    )
    assert fill_defaults(Config(loss=loss)).loss == loss
    assert configs.from_yaml(configs.to_yaml(Config(loss=loss))).loss == loss
    for item in fields(POLICY_LOSSES[policy]):
        assert getattr(loss, item.name) in (item.default, None)


def test_a_number_of_the_config_is_the_one_that_counts() -> None:
    loss = published(policy="gspo", clip_high=5e-4, corrections=["opsm"], opsm_delta=1e-3)
    assert (loss.clip_low, loss.clip_high, loss.opsm_delta, loss.aggregation) == (
        3e-4,
        5e-4,
        1e-3,
        "sequence_mean_token_mean",
    )
    assert objective_of(loss).policy == POLICY_LOSSES["gspo"](clip_high=5e-4)


def test_what_is_switched_off_stays_off() -> None:
    loss = published(dual_clip=float("inf"), tis_cap=float("inf"))
    assert objective_of(loss) == Objective(
        policy=PpoClip(dual_clip=float("inf")), corrections=(TokenTis(tis_cap=float("inf")),)
    )
    assert configs.from_yaml(configs.to_yaml(Config(loss=loss))).loss == loss


def test_the_constant_length_is_the_longest_response() -> None:
    config = Config(loss=LossConfig(aggregation="sequence_mean_token_sum_norm"))
    assert fill_defaults(config).loss.norm_tokens == config.actors.max_response_tokens
    with pytest.raises(ConfigError, match=r"loss\.norm_tokens is null"):
        objective_of(config.loss)


def test_the_config_of_an_earlier_run_means_what_it_meant() -> None:
    """Before corrections had names a config said clip_low, clip_high, dual_clip and tis_cap, and
    nothing of the rest.
    """
    earlier = "loss: {policy: ppo_clip, clip_low: 0.2, clip_high: 0.2, dual_clip: 3.0, tis_cap: 2.0, kl_coef: 0.0}"
    assert (
        configs.differences(fill_defaults(configs.from_yaml(earlier)), fill_defaults(Config()))
        == []
    )


def test_published_numbers_have_one_home() -> None:
    """gigpo's defaults. The config has null for each and says the number in a comment, which has to
    be the same one.
    """
    numbers = {item.name for kind in KINDS.values() for item in fields(kind)}
    assert {item.name for item in fields(LossConfig) if item.type == "float | None"} == numbers
    assert all(getattr(LossConfig(), name) is None for name in numbers)
    lines = re.findall(
        r"^    (\w+): float \| None = None  # (.*)$", inspect.getsource(LossConfig), re.MULTILINE
    )
    assert {name for name, _ in lines} == numbers
    said = 0
    for name, comment in lines:
        of_kinds = re.sub(r"(\w+) and (\w+) ([\d.e-]+)", r"\1 \3, \2 \3", comment)
        for kind, number in re.findall(r"(\w+) ([\d.]+(?:e-\d+)?)\b", of_kinds):
            default = {item.name: item.default for item in fields(KINDS[kind])}[name]
            assert default == float(number), f"loss.{name}: {comment}"
            said += 1
    assert (
        said
        == sum(
            item.default not in (float("inf"),) for kind in KINDS.values() for item in fields(kind)
        )
        - 1
    )  # norm_tokens


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
            {"corrections": ["k3_mask"], "k3_max": -1.0},
            "loss.k3_max=-1.0 must be finite and above 0",
        ),
        ({"corrections": ["k3_mask"], "k3_max": float("inf")}, "loss.k3_max=inf must be finite"),
        ({"kl_coef": -1.0}, "loss.kl_coef=-1.0 must be finite and >= 0"),
        ({"entropy_coef": float("nan")}, "loss.entropy_coef=nan must be finite"),
        ({"tis_cap": float("nan")}, "loss.tis_cap=nan must be >= 1"),
        ({"dual_clip": float("-inf")}, "loss.dual_clip=-inf must be above 1"),
        (
            {"tis_cap": 3.0},
            "loss.corrections=['token_tis']: ppo_clip leaves no gradient above dual_clip=3",
        ),
        ({"clip_low": 1.5}, "loss.clip_low=1.5 must be in (0, 1]"),
        ({"dual_clip": 0.5}, "loss.dual_clip=0.5 must be above 1"),
        ({"tis_cap": 0.5}, "loss.tis_cap=0.5 must be >= 1"),
        (
            {"policy": "behaviour_cloning", "corrections": ["opsm"]},
            "loss.corrections=['opsm'] with behaviour_cloning",
        ),
        (
            {"delta_low": 0.1},
            "loss.delta_low=0.1 is a number of dppo_tv, not in use here (ppo_clip, token_tis, "
            "token_mean)",
        ),
        (
            {"corrections": [], "tis_cap": 2.0},
            "loss.tis_cap=2 is a number of sequence_tis and token_tis, not in use",
        ),
        ({"norm_tokens": 5.0}, "loss.norm_tokens=5 is a number of sequence_mean_token_sum_norm"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        published(**loss)
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
        config = Config(loss=LossConfig(**parts, **{item.name: value}))
        configs.check(config)
        try:
            kind(**{item.name: value})
        except ValueError as error:
            with pytest.raises(ConfigError, match=re.escape(f"loss.{error}")):
                fill_defaults(config)
        else:
            assert getattr(fill_defaults(config).loss, item.name) == value


@pytest.mark.parametrize(
    ("key", "read_with"),
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
    key: str, read_with: dict[str, Any]
) -> None:
    for value in VALUES if key not in ("anchor_history", "version_window") else [-1, 0, 1, 2]:
        config = Config(algorithm=AlgorithmConfig(**(read_with | {key: value})))
        try:
            advantage_settings(config)
        except ValueError:
            with pytest.raises(ConfigError, match=f"algorithm.{key}"):
                configs.check(config)
        else:
            configs.check(config)


def test_the_clone_of_a_base_policy_needs_none_of_it() -> None:
    config = fill_defaults(
        replace(Config(), loss=LossConfig(policy="dppo_tv", delta_low=0.1, kl_coef=0.5))
    )
    assert objective_of(configs.cloning_config(config).loss) == objective_of(
        LossConfig(policy="behaviour_cloning")
    )
    clone = configs.cloning_config(
        replace(config, algorithm=AlgorithmConfig(anchor="suffix", omega=0.5))
    )
    configs.check(
        replace(clone, learner=replace(clone.learner, keep_versions=clone.max_staleness + 2))
    )


def test_nothing_starts_with_a_loss_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import driver  # here, because it takes Ray along
    from cli.__main__ import main

    monkeypatch.setattr(driver.Interrupt, "listen", lambda interrupt: None)
    quickstart = str(ROOT / "configs/quickstart.yaml")
    assert (
        main(["train", quickstart, "loss.policy=gspo", "loss.corrections=[token_tis]", "--dry-run"])
        == 2
    )
    assert capsys.readouterr().err.startswith(
        "error: loss.corrections=['token_tis']: token_tis on top of gspo"
    )
    assert main(["train", quickstart, "loss.policy=gspo", "--dry-run"]) == 0
    assert "clip_low: 0.0003" in capsys.readouterr().out

"""Loading: every mistake is one line that names the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from configs import Config, ConfigError

FILES = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.yaml"
    path.write_text("seed: 3\n")
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_loads_and_has_a_plan(path: Path) -> None:
    config = configs.load(path)
    assert "placement" in configs.describe_plan(config)
    assert configs.from_yaml(configs.to_yaml(config)) == config


def test_overrides_go_on_top(empty: Path) -> None:
    config = configs.load(empty, ["learner.steps=7", "env.options.games=4", "seed=5"])
    assert (config.learner.steps, config.env.options, config.seed) == (7, {"games": 4}, 5)
    assert configs.load(empty).seed == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.stps=3", ["learner.stps", "learner.steps"]),
        ("lerner.steps=3", ["lerner.steps", "learner.steps"]),
        ("learner.steps=many", ["learner.steps", "many"]),
        ("learner.steps=0", ["learner.steps=0", "above 0"]),
        ("algorithm.estimator=gipgo", ["gipgo", "'gigpo'"]),
        ("algorithm.gamma=1.5", ["algorithm.gamma=1.5", "[0, 1]"]),
        ("algorithm.group_size=1", ["algorithm.group_size=1", "at least 2"]),
        ("algorithm.normalise=leave_one", ["leave_one", "'leave_one_out'"]),
        ("algorithm.signal=reward", ["algorithm.signal='reward'", "did you mean 'rewards'"]),
        ("algorithm.penalty_is_signal=false", ["algorithm.penalty_is_signal"]),
        ("algorithm.anchor=suffixes", ["suffixes", "'suffix'"]),
        ("algorithm.anchor_versions=weighted", ["'weighted'", "'window'"]),
        ("algorithm.anchor_history=0", ["algorithm.anchor_history=0", "above 0"]),
        ("algorithm.similarity=1.0", ["algorithm.similarity=1.0", "(0, 1)"]),
        ("algorithm.version_window=-1", ["algorithm.version_window=-1", "within one version"]),
        ("max_staleness=-1", ["max_staleness=-1", "0"]),
        ("learner.keep_versions=2", ["learner.keep_versions=2", "at least 3"]),
        ("actors.max_model_tokens=100", ["actors.max_model_tokens=100", "2560"]),
        ("loss.policy=behaviour_cloning", ["actors.scripted=true"]),
        ("actors.scripted=true", ["behaviour_cloning"]),
        ("learner.zero_stage=7", ["learner.zero_stage=7", "0, 1, 2, 3"]),
        ("model.dtype=bfloat16", ["zero_stage=1"]),
        ("learner=3", ["'learner' is a section"]),
        ("actors.cpu_cores=foo", ["actors.cpu_cores='foo'", "0,2-3"]),
        ("loss.policy=gsp", ["loss.policy='gsp'", "did you mean 'gspo'"]),
        ("loss.corrections=[token_tiss]", ["loss.corrections has 'token_tiss'", "did you mean 'token_tis'"]),
        ("loss.k3_max=-1", ["loss.k3_max=-1", "above 0"]),
        ("loss.k3_max=.inf", ["loss.k3_max=inf"]),
        ("loss.tis_cap=.nan", ["loss.tis_cap=nan"]),
        ("loss.dual_clip=-.inf", ["loss.dual_clip=-inf"]),
        ("loss.proximal=recomputed", ["learner.updates_per_step=1", "loss.policy=reinforce"]),
        ("model.tiny.heads=3", ["model.tiny.heads=3", "32, 64 or 128"]),
        ("prompt.template=thnk", ["thnk", "'think'"]),
        ("store.keep_days=-1", ["store.keep_days=-1", "for ever"]),
        ("store.snapshot_window_s=5", ["store.snapshot_window_s=5", "60"]),
        ("learner.learning_rate=nan", ["learner.learning_rate=nan"]),
        ("nonsense", ["'nonsense'", "key=value"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_value(empty: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load(empty, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_the_options_of_another_environment_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("env: {name: textworld, options: {rooms: 3}}\n")
    assert configs.load(path, ["env.options.things=1"]).env.options == {"rooms": 3, "things": 1}
    assert configs.load(path, ["env.name=key_room", "env.options={}"]).env.options == {}


def test_a_model_has_to_be_on_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.*download"):
        configs.check_model_path(Config(model=configs.ModelConfig(path=str(tmp_path / "nowhere"))))
    (tmp_path / "config.json").write_text("{}")
    configs.check_model_path(Config(model=configs.ModelConfig(path=str(tmp_path))))


def test_a_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quickstart\.yaml"):
        configs.load(tmp_path / "nope.yaml")


def test_differences_ignore_where_a_run_lies_and_how_long_it_goes_on(empty: Path) -> None:
    config = configs.load(empty)
    assert (
        configs.differences(config, configs.load(empty, ["run_dir=elsewhere", "learner.steps=500", "store.keep_days=3"])) == []
    )
    assert configs.differences(config, configs.load(empty, ["algorithm.omega=0.5"])) == ["algorithm.omega: 1.0 -> 0.5"]


def test_a_plan_counts_the_parameters_in_the_name() -> None:
    plan = configs.describe_plan(Config(model=configs.ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct", dtype="bfloat16")))
    # 1.5e9 parameters: 2 bytes of weight, 2 of gradient, 12 of master weights and moments
    assert f"{1.5e9 * 16 / 1024**3:.1f} GiB" in plan
    with pytest.raises(ConfigError, match="does not say its size"):
        configs.describe_plan(Config(model=configs.ModelConfig(path="org/model")))


def test_every_estimator_and_anchor_can_be_configured(empty: Path) -> None:
    for choice in (
        "estimator=hgpo",
        "estimator=reinforce_pp_baseline",
        "anchor=similar",
        "anchor=similar_greedy",
        "anchor_versions=window",
        "signal=rewards",
    ):
        key, _, value = choice.partition("=")
        assert getattr(configs.load(empty, [f"algorithm.{choice}"]).algorithm, key) == value
    with pytest.raises(ConfigError, match="anchor='suffix' is not hgpo's"):
        configs.load(empty, ["algorithm.estimator=hgpo", "algorithm.anchor=suffix"])


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("unused", ["anchor=similar", "anchor=suffix", "anchor_versions=window"])
def test_an_estimator_without_a_step_term_takes_no_anchor(empty: Path, estimator: str, unused: str) -> None:
    with pytest.raises(ConfigError, match=f"algorithm.{unused.partition('=')[0]}=.* does nothing with {estimator}"):
        configs.load(empty, [f"algorithm.estimator={estimator}", f"algorithm.{unused}"])


def test_what_may_be_switched_off_may_be_infinite(empty: Path) -> None:
    config = configs.load(empty, ["loss.dual_clip=.inf", "loss.tis_cap=.inf", "loss.policy=ppo_clip"])
    assert (config.loss.dual_clip, config.loss.tis_cap) == (float("inf"), float("inf"))
    assert configs.from_yaml(configs.to_yaml(config)) == config
    assert configs.load(empty, ["loss.policy=dppo_tv", "loss.ratio_cap=.inf"]).loss.ratio_cap == float("inf")

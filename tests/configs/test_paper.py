"""The configs of the paper's experiments have the numbers of the authors' scripts."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import configs
from configs import most_updates

DOCS = Path(__file__).resolve().parents[2] / "docs" / "paper.md"
FOLDER = Path(configs.__file__).parent
# environment -> rows of a mini-batch, groups of an iteration, group size, steps of an episode
SCRIPTS: dict[str, tuple[int, int, int, int]] = {
    "alfworld": (256, 16, 8, 50),
    "webshop": (64, 16, 8, 15),
    "search": (512, 256, 5, 4),
    "sokoban": (64, 32, 8, 15),
}
FILES = sorted(FOLDER.glob("*qwen*.yaml"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> configs.Config:
    return configs.load(request.param)


def test_updates_have_the_rows_of_a_mini_batch(config: configs.Config) -> None:
    found = (
        config.learner.rows_per_update,
        config.learner.groups_per_step,
        config.algorithm.group_size,
        config.env.max_steps,
    )
    assert found == SCRIPTS[config.env.name]
    assert config.learner.updates_per_step == 1


def test_an_action_is_invalid_by_its_form_alone(config: configs.Config) -> None:
    assert (config.prompt.parser, config.prompt.invalid) == ("upstream", "form")


def test_no_group_is_left_out_and_the_base_model_is_evaluated_first(config: configs.Config) -> None:
    assert config.algorithm.group_filter == "none"
    assert config.evaluation.at_start


def test_the_config_with_history_4_differs_in_nothing_else() -> None:
    two = configs.load(FOLDER / "alfworld_qwen2.5_1.5b.yaml")
    four = configs.load(FOLDER / "alfworld_qwen2.5_1.5b_history4.yaml")
    assert configs.forbidden_changes(two, four) == ["prompt.history_length: 2 -> 4"]


def test_a_baseline_is_named_after_its_estimator() -> None:
    """REINFORCE++ runs were once called ppo, which has a critic."""
    lines = re.findall(
        r"^(?:python cli/train\.py|gigpo train) .* run_dir=(\S+) algorithm\.estimator=(\S+)",
        DOCS.read_text(),
        re.M,
    )
    assert len(lines) >= 7
    assert all(run_dir.endswith(f"_{estimator}") for run_dir, estimator in lines), lines


def test_sokoban_has_one_box_and_search_warms_up_for_66_batches() -> None:
    sokoban = configs.load(FOLDER / "sokoban_qwen2.5_vl_3b.yaml")
    assert sokoban.env.options["boxes"] == 1
    for path in FOLDER.glob("search_qwen*.yaml"):
        learner = configs.load(path).learner
        # 6 updates of 512 rows are a batch's 3,072
        assert learner.warmup_updates / 6 == pytest.approx(66, abs=1)


def test_the_most_updates_of_a_learner_step() -> None:
    alfworld = configs.load(FOLDER / "alfworld_qwen2.5_1.5b.yaml")
    assert most_updates(alfworld) == 16 * 8 * 50 / 256
    assert most_updates(configs.load(FOLDER / "quickstart.yaml")) == 1
    stored = replace(
        configs.Config(), source=["runs/a"], learner=replace(alfworld.learner, warmup_updates=10**6)
    )
    assert most_updates(stored) == math.inf, "groups of another run may be of any size"
    configs.check(stored)

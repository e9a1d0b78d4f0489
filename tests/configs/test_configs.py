"""Loading: every mistake is one line that names the value and the fix."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from omegaconf import OmegaConf

import configs
from configs import AlgorithmConfig, Config, ConfigError, WorkerRange
from driver.preflight import check_algorithm
from gigpo import ESTIMATORS, AdvantageSettings, compute_advantages

PAPER = Path(__file__).parents[2] / "docs" / "paper.md"
FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.yaml"
    path.write_text("seed: 3\n")
    return path


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["offline.share=1.5"], ["offline.share=1.5", "use 1"]),
        (["offline.share=0.01"], ["0 offline and 8 own"]),
        (["offline.share=0.99"], ["8 offline and 0 own"]),
        (["offline.share=0"], ["above 0"]),
        (["offline.uses=0"], ["above 0"]),
        (["offline.share=0.5", "loss.policy=behaviour_cloning"], ["offline.share=1"]),
        (
            [
                "loss.policy=behaviour_cloning",
                "actors.scripted=true",
                "max_staleness=200",
                "learner.keep_versions=300",
            ],
            ["plays nothing"],
        ),
        (["loss.proximal=interpolated"], ["another run's"]),
        (["algorithm.refill_groups=8"], ["offline.share=1", "no group is played"]),
        (["replay.share=0.5"], ["replay.share=0.5", "offline.share=1 plays nothing"]),
    ],
)
def test_what_makes_no_sense_with_offline_groups_is_refused(
    empty: Path, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load(empty, ["source=runs/a", *overrides])
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["replay.max_age=9"],
            "replay.max_age=9 does nothing with replay.share=0; raise the share",
        ),
        (["replay.share=1.5"], "replay more than is played"),
        (["replay.share=0.01"], "of 8 groups is none"),
        (["replay.share=0.5", "store.keep_versions=5"], "keep_versions=5 would remove wins"),
    ],
)
def test_what_makes_no_sense_with_replayed_wins_is_refused(
    empty: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        configs.load(empty, overrides)


def test_replayed_wins_are_in_the_plan_and_among_the_rows_of_an_update(empty: Path) -> None:
    config = configs.load(empty, ["replay.share=0.25", "learner.rows_per_update=640"])
    assert "the wins of 2 earlier groups again, at most 5 versions old" in configs.describe_plan(
        config
    )
    plain = configs.load(empty, ["learner.rows_per_update=640"])
    # 8 groups of 8 episodes of 10 steps are 640 rows
    assert (configs.most_updates(plain), configs.most_updates(config)) == (1, 2)


def test_sources_are_taken_as_they_are_written(empty: Path) -> None:
    condition = "runs/a@won AND task_id = 'a: b' -- [x], #y"
    config = configs.load(
        empty, [f"source={condition}", "source=runs/b", "loss.policy=behaviour_cloning"]
    )
    assert config.source == [condition, "runs/b"]
    assert configs.from_yaml(configs.as_yaml(config)) == config
    assert configs.load(empty, ["source=[runs/a, runs/b]"]).source == ["runs/a", "runs/b"]
    for wrong in (
        ["source=runs/a", "source=[runs/b]"],
        ["source=[runs/a]", "source=[runs/b]"],
        ["source=runs/a@x = '${y}'"],
    ):
        with pytest.raises(ConfigError, match=r"a list is all sources|stands for another setting"):
            configs.load(empty, wrong)
    assert (
        configs.is_offline(config)
        and configs.n_workers(config) == 0
        and configs.groups_of_a_step(config) == (0, 8)
    )
    mixed = configs.load(empty, ["source=runs/b", "offline.share=0.25"])
    assert (
        configs.is_offline(mixed),
        configs.n_workers(mixed),
        configs.groups_of_a_step(mixed),
    ) == (False, 1, (6, 2))
    assert "nothing is played" in configs.describe_plan(
        config
    ) and "2 of them offline" in configs.describe_plan(mixed)
    refilled = configs.load(
        empty, ["source=runs/b", "offline.share=0.25", "algorithm.refill_groups=9"]
    )
    assert "at most 9 more groups" in configs.describe_plan(refilled)
    empty.write_text("source: runs/a\n")
    with pytest.raises(ConfigError, match="not a list"):
        configs.load(empty)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_loads_and_has_a_plan(path: Path) -> None:
    config = configs.load(path)
    assert "placement" in configs.describe_plan(config)
    assert configs.from_yaml(configs.as_yaml(config)) == config


def test_overrides_go_on_top(empty: Path) -> None:
    config = configs.load(empty, ["learner.steps=7", "env.options.games=4", "seed=5"])
    assert (config.learner.steps, config.env.options, config.seed) == (7, {"games": 4}, 5)
    assert configs.load(empty).seed == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.stps=3", ["learner.stps", "learner.steps"]),
        ("lerner.steps=3", ["lerner.steps", "learner.steps"]),
        ("learner.steps=many", ["learner.steps=many: Value 'many'"]),
        ("learner.steps=[", ["learner.steps=[: not readable as YAML"]),
        ("learner.steps=0", ["learner.steps=0", "above 0"]),
        ("algorithm.group_size=1", ["algorithm.group_size=1", "at least 2"]),
        ("algorithm.penalty_is_signal=false", ["algorithm.penalty_is_signal"]),
        ("algorithm.anchor=anchor_key", ["'anchor_key'", "'similar'"]),
        ("algorithm.anchor_versions=weighted", ["'weighted'", "'window'"]),
        ("max_staleness=-1", ["max_staleness=-1", "0"]),
        ("learner.keep_versions=2", ["learner.keep_versions=2", "at least 3"]),
        ("actors.max_model_tokens=100", ["no setting any more", "max_prompt_tokens +"]),
        ("loss.gspo.clip_high=0.1", ["is now loss.numbers.gspo.clip_high"]),
        ("loss.numbers.gspo.clip_high=x", ["loss.numbers.gspo.clip_high=x"]),
        ("loss.numbers.gspo=3", ["loss.numbers.gspo=3"]),
        ("loss.numbers.gspo.clip_high.x=3", ["loss.numbers.gspo.clip_high.x=3"]),
        ("loss.policy=behaviour_cloning", ["actors.scripted=true"]),
        ("actors.gpus_per_worker=1.5", ["actors.gpus_per_worker=1.5", "use e.g. 1"]),
        ("actors.gpus_per_worker=-0.5", ["actors.gpus_per_worker=-0.5", "CPU engine"]),
        ("learner.gpus_per_rank=2", ["learner.gpus_per_rank=2", "learner.ranks"]),
        ("learner.gpus_per_rank=nan", ["learner.gpus_per_rank=nan"]),
        ("learner.zero_stage=7", ["learner.zero_stage=7", "0, 1, 2, 3"]),
        ("model.dtype=bfloat16", ["zero_stage=1"]),
        ("learner=3", ["'learner' is a section"]),
        ("actors.cpu_cores=foo", ["actors.cpu_cores='foo'", "0,2-3"]),
        (
            "loss.corrections=token_tis",
            ["loss.corrections=token_tis is not a list", "use loss.corrections=[token_tis]"],
        ),
        ("loss.corrections=token_tis,opsm", ["use loss.corrections=[token_tis,opsm]"]),
        ("env.options=[3]", ["env.options=[3]: ", "incompatible"]),
        ("env.options=3", ["env.options=3: "]),
        ("loss.proximal=recomputed", ["learner.updates_per_step=1", "loss.policy=reinforce"]),
        ("model.tiny.hidden_size=80", ["model.tiny.hidden_size=80", "multiple of 32"]),
        ("prompt.template=thnk", ["thnk", "'think'"]),
        ("store.keep_days=-1", ["store.keep_days=-1", "for ever"]),
        ("learner.learning_rate=nan", ["learner.learning_rate=nan"]),
        ("nonsense", ["'nonsense'", "key=value"]),
        ("offline.uses=2", ["offline.uses=2", "source=RUN"]),
    ],
)
def test_a_mistake_is_one_line_that_names_the_value(
    empty: Path, override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        configs.load(empty, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.lora_rank=513"], "model.lora_rank=513 is above 512.*model.lora_serving=merged"),
        (
            ["model.lora_rank=8", "learner.transfer=broadcast"],
            "learner.transfer='broadcast' with model.lora_rank=8 would do nothing",
        ),
        (
            ["model.lora_rank=8", "actors.gpus_per_worker=1"],
            "model.dtype='float32' on a GPU.*use model.dtype=bfloat16",
        ),
        (["model.lora_serving=adapters"], "did you mean 'adapter'"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(
    empty: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        configs.load(empty, overrides)


def test_merged_adapters_may_be_of_any_rank_and_be_sent(empty: Path) -> None:
    merged = configs.load(
        empty, ["model.lora_rank=513", "learner.transfer=broadcast", "model.lora_serving=merged"]
    )
    assert not configs.serves_adapters(merged.model)


def test_two_ranks_on_one_gpu_are_refused(empty: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"learner.gpus_per_rank=0.5 with learner.ranks=2 .* NCCL"
    ):
        configs.load(empty, ["learner.gpus_per_rank=0.5", "learner.ranks=2"])


def test_ranks_that_share_a_micro_batch_are_whole_groups(empty: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"learner.ranks=3 .*sequence_parallel=2; set learner.ranks=2"
    ):
        configs.load(empty, ["learner.ranks=3", "learner.sequence_parallel=2"])
    four = configs.load(empty, ["learner.ranks=4", "learner.sequence_parallel=2"])
    assert configs.sequence_groups(four.learner) == 2
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(ConfigError, match=r"sequence_parallel=2 with the vision model"):
        configs.check_model_path(replace(four, model=configs.ModelConfig(path=str(tmp_path))))


def test_a_mistake_of_the_file_is_not_blamed_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("learner: {steps: few}\n")
    for override in ("seed=1", "learner.steps=3"):
        with pytest.raises(ConfigError, match="c.yaml: learner.steps: Value 'few'"):
            configs.load(path, [override])


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
        configs.forbidden_changes(
            config,
            configs.load(empty, ["run_dir=elsewhere", "learner.steps=500", "store.keep_days=3"]),
        )
        == []
    )
    assert configs.forbidden_changes(config, configs.load(empty, ["algorithm.omega=0.5"])) == [
        "algorithm.omega: 1.0 -> 0.5"
    ]


def test_a_run_may_go_on_with_settings_that_do_not_change_what_it_learns(empty: Path) -> None:
    config = configs.load(empty)
    measured = [
        "evaluation.every=7",
        "evaluation.episodes_per_task=3",
        "evaluation.final_episodes_per_task=2",
    ]
    placed = ["learner.keep_versions=9", "learner.threads=3", "learner.transfer=broadcast"]
    assert configs.forbidden_changes(config, configs.load(empty, [*measured, *placed])) == []
    greedy = configs.forbidden_changes(config, configs.load(empty, ["evaluation.temperature=0"]))
    assert greedy == ["evaluation.temperature: 0.4 -> 0.0"], "figures of one run are measured alike"


def test_a_plan_tells_what_is_on_the_disk_from_what_is_in_the_storage() -> None:
    here = Config()
    both = Config(store=configs.StoreConfig(uri="s3://bucket/run"))
    lines = configs.describe_plan(both).splitlines()
    disk, storage = lines.index("disk (run_dir)"), lines.index("storage (store.uri)")
    assert [line.split()[0] for line in lines[disk:]][:6] == [
        *("disk", "checkpoints"),
        *("storage", "checkpoints", "weights", "per"),
    ]
    assert lines[disk + 1] == lines[storage + 1]
    assert "storage" not in configs.describe_plan(here)


def test_a_plan_counts_the_parameters_in_the_name() -> None:
    model = configs.ModelConfig(path="Qwen/Qwen2.5-1.5B-Instruct", dtype="bfloat16")
    plan = configs.describe_plan(Config(model=model, learner=configs.LearnerConfig(zero_stage=1)))
    # 1.5e9 parameters: 2 bytes of weight, 2 and 4 of gradient, 12 of master weights and moments,
    # and DeepSpeed's buffer
    assert f"{(1.5e9 * 20 + 2e9) / 1024**3:.1f} GiB" in plan
    with pytest.raises(ConfigError, match="does not say its size"):
        configs.describe_plan(Config(model=configs.ModelConfig(path="org/model")))


@pytest.mark.parametrize(
    ("dtype", "learner", "per_parameter"),
    [
        ("float32", {}, 16.0),
        ("bfloat16", {"zero_stage": 1}, 20.0),
        # the float32 gradient is not shared out
        ("bfloat16", {"zero_stage": 1, "ranks": 4}, 2 + 2 + 4 + 12 / 4),
        ("bfloat16", {"zero_stage": 2, "ranks": 4}, 2 + 20 / 4),
        ("bfloat16", {"zero_stage": 3, "ranks": 4}, 22 / 4),
        ("bfloat16", {"zero_stage": 3, "ranks": 4, "kl": True}, 22 / 4 + 2 / 4),
        ("bfloat16", {"zero_stage": 2, "ranks": 4, "kl": True}, 2 + 20 / 4 + 2),
        ("bfloat16", {"zero_stage": 1, "offload": True}, 4.0),
        ("bfloat16", {"zero_stage": 1, "lora": True, "kl": True}, 2.0),
    ],
)
def test_a_rank_holds_what_deepspeed_keeps(
    dtype: str, learner: dict[str, Any], per_parameter: float
) -> None:
    config = Config(
        model=configs.ModelConfig(dtype=dtype, lora_rank=16 * learner.pop("lora", False)),
        loss=configs.LossConfig(kl_coef=0.1 * learner.pop("kl", False)),
        learner=configs.LearnerConfig(**learner),
    )
    n_bucket = (
        configs.BUCKET_ELEMENTS if config.learner.zero_stage and not config.model.lora_rank else 0
    )
    # 2 layers of the tiny model, 128 wide, its feed-forward layer 256: 16 bytes for each parameter
    adapters = 16 * 2 * config.model.lora_rank * (2 * 256 + 2 * 256 + 3 * 384)
    assert configs.rank_bytes(config, parameters=1e10) == pytest.approx(
        1e10 * per_parameter + 4 * n_bucket + adapters
    )


def test_every_config_leaves_room_for_activations_on_an_80_gb_gpu() -> None:
    """Use the models' real sizes.

    Checkpointed activations of 16,384 tokens take about a tenth of the memory, of 32,768 a fifth.
    """
    real = {"1.5B": 1.54e9, "3B": 3.09e9, "7B": 7.62e9, "VL-3B": 3.75e9}
    for path in FILES:
        config = configs.load(path)
        if config.learner.gpus_per_rank:
            name = Path(config.model.path).name
            size = max((size for size in real if size in name), key=len)
            room = 80e9 * (0.9 if config.learner.micro_batch_tokens <= 16384 else 0.8)
            assert configs.rank_bytes(config, parameters=real[size]) < room, path.name


@pytest.mark.parametrize(
    ("overrides", "n_gpus"),
    [
        ([], 0),
        (["actors.gpus_per_worker=0.5", "learner.gpus_per_rank=0.5"], 1),
        (["actors.gpus_per_worker=0.3", "actors.workers=2", "learner.gpus_per_rank=0.4"], 1),
        (["actors.gpus_per_worker=0.6", "actors.workers=3"], 3),
        (["actors.gpus_per_worker=0.5", "actors.workers=3", "learner.gpus_per_rank=1"], 3),
        (
            [
                "actors.gpus_per_worker=2",
                "actors.workers=3",
                "learner.gpus_per_rank=1",
                "learner.ranks=2",
            ],
            8,
        ),
    ],
)
def test_processes_may_share_a_gpu(empty: Path, overrides: list[str], n_gpus: int) -> None:
    config = configs.load(empty, overrides)
    assert configs.gpus_needed(config, learns=True) == n_gpus
    assert f"placement ({n_gpus} GPU" in configs.describe_plan(config)
    assert configs.from_yaml(configs.as_yaml(config)) == config


def test_workers_are_a_number_or_a_range(empty: Path) -> None:
    number = configs.load(empty, ["actors.workers=4"])
    assert (configs.least_workers(number.actors), configs.most_workers(number.actors)) == (4, 4)
    for given in (
        ["actors.workers={min: 2, max: 16}"],
        ["actors.workers.min=2", "actors.workers.max=16"],
    ):
        config = configs.load(empty, [*given, "actors.gpus_per_worker=1"])
        assert config.actors.workers == WorkerRange(min=2, max=16)
        assert (configs.least_workers(config.actors), configs.most_workers(config.actors)) == (
            2,
            16,
        )
        assert configs.gpus_needed(config, learns=True) == configs.n_workers(config) == 2
        assert "2 to 16 x 1 GPU" in configs.describe_plan(config)
        assert configs.from_yaml(configs.as_yaml(config)) == config
        assert "max: 16" in configs.differences(config)
        saved = configs.as_yaml(config)
        again = configs.load_saved(saved, ["actors.workers=3"], name="saved")
        assert again.actors.workers == 3
        assert configs.forbidden_changes(config, again) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("={min: 3, max: 2}", "{min: 3, max: 2} is no range: it needs 1 <= min <= max"),
        ("={min: 0, max: 2}", "{min: 0, max: 2} is no range"),
        ("={min: 2, mx: 16}", "Key 'mx' not in 'WorkerRange'. Did you mean: 'max'?"),
        ("={min: 2, max: many}", "'many' of type 'str' could not be converted to Integer"),
        ("={min: 2}", "missing: max"),
        (".max=16", "missing: min"),
        ("=some", "is no whole number, and no range such as {min: 2, max: 16}"),
        ("=2.5", "is no whole number, and no range such as {min: 2, max: 16}"),
        ("=[1]", "is no whole number, and no range such as {min: 2, max: 16}"),
        ("=0", "actors.workers=0 must be above 0"),
    ],
)
def test_a_wrong_number_of_workers_is_refused(empty: Path, given: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        configs.load(empty, [f"actors.workers{given}"])
    assert str(refused.value).startswith("actors.workers")


def test_an_engine_that_shares_a_gpu_has_a_cache_of_its_own_size(empty: Path) -> None:
    shared = ["actors.gpus_per_worker=0.5", "learner.gpus_per_rank=0.5", "actors.kv_cache_gib=3"]
    plan = configs.describe_plan(configs.load(empty, shared))
    assert "1 x 0.5 GPU" in plan and "1 rank x 0.5 GPU" in plan
    assert "3 GiB KV cache; starts if 42% of the GPU is free" in plan


def test_every_estimator_and_anchor_can_be_configured(empty: Path) -> None:
    for choice in (
        "estimator=hgpo",
        "estimator=reinforce_pp_baseline",
        "anchor=similar",
        "anchor=similar_greedy",
        "anchor_versions=window",
        "group_filter=rewards",
    ):
        key, _, value = choice.partition("=")
        config = configs.load(empty, [f"algorithm.{choice}"])
        check_algorithm(config)
        assert getattr(config.algorithm, key) == value


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("estimator=gipgo", ["algorithm.estimator='gipgo'", "did you mean 'gigpo'"]),
        ("gamma=1.5", ["algorithm.gamma=1.5", "[0, 1]"]),
        ("normalise=leave_one", ["leave_one", "leave_one_out"]),
        ("group_filter=reward", ["algorithm.group_filter='reward'", "did you mean 'rewards'"]),
        ("anchor=suffixes", ["suffixes", "did you mean 'suffix'"]),
        ("anchor_history=0", ["algorithm.anchor_history=0", "at least 1"]),
        ("similarity=1.0", ["algorithm.similarity=1.0", "(0, 1)"]),
        ("version_window=-1", ["algorithm.version_window=-1", "within one version"]),
        ("estimator=hgpo anchor=suffix", ["algorithm.estimator='hgpo'", "anchors of its own"]),
    ],
)
def test_gigpos_bounds_are_asked_before_a_start(
    empty: Path, algorithm: str, words: list[str]
) -> None:
    config = configs.load(empty, [f"algorithm.{setting}" for setting in algorithm.split()])
    with pytest.raises(ConfigError) as caught:
        check_algorithm(config)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (
            "estimator=rloo omega=0.3",
            "omega=0.3 does nothing with estimator=rloo; .* default is 1.0.* estimator=gigpo or "
            "graphgpo",
        ),
        ("estimator=grpo gamma=0.9", "gamma=0.9 does nothing with estimator=grpo"),
        ("estimator=graphgpo gamma=0.9", "use estimator=gigpo or hgpo"),
        (
            "estimator=hgpo weighting=trajectories",
            "weighting=trajectories does nothing with estimator=hgpo",
        ),
        ("estimator=dr_grpo normalise=mean", "normalise=mean does nothing with estimator=dr_grpo"),
        (
            "estimator=rloo anchor=suffix anchor_history=2",
            "anchor=suffix does nothing with estimator=rloo",
        ),
        (
            "similarity=0.8",
            "similarity=0.8 does nothing with anchor=state; .* use anchor=similar or "
            "similar_greedy",
        ),
        (
            "anchor_history=2",
            "with anchor=state and estimator=gigpo; .* use anchor=suffix, or estimator=hgpo",
        ),
        ("version_window=0", "version_window=0 does nothing with anchor_versions=mixed"),
        (
            "group_filter=none refill_groups=8",
            "refill_groups=8 does nothing with group_filter=none",
        ),
        # at their defaults
        ("estimator=rloo omega=1.0 gamma=0.95 normalise=mean_std weighting=trajectories", ""),
        ("estimator=hgpo anchor_history=2 gamma=0.5 anchor_versions=window version_window=0", ""),
        ("anchor=similar_greedy similarity=0.8", ""),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(empty: Path, algorithm: str, words: str) -> None:
    overrides = [f"algorithm.{setting}" for setting in algorithm.split()]
    if not words:
        check_algorithm(configs.load(empty, overrides))
        return
    with pytest.raises(ConfigError, match=words):
        check_algorithm(configs.load(empty, overrides))


def some_steps() -> pa.Table:
    """Return random steps of three tasks.

    States recur, actions may be invalid, wins have several lengths, and there are three versions.
    """
    generator, rows = random.Random(0), []
    for traj in range(15):
        n_steps, won = generator.randint(2, 5), generator.random() < 0.5
        for i in range(n_steps):
            row = {
                "group_uid": traj // 5,
                "traj_uid": traj,
                "step_index": i,
                "reward": 10.0 * (won and i == n_steps - 1),
            }
            row |= {
                "is_action_valid": generator.random() < 0.7,
                "state_hash": generator.randrange(3),
                "won": won,
                "final_state_hash": generator.randrange(3) if i == n_steps - 1 else None,
            }
            rows.append(row | {"version_min": generator.randrange(3)})
    values = pa.array([float(number % 7) for number in range(len(rows))])
    return pa.Table.from_pylist(rows).append_column("value", values)


OTHER = {
    "gamma": 0.5,
    "graph_gamma": 0.7,
    "omega": 0.3,
    "normalise": "mean",
    "weighting": "trajectories",
    "anchor": "suffix",
    "anchor_history": 2,
}
OTHER |= {"similarity": 0.5, "anchor_versions": "window", "version_window": 0}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_is_said_to_be_read_changes_advantages_and_nothing_else_does(estimator: str) -> None:
    steps, columns = some_steps(), ["advantage", "episodes_differ", "steps_differ"]

    def computed(**algorithm: Any) -> dict[str, list[float]]:
        config = Config(algorithm=AlgorithmConfig(estimator=estimator, **algorithm))
        return (
            compute_advantages(steps, AdvantageSettings.of(config.algorithm))
            .select(columns)
            .to_pydict()
        )

    def is_read(key: str) -> bool:
        try:
            check_algorithm(
                Config(algorithm=AlgorithmConfig(estimator=estimator, **{key: OTHER[key]}))
            )
        except ConfigError:
            return False
        return True

    # which gigpo refuses as well
    keys = OTHER.keys() - ({"anchor"} if estimator == "hgpo" else set())
    plain = computed()
    assert computed(**{key: OTHER[key] for key in keys if not is_read(key)}) == plain
    for key in filter(is_read, keys):
        assert computed(**{key: OTHER[key]}) != plain, key


def test_what_may_be_switched_off_may_be_infinite(empty: Path) -> None:
    config = configs.load(
        empty, ["loss.numbers.ppo_clip.dual_clip=.inf", "loss.numbers.token_tis.cap=.inf"]
    )
    infinite = float("inf")
    assert config.loss.numbers == {
        "ppo_clip": {"dual_clip": infinite},
        "token_tis": {"cap": infinite},
    }
    assert configs.from_yaml(configs.as_yaml(config)) == config


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        (
            [],
            "loss.policy=behaviour_cloning, not 'ppo_clip'; "
            "max_staleness=99: with 1 every group is too old from learner step 3 on",
        ),
        (
            ["max_staleness=98", "loss.policy=behaviour_cloning"],
            "max_staleness=99: with 98 every group is too old from learner step 100 on",
        ),
        (["max_staleness=99"], "loss.policy=behaviour_cloning, not 'ppo_clip'"),
    ],
)
def test_what_a_scripted_policy_needs_is_said_at_once(
    tmp_path: Path, overrides: list[str], needs: str
) -> None:
    (tmp_path / "c.yaml").write_text("actors: {scripted: true}\nlearner: {steps: 100}")
    with pytest.raises(ConfigError, match=re.escape(f"to be cloned; it needs {needs}") + "$"):
        configs.load(tmp_path / "c.yaml", overrides)
    configs.load(tmp_path / "c.yaml", ["loss.policy=behaviour_cloning", "max_staleness=99"])


@pytest.mark.parametrize(
    "line",
    re.findall(
        r"^(?:python cli/train\.py|gigpo train) (.*)$",
        (FILES[0].parent.parent / "docs/paper.md").read_text(),
        re.M,
    ),
)
def test_a_baseline_of_the_paper_is_a_config_that_can_be_planned(line: str) -> None:
    path, *overrides = line.split()
    config = configs.load(PAPER.parent.parent / path, overrides)
    assert "GPU" in configs.describe_plan(config)


def test_nothing_behind_the_sign_is_an_empty_text() -> None:
    path = FILES[0].parent / "webshop_qwen2.5_1.5b.yaml"
    assert configs.load(path, ["model.path="]).model.path == ""


@pytest.mark.parametrize(
    "name",
    ["20261122_1855", "12:30", "0010", "1e3", "yes", "runs/a #5", ":coffee:", "runs/a: b", "it's"],
)
def test_a_text_is_taken_as_it_is_given(empty: Path, name: str) -> None:
    """YAML reads a number, a truth value, a section or a comment in each of them."""
    assert configs.load(empty, [f"run_dir={name}"]).run_dir == name
    assert configs.load(empty, ["run_dir='quoted'", "model.path="]).run_dir == "quoted"


LAUGHS = b"".join(
    b"%c: &%c [%s]\n" % (97 + n, 97 + n, b", ".join([b"*%c" % (96 + n) if n else b"x"] * 9))
    for n in range(9)
)
MERGED = b"a: &a {x: 1}\n" + b"".join(
    b"%c: &%c {<<: [%s]}\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 21))
    for n in range(5)
)
HOSTILE_TEXTS = [
    (b"18446744073709551616", "holds no settings"),
    (b"[" * 50_000, "nested more than 64 deep|not readable as YAML"),
    (b"a: " + b"[" * 5_000 + b"]" * 5_000, "nested more than 64 deep"),
    (LAUGHS, "stands for 4[0-9,]+ values|stands for [0-9,]+ values"),
    (b"a: &a [*a]", "stands for|not readable as YAML"),
    (MERGED, "stands for [0-9,]+ values|node expansion exceeds"),
    (b"seed: 1" + b":1" * 500_000, "a number of 1,000,001 characters"),
    (b"seed: 1" + b":1" * 100_000 + b".5", "a number of 200,003 characters"),
    (b"seed: !!timestamp x", "not readable as YAML"),
    (b"seed: !!int ''", "not readable as YAML"),
    (b"#" * 2_000_000, "more than 1,048,576 characters"),
    (
        b"!!python/object/apply:os.system ['touch planted']",
        "not readable as YAML|holds no settings",
    ),
]


@pytest.mark.parametrize(
    "text", ["run_dir: ${oc.env:HOME}", "env:\n  options:\n    x: [1, 'a ${seed}']"]
)
def test_the_config_of_a_run_takes_nothing_from_the_readers_environment(
    empty: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match="stands for another value"):
        configs.from_yaml(text)
    with pytest.raises(ConfigError, match="^config.yaml: .* stands for another value"):
        configs.load_saved(text, name="config.yaml")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"- a\n", "holds no settings"), (b"\xff\xfe", "not readable as YAML"), *HOSTILE_TEXTS],
)
def test_a_file_that_is_no_config_is_one_line(empty: Path, content: bytes, words: str) -> None:
    empty.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as problem:
        configs.load(empty)
    assert "\n" not in str(problem.value)
    with pytest.raises(ConfigError, match="is a directory, not a config file"):
        configs.load(empty.parent)


def test_a_run_of_an_older_version_is_refused_in_one_line(tmp_path: Path) -> None:
    text = configs.as_yaml(Config()).replace("group_filter:", "signal:")
    for read in (configs.from_yaml, lambda text: configs.load_saved(text, name="config.yaml")):
        with pytest.raises(ConfigError, match="opens no runs of older ones.*algorithm.signal") as e:
            read(text)
        assert "\n" not in str(e.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_builds_on_its_base_and_overrides_come_last(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    write(
        tmp_path / "below/a.yaml", "seed: 1\nlearner: {steps: 7, threads: 2}\nenv: {max_steps: 3}"
    )
    write(tmp_path / "b.yaml", "base: below/a.yaml\nlearner: {steps: 8}\nsource: [runs/x]")
    path = write(tmp_path / "c.yaml", "base: b.yaml\nenv: {max_steps: 4}")
    config = configs.load(path, ["learner.groups_per_step=2"])
    assert (config.seed, config.learner.steps, config.learner.threads) == (1, 8, 2)
    assert (config.env.max_steps, config.learner.groups_per_step) == (4, 2)
    assert config.source == ["runs/x"]


def test_a_base_of_another_environment_lends_no_options(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "env: {name: textworld, options: {rooms: 3, things: 1}}")
    same = write(tmp_path / "b.yaml", "base: a.yaml\nenv: {options: {rooms: 4}}")
    assert configs.load(same).env.options == {"rooms": 4, "things": 1}
    other = write(tmp_path / "c.yaml", "base: a.yaml\nenv: {name: key_room, options: {x: 1}}")
    assert configs.load(other).env.options == {"x": 1}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"c": "base: c.yaml"}, "base=c.yaml is a circle"),
        (
            {"c": "base: b.yaml", "b": "base: a.yaml", "a": "base: b.yaml"},
            "base=b.yaml is a circle",
        ),
        (
            {"c": "base: nope.yaml"},
            r"base=nope.yaml is no file; give the path .* relative to .*c.yaml",
        ),
        ({"c": "base: [a.yaml]", "a": ""}, "is no file"),
        ({"c": "base: ${oc.env:HOME}"}, "is no file"),
        ({"c": "base: b.yaml", "b": "learner: {stps: 1}"}, "did you mean 'learner.steps'"),
        ({"c": "base: b.yaml", "b": "- x"}, "b.yaml holds no settings"),
    ],
)
def test_a_wrong_base_is_one_line(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        write(tmp_path / f"{name}.yaml", text)
    with pytest.raises(ConfigError, match=words) as caught:
        configs.load(tmp_path / "c.yaml")
    assert "\n" not in str(caught.value)


def test_a_run_s_own_config_has_no_base() -> None:
    with pytest.raises(ConfigError, match="unknown key 'base'"):
        configs.load_saved("base: configs/key_room.yaml", name="config.yaml")


def test_only_what_differs_from_the_defaults_is_shown(empty: Path, tmp_path: Path) -> None:
    assert configs.differences(Config()) == "{}\n"
    overrides = [
        *("loss.policy=gspo", "loss.numbers.gspo.clip_high=.inf", "env.options.a=1", "run_dir=1e3"),
        *("source=runs/a@won", "loss.corrections=[]"),
    ]
    config = configs.load(empty, overrides)
    shown = configs.differences(config)
    assert "gspo:\n      clip_high: .inf" in shown and "learner" not in shown
    assert configs.load(write(tmp_path / "again.yaml", shown)) == config


def test_nested_interpolations_of_a_saved_config_are_not_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refuse them before OmegaConf's parser, which takes 0.4 ms for each character."""
    monkeypatch.setattr(OmegaConf, "create", lambda *_: pytest.fail("it was parsed"))
    nested = "${" * 8000 + "a" + "}" * 8000
    for text in (f"run_dir: '{nested}'", f"a: [1, {{b: '{nested}'}}]", f"? '{nested}'\n: 1"):
        with pytest.raises(ConfigError, match="stands for another value"):
            configs.parse_saved(text, name="a run")


DOUBLED = "env:\n  name: key_room\n  options:\n    a0: xxxxxxxxxx\n" + "".join(
    f"    a{n + 1}: ${{env.options.a{n}}}${{env.options.a{n}}}\n" for n in range(28)
)
LISTS = "env:\n  name: key_room\n  options:\n    a0: [x, x]\n" + "".join(
    f"    a{n + 1}: [{', '.join([repr(f'${{env.options.a{n}}}')] * 10)}]\n" for n in range(8)
)
WIDE = "a: " + "x" * 1000 + "\nb: [" + ", ".join(["'${a}'"] * 2000) + "]\n"
BESIDE = "env:\n  options:\n    a0: xx\n" + "".join(
    f"    a{n + 1}: {f'${{.a{n}}}' * 1000}\n" for n in range(3)
)
ALIKE = (
    "env:\n  options:\n    a: xx\n    c:\n      {one}: '${{env.options.a}}'\n      {other}: ''\n"
)
INDEXED = "env:\n  options:\n    x0: [xx]\n    x1: ['${{{reference}}}']\n"
CHAIN = "".join(f"c{n}: ${{c{n + 1}}}\n" for n in range(1200)) + "c1200: 1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DOUBLED, "stand for one another"),
        (LISTS, "stands for more than"),
        (WIDE, "stands for more than"),
        (BESIDE, "stands for more than"),
        (CHAIN, "stand for one another"),
        ("".join(reversed(CHAIN.splitlines(keepends=True))), "stand for one another"),
        ("a: ${b}\nb: ${a}\n", "stand for one another"),
        ("a: {b: '${a}'}\n", "stand for one another"),
        # OmegaConf finds an element that the measure would not have found.
        *[
            (INDEXED.format(reference=reference), "is no index|in a way that is not known")
            for reference in (
                *("env.options.x0[-1]", "env.options.x0[00]", "env.options.x0[0_0]"),
                *("env.options.x0.-1", "env.options.x0[٠]", "..x0[-1]", "..x0.00", "..x0[+0]"),
                *(".-1", "env.options.x0.٠", "env.options.x0[ 0]", "[env].options.x0[-1]"),
            )
        ],
        (ALIKE.format(one="true", other="'True'"), "two of its keys read 'True'"),
        (ALIKE.format(one="1.5", other="'1.5'"), "two of its keys read '1.5'"),
        (ALIKE.format(one="1", other="'1'"), "Conflicting integer and string keys: 1 and '1'"),
        ("seed: ${oc.select:seed}\n", "in a way that is not known"),
        ("env:\n  options:\n    a: ${env.${b}}\n", "in a way that is not known"),
        ("run_dir: '" + "${" * 2000 + "a" + "}" * 2000 + "'\n", "in a way that is not known"),
    ],
)
def test_interpolations_that_stand_for_too_much_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    """Refuse the file before OmegaConf resolves a value of it."""
    monkeypatch.setattr(OmegaConf, "to_object", lambda *_: pytest.fail("it was resolved"))
    with pytest.raises(ConfigError, match=words):
        configs.load(write(tmp_path / "c.yaml", text))


def test_a_million_backslashes_are_read_at_once(tmp_path: Path) -> None:
    """The attack: searched to the end from each of them, they took more than an hour."""
    text = "\\" * (2**20 - 10_000)
    config = configs.load(write(tmp_path / "c.yaml", f"env:\n  options: {{a: '{text}'}}\n"))
    assert config.env.options["a"] == text
    with pytest.raises(ConfigError, match="in a way that is not known"):
        configs.load(write(tmp_path / "c.yaml", f"seed: '{text}" + "${a:b}'\n"))


def test_files_that_stand_for_too_much_together_are_refused(tmp_path: Path) -> None:
    """Count what a file refers to in the file that it builds on, and what an override does."""
    options = "env:\n  name: key_room\n  options:\n"
    write(tmp_path / "below.yaml", options + f"    a0: {'x' * 2000}\n")
    above = f"base: below.yaml\n{options}    a1: {'${env.options.a0}' * 1000}\n"
    with pytest.raises(ConfigError, match="above.yaml.*stands for more than"):
        configs.load(write(tmp_path / "above.yaml", above))
    many = "${env.options.a0}" * 1000
    with pytest.raises(ConfigError, match="stands for more than"):
        configs.load(tmp_path / "below.yaml", [f"env.options.a1='{many}'"])


def test_a_few_interpolations_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the forms that a person writes, also an escaped one."""
    monkeypatch.setenv("SOME_SEED", "7")
    text = (
        "seed: ${oc.decode:${oc.env:SOME_SEED}}\nrun_dir: runs/${env.name}_${seed}\n"
        "env:\n  name: key_room\n  options: {rooms: 3, n: '${.rooms}', t: '\\${x}', "
        "few: [4, 5, '${.0}'], u: '${env.options.few[1]}', v: '${.few.2}', s: '${learner.steps}'}\n"
    )
    config = configs.load(write(tmp_path / "c.yaml", text))
    assert (config.seed, config.run_dir) == (7, "runs/key_room_7")
    assert config.env.options["n"] == 3
    assert config.env.options["t"] == "${x}"
    assert [config.env.options[name] for name in ("u", "v", "s")] == [5, 4, config.learner.steps]

"""gigpo audit: the advantages of a stored run under other settings."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import configs
import store
from analysis import audit
from analysis import setting_comparison as comparison
from cli.__main__ import main
from cli.output_file import write_new_file
from configs import AlgorithmConfig, Config, LossConfig
from gigpo import (
    PUBLISHED_SETTINGS,
    WHITENED,
    WITH_CRITIC,
    AdvantageSettings,
    advantages_macro,
    compute_advantages,
)
from store import (
    Catalog,
    Group,
    ReusedGroups,
    RunLayout,
    StoreError,
    Trajectory,
    export,
    uid_text,
    write_open_sql,
    write_segment,
)
from store.exchange.offline_import import parse_source, take_sources
from tests.support.store_samples import make_step, make_trajectory, open_train_group

GROUPS, GROUPS_PER_BATCH = 5, 2  # two batches were trained on; the last group waits
IN_GROUPS = "group_uid IN (SELECT group_uid FROM groups WHERE ordinal IN ({}))"


def played(group: Group, member: int) -> Trajectory:
    """2 or 3 steps, the second without a state; only the last has a reward, which is another one in
    every trajectory but for those of group 0. The first action is invalid."""
    n_steps = 2 + member % 2
    paid = 1.0 if group.ordinal == 0 else float(3 * (group.ordinal or 0) + member)
    steps = tuple(
        make_step(i, n_steps=n_steps, version=0, reward=paid if i == n_steps - 1 else 0.0)
        for i in range(n_steps)
    )
    return replace(make_trajectory(group, member), won=member == 0, steps=steps)


def make_run(root: Path, *, config_yaml: str) -> Path:
    layout = RunLayout.create(root, config_yaml=config_yaml)
    write_open_sql(layout, macros=[advantages_macro(PUBLISHED_SETTINGS)], max_staleness=1)
    with Catalog.open(layout) as catalog:

        def commit(group: Group) -> None:
            trajectories = [played(group, member) for member in group.missing]
            catalog.commit(
                write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch),
                epoch=catalog.epoch,
            )

        for ordinal in range(GROUPS):
            commit(open_train_group(catalog, ordinal, size=3))
        for step in (1, 2):
            batch = catalog.claim(n_groups=GROUPS_PER_BATCH, current_version=0, max_staleness=1)
            assert batch is not None
            catalog.settle(batch.batch_id, learner_step=step, filtered={}, version_in=0)
        commit(
            catalog.open_group(
                ordinal=0, task_id="held", split="heldout", size=3, evaluated_version=0
            )
        )
        export(catalog, layout)
    return layout.root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("audit") / "run", config_yaml=configs.as_yaml(Config()))


def rows_of(run: Path, tmp_path: Path, *arguments: str) -> pa.Table:
    table = tmp_path / "rows.parquet"
    assert main(["audit", str(run), *arguments, "--output", str(table)]) == 0
    return pq.read_table(table)


@functools.cache  # a reader takes longer to start than to answer
def stored(run: Path, where: str) -> pa.Table:
    with store.open_run(run) as reader:
        columns = f"{audit.COLUMNS}, anchor_text, admissible_actions"
        return reader.sql(
            f"SELECT {columns} FROM steps WHERE group_uid IN (SELECT group_uid FROM groups WHERE "
            f"{where})"
        )


def assert_same(
    rows: pa.Table, parts: list[pa.Table], settings: AdvantageSettings, *, suffix: str = "a"
) -> None:
    """`rows` are compute_advantages of each part by itself, and no other rows."""
    keys = ["group_uid", "traj_uid", "step_index"]
    expected = pa.concat_tables([compute_advantages(part, settings) for part in parts])
    by_key = [(name, "ascending") for name in keys]
    rows, expected = rows.sort_by(by_key), expected.sort_by(by_key)
    assert rows.select(keys) == expected.select(keys)
    for name in expected.column_names[3:]:
        assert rows[f"{name}_{suffix}"].to_pylist() == pytest.approx(expected[name].to_pylist()), (
            name
        )


def test_two_settings_stand_side_by_side(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(run, tmp_path, "invalid_penalty=5", "--against", "estimator=rloo")
    printed = capsys.readouterr().out
    assert (
        "35 steps" in printed and "invalid_penalty=5.0" in printed and "estimator=rloo" in printed
    )
    steps = stored(run, "split = 'train'")
    assert_same(rows, [steps], replace(PUBLISHED_SETTINGS, invalid_penalty=5.0))
    assert_same(rows, [steps], replace(PUBLISHED_SETTINGS, estimator="rloo"), suffix="b")


@pytest.mark.parametrize("estimator", [name for name in WHITENED if name not in WITH_CRITIC])
@pytest.mark.parametrize("steps_per_read", [4_000_000, 10])
def test_what_is_whitened_is_so_over_each_batch_that_was_trained_on(
    run: Path, tmp_path: Path, estimator: str, steps_per_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whiten the groups of each batch together, and those without a batch apart from the others.

    Held-out groups are left out. The number of steps that are read at once changes nothing.
    """
    monkeypatch.setattr(audit, "STEPS_PER_READ", steps_per_read)
    rows = rows_of(run, tmp_path, f"estimator={estimator}", "--against")
    batches = [
        stored(run, f"split = 'train' AND ordinal IN {ordinals}")
        for ordinals in ("(0, 1)", "(2, 3)", "(4)")
    ]
    settings = replace(PUBLISHED_SETTINGS, estimator=estimator)
    assert_same(rows, batches, settings)
    assert_same(rows, [pa.concat_tables(batches)], PUBLISHED_SETTINGS, suffix="b")
    together = compute_advantages(pa.concat_tables(batches), settings)["advantage"].to_pylist()
    assert sorted(rows["advantage_a"].to_pylist()) != pytest.approx(sorted(together)), (
        "the case tests something"
    )


@pytest.mark.parametrize("estimator", ["gigpo", "reinforce_pp"])
@pytest.mark.parametrize(
    "where", ["reward > 0", f"{IN_GROUPS.format('0')} AND NOT is_action_valid -- a comment"]
)
def test_what_a_step_is_compared_with_does_not_depend_on_the_selection(
    run: Path, estimator: str, where: str
) -> None:
    """Neither its numbers nor whether its group has a signal: trajectories are not cut, groups and
    batches are whole.
    """
    named = {
        "a": audit.Setting(
            advantages=replace(PUBLISHED_SETTINGS, estimator=estimator), group_filter="returns"
        )
    }
    with store.open_run(run) as reader:
        everything = audit.audit_rows(reader, named, where="true")
        selected = audit.audit_rows(reader, named, where=where)
        wanted = reader.sql(f"SELECT traj_uid, step_index FROM steps WHERE {where}\n")
    by_step = {(row["traj_uid"], row["step_index"]): row for row in everything.to_pylist()}
    assert len(by_step) == 42, "15 training and 3 held-out trajectories"
    got = {(row["traj_uid"], row["step_index"]): row for row in selected.to_pylist()}
    assert 0 < len(got) < 42 and got.keys() == {
        (row["traj_uid"], row["step_index"]) for row in wanted.to_pylist()
    }
    assert all(row == pytest.approx(by_step[key]) for key, row in got.items())
    assert {row["passes_filter_a"] for row in everything.to_pylist()} == {True, False}


def test_groups_that_no_batch_has_had_are_whitened_by_split(run: Path) -> None:
    settings = replace(PUBLISHED_SETTINGS, estimator="reinforce_pp")
    with store.open_run(run) as reader:
        named = {"a": audit.Setting(advantages=settings, group_filter="returns")}
        rows = audit.audit_rows(reader, named, where=IN_GROUPS.format("0, 4"))
    # Held-out group 0 by itself, as training group 4; training group 0 in the batch of groups 0 and
    # 1.
    held, waiting = stored(run, "split = 'heldout'"), stored(run, "split = 'train' AND ordinal = 4")
    alone = pa.concat_tables([held, waiting])["group_uid"].unique().to_pylist()
    rows = rows.filter(audit.is_one_of(rows["group_uid"], alone))
    assert_same(rows, [held, waiting], settings)


@pytest.fixture(scope="module")
def offline(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on the first three groups of `run`, each twice: 0 and 1, then 2 and 0, then 1 and
    2.
    """
    layout = RunLayout.create(
        tmp_path_factory.mktemp("offline") / "run", config_yaml=configs.as_yaml(Config())
    )
    write_open_sql(layout, macros=[advantages_macro(PUBLISHED_SETTINGS)], max_staleness=1)
    take_sources(layout.root, [parse_source(f"{run}@ordinal < 3")], order="ordinal")
    with Catalog.open(layout) as catalog:
        for step in (1, 2, 3):
            batch = catalog.claim(
                n_groups=0,
                current_version=0,
                max_staleness=1,
                reused=ReusedGroups(n_offline=2, max_uses=2),
            )
            assert batch is not None
            values = {
                trajectory.traj_uid: [
                    critic_value(step, uid_text(trajectory.traj_uid), index)
                    for index in range(trajectory.n_steps)
                ]
                for segment in batch.segments
                for trajectory in segment.trajectories
            }
            catalog.settle(
                batch.batch_id, learner_step=step, filtered={}, version_in=0, values=values
            )
        export(catalog, layout)
    return layout.root


def critic_value(learner_step: int, traj_uid: str, step_index: int) -> float:
    """Any number: of this step, as the critic saw it at this learner step."""
    return int(traj_uid[-2:], 16) / 100 + learner_step / 3 - step_index / 7


def test_a_stored_group_is_there_once_however_often_it_was_used(
    offline: Path, tmp_path: Path
) -> None:
    """At its last learner step; and without a --where, although it is of no split `train`."""
    rows = rows_of(offline, tmp_path)
    assert_same(rows, [stored(offline, "source IS NOT NULL")], PUBLISHED_SETTINGS)
    ordinals = {group: ordinal for ordinal, group in enumerate(groups_in_order(offline))}
    last = {(ordinals[row["group_uid"]], row["learner_step"]) for row in rows.to_pylist()}
    assert last == {(0, 2), (1, 3), (2, 3)}


def groups_in_order(run: Path) -> list[str]:
    with store.open_run(run) as reader:
        return reader.sql("SELECT group_uid FROM groups WHERE source IS NOT NULL ORDER BY ordinal")[
            "group_uid"
        ].to_pylist()


@pytest.mark.parametrize("steps_per_read", [4_000_000, 10])
def test_what_is_whitened_is_so_over_each_batch_that_a_stored_group_was_in(
    offline: Path, tmp_path: Path, steps_per_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "STEPS_PER_READ", steps_per_read)
    rows = rows_of(offline, tmp_path, "estimator=reinforce_pp", "--against")
    groups = groups_in_order(offline)
    for step, numbers in ((1, (0, 1)), (2, (2, 0)), (3, (1, 2))):
        batch = stored(offline, f"group_uid IN {tuple(groups[number] for number in numbers)}")
        of_step = rows.filter(pc.equal(rows["learner_step"], step))
        assert_same(of_step, [batch], replace(PUBLISHED_SETTINGS, estimator="reinforce_pp"))
        assert_same(of_step, [batch], PUBLISHED_SETTINGS, suffix="b")
    assert len(rows) == 2 * len(stored(offline, "source IS NOT NULL"))


@pytest.mark.parametrize("estimator", WITH_CRITIC)
@pytest.mark.parametrize("steps_per_read", [4_000_000, 10])
def test_a_critics_values_are_those_of_the_learner_step(
    offline: Path,
    tmp_path: Path,
    estimator: str,
    steps_per_read: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that was used twice has advantages over the values of each time."""
    monkeypatch.setattr(audit, "STEPS_PER_READ", steps_per_read)
    rows = rows_of(offline, tmp_path, f"estimator={estimator}", "gae_lambda=0.5")
    settings = replace(PUBLISHED_SETTINGS, estimator=estimator, gae_lambda=0.5)
    groups = groups_in_order(offline)
    for step, numbers in ((1, (0, 1)), (2, (2, 0)), (3, (1, 2))):
        batch = stored(offline, f"group_uid IN {tuple(groups[number] for number in numbers)}")
        keys = zip(batch["traj_uid"].to_pylist(), batch["step_index"].to_pylist(), strict=True)
        values = [critic_value(step, uid, index) for uid, index in keys]
        of_step = rows.filter(pc.equal(rows["learner_step"], step))
        assert "value_target_a" in of_step.column_names
        assert_same(of_step, [batch.append_column("value", pa.array(values))], settings)
    assert len(rows) == 2 * len(stored(offline, "source IS NOT NULL"))


@pytest.mark.parametrize("anchor", ["similar", "similar_greedy"])
def test_groups_are_whole_however_little_is_read_at_once(
    run: Path, tmp_path: Path, anchor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "STEPS_PER_READ", 10)
    steps = stored(run, "split = 'train'")
    ordered = steps.sort_by(
        [(name, "ascending") for name in ("group_uid", "traj_uid", "step_index")]
    )
    assert_same(
        rows_of(run, tmp_path, f"anchor={anchor}"),
        [ordered],
        replace(PUBLISHED_SETTINGS, anchor=anchor),
    )


def test_the_run_itself_and_a_selection(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "audit",
                str(run),
                "--where",
                "group_uid IN (SELECT group_uid FROM groups WHERE ordinal < 2)",
            ]
        )
        == 0
    )
    assert "21 steps" in capsys.readouterr().out, "two training groups and a held-out one, as asked"


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("algorithm: {group_filter: advantages}", "0 of 5 (advantages)"),
        ("algorithm: {group_filter: returns}", "1 of 5 (returns)"),
        ("algorithm: {group_filter: rewards, gamma: 1.0}", "1 of 5 (rewards)"),
    ],
)
def test_a_groups_signal_is_what_the_run_says_it_is(
    tmp_path: Path, algorithm: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(make_run(tmp_path / "run", config_yaml=algorithm))]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_another_filter_says_which_groups_it_would_have_trained_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of group 0 was paid the same. Of 35 steps 7 are in it, with 7 of group 1 in the first
    learner step.
    """
    rows = rows_of(run, tmp_path, "group_filter=returns", "--against", "group_filter=advantages")
    silent = stored(run, "split = 'train' AND ordinal = 0")["group_uid"].unique().to_pylist()
    assert {row["group_uid"] for row in rows.to_pylist() if not row["passes_filter_a"]} == set(
        silent
    )
    assert all(rows["passes_filter_b"].to_pylist()) and rows["advantage_a"] == rows["advantage_b"]
    printed = capsys.readouterr().out
    assert "another sign in" not in printed, (
        "the table says it, of steps that both train on; of all steps it is another number"
    )
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for line in (
        "│ 1 │ 14 │ 50.0% │ 0.0% │ 0.0% │ 0.0% │ 50.0% │",
        "│ 2 │ 14 │ 0.0% │ 0.0% │ 0.0% │ 0.0% │ 100.0% │",
        "│ all │ 35 │ 20.0% │ 0.0% │ 0.0% │ 0.0% │ 80.0% │",
        "b alone trains on 1 groups, a alone on 0",
        f"│ 1 │ {silent[0]} │ task-0 │ b │",
    ):
        assert line in lines, line
    assert rows["learner_step"].null_count == 7, "the last group is in no batch"


def test_a_plot_is_written_beside_the_rows(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "what.svg"
    rows_of(run, tmp_path, "gamma=0.5", "group_filter=returns", "--against", "--plot", str(file))
    texts = [text.text for text in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert (
        "steps trained differently: a (gamma=0.5 group_filter=returns) and b (gamma=0.95 "
        "group_filter=advantages)" in texts
    )
    assert {"1", "2", "in no batch", "learner step", *comparison.CHANGE_KINDS[:-1]} <= set(texts)


def test_a_run_of_a_setting_that_is_gone_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", config_yaml="algorithm: {lambda: 0.5}")
    assert main(["audit", str(run)]) == 2
    error = capsys.readouterr().err
    assert "algorithm.lambda" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["gama=1"], "gama=1"),
        (["gamma=much"], "float"),
        (["gamma=2"], "outside [0, 1]"),
        (["gamma=1", "gamma=0.9"], "'gamma=0.9': gamma is given twice"),
        (["--against", "omega=1", "--against", "omega=1"], "omega is given twice"),
        # before any work
        (["--output", "no/where.parquet", "--where", "nothing = 1"], "there is no directory no;"),
        (["--where", "false"], "no step"),
        (["estimator=turn_ppo"], "no step of the run with a critic's value is one where"),
        (
            ["group_filter=loud"],
            "group_filter='loud' is unknown; it is one of advantages, rewards, returns",
        ),
        (["--plot", "plot.svg"], "--plot plot.svg shows two settings; add --against"),
        (
            ["--plot", "plot.png", "--against"],
            "--plot plot.png: only SVG can be drawn; name it plot.svg",
        ),
        (["--plot", "no/where.svg", "--against"], "there is no directory no;"),
        (
            ["anchor=anchor_key"],
            "reads a column anchor_key, and a stored run has none; in Python, ",
        ),
        (
            ["--against", "anchor_versions=weighted"],
            "reads a column weight, and a stored run has none; in Python, ",
        ),
        (["--where", "nothing = 1"], "nothing"),
        (
            ["estimator=grpo", "gamma=0.5"],
            "gamma=0.5 does nothing with estimator=grpo; leave it out, or use estimator=gigpo or",
        ),
        (
            ["--against", "similarity=0.5"],
            "similarity=0.5 does nothing with anchor=state; leave it out, or use anchor=similar",
        ),
        (
            ["estimator=rloo", "anchor=suffix"],
            "anchor=suffix does nothing with estimator=rloo; leave it out, or use",
        ),
    ],
)
def test_a_mistake_is_one_line(
    run: Path, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run), *arguments]) == 2
    error = capsys.readouterr().err
    assert word in error and len(error.splitlines()) == 1


def test_only_settings_that_are_read_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rloo has no step term, so no discount and no anchor groups."""
    assert main(["audit", str(run), "estimator=rloo"]) == 0
    printed = capsys.readouterr().out
    assert "estimator=rloo" in printed and "group_filter=" in printed
    assert not any(name in printed for name in ("gamma", "omega", "normalise"))
    (sizes,) = [line for line in printed.splitlines() if "anchor group" in line]
    assert sizes.split("│")[2].strip() == "-"
    assert main(["audit", str(run), "estimator=rloo", "--against"]) == 0
    printed = capsys.readouterr().out
    assert "gamma=0.95" in printed and "omega=1.0" in printed, (
        "they are of the run's own, which has both"
    )


def test_a_file_that_is_there_is_not_written_over(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["audit", str(run), "--output", str(tmp_path / "mine")]) == 2
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_output_is_whole_or_absent(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of it is written when the disk is full: the same command goes through once there is
    space.
    """
    file, write = tmp_path / "rows.parquet", pq.write_table

    def half(table: pa.Table, where: BinaryIO, **options: str) -> None:
        write(table, where, **options)
        where.truncate(where.tell() // 2)
        assert not file.exists(), "a process that is killed here leaves no file of that name"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", half)
        assert main(["audit", str(run), "--output", str(file)]) == 2
    error = capsys.readouterr().err
    assert str(file) in error and len(error.splitlines()) == 1 and list(tmp_path.iterdir()) == []
    assert len(rows_of(run, tmp_path)) == 35
    assert list(tmp_path.iterdir()) == [file]


def test_an_output_of_another_process_meanwhile_is_not_written_over(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(StoreError, match="mine exists; name another file"):
        write_new_file(
            "--output", tmp_path / "mine", write=lambda file: file.write(b"theirs"), run=run
        )
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("command", ["sql", "audit"])
def test_an_output_is_written_through_no_link_that_was_there_before(
    run: Path, tmp_path: Path, command: str
) -> None:
    """The attack: who reads the process id puts a link under the name of the unfinished file."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    names = [f".rows.parquet.{os.getpid()}.tmp", ".rows.parquet.tmp", "rows.parquet.tmp"]
    for name in names:
        (tmp_path / name).symlink_to(precious)
    words = ["SELECT 1 AS a", "--format", "parquet"] if command == "sql" else []
    file = tmp_path / "rows.parquet"
    assert main([command, str(run), *words, "--output", str(file)]) == 0
    assert precious.read_text() == "mine" and not file.is_symlink()
    assert len(pq.read_table(file)) == (1 if command == "sql" else 35)
    assert {path.name for path in tmp_path.iterdir()} == {"precious", "rows.parquet", *names}


def test_an_output_is_written_through_no_link_that_comes_while_it_is_written(
    run: Path, tmp_path: Path
) -> None:
    precious, directory = tmp_path / "precious", tmp_path / "shared"
    directory.mkdir()
    precious.write_text("mine")

    def exchanged(file: BinaryIO) -> None:
        (unfinished,) = directory.iterdir()
        unfinished.unlink()
        unfinished.symlink_to(precious)
        file.write(b"rows")

    with pytest.raises(StoreError, match="rows: another user put something else in its place"):
        write_new_file("--output", directory / "rows", write=exchanged, run=run)
    assert precious.read_text() == "mine"


def test_steps_by_the_size_of_their_anchor_group(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every third step of an anchor group is selected, and counts as one of a group of three."""
    assert audit.shares_by_size({1: 5, 3: 2, 5: 3}) == "1: 50.0%\n2 to 3: 20.0%\n4 to 5: 30.0%"
    assert audit.shares_by_size({1: 4}) == "1: 100.0%"
    assert main(["audit", str(run), "--where", "step_index = 0 AND won AND split = 'train'"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "5 steps" in said
        and "steps by the size of their anchor group │ 1: 0.0%" in said
        and "2 to 3: 100.0%" in said
    )


@pytest.mark.parametrize("policy", ["ppo_clip", "behaviour_cloning", "distillation"])
def test_no_group_is_left_out_of_a_run_whose_loss_reads_no_advantages(policy: str) -> None:
    config = Config(loss=LossConfig(policy=policy))
    used = audit.Setting.of(config).group_filter
    assert used == (config.algorithm.group_filter if policy == "ppo_clip" else "none")
    assert config.algorithm.group_filter != "none"


def test_a_run_has_the_published_settings_unless_it_says_otherwise() -> None:
    assert AdvantageSettings.of(AlgorithmConfig()) == PUBLISHED_SETTINGS
    other = replace(
        PUBLISHED_SETTINGS, estimator="rloo", gamma=0.5, anchor_history=4, version_window=7
    )
    given = AlgorithmConfig(estimator="rloo", gamma=0.5, anchor_history=4, version_window=7)
    assert AdvantageSettings.of(given) == other


def test_an_audit_does_not_load_what_trains() -> None:
    """It would take longer than most audits."""
    lines = [
        line
        for module in (audit, comparison)
        for line in Path(module.__file__).read_text().splitlines()
    ]
    imported = {line.split()[1] for line in lines if line.startswith(("import", "from"))}
    assert imported.isdisjoint({"learner", "actors"})

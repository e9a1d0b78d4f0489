"""gigpo bias: what was dropped against what was trained on, and the permutation test below it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analysis.bias.permutation_test import (
    Units,
    _permuted,
    difference_of_tasks,
    differences_of_means,
    holm,
)
from analysis.bias.report import MEASURES, TASKS, BiasReport, bias_report
from cli.__main__ import main
from store import (
    EXTRA_OF,
    Catalog,
    Group,
    RunLayout,
    Trajectory,
    export,
    uid,
    uid_text,
    write_open_sql,
    write_segment,
)
from store.catalog.imported_groups import ImportedSegment
from tests.support.store_runs import copy_run
from tests.support.store_samples import make_step, make_trajectory, make_unfinished

# steps of the members of each group
TRAINED = ((2, 3), (3, 3), (2, 2), (3, 2), (3, 3), (2, 3), (2, 2), (3, 3))
# all longer; the last was given up with one member of two
STALE = ((5, 6), (6, 6), (5, 5), (6, 5), (6, 6), (5,))
NO_SIGNAL = ((2, 2), (3, 3), (2, 2), (3, 3), (2, 3))
EXTRA = (4, 4, 4, 3, 4)  # of the first trained groups


def units(
    sums: Sequence[float],
    *,
    n_dropped: int,
    sizes: Sequence[int] | None = None,
    stratum: Sequence[int] | None = None,
) -> Units:
    """The first ones are dropped. One measure; every unit is of a task of its own."""
    n = len(sums)
    return Units(
        stratum_U=np.zeros(n, np.int64) if stratum is None else np.array(stratum),
        dropped_U=np.arange(n) < n_dropped,
        sizes_U=np.ones(n) if sizes is None else np.array(sizes, float),
        sums_UM=np.array(sums, float)[:, None],
        task_U=np.arange(n),
    ).comparable()


def played(group: Group, member: int, *, n_steps: int, paid: float, version: int = 1) -> Trajectory:
    steps = tuple(
        make_step(i, n_steps=n_steps, version=version, reward=paid * (i == n_steps - 1))
        for i in range(n_steps)
    )
    return replace(make_trajectory(group, member), won=paid > 0, steps=steps)


class Run:
    """Write groups whose members have the lengths it is told, under policy version `version`."""

    version = 1

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout.create(root, config_yaml="a: 1\n")
        write_open_sql(self.layout, macros=(), max_staleness=1)

    def open(self, catalog: Catalog, task: str, *, size: int, split: str = "train") -> Group:
        version = 0 if split == "heldout" else None
        ordinal = catalog.next_ordinal(split, evaluated_version=None) if version is None else 0
        return catalog.open_group(
            ordinal=ordinal, task_id=task, split=split, size=size, evaluated_version=version
        )

    def commit(
        self, catalog: Catalog, groups: Sequence[tuple[Group, Sequence[int]]], *, paid: float
    ) -> None:
        rows = [
            played(group, member, n_steps=n_steps, paid=paid, version=self.version)
            for group, lengths in groups
            for member, n_steps in enumerate(lengths)
        ]
        catalog.commit(
            write_segment(self.layout, rows, worker="w0", epoch=catalog.epoch), epoch=catalog.epoch
        )

    def drop(
        self,
        catalog: Catalog,
        groups: Sequence[Sequence[int]],
        *,
        task: str,
        state: str,
        size: int,
        paid: float,
    ) -> None:
        """Given up with so many of `size` members."""
        opened = [(self.open(catalog, task, size=size), lengths) for lengths in groups]
        for _ in opened:
            assert catalog.lease_open_group(worker="w0", lease_s=60.0) is not None
        if any(groups):
            self.commit(catalog, opened, paid=paid)
        for group, _ in opened:
            catalog.give_up(group.group_uid, worker="w0", state=state, reason="too slow")

    def train(
        self,
        catalog: Catalog,
        groups: Sequence[Sequence[int]],
        *,
        tasks: Sequence[str],
        filtered: bool = False,
    ) -> list[Group]:
        opened = [
            (self.open(catalog, task, size=len(lengths)), lengths)
            for task, lengths in zip(tasks, groups, strict=True)
        ]
        self.commit(catalog, opened, paid=0.0 if filtered else 1.0)
        batch = catalog.claim(n_groups=len(groups), current_version=self.version, max_staleness=1)
        assert batch is not None
        silent = {group.group_uid: "alike" for group, _ in opened} if filtered else {}
        catalog.settle(
            batch.batch_id, learner_step=batch.batch_id, filtered=silent, version_in=self.version
        )
        return [group for group, _ in opened]

    def extra(self, catalog: Catalog, group: Group, n_steps: int) -> None:
        """Import one extra episode of a group, as the coordinator does."""
        alone = uid(group.traj_uids[0], "extra", n_steps)
        one = replace(
            played(group, 0, n_steps=n_steps, paid=1.0),
            group_uid=alone,
            traj_uid=uid(alone, 0),
            member=0,
            split="imported",
        )
        segment = write_segment(self.layout, [one], worker="w0", epoch=catalog.epoch)
        known = (Group.imported(group_uid=alone, task_id=group.task_id, size=1),)
        source = f"{EXTRA_OF} {uid_text(group.group_uid)}"
        extra = ImportedSegment(segment=segment, groups=known, source=source, own=False)
        catalog.import_segments([extra])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(tmp_path_factory.mktemp("bias") / "run")
    with Catalog.open(run.layout) as catalog:
        trained = run.train(
            catalog, TRAINED, tasks=[f"task-{number % 2}" for number in range(len(TRAINED))]
        )
        run.train(catalog, NO_SIGNAL, tasks=["task-0", "task-1"] * 2 + ["task-1"], filtered=True)
        run.drop(catalog, STALE, task="task-2", state="stale", size=3, paid=1.0)
        run.drop(catalog, [(4,), ()], task="task-0", state="abandoned", size=2, paid=1.0)
        for group, n_steps in zip(trained, EXTRA, strict=False):
            run.extra(catalog, group, n_steps)
        # None of these counts: held out, still to be trained on, still to be played, another run's.
        run.commit(
            catalog, [(run.open(catalog, "held", size=2, split="heldout"), (40, 40))], paid=0.0
        )
        waits = run.open(catalog, "task-0", size=2)
        run.extra(catalog, waits, 30)  # extra, but of a group that was not trained on
        run.commit(
            catalog, [(waits, (40, 40)), (run.open(catalog, "task-0", size=2), (40,))], paid=0.0
        )
        alone = uid(b"other", "run")
        other = replace(
            played(waits, 0, n_steps=40, paid=0.0),
            group_uid=alone,
            traj_uid=uid(alone, 0),
            split="imported",
        )
        imported = ImportedSegment(
            segment=write_segment(run.layout, [other], worker="w0", epoch=catalog.epoch),
            groups=(Group.imported(group_uid=alone, task_id="task-0", size=2),),
            source="run another",
            own=False,
        )
        catalog.import_segments([imported])
        export(catalog, run.layout)
    return run.layout.root


@pytest.fixture(scope="module")
def report(root: Path) -> BiasReport:
    return bias_report(root, as_of=None, where=None)


def test_the_means_of_each_kind_are_those_of_its_trajectories(report: BiasReport) -> None:
    assert MEASURES == ("n_steps", "n_response_tokens", "episode_return", "won")
    kinds = {kind.name: kind for kind in report.kinds}
    for name, lengths, paid, n_tasks, n_groups in (
        ("trained", list(itertools.chain(*TRAINED)), 1.0, 2, 8),
        ("stale", list(itertools.chain(*STALE)), 1.0, 1, 6),
        ("filtered", list(itertools.chain(*NO_SIGNAL)), 0.0, 2, 5),
        ("abandoned", [4], 1.0, 1, 1),
        ("extra", [*EXTRA, 30], 1.0, 2, 6),
    ):
        kind, mean = kinds[name], np.mean(lengths)
        assert (kind.n_groups, kind.n_trajectories, kind.n_tasks) == (
            n_groups,
            len(lengths),
            n_tasks,
        ), name
        assert kind.means == pytest.approx((mean, 2 * mean, paid, paid)), name  # two tokens a step
    assert report.n_unseen == {"abandoned": 1}
    assert report.not_compared == {
        "abandoned": "1 groups beside 8 trained ones, too few to compare; it takes 5 of each"
    }


def test_planted_length_and_task_biases_are_found_and_nothing_else(report: BiasReport) -> None:
    rows = {(row.kind, row.measure): row for row in report.comparisons}
    stale = rows["stale", "n_steps"].difference
    assert stale.dropped == pytest.approx(np.mean(list(itertools.chain(*STALE))))
    assert stale.kept == pytest.approx(np.mean(list(itertools.chain(*TRAINED))))
    tasks = rows["stale", TASKS]
    assert (tasks.task, tasks.difference.dropped, tasks.difference.kept) == ("task-2", 1.0, 0.0)
    found = {
        key for key, row in rows.items() if row.p_corrected is not None and row.p_corrected < 0.05
    }
    assert found == {("stale", "n_steps"), ("stale", "n_response_tokens"), ("stale", TASKS)}
    assert {key for key, row in rows.items() if row.p_corrected is None} == {
        ("filtered", "episode_return"),
        ("filtered", "won"),
    }
    # 4 - 2.5, 4 - 3, 4 - 2, 3 - 2.5, 4 - 3: each beside its own group, which is of three with it.
    extra = rows["extra", "n_steps"].difference
    assert extra.dropped - extra.kept == pytest.approx(1.2)
    assert extra.p == pytest.approx((1 / 3) ** 5, abs=0.01), (
        "the longest of three in each of five groups"
    )


def test_the_command_says_it_in_words(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bias", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "stale trajectories are 2.983 steps longer (p = " in lines[-3]
    assert "stale trajectories have 5.966 response tokens more (p = " in lines[-2]
    assert (
        "stale groups are of other tasks; task-2, most of all, is 100.0% of the groups, 0.0% of "
        "the trained ones" in lines[-1]
    )
    assert any(
        line.split()[:2] == ["filtered", "won"] and line.endswith("by definition") for line in lines
    )
    assert "groups of which no trajectory is stored, or no longer: 1 abandoned" in lines
    assert main(["bias", str(root), "--where", "state <> 'stale' AND split <> 'imported'"]) == 0
    said = capsys.readouterr().out
    assert "stale: none" in said and "extra: none" in said and "filtered" in said
    assert said.splitlines()[-1] == "no difference beyond chance"
    assert main(["bias", str(root), "--where", "false"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing to compare"
    assert main(["bias", str(root), "--where", "no_such = 1"]) == 2
    assert "no_such" in capsys.readouterr().err
    assert main(["bias", str(root), "--where", "true) OR (false"]) == 2
    assert "is no SQL expression" in capsys.readouterr().err


STRAGGLERS = (5, 6, 5, 7, 6, 5)  # steps of the one of each group, so far


def run_with_stragglers(root: Path) -> RunLayout:
    """Six trained groups with a straggler each, and failed attempts that are as long as the
    members.
    """
    run = Run(root)
    with Catalog.open(run.layout) as catalog:
        trained = run.train(catalog, [(2, 3)] * len(STRAGGLERS), tasks=["a", "b"] * 3)
        slow = [
            make_unfinished(group, 2, n_steps=n, n_response_tokens=2 * n)
            for group, n in zip(trained, STRAGGLERS, strict=True)
        ]
        failed = [
            make_unfinished(group, 0, why="failed", n_steps=2, n_response_tokens=5)
            for group in trained
        ]
        lost = make_unfinished(
            trained[0], 1, why="worker_lost", n_steps=None, n_response_tokens=None
        )
        open_group = run.open(catalog, "a", size=2)
        stopped = make_unfinished(open_group, 0, why="stopped", n_steps=40)
        held = run.open(catalog, "held", size=1, split="heldout")
        catalog.record_unfinished(
            [*slow, *failed, lost, stopped, make_unfinished(held, 0, n_steps=90)], worker="w0"
        )
        export(catalog, run.layout)
    return run.layout


def test_stragglers_that_got_further_than_the_members_of_their_groups_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = run_with_stragglers(tmp_path / "run")
    report = bias_report(layout.root, as_of=None, where=None)
    kinds = {kind.name: kind for kind in report.kinds}
    mean = np.mean(STRAGGLERS)
    assert (
        kinds["straggler"].n_groups,
        kinds["straggler"].n_trajectories,
        kinds["straggler"].n_tasks,
    ) == (6, 6, 2)
    assert kinds["straggler"].means == pytest.approx((mean, 2 * mean)), (
        "an episode that did not end has no return"
    )
    assert kinds["failed"].means == (2.0, 5.0)
    assert kinds["stopped"].n_trajectories == 1 and "worker_lost" not in kinds, (
        "nobody knows how far that one got"
    )
    assert (
        report.not_compared["stopped"]
        == "0 trained groups have stopped episodes, too few to compare; it takes 5"
    )
    rows = {(row.kind, row.measure): row for row in report.comparisons}
    assert set(rows) == {
        (kind, measure)
        for kind in ("straggler", "failed")
        for measure in ("n_steps", "n_response_tokens")
    }
    steps = rows["straggler", "n_steps"].difference
    assert (steps.dropped, steps.kept) == pytest.approx((mean, 2.5))
    assert steps.p == pytest.approx((1 / 3) ** 6, abs=0.01), (
        "the longest of three in each of six groups"
    )
    assert rows["failed", "n_steps"].difference.p > 0.1
    assert main(["bias", str(layout.root)]) == 0
    said = capsys.readouterr().out
    assert (
        f"straggler episodes had {mean - 2.5:.4g} more steps when they were given up than the "
        "members" in said
    )
    assert main(["bias", str(layout.root), "--where", "task_id = 'b'"]) == 0
    assert (
        "straggler: 3 trained groups have straggler episodes, too few to compare"
        in capsys.readouterr().out
    )


def test_as_of_an_earlier_moment(root: Path, tmp_path: Path, report: BiasReport) -> None:
    copy = copy_run(RunLayout.open(root), tmp_path / "copy")
    with Catalog.open(copy) as catalog:
        # what waited is stale now
        assert catalog.claim(n_groups=1, current_version=9, max_staleness=1) is None
        export(catalog, copy)
    now, before = (bias_report(copy.root, as_of=lsn, where=None) for lsn in (None, report.lsn))
    assert [kinds.n_groups for kinds in now.kinds][:2] == [8, 7]
    assert [kinds.n_groups for kinds in before.kinds][:2] == [8, 6]


def test_members_of_a_group_are_not_independent(tmp_path: Path) -> None:
    """Four of five stale groups are long, and two of six trained ones. As 132 trajectories that
    would be a finding.
    """
    run = Run(tmp_path / "run")
    stale, trained = [9, 9, 9, 2, 9], [2, 9, 2, 2, 2, 9]
    with Catalog.open(run.layout) as catalog:
        run.train(catalog, [[n] * 12 for n in trained], tasks=["a"] * 6)
        run.drop(catalog, [[n] * 12 for n in stale], task="a", state="stale", size=13, paid=1.0)
        export(catalog, run.layout)
    row = next(
        row
        for row in bias_report(run.layout.root, as_of=None, where=None).comparisons
        if row.measure == "n_steps"
    )
    assert row.difference.dropped - row.difference.kept > 3
    # There are C(11, 5) = 462 choices of five: 81 have four or five of the six long groups, and 81
    # have at most one.
    assert 0.1 < row.difference.p < 0.5
    (alone,) = differences_of_means(
        units(np.repeat([*stale, *trained], 12), n_dropped=60), seed=0, permutations=500
    )
    assert alone.p < 0.005, "the case tests something"


def test_what_a_policy_learnt_meanwhile_is_no_bias(tmp_path: Path) -> None:
    """Episodes are of 6 steps by the time that groups get dropped, dropped or not."""
    run = Run(tmp_path / "run")
    with Catalog.open(run.layout) as catalog:
        run.train(catalog, [(2,)] * 10, tasks=["a"] * 10)
        run.version = 7
        run.train(catalog, [(6,)] * 10, tasks=["a"] * 10)
        run.drop(catalog, [(6,)] * 5, task="a", state="stale", size=2, paid=1.0)
        export(catalog, run.layout)
    report = bias_report(run.layout.root, as_of=None, where=None)
    assert [kind.means[0] for kind in report.kinds[:2]] == [4.0, 6.0]
    steps = report.comparisons[0].difference
    assert (steps.dropped, steps.kept, steps.p) == (6.0, 6.0, 1.0)


def t_by_hand(sums: Sequence[float], sizes: Sequence[int], dropped: Sequence[int]) -> float:
    """Difference of the means over trajectories, over the root of the squared sums of residuals of
    each side; of the dropped at least what all have for as many trajectories."""
    kept = [unit for unit in range(len(sums)) if unit not in dropped]
    n, m = (sum(sizes[unit] for unit in side) for side in (dropped, kept))
    mean, kept_mean = (
        sum(sums[unit] for unit in side) / size for side, size in ((dropped, n), (kept, m))
    )
    of_dropped = sum((sums[unit] - mean * sizes[unit]) ** 2 for unit in dropped)
    of_all = sum(
        (total - sum(sums) / (n + m) * size) ** 2 for total, size in zip(sums, sizes, strict=True)
    )
    squares = max(of_dropped, of_all * n / (n + m)) / n**2
    squares += sum(((sums[unit] - kept_mean * sizes[unit]) / m) ** 2 for unit in kept)
    return (mean - kept_mean) / math.sqrt(squares)


def test_the_p_value_is_the_share_of_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, sizes = [9.0, 2.0, 9.0, 2.0, 7.0, 5.0, 9.0, 1.5], [2, 1, 3, 1, 4, 2, 3, 1]
    observed = abs(t_by_hand(sums, sizes, (0, 1, 2)))
    choices = [
        abs(t_by_hand(sums, sizes, chosen)) for chosen in itertools.combinations(range(8), 3)
    ]
    exact = sum(value >= observed - 1e-9 for value in choices) / len(choices)
    assert 0.02 < exact < 0.5, "the case tests something"
    for cells_at_once in (2**18, 100):
        monkeypatch.setattr("analysis.bias.permutation_test.CELLS_AT_ONCE", cells_at_once)
        (difference,) = differences_of_means(
            units(sums, sizes=sizes, n_dropped=3), seed=1, permutations=5000
        )
        assert difference.dropped == pytest.approx(20 / 6) and difference.kept == pytest.approx(
            24.5 / 11
        )
        assert difference.p == pytest.approx(exact, abs=0.02)


def test_each_is_compared_within_its_stratum_and_a_stratum_of_one_side_says_nothing() -> None:
    """Stratum 0: two dropped beside 1 and 3. Stratum 1: one beside 10. The last two have nobody to
    be compared with.
    """
    given = units([5, 6, 20, 100, 1, 3, 10, -100], n_dropped=4, stratum=[0, 0, 1, 2, 0, 0, 1, 3])
    (difference,) = differences_of_means(given, seed=0, permutations=99)
    assert difference.dropped == pytest.approx(31 / 3)
    assert difference.kept == pytest.approx((2 + 2 + 10) / 3)
    # A difference between strata does not count: 50 against 1, because most of the dropped are of
    # stratum 1.
    level = units([1, 50, 50, 50, 1, 1, 1, 50], n_dropped=4, stratum=[0, 1, 1, 1, 0, 0, 0, 1])
    (none,) = differences_of_means(level, seed=0, permutations=99)
    assert (none.dropped - none.kept, none.p) == (0.0, 1.0)


def test_p_values_are_uniform_where_there_is_no_difference() -> None:
    """Groups of 8 whose members have something in common: 300 runs, the shares within four standard
    errors.
    """
    random, n_runs, p_values = np.random.default_rng(3), 300, []
    for _ in range(n_runs):
        sums = 8 * (10 + 0.3 * random.normal(size=40)) + np.sqrt(8) * random.normal(size=40)
        (difference,) = differences_of_means(
            units(sums.tolist(), sizes=[8] * 40, n_dropped=10), seed=5, permutations=99
        )
        p_values.append(difference.p)
    for level in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9):
        assert abs(np.mean(np.array(p_values) <= level) - level) < 4 * math.sqrt(
            level * (1 - level) / n_runs
        ), level


@pytest.mark.parametrize(
    ("n_dropped", "n_kept", "size"), [(5, 30, 1), (10, 60, 1), (20, 20, 1), (10, 100, 2)]
)
def test_dropped_groups_that_are_smaller_do_not_pass_for_different(
    n_dropped: int, n_kept: int, size: int
) -> None:
    """Win one trajectory in ten, in groups of 8 and in small unfinished ones."""
    random, sizes = np.random.default_rng(3), np.array([size] * n_dropped + [8] * n_kept)
    samples = [
        units(random.binomial(sizes, 0.1).tolist(), sizes=sizes.tolist(), n_dropped=n_dropped)
        for _ in range(200)
    ]
    p_values = np.array(
        [differences_of_means(sample, seed=5, permutations=99)[0].p for sample in samples]
    )
    for level in (0.05, 0.1):
        assert np.mean(p_values <= level) < level + 2 * math.sqrt(
            level * (1 - level) / len(samples)
        ), level


def test_small_groups_that_differ_are_found_all_the_same() -> None:
    """None of 10 lone trajectories is won, and half of the others are: alike as they are, that is
    no chance.
    """
    sizes = [1] * 10 + [8] * 30
    given = units([0] * 10 + [2, 4, 6] * 10, sizes=sizes, n_dropped=10)
    assert differences_of_means(given, seed=0, permutations=499)[0].p < 0.05


@pytest.mark.parametrize(("n_dropped", "n_tasks"), [(5, 1000), (400, 2)])
def test_permutations_are_held_a_few_at_a_time(
    n_dropped: int, n_tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each needs a row of the dropped units, and one of the tasks: no more than so many cells of
    either.
    """
    monkeypatch.setattr("analysis.bias.permutation_test.CELLS_AT_ONCE", 4000)
    given = replace(units([0.0] * 1000, n_dropped=n_dropped), task_U=np.arange(1000) % n_tasks)
    drawn = list(_permuted(given, seed=0, permutations=23))
    assert max(len(chosen) for chosen in drawn) * max(n_dropped, n_tasks) <= 4000
    assert sum(map(len, drawn)) == 23


def test_tasks_are_counted_by_group() -> None:
    """Three of four dropped are of task 0, and two of six kept: against all choices of four."""
    tasks = np.array([0, 0, 0, 1, 0, 0, 1, 1, 2, 2])
    given = replace(units(np.zeros(10), n_dropped=4), task_U=tasks)

    def chi_square(chosen: Sequence[int]) -> float:
        total, squares = np.bincount(tasks), 0.0
        for side, size in (
            (list(chosen), 4),
            ([unit for unit in range(10) if unit not in chosen], 6),
        ):
            expected = total * size / 10
            squares += float(
                (((np.bincount(tasks[side], minlength=3) - expected) ** 2) / expected).sum()
            )
        return squares

    choices = [chi_square(chosen) for chosen in itertools.combinations(range(10), 4)]
    exact = np.mean(np.array(choices) >= chi_square(range(4)) - 1e-9)
    task, difference = difference_of_tasks(given, seed=0, permutations=5000)
    assert (task, difference.dropped, difference.kept) == (0, 0.75, pytest.approx(1 / 3))
    assert difference.p == pytest.approx(exact, abs=0.02) and 0.05 < exact < 0.95


@pytest.mark.parametrize("n_dropped", [[2, 2, 1, 3, 1], [4, 0, 5, 0, 0]])
def test_every_choice_within_the_strata_is_as_likely(n_dropped: list[int]) -> None:
    """Strata of 2 to 6 units, few dropped of many strata or many of few: how often each unit, and
    each pair, is drawn.
    """
    sizes = [4, 3, 6, 5, 2]
    stratum = np.repeat(np.arange(5), sizes)
    dropped = np.concatenate(
        [np.arange(size) < k for size, k in zip(sizes, n_dropped, strict=True)]
    )
    n = len(stratum)
    given = Units(
        stratum_U=stratum,
        dropped_U=dropped,
        sizes_U=np.ones(n),
        sums_UM=np.zeros((n, 1)),
        task_U=stratum,
    ).comparable()
    drawn = np.zeros((5000, len(given.stratum_U)))
    for row, chosen in enumerate(np.concatenate(list(_permuted(given, seed=0, permutations=5000)))):
        drawn[row, chosen] = 1
    together = drawn.T @ drawn / 5000
    k_S, n_S = (
        np.bincount(values)[given.stratum_U]
        for values in (given.stratum_U[given.dropped_U], given.stratum_U)
    )
    assert np.diag(together) == pytest.approx(k_S / n_S, abs=0.03)
    same = given.stratum_U[:, None] == given.stratum_U
    pairs = np.where(
        same,
        (k_S * (k_S - 1) / np.maximum(1, n_S * (n_S - 1)))[:, None],
        np.outer(k_S / n_S, k_S / n_S),
    )
    np.fill_diagonal(pairs, k_S / n_S)
    assert together == pytest.approx(pairs, abs=0.03)


def test_a_correction_for_the_number_of_comparisons() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []

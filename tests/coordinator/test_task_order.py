"""Test tasks drawn by weight: what the weights see, how they are drawn, and what a kill changes."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import configs
from configs import Config, ConfigError
from coordinator import Coordinator, Lease, Settlement, check_order
from coordinator.environment_order import EnvironmentOrder
from coordinator.task_order import COLUMNS, draw_order, weigh
from envs import list_tasks
from store import (
    CheckpointRecord,
    RunLayout,
    VersionRecord,
    export,
    open_run,
    write_open_sql,
    write_segment,
)
from store.maintenance.fsck import CATALOG, check
from tests.support.store_samples import make_step, make_trajectory

GROUPS_PER_STEP = 6
SIZE = 4


TWO = {  # a third of the groups are of the rooms
    "rooms": {"weight": 1, "env": {"name": "key_room"}},
    "halls": {"weight": 2, "env": {"name": "key_room", "max_steps": 20}},
}


def config_of(run: Path, order: str, environments: dict[str, dict[str, Any]]) -> Config:
    config = Config(run_dir=str(run), max_staleness=3, seed=5)
    return replace(
        config,
        env=configs.EnvConfig(name="key_room"),
        tasks=configs.TasksConfig(order=order),
        environments=environments,
        algorithm=replace(config.algorithm, group_size=SIZE),
        learner=replace(config.learner, groups_per_step=GROUPS_PER_STEP, keep_versions=8),
        evaluation=replace(config.evaluation, every=0),
    )


class Run:
    """A run whose policy wins a third of the tasks always, a third never and a third half."""

    def __init__(
        self, root: Path, order: str, *, environments: dict[str, dict[str, Any]] | None = None
    ) -> None:
        config = config_of(root, order, environments or {})
        configs.check(config)
        if not RunLayout.exists(root):
            layout = RunLayout.create(root, config_yaml=configs.as_yaml(config))
            write_open_sql(layout, macros=[], max_staleness=config.max_staleness)
        self.coordinator = Coordinator(config, learns=True)
        self.layout, self.catalog = self.coordinator.layout, self.coordinator.catalog
        train = list_tasks("key_room", {})["train"]
        self.n_won = {task.id: (0, SIZE // 2, SIZE)[n % 3] for n, task in enumerate(train)}
        for name in environments or ():
            self.n_won |= {f"{name}/{task.id}": self.n_won[task.id] for task in train}

    def publish(self, learner_step: int) -> None:
        newest = self.coordinator.newest_version()
        version = 0 if newest is None else newest.version + 1
        path = f"weights/v{version:06}"
        self.coordinator.publish(
            VersionRecord(version=version, path=path, digest="d", learner_step=learner_step)
        )

    def lease(self) -> Lease:
        lease = self.coordinator.lease("w")
        assert lease is not None
        return lease

    def play(self, lease: Lease) -> None:
        members = [
            replace(
                make_trajectory(lease.group, member),
                won=member < self.n_won[lease.task.id],
                steps=(make_step(0, n_steps=1, version=lease.version.version),),
            )
            for member in lease.group.missing
        ]
        epoch = lease.epoch
        self.coordinator.commit(write_segment(self.layout, members, worker="w", epoch=epoch), epoch)

    def train(self, learner_step: int) -> None:
        """Train on a batch, and publish its weights."""
        newest = self.coordinator.newest_version()
        assert newest is not None
        batch = self.coordinator.claim(newest.version)
        assert batch is not None
        self.publish(learner_step)
        self.coordinator.settle(
            Settlement(
                batch_id=batch.batch_id,
                learner_step=learner_step,
                filtered={},
                version_in=newest.version,
                metrics={},
            )
        )
        record = CheckpointRecord(
            learner_step=learner_step,
            path=f"checkpoints/step{learner_step:06}",
            version=newest.version + 1,
        )
        self.coordinator.checkpoint(record, lsn=self.coordinator.export_now())

    def go_on(self, *, first_step: int, last_step: int) -> None:
        for learner_step in range(first_step, last_step + 1):
            for lease in [self.lease() for _ in range(GROUPS_PER_STEP)]:
                self.play(lease)
            self.train(learner_step)

    def handed_out(self) -> list[tuple[int, str, float, float | None]]:
        with self.catalog._database.transaction() as tx:
            rows = tx.rows(
                "SELECT ordinal, task_id, weight, success_before FROM grp ORDER BY ordinal"
            )
        return [tuple(row) for row in rows]


def test_a_band_holds_and_sql_shows_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "band")
    run.publish(0)
    run.go_on(first_step=1, last_step=20)
    run.coordinator.close()
    with open_run(run.layout.root) as reader:
        rows = reader.sql(
            """SELECT success_before, weight, count(*) AS n FROM groups
               WHERE split = 'train' GROUP BY ALL ORDER BY ALL"""
        ).to_pylist()
        # The recorded success is the one that the ledger had at the recorded lsn.
        (differing,) = reader.sql(
            """WITH whole AS (
                   SELECT group_uid, min(lsn) AS lsn FROM ledger WHERE state = 'complete' GROUP BY 1)
               SELECT count(*) AS n FROM groups AS g
               WHERE success_before IS DISTINCT FROM (
                   SELECT arg_max(b.n_won / b.size, (w.lsn, b.ordinal))
                   FROM groups AS b JOIN whole AS w USING (group_uid)
                   WHERE b.task_id = g.task_id AND w.lsn <= g.weighed_lsn)"""
        ).to_pylist()
    assert differing["n"] == 0
    # 40 tasks: each is tried once, the 13 in the band fill the rest of 120 groups.
    assert rows == [
        {"success_before": 0.5, "weight": 1.0, "n": 80},
        {"success_before": None, "weight": 1.0, "n": 40},
    ]


def test_the_columns_of_a_weight_are_those_of_the_view(tmp_path: Path) -> None:
    """Compare the table that weights see with the view `tasks` of the same moment."""
    run = Run(tmp_path / "run", "1")
    run.publish(0)
    run.go_on(first_step=1, last_step=9)
    export(run.catalog, run.layout)
    order = run.coordinator.tasks._orders["key_room"]
    order.draw(run.catalog, 9 * GROUPS_PER_STEP, n_drawn=lambda first: 0)
    known = order._table.arrow(order._n_seen, 9)
    in_view = [name for name in COLUMNS if name != "n_tasks"]
    with open_run(run.layout.root) as reader:
        expected = reader.sql(f"SELECT {', '.join(in_view)} FROM tasks ORDER BY task_id")
    run.coordinator.close()
    tried = [row for row in known.select(in_view).to_pylist() if row["n_groups"]]
    assert sorted(tried, key=lambda row: row["task_id"]) == expected.to_pylist()
    assert {row["success"] for row in tried} == {0.0, 0.5, 1.0}
    assert len({row["groups_since"] for row in tried}) == len(tried) > 20


def test_a_run_of_two_environments_keeps_their_shares_and_the_band(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "band", environments=TWO)
    run.publish(0)
    run.go_on(first_step=1, last_step=20)
    run.coordinator.evaluate(20, 1)
    heldout = {}
    while (lease := run.coordinator.lease("w")) is not None and lease.group.split == "heldout":
        heldout[lease.task.id] = lease.task.env_name
        run.n_won[lease.task.id] = int(lease.task.env_name == "rooms")
        run.play(lease)
    metrics = run.coordinator.driver_tick().metrics
    run.coordinator.close()
    assert Counter(heldout.values()) == {"rooms": 20, "halls": 20}
    assert (metrics["heldout/success/rooms"], metrics["heldout/success/halls"]) == (1.0, 0.0)
    assert metrics["heldout/success"] == 0.5
    with open_run(run.layout.root) as reader:
        shares = reader.sql(
            """SELECT split_part(task_id, '/', 1) AS name, count(*) AS n,
                      count(*) FILTER (success_before IN (0, 1)) AS n_outside
               FROM groups WHERE split = 'train' AND ordinal < 120 GROUP BY 1 ORDER BY 1"""
        ).to_pylist()
        (batches,) = reader.sql(
            """SELECT min(n) AS least, max(n) AS most FROM (
                   SELECT count(*) FILTER (task_id LIKE 'rooms/%') AS n FROM lineage
                   WHERE live GROUP BY learner_step)"""
        ).to_pylist()
        (success,) = reader.sql(
            """SELECT avg(n_won / size) AS played, (
                   SELECT avg(value) FROM metrics WHERE name = 'train/success/rooms') AS recorded
               FROM groups WHERE task_id LIKE 'rooms/%' AND split = 'train' AND ordinal < 120"""
        ).to_pylist()
    assert shares == [
        {"name": "halls", "n": 80, "n_outside": 0},
        {"name": "rooms", "n": 40, "n_outside": 0},
    ]
    assert 1 <= batches["least"] <= batches["most"] <= 3
    assert success["recorded"] == pytest.approx(success["played"], abs=0.05)


@pytest.mark.parametrize(
    ("order", "environments"), [("band", {}), ("variance", {}), ("variance", TWO), ("uniform", TWO)]
)
def test_a_killed_run_hands_out_the_tasks_of_an_undisturbed_one(
    tmp_path: Path, order: str, environments: dict[str, dict[str, Any]]
) -> None:
    """Killed with a group in play, two groups after its checkpoint, and killed again at once."""
    run = Run(tmp_path / "run", order, environments=environments)
    run.publish(0)
    run.go_on(first_step=1, last_step=7)
    in_play = run.lease()
    run.play(run.lease())
    for n_kills in (1, 2):
        shutil.copytree(tmp_path / "run", tmp_path / f"killed{n_kills}")  # as a kill leaves it
    run.play(in_play)
    for _ in range(GROUPS_PER_STEP - 2):
        run.play(run.lease())
    run.train(8)
    run.go_on(first_step=9, last_step=12)
    expected = run.handed_out()
    run.coordinator.close()
    for n_kills in (1, 2):
        killed = Run(tmp_path / f"killed{n_kills}", order, environments=environments)
        for _ in range(n_kills):
            killed.coordinator.resume(6)
            killed.publish(6)
        killed.train(7)  # again, on the same groups
        for _ in range(GROUPS_PER_STEP - 1):
            killed.play(killed.lease())
        killed.train(8)
        killed.go_on(first_step=9, last_step=12)
        assert killed.handed_out() == expected
        assert check(killed.layout, level=CATALOG) == []
        killed.coordinator.close()
    if order != "uniform":
        assert {before for *_, before in expected} >= {None, 0.5}, "results had a say in it"


@settings(max_examples=30, deadline=None)
@given(weights=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=4))
def test_each_environment_has_its_share_of_the_groups(weights: list[float]) -> None:
    order = EnvironmentOrder({str(n): weight for n, weight in enumerate(weights)})
    n = 500
    drawn = [order[ordinal] for ordinal in range(n)]
    numbers: dict[str, list[int]] = {}
    for name, number in drawn:
        numbers.setdefault(name, []).append(number)
    assert all(counted == list(range(len(counted))) for counted in numbers.values())
    for name, weight in enumerate(weights):
        share = n * weight / sum(weights)
        assert abs(len(numbers.get(str(name), ())) - share) < 5
    last = drawn[-1][0]
    assert order.n_before(n - 1, first=400) == sum(name == last for name, _ in drawn[400:-1])


def test_a_pass_over_few_tasks_begins_again_in_another_order(tmp_path: Path) -> None:
    """Two tasks have a weight, and eight groups are drawn before the next step."""
    run = Run(tmp_path / "run", "task_id IN ('key_room-train-1', 'key_room-train-2', 'x')")
    run.publish(0)
    drawn = [run.lease().task.id for _ in range(8)]
    run.coordinator.close()
    assert set(drawn) == {"key_room-train-1", "key_room-train-2"}
    assert all(set(drawn[n : n + 2]) == set(drawn) for n in range(0, 8, 2))
    assert drawn != drawn[:2] * 4


def test_if_no_task_has_a_weight_all_are_drawn(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "-1")
    run.publish(0)
    assert len({run.lease().task.id for _ in range(20)}) == 20
    assert {weight for _, _, weight, _ in run.handed_out()} == {0.0}
    run.coordinator.close()


def test_the_weights_band_and_variance_by_hand() -> None:
    """Weigh 5 of 10 tasks, whose rows are not in the tasks' order.

    Task 0 was never handed out. Task 1 was handed out three times without a result. Tasks 2 to 4
    have a result. Tasks 3 and 4 are outside the band, and task 4 has waited for more than 40
    groups.
    """
    known = pa.table(
        {
            "task_index": [4, 3, 2, 1, 0],
            "n_groups": [2, 2, 1, 3, 0],
            "last_success": [0.0, 1.0, 0.2, None, None],
            "groups_since": [41, 40, 7, 12, None],
            "n_tasks": [10] * 5,
        }
    )
    assert weigh("band", known).tolist() == [1.0, 0.25, 1.0, 0.0, 1.0]
    expected = [0.275, 0.275 / 4, 0.2 * 0.8 + 0.025, 0.025, 0.025]
    assert weigh("variance", known) == pytest.approx(expected, rel=1e-12)


def test_tasks_are_drawn_in_proportion_to_their_weights() -> None:
    """Check that task i comes first with probability w_i / sum(w): 4,000 draws, four sigma."""
    weights = np.array([0.0, 1.0, 3.0, 6.0])
    n = 4000
    firsts = Counter(int(draw_order(weights, seed=str(seed))[0]) for seed in range(n))
    for place, weight in enumerate(weights):
        share = weight / weights.sum()
        assert abs(firsts[place] - n * share) <= 4 * np.sqrt(n * share * (1 - share))
    assert sorted(draw_order(weights, seed="a")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("", "cannot be used"),
        ("succes", '"success"'),
        ("success, n_groups", "cannot be used"),
        ("avg(success)", "cannot be used"),
        ("unnest([1, 2])", "4 weights for 2 tasks"),
        ("1) FROM known; SELECT (1", "not one expression"),
        ("(SELECT count(*) FROM read_csv('/etc/passwd'))", "cannot be used"),
        ("random()", "other weights each time"),
        ("1 + hour(now())", r"other weights each time \(now\)"),
        ("year(CURRENT_DATE) - 2000", r"other weights each time \(current_date\)"),
        ("'often'", "cannot be used"),
    ],
)
def test_what_is_no_weight_is_refused_before_a_run_starts(order: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"tasks.order=.*{why}"):
        check_order(order)


@pytest.mark.parametrize(
    "order", ["band", "variance", "1 / (1 + staleness)", "success < 1 OR success IS NULL -- hard"]
)
def test_what_is_a_weight_is_accepted(order: str) -> None:
    check_order(order)

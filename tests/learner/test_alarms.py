"""Bad updates, alarms, damaged checkpoints: what the loop does about them, what the store and the
screen say.
"""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import configs
from configs import Config, ConfigError
from coordinator import Status
from driver.progress import Progress
from driver.screen import shown_in
from learner import BadUpdatesError, CollapseError, NonFiniteWeightsError
from learner.checkpoint import CheckpointError
from learner.training.alarms import Alarms, collapse_alarms, length_at_start
from store import RunLayout
from tests.support.fast_directory import fast_directory
from tests.support.learner_loop import (
    DAMAGE,
    Handle,
    bad,
    good,
    make_config,
    make_learner,
    open_coordinator,
    play_all,
)
from tests.support.run_views import connect

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


def rows(run: Path, sql: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(sql).fetchall()


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Goes on with the run to its end and closes it; `stats(learner_step, updates)` says how the
    updates of each step go.
    """

    def run(config: Config, stats: Callable[[int, Any], Any], **playing: Any) -> str:
        coordinator = open_coordinator(config)
        handle = Handle(coordinator, playing=lambda coordinator: play_all(coordinator, **playing))
        learner = make_learner(
            monkeypatch, config, handle, lambda stand_in, updates: stats(learner.step + 1, updates)
        )
        try:
            learner.run()
            return learner.restored
        finally:
            coordinator.close()

    return run


# Bad updates


def shell(command: str) -> list[dict[str, Any]]:
    program = f'gigpo() {{ "{sys.executable}" -m cli "$@"; }}'
    done = subprocess.run(
        ["bash", "-c", f"{program}; {command} --format json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_after_too_many_bad_updates_the_error_ends_with_the_query_that_shows_their_rows(
    tmp_path: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "a run", max_staleness=1, steps=9)
    monkeypatch.setattr("learner.training.run_health.MAX_BAD_UPDATES", 2)
    answers = {2: lambda updates: bad(updates, rows=(0, 3))}
    # one is allowed to be good in between: only those in a row count
    with pytest.raises(BadUpdatesError) as raised:
        train(
            config,
            lambda step, updates: (
                good(updates) if step in (1, 3) else answers.get(step, bad_first)(updates)
            ),
        )
    message = str(raised.value)
    assert message.startswith("3 optimizer updates in a row, the last in learner step 6, ")
    assert "\n" not in message
    shown = shell(message[message.index("gigpo sql") :])
    batches = rows(
        Path(config.run_dir),
        "SELECT claimed_at, group_uid::VARCHAR FROM lineage JOIN groups USING (group_uid) ORDER BY "
        "batch_id, ordinal",
    )
    groups = [group for _, group in batches]
    # Rows 0 and 3 of step 2: of its first group's two members of two steps, the first of one and
    # the second of the other.
    expected = {(groups[2], 0), (groups[2], 1)} | {
        (groups[2 * (step - 1)], 0) for step in (4, 5, 6)
    }
    assert {(row["group_uid"], row["step_index"]) for row in shown} == expected
    assert len(shown) == 5
    assert all(row["response_logprobs"] == [-0.5, -0.5] for row in shown)
    events = rows(
        Path(config.run_dir), "SELECT detail FROM events WHERE what = 'bad update' ORDER BY lsn"
    )
    assert [detail.partition(":")[0] for (detail,) in events] == [
        f"learner step {step}, update 1" for step in (2, 4, 5, 6)
    ]
    assert events[0][0].endswith("2 of 8 rows are not finite: see the view bad_rows")
    # The batches before the last are settled. The last is not, and the next start has it again.
    assert rows(
        Path(config.run_dir), "SELECT max(learner_step) FROM lineage WHERE batch_state = 'trained'"
    ) == [(5,)]


def bad_first(updates: Any) -> Any:
    return bad(updates, rows=(0,))


def test_where_only_the_gradient_is_not_finite_the_query_shows_the_updates(
    tmp_path: Path, train: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=9)
    monkeypatch.setattr("learner.training.run_health.MAX_BAD_UPDATES", 0)
    with pytest.raises(BadUpdatesError) as raised:
        train(config, lambda step, updates: bad(updates, rows=()))
    message = str(raised.value)
    (shown,) = shell(message[message.index("gigpo sql") :])
    assert shown["detail"].endswith("each of 8 rows by itself is finite")


def test_several_updates_a_step_name_the_rows_of_their_own_part(
    tmp_path: Path, train: Callable[..., str]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=1, updates_per_step=2)
    train(
        config,
        lambda step, updates: [
            *bad(updates[:1], rows=(0, 1, 2, 3)),
            *bad(updates[1:], rows=(0, 1, 2, 3)),
        ],
    )
    named = rows(
        Path(config.run_dir),
        "SELECT update_number, count(*) FROM bad_rows GROUP BY ALL ORDER BY ALL",
    )
    assert named == [(1, 4), (2, 4)]
    found = (
        "SELECT DISTINCT traj_uid, step_index FROM bad_rows JOIN steps USING (traj_uid, step_index)"
    )
    assert len(rows(Path(config.run_dir), found)) == 8  # the batch's rows, each once


def test_a_policy_that_an_update_wrecked_is_not_published_and_the_same_command_goes_on_before_it(
    tmp_path: Path, train: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    config = make_config(run, max_staleness=1, steps=4, checkpoint_every=2)

    def wrecked_at_3(step: int, updates: Any) -> Any:
        if step == 3:
            raise NonFiniteWeightsError("weights")
        return good(updates)

    words = (
        r"the updates of learner step 3 had .* learner\.learning_rate=1e-06 left weights .* "
        r"Nothing of this step was published or checkpointed: the same command goes on from the "
        r"checkpoint of learner step 2\. .* use a lower "
    )
    with pytest.raises(NonFiniteWeightsError, match=words):
        train(config, wrecked_at_3)
    assert rows(run, "SELECT max(learner_step) FROM versions") == [(2,)]
    assert rows(run, "SELECT learner_step FROM checkpoints") == [(2,)]
    assert "continues at learner step 2 as " in train(config, lambda step, updates: good(updates))
    assert rows(run, "SELECT max(learner_step) FROM lineage WHERE live") == [(4,)]


# Alarms


def alarms_of(
    config: Config,
    figures: Mapping[str, float],
    *,
    before: Mapping[str, float] | None = None,
    learner_step: int = 1,
) -> Alarms:
    metrics = {"tokens/response_per_row": 10.0, **figures}
    return collapse_alarms(metrics, before=before or {}, learner_step=learner_step, config=config)


def test_an_alarm_is_said_when_it_begins_and_when_it_ends() -> None:
    config = replace(Config(), alarms=replace(Config().alarms, ess_below=0.1))
    said, before = [], {}
    for step, ess in enumerate((0.5, 0.05, 0.04, 0.2, 0.09), start=1):
        alarms = alarms_of(config, {"loss/ess": ess}, before=before, learner_step=step)
        said.append((alarms.began, alarms.ended))
        before = dict(alarms.values)
    assert said == [
        ([], []),
        (["learner step 2: loss/ess 0.05 is below alarms.ess_below=0.1"], []),
        ([], []),
        ([], ["learner step 4: loss/ess 0.2 is no longer below alarms.ess_below=0.1"]),
        (["learner step 5: loss/ess 0.09 is below alarms.ess_below=0.1"], []),
    ]


@pytest.mark.parametrize(
    ("name", "setting", "fine", "beyond"),
    [
        ("loss/ess", {"ess_below": 0.3}, 0.3, 0.29),
        ("loss/entropy", {"entropy_below": 0.3}, 0.3, 0.29),
        ("loss/mismatch_kl", {"mismatch_kl_above": 0.3}, 0.3, 0.31),
    ],
)
def test_each_bound_is_of_its_own_figure(
    name: str, setting: dict[str, float], fine: float, beyond: float
) -> None:
    config = replace(Config(), alarms=replace(Config().alarms, **setting))
    key = name.replace("loss", "alarm")
    others = {"loss/ess": 1.0, "loss/entropy": 5.0, "loss/mismatch_kl": 0.0}
    for value, is_on in ((fine, 0.0), (beyond, 1.0)):
        alarms = alarms_of(config, {**others, name: value})
        assert {n: v for n, v in alarms.values.items() if n.startswith("alarm/") and v} == (
            {key: 1.0} if is_on else {}
        )
        assert len(alarms.began) == is_on


@pytest.mark.parametrize("unsaid", [{}, {"loss/ess": math.inf}], ids=["missing", "not finite"])
@pytest.mark.parametrize("was", [0.0, 1.0])
def test_a_step_that_says_nothing_of_a_figure_leaves_its_alarm_as_it_was(
    unsaid: dict[str, float], was: float
) -> None:
    alarms = alarms_of(Config(), unsaid, before={"alarm/ess": was})
    assert alarms.values["alarm/ess"] == was
    assert (alarms.began, alarms.ended) == ([], [])


def test_cloning_starts_far_from_what_it_clones_and_has_no_alarms() -> None:
    config = replace(Config(), loss=replace(Config().loss, policy="behaviour_cloning"))
    alarms = alarms_of(config, {"loss/ess": 0.01, "loss/mismatch_kl": 3.5})
    assert (alarms.began, list(alarms.values)) == ([], ["tokens/response_per_row_at_start"])


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=12))
def test_the_length_at_the_start_is_the_mean_of_the_first_five_steps(lengths: list[float]) -> None:
    before = None
    for step, length in enumerate(lengths, start=1):
        before = length_at_start(length, before=before, learner_step=step)
    first = lengths[:5]
    assert before == pytest.approx(sum(first) / len(first), abs=1e-6)


@pytest.mark.parametrize(("length", "is_on"), [(39.0, 0.0), (41.0, 1.0), (2.6, 0.0), (2.4, 1.0)])
def test_lengths_are_compared_with_those_of_the_start_once_there_are_five(
    length: float, is_on: float
) -> None:
    before = {"tokens/response_per_row_at_start": 10.0}
    config = replace(Config(), alarms=replace(Config().alarms, length_factor=4.0))
    later = alarms_of(config, {"tokens/response_per_row": length}, before=before, learner_step=6)
    assert (later.values["alarm/length"], len(later.began)) == (is_on, is_on)
    assert (
        alarms_of(
            config, {"tokens/response_per_row": length}, before=before, learner_step=5
        ).values["alarm/length"]
        == 0.0
    )


def test_a_resumed_run_knows_its_first_lengths_and_which_alarms_are_on(
    tmp_path: Path, train: Callable[..., str]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=5, checkpoint_every=1)
    config = replace(config, alarms=replace(config.alarms, ess_below=0.1))
    train(
        config,
        lambda step, updates: good(updates, ess=0.05 if step == 5 else 1.0),
        n_response_tokens=2,
    )
    longer = replace(config, learner=replace(config.learner, steps=7))
    train(
        longer,
        lambda step, updates: good(updates, ess=0.05 if step == 6 else 1.0),
        n_response_tokens=9,
    )
    events = rows(
        tmp_path / "run", "SELECT what, detail FROM events WHERE component = 'learner' ORDER BY lsn"
    )
    length = "alarms.length_factor=4 times longer or shorter than the first 5 steps' 2"
    assert events == [
        ("alarm", "learner step 5: loss/ess 0.05 is below alarms.ess_below=0.1"),
        ("alarm", f"learner step 6: tokens/response_per_row 9 is {length}"),
        ("alarm ended", "learner step 7: loss/ess 1 is no longer below alarms.ess_below=0.1"),
    ]
    on = rows(
        tmp_path / "run",
        "SELECT learner_step, name FROM metrics WHERE name LIKE 'alarm/%' AND value = 1 ORDER BY "
        "ALL",
    )
    assert on == [(5, "alarm/ess"), (6, "alarm/ess"), (6, "alarm/length"), (7, "alarm/length")]


def test_an_alarm_that_was_rolled_back_begins_again(
    tmp_path: Path, train: Callable[..., str]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=3, checkpoint_every=1)

    def die(step: int, updates: Any) -> Any:
        if step == 3:
            raise MemoryError
        return good(updates, ess=0.01 if step == 2 else 1.0)

    with pytest.raises(MemoryError):
        train(replace(config, learner=replace(config.learner, checkpoint_every=100)), die)
    train(config, lambda step, updates: good(updates, ess=0.01 if step == 2 else 1.0))
    events = rows(
        tmp_path / "run", "SELECT what FROM events WHERE component = 'learner' ORDER BY lsn"
    )
    assert [what for (what,) in events] == ["alarm", "alarm", "alarm ended"]


def test_if_asked_the_first_alarm_ends_the_run_with_a_checkpoint_and_the_same_command_goes_on(
    tmp_path: Path, train: Callable[..., str]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=5)
    config = replace(config, alarms=replace(config.alarms, stop=True))

    def collapse_at_2(step: int, updates: Any) -> Any:
        return good(updates, mismatch_kl=0.5 if step >= 2 else 0.0)

    with pytest.raises(
        CollapseError,
        match="step 2: loss/mismatch_kl 0.5 is above alarms.mismatch_kl_above=0.2; alarms.stop",
    ):
        train(config, collapse_at_2)
    assert rows(tmp_path / "run", "SELECT learner_step FROM checkpoints") == [(2,)]
    assert rows(tmp_path / "run", "SELECT count(*) FROM groups WHERE state = 'claimed'") == [(0,)]
    assert "continues at learner step 2" in train(config, collapse_at_2)
    assert rows(tmp_path / "run", "SELECT max(learner_step) FROM lineage") == [(5,)]


# A damaged checkpoint


def damage(run: Path, *learner_steps: int) -> None:
    for step in learner_steps:
        (run / "checkpoints" / f"step{step:06d}" / "point.json").write_text(DAMAGE)


def test_a_damaged_checkpoint_is_left_out_and_what_the_older_one_lacks_is_trained_again(
    tmp_path: Path, train: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    config = make_config(run, max_staleness=6, steps=3, checkpoint_every=1)
    trained: list[int] = []
    train(config, lambda step, updates: good(updates))
    after_2 = rows(run, "SELECT group_uid FROM lineage WHERE learner_step > 2 ORDER BY 1")
    trajectories = rows(run, "SELECT traj_uid FROM trajectories ORDER BY 1")
    damage(run, 3)

    def note(step: int, updates: Any) -> Any:
        trained.append(step)
        return good(updates)

    started = train(replace(config, learner=replace(config.learner, steps=5)), note)
    assert started.startswith(
        "continues at learner step 2 as version 4, as newer checkpoints cannot be loaded ("
    )
    assert "step000003 is damaged" in started
    assert "; 2 groups consumed after the checkpoint are available again" in started
    assert trained == [3, 4, 5]
    events = rows(run, "SELECT detail FROM events WHERE what = 'checkpoint left out'")
    assert len(events) == 1
    assert "going on from learner step 2 instead" in events[0][0]
    assert {uid for (uid,) in trajectories} <= {
        uid for (uid,) in rows(run, "SELECT traj_uid FROM trajectories")
    }
    again = rows(run, "SELECT DISTINCT group_uid FROM lineage WHERE live AND learner_step >= 3")
    assert {uid for (uid,) in after_2} <= {uid for (uid,) in again}
    assert rows(run, "SELECT count(*), count(DISTINCT group_uid) FROM lineage WHERE live") == [
        (10, 10)
    ]
    assert rows(run, "SELECT count(*) FROM lineage WHERE NOT live") == [(2,)]
    assert rows(run, "FROM staleness_violations") == []
    assert rows(run, "SELECT learner_step FROM checkpoints WHERE live ORDER BY 1") == [
        (step,) for step in (1, 2, 3, 4, 5)
    ]


@pytest.mark.parametrize("next_at", [3, 7])
def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(
    tmp_path: Path, train: Callable[..., str], next_at: int
) -> None:
    """Left out at 4, it was of no use; the next one is written before or behind it."""
    run = tmp_path / "run"
    config = make_config(run, max_staleness=6, steps=4, checkpoint_every=2)
    train(config, lambda step, updates: good(updates))
    damage(run, 4)
    again = replace(config, learner=replace(config.learner, steps=next_at, checkpoint_every=100))
    assert train(again, lambda step, updates: good(updates)).startswith(
        "continues at learner step 2 as "
    )
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step000002",
        f"step{next_at:06d}",
    ]
    damage(run, next_at)
    assert train(again, lambda step, updates: good(updates)).startswith(
        "continues at learner step 2 as "
    )


def test_if_none_can_be_loaded_nothing_is_rolled_back_and_the_newest_ones_error_is_raised(
    tmp_path: Path, train: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    config = make_config(run, max_staleness=3, steps=2, checkpoint_every=1)
    train(config, lambda step, updates: good(updates))
    damage(run, 1, 2)
    with pytest.raises(CheckpointError, match="step000002 is damaged"):
        train(config, lambda step, updates: good(updates))
    assert rows(run, "SELECT count(*) FROM lineage WHERE live") == [(4,)]


# On the screen, and in the config


def test_notices_are_lines_of_their_own_each_shown_once(tmp_path: Path) -> None:
    coordinator = open_coordinator(make_config(tmp_path / "run", max_staleness=0))
    out = io.StringIO()
    with Progress(
        coordinator.config,
        title="training",
        screen=shown_in(Console(file=out, width=400, markup=False)),
    ) as progress:
        progress.show(coordinator.status())
        coordinator.notice(
            "learner", "alarm", detail="learner step 2: loss/ess 0.05 is below [bound]"
        )
        progress.show(coordinator.status())
        progress.show(coordinator.status())
        for number in range(30):
            coordinator.notice("learner", "bad update", detail=f"number {number} {'x' * 500}")
        progress.show(coordinator.status())
    coordinator.close()
    lines = out.getvalue().splitlines()
    assert lines.count("alarm: learner step 2: loss/ess 0.05 is below [bound]") == 1
    bad_updates = [line for line in lines if line.startswith("bad update: ")]
    assert [line.split()[3] for line in bad_updates] == [str(number) for number in range(10, 30)]
    assert all(line.endswith("xxx ...") and len(line) < 400 for line in bad_updates)


def test_in_a_terminal_a_notice_stays_above_the_table(tmp_path: Path) -> None:
    coordinator = open_coordinator(make_config(tmp_path / "run", max_staleness=0))
    coordinator.notice("learner", "alarm", detail="it began")
    status: Status = coordinator.status()
    coordinator.close()
    out = io.StringIO()
    with Progress(
        coordinator.config,
        title="training",
        screen=shown_in(Console(file=out, width=100, force_terminal=True)),
    ) as progress:
        progress.show(status)
        progress.show(status)
    assert out.getvalue().count("alarm: it began") == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alarms": {"length_factor": 1.0}}, "alarms.length_factor=1 would"),
        ({"alarms": {"ess_below": 1.5}}, "alarms.ess_below=1.5 would"),
        ({"alarms": {"mismatch_kl_above": 0.0}}, "alarms.mismatch_kl_above=0.0 must be above 0"),
        (
            {"learner": {"learning_rate": 1e30}},
            r"learner.learning_rate=1e\+30 would wreck any model at once; use e.g. 1e-6",
        ),
        (
            {"learner": {"warmup_updates": 201, "updates_per_step": 2}},
            "warmup_updates=201 would .* 200 updates .* at most 200",
        ),
        (
            {"learner": {"warmup_updates": 4001, "rows_per_update": 16}, "env": {"max_steps": 10}},
            "warmup_updates=4001 would .* 4000 updates .*steps=100 of at most 40 each.* at most "
            "4000",
        ),
        (
            {"learner": {"rows_per_update": 256, "updates_per_step": 8}},
            "rows_per_update=256 and learner.updates_per_step=8 both cut a batch; leave one out",
        ),
        (
            {"learner": {"rows_per_update": 256, "schedule": "linear"}},
            "'linear' needs the run's number of updates, which learner.rows_per_update=256 leaves "
            "open; use",
        ),
        (
            {"learner": {"rows_per_update": 9999}, "loss": {"proximal": "recomputed"}},
            "proximal='recomputed' with learner.rows_per_update=9999 costs",
        ),
        (
            {"learner": {"rows_per_update": -1}},
            "rows_per_update=-1 is below 0; use 0 to cut a batch by",
        ),
        (
            {"learner": {"keep_every": 15}},
            "learner.keep_every=15 is no multiple of learner.checkpoint_every=10",
        ),
    ],
)
def test_a_config_that_could_not_warn_is_refused(
    changes: dict[str, dict[str, Any]], words: str
) -> None:
    config = replace(
        Config(),
        **{name: replace(getattr(Config(), name), **values) for name, values in changes.items()},
    )
    with pytest.raises(ConfigError, match=words):
        configs.check(config)


def test_checkpoints_may_be_kept_for_ever() -> None:
    configs.check(replace(Config(), learner=replace(Config().learner, keep_every=20)))


def test_a_warm_up_may_take_the_whole_run() -> None:
    configs.check(
        replace(Config(), learner=replace(Config().learner, warmup_updates=100, learning_rate=1.0))
    )

"""The loop beside its training: what it reports, how it stops, what it measures, what it remembers
after a restart.
"""

from __future__ import annotations

import errno
import io
import math
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import configs
from analysis import report
from configs import Config
from coordinator import Coordinator
from learner import LEARNER_STEP, BadUpdatesError, Learner, LearnerSetup, StarvationError
from learner.data.batch_loader import prepare_batch
from learner.data.prefetch import Prefetch
from learner.ray_actor import LearnerProcess
from store import RunLayout, bring_run, write_open_sql
from tests.support.fast_directory import fast_directory
from tests.support.learner_loop import (
    GROUPS_PER_STEP,
    Handle,
    Silent,
    StandIn,
    bad,
    good,
    make_config,
    make_learner,
    open_coordinator,
    patch_learner,
    play_all,
)
from tests.support.run_views import connect

DEADLINE_S = 20.0
STEP_TIMEOUT_S = 77.0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


class Noted(Silent):
    """Stand in for a Heartbeat, and keep its reports."""

    def __init__(self) -> None:
        self.reported: list[tuple[str | None, float]] = []
        self.waits_s: list[tuple[str | None, float]] = []

    def report(self, waiting_on: str | None, *, waits_s: float, within_s: float) -> None:
        self.reported.append((waiting_on, within_s))
        self.waits_s.append((waiting_on, waits_s))


class Loop:
    """A learner of the run at `config.run_dir`, started; workers are always ready."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        config: Config,
        *,
        stats: Any = None,
        alike: bool = False,
    ) -> None:
        self.coordinator: Coordinator = open_coordinator(config)
        handle = Handle(
            self.coordinator, playing=lambda coordinator: play_all(coordinator, alike=alike)
        )
        answer = stats or (lambda step, updates: good(updates))
        self.learner: Learner = make_learner(
            monkeypatch,
            config,
            handle,
            lambda stand_in, updates: answer(self.learner.step + 1, updates),
        )
        self.heartbeat = Noted()
        self.learner.heartbeat = self.heartbeat  # type: ignore[assignment]


def metrics(run: Path, name: str) -> list[float]:
    """By learner step."""
    with connect(RunLayout.open(run)) as connection:
        found = connection.execute(
            "SELECT value FROM metrics WHERE name = ? ORDER BY learner_step", [name]
        ).fetchall()
    return [value for (value,) in found]


def test_batches_without_a_signal_are_settled_without_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=2, updates_per_step=2)
    loop = Loop(monkeypatch, config, alike=True)
    assert loop.learner.run() == 2
    loop.coordinator.close()
    assert metrics(tmp_path / "run", "groups/filtered") == [GROUPS_PER_STEP] * 2


@pytest.mark.parametrize(
    ("steps", "figures"), [(5, "0.50"), (6, "0.50 at the start, 0.50 at the end")]
)
def test_a_run_as_long_as_one_window_is_reported_with_one_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, figures: str
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=steps)
    loop = Loop(monkeypatch, config)
    loop.learner.run()
    loop.coordinator.close()
    out = io.StringIO()
    report.show_report(config, Console(file=out, width=400))
    assert f"success on training tasks: {figures}\n" in out.getvalue()


def test_the_last_checkpoint_has_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(
        monkeypatch,
        make_config(tmp_path / "run", max_staleness=1, steps=2, step_timeout_s=STEP_TIMEOUT_S),
    )
    reported: list[tuple[str | None, float]] = []
    write = StandIn.write_checkpoint

    def noting(stand_in: StandIn, directory: Path) -> None:
        reported.append(loop.heartbeat.reported[-1])
        write(stand_in, directory)

    monkeypatch.setattr(StandIn, "write_checkpoint", noting)
    loop.learner.run()
    loop.coordinator.close()
    assert reported == [(None, STEP_TIMEOUT_S)]
    assert loop.heartbeat.reported[-1] == (None, math.inf), "all that is left is to be closed"


def test_a_learner_stuck_in_reading_a_batch_reports_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=1, step_timeout_s=STEP_TIMEOUT_S)
    loop = Loop(monkeypatch, config)
    looks = threading.Semaphore(0)  # the loop looked whether the batch is ready
    taken = Prefetch.take

    def read_slowly(*given: Any, **named: Any) -> Any:
        while looks.acquire(blocking=False):
            pass  # those while the groups were not there yet
        for _ in range(5):
            assert looks.acquire(timeout=DEADLINE_S)
        return prepare_batch(*given, **named)

    def noting(batches: Any, *, timeout_s: float) -> Any:
        ready = taken(batches, timeout_s=timeout_s)
        looks.release()
        return ready

    monkeypatch.setattr(Prefetch, "take", noting)
    monkeypatch.setattr("learner.data.prefetch.prepare_batch", read_slowly)
    loop.learner.run()
    loop.coordinator.close()
    working = [at for at, within_s in loop.heartbeat.reported if within_s == STEP_TIMEOUT_S]
    assert working == [None, LEARNER_STEP, None], "once while it reads, once to train, once to end"
    assert loop.heartbeat.reported[-1] == (None, math.inf)


def test_every_learner_step_says_that_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where batches are always ready no other reason comes between two learner steps."""
    loop = Loop(monkeypatch, make_config(tmp_path / "run", max_staleness=1, steps=3))
    loop.learner.run()
    loop.coordinator.close()
    steps = [waits_s for reason, waits_s in loop.heartbeat.waits_s if reason == LEARNER_STEP]
    assert steps == [0.0, 0.0, 0.0]


def test_to_close_beside_a_run_waits_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=100)
    coordinator = open_coordinator(config)
    steps, closed = 0, []
    write = StandIn.write_checkpoint

    def write_slowly(stand_in: StandIn, directory: Path) -> None:
        closer.join(timeout=0.2)  # it would end within this time if it did not wait
        closed.append(stand_in.closed)
        write(stand_in, directory)

    def close_at_the_second(stand_in: StandIn, updates: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            closer.start()
            while not process._stopping.is_set():
                time.sleep(0.001)
        return good(updates)

    monkeypatch.setattr(StandIn, "write_checkpoint", write_slowly)
    monkeypatch.setattr("learner.ray_actor.capture_output", lambda path: None)
    patch_learner(monkeypatch, close_at_the_second)
    run_id = RunLayout.open(Path(config.run_dir)).info.run_id
    setup = LearnerSetup(run_id=run_id, config=config, model_path="unused")
    process = LearnerProcess(setup, Handle(coordinator))  # type: ignore[arg-type]
    closer = threading.Thread(target=process.close)
    assert process.start() == "a new run"
    at = process.run()
    closer.join(timeout=DEADLINE_S)
    coordinator.close()
    assert at == 2, "the step it was at"
    assert closed == [False]
    assert process._started.result().ranks.closed  # type: ignore[attr-defined]
    assert (tmp_path / "run" / "checkpoints" / f"step{at:06d}" / "point.json").exists()


def test_publishing_and_checkpoints_are_in_the_time_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on 2 s for training, 3 s for copying weights, and 5 s for a checkpoint."""
    now = [0.0]

    def spending(what: Any, seconds: float) -> Any:
        def done(*given: Any, **named: Any) -> Any:
            now[0] += seconds
            return what(*given, **named)

        return done

    monkeypatch.setattr("learner.step_times.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(StandIn, "copy_weights", spending(StandIn.copy_weights, 3.0))
    monkeypatch.setattr(StandIn, "copy_checkpoint", spending(StandIn.copy_checkpoint, 5.0))
    run = tmp_path / "run"
    loop = Loop(
        monkeypatch,
        make_config(run, max_staleness=1, steps=3, checkpoint_every=2),
        stats=lambda step, updates: spending(good, 2.0)(updates),
    )
    loop.learner.run()
    loop.coordinator.close()
    assert metrics(run, "time/publish_s") == [3.0, 3.0, 3.0]
    assert metrics(run, "time/checkpoint_s") == [0.0, 0.0, 5.0]
    assert metrics(run, "time/step_s") == [5.0, 5.0, 10.0]
    tokens = metrics(run, "tokens/generated_per_s")
    assert tokens[2] == pytest.approx(tokens[0] / 2)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_weights_that_cannot_be_written_end_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    """Also while the loop waits for groups, which no engine can play without them."""
    write, may_fail = StandIn.write_weights, threading.Event()

    def failing(stand_in: StandIn, directory: Path) -> None:
        if directory.name == "v000002":
            assert may_fail.wait(DEADLINE_S)
            raise OSError(errno.ENOSPC, f"cannot write {directory}: No space left on device")
        write(stand_in, directory)

    monkeypatch.setattr(StandIn, "write_weights", failing)
    run = tmp_path / "run"
    loop = Loop(monkeypatch, make_config(run, max_staleness=max_staleness, steps=9))

    def play_what_is_written(coordinator: Coordinator) -> None:
        newest = coordinator.newest_version()
        if newest is not None and newest.version == 2:
            assert coordinator.lease("w", serves=1) is None
            may_fail.set()
        else:
            play_all(coordinator)

    handle: Any = loop.learner.coordinator._handle
    handle.playing = play_what_is_written
    with pytest.raises(OSError, match="cannot write .*v000002: No space left on device"):
        loop.learner.run()
    assert not loop.coordinator.is_written(2)
    assert loop.coordinator.checkpoints() == ()
    loop.learner.close()
    loop.coordinator.close()


def test_versions_become_visible_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is slower than three learner steps holds up the next checkpoint only."""
    write, copy = StandIn.write_weights, StandIn.copy_checkpoint
    write_checkpoint, version_5 = StandIn.write_checkpoint, threading.Event()
    happened: list[str] = []

    def writing(stand_in: StandIn, directory: Path) -> None:
        write(stand_in, directory)
        if directory.name == "v000005":
            version_5.set()

    def copying(stand_in: StandIn, *, learner_step: int, version: int, lsn: int) -> None:
        happened.append(f"copy {learner_step}")
        copy(stand_in, learner_step=learner_step, version=version, lsn=lsn)

    def writing_checkpoint(stand_in: StandIn, directory: Path) -> None:
        if directory.name == "step000003":
            assert version_5.wait(DEADLINE_S)
        write_checkpoint(stand_in, directory)
        happened.append(f"written {int(directory.name[-6:])}")

    monkeypatch.setattr(StandIn, "write_weights", writing)
    monkeypatch.setattr(StandIn, "copy_checkpoint", copying)
    monkeypatch.setattr(StandIn, "write_checkpoint", writing_checkpoint)
    run = tmp_path / "run"
    # Version 4 is removed before it is synced.
    config = make_config(run, max_staleness=1, steps=6, checkpoint_every=3, keep_versions=1)
    loop = Loop(monkeypatch, config)
    assert loop.learner.run() == 6
    assert happened == ["copy 3", "written 3", "copy 6", "written 6"]
    assert [path.name for path in loop.coordinator.layout.weights.iterdir()] == ["v000006"]
    loop.learner.close()
    loop.coordinator.close()


def test_bad_updates_in_a_row_are_counted_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=9, checkpoint_every=1)
    monkeypatch.setattr("learner.training.run_health.MAX_BAD_UPDATES", 2)

    def until_killed(step: int, updates: Any) -> Any:
        if step == 4:
            raise MemoryError
        return good(updates) if step == 1 else bad(updates, rows=(0,))

    first = Loop(monkeypatch, config, stats=until_killed)
    with pytest.raises(MemoryError):
        first.learner.run()
    first.coordinator.close()
    again = Loop(monkeypatch, config, stats=lambda step, updates: bad(updates, rows=(0,)))
    with pytest.raises(
        BadUpdatesError, match="3 optimizer updates in a row, the last in learner step 4,"
    ):
        again.learner.run()
    again.coordinator.close()


def test_batches_without_a_signal_in_a_row_are_counted_across_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=6)
    first = Loop(monkeypatch, config, alike=True)
    assert first.learner.run() == 6
    first.coordinator.close()
    again = Loop(
        monkeypatch, replace(config, learner=replace(config.learner, steps=99)), alike=True
    )
    with pytest.raises(
        StarvationError,
        match="11 batches in a row had no advantage to learn from, with success 0.50",
    ):
        again.learner.run()
    assert again.learner.step == 10
    again.coordinator.close()


@pytest.mark.parametrize(
    ("uploaded", "step"), [("whole", 2), ("half", 1), ("another", 1), ("older one here", 2)]
)
def test_a_learner_whose_disk_is_lost_goes_on_from_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uploaded: str, step: int
) -> None:
    """From the newest checkpoint that is whole there, and that the catalog's backup knows. One of
    its name that is on this disk, from another way there, is replaced.
    """
    run, uri = tmp_path / "run", (tmp_path / "storage").as_uri()
    config = make_config(run, max_staleness=0, steps=3, checkpoint_every=1, keep_versions=2)
    layout = RunLayout.create(run, config_yaml=configs.as_yaml(config), storage_uri=uri)
    write_open_sql(layout, macros=[], max_staleness=config.max_staleness)

    def until_killed(step: int, updates: Any) -> Any:
        if step == 3:
            raise MemoryError
        return good(updates)

    first = Loop(monkeypatch, config, stats=until_killed)
    with pytest.raises(MemoryError):
        first.learner.run()
    first.coordinator.maintainer.close()
    first.coordinator.catalog._database.close()  # killed: no last backup
    point = layout.storage.read("checkpoints/step000002/point.json").to_pybytes()
    if uploaded == "half":
        layout.storage.remove("checkpoints/step000002/complete.json")
    elif uploaded == "another":  # of the same learner step, with other weights
        other = point.replace(b'"version": 2', b'"version": 7')
        layout.storage.write("checkpoints/step000002/point.json", other)
    shutil.rmtree(run)
    bring_run(uri, run, trusts=False)
    if uploaded == "older one here":
        here = layout.checkpoint_dir(2)
        here.mkdir()
        (here / "point.json").write_bytes(point.replace(b'"version": 2', b'"version": 7'))
    again = Loop(monkeypatch, config)
    assert f"continues at learner step {step} as version 3" in again.learner.restored
    assert again.learner.run() == 3
    again.coordinator.close()
    with connect(RunLayout.open(run)) as connection:
        steps = connection.execute(
            "SELECT learner_step, count(DISTINCT group_uid), count(*) FROM lineage "
            "WHERE live AND batch_state = 'trained' GROUP BY 1 ORDER BY 1"
        ).fetchall()
        (violations,) = connection.execute("SELECT count(*) FROM staleness_violations").fetchone()
    assert steps == [(number, GROUPS_PER_STEP, GROUPS_PER_STEP) for number in (1, 2, 3)]
    assert violations == 0
    checkpoints = {file.path.split("/")[1] for file in layout.storage.files("checkpoints")}
    assert checkpoints == {"step000002", "step000003"}
    weights = {file.path.split("/")[1] for file in layout.storage.files("weights")}
    assert len(weights) == config.learner.keep_versions and max(weights) > "v000003"

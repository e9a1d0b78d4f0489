"""TensorBoard's files show what the metrics table shows, each row once, whatever was killed
when.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

import configs
from driver.tensorboard_writer import TensorBoardFiles
from driver.trackers.follow import Metrics, follow_metrics
from store import (
    Catalog,
    MetricChanges,
    RunLayout,
    StoreError,
    VersionRecord,
    export,
    write_open_sql,
)
from tests.support.curves_read import in_store, in_tensorboard
from tests.support.store_samples import open_train_group, play

OLDER = "events.out.tfevents.1700000000.host.1.0"


class Run:
    """A run whose learner steps are trained by hand."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout.create(root, config_yaml="a: 1\n")
        write_open_sql(self.layout, macros=(), max_staleness=9)
        self.catalog = Catalog.open(self.layout)
        self.step = self.version = 0
        self.catalog.record_version(
            VersionRecord(version=0, path="weights/v0", digest="d", learner_step=None)
        )

    def train(self, n_steps: int, *, loss: float) -> None:
        for _ in range(n_steps):
            play(self.layout, self.catalog, open_train_group(self.catalog, None))
            batch = self.catalog.claim(n_groups=1, current_version=self.version, max_staleness=99)
            assert batch is not None
            self.step, self.version = self.step + 1, self.version + 1
            self.catalog.record_version(
                VersionRecord(
                    version=self.version,
                    path=f"weights/v{self.version}",
                    digest="d",
                    learner_step=self.step,
                )
            )
            self.catalog.settle(
                batch.batch_id, learner_step=self.step, filtered={}, version_in=self.version - 1
            )
            self.record(
                {"loss/loss": loss + self.step, "train/success": 0.1 * self.step},
                version=self.version - 1,
            )

    def record(self, values: Mapping[str, float], *, version: int, step: int | None = None) -> None:
        learner_step = self.step if step is None else step
        self.catalog.record_metrics(
            learner_step=learner_step, policy_version=version, values=values
        )

    def roll_back(self, step: int) -> None:
        self.catalog.roll_back(step)
        self.step = step
        self.version += 1  # the restored weights get a number of their own
        self.catalog.record_version(
            VersionRecord(
                version=self.version, path=f"weights/v{self.version}", digest="d", learner_step=step
            )
        )

    def shown(self) -> list[tuple[str, int, float]]:
        export(self.catalog, self.layout)
        return in_store(self.layout.root)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    yield made
    made.catalog.close()


def unexpected(text: str) -> None:
    raise AssertionError(f"nothing is to be said here: {text}")


def curves_of(run: Run, say: Callable[[str], None]) -> AbstractContextManager[Metrics]:
    """Follow the metrics of a run that is shown in TensorBoard alone."""
    config = replace(configs.Config(), run_dir=str(run.layout.root), trackers=["tensorboard"])
    return follow_metrics(config, run.layout, say=say)


def files(run: Run) -> list[Path]:
    """Return those with something in them."""
    return [path for path in (run.layout.root / "tensorboard").iterdir() if path.stat().st_size]


def test_polls_between_steps_write_nothing_and_the_last_rows_are_there(run: Run) -> None:
    with curves_of(run, unexpected) as curves:
        curves.follow()
        assert not (run.layout.root / "tensorboard").exists(), "there is nothing to show yet"
        for _ in range(3):
            run.train(1, loss=1.0)
            curves.follow()
            (file,) = files(run)
            size = file.stat().st_size
            curves.follow()
            assert file.stat().st_size == size
        # of a round that ended after the next step
        run.record({"heldout/success": 0.45}, version=2, step=2)
        curves.follow()
        # the last step before a stop, and the final evaluation: nobody looks any more
        run.train(1, loss=1.0)
        run.record({"heldout/success": 0.65}, version=4)
        run.catalog.close()
    rows = in_store_of(run)
    assert in_tensorboard(run.layout.root) == rows
    assert [row[1:] for row in rows if row[0] == "heldout/success"] == [
        (2, pytest.approx(0.45)),
        (4, pytest.approx(0.65)),
    ]


def in_store_of(run: Run) -> list[tuple[str, int, float]]:
    with Catalog.open(run.layout) as catalog:
        export(catalog, run.layout)
    return in_store(run.layout.root)


def test_after_a_kill_the_next_start_writes_what_was_missing_and_takes_back_what_is_void(
    run: Run,
) -> None:
    writer = TensorBoardFiles(run.layout, unexpected)
    curves = Metrics(run.layout, [writer])
    run.train(4, loss=1.0)
    run.record({"heldout/success": 0.5}, version=2, step=2)
    curves.follow()
    run.train(1, loss=1.0)  # recorded and never written: both processes are killed here
    run.roll_back(2)
    started = TensorBoardFiles(run.layout, unexpected)
    again = Metrics(run.layout, [started])
    again.follow()
    assert in_tensorboard(run.layout.root) == run.shown()
    assert {step for _, step, _ in run.shown()} == {1, 2}
    run.train(3, loss=7.0)
    again.follow()
    assert in_tensorboard(run.layout.root) == run.shown()
    assert ("loss/loss", 3, 10.0) in run.shown()
    assert len(files(run)) == 1
    started.close()


def test_a_learner_that_dies_takes_its_steps_back_while_the_driver_goes_on(run: Run) -> None:
    with curves_of(run, unexpected) as curves:
        run.train(5, loss=1.0)
        curves.follow()
        run.roll_back(3)
        curves.follow()
        assert in_tensorboard(run.layout.root) == run.shown()
        run.train(2, loss=5.0)
        curves.follow()
        assert in_tensorboard(run.layout.root) == run.shown()
        run.roll_back(0)
        curves.follow()
        assert in_tensorboard(run.layout.root) == run.shown() == []


def test_a_figure_that_replaces_another_is_there_once(run: Run) -> None:
    with curves_of(run, unexpected) as curves:
        run.train(1, loss=1.0)
        curves.follow()
        run.record({"loss/loss": 9.0}, version=0)
        curves.follow()
        assert in_tensorboard(run.layout.root) == run.shown()
        assert ("loss/loss", 1, 9.0) in run.shown()


def test_an_open_tensorboard_forgets_what_was_taken_back(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardFiles(run.layout, unexpected)
    curves = Metrics(run.layout, [writer])
    run.train(3, loss=1.0)
    curves.follow()
    watching = EventAccumulator(str(run.layout.root / "tensorboard"), size_guidance={"scalars": 0})
    watching.Reload()
    run.roll_back(1)
    curves.follow()
    run.train(1, loss=5.0)
    curves.follow()
    watching.Reload()
    assert [(scalar.step, scalar.value) for scalar in watching.Scalars("loss/loss")] == [
        (1, 2.0),
        (2, 7.0),
    ]
    writer.close()


def test_files_of_older_code_go_and_what_is_not_ours_stays(run: Run) -> None:
    directory = run.layout.root / "tensorboard"
    (directory / "mine").mkdir(parents=True)
    for name in (OLDER, "unfinished", "notes.txt", "mine/events.out.tfevents.1.h.1"):
        (directory / name).write_text("x")
    run.train(1, loss=1.0)
    with curves_of(run, unexpected) as curves:
        curves.follow()
    names = {path.name for path in directory.iterdir()}
    assert {"mine", "notes.txt"} < names and len(names) == 4
    assert (directory / OLDER).read_bytes() == b"", (
        "an open TensorBoard reads on from here to the new file"
    )
    with curves_of(run, unexpected) as curves:
        curves.follow()
    assert not (directory / OLDER).exists()
    assert in_tensorboard(run.layout.root) == run.shown()
    assert (directory / "mine" / "events.out.tfevents.1.h.1").exists()


def test_a_step_has_the_time_at_which_it_was_settled(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.train(2, loss=1.0)
    with curves_of(run, unexpected) as curves:
        curves.follow()
    events = EventAccumulator(str(run.layout.root / "tensorboard"))
    events.Reload()
    export(run.catalog, run.layout)
    settled = run.catalog._database._connection.execute(
        "SELECT trained_us / 1e6 FROM batch ORDER BY learner_step"
    ).fetchall()
    assert [scalar.wall_time for scalar in events.Scalars("loss/loss")] == [
        row[0] for row in settled
    ]


GIVEN_UP = (
    "no more curves are written in this start. The store has all metrics, and the next start "
    "writes the files anew"
)


def test_a_directory_that_cannot_be_written_is_said_once_and_the_run_goes_on(run: Run) -> None:
    directory = run.layout.root / "tensorboard"
    directory.touch()
    said: list[str] = []
    with curves_of(run, said.append) as curves:
        for _ in range(2):
            run.train(1, loss=1.0)
            curves.follow()
        directory.unlink()
        curves.follow()
    assert said == [f"{directory} cannot be written: File exists; {GIVEN_UP}"]
    assert not directory.exists(), "this start has given them up"
    with curves_of(run, unexpected) as curves:
        curves.follow()
    assert in_tensorboard(run.layout.root) == run.shown()


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_full_disk_is_said_once_and_the_run_goes_on(run: Run, from_the_start: bool) -> None:
    directory = run.layout.root / "tensorboard"
    said: list[str] = []
    writer = TensorBoardFiles(run.layout, said.append)
    curves = Metrics(run.layout, [writer])
    if from_the_start:
        directory.mkdir()
        (directory / "unfinished").symlink_to("/dev/full")
    else:
        run.train(1, loss=1.0)
        curves.follow()
        assert writer._file is not None
        writer._file.close()
        writer._file = Path("/dev/full").open("wb")  # noqa: SIM115  # the writer closes it
    for _ in range(2):
        run.train(1, loss=1.0)
        curves.follow()
    writer.close()
    assert said == [f"{directory} cannot be written: No space left on device; {GIVEN_UP}"]


LACKING = ["trackers lack the last metrics: the catalog is gone"]


def look_at_a_lost_catalog(
    run: Run, monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None], error: Exception | None
) -> None:
    """Write curves and lose the catalog, then leave the block, with `error` if there is one."""

    def unreadable(layout: RunLayout, lsn: int) -> MetricChanges:
        raise StoreError("the catalog is gone")

    with curves_of(run, say) as curves:
        run.train(1, loss=1.0)
        curves.follow()
        monkeypatch.setattr("driver.trackers.follow.metrics_since", unreadable)
        if error is not None:
            raise error


def test_the_last_look_never_hides_the_error_that_ends_a_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError, match="the real error"):
        look_at_a_lost_catalog(run, monkeypatch, said.append, ZeroDivisionError("the real error"))
    assert said == LACKING


def test_a_last_look_that_fails_is_said_and_closes_the_file(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    look_at_a_lost_catalog(run, monkeypatch, said.append, None)
    assert said == LACKING
    directory = f"{run.layout.root / 'tensorboard'}/"
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if path.startswith(directory)]


def test_a_run_that_never_came_up_is_left_as_it_is(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    config = replace(configs.Config(), run_dir=str(layout.root), trackers=["tensorboard"])
    with pytest.raises(KeyboardInterrupt), follow_metrics(config, layout, say=unexpected):
        raise KeyboardInterrupt
    assert not (layout.root / "tensorboard").exists()

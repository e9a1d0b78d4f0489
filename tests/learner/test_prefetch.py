"""Two batches claimed at once: staleness, admission, crashes and stops, on the real catalog."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import Config
from coordinator import Coordinator, Settlement
from learner.data.batch_loader import PreparedBatch, make_loader, prepare_batch
from learner.data.prefetch import Prefetch
from store import CheckpointRecord, DigestError, RunLayout, VersionRecord, segment_encoding
from tests.support.fast_directory import fast_directory
from tests.support.learner_loop import (
    GROUPS_PER_STEP,
    WEIGHTS_FILE,
    Handle,
    good,
    loader_of,
    make_config,
    make_learner,
    no_critic,
    open_coordinator,
    play,
    play_all,
)
from tests.support.run_views import connect
from tests.support.store_samples import in_play

DEADLINE_S = 20.0


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with fast_directory() as path:
        yield path


@pytest.fixture
def closing() -> Iterator[list[Coordinator]]:
    """Coordinators to close at the end."""
    opened: list[Coordinator] = []
    yield opened
    for coordinator in opened:
        coordinator.close()


def publish(coordinator: Coordinator, version: int, learner_step: int) -> None:
    coordinator.publish(
        VersionRecord(
            version=version, path=f"weights/v{version}", digest="d", learner_step=learner_step
        )
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def taken(batches: Prefetch) -> PreparedBatch:
    ready = batches.take(timeout_s=DEADLINE_S)
    assert ready is not None
    return ready


def no_refill(batch_id: int, **wanted: object) -> None:
    raise AssertionError("nothing was claimed")


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def rows(run: Path, sql: str) -> list[tuple]:
    with connect(RunLayout.open(run)) as connection:
        return connection.sql(sql).fetchall()


@settings(max_examples=15, deadline=None)
@given(
    max_staleness=st.integers(1, 3),
    choices=st.lists(st.integers(0, 5), min_size=20, max_size=60),
    data=st.data(),
)
def test_with_two_batches_claimed_whatever_the_order_and_wherever_it_crashes(
    max_staleness: int, choices: list[int], data: st.DataObject
) -> None:
    """Play, claim (a second batch for the version after), settle the first claimed, crash. A
    checkpoint at every other step.
    """
    with fast_directory() as path:
        play_and_crash(
            make_config(path / "run", max_staleness=max_staleness, steps=100), choices, data
        )


def play_and_crash(config: Config, choices: list[int], data: st.DataObject) -> None:
    coordinator = open_coordinator(config)
    publish(coordinator, 0, 0)
    version = step = saved = 0
    held, claimed = [], []
    for choice in choices:
        if choice == 0 and (lease := coordinator.lease("w")) is not None:
            held.append(lease)
        elif choice in (1, 2) and held:
            play(coordinator, held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif choice in (0, 3) and len(claimed) < 2:
            for_version = version + len(claimed)
            if (batch := coordinator.claim(for_version)) is not None:
                claimed.append((batch, for_version))
        elif choice == 4 and claimed:
            batch, for_version = claimed.pop(0)
            assert for_version == version
            assert all(
                version - group.version_min <= config.max_staleness for group in batch.groups
            )
            step, version = step + 1, version + 1
            publish(coordinator, version, step)
            coordinator.settle(
                Settlement(
                    batch_id=batch.batch_id,
                    learner_step=step,
                    filtered={},
                    version_in=version - 1,
                    metrics={},
                )
            )
            if step % 2 == 0:
                record = CheckpointRecord(learner_step=step, path="nowhere", version=version)
                coordinator.checkpoint(record, lsn=coordinator.export_now())
                saved = step
        elif choice == 5:
            before = coordinator.catalog.counts()
            coordinator.close()
            coordinator = open_coordinator(config)
            point = coordinator.resume(saved)
            after = coordinator.catalog.counts()
            assert after.claimed == 0
            assert after.complete == before.complete + point.rolled_back.groups
            assert after.trajectories == before.trajectories
            assert point.latest_version == version
            held, claimed, step, version = [], [], saved, version + 1
            publish(coordinator, version, step)
        assert in_play(coordinator.catalog.counts()) <= (
            config.max_staleness + 1
        ) * GROUPS_PER_STEP + step_backs(coordinator)
    coordinator.close()
    run = Path(config.run_dir)
    assert rows(run, "FROM staleness_violations") == []
    assert (
        rows(run, "SELECT group_uid FROM lineage WHERE live GROUP BY 1 HAVING count(*) > 1") == []
    )
    trained = rows(
        run,
        "SELECT DISTINCT learner_step FROM lineage WHERE live AND batch_state = 'trained' ORDER BY "
        "1",
    )
    assert trained == [(number,) for number in range(1, step + 1)]


def step_backs(coordinator: Coordinator) -> int:
    """Groups that roll-backs made available again: admission never asked for them twice, so they
    come on top of its bound.
    """
    with coordinator.catalog._database.transaction() as tx:
        row = tx.row(
            "SELECT count(*) AS n FROM batch_group JOIN batch USING (batch_id) WHERE state = "
            "'rolled_back'"
        )
    assert row is not None
    return int(row["n"])


def test_the_next_batch_is_made_ready_for_the_version_it_will_train_at(
    tmp_path: Path, closing: list[Coordinator]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1)
    coordinator = open_coordinator(config)
    closing.append(coordinator)
    publish(coordinator, 0, 0)
    with contextlib.closing(Prefetch(loader_of(coordinator))) as batches:
        batches.start(version=0, learner_step=1)
        assert batches.take(timeout_s=0.0) is None  # no groups
        assert batches.under_way
        assert not batches.has_groups
        assert play_all(coordinator) == 4  # two batches
        first = taken(batches)
        assert not batches.under_way
        batches.start(version=1, learner_step=2)
        second = taken(batches)  # while the first is still claimed
        assert batches.has_groups
        assert coordinator.catalog.counts().claimed == 4
        assert play_all(coordinator) == 0  # admission sees both
    assert (first.version, second.version) == (0, 1)
    for ready, staleness in ((first, 0), (second, 1)):
        (update,) = ready.updates
        assert {int(value) for batch in update.micro_batches for value in batch.staleness_N} == {
            staleness
        }
        assert ready.version - min(group.version_min for group in ready.batch.groups) == staleness
    assert not {group.group_uid for group in first.batch.groups} & {
        group.group_uid for group in second.batch.groups
    }


def test_groups_too_old_for_the_next_version_are_not_prefetched(
    tmp_path: Path, closing: list[Coordinator]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1)
    coordinator = open_coordinator(config)
    closing.append(coordinator)
    publish(coordinator, 0, 0)
    play_all(coordinator)
    publish(coordinator, 1, 1)
    with contextlib.closing(Prefetch(loader_of(coordinator))) as batches:
        # version 1 is the learner's now, and the groups are of version 0
        batches.start(version=2, learner_step=3)
        wait_for(lambda: coordinator.catalog.counts().stale == 4)
        assert batches.take(timeout_s=0.0) is None


def test_closing_ends_the_thread_while_it_waits_and_what_it_claimed_can_be_given_back(
    tmp_path: Path, closing: list[Coordinator]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1)
    coordinator = open_coordinator(config)
    closing.append(coordinator)
    publish(coordinator, 0, 0)
    source = loader_of(coordinator)
    with contextlib.closing(Prefetch(source)) as waiting:
        waiting.start(version=0, learner_step=1)
        wait_for(lambda: len(prefetch_threads()) == 1)
    assert prefetch_threads() == []
    play_all(coordinator)
    with contextlib.closing(Prefetch(source)) as batches:
        batches.start(version=0, learner_step=1)
        wait_for(lambda: batches.has_groups)
    assert prefetch_threads() == []
    assert batches.under_way
    assert coordinator.catalog.counts().claimed == 2
    assert coordinator.release_claims(0) == 2
    counts = coordinator.catalog.counts()
    assert (counts.claimed, counts.complete, in_play(counts)) == (0, 4, 4)
    assert coordinator.release_claims(0) == 0


def test_an_error_in_the_thread_is_raised_where_the_batch_is_taken(
    tmp_path: Path, closing: list[Coordinator]
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1)
    coordinator = open_coordinator(config)
    closing.append(coordinator)
    publish(coordinator, 0, 0)
    play_all(coordinator)
    for path in coordinator.layout.segments.rglob("*.parquet"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with contextlib.closing(Prefetch(loader_of(coordinator))) as batches:
        batches.start(version=0, learner_step=1)
        with pytest.raises(DigestError, match="its bytes changed on disk"):
            batches.take(timeout_s=DEADLINE_S)


@pytest.mark.parametrize("is_own", [True, False])
def test_the_pages_of_another_users_run_are_counted_before_they_are_decoded(
    is_own: bool,
    tmp_path: Path,
    closing: list[Coordinator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`gigpo replay` reads runs of others too."""
    coordinator = open_coordinator(make_config(tmp_path / "run", max_staleness=1))
    closing.append(coordinator)
    publish(coordinator, 0, 0)
    play_all(coordinator)
    if not is_own:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    counted: list[str] = []
    read_table = segment_encoding.read_table

    def noted(*arguments: Any, name: str, **others: Any) -> pa.Table:
        counted.append(name)
        return read_table(*arguments, name=name, **others)

    monkeypatch.setattr(segment_encoding, "read_table", noted)
    loader = loader_of(coordinator)
    batch = loader.claim(0)
    assert batch is not None
    prepared = prepare_batch(loader, batch, version=0, learner_step=1, more=None)
    assert prepared.summary.n_rows > 0 and len(counted) == (0 if is_own else len(batch.segments))


def test_a_time_out_of_the_coordinator_is_an_error_and_not_a_batch_that_is_not_ready_yet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1)
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")

    def claim(version: int) -> None:
        raise TimeoutError("the coordinator is gone")

    loader = make_loader(config, layout, claim=claim, refill=no_refill, ask_critic=no_critic)
    with contextlib.closing(Prefetch(loader)) as batches:
        batches.start(version=0, learner_step=1)
        with pytest.raises(TimeoutError, match="gone"):
            batches.take(timeout_s=DEADLINE_S)
    assert prefetch_threads() == []
    assert caplog.records == [], "what was raised is not logged too"


def test_an_error_that_nobody_takes_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop stops at that moment, for a reason of its own."""
    config = make_config(tmp_path / "run", max_staleness=1)
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    claiming = threading.Event()

    def claim(version: int) -> None:
        claiming.set()
        raise DigestError("a segment is damaged")

    loader = make_loader(config, layout, claim=claim, refill=no_refill, ask_critic=no_critic)
    with contextlib.closing(Prefetch(loader)) as batches:
        batches.start(version=0, learner_step=1)
        assert claiming.wait(DEADLINE_S)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "ERROR",
        "the next batch could not be prepared: a segment is damaged",
    )
    assert record.exc_info is not None and record.exc_info[0] is DigestError


# The loop


def test_the_loop_trains_while_the_next_batch_is_claimed_except_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=4)
    coordinator = open_coordinator(config)
    seen: list[int] = []

    def train(stand_in: object, updates: object) -> object:
        if len(seen) < 3:
            wait_for(lambda: coordinator.catalog.counts().claimed == 4)
        seen.append(coordinator.catalog.counts().claimed)
        return good(updates)  # type: ignore[arg-type]

    learner = make_learner(monkeypatch, config, Handle(coordinator), train)  # type: ignore[arg-type]
    learner.run()
    assert seen == [4, 4, 4, 2]
    assert coordinator.catalog.counts().claimed == 0
    names = coordinator.catalog.latest_metrics()
    assert {
        f"time/{name}_s" for name in ("read", "advantages", "filter", "pack", "batch_wait", "step")
    } <= names.keys()
    coordinator.close()
    assert prefetch_threads() == []
    run = Path(config.run_dir)
    assert rows(run, "FROM staleness_violations") == []
    lineage = rows(
        run, "SELECT learner_step, version_in, count(*) FROM lineage GROUP BY ALL ORDER BY 1"
    )
    assert lineage == [(step, step - 1, 2) for step in range(1, 5)]


def test_in_synchronous_mode_nothing_is_prefetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=0, steps=3)
    coordinator = open_coordinator(config)
    handle = Handle(coordinator)
    seen: list[tuple[int, int]] = []

    def train(stand_in: object, updates: object) -> object:
        time.sleep(0.1)  # two polls, were there any
        # none for the version that comes
        assert set(handle.claims_for) == set(range(learner.version + 1))
        seen.append((coordinator.catalog.counts().claimed, play_all(coordinator)))
        return good(updates)  # type: ignore[arg-type]

    learner = make_learner(monkeypatch, config, handle, train)  # type: ignore[arg-type]
    learner.run()
    coordinator.close()
    assert seen == [(2, 0)] * 3
    assert rows(Path(config.run_dir), "SELECT max(staleness) FROM lineage") == [(0,)]


def test_stopped_in_order_nothing_stays_claimed_and_nothing_is_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=6)
    coordinator = open_coordinator(config)

    def stop_at_the_second(stand_in: object, updates: object) -> object:
        wait_for(lambda: coordinator.catalog.counts().claimed == 4)
        if learner.step == 1:
            learner.stopping.set()
        return good(updates)  # type: ignore[arg-type]

    learner = make_learner(monkeypatch, config, Handle(coordinator), stop_at_the_second)  # type: ignore[arg-type]
    assert learner.restored == "a new run"
    assert learner.run() == 2
    counts = coordinator.catalog.counts()
    assert (counts.claimed, counts.complete, counts.trained) == (0, 2, 4)
    assert prefetch_threads() == []
    coordinator.close()

    again = open_coordinator(config)
    learner = make_learner(
        monkeypatch, config, Handle(again), lambda stand_in, updates: good(updates)
    )
    assert "continues at learner step 2 as version 2; 0 groups" in learner.restored
    assert learner.run() == 6
    again.close()
    lineage = rows(
        Path(config.run_dir),
        "SELECT learner_step, count(DISTINCT group_uid) FROM lineage WHERE batch_state = 'trained' "
        "GROUP BY 1 ORDER BY 1",
    )
    assert lineage == [(step, 2) for step in range(1, 7)]
    assert rows(
        Path(config.run_dir), "SELECT count(DISTINCT group_uid) FROM lineage WHERE live"
    ) == [(12,)]


def test_killed_with_two_batches_claimed_both_are_available_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=4)
    coordinator = open_coordinator(config)

    def die_at_the_second(stand_in: object, updates: object) -> object:
        wait_for(lambda: coordinator.catalog.counts().claimed == 4)
        if learner.step == 1:
            raise MemoryError
        return good(updates)  # type: ignore[arg-type]

    learner = make_learner(monkeypatch, config, Handle(coordinator), die_at_the_second)  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        learner.run()
    assert prefetch_threads() == []
    assert coordinator.catalog.counts().claimed == 4
    coordinator.close()

    again = open_coordinator(config)
    learner = make_learner(
        monkeypatch, config, Handle(again), lambda stand_in, updates: good(updates)
    )
    # without a checkpoint, from the beginning
    assert "continues at learner step 0 as version 2; 6 groups" in learner.restored
    assert again.catalog.counts().claimed == 0
    assert learner.run() == 4
    again.close()
    run = Path(config.run_dir)
    assert rows(run, "FROM staleness_violations") == []
    assert rows(run, "SELECT count(*), count(DISTINCT group_uid) FROM lineage WHERE live") == [
        (8, 8)
    ]


def test_damaged_newest_weights_are_published_again_under_a_new_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "run", max_staleness=1, steps=2)
    coordinator = open_coordinator(config)
    learner = make_learner(
        monkeypatch, config, Handle(coordinator), lambda stand_in, updates: good(updates)
    )
    assert learner.run() == 2
    newest = coordinator.newest_version()
    assert newest is not None and newest.version == 2
    (Path(config.run_dir) / newest.path / WEIGHTS_FILE).write_text("cut")
    learner = make_learner(
        monkeypatch, config, Handle(coordinator), lambda stand_in, updates: good(updates)
    )
    assert "continues at learner step 2 as version 3" in learner.restored
    coordinator.close()

"""Test WeightSync with a stand-in for the engine and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import store
from actors.inference import weight_sync
from actors.inference.weight_load import WeightLoad
from actors.inference.weight_sync import LOADED, REFUSED, WeightSync
from store import Catalog, RunLayout, VersionRecord, WeightFileError, export, write_open_sql
from store.reading import open_sql

# One row per published version: by how many loads it was served, and how many of them read
# something else.
SERVED_AS_PUBLISHED = f"""
    WITH load AS (
        SELECT component, (detail ->> 'version')::BIGINT AS version, detail ->> 'digest' AS served
        FROM events WHERE what = '{LOADED}'
    )
    SELECT version, count(served) AS loads, count(*) FILTER (served <> digest) AS different
    FROM versions LEFT JOIN load USING (version) GROUP BY ALL ORDER BY version"""


class Engine:
    """Serve a version whose file holds its published digest."""

    def __init__(self) -> None:
        self.served: list[int] = []
        self.sent: list[str] = []  # digests of what the learner has sent
        self.joined: list[str] = []

    async def join_broadcast(self, address: str) -> None:
        self.joined.append(address)

    async def load_received(self, *, version: int, digest: str) -> WeightLoad | None:
        if digest not in self.sent:
            return None
        self.served.append(version)
        return self.loaded(version, digest, received=True)

    async def load_weights(self, *, version: int, path: Path, digest: str) -> WeightLoad:
        if not (path / "file").is_file():
            raise WeightFileError(f"no weights at {path}")
        if (path / "file").read_text() != digest:
            raise WeightFileError(f"{path} has another digest")
        self.served.append(version)
        return self.loaded(version, digest, received=False)

    def loaded(self, version: int, digest: str, *, received: bool) -> WeightLoad:
        phases = dict.fromkeys(
            (
                "check_ms",
                "verify_ms",
                "pause_ms",
                "start_ms",
                "update_ms",
                "finish_ms",
                "resume_ms",
            ),
            1.25,
        )
        return WeightLoad(version=version, file_digest=digest, received=received, **phases)


class Run:
    """Combine a run that publishes with an engine that follows."""

    def __init__(self, root: Path, *, max_staleness: int) -> None:
        self.layout = RunLayout.create(root, config_yaml="")
        write_open_sql(self.layout, macros=[], max_staleness=max_staleness)
        self.catalog = Catalog.open(self.layout)
        self.engine = Engine()
        self.address: str | None = None
        self.unwritten: list[int] = []
        self.weight_update: Any = contextlib.nullcontext
        self.weights = WeightSync(
            self.engine,  # type: ignore[arg-type]
            self.layout,
            self,  # type: ignore[arg-type]
            limits_loads=True,
            is_broadcast=True,
            max_staleness=max_staleness,
        )

    async def newest_version(self) -> VersionRecord | None:
        return self.catalog.latest_version()

    async def is_written(self, version: int) -> bool:
        return version not in self.unwritten

    async def rendezvous(self) -> str | None:
        return self.address

    async def record(self, what: str, detail: str) -> None:
        self.catalog.log(component="worker-0", what=what, detail=detail)

    def publish(self, version: int, *, whole: bool = True) -> VersionRecord:
        directory = self.layout.weights_dir(version)
        directory.mkdir()
        (directory / "file").write_text(f"digest {version}" if whole else "something else")
        path = self.layout.relative(directory)
        self.catalog.record_version(
            VersionRecord(
                version=version, path=path, digest=f"digest {version}", learner_step=version
            )
        )
        newest = self.catalog.latest_version()
        assert newest is not None
        return newest

    def serve(self, version: VersionRecord) -> None:
        asyncio.run(self.weights.sync(version))

    def sql(self, query: str) -> list[dict[str, object]]:
        export(self.catalog, self.layout)
        with store.open_run(self.layout.root) as reader:
            return reader.sql(query).to_pylist()

    def events(self, what: str) -> list[dict[str, object]]:
        rows = self.sql(f"SELECT detail FROM events WHERE what = '{what}' ORDER BY lsn")
        return [json.loads(str(row["detail"])) for row in rows]


def test_the_view_weight_loads_adds_the_phases_in_which_generation_pauses() -> None:
    names = [field.name for field in fields(WeightLoad)]
    paused = names[names.index("pause_ms") : names.index("resume_ms") + 1]
    added = ", ".join(f"load.{name}" for name in paused)
    assert f"list_sum([{added}])" in " ".join(open_sql.VIEWS.read_text().split())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run", max_staleness=1)
    yield run
    run.catalog.close()


def test_one_query_shows_that_the_served_weights_are_the_published_ones(run: Run) -> None:
    for version in range(3):
        run.serve(run.publish(version))
    run.serve(run.publish(3))
    # older: nothing to do
    run.serve(VersionRecord(version=2, path="weights/v000002", digest="digest 2", learner_step=2))
    assert run.engine.served == [0, 1, 2, 3]
    assert run.sql(SERVED_AS_PUBLISHED) == [
        {"version": v, "loads": 1, "different": 0} for v in range(4)
    ]
    (*_, last) = run.events(LOADED)
    assert last["digest"] == "digest 3"
    assert last["update_ms"] == 1.2
    asyncio.run(run.record(LOADED, '{"version": 2, "digest": "another"}'))
    assert run.sql(SERVED_AS_PUBLISHED)[2] == {"version": 2, "loads": 2, "different": 1}


def test_weights_that_were_sent_need_no_file_and_those_that_were_not_do(run: Run) -> None:
    run.address = "127.0.0.1:1"
    run.serve(run.publish(0))
    run.engine.sent += ["digest 0", "digest 1"]
    run.serve(run.publish(1, whole=False))
    run.serve(run.publish(2))
    assert run.engine.served == [0, 1, 2]
    assert [event["received"] for event in run.events(LOADED)] == [False, True, False]
    assert run.engine.joined == ["127.0.0.1:1"] * 3  # told again: the engine may have lost touch
    assert run.sql(SERVED_AS_PUBLISHED) == [
        {"version": v, "loads": 1, "different": 0} for v in range(3)
    ]
    run.serve(run.publish(3, whole=False))
    (refusal,) = run.events(REFUSED)
    assert refusal["version"] == 3


def test_only_files_are_loaded_one_engine_after_the_other(run: Run) -> None:
    """Sent weights are in the engine's memory already, so it need not wait for other engines."""
    locked = []

    @contextlib.asynccontextmanager
    async def lock() -> AsyncIterator[None]:
        locked.append(len(run.engine.served))
        yield

    run.weight_update = lock
    run.address = "127.0.0.1:1"
    run.engine.sent.append("digest 1")
    for version in range(3):
        run.serve(run.publish(version))
    assert [event["received"] for event in run.events(LOADED)] == [False, True, False]
    assert locked == [0, 2], "for the first and the last version"


def test_weights_that_are_not_written_yet_are_waited_for_and_not_refused(run: Run) -> None:
    run.address = "127.0.0.1:1"
    run.serve(run.publish(0))
    first, run.unwritten = run.publish(1, whole=False), [1]
    run.serve(first)
    assert run.weights.version == 0
    run.engine.sent.append("digest 1")  # it arrives before the files do
    run.serve(first)
    assert run.weights.version == 1
    second, run.unwritten = run.publish(2), [2]
    run.serve(second)
    assert run.weights.version == 1
    run.unwritten = []
    run.serve(second)
    assert run.engine.served == [0, 1, 2]
    assert run.events(REFUSED) == []


def test_a_version_that_is_not_written_yet_supersedes_no_other(run: Run) -> None:
    first = run.publish(1)
    run.publish(2, whole=False)
    run.unwritten = [2]
    run.serve(first)
    assert run.engine.served == [1]


def test_damaged_weights_are_refused_once_and_the_next_ones_are_served(run: Run) -> None:
    run.serve(run.publish(0))
    damaged = run.publish(1, whole=False)
    for _ in range(3):
        run.serve(damaged)
    assert run.weights.version == 0
    (refusal,) = run.events(REFUSED)
    assert refusal["reason"] == f"{run.layout.weights_dir(1)} has another digest"
    assert (refusal["version"], refusal["serving"], refusal["published"]) == (1, 0, "digest 1")
    run.serve(run.publish(2))
    assert run.engine.served == [0, 2]


def test_weights_that_come_late_are_served_at_another_try(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sync, "RETRY_S", 1e9)
    run.serve(run.publish(0))
    late = run.publish(1)
    file = run.layout.weights_dir(1) / "file"
    kept = file.read_text()
    file.unlink()
    run.serve(late)
    file.write_text(kept)
    run.serve(late)
    assert run.engine.served == [0]  # not asked again yet
    monkeypatch.setattr(weight_sync, "RETRY_S", 0.0)
    run.serve(late)
    assert run.engine.served == [0, 1]
    assert len(run.events(REFUSED)) == 1


def test_a_version_that_others_have_moved_on_from_is_skipped(run: Run) -> None:
    run.serve(run.publish(0))
    removed = run.publish(1)
    run.publish(2)
    shutil.rmtree(run.layout.weights_dir(1))
    run.serve(removed)
    assert run.engine.served == [0, 2]
    assert run.events(REFUSED) == []


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_engine_too_old_to_be_of_use_ends_the_run(tmp_path: Path, max_staleness: int) -> None:
    run = Run(tmp_path / "run", max_staleness=max_staleness)
    run.serve(run.publish(0))
    for version in range(1, max_staleness + 1):
        run.serve(run.publish(version, whole=False))
    with pytest.raises(WeightFileError, match="has another digest"):
        run.serve(run.publish(max_staleness + 1, whole=False))
    assert len(run.events(REFUSED)) == max_staleness + 1
    run.catalog.close()


def test_a_version_is_skipped_once_for_one_published_while_the_engine_waited(run: Run) -> None:
    """An engine that waits longer than a learner step still loads every second version."""
    first = run.publish(1)
    waits = iter(range(2, 10))

    @contextlib.asynccontextmanager
    async def long_wait() -> AsyncIterator[None]:
        run.publish(next(waits))
        yield

    run.weight_update = long_wait
    run.serve(first)  # finds 2, and loads it although 3 is there by then
    assert run.engine.served == [2]
    newest = run.catalog.latest_version()
    assert newest is not None and newest.version == 3
    run.serve(newest)
    assert run.engine.served == [2, 4]

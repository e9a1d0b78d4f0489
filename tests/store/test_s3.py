"""A run whose segments and weights are in an object store: the same promises, against a real server
on this machine.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.__main__ import main
from store import (
    Catalog,
    DigestError,
    RunLayout,
    StoreError,
    export,
    read_segment,
    storage,
    write_open_sql,
    write_segment,
)
from store.exchange.dataset_export import export_selection, live_files
from store.exchange.dataset_import import import_selection
from store.maintenance.compact import CompactionPolicy
from store.maintenance.sweep import sweep_retired
from store.reading.manifest import read_manifest
from store.reading.mirror import fetch_run, mirror
from store.reading.reader import open_run
from store.remote_directory import local_directory, prune_published, publish_directory
from tests.crash import elsewhere
from tests.crash.lab import new_workers, scratch
from tests.store.test_crash import evenly
from tests.support.run_views import connect
from tests.support.s3_server import BUCKET, Server, s3_server
from tests.support.store_runs import compact_once
from tests.support.store_samples import from_table, make_trajectory, open_train_group, play


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server with one bucket."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as found:
        yield found


def make_run(root: Path, uri: str, *, n_groups: int = 2) -> RunLayout:
    layout = RunLayout.create(root, config_yaml="a: 1\n", storage_uri=uri)
    write_open_sql(layout, macros=(), max_staleness=4)
    add_groups(layout, n_groups)
    return layout


def add_groups(layout: RunLayout, n_groups: int) -> None:
    with Catalog.open(layout) as catalog:
        for _ in range(n_groups):
            play(layout, catalog, open_train_group(catalog, None))
        export(catalog, layout)


def count(root: Path, *, as_of: int | None = None) -> list[int]:
    with open_run(root, as_of=as_of) as reader:
        row = reader.sql(
            "SELECT count(*) AS s, count(DISTINCT traj_uid) AS t, count(DISTINCT group_uid) AS g "
            "FROM steps"
        )
        return [row[name][0].as_py() for name in ("s", "t", "g")]


def test_a_run_lives_in_the_bucket_and_is_read_from_it(server: Server, tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run", server.uri("lives"))
    assert not list(layout.segments.rglob("*.parquet"))
    assert {"run.json", "open.sql", "manifest.json"} < server.objects("lives").keys()
    with Catalog.open(RunLayout.open(layout.root)) as catalog:
        group = open_train_group(catalog, None)
        wrote = [make_trajectory(group, member) for member in group.missing]
        segment = write_segment(layout, wrote, worker="w0", epoch=catalog.epoch)
        assert server.objects("lives")[segment.path] == segment.n_bytes
        assert catalog.commit(segment, epoch=catalog.epoch).new == group.traj_uids
        assert catalog.commit(segment, epoch=catalog.epoch).new == group.traj_uids  # a retry
        batch = catalog.claim(n_groups=3, current_version=0, max_staleness=4)
        assert batch is not None
        read = [
            trajectory
            for meta in batch.segments
            for trajectory in from_table(read_segment(layout, meta))
        ]
        assert len(read) == 6
        assert {trajectory.traj_uid: trajectory for trajectory in wrote}.items() <= {
            t.traj_uid: t for t in read
        }.items()
        before = export(catalog, layout)
    assert count(layout.root) == [18, 6, 3]
    add_groups(layout, 1)
    assert count(layout.root) == [24, 8, 4]  # fetched what is new
    assert count(layout.root, as_of=before) == [18, 6, 3]
    with connect(layout) as connection:
        assert connection.sql("SELECT count(*) FROM steps").fetchall() == [(24,)]
    assert len(live_files(layout.root)) == 4
    assert main(["fsck", str(layout.root)]) == 0
    layout.storage.write(segment.path, b"other bytes")
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    # not the good copy read from here
    assert (layout.quarantine / Path(segment.path).name).read_bytes() == b"other bytes"
    assert segment.path not in server.objects("lives")
    assert count(layout.root) == [18, 6, 3]


def test_compaction_and_retirement_work_on_objects(server: Server, tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run", server.uri("compacts"), n_groups=4)
    old = {path for path in server.objects("compacts") if path.startswith("segments/")}
    with Catalog.open(layout) as catalog:
        batch = catalog.claim(n_groups=4, current_version=0, max_staleness=4)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=0)
        assert count(layout.root) == [24, 8, 4]
        copy = fetch_run(server.uri("compacts"), tmp_path / "copy")
        reader = open_run(copy.root)
        policy = CompactionPolicy(fan_in=4, max_live_files=500, min_file_bytes=1 << 20)
        result = compact_once(catalog, layout, policy=policy, skip=())
        assert result is not None
        assert result.merged is not None
        export(catalog, layout)
        assert sweep_retired(catalog, layout, window_s=0.0) == ()  # the backup still names them
        catalog.back_up()
        assert old <= server.objects("compacts").keys()
        assert count(layout.root) == [24, 8, 4]
        assert set(sweep_retired(catalog, layout, window_s=0.0)) == old
        assert {path for path in server.objects("compacts") if path.startswith("segments/")} == {
            result.merged.path
        }
        assert count(layout.root) == [24, 8, 4]
        here = mirror(layout)  # this user's copy, which is not in the run
        assert [here.relative(path) for path in here.segments.rglob("*.parquet")] == [
            result.merged.path
        ]
        assert not list(layout.segments.rglob("*.parquet"))
    with reader:  # of the copy, from before: its files stay until it is done
        fetch_run(server.uri("compacts"), copy.root)
        assert reader.sql("SELECT count(*) AS n FROM steps")["n"].to_pylist() == [24]
        assert {copy.relative(path) for path in copy.segments.rglob("*.parquet")} == {
            *old,
            result.merged.path,
        }
    fetch_run(server.uri("compacts"), copy.root)
    assert [copy.relative(path) for path in copy.segments.rglob("*.parquet")] == [
        result.merged.path
    ]


def test_another_machine_fetches_a_copy_and_catches_up(server: Server, tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run", server.uri("fetched"))
    copy = tmp_path / "elsewhere/copy"
    assert main(["fetch", server.uri("fetched"), str(copy)]) == 0
    assert copy.stat().st_mode & 0o777 == 0o700, "its settings may hold a secret"
    shutil.move(layout.root, tmp_path / "hidden")  # nothing of the run's own directory is needed
    assert count(copy) == [12, 4, 2]
    shutil.move(tmp_path / "hidden", layout.root)
    add_groups(layout, 1)
    assert count(copy) == [12, 4, 2]
    fetch_run(server.uri("fetched"), copy)
    assert count(copy) == [18, 6, 3]
    # what is done to a copy does nothing to the run
    assert RunLayout.open(copy).info.storage_uri is None
    for wrong in (layout.root, tmp_path):
        with pytest.raises(StoreError, match="choose a new directory"):
            fetch_run(server.uri("fetched"), wrong)
    manifest = read_manifest(layout)
    assert manifest is not None
    path = manifest.segments[-1]
    layout.storage.write(path, bytes(reversed(layout.storage.read(path).to_pybytes())))
    with pytest.raises(DigestError, match=f"s3://{BUCKET}/fetched/{path}"):
        fetch_run(server.uri("fetched"), tmp_path / "another")


def test_weights_go_up_whole_and_come_down_whole(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_run(tmp_path / "run", server.uri("weights"), n_groups=0)
    for version in range(4):
        directory = layout.weights_dir(version)
        directory.mkdir()
        # more than one part of an upload
        (directory / "model.safetensors").write_bytes(bytes([version]) * 6_000_000)
        (directory / "empty.txt").write_bytes(b"")
        publish_directory(layout, directory)
        prune_published(layout, layout.weights, kept=lambda names: names[-3:])
    assert sorted(
        {path.split("/")[1] for path in server.objects("weights") if path.startswith("weights/")}
    ) == [
        "v000001",
        "v000002",
        "v000003",
    ]
    worker = RunLayout(root=tmp_path / "worker", info=layout.info)  # on a machine of its own
    for version in (1, 2, 3):
        here = local_directory(worker, f"weights/v{version:06d}")
        assert (here / "model.safetensors").read_bytes() == bytes([version]) * 6_000_000
        assert (here / "empty.txt").read_bytes() == b""
    assert sorted(path.name for path in worker.weights.iterdir()) == ["v000002", "v000003"]
    assert local_directory(layout, "weights/v000000") == layout.weights_dir(0)  # the learner's own
    layout.storage.remove("weights/v000001/complete.json")
    for absent in ("weights/v000000", "weights/v000001"):
        with pytest.raises(StoreError, match=f"s3://{BUCKET}/weights/{absent}"):
            local_directory(worker, absent)
    write = storage.RemoteStorage.write

    def fail_on_the_last_file(self: storage.RemoteStorage, path: str, data: bytes) -> None:
        if path.endswith("model.safetensors"):
            raise StoreError("the learner dies here")
        write(self, path, data)

    monkeypatch.setattr(storage.RemoteStorage, "write", fail_on_the_last_file)
    layout.weights_dir(3).rename(layout.weights_dir(4))
    with pytest.raises(StoreError, match="dies here"):
        publish_directory(layout, layout.weights_dir(4))
    with pytest.raises(StoreError, match="v000004/complete.json: it is not there"):
        local_directory(worker, "weights/v000004")
    assert sorted(path.name for path in worker.weights.iterdir()) == ["v000002", "v000003"]


@pytest.mark.parametrize("n_bytes", [0, 1, 999, 1000, 1001, 5500, 6000])
def test_a_file_of_several_pieces_is_read_whole(
    server: Server, monkeypatch: pytest.MonkeyPatch, n_bytes: int
) -> None:
    monkeypatch.setattr(storage, "PIECE_BYTES", 1000)
    bucket = storage.open_storage(server.uri("pieces"))
    data = random.Random(n_bytes).randbytes(n_bytes)
    bucket.write(f"{n_bytes}.bin", data)
    assert bucket.read(f"{n_bytes}.bin").to_pybytes() == data


def test_a_dataset_may_be_in_a_bucket(server: Server, tmp_path: Path) -> None:
    source = make_run(tmp_path / "source", server.uri("source"))
    target = make_run(tmp_path / "target", server.uri("target"), n_groups=1)
    export_selection(source.root, server.uri("dataset"), where="won", as_of=None)
    assert import_selection(target.root, server.uri("dataset")).n_trajectories == 2
    assert count(target.root) == [12, 4, 3]
    again = import_selection(target.root, server.uri("dataset"))  # of the copy in the cache
    assert (again.n_trajectories, again.n_known) == (0, 2)
    export_selection(source.root, server.uri("changed"), where=None, as_of=None)
    (part,) = [path for path in server.objects("changed") if path.endswith(".parquet")]
    storage.open_storage(server.uri("changed")).write(part, b"other bytes")
    with pytest.raises(DigestError, match=f"s3://{BUCKET}/changed/{part}"):
        import_selection(target.root, server.uri("changed"))
    with pytest.raises(StoreError, match="in the run"):
        export_selection(source.root, server.uri("source/dataset"), where=None, as_of=None)


def test_nothing_is_lost_while_the_server_is_silent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_run(tmp_path / "run", server.uri("silent"))
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, None)
        played = [make_trajectory(group, member) for member in group.missing]
        committed = write_segment(layout, played[:1], worker="w0", epoch=catalog.epoch)
        catalog.commit(committed, epoch=catalog.epoch)
        # Arrow itself would wait for more than a minute
        monkeypatch.setattr(storage, "DEADLINE_S", 1.0)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                StoreError,
                match=f"cannot write s3://{BUCKET}/silent/segments/.* within 1 s.*start again",
            ):
                write_segment(layout, played[1:], worker="w0", epoch=catalog.epoch)
            with pytest.raises(StoreError, match=f"cannot read s3://{BUCKET}/silent/segments/"):
                read_segment(layout, committed)
            with pytest.raises(StoreError, match=f"cannot list s3://{BUCKET}/silent/export"):
                export(catalog, layout)
            with pytest.raises(StoreError, match=f"cannot read s3://{BUCKET}/silent/manifest.json"):
                open_run(layout.root)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        monkeypatch.undo()
        play(layout, catalog, group)  # all of it again: what was committed is a duplicate
        export(catalog, layout)
    assert count(layout.root) == [18, 6, 3]


def test_a_wrong_uri_is_refused_by_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", server.uri("taken"), n_groups=0)
    for uri, message in (
        (
            server.uri("taken"),
            f"s3://{BUCKET}/taken/ has files of another run; give each run a store.uri of its own",
        ),
        (
            server.uri("x").replace(BUCKET, "no-such-bucket"),
            "s3://no-such-bucket/x/.*check the URI",
        ),
        ("s3://key:secret@bucket/x", "set them in the environment"),
        ("ftp://host/x", "ftp is not one of file, s3"),
    ):
        with pytest.raises(StoreError, match=message) as caught:
            RunLayout.create(tmp_path / "new", config_yaml="", storage_uri=uri)
        assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
        assert not RunLayout.exists(tmp_path / "new")
    monkeypatch.setattr(storage, "DEADLINE_S", 1.0)  # a child process would not know it
    monkeypatch.setattr("store.storage_claim.in_limited_process", lambda work, uri, **_: work(uri))
    nobody = server.uri("x").replace(f":{server.port}", ":1")  # another client: refused, not silent
    with pytest.raises(StoreError, match=f"cannot list s3://{BUCKET}/x/ within 1 s"):
        RunLayout.create(tmp_path / "new", config_yaml="", storage_uri=nobody)


def test_segments_may_be_on_a_shared_filesystem(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run", f"file://{tmp_path}/shared/run")
    assert len(list((tmp_path / "shared/run/segments").rglob("*.parquet"))) == 2
    assert count(layout.root) == [12, 4, 2]
    assert main(["fsck", str(layout.root)]) == 0


# How often an owner is killed. Of the owner that keeps its disk, half of them are at requests and
# half at changes of the catalog. `make test-crash`: 240.
KILLS = int(os.environ.get("STORE_S3_KILLS", "2"))
MOST_LATE = 0.02


def test_an_owner_that_is_killed_loses_and_doubles_nothing(server: Server) -> None:
    """During uploads, commits, exports, compaction and removal; whatever reached the bucket and
    whatever did not.
    """
    with new_workers() as pool, scratch() as directory:  # they have the credentials
        calls = pool.submit(elsewhere.undisturbed, directory, server.uri("undisturbed")).result()
        kills = {}
        for place, number in enumerate(evenly(range(1, calls.requests + 1), KILLS // 2)):
            when = (elsewhere.BEFORE, elsewhere.AFTER)[place % 2]
            uri = server.uri(f"request{number}")
            kills[f"{when} request {number}"] = pool.submit(
                elsewhere.kill_at_request, directory, uri, number, when
            )
        for number in evenly(range(1, calls.files + 1), KILLS // 2):
            uri = server.uri(f"call{number}")
            kills[f"call {number}"] = pool.submit(elsewhere.kill_at_call, directory, uri, number)
        bad = {at: broken for at, kill in kills.items() if (broken := kill.result())}
    print(f"{len(kills)} kills at {calls}: {len(bad)} bad")
    _check_none_but_late(bad)


def test_a_killed_owner_whose_disk_is_lost_goes_on_from_the_bucket(server: Server) -> None:
    """0 lost that were committed, 0 doubled, 0 stale trained; whatever reached the bucket, and also
    if whoever brings it is killed.
    """
    with new_workers() as pool, scratch() as directory:
        calls = pool.submit(elsewhere.undisturbed, directory, server.uri("not-lost")).result()
        kills = {}
        for place, number in enumerate(evenly(range(20, calls.requests + 1), KILLS)):
            when = (elsewhere.BEFORE, elsewhere.AFTER)[place % 2]
            kills[f"{when} request {number}"] = pool.submit(
                elsewhere.lose_disk_at_request,
                directory,
                server.uri(f"lost{number}"),
                number,
                when,
                bring_number=12 + 7 * place % 20,
            )
        bad = {at: broken for at, kill in kills.items() if (broken := kill.result())}
    print(f"{len(kills)} lost disks at {calls}: {len(bad)} bad")
    _check_none_but_late(bad)


def _check_none_but_late(bad: dict[str, str]) -> None:
    """Check that no kill did harm. One life has a few calls less than another, so the last points
    may lie behind its end.
    """
    late = [at for at, broken in bad.items() if broken == elsewhere.ENDED_BEFORE]
    assert bad.keys() == set(late)
    assert len(late) <= KILLS * MOST_LATE

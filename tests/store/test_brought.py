"""A run whose files are in a storage goes on from there alone, when its own disk is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest

import store.exchange.fork as fork_module
import store.layout as layout_module
import store.maintenance.rebuild as rebuild_module
from cli.__main__ import main
from store import (
    Catalog,
    CheckpointRecord,
    FencedError,
    FormatError,
    LockedError,
    Maintainer,
    RunLayout,
    StoreError,
    UnavailableError,
    VersionRecord,
    bring_catalog,
    bring_run,
    export,
    fork,
    is_brought,
    local_directory,
    local_model,
    open_run,
    primary_directory,
    publish_directory,
    run_at,
    sign_run,
    signed_texts,
    trust,
    trusted_texts,
    write_open_sql,
    write_segment,
)
from store.exchange import bring, run_making
from store.exchange.offline_import import parse_source, take_sources
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.maintainer import BACKUP_EVERY_S, MaintainerSettings
from store.maintenance.rebuild import rebuild
from store.remote_directory import has_directory, is_published, prune_published
from store.run_json import parse_run_json
from store.run_names import BASE_POLICY, SIGNED, UNFINISHED_BRING
from store.storage import MAX_FILE_BYTES, LocalStorage, open_storage
from store.untrusted.file_access import MAX_TEXT_BYTES
from store.untrusted.signatures import MAX_SIGNED_BYTES
from tests.support.file_modes import modes_at_each_write
from tests.support.neighbours import Neighbour
from tests.support.store_damage import ask
from tests.support.store_runs import MERGE_TWO
from tests.support.store_samples import make_trajectory, open_train_group, play

SETTINGS = MaintainerSettings(
    snapshot_window_s=900.0, keep_days=None, keep_versions=None, pause_s=60.0, policy=MERGE_TWO
)


def make_directory(layout: RunLayout, path: str, content: bytes) -> Path:
    directory = layout.root / path
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(content)
    return directory


def lose_the_owner(catalog: Catalog) -> None:
    """Close the database without the last backup, like kill -9."""
    catalog._database.close()


def train(catalog: Catalog, layout: RunLayout, *, step: int) -> None:
    """One learner step on one group, with its version and its checkpoint."""
    batch = catalog.claim(n_groups=1, current_version=step - 1, max_staleness=9)
    assert batch is not None
    path = f"weights/v{step:06d}"
    publish_directory(layout, make_directory(layout, path, b"weights"))
    catalog.record_version(VersionRecord(version=step, path=path, digest="d", learner_step=step))
    catalog.settle(batch.batch_id, learner_step=step, filtered={}, version_in=step - 1)
    path = f"checkpoints/step{step:06d}"
    publish_directory(layout, make_directory(layout, path, b"checkpoint %d" % step))
    assert catalog.record_checkpoint(CheckpointRecord(learner_step=step, path=path, version=step))


@pytest.fixture
def lost(tmp_path: Path) -> RunLayout:
    """Return a run whose owner was killed. Groups 0 and 1 were trained on, with checkpoints; 2 was
    trained on and 3 was played after the last backup, and half of 4; weights 4 are half uploaded.
    """
    layout = RunLayout.create(
        tmp_path / "run", config_yaml="a: 1\n", storage_uri=(tmp_path / "shared").as_uri()
    )
    (layout.root / "config.yaml").write_text("a: 1\n")
    sign_run(layout.root)
    for name in ("config.yaml", "signed.json"):
        layout.storage.write(name, (layout.root / name).read_bytes(), is_private=name == SIGNED)
    publish_directory(layout, make_directory(layout, BASE_POLICY, b"base"))
    write_open_sql(layout, macros=(), max_staleness=9)
    catalog = Catalog.open(layout)
    catalog.record_version(
        VersionRecord(version=0, path="weights/v000000", digest="d", learner_step=None)
    )
    for ordinal in range(3):
        play(layout, catalog, open_train_group(catalog, ordinal))
    for step in (1, 2):
        train(catalog, layout, step=step)
    batch = catalog.claim(n_groups=1, current_version=2, max_staleness=9)
    assert batch is not None
    catalog.settle(batch.batch_id, learner_step=3, filtered={}, version_in=2)
    catalog.record_version(
        VersionRecord(version=3, path="weights/v000003", digest="d", learner_step=3)
    )
    publish_directory(layout, make_directory(layout, "weights/v000003", b"weights"))
    make_directory(layout, "weights/v000004", b"weights")
    layout.storage.write("weights/v000004/model.safetensors", b"wei")
    play(layout, catalog, open_train_group(catalog, 3))
    group = open_train_group(catalog, 4)
    part = write_segment(
        layout, [make_trajectory(group, 1, version=3)], worker="w0", epoch=catalog.epoch
    )
    catalog.commit(part, epoch=catalog.epoch)
    export(catalog, layout)
    lose_the_owner(catalog)
    return layout


def states(root: Path) -> dict[int, tuple[str, int]]:
    with open_run(root) as reader:
        rows = reader.rows("SELECT ordinal, state, n_members FROM groups ORDER BY ordinal")
    return {row["ordinal"]: (row["state"], row["n_members"]) for row in rows}


def uri_of(layout: RunLayout) -> str:
    assert layout.info.storage_uri is not None
    return layout.info.storage_uri


def test_a_run_goes_on_from_its_storage_alone(lost: RunLayout, tmp_path: Path) -> None:
    """Bring a run whose last backup is old.

    The backup restores what was settled or committed before it. Newer trajectories are found from
    the segments.
    """
    shutil.rmtree(lost.root)
    root = tmp_path / "elsewhere" / "run"
    assert not is_brought(uri_of(lost), root)
    report = bring_run(uri_of(lost), root, trusts=False)
    assert is_brought(uri_of(lost), root)
    assert any(
        line.startswith("3 trajectories that are newer than the backup")
        for line in report.recovered
    )
    assert "training goes on from the checkpoint of learner step 2" in " ".join(report.lost)
    assert states(root) == {
        0: ("trained", 2),
        1: ("trained", 2),
        2: ("complete", 2),  # trained on after the backup: available again
        3: ("complete", 2),
        4: ("open", 1),
    }
    layout = RunLayout.open(root)
    assert (layout.root / BASE_POLICY / "model.safetensors").read_bytes() == b"base"
    checkpoint = local_directory(layout, "checkpoints/step000002")
    assert (checkpoint / "model.safetensors").read_bytes() == b"checkpoint 2"
    assert [
        finding for finding in check(layout, level=CONTENTS) if finding.severity == "error"
    ] == []
    with Catalog.open(layout) as catalog:
        latest = catalog.latest_version()
        # no number twice, also not that of weights whose upload was cut
        assert latest is not None and latest.version == 4
        group = catalog.lease_open_group(worker="w0", lease_s=60.0)
        assert group is not None and (group.ordinal, group.missing) == (4, (0,))
        play(layout, catalog, group, version=4)
        train(catalog, layout, step=5)
        export(catalog, layout)
    assert [state for state, _ in states(root).values()].count("trained") == 3
    with open_run(root) as reader:
        assert reader.rows("SELECT * FROM staleness_violations") == []
        (row,) = reader.rows(
            "SELECT count(*) AS n, count(DISTINCT traj_uid) AS t FROM trajectories"
        )
        assert row["n"] == row["t"] == 10


def test_only_files_that_are_newer_than_the_backup_are_read(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read no older segment: in an object store they may be many gigabytes."""
    read: list[str] = []
    plain = type(lost.storage).read

    def noted(self: object, path: str, **options: int) -> object:
        read.append(path)
        return plain(self, path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(lost.storage), "read", noted)
    bring_run(uri_of(lost), tmp_path / "again", trusts=False)
    n_files = len(list(lost.storage.files("segments")))
    assert (n_files, sum(path.startswith("segments/") for path in read)) == (5, 2)


def test_a_run_is_made_of_one_reading_of_its_run_json(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the file that was followed was another than the one that was signed."""
    n_read = 0
    plain = type(lost.storage).read

    def another_each_time(self: object, path: str, **options: int) -> object:
        nonlocal n_read
        data = plain(self, path, **options)  # type: ignore[arg-type]
        if path != "run.json":
            return data
        n_read += 1
        return pa.py_buffer(data.to_pybytes().replace(b"a: 1", b"a: %d" % n_read))

    monkeypatch.setattr(type(lost.storage), "read", another_each_time)
    bring_run(uri_of(lost), tmp_path / "again", trusts=False)
    assert n_read > 1, "an owner looks at it too"
    made = RunLayout.open(tmp_path / "again")
    assert made.info.config_yaml == "a: 1\n" and made.is_made_by_this_user()


def test_the_old_disk_is_no_longer_the_primary_one(lost: RunLayout, tmp_path: Path) -> None:
    """Neither a driver that was only cut off, nor one that is started there again, writes over what
    the run does elsewhere.
    """
    owner = Catalog.open(lost)  # alive, as far as it knows
    maintainer = Maintainer(owner, lost, settings=SETTINGS)
    maintainer.work()
    root = tmp_path / "elsewhere"
    bring_run(uri_of(lost), root, trusts=False)
    backup = lost.storage.read("backup/catalog.sqlite").to_pybytes()
    message = f"was brought to {root} on .* and goes on there; stop this one"
    with pytest.raises(FencedError, match=message):
        owner.back_up()
    with pytest.raises(FencedError, match=message):
        maintainer.work()
    with pytest.raises(FencedError, match=message):
        owner.record_checkpoint(
            CheckpointRecord(learner_step=7, path="checkpoints/step000007", version=3)
        )
    owner.close()
    with pytest.raises(FencedError, match=message):
        Catalog.open(lost)
    assert lost.storage.read("backup/catalog.sqlite").to_pybytes() == backup
    with Catalog.open(RunLayout.open(root)) as catalog:
        assert catalog.counts().open == 1
    with pytest.raises(StoreError, match=r"has other things in it .*run_dir=NEW"):
        bring_run(uri_of(lost), lost.root, trusts=False)
    # and back again
    shutil.rmtree(lost.root)
    bring_run(uri_of(lost), lost.root, trusts=False)
    Catalog.open(lost).close()
    with pytest.raises(FencedError):
        Catalog.open(RunLayout.open(root))


@pytest.mark.parametrize(
    "moment", ["store.primary_directory.take", "store.maintenance.rebuild._replace_catalog"]
)
@pytest.mark.parametrize("has_primary", [True, False])
def test_a_run_that_could_not_be_brought_stays_where_it_was(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, has_primary: bool
) -> None:
    """Press Ctrl-C while the directory becomes the primary one, or when the catalog is written.

    A full disk is the same.
    """
    if not has_primary:  # of an earlier version
        lost.storage.remove(primary_directory.PRIMARY)
        (lost.root / primary_directory.PRIMARY).unlink()
    take = primary_directory.take

    def interrupted(*given: Any, **_: object) -> None:
        if moment == "store.primary_directory.take":
            take(*given)
        uri = re.escape(uri_of(lost))
        with pytest.raises(FencedError, match=f"goes on there.*--resume {uri} run_dir=NEW"):
            lost.check_primary()
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    assert not (tmp_path / "new").exists()
    Catalog.open(lost).close()
    assert lost.storage.exists(primary_directory.PRIMARY) is has_primary


@pytest.mark.parametrize("first_is_whole", [False, True])
def test_a_run_that_two_could_not_bring_at_once_stays_where_it_was(
    lost: RunLayout, tmp_path: Path, first_is_whole: bool
) -> None:
    """The second one found the first, which never was whole, and gave the run back to it."""
    brings = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        brings.append(primary_directory.taken(tmp_path / name, lost.storage))
        brings[-1].__enter__()
    first, second = brings
    interrupt = KeyboardInterrupt()
    if first_is_whole:
        with pytest.raises(FencedError, match=r"was brought to .*second .* meanwhile"):
            first.__exit__(None, None, None)
    else:
        assert not first.__exit__(KeyboardInterrupt, interrupt, None)
    with pytest.raises(FencedError):
        lost.check_primary()
    assert not second.__exit__(KeyboardInterrupt, interrupt, None)
    Catalog.open(lost).close()
    bring_run(uri_of(lost), tmp_path / "third", trusts=False)
    assert b"before" not in lost.storage.read(primary_directory.PRIMARY).to_pybytes()
    Catalog.open(RunLayout.open(tmp_path / "third")).close()


@pytest.mark.parametrize("end", ["ctrl-c", "kill"])
@pytest.mark.parametrize("what", ["segment", "backup"])
def test_a_bring_that_ends_deletes_nothing_that_it_set_aside(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, end: str
) -> None:
    """The attack: one changed byte and Ctrl-C. The file was moved from the storage into the new
    directory, which was removed.
    """
    if what == "backup":
        path = lost.relative(lost.backup)
        changed = bytearray(lost.storage.read(path).to_pybytes())
        changed[len(changed) // 2 : len(changed) // 2 + 4096] = bytes(4096)
    else:  # of a group that came after the backup
        path = sorted((file.modified_us, file.path) for file in lost.storage.files("segments"))[-1][
            1
        ]
        changed = bytearray(lost.storage.read(path).to_pybytes())
        changed[len(changed) // 2] ^= 1
    lost.storage.remove(path)
    lost.storage.write(path, bytes(changed))
    before = {file.path for file in lost.storage.files("")}
    replace_catalog, ended = rebuild_module._replace_catalog, []

    def end_once(*given: Any) -> None:
        if not ended:
            ended.append(True)
            raise KeyboardInterrupt
        replace_catalog(*given)

    with monkeypatch.context() as patch:
        patch.setattr(rebuild_module, "_replace_catalog", end_once)
        if end == "kill":
            patch.setattr(bring, "_empty", lambda root: None)
        with pytest.raises(KeyboardInterrupt):
            bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    assert {file.path for file in lost.storage.files("")} >= before
    report = bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    assert any(path.rpartition("/")[2].partition(".")[0] in line for line in report.lost), report
    kept = [one.read_bytes() for one in (tmp_path / "new" / "quarantine").iterdir()]
    assert bytes(changed) in kept


def test_a_bring_with_the_run_json_of_another_run_moves_nothing(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: one changed byte of run.json in the storage, and --trust as the error says. Every
    segment was moved away, and the run went on from nothing.
    """
    text = lost.storage.read("run.json").to_pybytes().decode()
    digit = text.index(lost.info.run_id)
    other = "0" if text[digit] != "0" else "1"
    lost.storage.write("run.json", f"{text[:digit]}{other}{text[digit + 1 :]}".encode())
    before = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    wrong = rf"its segments are of run {lost.info.run_id}; put the right run.json back"
    with pytest.raises(FormatError, match=wrong):
        bring_run(uri_of(lost), tmp_path / "new", trusts=True)
    after = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    assert after == before
    Catalog.open(lost).close()  # its owner writes run.json again
    assert lost.storage.read("run.json").to_pybytes().decode() == text


@pytest.mark.parametrize("which", [1, 2])  # when it is taken, and when it is whole
def test_a_bring_whose_primary_is_written_late_takes_nothing(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The attack: a server held the request until the bring had failed. It fenced the run."""
    late: list[bytes] = []
    write = LocalStorage.write

    def write_late(storage: LocalStorage, path: str, data: bytes, **more: Any) -> None:
        if path == primary_directory.PRIMARY:
            late.append(data)
            if len(late) == which:
                raise UnavailableError("no answer")
        write(storage, path, data, **more)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", write_late)
        with pytest.raises(UnavailableError, match="no answer"):
            bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    Catalog.open(lost).close()
    lost.storage.write(primary_directory.PRIMARY, late[which - 1])  # now it comes
    Catalog.open(lost).close()
    with Catalog.open(lost) as owner:
        owner.back_up()
    bring_run(uri_of(lost), tmp_path / "newer", trusts=False)
    with pytest.raises(FencedError, match="was brought to .*newer on"):
        Catalog.open(lost)
    Catalog.open(RunLayout.open(tmp_path / "newer")).close()


def test_a_bring_that_is_killed_before_it_says_that_it_is_whole_is_whole(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given again and interrupted, it gave the run to the directory that it had emptied."""
    root = tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(primary_directory, "_finish", lambda *_, **__: os._exit(9))
        given = (uri_of(lost), root)
        child = multiprocessing.get_context("fork").Process(
            target=bring_run, args=given, kwargs={"trusts": False}
        )
        child.start()
        child.join()
    assert child.exitcode == 9 and bring.is_brought(uri_of(lost), root)
    Catalog.open(RunLayout.open(root)).close()
    content = json.loads(lost.storage.read(primary_directory.PRIMARY).to_pybytes())
    assert content.keys() == {"token", "where", "past"}, "it needs the directory before it no more"
    with pytest.raises(FencedError, match=f"was brought to {root} on"):
        Catalog.open(lost)


def test_an_owner_that_was_cut_off_shows_nothing_where_the_run_goes_on(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: its manifest came over the one of the directory where the run goes on, which was
    refused from then on.
    """
    owner = Catalog.open(lost)
    for _ in range(50):
        owner.log(component="driver", what="cut off", detail="")
    bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    new = RunLayout.open(tmp_path / "new")
    with Catalog.open(new) as catalog:
        play(new, catalog, open_train_group(catalog, 9))
        export(catalog, new)
        lsn = json.loads(new.manifest.read_text())["lsn"]
    before = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    with pytest.raises(FencedError, match=f"was brought to {new.root} on"):
        export(owner, lost)
    after = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    assert after == before
    # and if it was on its way when the run was brought
    late = json.loads(lost.storage.read("manifest.json").to_pybytes())
    late |= {"primary": primary_directory.token_of(lost.root), "lsn": lsn + 1_000}
    lost.storage.write("manifest.json", json.dumps(late).encode())
    lose_the_owner(owner)
    with Catalog.open(new) as catalog:
        play(new, catalog, open_train_group(catalog, 10))
        export(catalog, new)
    assert json.loads(lost.storage.read("manifest.json").to_pybytes())["lsn"] < lsn + 1_000
    assert check(new, level=CONTENTS) == []


@pytest.mark.parametrize(
    "when", ["before it is primary", "before, and has played", "then", "before its run.json"]
)
def test_of_two_runs_that_are_made_at_once_in_one_storage_one_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the run.json of the refused one, or its PRIMARY, came last, and stayed."""
    uri = (tmp_path / "shared").as_uri()
    take, is_unused = primary_directory.take, layout_module.is_unused
    made: list[RunLayout] = []

    def make_quick() -> None:
        monkeypatch.undo()
        quick = RunLayout.create(tmp_path / "quick", config_yaml="", storage_uri=uri)
        with Catalog.open(quick) as catalog:
            if when == "before, and has played":
                play(quick, catalog, open_train_group(catalog, 0))
        made.append(quick)

    def take_slowly(root: Path, storage: Any, **more: object) -> None:
        if when.startswith("before, ") or when == "before it is primary":
            make_quick()
        take(root, storage, **more)
        if when == "then":
            make_quick()

    def find_slowly(uri: str) -> bool:
        found = is_unused(uri)
        if when == "before its run.json" and (tmp_path / "slow" / "primary.json").exists():
            make_quick()
        return found

    monkeypatch.setattr(primary_directory, "take", take_slowly)
    monkeypatch.setattr(layout_module, "is_unused", find_slowly)
    with pytest.raises(StoreError, match="quick|has files of another run"):
        RunLayout.create(tmp_path / "slow", config_yaml="", storage_uri=uri)
    (quick,) = made
    with Catalog.open(quick) as catalog:
        play(quick, catalog, open_train_group(catalog, 1))
        export(catalog, quick)
        assert len(catalog.live_segments()) == 1 + (when == "before, and has played")
    assert (
        parse_run_json(quick.storage.read("run.json").to_pybytes(), name="run.json").run_id
        == quick.info.run_id
    )
    with pytest.raises(StoreError):
        RunLayout.open(tmp_path / "slow")
    with Catalog.open(quick):
        pass


def create_at_once(root: Path, uri: str, go: Any) -> None:
    go.wait()
    RunLayout.create(root, config_yaml="", storage_uri=uri)


@pytest.mark.parametrize("attempt", range(5))
def test_of_two_processes_that_make_a_run_in_one_storage_one_has_it(
    attempt: int, tmp_path: Path
) -> None:
    """Each refused the other, because each had found what the other had written by then."""
    context = multiprocessing.get_context("fork")
    uri, go = (tmp_path / "shared").as_uri(), context.Barrier(2)
    roots = [tmp_path / name for name in ("one", "other")]
    makers = [context.Process(target=create_at_once, args=(root, uri, go)) for root in roots]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    having = []
    for root in filter(RunLayout.exists, roots):
        try:
            Catalog.open(RunLayout.open(root)).close()
        except FencedError:
            continue
        having.append(root)
    assert len(having) == 1
    Catalog.open(RunLayout.open(having[0])).close()


def play_groups(layout: RunLayout, *ordinals: int) -> None:
    with Catalog.open(layout) as catalog:
        for ordinal in ordinals:
            play(layout, catalog, open_train_group(catalog, ordinal))
        export(catalog, layout)


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_slow_bring_gives_the_run_to_no_directory_that_is_older_than_another(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """The attack: it gave the run back to the first directory, which removed what the second one
    had committed meanwhile.
    """
    write, held = LocalStorage.write, []
    quick, slow = tmp_path / "quick", tmp_path / "slow"

    def write_late(storage: LocalStorage, path: str, data: bytes, **more: Any) -> None:
        if path != primary_directory.PRIMARY or b"/slow on" not in data or held:
            write(storage, path, data, **more)
            return
        held.append(data)
        bring_run(uri_of(lost), quick, trusts=False)
        play_groups(RunLayout.open(quick), 50, 51)
        if not is_answered:
            raise UnavailableError("no answer")
        write(storage, path, data, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStorage, "write", write_late)
    with pytest.raises((StoreError, KeyboardInterrupt)):
        bring_run(uri_of(lost), slow, trusts=False)
    lost.storage.write(primary_directory.PRIMARY, held[0])
    with pytest.raises(FormatError, match="is an older copy; put the newest back"):
        Catalog.open(lost)
    bring_run(uri_of(lost), tmp_path / "newest", trusts=False)
    newest = RunLayout.open(tmp_path / "newest")
    Catalog.open(newest).close()
    assert {50, 51} <= states_of_catalog(newest).keys()


def test_an_older_copy_is_refused_also_beside_a_late_manifest(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: the late one was the only witness, and it does not count."""
    late = lost.storage.read("manifest.json").to_pybytes()
    root = tmp_path / "new"
    bring_run(uri_of(lost), root, trusts=False)
    play_groups(RunLayout.open(root), 50)
    shutil.copytree(root, tmp_path / "copy")
    play_groups(RunLayout.open(root), 51)
    lost.storage.write("manifest.json", late)
    shutil.rmtree(root)
    (tmp_path / "copy").rename(root)
    with pytest.raises(FormatError, match="is an older copy; put the newest back"):
        Catalog.open(RunLayout.open(root))


def test_a_bring_that_fails_leaves_a_run_whose_storage_another_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: PRIMARY was removed, and the run was told to mount its volume."""
    uri, take = (tmp_path / "shared").as_uri(), primary_directory.take
    made: list[RunLayout] = []

    def take_slowly(root: Path, storage: Any, **more: object) -> None:
        monkeypatch.undo()
        made.append(RunLayout.create(tmp_path / "quick", config_yaml="", storage_uri=uri))
        catalog = Catalog.open(made[0])
        play(made[0], catalog, open_train_group(catalog, 0))
        lose_the_owner(catalog)
        take(root, storage, **more)

    monkeypatch.setattr(primary_directory, "take", take_slowly)
    with pytest.raises(StoreError, match="has files of another run"):
        RunLayout.create(tmp_path / "slow", config_yaml="", storage_uri=uri)
    with monkeypatch.context() as patch:
        patch.setattr(bring, "rebuild", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bring_run(uri, tmp_path / "new", trusts=False)
    with Catalog.open(made[0]) as catalog:
        assert len(catalog.live_segments()) == 1


def test_a_fork_that_is_removed_while_it_is_brought_is_not_brought(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the files of the new directory were removed one by one."""
    uri = (tmp_path / "of-fork").as_uri()
    given = {"learner_step": 2, "config_yaml": "a: 1\n", "storage_uri": uri}
    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "_put_in_place", lambda *_: os._exit(9))
        patch.setattr(Path, "unlink", lambda *_: os._exit(9))  # its own marker stays
        child = multiprocessing.get_context("fork").Process(
            target=fork, args=(lost, tmp_path / "fork"), kwargs=given
        )
        child.start()
        child.join()
    assert child.exitcode == 9 and not open_storage(uri).exists("fork.unfinished")
    fetch, remove = bring.local_directory, LocalStorage.remove

    def end(storage: LocalStorage, path: str) -> None:
        raise SystemExit

    def fetch_slowly(layout: RunLayout, path: str) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "remove", end)
            with pytest.raises(SystemExit):
                fork(lost, tmp_path / "fork", **given)
        return fetch(layout, path)

    with monkeypatch.context() as patch:
        patch.setattr(bring, "local_directory", fetch_slowly)
        with pytest.raises(FormatError, match="has a fork that was cut short"):
            bring_run(uri, tmp_path / "new", trusts=False)
    storage = open_storage(uri)
    files = {file.path for file in storage.files("")}

    def take_away(self: LocalStorage, path: str) -> None:
        monkeypatch.setattr(LocalStorage, "remove", remove)
        primary_directory.take(tmp_path, storage)
        remove(self, path)

    monkeypatch.setattr(LocalStorage, "remove", take_away)
    with pytest.raises(StoreError, match="is being brought to another directory"):
        fork(lost, tmp_path / "fork", **given)
    assert len(files - {file.path for file in storage.files("")}) == 1


def test_a_bring_that_gave_up_and_was_killed_then_is_no_second_owner(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it was whole, and removed what the first directory had committed since."""
    root, write, read = tmp_path / "new", LocalStorage.write, primary_directory._read
    n_written = 0

    def write_once(storage: LocalStorage, path: str, data: bytes, **more: Any) -> None:
        nonlocal n_written
        n_written += path == primary_directory.PRIMARY
        if path == primary_directory.PRIMARY and n_written == 2:
            raise UnavailableError("no answer")
        write(storage, path, data, **more)

    def read_until_then(storage: Any, path: str) -> bytes | None:
        if n_written == 2:
            os._exit(9)
        return read(storage, path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", write_once)
        patch.setattr(primary_directory, "_read", read_until_then)
        child = multiprocessing.get_context("fork").Process(
            target=bring_run, args=(uri_of(lost), root), kwargs={"trusts": False}
        )
        child.start()
        child.join()
    assert child.exitcode == 9 and bring.is_brought(uri_of(lost), root)
    with Catalog.open(lost) as owner:
        play(lost, owner, open_train_group(owner, 9))
    with pytest.raises(FencedError, match=f"was brought to {lost.root} on"):
        Catalog.open(RunLayout.open(root))
    Catalog.open(lost).close()


def test_a_bring_that_ends_late_has_shown_readers_nothing(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest and its backup stayed, and the directory where the run was counted as older."""
    names = ("manifest.json", lost.relative(lost.backup), primary_directory.PRIMARY)
    before = {name: lost.storage.read(name).to_pybytes() for name in names}
    token = json.loads(before[primary_directory.PRIMARY])["token"]
    with monkeypatch.context() as patch:
        patch.setattr(primary_directory, "_finish", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    after = {name: lost.storage.read(name).to_pybytes() for name in names}
    assert json.loads(after.pop(primary_directory.PRIMARY))["token"] == token
    assert all(before[name] == after[name] for name in after)
    Catalog.open(lost).close()


def test_a_storage_that_is_not_there_is_no_empty_one(lost: RunLayout, tmp_path: Path) -> None:
    """The attack: a volume that was not mounted. The owner wrote run.json beneath its place, a
    rebuild found nothing, and with the volume back all its files were swept.
    """
    storage = tmp_path / "shared"
    storage.rename(tmp_path / "aside")
    storage.mkdir()
    for act in (lost.check_primary, lambda: Catalog.open(lost), lambda: rebuild(lost)):
        with pytest.raises(UnavailableError, match=r"primary.json is not there; mount the volume"):
            act()
    assert not list(storage.iterdir())
    storage.rmdir()
    (tmp_path / "aside").rename(storage)
    Catalog.open(lost).close()


@pytest.fixture
def forked(lost: RunLayout, tmp_path: Path) -> RunLayout:
    """Return a fork with one group of its own, whose owner was killed."""
    uri = (tmp_path / "of-fork").as_uri()
    made = fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    write_open_sql(made, macros=(), max_staleness=9)
    assert not made.storage.exists("fork.unfinished")
    catalog = Catalog.open(made)
    play(made, catalog, open_train_group(catalog, 7))
    export(catalog, made)
    lose_the_owner(catalog)
    return made


def test_a_fork_with_the_run_json_of_another_run_loses_nothing(
    forked: RunLayout, tmp_path: Path
) -> None:
    """The files of the run before it count as its own, and are no witnesses."""
    text = forked.storage.read("run.json").to_pybytes().decode()
    digit = text.index(forked.info.run_id)
    other = "0" if text[digit] != "0" else "1"
    forked.storage.write("run.json", f"{text[:digit]}{other}{text[digit + 1 :]}".encode())
    before = {file.path for file in forked.storage.files("")}
    with pytest.raises(FormatError, match=f"its segments are of run {forked.info.run_id}"):
        bring_run(uri_of(forked), tmp_path / "new", trusts=True)
    assert {file.path for file in forked.storage.files("")} == before


def test_a_fork_that_was_killed_removes_nothing_of_who_went_on_with_its_files(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it was brought to another directory, and the fork was given again."""
    uri = (tmp_path / "of-fork").as_uri()
    given = {"learner_step": 2, "config_yaml": "a: 1\n", "storage_uri": uri}
    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "_remove", lambda unfinished: None)  # as kill -9
        patch.setattr(fork_module, "give_rights", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fork(lost, tmp_path / "fork", **given)
    with pytest.raises(FormatError, match="has a fork that was cut short"):
        bring_run(uri, tmp_path / "new", trusts=False)
    (tmp_path / "of-fork" / "fork.unfinished").unlink()  # as of an earlier version
    bring_run(uri, tmp_path / "new", trusts=False)
    new = RunLayout.open(tmp_path / "new")
    with Catalog.open(new) as catalog:
        play(new, catalog, open_train_group(catalog, 9))
    before = {file.path for file in new.storage.files("")}
    with pytest.raises(StoreError, match="has files of another run"):
        fork(lost, tmp_path / "fork", **given)
    assert {file.path for file in new.storage.files("")} == before
    Catalog.open(new).close()


def test_what_nobody_published_is_left_in_the_storage(
    lost: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that NFS made ended the run. A person's directories took the place of the newest."""
    foreign = ("checkpoints/.nfs000000000001", "checkpoints/best/a", "checkpoints/x/step000009/a")
    for path in foreign:
        lost.storage.write(path, b"theirs")
    names: list[str] = []
    before = {file.path for file in lost.storage.files("checkpoints")}

    def keep_none(found: list[str]) -> set[str]:
        names.extend(found)
        return set()

    def refuse(storage: LocalStorage, path: str) -> None:
        raise StoreError(f"cannot remove {path}: Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "remove", refuse)
        prune_published(lost, lost.checkpoints, kept=keep_none)
    assert names == ["step000001", "step000002"]
    assert {file.path for file in lost.storage.files("checkpoints")} == before
    prune_published(lost, lost.checkpoints, kept=keep_none)
    assert {file.path for file in lost.storage.files("checkpoints")} == set(foreign)


def test_what_a_fork_left_keeps_no_later_run_of_its_storage_from_being_brought(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: one request of a fork failed, and its marker stayed."""
    uri = (tmp_path / "of-fork").as_uri()
    write = LocalStorage.write

    def fail_once(storage: LocalStorage, path: str, *given: Any, **more: Any) -> None:
        if path == "run.json":
            raise UnavailableError("the storage does not answer")
        write(storage, path, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "write", fail_once)
        with pytest.raises(UnavailableError):
            fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    assert open_storage(uri).exists("fork.unfinished")
    plain = RunLayout.create(tmp_path / "plain", config_yaml="a: 1\n", storage_uri=uri)
    write_open_sql(plain, macros=(), max_staleness=9)
    with Catalog.open(plain) as catalog:
        play(plain, catalog, open_train_group(catalog, 0))
        export(catalog, plain)
    bring_run(uri, tmp_path / "new", trusts=False)
    assert len(states(tmp_path / "new")) == 1


def test_a_fork_that_is_whole_is_brought_with_its_checkpoint(
    lost: RunLayout, tmp_path: Path
) -> None:
    """Its disk was lost before its first owner made a backup."""
    uri = (tmp_path / "of-fork").as_uri()
    fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    shutil.rmtree(tmp_path / "fork")
    bring_run(uri, tmp_path / "new", trusts=False)
    new = RunLayout.open(tmp_path / "new")
    with Catalog.open(new) as catalog:
        assert [point.learner_step for point in catalog.live_checkpoints()] == [2]
    assert [state for state, _ in states(new.root).values()][:2] == ["trained", "trained"]


@pytest.mark.parametrize("name", ["other", "export", "backup", "catalog.v2"])
def test_a_fork_that_is_removed_leaves_a_run_beneath_its_storage(
    name: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: it removed every file that lay there."""
    uri = (tmp_path / "shared-by-two").as_uri()
    other: list[RunLayout] = []

    def make_other(*given: object, **named: object) -> None:
        made = RunLayout.create(
            tmp_path / "other", config_yaml="", storage_uri=f"{uri}/{name}/deeper"
        )
        write_open_sql(made, macros=(), max_staleness=9)
        play_groups(made, 0)
        (tmp_path / "shared-by-two" / "mine.txt").write_text("mine")
        (tmp_path / "fork.unfinished" / "mine.txt").write_text("mine")
        other.append(made)
        raise OSError("full disk")

    with monkeypatch.context() as patch:
        patch.setattr(fork_module, "give_rights", make_other)
        with pytest.raises(StoreError, match="full disk"):
            fork(lost, tmp_path / "fork", learner_step=2, config_yaml="a: 1\n", storage_uri=uri)
    (made,) = other
    Catalog.open(made).close()
    assert check(made, level=CONTENTS) == []
    left = {file.path.split("/")[0] for file in open_storage(uri).files("")}
    assert left == {name, "mine.txt"}
    assert (tmp_path / "fork.unfinished" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["other", "base", "weights", "logs", "catalog.v2"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_bring_removes_nothing_that_others_put_into_its_directory(
    name: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """The attack: a run that was made in the same volume meanwhile was removed."""
    root = tmp_path / "volume"
    other: list[RunLayout] = []

    def make_other(*given: object, **named: object) -> None:
        made = RunLayout.create(root / name / "deeper", config_yaml="")
        write_open_sql(made, macros=(), max_staleness=9)
        play_groups(made, 0)
        other.append(made)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bring, "rebuild", make_other)
        if is_killed:
            patch.setattr(bring, "_empty", lambda root: None)
        with pytest.raises(KeyboardInterrupt):
            bring_run(uri_of(lost), root, trusts=False)
    for _ in range(2):
        with pytest.raises(
            StoreError, match=rf"has other things in it \({name}\); give an empty dir"
        ):
            bring_run(uri_of(lost), root, trusts=False)
    assert [path.name for path in root.iterdir()] == [name]
    Catalog.open(other[0]).close()
    assert check(other[0], level=CONTENTS) == []
    Catalog.open(lost).close()


@pytest.mark.parametrize("at", ["give_rights", "_put_in_place"])  # before it is whole, and after
def test_a_removal_of_a_fork_that_is_killed_leaves_nothing_to_bring(
    at: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: only run.json was left, and was brought as a run without anything."""
    remove = LocalStorage.remove
    for n_removed in range(40):
        uri = (tmp_path / f"storage{n_removed}").as_uri()
        given = {"learner_step": 2, "config_yaml": "a: 1\n", "storage_uri": uri}
        left = [n_removed]

        def remove_some(storage: LocalStorage, path: str, left: list[int] = left) -> None:
            if not left[0]:
                raise SystemExit
            left[0] -= 1
            remove(storage, path)

        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "remove", remove_some)
            patch.setattr(fork_module, at, mock.Mock(side_effect=OSError("full disk")))
            with pytest.raises((SystemExit, StoreError)) as ended:
                fork(lost, tmp_path / f"fork{n_removed}", **given)
        if ended.type is not SystemExit:
            break
        if {file.path for file in open_storage(uri).files("")}:
            refused = r"has a fork that was cut short|run.json is not there"
            with pytest.raises(FormatError, match=refused):
                bring_run(uri, tmp_path / f"new{n_removed}", trusts=False)
        Catalog.open(fork(lost, tmp_path / f"fork{n_removed}", **given)).close()
    assert n_removed > 5 and not list(open_storage(uri).files(""))


def test_a_fork_that_was_killed_is_made_when_it_is_given_again(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = (tmp_path / "of-fork").as_uri()
    given = {"learner_step": 2, "config_yaml": "a: 1\n", "storage_uri": uri}
    for name in ("_copy_catalog", "_link_files", "give_rights", "_put_in_place"):
        with monkeypatch.context() as patch:
            patch.setattr(fork_module, name, lambda *_, **__: os._exit(9))
            child = multiprocessing.get_context("fork").Process(
                target=fork, args=(lost, tmp_path / "fork"), kwargs=given
            )
            child.start()
            child.join()
            assert child.exitcode == 9
    made = fork(lost, tmp_path / "fork", **given)
    assert not made.storage.exists("fork.unfinished")
    Catalog.open(made).close()


def test_the_maintainers_thread_ends_the_run_that_was_brought_elsewhere(
    lost: RunLayout, tmp_path: Path
) -> None:
    with Catalog.open(lost) as owner:
        maintainer = Maintainer(owner, lost, settings=replace(SETTINGS, pause_s=0.01))
        primary_directory.take(tmp_path, lost.storage)
        maintainer.start()
        maintainer._thread.join(30.0)
        with pytest.raises(FencedError, match="goes on there"):
            maintainer.check()


def test_a_backup_is_made_every_minute(lost: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a checkpoint as well; of a run on its own disk only with one."""
    clock = [0.0]
    monkeypatch.setattr("store.maintenance.maintainer.time.monotonic", lambda: clock[0])
    with Catalog.open(lost) as owner:
        maintainer = Maintainer(owner, lost, settings=SETTINGS)
        made = []
        for clock[0] in (0.0, 1.0, BACKUP_EVERY_S - 1, BACKUP_EVERY_S, BACKUP_EVERY_S + 1):
            owner.log(component="test", what="something", detail="new")
            before = owner.backed_up_lsn
            maintainer.work()
            made.append(owner.backed_up_lsn > before)
    assert made == [True, False, False, True, False]


def test_a_checkpoint_that_is_uploaded_again_is_whole_or_not_there(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that went back writes another checkpoint of the same learner step."""
    directory = lost.checkpoint_dir(2)
    (directory / "model.safetensors").write_bytes(b"another way there")
    plain = type(lost.storage).write

    def cut(self: object, path: str, data: bytes) -> None:
        plain(self, path, data[: len(data) // 2])  # type: ignore[arg-type]
        raise StoreError("the machine dies here")

    monkeypatch.setattr(type(lost.storage), "write", cut)
    with pytest.raises(StoreError, match="dies here"):
        publish_directory(lost, directory)
    monkeypatch.undo()
    assert not is_published(lost, "checkpoints/step000002")
    shutil.rmtree(lost.root)
    bring_run(uri_of(lost), lost.root, trusts=False)
    assert not has_directory(lost, "checkpoints/step000002")
    with pytest.raises(StoreError, match="restore it from a backup"):
        local_directory(lost, "checkpoints/step000002")
    assert local_directory(lost, "checkpoints/step000001").is_dir()
    prune_published(lost, lost.checkpoints, kept=lambda names: names[-1:])
    left = {file.path for file in lost.storage.files("checkpoints")}
    assert left == {"checkpoints/step000002/model.safetensors"}


def test_a_strangers_run_is_not_brought_unasked(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings would be followed, and its storage written."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    before = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    root = tmp_path / "new"
    with pytest.raises(StoreError, match="was not made by you on this machine.*--trust"):
        bring_run(uri_of(lost), root, trusts=False)
    assert not root.exists()
    assert before == {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    bring_run(uri_of(lost), root, trusts=True)
    Catalog.open(RunLayout.open(root)).close()  # signed, so that the next start asks no more


def test_a_killed_call_begins_again_and_nothing_else_is_removed(
    lost: RunLayout, tmp_path: Path
) -> None:
    root = tmp_path / "mounted"
    (root / "lost+found").mkdir(parents=True)
    (root / UNFINISHED_BRING).touch()
    (root / "run.json").write_text("{")
    (root / "catalog.sqlite").write_text("half of one")
    assert not is_brought(uri_of(lost), root)
    with pytest.raises(FormatError, match=r"in part; .* gigpo train --resume URI run_dir=\S+$"):
        RunLayout.open(root)
    bring_run(uri_of(lost), root, trusts=False)
    assert is_brought(uri_of(lost), root)
    assert (root / "lost+found").is_dir() and states(root)[0] == ("trained", 2)
    other = RunLayout.create(tmp_path / "other", config_yaml="a: 1\n")
    with pytest.raises(StoreError, match="holds another run than file:"):
        is_brought(uri_of(lost), other.root)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    with pytest.raises(StoreError, match=r"has other things in it \(mine.txt\)"):
        bring_run(uri_of(lost), tmp_path / "full", trusts=False)
    assert (tmp_path / "full" / "mine.txt").exists()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_run_is_not_brought_into_a_directory_of_another_user(
    lost: RunLayout, tmp_path: Path, is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a link to the user's files came in its place while what was in it was removed."""
    root = tmp_path / "theirs"
    root.mkdir()
    if is_begun:
        (root / UNFINISHED_BRING).touch()
        (root / "precious").touch()
    before = sorted(root.iterdir())
    Neighbour(monkeypatch).gets(root)
    with pytest.raises(StoreError, match=r"theirs belongs to another user \(uid 65534\)"):
        bring_run(uri_of(lost), root, trusts=False)
    assert sorted(root.iterdir()) == before


@pytest.mark.parametrize("secret", ["newest", "first", ""])
def test_nobody_else_enters_a_brought_run_with_a_secret_from_its_first_file(
    lost: RunLayout, tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the key in config.yaml was read until the run had started."""
    root = tmp_path / "new"
    texts = {"newest": "a: 2\n", "first": "a: 1\n"}
    (lost.root / "config.yaml").write_text(texts["newest"])
    sign_run(lost.root)
    for name in ("config.yaml", "signed.json"):
        lost.storage.write(name, (lost.root / name).read_bytes())
    modes = modes_at_each_write(lambda: [root], monkeypatch)
    bring_run(uri_of(lost), root, trusts=False, is_secret=lambda text: text == texts.get(secret))
    assert len(modes) > 1
    assert {*modes, stat.S_IMODE(root.stat().st_mode)} == {0o700 if secret else 0o755}


def test_a_copy_of_a_storage_is_not_taken_for_the_run(lost: RunLayout, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "shared", tmp_path / "copied")
    with pytest.raises(StoreError, match="is of a run whose files are in .*/shared"):
        bring_run((tmp_path / "copied").as_uri(), tmp_path / "new", trusts=False)
    with pytest.raises(StoreError, match="is it the store.uri of a run"):
        bring_run((tmp_path / "nothing").as_uri(), tmp_path / "new", trusts=False)
    assert not (tmp_path / "new").exists()


def test_no_rebuild_is_offered_for_the_run_json_of_a_storage(
    lost: RunLayout, tmp_path: Path
) -> None:
    lost.storage.write("run.json", b"[")
    with pytest.raises(FormatError, match=r"is damaged .*, or: gigpo rebuild /"):
        bring_run(uri_of(lost), tmp_path / "new", trusts=False)
    with pytest.raises(FormatError, match=r"is damaged \(.*\); restore it from a backup$"):
        parse_run_json(b"[", name="s3://bucket/run/run.json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bring.run_at.cache_clear()
    bring.bring_catalog.cache_clear()
    return tmp_path / "cache"


@pytest.mark.parametrize("uri", ["", "own"])
def test_a_run_is_forked_from_its_uri(
    lost: RunLayout, tmp_path: Path, cache: Path, uri: str
) -> None:
    """Into a directory, or into a storage of its own."""
    shutil.rmtree(lost.root)
    before = {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    own = (tmp_path / uri).as_uri() if uri else None
    root = tmp_path / "forked"
    bring_catalog(uri_of(lost))
    source = RunLayout.open(run_at(uri_of(lost)))
    made = fork(source, root, learner_step=1, config_yaml="a: 2\n", storage_uri=own)
    assert made.info.storage_uri == own
    assert states_of_catalog(made) == {0: "trained", 1: "complete", 2: "complete"}
    for path in ("checkpoints/step000001", "weights/v000001", BASE_POLICY):
        assert (root / path / "model.safetensors").is_file()
        assert is_published(made, path) is bool(own)
    errors = [one for one in check(made, level=CONTENTS) if one.severity == "error"]
    assert {one.what for one in errors} <= {"manifest_missing", "open_sql_missing"}
    assert before == {file.path: lost.storage.digest(file.path) for file in lost.storage.files("")}
    with pytest.raises(
        StoreError, match="no checkpoint of learner step 3: there are those of 1, 2"
    ):
        fork(source, tmp_path / "no", learner_step=3, config_yaml="a: 2\n")
    assert not (tmp_path / "no").exists()


def test_a_fork_that_was_cut_short_leaves_nothing_in_its_storage(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    unfinished = tmp_path / "forked.unfinished"
    with monkeypatch.context() as patch:
        patch.setattr("store.exchange.fork._remove", lambda unfinished: None)  # as if killed
        patch.setattr("store.exchange.fork.publish_directory", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fork(
                lost,
                tmp_path / "forked",
                learner_step=1,
                config_yaml="",
                storage_uri=own.as_uri(),
            )
    assert unfinished.is_dir() and list(own.rglob("*.parquet"))
    made = fork(lost, tmp_path / "forked", learner_step=1, config_yaml="", storage_uri=own.as_uri())
    assert not unfinished.exists()
    assert {path.name for path in own.rglob("*.parquet")} == {
        Path(row).name for row in catalog_paths(made)
    }


def test_of_a_strangers_run_at_a_uri_only_small_files_are_fetched_unasked(
    lost: RunLayout,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A backup may be larger than memory. It takes no room in the storage if it is sparse."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    read: dict[str, int] = {}
    limits = []
    plain = LocalStorage.read

    def noted(self: LocalStorage, path: str, *, at_most: int = MAX_FILE_BYTES) -> object:
        read[path] = at_most
        return plain(self, path, at_most=at_most)

    def checked(run: Path) -> object:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA))
        return trusted_texts(run)

    monkeypatch.setattr(LocalStorage, "read", noted)
    for name in ("store.layout.trusted_texts", "driver.resume.trusted_texts"):
        monkeypatch.setattr(name, checked)
    new = f"run_dir={tmp_path / 'new'}"
    for asked in (["--fork", f"{uri_of(lost)}@1", "--dry-run"], ["--resume", uri_of(lost)]):
        assert main(["train", *asked, new]) == 2
        assert "was not made by you on this machine" in capsys.readouterr().err
    root = run_at(uri_of(lost))
    with pytest.raises(StoreError, match="was not made by you"):
        bring_catalog(uri_of(lost))
    assert "run.json" in read and max(read.values()) <= MAX_TEXT_BYTES
    assert resource.getrlimit(resource.RLIMIT_DATA) not in limits[:2]
    target = RunLayout.create(tmp_path / "target", config_yaml="a: 1\n")
    take_sources(target.root, [parse_source(uri_of(lost))], order="ordinal")
    assert "backup/catalog.sqlite" not in read and not (root / "catalog.sqlite").exists()
    trust(root)
    bring_catalog(uri_of(lost))
    assert (root / "catalog.sqlite").is_file()


def test_signatures_of_a_storage_do_not_stay_if_they_are_no_signatures(
    lost: RunLayout, tmp_path: Path, cache: Path
) -> None:
    """A larger signed.json here would be refused for ever, also when the storage is mended."""
    good = lost.storage.read(SIGNED).to_pybytes()
    many = [f"{i:04}" + "x" * MAX_SIGNED_BYTES for i in range(2)]
    lost.storage.write(SIGNED, json.dumps({"signatures": many}).encode())
    with pytest.raises(StoreError, match=r"signed.json has 2,\d+,\d+ bytes"):
        run_at(uri_of(lost))
    lost.storage.write(SIGNED, json.dumps({"signatures": ["x" * 900_000]}).encode())
    assert not signed_texts(run_at(uri_of(lost)))
    run_at.cache_clear()
    lost.storage.write(SIGNED, good)
    assert signed_texts(run_at(uri_of(lost)))


@pytest.mark.parametrize("has_own_manifest", [True, False])
def test_an_older_copy_of_the_directory_removes_nothing_of_the_storage(
    tmp_path: Path, has_own_manifest: bool
) -> None:
    """The directory was restored from a backup, and `gigpo compact` removed what its catalog did
    not know: all that was committed since.
    """
    root, copy = tmp_path / "run", tmp_path / "copy"
    layout = RunLayout.create(root, config_yaml="a: 1\n", storage_uri=(tmp_path / "s").as_uri())
    sign_run(root)
    write_open_sql(layout, macros=(), max_staleness=9)
    for ordinal in range(3):
        with Catalog.open(layout) as catalog:
            play(layout, catalog, open_train_group(catalog, ordinal))
            export(catalog, layout)
        if ordinal == 0:
            shutil.copytree(root, copy)
            for _ in range(5):  # a later owner than the original's, and not a newer catalog
                Catalog.open(RunLayout.open(copy)).close()
    trajectories = ask(layout, "SELECT traj_uid FROM trajectory ORDER BY 1")
    files = {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.parquet")}
    for path in files:
        os.utime(path, (1, 1))
    if not has_own_manifest:
        (copy / "published.json").unlink()
    restored = RunLayout.open(copy)
    with pytest.raises(FormatError, match="is an older copy; put the newest back, or: gigpo reb"):
        Catalog.open(restored)
    if has_own_manifest:
        assert "manifest_ahead" in {finding.what for finding in check(restored, level=CONTENTS)}
    assert {path: path.read_bytes() for path in (tmp_path / "s").rglob("*.parquet")} == files
    rebuild(restored)
    with Catalog.open(restored):
        pass
    assert ask(restored, "SELECT traj_uid FROM trajectory ORDER BY 1") == trajectories


def test_groups_are_taken_from_a_uri(lost: RunLayout, tmp_path: Path, cache: Path) -> None:
    shutil.rmtree(lost.root)
    target = RunLayout.create(tmp_path / "target", config_yaml="a: 1\n")
    source = parse_source(f"{uri_of(lost)}@won")
    assert source.location == uri_of(lost)
    (taken,) = take_sources(target.root, [source], order="ordinal")
    assert (taken.n_groups, taken.is_dataset) == (4, False)
    assert str(taken).startswith(f"4 groups of {uri_of(lost)} where won")


def states_of_catalog(layout: RunLayout) -> dict[int, str]:
    with Catalog.open(layout) as catalog, catalog._database.transaction() as tx:
        return {row["ordinal"]: row["state"] for row in tx.rows("SELECT ordinal, state FROM grp")}


def catalog_paths(layout: RunLayout) -> list[str]:
    with Catalog.open(layout) as catalog, closing(catalog._database.copy()) as copy:
        return [row[0] for row in copy.execute("SELECT path FROM segment")]


def test_a_node_that_sees_nothing_of_the_directory_joins_the_run(
    lost: RunLayout, tmp_path: Path
) -> None:
    """For a worker or the learner; nobody can own the run there."""
    root = tmp_path / "node" / "run"
    layout = RunLayout.join(root, storage_uri=uri_of(lost), run_id=lost.info.run_id)
    again = RunLayout.join(root, storage_uri=uri_of(lost), run_id=lost.info.run_id)
    assert layout.info == lost.info == again.info
    policy = root / BASE_POLICY
    assert local_model(layout, str(policy)) == str(policy)
    assert (policy / "model.safetensors").read_bytes() == b"base"
    assert local_model(layout, "/models/other") == "/models/other"
    assert local_directory(layout, "checkpoints/step000002").is_dir()
    with pytest.raises(StoreError, match="you did not make this run"):
        Catalog.open(layout)
    sign_run(root)
    with pytest.raises(FencedError, match=f"was brought to {lost.root} on"):
        Catalog.open(layout)
    with pytest.raises(FormatError, match="is not a run directory"):
        RunLayout.join(tmp_path / "none", storage_uri="", run_id=lost.info.run_id)


def test_a_node_that_joined_an_earlier_run_there_does_not_work_for_it(
    lost: RunLayout, tmp_path: Path
) -> None:
    """The attack: the driver began a run anew at the same path, with the same storage or another.

    The node still had the earlier one, so what it played was lost with the driver's disk.
    """
    root, uri = tmp_path / "node" / "run", (tmp_path / "second storage").as_uri()
    RunLayout.join(root, storage_uri=uri_of(lost), run_id=lost.info.run_id)
    second = RunLayout.create(tmp_path / "second", config_yaml="", storage_uri=uri).info
    for storage_uri in (uri, uri_of(lost), ""):
        with pytest.raises(
            StoreError, match=f"{root}, as .* sees it, is of run {lost.info.run_id}.*move it away"
        ):
            RunLayout.join(root, storage_uri=storage_uri, run_id=second.run_id)
    with pytest.raises(StoreError, match=r"run\.json, as .* check store\.uri"):
        RunLayout.join(tmp_path / "other", storage_uri=uri_of(lost), run_id=second.run_id)
    assert not (tmp_path / "other").exists()


def bring_at_once(uri: str, root: Path, go: Any, said: Any) -> None:
    """Bring the run when all processes are ready, and say how it ended."""
    go.wait()
    try:
        bring_run(uri, root, trusts=False)
        said.put("brought")
    except LockedError:
        said.put("locked")
    except (StoreError, OSError) as error:
        said.put(repr(error))


def test_two_processes_bring_a_run_to_one_directory_once(lost: RunLayout, tmp_path: Path) -> None:
    """Let one of them bring it, and refuse the other in one line, during or after it."""
    uri, root = uri_of(lost), tmp_path / "elsewhere"
    shutil.rmtree(lost.root)
    spawning = multiprocessing.get_context("fork")
    go, said = spawning.Event(), spawning.Queue()
    pair = [spawning.Process(target=bring_at_once, args=(uri, root, go, said)) for _ in range(2)]
    for process in pair:
        process.start()
    go.set()
    ended = sorted(said.get(timeout=60) for _ in pair)
    for process in pair:
        process.join()
    assert "brought" in ended
    ended.remove("brought")
    assert ended == ["locked"] or "has other things in it" in ended[0]
    assert is_brought(uri, root)
    assert check(RunLayout.open(root), level=CONTENTS) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def strangers_file(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def strangers_private_file(path: Path) -> None:
    path.touch(0o600)


def strangers_fifo(path: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)


@pytest.mark.parametrize("make", [strangers_file, strangers_fifo])
def test_a_lock_of_another_user_is_refused_before_anything_is_brought(
    lost: RunLayout,
    tmp_path: Path,
    make: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: in /tmp the run was brought whole, and then the lock could not be removed."""
    shutil.rmtree(lost.root)
    (tmp_path / "elsewhere").mkdir()
    lock = tmp_path / "elsewhere" / f".run{run_making.LOCK_ENDING}"
    make(lock)
    Neighbour(monkeypatch).gets(lock)
    with pytest.raises(StoreError, match=rf"^{lock}.* \(uid 65534\); remove it, or give run_dir="):
        bring_run(uri_of(lost), tmp_path / "elsewhere" / "run", trusts=False)
    assert list((tmp_path / "elsewhere").iterdir()) == [lock]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize(
    "make", [strangers_file, strangers_private_file, strangers_fifo, Path.mkdir, None]
)
@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_another_user_cannot_take_the_lock_away(
    make: Callable[[Path], None] | None, mode: int
) -> None:
    """Linux may refuse to open somebody else's file in /tmp: no reason to go on without a lock.

    A directory in which the user can write nothing has no locks, as before.
    """
    # other users cannot enter pytest's directory
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        root = Path(shared) / "run"
        lock = Path(shared) / f".run{run_making.LOCK_ENDING}"
        if make is not None:
            make(lock)
            os.chown(lock, 65534, 65534)
        Path(shared).chmod(mode)
        said = lock_as_user(1234, root)
        if make is None:
            assert said == "held"
        else:
            assert re.fullmatch(rf"{lock}[^\n]*; {re.escape(run_making.NOT_OUR_LOCK)}", said), said
        assert lock.exists() == (make is not None)


def lock_as_user(user: int, root: Path) -> str:
    """Hold the lock of `root` for a moment, in a process of this user. Return its error."""

    def hold() -> str:
        with run_making.making_alone(root):
            return "held"

    return as_user(user, hold)


def as_user(user: int, act: Callable[[], str]) -> str:
    """Return what a function says, or its error, in a process of this user."""
    spawning = multiprocessing.get_context("fork")
    said = spawning.Queue()

    def run() -> None:
        os.seteuid(user)
        try:
            said.put(act())
        except (StoreError, OSError) as error:
            said.put(str(error))

    child = spawning.Process(target=run)
    child.start()
    answer = said.get(timeout=60)
    child.join()
    return str(answer)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_users_run_is_read_without_their_signatures() -> None:
    """Only its owner can read them. To everybody else it is a run of somebody else."""
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # others cannot enter pytest's
        Path(shared).chmod(0o755)
        storage = (Path(shared) / "storage").as_uri()
        layout = RunLayout.create(Path(shared) / "run", config_yaml="a: 1\n", storage_uri=storage)
        layout.storage.write("config.yaml", b"a: 1\n")
        theirs = as_user(1234, lambda: " ".join(bring._read_small_files(storage) or {}))
        assert theirs == "run.json config.yaml"
        own = bring._read_small_files(storage)
        assert own is not None and SIGNED in own


def test_a_directory_is_locked_while_a_run_is_brought_to_it(
    lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change nothing at the directory while another process fills it."""
    uri, root, seen = uri_of(lost), tmp_path / "elsewhere", []
    shutil.rmtree(lost.root)
    rebuilt = bring.rebuild

    def rebuild(layout: RunLayout, **given: Any) -> Any:
        with pytest.raises(LockedError, match="another process makes a run at"):
            bring_run(uri, root, trusts=False)
        seen.append(sorted(path.name for path in root.iterdir()))
        return rebuilt(layout, **given)

    monkeypatch.setattr(bring, "rebuild", rebuild)
    bring_run(uri, root, trusts=False)
    assert UNFINISHED_BRING in seen[0]
    assert is_brought(uri, root)

"""Outages are not damage: silent storage, files of other users, files that vanish while they are
read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.__main__ import main
from store import (
    Catalog,
    CompactionPolicy,
    Maintainer,
    MaintainerSettings,
    RunLayout,
    StoreError,
    UnavailableError,
    export,
    now_us,
    storage,
)
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.maintenance.sweep import sweep_orphans
from store.reading import mirror as mirror_module
from store.reading import pins
from store.reading.manifest import read_manifest
from store.reading.mirror import mirror
from store.reading.pins import Pin, oldest_pinned_lsn
from store.untrusted import file_access as beneath
from tests.support.neighbours import Neighbour
from tests.support.store_damage import a_file
from tests.support.store_runs import compact_once, fingerprint, flip
from tests.support.store_samples import open_train_group, play

ANYTHING = CompactionPolicy(fan_in=2, max_live_files=1, min_file_bytes=1 << 20)


def refusing(call: Callable, *, names: str, code: int = errno.EIO) -> Callable:
    """`call`, but paths with `names` in them fail. The path is the first argument, or named."""

    def answer(*given: Any, **options: Any) -> object:
        path = os.fspath(options["path"] if "path" in options else given[0])
        if names in path:
            raise OSError(code, os.strerror(code), path)
        return call(*given, **options)

    return answer


def outage(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    for name in ("read_bytes", "read_bytes_in"):
        monkeypatch.setattr(beneath, name, refusing(getattr(beneath, name), names=names))


def said(layout: RunLayout, catalog: Catalog, component: str) -> list[str]:
    export(catalog, layout)
    manifest = read_manifest(layout)
    assert manifest is not None
    rows = [
        row
        for part in manifest.tables["events"]
        for row in pq.read_table(layout.root / part.path).to_pylist()
    ]
    return [row["what"] for row in rows if row["component"] == component]


def test_only_a_file_that_is_not_there_is_no_outage(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_file(layout)
    with pytest.raises(StoreError, match="backup") as caught:
        layout.storage.read("segments/w0/none.parquet")
    assert not isinstance(caught.value, UnavailableError)
    outage(monkeypatch, path)
    with pytest.raises(UnavailableError, match=f"{path} cannot be read now.*make it readable"):
        layout.storage.read(path)
    os_open = os.open

    def denied(name: str, *rest: int, **options: int) -> int:
        if name == "w1":  # by its name in the directory above, which is open
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return os_open(name, *rest, **options)

    monkeypatch.setattr(os, "open", denied)
    # rather than files that are missing
    with pytest.raises(UnavailableError, match="segments/w1 cannot be read now"):
        list(layout.storage.files("segments"))
    assert list(layout.storage.files("nowhere")) == []


def test_after_an_outage_fsck_has_set_nothing_aside(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprint(layout.segments) | fingerprint(layout.exports)
    with monkeypatch.context() as patch:
        outage(patch, ".parquet")
        assert {finding.what for finding in check(layout, level=CONTENTS)} == {
            "segment_unavailable",
            "export_unavailable",
        }
        assert main(["fsck", "--repair", str(layout.root)]) == 1
    assert before.items() <= (fingerprint(layout.segments) | fingerprint(layout.exports)).items()
    assert not layout.quarantine.exists()
    assert check(layout, level=CONTENTS) == []


def test_a_repair_that_cannot_reach_what_it_could_rescue_gives_nothing_up(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    (merged,) = layout.segments.glob("compact/*.parquet")
    flip(merged, 4321)
    outage(monkeypatch, "segments/w0")
    assert main(["fsck", "--repair", str(layout.root)]) == 2
    assert merged.exists() and not layout.quarantine.exists()


def test_a_rebuild_during_an_outage_touches_nothing(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = sorted(layout.segments.glob("*/*.parquet"))
    flip(first, 4321)
    before = fingerprint(layout.root, but=("catalog.lock",))
    for path in (last, layout.backup):
        with monkeypatch.context() as patch:
            outage(patch, layout.relative(path))
            with pytest.raises(UnavailableError, match=layout.relative(path)):
                rebuild(layout)
        assert fingerprint(layout.root, but=("catalog.lock",)) == before


def test_an_outage_stops_no_maintainer_and_is_said_once(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MaintainerSettings(
        snapshot_window_s=0.0, keep_days=None, keep_versions=None, pause_s=0.001, policy=ANYTHING
    )
    with Catalog.open(layout) as catalog:
        n_files, already = len(catalog.live_segments()), said(layout, catalog, "compaction")
        retired = catalog.removable(retired_before_us=now_us(), pinned_lsn=None)
        assert retired
        failed = threading.Semaphore(0)

        def unavailable(self: storage.LocalStorage, path: str) -> pa.Buffer:
            failed.release()
            raise UnavailableError("the server is away")

        maintainer = Maintainer(catalog, layout, settings=settings)
        with monkeypatch.context() as patch:
            patch.setattr(storage.LocalStorage, "read", unavailable)
            with pytest.raises(UnavailableError):
                compact_once(catalog, layout, policy=ANYTHING, skip=())
            maintainer.start()
            for _ in range(5):
                assert failed.acquire(timeout=30.0)
                maintainer.check()
            assert len(catalog.live_segments()) == n_files
            assert said(layout, catalog, "maintainer") == ["unavailable"]
            assert said(layout, catalog, "compaction") == already
            # the rest is done
            assert not any((layout.root / path).exists() for path in retired.values())
        maintainer.close()
        maintainer.check()
        assert maintainer._failure is None
        maintainer.work()
        assert len(catalog.live_segments()) < n_files


def test_a_damaged_source_is_said_once_beside_one_that_is_unavailable(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Catalog.open(layout) as catalog:
        for _ in range(2):
            play(layout, catalog, open_train_group(catalog, None))
        policy = CompactionPolicy(fan_in=100, max_live_files=1, min_file_bytes=1 << 20)
        first, *_, last = catalog.segment_metas(
            [file.segment_id for file in catalog.live_segments()]
        )
        flip(layout.root / first.path, 4321)
        outage(monkeypatch, last.path)
        result = compact_once(catalog, layout, policy=policy, skip=())
        assert result is not None and (result.left_out, result.merged) == (
            (first.segment_id,),
            None,
        )
        with pytest.raises(UnavailableError):
            compact_once(catalog, layout, policy=policy, skip=result.left_out)


def test_files_that_go_while_they_are_looked_at_are_no_error(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished = layout.segments / "w0" / ".x.parquet.1-1.tmp"
    going = layout.segments / "w0" / "x.parquet"
    for path in (unfinished, going):
        path.write_bytes(b"half")
    scandir = os.scandir

    @contextmanager
    def listed_and_gone(directory: int) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(directory) as entries:
            found = list(entries)
        for path in (unfinished, going):
            path.unlink(missing_ok=True)
        yield found

    with Catalog.open(layout) as catalog:
        monkeypatch.setattr(os, "scandir", listed_and_gone)
        assert sweep_orphans(catalog, layout, opened_us=now_us(), before=None).foreign == ()
    assert layout.relative(going) not in {file.path for file in layout.storage.files("segments")}


def test_pins_of_other_users_hold_and_never_stop_the_owner(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(monkeypatch: pytest.MonkeyPatch, name: str, of: str) -> None:
        monkeypatch.setattr(pins, name, refusing(getattr(pins, name), names=of, code=errno.EACCES))

    mine = Pin(layout, 7)
    (layout.readers / "3-99-0123abcd").touch()  # nobody holds it
    with monkeypatch.context() as patch:
        denied(patch, "open_file", "readers/3-")
        assert oldest_pinned_lsn(layout) == 3  # nobody can know
    with monkeypatch.context() as patch:
        denied(patch, "remove", "readers/")
        assert oldest_pinned_lsn(layout) == 7
        mine.close()
    with monkeypatch.context() as patch, Catalog.open(layout) as catalog:
        denied(patch, "names", "readers")
        assert oldest_pinned_lsn(layout) == 0
        play(layout, catalog, open_train_group(catalog, None))
        assert export(catalog, layout) > 0
    assert oldest_pinned_lsn(layout) is None
    assert not list(layout.readers.iterdir())


def make_remote(tmp_path: Path) -> RunLayout:
    layout = RunLayout.create(
        tmp_path / "run", config_yaml="", storage_uri=f"file://{tmp_path}/shared"
    )
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, None))
        export(catalog, layout)
    return layout


def test_an_older_manifest_is_never_put_over_a_newer_one(tmp_path: Path) -> None:
    layout = make_remote(tmp_path)
    shared = tmp_path / "shared/manifest.json"
    older = shared.read_bytes()
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, None))
        newest = export(catalog, layout)
    copy = mirror(layout)
    shared.unlink()
    shared.write_bytes(older)  # as a reader got it that was slower
    mirror(layout)
    assert json.loads(copy.manifest.read_text())["lsn"] == newest


def test_readers_of_one_remote_run_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_remote(tmp_path)
    fetch_missing, refused = mirror_module._fetch_missing, []

    def another_comes(*arguments: Any, **named: Any) -> None:
        copy = arguments[1]
        assert isinstance(copy, RunLayout)
        with copy.mirror_lock.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append(True)
        fetch_missing(*arguments, **named)

    monkeypatch.setattr(mirror_module, "_fetch_missing", another_comes)
    mirror(layout)
    mirror(layout)
    assert refused == [True, True]


class SlowStore:
    """A file system where every call costs 40 seconds of a clock of its own, and fails the first
    time.
    """

    def __init__(self, n_bytes: int) -> None:
        self.now, self.calls, self.n_bytes = 0.0, 0, n_bytes

    def open_output_stream(self, path: str, *, compression: str | None) -> pa.NativeFile:
        self._transfer()
        return pa.BufferOutputStream()

    def open_input_file(self, path: str) -> SlowStore:
        return self

    def size(self) -> int:
        return self.n_bytes

    def seek(self, position: int) -> None:
        assert position == 0

    def readinto(self, room: memoryview) -> int:
        self._transfer()
        room[:] = bytes(len(room))
        return len(room)

    def _transfer(self) -> None:
        self.now += 40.0
        self.calls += 1
        if self.calls == 1:
            raise OSError("connection reset")


@pytest.mark.parametrize(("n_bytes", "is_enough"), [(1_000, False), (80_000_000, True)])
def test_a_large_file_has_more_time(
    n_bytes: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(storage, "PIECE_BYTES", n_bytes)  # the file is one
    for ask in (lambda remote: remote.write("w", bytes(n_bytes)), lambda remote: remote.read("w")):
        slow, remote = SlowStore(n_bytes), storage.RemoteStorage("s3://bucket/x")
        remote.__dict__["_client"] = (slow, "bucket/x")
        monkeypatch.setattr(storage.time, "monotonic", lambda slow=slow: slow.now)
        if is_enough:
            ask(remote)
        else:
            with pytest.raises(UnavailableError, match="within 30 s: connection reset"):
                ask(remote)


def test_a_request_that_was_given_up_does_not_come_after_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server held it for longer than anybody waited, and it undid what was written since."""
    done: list[bytes] = []
    held = threading.Event()

    class Held:
        def open_output_stream(self, path: str, *, compression: str | None) -> Any:
            return contextlib.nullcontext(self)

        def write(self, data: bytes) -> None:
            if data == b"first":
                held.wait(30.0)
            done.append(data)

    remote = storage.RemoteStorage("s3://bucket/x")
    remote.__dict__["_client"] = (Held(), "bucket/x")
    monkeypatch.setattr(storage, "DEADLINE_S", 0.2)
    for data in (b"first", b"second"):
        with pytest.raises(UnavailableError, match="w within 0 s: no answer"):
            remote.write("w", data)
    remote.write("another", b"goes on")
    monkeypatch.setattr(storage, "DEADLINE_S", 30.0)
    threading.Timer(0.2, held.set).start()
    remote.write("w", b"third")
    assert done == [b"goes on", b"first", b"third"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize(
    "call", ["store.reading.pins.open_directory_in", "store.reading.pins.open_file_in", "os.rename"]
)
def test_a_reader_that_cannot_pin_where_it_may_write_is_one_line(
    call: str, code: int, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pin(layout, 3).close()
    n_open = len(os.listdir("/proc/self/fd"))

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(call, fail)
    with pytest.raises(
        StoreError, match=r"cannot tell the owner of .*/readers: .*; free space, raise ulimit -n"
    ) as caught:
        Pin(layout, 7)
    assert "\n" not in str(caught.value)
    assert os.listdir(layout.readers) == []  # nor an unlocked file, which nobody would look for
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_no_pin_is_made_outside_of_a_run_that_is_exchanged(
    layout: RunLayout, tmp_path: Path
) -> None:
    """The attack: its owner put a link to a private directory in its place, for one moment."""
    private = tmp_path / "private"
    private.mkdir()
    layout.root.rename(tmp_path / "aside")
    layout.root.symlink_to(private)
    with pytest.raises(StoreError, match="was exchanged while it was opened; open it again"):
        Pin(layout, 3)
    assert list(private.iterdir()) == []
    layout.root.unlink()
    (tmp_path / "aside").rename(layout.root)
    pin = Pin(layout, 3)
    layout.root.rename(tmp_path / "aside")
    layout.root.symlink_to(private)
    pin.close()
    assert list(private.iterdir()) == list((tmp_path / "aside" / "readers").iterdir()) == []


def test_nobody_else_may_open_a_pin_before_it_is_locked(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a neighbour locked it first, and the reader waited for as long as they liked."""
    layout.readers.chmod(0o2775)
    modes, lock = [], fcntl.flock

    def looked_at(descriptor: int, how: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    pin = Pin(layout, 3)
    (path,) = layout.readers.iterdir()
    assert (modes, path.stat().st_mode & 0o777) == ([0o600], 0o640)
    pin.close()


def test_nobody_else_may_lock_the_pin_that_a_killed_reader_left(layout: RunLayout) -> None:
    """The attack: the run then kept all files, until its manifest was too long."""
    pin = Pin(layout, 3)
    (path,) = layout.readers.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    pin.close()


def test_a_member_of_a_group_shows_no_pin_to_others(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: others could lock the pin of a member who does not own `readers`."""
    layout.readers.chmod(0o2775)
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(layout.readers)
    pin = Pin(layout, 3)
    (path,) = layout.readers.iterdir()
    assert path.stat().st_mode & 0o777 == 0o640
    pin.close()


def test_no_readers_umask_locks_anybody_out_of_the_run(tmp_path: Path) -> None:
    """The owner makes the directory of pins, so no reader does."""
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    Catalog.open(layout).close()
    assert stat.S_IMODE(layout.readers.stat().st_mode) == stat.S_IMODE(layout.logs.stat().st_mode)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOLCK])
def test_a_run_that_this_user_may_not_write_is_read_without_a_pin(
    code: int, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pins, "open_file_in", fail)
    Pin(layout, 7).close()
    assert os.listdir(layout.readers) == []

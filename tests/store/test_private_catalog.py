"""A catalog is made for its owner alone: whoever may read its files can lock them."""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import sqlite3
import stat
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from store import (
    Catalog,
    RunLayout,
    StoreError,
    check_fork,
    fork,
    read_manifest,
    rebuild_run,
    restart_points,
)
from store.catalog import private_copy
from store.catalog.connection import opened_read_only
from store.errors import FormatError, UnsafePathError
from store.exchange import bring
from store.exchange.bring import bring_catalog, bring_run, run_at
from store.maintenance.fsck import CATALOG, check
from tests.crash.commands import STEP, make_forkable_run
from tests.support.neighbours import Neighbour
from tests.support.run_views import connect
from tests.support.store_runs import make_run
from tests.support.store_samples import open_train_group

ANOTHER = 65534
ENDS = ("", "-wal", "-shm")
WRITE_LOCK = 120  # the byte of the shared memory that stands for the lock of a writer


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Forbid nothing: what is kept from others is kept by the code."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the mode of each catalog when SQLite opens it to write."""
    seen: list[int] = []
    connect_as_before = sqlite3.connect

    def watched(path: str | Path, **options: object) -> sqlite3.Connection:
        if Path(path).name == "catalog.sqlite":
            seen.append(mode(Path(path)) if Path(path).exists() else 0o666)
        return connect_as_before(path, **options)

    monkeypatch.setattr(sqlite3, "connect", watched)
    return seen


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def new(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run").root


def forked(tmp_path: Path) -> Path:
    make_forkable_run(tmp_path)
    source = RunLayout.open(tmp_path / "run")
    source.catalog.chmod(0o644)
    return fork(source, tmp_path / "forked", learner_step=STEP, config_yaml="a: 2\n").root


def rebuilt(tmp_path: Path) -> Path:
    layout = make_run(tmp_path / "run")
    layout.catalog.chmod(0o644)
    rebuild_run(layout.root, force=True, say=print)
    return layout.root


def in_a_storage(tmp_path: Path) -> str:
    uri = (tmp_path / "shared").as_uri()
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n", storage_uri=uri)
    with Catalog.open(layout) as catalog:
        open_train_group(catalog, 0)
    return uri


def brought(tmp_path: Path) -> Path:
    bring_run(in_a_storage(tmp_path), tmp_path / "brought", trusts=False, is_secret=lambda _: False)
    return tmp_path / "brought"


def brought_for_a_fork(tmp_path: Path) -> Path:
    bring.run_at.cache_clear()
    bring.bring_catalog.cache_clear()
    uri = in_a_storage(tmp_path)
    bring_catalog(uri)
    return run_at(uri)


@pytest.mark.parametrize("make", [new, forked, rebuilt, brought, brought_for_a_fork])
def test_every_catalog_is_made_for_its_owner_alone(
    make: Callable[[Path], Path],
    tmp_path: Path,
    modes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout = RunLayout.open(make(tmp_path))
    assert mode(layout.catalog) == 0o600
    assert set(modes) == {0o600}, "from the first byte"
    if layout.backup.exists():
        assert mode(layout.backup) & 0o444 == 0o444, "a backup has the mode that the umask leaves"


@pytest.mark.parametrize("given", [None, 0o640, 0o644])
def test_the_log_and_the_shared_memory_have_the_mode_of_the_catalog_which_its_owner_may_change(
    tmp_path: Path, given: int | None
) -> None:
    layout = new_layout(tmp_path)
    if given is not None:
        layout.catalog.chmod(given)
    with Catalog.open(layout) as catalog:
        open_train_group(catalog, None)
        files = [layout.catalog.with_name(f"catalog.sqlite{end}") for end in ENDS]
        assert [mode(file) for file in files] == [given or 0o600] * 3


def new_layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    Catalog.open(layout).close()
    return layout


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a directory that every user may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # TMPDIR is closed to others
        Path(directory).chmod(0o755)
        yield Path(directory)


def as_another_user(do: Callable[[], str]) -> str:
    """Return what `do` says in a process of another user, or its error."""
    spawning = multiprocessing.get_context("fork")
    said = spawning.Queue()

    def act() -> None:
        os.setresgid(ANOTHER, ANOTHER, ANOTHER)
        os.setgroups([])
        os.setresuid(ANOTHER, ANOTHER, ANOTHER)
        del os.environ["TMPDIR"]  # of the tests
        tempfile.tempdir = None
        try:
            said.put(do())
        except (StoreError, OSError) as error:
            said.put(f"{type(error).__name__}: {error}")

    child = spawning.Process(target=act)
    child.start()
    answer = said.get(timeout=60)
    child.join()
    return str(answer)


only_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@only_as_root
def test_another_user_cannot_lock_the_catalog_of_a_live_run(shared: Path) -> None:
    """The attack: a shared lock, for which read permission suffices, on SQLite's lock of a writer.

    The run ended with "database is locked", and did not start again.
    """
    layout = RunLayout.create(shared / "run", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        open_train_group(catalog, 0)
        lock = struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, WRITE_LOCK, 1, 0)

        def attack() -> str:
            files = [layout.catalog.with_name(f"catalog.sqlite{end}") for end in ENDS]
            opened = []
            for file in files:
                with suppress(PermissionError):
                    opened.append(file.open("rb"))
            for file in opened:
                fcntl.fcntl(file, fcntl.F_SETLK, lock)
            return f"locked {len(opened)}"

        assert as_another_user(attack) == "locked 0"
        open_train_group(catalog, 1)


@only_as_root
def test_another_user_is_told_how_the_owner_can_share_a_catalog_and_reads_the_rest(
    shared: Path,
) -> None:
    make_forkable_run(shared)
    layout = RunLayout.open(shared / "run")
    newest = read_manifest(layout)
    assert newest is not None

    def rows(as_of: int | None = None) -> str:
        with closing(connect(layout, as_of=as_of)) as views:
            return str(views.sql("SELECT count(*) FROM steps").fetchall()[0][0])

    refused = (
        f"PrivateCatalogError: {layout.catalog} may not be read by you: it belongs to uid 0, and a "
        "catalog is made for its owner alone, because who may read it can lock it. Its owner can "
        f"share it: chmod g+r {layout.catalog}*"
    )
    needs_it: list[Callable[[], object]] = [
        lambda: rows(newest.lsn - 1),
        lambda: check(layout, level=CATALOG),
        lambda: check_fork(layout, shared / "made", learner_step=STEP),
        lambda: restart_points(layout),
    ]
    for do in needs_it:
        assert as_another_user(lambda do=do: str(do())) == refused  # type: ignore[misc]
    assert as_another_user(rows) == rows() != "0"
    layout.catalog.chmod(0o640)
    os.chown(layout.catalog, 0, ANOTHER)
    assert as_another_user(lambda: rows(newest.lsn)) == rows()
    assert as_another_user(lambda: str(check(layout, level=CATALOG))) == "[]"


@only_as_root
def test_the_owner_of_a_catalog_without_permissions_is_told_to_give_them_back(
    shared: Path,
) -> None:
    layout = new_layout(shared)
    os.chown(layout.catalog, ANOTHER, ANOTHER)
    layout.catalog.chmod(0)
    said = as_another_user(lambda: str(check(layout, level=CATALOG)))
    assert said == (f"StoreError: {layout.catalog} may not be read: chmod u+rw {layout.catalog}*")


def written_by_a_neighbour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """Return the run of another user who was killed: its newest groups are in its log alone."""
    layout = new_layout(tmp_path / "theirs")
    with Catalog.open(layout) as catalog:
        for ordinal in range(3):
            open_train_group(catalog, ordinal)
        killed = {end: layout.catalog.with_name(f"catalog.sqlite{end}") for end in ENDS[:2]}
        kept = {path: path.read_bytes() for path in killed.values()}
    for path, content in kept.items():
        path.write_bytes(content)
    neighbour = Neighbour(monkeypatch)
    for path in (layout.root.parent, layout.root, *kept):
        neighbour.gets(path)
    return layout


def n_groups_of(layout: RunLayout) -> int:
    with opened_read_only(layout) as connection:
        return int(connection.execute("SELECT count(*) FROM grp").fetchone()[0])


def test_a_reader_makes_no_file_beside_the_catalog_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = written_by_a_neighbour(tmp_path, monkeypatch)
    before = {path.name: path.read_bytes() for path in layout.root.glob("catalog.sqlite*")}
    assert n_groups_of(layout) == 3
    assert {path.name: path.read_bytes() for path in layout.root.glob("catalog.sqlite*")} == before
    assert "catalog.sqlite-shm" not in before


def test_a_reader_is_led_to_the_catalog_of_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the directory was exchanged for a link to a private run, whose shared memory
    SQLite made from the neighbour's log. Groups that the run had committed were lost with it.
    """
    mine = new_layout(tmp_path / "mine")
    theirs = written_by_a_neighbour(tmp_path, monkeypatch)
    connect_as_before = sqlite3.connect

    def exchanged(database: str, **options: object) -> sqlite3.Connection:
        connection = connect_as_before(database, **options)
        if "catalog.sqlite" in database:  # SQLite has opened the catalog, and not yet its log
            theirs.root.rename(tmp_path / "aside")
            theirs.root.symlink_to(mine.root)
        return connection

    before = sorted(path.name for path in mine.root.iterdir())
    monkeypatch.setattr(sqlite3, "connect", exchanged)
    with suppress(StoreError, sqlite3.Error):
        n_groups_of(theirs)
    assert theirs.root.is_symlink()
    assert sorted(path.name for path in mine.root.iterdir()) == before


def test_a_run_that_was_exchanged_for_a_link_to_a_private_one_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = new_layout(tmp_path / "mine")
    theirs = written_by_a_neighbour(tmp_path, monkeypatch)
    theirs.root.rename(tmp_path / "aside")
    theirs.root.symlink_to(mine.root)
    monkeypatch.setattr("store.catalog.connection.is_own_place", lambda _: False)
    with pytest.raises(StoreError, match="was exchanged"):
        n_groups_of(theirs)


def test_a_log_that_grows_while_it_is_copied_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = written_by_a_neighbour(tmp_path, monkeypatch)
    copied_before = private_copy.copy_first
    sizes = []

    def grown(source: int, copy: BinaryIO, *, n_bytes: int) -> None:
        os.truncate(layout.catalog.with_name("catalog.sqlite-wal"), 1 << 42)
        sizes.append(n_bytes)
        copied_before(source, copy, n_bytes=n_bytes)

    monkeypatch.setattr(private_copy, "copy_first", grown)
    with pytest.raises(FormatError, match="catalog.sqlite-wal"):
        n_groups_of(layout)
    assert max(sizes) < 1 << 20


def test_a_reader_waits_for_no_log_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = written_by_a_neighbour(tmp_path, monkeypatch)
    wal = layout.catalog.with_name("catalog.sqlite-wal")
    wal.unlink()
    os.mkfifo(wal)
    with pytest.raises(UnsafePathError, match="catalog.sqlite-wal"):
        n_groups_of(layout)


def test_pages_that_reach_a_catalog_while_it_is_copied_are_in_the_copy_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner commits, and SQLite moves all pages of the log, just before the catalog is read."""
    layout = new_layout(tmp_path / "theirs")
    copied_before = private_copy.copy_first
    with Catalog.open(layout) as catalog:
        open_train_group(catalog, 0)
        neighbour = Neighbour(monkeypatch)
        neighbour.gets(layout.root)

        def written_meanwhile(source: int, copy: BinaryIO, *, n_bytes: int) -> None:
            if not Path(copy.name).name.endswith("-wal"):
                for ordinal in range(1, 40):
                    open_train_group(catalog, ordinal)
                catalog._database._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            copied_before(source, copy, n_bytes=n_bytes)

        monkeypatch.setattr(private_copy, "copy_first", written_meanwhile)
        with opened_read_only(layout) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            assert connection.execute("SELECT count(*) FROM grp").fetchone() == (40,)


def test_a_copy_of_a_catalog_that_is_written_has_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = new_layout(tmp_path / "theirs")
    seen: list[int] = []
    with Catalog.open(layout) as catalog:
        # The log begins anew every few groups, as that of a long run does every few thousand pages.
        catalog._database._connection.execute("PRAGMA wal_autocheckpoint = 20")
        neighbour = Neighbour(monkeypatch)
        neighbour.gets(layout.root)
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                try:
                    with opened_read_only(layout) as connection:
                        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                        rows = connection.execute("SELECT count(*), max(ordinal) + 1 FROM grp")
                        n, last = rows.fetchone()
                        assert n == (last or 0), "groups are opened in order"
                        seen.append(n)
                except StoreError as error:
                    assert "faster than it can be copied" in str(error)  # noqa: PT017

        with ThreadPoolExecutor() as pool:
            reading = pool.submit(read)
            for ordinal in itertools.count():
                open_train_group(catalog, ordinal)
                if reading.done() or (ordinal >= 300 and len(set(seen)) > 3):
                    break
            done.set()
            reading.result()
    assert seen == sorted(seen)

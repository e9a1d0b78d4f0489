"""A path leads through no link of another user, and what is written to is this user's own."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from cli.__main__ import main
from path_bounds import MAX_NAMES
from store import (
    Catalog,
    OfflineSource,
    RunLayout,
    StoreError,
    check_own_directory,
    export,
    export_selection,
    find_sources,
    is_trusted,
    trust,
    write_open_sql,
)
from store.errors import UnsafePathError
from store.untrusted import signatures
from store.untrusted.own_directory import (
    check_file_links,
    open_file_by_own_links,
    opened_by_own_links,
)
from tests.support.neighbours import Neighbour, give_to_the_user
from tests.support.store_runs import fingerprint
from tests.support.store_samples import open_train_group, play


@pytest.fixture(autouse=True)
def neighbour(monkeypatch: pytest.MonkeyPatch) -> Neighbour:
    return Neighbour(monkeypatch)


def signed_run(root: Path, monkeypatch: pytest.MonkeyPatch, *, uri: str | None = None) -> RunLayout:
    """A run of one group, signed by the user of these tests, who may be root."""
    with monkeypatch.context() as by_root:
        by_root.setattr(os, "geteuid", os.getuid)
        layout = RunLayout.create(root, config_yaml="", storage_uri=uri)
        with Catalog.open(layout) as catalog:
            write_open_sql(layout, macros=(), max_staleness=4)
            play(layout, catalog, open_train_group(catalog, 0))
            export(catalog, layout)
    return layout


def test_what_is_not_there_is_refused_where_it_was_made(tmp_path: Path) -> None:
    """The attack: the directory was away while it was looked at, and another user's after it."""
    with pytest.raises(StoreError, match=r"run is not there \(any more\)"):
        check_own_directory(tmp_path / "run")
    check_own_directory(tmp_path / "run", is_made=False)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link", "file/run"):
        with pytest.raises(StoreError, match="is not there"):
            check_own_directory(tmp_path / name)
    (tmp_path / "run").mkdir()
    check_own_directory(tmp_path / "run")
    check_own_directory(tmp_path / "run" / ".." / "run" / "..")


def test_a_link_of_another_user_is_refused_wherever_it_lies(
    tmp_path: Path, neighbour: Neighbour
) -> None:
    """The attack: `runs`, the user's own link, led to one of theirs with the name of a purged disk."""
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "theirs").symlink_to("disk")
    (tmp_path / "runs").symlink_to("theirs")
    run = tmp_path / "runs" / "run"
    check_own_directory(run)
    with opened_by_own_links(run) as (directory, place):
        assert place == tmp_path / "disk" / "run"
        assert os.path.samestat(os.fstat(directory), place.stat())
    neighbour.gets(tmp_path / "theirs")
    for path in (run, tmp_path / "disk" / ".." / "runs" / "run"):
        with pytest.raises(StoreError, match=r"theirs belongs to another user \(uid 65534\)"):
            check_own_directory(path, may_be_anothers=True)
        with (
            pytest.raises(UnsafePathError, match="theirs is a link of another user"),
            opened_by_own_links(path),
        ):
            pass
    check_own_directory(tmp_path / "disk" / "run")
    with opened_by_own_links(tmp_path / "disk" / "run"):
        pass


def content(path: Path) -> bytes:
    with open(open_file_by_own_links(path), "rb") as file:
        return file.read()


def test_a_file_is_opened_through_links_of_whoever_owns_it(
    tmp_path: Path, neighbour: Neighbour
) -> None:
    """The attack: a file of a shared model was a link to a private one, which was copied."""
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "one").symlink_to("../file")
    (tmp_path / "links" / "two").symlink_to("one")
    (tmp_path / "way").symlink_to("links")
    way = tmp_path / "way" / "two"
    assert content(tmp_path / "file") == content(way) == b"content"
    for link in ("links/one", "links/two", "way"):
        neighbour.gets(tmp_path / link)
        with pytest.raises(
            UnsafePathError, match=f"{link} is a link of another user .*; copy what"
        ):
            open_file_by_own_links(way)
        neighbour.gives_back(tmp_path / link)
    neighbour.gets(tmp_path / "links" / "one")
    neighbour.gets(tmp_path / "file")
    assert content(way) == b"content"


def test_a_file_that_everybody_can_read_is_opened_through_links_of_everybody(
    neighbour: Neighbour,
) -> None:
    """Such a cache of models has many users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # nobody else can enter pytest's
        shared = Path(name)
        shared.chmod(0o755)
        (shared / "file").write_bytes(b"content")
        (shared / "link").symlink_to("file")
        neighbour.gets(shared / "link")
        assert content(shared / "link") == b"content"
        closed = [(shared / "file", 0o640), (shared, 0o750)]
        closed += [(shared / "file", 0o604), (shared, 0o705)]  # for all but a group
        for path, mode in closed:
            usual = path.stat().st_mode & 0o777
            path.chmod(mode)
            with pytest.raises(UnsafePathError, match="link is a link of another user"):
                content(shared / "link")
            path.chmod(usual)


def test_a_way_of_endless_names_is_given_up(tmp_path: Path) -> None:
    """The attack: each of 5,000 files of a model lay behind 38 links of 1,600 names."""
    (tmp_path / "x").mkdir()
    (tmp_path / "file").write_bytes(b"content")
    depth = len(tmp_path.parts)
    for n_names, is_opened in ((MAX_NAMES - depth - 2, True), (MAX_NAMES, False)):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("x/../" * (n_names // 2) + "file")
        if is_opened:
            assert content(tmp_path / "link") == b"content"
        else:
            with pytest.raises(UnsafePathError, match="leads through more than 256 names; give a"):
                content(tmp_path / "link")
    for end in ("x", "nothing"):  # below a model's own directory, no file at all
        (tmp_path / "link").unlink()
        (tmp_path / "link").symlink_to("x/../" * MAX_NAMES + end)
        with pytest.raises(UnsafePathError, match="link leads through more than 256 names"):
            check_file_links(tmp_path)


def test_only_a_file_is_opened_as_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    before = len(os.listdir("/proc/self/fd"))
    for name in ("fifo", "link", "."):
        with pytest.raises(UnsafePathError, match="is no regular file"):
            open_file_by_own_links(tmp_path / name)
    for name in ("nothing", "fifo/below"):
        with pytest.raises(FileNotFoundError, match="No such file"):
            open_file_by_own_links(tmp_path / name)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("target", [".", "/", "..", "disk/.."])
def test_a_link_that_adds_no_name_leads_to_a_directory_all_the_same(
    target: str, tmp_path: Path, neighbour: Neighbour
) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "disk").mkdir(parents=True)
    (theirs / "run").symlink_to(target)
    reached = (theirs / target).resolve()
    with opened_by_own_links(theirs / "run") as (directory, place):
        assert place == reached
        assert os.path.samestat(os.fstat(directory), reached.stat())
    neighbour.gets(theirs)
    if reached == theirs:
        with pytest.raises(StoreError, match="theirs belongs to another user"):
            check_own_directory(theirs / "run")
    else:
        check_own_directory(theirs / "run")


def test_links_without_end_are_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        check_own_directory(tmp_path / "a")


@pytest.mark.parametrize(
    "command",
    ["compact {run}", "fsck --repair {run}", "rebuild --force {run}", "import {run} {data}"],
)
def test_no_command_writes_into_a_run_in_another_users_directory(
    command: str,
    tmp_path: Path,
    neighbour: Neighbour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: they exchanged it with a link to a run of the user, whose files were removed."""
    run, data = tmp_path / "run", tmp_path / "data"
    layout = signed_run(run, monkeypatch)
    export_selection(run, data, where=None, as_of=None)
    neighbour.gets(run)
    if command.startswith("fsck"):
        next(layout.segments.rglob("*.parquet")).unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # the key is root's
    before = fingerprint(run)
    assert main(command.format(run=run, data=data).split()) == 2
    assert "run belongs to another user (uid 65534)" in capsys.readouterr().err
    assert fingerprint(run) == before
    monkeypatch.setattr("store.untrusted.trust.is_trusted", lambda _: True)
    assert main(command.format(run=run, data=data).split()) in (0, 1), capsys.readouterr().err
    assert fingerprint(run) != before


def test_a_run_that_another_user_signed_can_be_trusted(
    tmp_path: Path, neighbour: Neighbour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only they can read its signed.json. The driver then knows of the trust, and nobody else."""
    run = tmp_path / "run"
    layout = signed_run(run, monkeypatch)
    neighbour.gets(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(signatures, "_key", lambda: bytes(32))
    read = signatures.read_bytes_in

    def refused(directory: int, name: str, *, path: Path, at_most: int) -> bytes:
        if name == "signed.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(directory, name, path=path, at_most=at_most)

    monkeypatch.setattr(signatures, "read_bytes_in", refused)
    assert not is_trusted(run)
    trust(run)
    assert is_trusted(run)
    with Catalog.open(layout):
        pass
    monkeypatch.setattr("store.untrusted.trust._trusted_now", set())  # in the coordinator's process
    with pytest.raises(StoreError, match="run belongs to another user"):
        Catalog.open(layout)
    with Catalog.open(layout, directory_is_checked=True):
        pass


@pytest.mark.parametrize("command", ["report --output", "sql --output"])
def test_no_output_goes_through_a_link_of_another_user(
    command: str,
    tmp_path: Path,
    neighbour: Neighbour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: a directory of theirs became a link before the report was renamed there."""
    (tmp_path / "web").mkdir()
    (tmp_path / "out").symlink_to("web")
    run = signed_run(tmp_path / "run", monkeypatch)
    name, option = command.split()
    words = [name, str(run.root), *(["SELECT 1 AS one"] if name == "sql" else [])]
    words += [option, str(tmp_path / "out" / "made.csv")]
    neighbour.gets(tmp_path / "out")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(words) == 2
    assert "out is a link of another user (uid 65534)" in capsys.readouterr().err
    assert not list((tmp_path / "web").iterdir())
    neighbour.gives_back(tmp_path / "out")
    assert main(words) == 0, capsys.readouterr().err
    assert [path.name for path in (tmp_path / "web").iterdir()] == ["made.csv"]


def test_a_storage_whose_place_another_user_took_is_not_written_to(
    tmp_path: Path,
    neighbour: Neighbour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: a storage in a directory for all was lost. In its place came a copy, and during a
    compaction a link to the storage of another run, whose segments were removed.
    """
    for_all = tmp_path / "for_all"
    for_all.mkdir()
    for_all.chmod(0o1777)
    storage = for_all / "storage"
    run = signed_run(tmp_path / "run", monkeypatch, uri=storage.as_uri())
    neighbour.gets(storage)
    monkeypatch.setattr(RunLayout, "is_made_by_this_user", lambda _: True)
    before = fingerprint(storage)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert main(["compact", str(run.root)]) == 2
    assert "storage belongs to another user (uid 65534)" in capsys.readouterr().err
    assert fingerprint(storage) == before


def test_descriptors_are_closed(tmp_path: Path, neighbour: Neighbour) -> None:
    (tmp_path / "theirs").symlink_to(tmp_path)
    neighbour.gets(tmp_path / "theirs")
    before = len(os.listdir("/proc/self/fd"))
    check_own_directory(tmp_path)
    for name in ("theirs", "nothing"):
        with pytest.raises(StoreError):
            check_own_directory(tmp_path / name)
    with pytest.raises(FileNotFoundError), opened_by_own_links(tmp_path / "nothing"):
        pass
    with pytest.raises(UnsafePathError), opened_by_own_links(tmp_path / "theirs"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_run_is_read_through_a_link_of_another_user_but_to_their_own(
    tmp_path: Path,
    neighbour: Neighbour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: what was exported through a neighbour's link to a private run was for all."""
    layout = signed_run(tmp_path / "private" / "run", monkeypatch)
    for each in (layout.root, layout.root.parent):
        give_to_the_user(each)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "run").symlink_to(layout.root)
    (theirs / "above").symlink_to(layout.root.parent)
    for link in (theirs / "run", theirs / "above"):
        neighbour.gets(link)
    out = tmp_path / "out"
    for run, link in ((theirs / "run", "run"), (theirs / "above" / "run", "above")):
        for command in (
            ["sql", run, "SELECT 1", "--output", out],
            ["export", run, out],
            ["report", run, "--output", out],
            ["status", run],
            ["fsck", run],
        ):
            assert main(list(map(str, command))) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{theirs / link} is a link of another user (uid 65534)" in line
            assert f"give the path behind it: {layout.root}" in line
            assert not out.exists()
    assert RunLayout.open(layout.root).info == layout.info
    neighbour.gets(layout.root)
    assert RunLayout.open(theirs / "run").info == layout.info, "they could show it anyway"


def test_no_dataset_is_read_through_a_link_of_another_user_but_to_their_own(
    tmp_path: Path,
    neighbour: Neighbour,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: a private dataset behind a neighbour's link was copied to a run for all."""
    layout = signed_run(tmp_path / "private" / "run", monkeypatch)
    private = tmp_path / "private" / "dataset"
    export_selection(layout.root, private, where=None, as_of=None, whole_groups=True)
    give_to_the_user(private)
    public = signed_run(tmp_path / "public", monkeypatch)
    link = tmp_path / "theirs"
    link.symlink_to(private)
    neighbour.gets(link)
    before = fingerprint(public.root)
    source = OfflineSource(location=str(link), where=None)
    with pytest.raises(StoreError, match="is a link of another user"):
        find_sources([source], order="n_won")
    for location in (str(link), f"file://{link}"):
        assert main(["import", str(public.root), location]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{link} is a link of another user (uid 65534)" in line
        assert fingerprint(public.root).keys() == before.keys()
    neighbour.gets(private)
    find_sources([source], order="n_won")  # they could show it anyway

"""A run whose files are in a storage goes on from there alone, when its own disk is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import store.maintenance.rebuild as rebuild_module
from store import (
    Catalog,
    FormatError,
    RunLayout,
    StoreError,
    bring_run,
    export,
    is_brought,
    local_directory,
    open_run,
    write_open_sql,
)
from store.exchange import bring
from store.exchange.offline_import import parse_source, take_sources
from store.maintenance.fsck import CONTENTS, check
from store.run_json import parse_run_json
from store.run_names import BASE_POLICY, BRING_MARKER
from tests.support.store_samples import play
from tests.support.stored_runs import play_groups, states, train, uri_of


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


def test_a_killed_call_begins_again_and_nothing_else_is_removed(
    lost: RunLayout, tmp_path: Path
) -> None:
    root = tmp_path / "mounted"
    (root / "lost+found").mkdir(parents=True)
    (root / BRING_MARKER).touch()
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


@pytest.mark.parametrize(
    "name",
    [
        "other/deeper",
        "base/deeper",
        "weights/deeper",
        "logs/deeper",
        "quarantine",
        "catalog.v2/deeper",
    ],
)
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_bring_removes_nothing_that_others_put_into_its_directory(
    name: str, lost: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """The attack: a run that was made in the same volume meanwhile was removed."""
    root, top = tmp_path / "volume", name.split("/")[0]
    other: list[RunLayout] = []

    def make_other(*given: object, **named: object) -> None:
        made = RunLayout.create(root / name, config_yaml="")
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
            StoreError, match=rf"has other things in it \({top}\); give an empty dir"
        ):
            bring_run(uri_of(lost), root, trusts=False)
    assert [path.name for path in root.iterdir()] == [top]
    Catalog.open(other[0]).close()
    assert check(other[0], level=CONTENTS) == []
    Catalog.open(lost).close()


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


def test_groups_are_taken_from_a_uri(lost: RunLayout, tmp_path: Path, cache: Path) -> None:
    shutil.rmtree(lost.root)
    target = RunLayout.create(tmp_path / "target", config_yaml="a: 1\n")
    source = parse_source(f"{uri_of(lost)}@won")
    assert source.location == uri_of(lost)
    (taken,) = take_sources(target.root, [source], order="ordinal")
    assert (taken.n_groups, taken.is_dataset) == (4, False)
    assert str(taken).startswith(f"4 groups of {uri_of(lost)} where won")

"""A selection out of a run and into another: what is selected, what arrives, and what a run does
with it.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from cli.__main__ import main
from row_bounds import MAX_CHARACTERS, MAX_NAME_CHARACTERS
from store import (
    FORMAT,
    SEGMENT_SCHEMA,
    Catalog,
    DigestError,
    FormatError,
    Group,
    LockedError,
    RunLayout,
    StoreError,
    VersionRecord,
    export,
    segment_encoding,
    to_table,
    write_open_sql,
    write_segment,
)
from store.catalog.groups import insert_trajectories
from store.exchange import dataset_files
from store.exchange.bring import bring_run
from store.exchange.dataset_export import export_selection, live_files
from store.exchange.dataset_import import import_selection
from store.exchange.fork import fork
from store.hashing import uid
from store.maintenance import segment_rows
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import LARGEST_COUNT, rebuild
from store.maintenance.repair import repair
from store.maintenance.segment_rows import LARGEST_NUMBER, check_importable, open_rows
from store.reading.mirror import fetch_run
from store.reading.reader import open_run
from store.segment_encoding import decode, encode, most_rows
from store.segments import read_segments, write_rows
from store.untrusted import bounded_parquet
from tests.support.forged_dataset import write_dataset
from tests.support.neighbours import Neighbour, look_while_away
from tests.support.run_views import connect
from tests.support.store_samples import make_trajectory, open_train_group, play


def make_run(
    root: Path, *, n_groups: int = 3, missing: int = 0, uri: str | None = None
) -> RunLayout:
    """Groups of two, one segment each; of the last one `missing` members are not played. Members
    with even numbers won.
    """
    layout = RunLayout.create(root, config_yaml="a: 1\n", storage_uri=uri)
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        for number in range(n_groups):
            group = open_train_group(catalog, None)
            members = group.missing[
                : len(group.missing) - (missing if number == n_groups - 1 else 0)
            ]
            played = [make_trajectory(group, member, version=number) for member in members]
            catalog.commit(
                write_segment(layout, played, worker="w0", epoch=catalog.epoch), epoch=catalog.epoch
            )
        export(catalog, layout)
    return layout


def parts(directory: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(path) for path in sorted(directory.rglob("*.parquet")))


def states(layout: RunLayout) -> list[tuple[str, str, str, int, int]]:
    with closing(sqlite3.connect(layout.catalog)) as catalog:
        return catalog.execute(
            "SELECT split, state, reason, n_members, size FROM grp ORDER BY split, ordinal"
        ).fetchall()


def test_an_export_is_the_stored_rows_of_whole_trajectories(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    dataset = export_selection(
        layout.root, tmp_path / "out", where="won AND version_min >= 1", as_of=None
    )
    table = parts(tmp_path / "out")
    assert table.schema.remove_metadata() == SEGMENT_SCHEMA
    stored = pa.concat_tables(pq.read_table(path) for path in live_files(layout.root))
    expected = stored.filter(pc.and_(stored["won"], pc.greater_equal(stored["version_min"], 1)))
    assert table.replace_schema_metadata(None).equals(expected.replace_schema_metadata(None))
    assert (dataset.n_trajectories, dataset.n_steps, len(dataset.groups)) == (2, 6, 2)
    metadata = pq.read_schema(tmp_path / "out" / dataset.parts[0].path).metadata
    assert metadata[b"run_id"].decode() == layout.info.run_id
    assert metadata[b"format"] == FORMAT.encode()
    written = json.loads((tmp_path / "out/dataset.json").read_text())
    assert written["run_id"] == layout.info.run_id
    assert written["where"] == "won AND version_min >= 1"
    assert str(tmp_path / "out") in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("is_link", [False, True])
def test_nothing_is_exported_or_fetched_into_a_place_of_another_user(
    tmp_path: Path, is_link: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: their link to an empty directory became one to another run of the user's.

    Fetching removed the segments there, and exporting wrote over a README.md.
    """
    layout = make_run(tmp_path / "run")
    make_run(tmp_path / "stored", uri=(tmp_path / "storage").as_uri())
    place, empty = tmp_path / "place", tmp_path / "empty"
    empty.mkdir()
    if is_link:
        place.symlink_to(empty)
    else:
        place.mkdir()
    Neighbour(monkeypatch).gets(place)
    before = place.lstat()
    with pytest.raises(StoreError, match=r"place belongs to another user \(uid 65534\)"):
        export_selection(layout.root, place, where=None, as_of=None)
    with pytest.raises(StoreError, match=r"place belongs to another user \(uid 65534\)"):
        fetch_run((tmp_path / "storage").as_uri(), place)
    with pytest.raises(StoreError, match=r"place belongs to another user \(uid 65534\)"):
        RunLayout.create(tmp_path / "new", config_yaml="", storage_uri=place.as_uri())
    assert (place.lstat(), list(place.iterdir())) == (before, [])


def test_nothing_is_made_behind_a_link_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a link in a directory for all led to a private one, and folders were made there."""
    layout = make_run(tmp_path / "run")
    uri = (tmp_path / "storage").as_uri()
    make_run(tmp_path / "stored", uri=uri)
    private, link = tmp_path / "private", tmp_path / "link"
    private.mkdir()
    link.symlink_to(private)
    Neighbour(monkeypatch).gets(link)
    place = link / "sub" / "run"
    for act in (
        lambda: export_selection(layout.root, place, where=None, as_of=None),
        lambda: fetch_run(uri, place),
        lambda: bring_run(uri, place, trusts=False),
        lambda: fork(layout, place, learner_step=1, config_yaml=""),
    ):
        with pytest.raises(StoreError, match=r"link (belongs to|is a link of) another user"):
            act()
        assert list(private.iterdir()) == []


def test_a_copy_of_another_user_that_was_away_while_it_was_looked_at_is_not_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a link took its place after the look, and files of another run were removed."""
    make_run(tmp_path / "stored", uri=(tmp_path / "storage").as_uri())
    uri, place = (tmp_path / "storage").as_uri(), tmp_path / "place"
    fetch_run(uri, place)
    (place / "open.sql").unlink()
    Neighbour(monkeypatch).gets(place)
    monkeypatch.setattr("store.reading.mirror.check_own_directory", look_while_away(place))
    with pytest.raises(StoreError, match=r"place is not there \(any more\)"):
        fetch_run(uri, place)
    assert not (place / "open.sql").exists()


def test_a_condition_may_use_trajectories_groups_and_the_views(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    for number, (where, n_trajectories) in enumerate(
        [
            (None, 6),
            ("state = 'complete' AND size = 2 AND n_steps = 3 OR false", 6),
            ("group_uid IN (SELECT group_uid FROM groups WHERE ordinal = 0) -- a comment", 2),
        ]
    ):
        dataset = export_selection(layout.root, tmp_path / str(number), where=where, as_of=None)
        assert dataset.n_trajectories == n_trajectories, where


def test_an_export_as_of_an_lsn_does_not_see_what_came_later(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    with closing(sqlite3.connect(layout.catalog)) as catalog:
        first = catalog.execute("SELECT min(lsn) FROM segment").fetchone()[0]
    dataset = export_selection(layout.root, tmp_path / "out", where=None, as_of=first)
    assert (dataset.n_trajectories, dataset.lsn) == (2, first)


def test_rows_that_do_not_count_are_not_exported(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run", missing=1)
    with Catalog.open(layout) as catalog:
        group = catalog.lease_open_group(worker="w1", lease_s=60.0)
        assert group is not None
        # member 0 is committed already
        both = [make_trajectory(group, member, version=2) for member in range(2)]
        catalog.commit(
            write_segment(layout, both, worker="w1", epoch=catalog.epoch), epoch=catalog.epoch
        )
        export(catalog, layout)
    dataset = export_selection(layout.root, tmp_path / "out", where=None, as_of=None)
    assert (dataset.n_trajectories, parts(tmp_path / "out").num_rows) == (6, 18)
    with pytest.raises(StoreError, match="duplicates.*export"):
        live_files(layout.root)


def test_a_condition_that_is_none_is_refused(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    for where in (
        "nonsense > 1",
        "true) UNION SELECT 1 WHERE (true",
        "true) OR (true",
        "won; DROP VIEW steps",
        "",
    ):
        with pytest.raises(StoreError):
            export_selection(layout.root, tmp_path / "out", where=where, as_of=None)
    assert not (tmp_path / "out").exists()


def test_an_export_is_refused_where_it_would_do_harm(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    for dest, message in (
        (tmp_path / "full", "not empty"),
        (tmp_path / "full/mine.txt", "is a file"),
        (layout.root / "out", "in the run"),
        (layout.root, "in the run"),
    ):
        with pytest.raises(StoreError, match=message):
            export_selection(layout.root, dest, where=None, as_of=None)
    with pytest.raises(StoreError, match="no trajectory of .*run matches version_min > 99"):
        export_selection(layout.root, tmp_path / "out", where="version_min > 99", as_of=None)


def test_a_damaged_segment_stops_an_export_before_it_is_a_dataset(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    victim = live_files(layout.root)[-1]
    column = SEGMENT_SCHEMA.get_field_index("response_logprobs")  # not one the condition looks at
    data = bytearray(victim.read_bytes())
    data[pq.read_metadata(victim).row_group(0).column(column).data_page_offset + 40] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(data)
    with pytest.raises(DigestError, match=victim.stem):
        export_selection(layout.root, tmp_path / "out", where=None, as_of=None)
    with pytest.raises(FormatError, match="dataset.json is not there"):
        import_selection(layout.root, tmp_path / "out")


def test_an_export_is_refused_where_files_would_be_left_out(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    live_files(layout.root)[-1].unlink()
    with pytest.raises(StoreError, match="1 of 3 files cannot be read.*nothing was exported"):
        export_selection(layout.root, tmp_path / "out", where=None, as_of=None)
    assert not (tmp_path / "out").exists()


def test_an_import_is_seen_and_never_played_or_trained_on(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source", missing=1)
    target = make_run(tmp_path / "target", n_groups=1)
    export_selection(source.root, tmp_path / "out", where=None, as_of=None)
    report = import_selection(target.root, tmp_path / "out")
    assert (report.n_trajectories, report.n_steps, report.n_known) == (5, 15, 0)
    name = f"from run {source.info.run_id}"
    assert states(target) == [
        ("imported", "complete", f"imported {name}", 2, 2),
        ("imported", "complete", f"imported {name}", 2, 2),
        ("imported", "abandoned", f"imported incomplete {name}", 1, 2),
        ("train", "complete", "all 2 trajectories committed", 2, 2),
    ]
    uids = (
        "SELECT traj_uid, sum(reward) AS r, count(*) AS n FROM steps GROUP BY ALL ORDER BY traj_uid"
    )
    with open_run(source.root) as theirs, open_run(target.root) as ours:
        imported = ours.sql(f"WITH s AS ({uids}) FROM s SEMI JOIN trajectories USING (traj_uid)")
        assert set(theirs.sql(uids)["traj_uid"].to_pylist()) < set(imported["traj_uid"].to_pylist())
        assert imported.num_rows == 7
        assert ours.sql("SELECT count(*) AS n FROM ledger WHERE state = 'complete'")[
            "n"
        ].to_pylist() == [3]
    with Catalog.open(target) as catalog:
        assert catalog.outstanding() == 1  # its own
        assert catalog.counts().trajectories == 2
        assert catalog.lease_open_group(worker="w0", lease_s=60.0) is None
        assert catalog.claim(n_groups=2, current_version=0, max_staleness=9) is None
        assert catalog.next_ordinal("train", evaluated_version=None) == 1


def test_importing_again_or_back_changes_nothing(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source")
    target = make_run(tmp_path / "target", n_groups=1)
    export_selection(source.root, tmp_path / "out", where=None, as_of=None)
    import_selection(target.root, tmp_path / "out")
    for layout in (target, source):
        before, files = states(layout), live_files(layout.root)
        report = import_selection(layout.root, tmp_path / "out")
        assert (report.n_trajectories, report.n_known) == (0, 6)
        assert (states(layout), live_files(layout.root)) == (before, files)


def test_imports_that_complete_each_other_make_whole_groups(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source", n_groups=1)
    target = make_run(tmp_path / "target", n_groups=1)
    for where in ("member = 1", "true"):
        export_selection(source.root, tmp_path / where, where=where, as_of=None)
        import_selection(target.root, tmp_path / where)
        expected = "abandoned" if where == "member = 1" else "complete"
        assert states(target)[0][:2] == ("imported", expected)
    with open_run(target.root) as reader:
        assert reader.sql("SELECT count(*) AS n FROM steps")["n"].to_pylist() == [12]


def test_an_import_brings_back_what_the_run_lost(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    export_selection(layout.root, tmp_path / "out", where=None, as_of=None)
    live_files(layout.root)[0].unlink()
    assert main(["fsck", "--repair", str(layout.root)]) in (0, 1)
    assert [state[1] for state in states(layout)].count("open") == 1
    assert import_selection(layout.root, tmp_path / "out").n_trajectories == 2
    assert [state[1:4:2] for state in states(layout)] == [("complete", 2)] * 3
    assert main(["fsck", str(layout.root)]) == 0


def test_a_dataset_that_was_changed_is_refused(tmp_path: Path) -> None:
    source = make_run(tmp_path / "source")
    target = make_run(tmp_path / "target", n_groups=1)
    dataset = export_selection(source.root, tmp_path / "out", where=None, as_of=None)
    part = tmp_path / "out" / dataset.parts[0].path
    whole, part_data = states(target), part.read_bytes()
    part.chmod(0o644)
    part.write_bytes(part_data[:-1] + bytes([part_data[-1] ^ 1]))
    with pytest.raises(DigestError, match=part.name):
        import_selection(target.root, tmp_path / "out")
    part.unlink()
    with pytest.raises(StoreError, match=part.name):
        import_selection(target.root, tmp_path / "out")
    (tmp_path / "out/dataset.json").chmod(0o644)
    (tmp_path / "out/dataset.json").write_text('{"format": "async-gigpo/99"}')
    with pytest.raises(FormatError, match="99"):
        import_selection(target.root, tmp_path / "out")
    assert states(target) == whole


def test_a_run_with_an_owner_is_not_imported_into(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run")
    export_selection(layout.root, tmp_path / "out", where=None, as_of=None)
    with Catalog.open(layout), pytest.raises(LockedError):
        import_selection(layout.root, tmp_path / "out")


def test_uids_may_be_text_for_other_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make_run(tmp_path / "source"), tmp_path / "out"
    assert main(["export", str(source.root), str(out), "--text-uids"]) == 0
    table = parts(out)
    with connect(source) as views:
        uids = "traj_uid::VARCHAR, group_uid::VARCHAR, state_hash::VARCHAR"
        shown = views.sql(f"SELECT {uids} FROM steps ORDER BY ALL").fetchall()
    columns = [table[name].to_pylist() for name in ("traj_uid", "group_uid", "state_hash")]
    assert set(zip(*columns, strict=True)) == set(shown)
    assert "are text, as in SQL" in (out / "README.md").read_text()
    assert main(["import", str(source.root), str(out)]) == 2
    assert (
        "its uids are text, for other programs; export it again without --text-uids"
        in capsys.readouterr().err
    )


def test_the_commands_say_what_they_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_run(tmp_path / "source")
    target = make_run(tmp_path / "target", n_groups=1)
    assert main(["export", str(source.root), str(tmp_path / "out"), "--where", "won"]) == 0
    said = capsys.readouterr().out
    assert "3 trajectories of 3 groups, 9 steps: 1 file" in said
    assert (
        "3 more trajectories of these groups are not in it" in said
        and "--groups exports whole groups" in said
    )
    assert (
        main(["export", str(source.root), str(tmp_path / "whole"), "--where", "won", "--groups"])
        == 0
    )
    assert (
        "6 trajectories of 3 groups" in (said := capsys.readouterr().out)
        and "not in it" not in said
    )
    assert main(["import", str(target.root), str(tmp_path / "out")]) == 0
    assert "3 trajectories, 9 steps are new; 0 were known" in capsys.readouterr().out
    assert main(["export", str(source.root), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("size", [2_000_000_000, 0])
def test_a_group_of_a_size_that_no_run_has_is_refused(tmp_path: Path, size: int) -> None:
    """Refuse the size before an import lists the members of each group."""
    source, into = make_run(tmp_path / "source"), make_run(tmp_path / "into")
    export_selection(source.root, tmp_path / "dataset", where=None, as_of=None)
    file = tmp_path / "dataset" / "dataset.json"
    content = json.loads(file.read_text())
    content["groups"] = dict.fromkeys(content["groups"], size)
    file.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="members"):
        import_selection(into.root, tmp_path / "dataset")


def test_a_file_whose_name_has_half_a_character_is_refused(tmp_path: Path) -> None:
    """The attack: no file can have such a name, and the import ended in a traceback."""
    layout = make_run(tmp_path / "run", n_groups=1)
    forged = forge(layout, tmp_path / "forged", 5, 0, size=1)
    file = forged / "dataset.json"
    content = json.loads(file.read_text())
    content["parts"][0]["path"] = "data/\ud83d.parquet"
    file.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=r"path is .*ud83d.parquet.*, which has half a char"):
        import_selection(layout.root, forged)


@pytest.mark.parametrize("run_id", ["f" * 10_000_000, "\ud800" * 32, "../x", "", "F" * 32])
def test_a_run_id_that_no_run_has_is_refused(tmp_path: Path, run_id: str) -> None:
    """Keep it out of the catalog, which holds it once for each group."""
    layout = make_run(tmp_path / "run", n_groups=1)
    forged = forge(layout, tmp_path / "forged", 5, 0, size=1)
    file = forged / "dataset.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"run_id": run_id}))
    before = states(layout)
    with pytest.raises(FormatError, match="is not a run id of 32 hex|half a char") as refused:
        import_selection(layout.root, forged)
    assert states(layout) == before and len(str(refused.value)) < 500
    assert layout.catalog.stat().st_size < 1_000_000


def test_a_dataset_json_beyond_measure_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_run(tmp_path / "run", n_groups=1)
    forged = forge(layout, tmp_path / "forged", 5, 0, size=1)
    n_bytes = (forged / "dataset.json").stat().st_size
    monkeypatch.setattr(dataset_files, "MAX_DATASET_JSON_BYTES", n_bytes - 1)
    with pytest.raises(StoreError, match="no run wrote it"):
        import_selection(layout.root, forged)
    monkeypatch.setattr(dataset_files, "MAX_DATASET_JSON_BYTES", n_bytes)
    assert import_selection(layout.root, forged).n_trajectories == 1


@pytest.mark.parametrize("column", ["task_id", "env_name", "finish_reason"])
def test_a_name_that_no_run_has_is_refused(tmp_path: Path, column: str) -> None:
    """The attack: 13 KB of Parquet held 20,000,000 equal characters for the catalog."""
    layout = make_run(tmp_path / "run", n_groups=1)
    for length in (MAX_NAME_CHARACTERS, 20_000_000):
        text = "\u00e9" * length
        member = make_trajectory(Group.imported(group_uid=bytes(16), task_id="t", size=1), 0)
        if column == "finish_reason":
            steps = tuple(replace(step, finish_reason=text) for step in member.steps)
            member = replace(member, steps=steps)
        else:
            member = replace(member, **{column: text})
        table = to_table([member])
        place = write_dataset(tmp_path / str(length), table, run_id="f" * 32, size=1)
        if length == MAX_NAME_CHARACTERS:
            assert import_selection(layout.root, place).n_trajectories == 1
            continue
        with pytest.raises(FormatError, match=f"a {column} of 20,000,000 characters, more than 4,"):
            import_selection(layout.root, place)
    assert layout.catalog.stat().st_size < 1_000_000


def test_every_text_of_a_row_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    table = to_table([make_trajectory(Group.imported(group_uid=bytes(16), task_id="t", size=1), 0)])
    texts = {
        field.name for field in SEGMENT_SCHEMA if field.type in (pa.string(), pa.list_(pa.string()))
    }
    assert texts == set(MAX_CHARACTERS)
    for name in texts:
        monkeypatch.setattr(segment_rows, "MAX_CHARACTERS", {name: 2})
        index, kind = table.schema.get_field_index(name), table.schema.field(name).type
        long = ["abc"] if pa.types.is_list(kind) else "abc"
        column = pa.array([long] * len(table), kind)
        changed = table.set_column(index, table.schema.field(index), column)
        with pytest.raises(FormatError, match=f"a {name} of 3 characters, more than 2|state_hash"):
            segment_rows.check_importable(changed, name="part")


def test_rows_without_a_trajectory_are_named() -> None:
    """The attack: they ended the import, and fsck of a run that has them, in a traceback."""
    table = to_table([make_trajectory(Group.imported(group_uid=bytes(16), task_id="t", size=1), 0)])
    index = table.schema.get_field_index("traj_uid")
    nulls = pa.array([None] * len(table), table.schema.field(index).type)
    table = table.set_column(index, table.schema.field(index), nulls)
    assert segment_rows.malformed(table) == [("step_index", "3 rows have no traj_uid")]
    with pytest.raises(FormatError, match="part has no traj_uid in a row"):
        segment_rows.check_importable(table, name="part")


@pytest.mark.parametrize("column", ["gen_us", "env_us"])
@pytest.mark.parametrize("time_us", [-1, 2**63 - 1])
def test_a_duration_that_no_step_has_is_refused(tmp_path: Path, column: str, time_us: int) -> None:
    """The attack: a view that added two of them failed for as long as the run had the rows."""
    layout = make_run(tmp_path / "run", n_groups=1)
    table = parts(forge(layout, tmp_path / "forged", 5, 0, size=1))
    index = table.schema.get_field_index(column)
    times = pa.array([time_us] * len(table), pa.int64())
    table = table.set_column(index, table.schema.field(index), times)
    place = write_dataset(tmp_path / "times", table, run_id="f" * 32, size=1)
    with pytest.raises(FormatError, match=f"has {column}=.*, which no run writes"):
        import_selection(layout.root, place)


@pytest.mark.parametrize("time_us", [-1, -(2**63), 2**63 - 1, 2**63 // 1000 + 1])
def test_a_time_that_no_clock_shows_is_refused(tmp_path: Path, time_us: int) -> None:
    """Rows with such a time could not be turned into Python's objects."""
    layout = make_run(tmp_path / "run", n_groups=1)
    forged = forge(layout, tmp_path / "forged", 5, 0, size=1)
    table = parts(forged)
    index = table.schema.get_field_index("t_start")
    times = pa.array([time_us] * len(table), pa.int64()).cast(table.schema.field(index).type)
    table = table.set_column(index, table.schema.field(index), times)
    place = write_dataset(tmp_path / "times", table, run_id="f" * 32, size=1)
    with pytest.raises(FormatError, match=f"t_start={time_us} us, outside of the years 1970 to"):
        import_selection(layout.root, place)


def forge(layout: RunLayout, dest: Path, ordinal: int, member: int, **changes: Any) -> Path:
    """Write a dataset of one trajectory whose group has the uid of an address in the run.

    Its author knows nothing but the run id, which stands in every export.
    """
    address = (changes.pop("address_split", "train"), ordinal, changes.pop("round", None))
    group_uid = uid(layout.info.run_id, *address)
    size = changes.pop("size", 2)
    run_id = changes.pop("run_id", "f" * 32)
    group = Group.imported(group_uid=group_uid, task_id=f"task-{ordinal}", size=size)
    changes = {"split": "train", "won": True, **changes}
    table = to_table([replace(make_trajectory(group, member), **changes)])
    return write_dataset(dest, table, run_id=run_id, size=size)


def without_size(dataset: Path) -> None:
    """Remove the sizes of all groups but the first from dataset.json."""
    file = dataset / "dataset.json"
    content = json.loads(file.read_text())
    first = uid("f" * 32, "train", 0, None).hex()
    file.write_text(json.dumps(content | {"groups": {first: content["groups"][first]}}))


@pytest.mark.parametrize(
    ("change", "member", "message"),
    [
        ("no size", 1, "part-00001.parquet: dataset.json does not tell the size of group"),
        ("same member", 0, "part-00001.parquet: trajectory .* is not member 0 of group"),
        ("beyond", 7, "part-00001.parquet: trajectory .* is not member 7 of group .*, which has 2"),
        ("of this run", 1, "opened in this very run.*none that it lost"),
    ],
)
def test_nothing_is_imported_from_a_dataset_whose_second_file_is_refused(
    tmp_path: Path, change: str, member: int, message: str
) -> None:
    """The attack: the rows of the first file had been committed, and came with the next export."""
    layout = make_run(tmp_path / "run", n_groups=1, missing=1)
    addresses = [("f" * 32, 0), (layout.info.run_id if change == "of this run" else "f" * 32, 0)]
    if change != "of this run":
        addresses[1] = ("f" * 32, 1)
    first, second = (
        Group.imported(group_uid=uid(run_id, "train", number, None), task_id="task-0", size=2)
        for run_id, number in addresses
    )
    wrong = replace(make_trajectory(second, 1), member=member)
    others = [make_trajectory(second, 0)] if change in ("no size", "same member") else []
    place = write_dataset(
        tmp_path / "forged",
        to_table([make_trajectory(first, 0), make_trajectory(first, 1)]),
        to_table([*others, wrong]),
        run_id="f" * 32,
        size=2,
    )
    if change == "no size":
        without_size(place)
    before, files = states(layout), sorted(layout.segments.rglob("*.parquet"))
    with pytest.raises(StoreError, match=message):
        import_selection(layout.root, place)
    assert states(layout) == before
    assert sorted(layout.segments.rglob("*.parquet")) == files, "a rebuild would count it"


def test_an_import_ends_with_all_files_of_a_dataset_or_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, into = make_run(tmp_path / "source"), make_run(tmp_path / "into", n_groups=1)
    monkeypatch.setattr("store.exchange.dataset_export.PART_BYTES", 1)
    assert len(export_selection(source.root, tmp_path / "out", where=None, as_of=None).parts) == 3
    before, left = states(into), [2]

    def interrupted(*given: Any, **named: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        insert_trajectories(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.catalog.imported_groups.insert_trajectories", interrupted)
        with pytest.raises(KeyboardInterrupt):
            import_selection(into.root, tmp_path / "out")
    assert (states(into), left) == (before, [0])
    assert import_selection(into.root, tmp_path / "out").n_trajectories == 6
    assert [one[1] for one in states(into)] == ["complete"] * 4
    assert [one for one in check(into, level=CONTENTS) if one.severity == "error"] == []


def test_a_trajectory_in_two_files_of_a_dataset_counts_once(tmp_path: Path) -> None:
    layout = make_run(tmp_path / "run", n_groups=1)
    group = Group.imported(group_uid=uid("f" * 32, "train", 0, None), task_id="t", size=2)
    one, other = make_trajectory(group, 0), make_trajectory(group, 1)
    files = to_table([one]), to_table([one, other])
    place = write_dataset(tmp_path / "twice", *files, run_id="f" * 32, size=2)
    for n_new, n_known in ((2, 0), (0, 2)):
        report = import_selection(layout.root, place)
        assert (report.n_trajectories, report.n_known) == (n_new, n_known)
    assert states(layout)[0][:2] == ("imported", "complete")
    assert check(layout, level=CONTENTS) == []


@pytest.mark.parametrize("path", ["data/part-00000.parquet", "data/./part-00000.parquet"])
def test_a_file_that_dataset_json_names_twice_is_refused(tmp_path: Path, path: str) -> None:
    """The attack: 43 MB of dataset.json named a small file 400,000 times."""
    layout = make_run(tmp_path / "run", n_groups=1)
    forged = forge(layout, tmp_path / "forged", 5, 0, size=2)
    file = forged / "dataset.json"
    content = json.loads(file.read_text())
    content["parts"].append(content["parts"][0] | {"path": path})
    file.write_text(json.dumps(content))
    with pytest.raises(FormatError, match=r"is damaged .*part-00000.parquet is a part that it nam"):
        import_selection(layout.root, forged)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_dataset_never_fills_a_group_that_the_run_opened(tmp_path: Path, is_own: bool) -> None:
    """Refuse a member for an open group, whatever run the dataset names."""
    layout = make_run(tmp_path / "run", n_groups=1, missing=1)
    run_id = layout.info.run_id if is_own else "f" * 32
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v000000", digest="d", learner_step=None)
        )
        catalog.open_round(["task-0"], episodes_per_task=1, version=0)
    before = states(layout)
    forged = forge(layout, tmp_path / "train", 0, 1, run_id=run_id)
    with pytest.raises(StoreError, match="opened in this very run.*none that it lost"):
        import_selection(layout.root, forged)
    heldout = {"address_split": "heldout", "round": 0, "split": "heldout", "size": 1}
    forged = forge(layout, tmp_path / "heldout", 0, 0, run_id=run_id, **heldout)
    with pytest.raises(StoreError, match="opened in this very run.*none that it lost"):
        import_selection(layout.root, forged)
    assert states(layout) == before
    with Catalog.open(layout) as catalog:
        assert catalog.claim(n_groups=1, current_version=0, max_staleness=9) is None
        assert catalog.finished_evaluations() == []
    assert [one for one in check(layout, level=CONTENTS) if one.severity == "error"] == []


@pytest.mark.parametrize("task_id", ["no such task", "task-1"])
def test_an_imported_group_blocks_no_group_that_the_run_opens_later(
    tmp_path: Path, task_id: str
) -> None:
    """Open the next group under another uid, and find it again when the catalog is lost."""
    layout = make_run(tmp_path / "run", n_groups=1)
    size = 1 if task_id == "no such task" else 2
    forged = forge(layout, tmp_path / "forged", 1, 0, size=size, task_id=task_id)
    assert import_selection(layout.root, forged).n_trajectories == 1
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, None)
        assert (group.ordinal, group.split, group.state, group.missing) == (
            *(1, "train", "open"),
            (0, 1),
        )
        assert open_train_group(catalog, 1) == group
        assert catalog.lease_open_group(worker="w0", lease_s=60.0) is not None
        play(layout, catalog, group)
        assert open_train_group(catalog, None).ordinal == 2
        export(catalog, layout)
    whole = states(layout)[:-1]
    layout.catalog.unlink()
    layout.backup.unlink()
    rebuild(layout)
    rebuilt = [state for state in states(layout) if state[1] != "open"]
    assert [(split, n) for split, _, _, n, _ in rebuilt] == [(one[0], one[3]) for one in whole]


def test_rows_that_come_back_have_the_split_of_their_group(tmp_path: Path) -> None:
    """Keep the split that the catalog has, where a dataset of this very run says another."""
    layout = make_run(tmp_path / "run", n_groups=1)
    live_files(layout.root)[0].unlink()
    assert main(["fsck", "--repair", str(layout.root)]) in (0, 1)
    forged = forge(layout, tmp_path / "forged", 0, 0, run_id=layout.info.run_id, split="imported")
    assert import_selection(layout.root, forged).n_trajectories == 1
    assert set(parts(layout.segments)["split"].to_pylist()) == {"train"}


def test_rows_that_are_all_alike_are_written_so_that_every_reader_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: import made a small file of them, which fsck and rebuild took for a bomb.

    A merge had put the run's own rows into it.
    """
    layout = make_run(tmp_path / "run", n_groups=1)
    group = Group.imported(group_uid=b"g" * 16, task_id="t", size=1)
    row = to_table([make_trajectory(group, 0, n_steps=1)])
    many = row.take(pa.array([0] * 40_000))
    monkeypatch.setattr(segment_encoding, "ROW_BYTES", 20)  # of 2; shorter texts take no more
    assert len(many) > most_rows(encode(many, metadata={}).size), "the attack itself works"
    segment = write_rows(layout, many, trajectories=(), worker="import", epoch=1)
    data = layout.storage.read(segment.path)
    assert len(decode(data, path=segment.path)) == len(many)
    assert open_rows(data, path=layout.root / segment.path).table.num_rows == len(many)


def test_no_version_is_imported_that_a_rebuild_refuses() -> None:
    group = Group.imported(group_uid=b"g" * 16, task_id="t", size=1)
    for version, is_taken in ((LARGEST_COUNT - 2, True), (LARGEST_COUNT - 1, False)):
        table = to_table([make_trajectory(group, 0, version=version)])
        with nullcontext() if is_taken else pytest.raises(FormatError, match="version_m"):
            check_importable(table, name="rows")


def test_lists_of_equal_tokens_are_written_so_that_every_reader_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: readers count 24 bytes for a token that has four in memory."""
    monkeypatch.setattr(segment_encoding, "MAX_DECODED_BYTES", 1 << 20)
    monkeypatch.setattr(bounded_parquet, "MAX_DECODED_BYTES", 1 << 20)
    layout = make_run(tmp_path / "run", n_groups=1)
    group = Group.imported(group_uid=b"g" * 16, task_id="t", size=1)
    trajectory = make_trajectory(group, 0, n_steps=1)
    step = replace(trajectory.steps[0], prompt_ids=(7,) * 20_000)
    many = to_table([replace(trajectory, steps=(step,))]).take(pa.array([0] * 9))
    assert many.nbytes < 1 << 20
    with pytest.raises(FormatError, match="stands for more than"):
        decode(encode(many, metadata={}), path="compressed")
    segment = write_rows(layout, many, trajectories=(), worker="import", epoch=1)
    assert len(decode(layout.storage.read(segment.path), path=segment.path)) == len(many)


def test_no_dataset_says_another_size_or_task_of_a_known_group(tmp_path: Path) -> None:
    """The attack: a group of two had four members, and no import took its export."""
    layout = make_run(tmp_path / "run", n_groups=1)
    group = Group.imported(group_uid=uid("s"), task_id="t", size=4)

    def dataset(name: str, *members: int, size: int, **changes: object) -> Path:
        played = [make_trajectory(group, member) for member in members]
        played[-1] = replace(played[-1], **changes)
        return write_dataset(tmp_path / name, to_table(played), run_id="f" * 32, size=size)

    import_selection(layout.root, dataset("two", 0, 1, size=2))
    with pytest.raises(StoreError, match="has 4 members in the dataset, and .* another size, 2"):
        import_selection(layout.root, dataset("four", 2, 3, size=4))
    with pytest.raises(FormatError, match="has more than one task"):
        import_selection(layout.root, dataset("tasks", 0, 1, size=2, task_id="another"))
    assert check(layout, level=CONTENTS) == []


def test_the_members_of_a_group_in_two_files_or_datasets_are_of_one_task(tmp_path: Path) -> None:
    """The attack: each file was looked at by itself, and the group of two tasks was trained on."""
    layout = make_run(tmp_path / "run", n_groups=1)
    group = Group.imported(group_uid=uid("s"), task_id="t", size=2)
    halves = [to_table([make_trajectory(group, 0)])]
    halves.append(to_table([replace(make_trajectory(group, 1), task_id="another")]))
    whole = write_dataset(tmp_path / "whole", *halves, run_id="f" * 32, size=2)
    with pytest.raises(FormatError, match="has more than one task"):
        import_selection(layout.root, whole)
    first, second = (
        write_dataset(tmp_path / name, half, run_id="f" * 32, size=2)
        for name, half in zip(("first", "second"), halves, strict=True)
    )
    import_selection(layout.root, first)
    with pytest.raises(StoreError, match="of task 'another' in the dataset, .* another, 't'"):
        import_selection(layout.root, second)
    assert check(layout, level=CONTENTS) == []


def test_a_part_in_very_many_folders_is_one_line(tmp_path: Path) -> None:
    """The attack: a copy of it was made folder by folder, until Python's recursion ended."""
    layout = make_run(tmp_path / "run", n_groups=1)
    export_selection(layout.root, tmp_path / "out", where=None, as_of=None)
    description = tmp_path / "out" / "dataset.json"
    content = json.loads(description.read_text())
    content["parts"][0]["path"] = "d/" * 1500 + "x.parquet"
    description.chmod(0o644)
    description.write_text(json.dumps(content))
    with pytest.raises(FormatError, match="is a part in more than 100 folders"):
        import_selection(layout.root, tmp_path / "out")


def test_a_trajectory_that_comes_back_is_of_no_version_that_was_never_announced(
    tmp_path: Path,
) -> None:
    """The attack: a rebuild made that version the newest, and the next one refused all after it."""
    layout = make_run(tmp_path / "run", n_groups=1)
    dataset = tmp_path / "dataset"
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=1, path="weights/v000001", digest="d", learner_step=None)
        )
        (segment,) = catalog.live_segments()
        (meta,) = catalog.segment_metas([segment.segment_id])
        rows = read_segments(layout, [meta]).cast(SEGMENT_SCHEMA)
    (layout.root / meta.path).unlink()
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=check(layout, level=CONTENTS))
    version = pa.array([LARGEST_NUMBER] * len(rows), rows["version_max"].type)
    place = rows.schema.get_field_index("version_max")
    write_dataset(
        dataset,
        rows.set_column(place, rows.schema.field(place), version),
        run_id=layout.info.run_id,
        size=2,
    )
    with pytest.raises(StoreError, match="is of a version after its newest, [0-9]+;"):
        import_selection(layout.root, dataset)


def test_rows_beside_one_long_text_are_written_so_that_every_reader_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: with a long text in the dictionary readers count each row as a batch."""
    for module in (segment_encoding, bounded_parquet):
        monkeypatch.setattr(module, "MAX_DECODED_BYTES", 1 << 24)
    monkeypatch.setattr(bounded_parquet, "BATCH_BYTES", 1 << 16)
    layout = make_run(tmp_path / "run", n_groups=1)
    group = Group.imported(group_uid=b"g" * 16, task_id="t", size=1)
    trajectory = make_trajectory(group, 0, n_steps=2)
    long = replace(trajectory.steps[0], obs_text="a" * (1 << 17))
    both = to_table([replace(trajectory, steps=(long, trajectory.steps[1]))])
    many = both.take(pa.array([0] + [1] * 1_500))
    assert 8 * many.nbytes < 1 << 24
    with pytest.raises(FormatError, match="stands for more than"):
        decode(encode(many, metadata={}), path="compressed")
    segment = write_rows(layout, many, trajectories=(), worker="import", epoch=1)
    assert len(decode(layout.storage.read(segment.path), path=segment.path)) == len(many)

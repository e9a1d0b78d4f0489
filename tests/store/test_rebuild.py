"""A catalog that is lost comes back from segments and exports; what cannot come back is said."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from cli.__main__ import main
from store import (
    Catalog,
    FencedError,
    FormatError,
    LockedError,
    RunLayout,
    export,
    write_open_sql,
    write_segment,
)
from store.clock import now_us
from store.exchange.datasets import export_selection, import_selection
from store.exchange.fork import fork
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild
from store.reading.query import connect
from tests.support.store_runs import copy_run, fingerprint, flip, make_run, rewrite
from tests.support.store_samples import make_trajectory, open_train_group, play

# Everything that is exported, or said by the files themselves. An lsn of the catalog alone is not,
# nor is a batch's epoch.
RECOVERED = (
    """SELECT group_uid, split, ordinal, task_id, size, purpose_version, state, reason, n_members, n_steps, n_won, return_sum,
              version_min, version_max, opened_us, opened_lsn, completed_us, completed_lsn, changed_lsn FROM grp""",
    """SELECT traj_uid, group_uid, member, segment_id, n_steps, episode_return, won, task_score, invalid_steps, version_min,
              version_max FROM trajectory""",
    "SELECT segment_id, path, digest, n_steps, n_bytes, worker, epoch, retired_lsn IS NULL, "
    "retired_why, level FROM segment",
    "SELECT * FROM duplicate",
    "SELECT group_uid, state, reason, lsn, at_us FROM group_state ORDER BY seq",
    """SELECT batch_id, state, claimed_version, version_in, learner_step, claimed_us, trained_us, claimed_lsn, trained_lsn,
              rolled_back_lsn FROM batch""",
    "SELECT * FROM batch_group",
    "SELECT version, path, digest, learner_step, epoch, published_us FROM version",
    "SELECT learner_step, path, version, live, saved_us FROM checkpoint ORDER BY lsn",
    "SELECT learner_step, policy_version, name, value, live, lsn, changed_lsn FROM metric",
    "SELECT at_us, component, what, detail, lsn FROM event WHERE component <> 'rebuild' ORDER BY "
    "event_id",
)
VIEWS = (
    "steps",
    "trajectories",
    "groups",
    "anchor_groups",
    "lineage",
    "versions",
    "checkpoints",
    "metrics",
    "ledger",
    "unfinished",
)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return make_run(tmp_path_factory.mktemp("intact") / "run")


@pytest.fixture
def layout(intact: RunLayout, tmp_path: Path) -> RunLayout:
    return copy_run(intact, tmp_path / "run")


def ask(layout: RunLayout, query: str) -> list[tuple]:
    with closing(sqlite3.connect(layout.catalog)) as connection:
        return connection.execute(query).fetchall()


def shown(layout: RunLayout) -> dict[str, list]:
    with closing(connect(layout)) as views:
        return {name: sorted(views.sql(f"FROM {name}").fetchall(), key=repr) for name in VIEWS}


def states(layout: RunLayout) -> dict[int, str]:
    return dict(
        ask(layout, "SELECT ordinal, state FROM grp WHERE split = 'train' ORDER BY ordinal")
    )


def test_all_that_was_exported_comes_back_as_it_was(layout: RunLayout, intact: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        lease = catalog.lease_open_group(worker="w5", lease_s=60.0)
        assert lease is not None
    before, files = shown(layout), fingerprint(layout.segments)
    layout.catalog.unlink()
    report = rebuild(layout)
    assert [line for line in report.lost if "after the last export" not in line] == []
    for query in RECOVERED:
        assert ask(layout, query) == ask(intact, query), query
    assert shown(layout) == before
    assert fingerprint(layout.segments) == files
    assert check(layout, level=CONTENTS) == []
    segment = write_segment(
        layout, [make_trajectory(lease, lease.missing[0])], worker="w5", epoch=lease.epoch
    )
    with Catalog.open(layout) as catalog:
        with pytest.raises(FencedError):
            catalog.commit(segment, epoch=lease.epoch)
        play(layout, catalog, catalog.lease_open_group(worker="w5", lease_s=60.0), version=1)
        batch = catalog.claim(n_groups=4, current_version=2, max_staleness=1)
        assert batch is not None and batch.batch_id > max(
            row[0] for row in ask(intact, "SELECT batch_id FROM batch")
        )
        catalog.settle(batch.batch_id, learner_step=2, no_signal={}, version_in=2)
        latest = next(reversed(catalog.live_checkpoints()), None)
        assert latest is not None and latest.learner_step == 1
        catalog.record_version(version=4, path="weights/v1", digest="d", learner_step=2)
        export(catalog, layout)
    assert check(layout, level=CONTENTS) == []


def test_what_was_committed_after_the_last_export_is_found_in_the_files(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        epoch = catalog.epoch
        # the member that was missing
        play(layout, catalog, open_train_group(catalog, 6, size=3), version=1)
        # 7 and 8 were dispatched, and nothing else
        play(layout, catalog, open_train_group(catalog, 9), version=1)
        play(
            layout,
            catalog,
            catalog.open_group(ordinal=3, task_id="h3", split="heldout", size=1, purpose_version=4),
        )
        assert catalog.claim(n_groups=1, current_version=2, max_staleness=2) is not None
        trajectories = ask(layout, "SELECT traj_uid, segment_id FROM trajectory ORDER BY traj_uid")
    (layout.weights / "v000007").mkdir()
    layout.catalog.unlink()
    report = rebuild(layout)
    assert (
        ask(layout, "SELECT traj_uid, segment_id FROM trajectory ORDER BY traj_uid") == trajectories
    )
    assert states(layout) == {
        **{
            0: "trained",
            1: "no_signal",
            2: "complete",
            3: "complete",
            4: "stale",
            5: "complete",
            6: "complete",
            9: "complete",
        }
    }
    heldout = "SELECT ordinal, purpose_version, task_id, state FROM grp WHERE split = 'heldout' ORDER BY purpose_version"
    assert ask(layout, heldout) == [(0, 2, "h", "complete"), (3, 4, "h3", "complete")]
    assert any("2 of them not exported yet" in line for line in report.recovered)
    assert any("version 7" in line for line in report.lost)
    assert check(layout, level=CONTENTS) == []
    with Catalog.open(layout) as catalog:
        assert catalog.epoch > epoch
        version = catalog.latest_version()
        assert version is not None and version.version == 7  # the next one is 8
        assert catalog.next_ordinal("train") == 10


def test_a_claimed_batch_is_rolled_back(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        assert catalog.claim(n_groups=2, current_version=2, max_staleness=1) is not None
        export(catalog, layout)
    layout.catalog.write_bytes(b"not a database, but somebody may want to look at it")
    report = rebuild(layout)
    assert any("were claimed and are rolled back" in line for line in report.recovered)
    assert [states(layout)[ordinal] for ordinal in (2, 3)] == ["complete", "complete"]
    assert ask(layout, "SELECT count(*) FROM batch WHERE state = 'claimed'") == [(0,)]
    assert (layout.quarantine / "catalog.sqlite").read_bytes().startswith(b"not a database")
    assert check(layout, level=CONTENTS) == []


def test_without_exports_the_files_alone_give_groups_and_trajectories(
    layout: RunLayout, intact: RunLayout
) -> None:
    layout.catalog.unlink()
    layout.manifest.unlink()
    shutil.rmtree(layout.exports)
    layout.exports.mkdir()
    rebuild(layout)
    query = "SELECT group_uid, split, ordinal, task_id, purpose_version, n_members, n_steps, return_sum FROM grp"
    assert ask(layout, query) == ask(intact, query)
    assert {
        ordinal: state for ordinal, state in states(layout).items() if ordinal < 6
    } == dict.fromkeys(range(6), "complete")
    rows = "SELECT traj_uid, group_uid, n_steps, episode_return FROM trajectory"
    assert ask(layout, rows) == ask(intact, rows)
    assert check(layout, level=CONTENTS) == []


def test_without_a_manifest_the_parts_that_are_there_are_read(
    layout: RunLayout, intact: RunLayout
) -> None:
    layout.catalog.unlink()
    layout.manifest.write_text("{")
    report = rebuild(layout)
    assert any("manifest.json is damaged" in line for line in report.lost)
    for query in RECOVERED:
        assert ask(layout, query) == ask(intact, query), query
    assert check(layout, level=CONTENTS) == []


def test_files_that_cannot_be_used_are_set_aside_and_said(
    layout: RunLayout, tmp_path: Path
) -> None:
    query = """SELECT path FROM segment JOIN trajectory USING (segment_id) JOIN grp USING (group_uid)
               WHERE ordinal = 5 AND split = 'train' AND member = 0"""
    ((path,),) = ask(layout, query)
    flip(layout.root / path, 4321)
    other = make_run(tmp_path / "other")
    foreign = ask(other, "SELECT path FROM segment WHERE worker = 'w2'")[0][0]
    shutil.copy(other.root / foreign, layout.root / foreign)
    layout.catalog.unlink()
    report = rebuild(layout)
    assert {Path(path).name, Path(foreign).name} <= {
        file.name for file in layout.quarantine.iterdir()
    }
    said = "\n".join(report.lost)
    assert (
        "name is that of another content" in said
        and other.info.run_id in said
        and "1 groups lack trajectories" in said
    )
    assert states(layout)[5] == "open"
    assert check(layout, level=CONTENTS) == []


def test_what_retention_removed_stays_in_the_figures_of_its_groups(layout: RunLayout) -> None:
    figures = "SELECT ordinal, state, n_members, n_steps, return_sum FROM grp WHERE split = 'train' ORDER BY ordinal"
    with Catalog.open(layout) as catalog:
        (merged,) = [segment for segment in catalog.live_segments() if segment.level]
        catalog.expire([merged.segment_id])
        export(catalog, layout)
        for path in catalog.removable(retired_before_us=2**62, pinned_lsn=None).values():
            (layout.root / path).unlink()
    before = ask(layout, figures)
    layout.catalog.unlink()
    report = rebuild(layout)
    assert ask(layout, figures) == before
    assert any("4 trajectories of consumed groups are in no file" in line for line in report.lost)
    assert check(layout, level=CONTENTS) == []


def test_a_rebuild_that_was_interrupted_is_begun_again(
    layout: RunLayout, intact: RunLayout
) -> None:
    layout.catalog.rename(layout.root / ".catalog.sqlite.tmp")  # killed before the last rename
    rebuild(layout)
    assert ask(layout, RECOVERED[0]) == ask(intact, RECOVERED[0])
    rebuild(layout)  # of a catalog that nobody lost
    assert ask(layout, RECOVERED[0]) == ask(intact, RECOVERED[0])
    with Catalog.open(layout), pytest.raises(LockedError, match="owns"):
        rebuild(layout)
    assert json.loads(layout.manifest.read_text())["lsn"] > 0
    assert check(layout, level=CONTENTS) == []


def test_an_older_copy_of_the_catalog_is_refused_and_nothing_committed_since_is_lost(
    layout: RunLayout,
) -> None:
    backup = layout.catalog.read_bytes()
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 9), version=1)
        export(catalog, layout)
        trajectories = ask(layout, "SELECT traj_uid FROM trajectory ORDER BY traj_uid")
    layout.catalog.write_bytes(backup)
    with pytest.raises(FormatError, match=r"older copy.*rebuild --force"):
        Catalog.open(layout)
    assert "manifest_ahead" in {finding.what for finding in check(layout, level=CONTENTS)}
    rebuild(layout)
    assert ask(layout, "SELECT traj_uid FROM trajectory ORDER BY traj_uid") == trajectories
    with Catalog.open(layout) as catalog:
        assert catalog.counts().complete > 0


@pytest.mark.parametrize("missing", [True, False])
def test_groups_whose_exported_part_is_gone_are_put_together_again(
    layout: RunLayout, intact: RunLayout, missing: bool
) -> None:
    layout.catalog.unlink()
    for part in layout.exports.glob("groups-*.parquet"):
        part.unlink() if missing else rewrite(part, b"garbage")
    report = rebuild(layout)
    assert any("groups are in no readable export" in line for line in report.lost)
    same = "SELECT group_uid, split, ordinal, task_id, state, n_members, n_steps, n_won, return_sum FROM grp WHERE ordinal < 6"
    assert ask(layout, same) == ask(intact, same)
    assert ask(layout, "SELECT * FROM batch_group") == ask(intact, "SELECT * FROM batch_group")
    assert check(layout, level=CONTENTS) == []


def test_a_group_that_only_the_ledger_names_is_left_out_and_said(layout: RunLayout) -> None:
    layout.catalog.unlink()
    for part in layout.exports.glob("groups-*.parquet"):
        part.unlink()
    shutil.rmtree(layout.segments)
    layout.segments.mkdir()
    assert any("their ledger and lineage are left out" in line for line in rebuild(layout).lost)
    assert check(layout, level=CONTENTS) == []


def test_versions_of_imported_groups_are_none_of_this_run(
    layout: RunLayout, tmp_path: Path
) -> None:
    other = RunLayout.create(tmp_path / "other", config_yaml="a: 1\n")
    with Catalog.open(other) as catalog:
        write_open_sql(other, macros=(), max_staleness=4)
        play(other, catalog, open_train_group(catalog, 0), version=70)
        export(catalog, other)
    export_selection(other.root, tmp_path / "dataset", where=None, as_of=None)
    for exported in (False, True):
        import_selection(layout.root, tmp_path / "dataset")
        if exported:
            with Catalog.open(layout) as catalog:
                export(catalog, layout)
        layout.catalog.unlink()
        rebuild(layout)
        assert max(ask(layout, "SELECT version FROM version")) == (3,)


def lines_of(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.out + said.err


DEEP = '{"a":' * 100_000
BAD_RUN_JSON = {
    "missing": None,
    "empty": "",
    "deep": DEEP,
    "a list": "[]",
    "no text": {"config_yaml": 3},
    "no number": {"format_version": "4"},
    "below zero": {"format_version": -1},
    "beyond int64": {"created_us": 10**30},
    "no run id": {"run_id": "../../etc"},
    "no list": {"ancestors": {"a": 1}},
    "another run's": {"run_id": "0" * 32},
}


@pytest.mark.parametrize("what", BAD_RUN_JSON)
def test_a_lost_run_json_is_rebuilt(
    layout: RunLayout, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = BAD_RUN_JSON[what]
    (layout.root / "config.yaml").write_text("a: 2\n")
    before = fingerprint(layout.segments)
    layout.run_json.chmod(0o644)
    if content is None:
        layout.run_json.unlink()
    else:
        known = json.loads(layout.run_json.read_text())
        layout.run_json.write_text(
            content if isinstance(content, str) else json.dumps({**known, **content})
        )
    with warnings.catch_warnings():
        status = main(["fsck", str(layout.root)])
    said = lines_of(capsys)
    assert status and "gigpo rebuild" in said
    assert main(["rebuild", str(layout.root)]) == 0
    assert "run.json: the run id" in lines_of(capsys)
    again = RunLayout.open(layout.root)
    assert again.info == dataclasses.replace(
        layout.info, config_yaml="a: 2\n", created_us=again.info.created_us
    )
    assert again.info.created_us <= now_us()
    assert check(again, level=CONTENTS) == []
    assert fingerprint(layout.segments) == before
    assert len(list(layout.root.glob("quarantine/run*.json"))) == (content is not None)


def test_the_name_of_a_run_does_not_decide_whether_it_is_damaged(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    root = layout.root.rename(layout.root.with_name("update the code"))
    (root / "run.json").unlink()
    (root / "run.json").write_text("{")
    assert main(["rebuild", str(root)]) == 0, capsys.readouterr().err
    (root / "run.json").unlink()
    (root / "run.json").write_text('{"format_version": 1000}')
    assert main(["rebuild", str(root)]) != 0
    assert "has format version 1000, this code reads up to" in capsys.readouterr().err


@pytest.mark.parametrize(
    "store",
    [
        "{uri: s3://bucket/run}",
        "{uri: '/mnt/shared/run'}",
        "\n  uri: shared/run",
        '{"uri": "file:///mnt/run"}',
        "{<<: {uri: /x}}",
    ],
)
def test_a_run_with_its_files_elsewhere_is_not_cut_off_from_them(
    layout: RunLayout, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout.run_json.unlink()
    (layout.root / "config.yaml").write_text(f"run_dir: x\nstore: {store}\n")
    assert main(["rebuild", str(layout.root)]) != 0
    captured = capsys.readouterr()
    assert "copy run.json from there" in captured.err or "mend it, or move it away" in captured.err
    assert captured.err.count("\n") == 1 and not layout.run_json.exists()


@pytest.mark.parametrize(
    "text",
    [
        "env: {options: {uri: 'http://127.0.0.1:8000'}}\nstore: {uri: ''}\n",
        "env:\n  options:\n    uri: http://x\n",
        "",
    ],
)
def test_an_environment_may_have_a_uri(layout: RunLayout, text: str) -> None:
    layout.run_json.unlink()
    (layout.root / "config.yaml").write_text(text)
    assert main(["rebuild", str(layout.root)]) == 0
    assert RunLayout.open(layout.root).info.config_yaml == text


def test_a_lost_run_json_and_a_lost_catalog_are_rebuilt(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (layout.run_json, layout.catalog, layout.manifest):
        path.unlink()
    assert main(["rebuild", str(layout.root)]) == 0
    assert f"the run id {layout.info.run_id} is that of its segments" in lines_of(capsys)
    assert check(RunLayout.open(layout.root), level=CONTENTS) == []


def test_a_lost_run_json_is_not_guessed(
    layout: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_run(tmp_path / "other")
    shutil.copy(other.manifest, layout.manifest)
    layout.run_json.unlink()
    assert main(["rebuild", str(layout.root)]) == 2
    assert "has files of several runs" in lines_of(capsys)
    assert main(["rebuild", str(tmp_path)]) == 2
    assert "is not a run directory" in lines_of(capsys)


def test_a_fork_whose_run_json_is_lost_keeps_its_ancestors(
    layout: RunLayout, tmp_path: Path
) -> None:
    for name in ("child", "grandchild"):
        (layout.root / "checkpoints/step000001").mkdir(parents=True, exist_ok=True)
        layout = fork(layout, tmp_path / name, learner_step=1, config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=4)
    with Catalog.open(layout) as catalog:
        export(catalog, layout)
    assert len(layout.info.ancestors) == 2
    for without_catalog in (False, True):
        layout.run_json.unlink()
        if without_catalog:
            layout.catalog.unlink()
        assert main(["rebuild", str(layout.root)]) == 0
        again = RunLayout.open(layout.root)
        assert (again.info.ancestors, again.info.forked_from) == (
            layout.info.ancestors,
            layout.info.forked_from,
        )

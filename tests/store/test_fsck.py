"""fsck finds each kind of damage and nothing else; repair and rebuild bring back all that is
left.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from cli.__main__ import main
from store import (
    Catalog,
    CheckpointRecord,
    DigestError,
    RunLayout,
    StoreError,
    export,
    read_segment,
    to_table,
    write_open_sql,
    write_segment,
)
from store.maintenance.backup import read_backup
from store.maintenance.fsck import CATALOG, CONTENTS, NAMES, check
from store.maintenance.repair import repair
from store.maintenance.segment_rows import malformed
from store.maintenance.sweep import sweep_orphans, sweep_retired
from tests.support.run_views import connect
from tests.support.sizes import examples
from tests.support.store_damage import DAMAGE, FOR_REBUILD, ONLY_IN_CONTENTS, WARNINGS, ask
from tests.support.store_runs import MERGE_TWO, compact_once, copy_run, fingerprint, flip, rewrite
from tests.support.store_samples import make_trajectory, open_train_group, play


def test_a_whole_run_has_no_findings(layout: RunLayout) -> None:
    before = fingerprint(layout.root)
    for level in (CATALOG, NAMES, CONTENTS):
        assert check(layout, level=level) == []
    assert fingerprint(layout.root) == before


@pytest.mark.parametrize("what", DAMAGE)
def test_each_damage_is_found_and_only_that(layout: RunLayout, what: str) -> None:
    DAMAGE[what](layout)
    before = fingerprint(layout.root)
    found = check(layout, level=CONTENTS)
    assert {finding.what for finding in found} == {what}
    assert {finding.severity for finding in found} == {"warning" if what in WARNINGS else "error"}
    assert all(finding.subject and finding.detail and finding.remedy for finding in found)
    assert {finding.what for finding in check(layout, level=NAMES)} == (
        set() if what in ONLY_IN_CONTENTS else {what}
    )
    assert fingerprint(layout.root) == before


@pytest.mark.parametrize(
    "what", sorted(DAMAGE.keys() - FOR_REBUILD - {"orphan", "unfinished", "unknown_file"})
)
def test_each_damage_is_repaired_and_nothing_is_deleted(layout: RunLayout, what: str) -> None:
    DAMAGE[what](layout)
    contents = set(fingerprint(layout.segments).values())
    with Catalog.open(layout) as catalog:
        done = repair(catalog, layout, findings=check(layout, level=CONTENTS))
    assert done
    assert check(layout, level=CONTENTS) == []
    assert contents <= set(fingerprint(layout.root).values())  # every file is still somewhere
    with closing(connect(layout)) as views:
        assert views.sql("SELECT count(*) FROM steps").fetchall()
        lines = views.sql("SELECT count(*) FROM events WHERE component = 'fsck'").fetchall()[0][0]
    assert lines or what in ("manifest_missing", "export_missing")  # nothing was moved or changed


def test_what_can_be_damaged_but_not_repaired_is_left_alone(layout: RunLayout) -> None:
    DAMAGE["ledger"](layout)
    with Catalog.open(layout) as catalog:
        before = fingerprint(layout.root)
        assert repair(catalog, layout, findings=check(layout, level=CONTENTS)) == []
        assert fingerprint(layout.root) == before
    assert [finding.what for finding in check(layout, level=CATALOG)] == ["ledger"]


@pytest.mark.shortened
def test_every_flipped_bit_is_caught_by_the_read_and_by_fsck(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=0)
    with Catalog.open(layout) as catalog:
        for ordinal in range(3):  # each file is read as often
            play(layout, catalog, open_train_group(catalog, ordinal))
        metas = catalog.segment_metas([segment.segment_id for segment in catalog.live_segments()])
    pick = random.Random(7)
    for _ in range(examples(50, full=200)):
        meta = pick.choices(metas, weights=[meta.n_bytes for meta in metas])[0]
        path, bit = layout.root / meta.path, pick.randrange(8 * meta.n_bytes)
        whole = path.read_bytes()
        flip(path, bit)
        with pytest.raises(DigestError, match=path.name):
            read_segment(layout, meta)
        assert [(finding.what, finding.subject) for finding in check(layout, level=CONTENTS)] == [
            ("segment_damaged", meta.path)
        ]
        rewrite(path, whole)
    assert check(layout, level=CONTENTS) == []


def of_another_run(backup: Path) -> None:
    backup.chmod(0o644)
    with closing(sqlite3.connect(backup)) as database:
        database.execute(f"UPDATE meta SET run_id = '{'0' * 32}'")
        database.commit()


PAGE_BYTES = 4096  # of an SQLite file
BAD_BACKUPS = {
    "is empty": lambda backup: rewrite(backup, b""),
    "file is not a database": lambda backup: rewrite(backup, b"\0" * backup.stat().st_size),
    "malformed": lambda backup: rewrite(backup, backup.read_bytes()[: backup.stat().st_size // 2]),
    "cannot be read as a catalog": lambda backup: flip(
        backup, 8 * 4 * PAGE_BYTES
    ),  # the kind of a page
    "catalog_foreign": of_another_run,
}


@pytest.mark.parametrize("why", BAD_BACKUPS)
def test_a_backup_that_no_rebuild_can_begin_with_is_found_and_made_anew(
    layout: RunLayout, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    BAD_BACKUPS[why](layout.backup)
    damaged = layout.backup.read_bytes()
    assert main(["fsck", "--quick", str(layout.root)]) == 0  # it looks into no file
    (finding,) = check(layout, level=CONTENTS)
    assert (finding.what, finding.subject) == ("backup_damaged", "backup/catalog.sqlite")
    assert why in finding.detail
    assert f"the next checkpoint makes another, or gigpo fsck --repair {layout.root}" == (
        finding.remedy
    )
    assert layout.backup.read_bytes() == damaged
    capsys.readouterr()
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    assert "moved to quarantine/catalog.sqlite; another is made" in capsys.readouterr().out
    assert (layout.quarantine / "catalog.sqlite").read_bytes() == damaged
    read_backup(layout).close()
    assert check(layout, level=CONTENTS) == []


def test_each_changed_open_sql_is_kept_in_quarantine(layout: RunLayout) -> None:
    for text in ("-- first\n", "-- second\n"):
        layout.open_sql.chmod(0o644)
        layout.open_sql.write_text(text)
        assert main(["fsck", "--repair", str(layout.root)]) == 0
    kept = {path.read_text() for path in layout.quarantine.glob("open*.sql")}
    assert kept == {"-- first\n", "-- second\n"}


def test_a_bound_in_open_sql_that_no_run_has_is_not_taken_over(layout: RunLayout) -> None:
    """Python refuses to convert so many digits, with an error of several lines."""
    layout.open_sql.chmod(0o644)
    layout.open_sql.write_text(f"SET VARIABLE max_staleness = {'9' * 5000};\n")
    assert main(["fsck", "--repair", str(layout.root)]) == 0
    assert "9" * 20 not in layout.open_sql.read_text()
    assert check(layout, level=CONTENTS) == []


def test_a_checkpoint_replaces_a_damaged_backup(layout: RunLayout) -> None:
    flip(layout.backup, 8 * 4 * PAGE_BYTES)
    with Catalog.open(layout) as catalog:
        catalog.record_checkpoint(
            CheckpointRecord(learner_step=1, path="checkpoints/step000001", version=2)
        )
        assert check(layout, level=CONTENTS) == []


def test_a_run_without_a_backup_is_whole(layout: RunLayout) -> None:
    layout.backup.unlink()
    assert check(layout, level=CONTENTS) == []


def state_of(layout: RunLayout) -> dict[int, str]:
    return dict(ask(layout, "SELECT ordinal, state FROM grp WHERE split = 'train'"))


def rows_of(layout: RunLayout) -> dict[str, list]:
    """Every row that readers see, by trajectory."""
    with closing(connect(layout)) as views:
        found: dict[str, list] = {}
        for row in views.sql("SELECT * FROM steps ORDER BY traj_uid, step_index").fetchall():
            found.setdefault(str(row[0]), []).append(row)
        return found


def play_what_is_open(layout: RunLayout, catalog: Catalog) -> None:
    while (group := catalog.lease_open_group(worker="w9", lease_s=60.0)) is not None:
        play(layout, catalog, group, version=2, worker="w9")
    export(catalog, layout)


def test_after_repair_and_a_retry_only_consumed_rows_are_gone(
    intact: RunLayout, tmp_path: Path
) -> None:
    before, states = rows_of(intact), state_of(intact)
    live = [
        path
        for (path,) in ask(
            intact, "SELECT path FROM segment WHERE retired_lsn IS NULL ORDER BY lsn"
        )
    ]
    assert len(live) == 8
    for number, path in enumerate(live):
        layout = copy_run(intact, tmp_path / str(number))
        query = "SELECT traj_uid FROM trajectory JOIN segment USING (segment_id) WHERE path = ?"
        held = {uid for (uid,) in ask(layout, query, path)}
        flip(layout.root / path, 4321)
        with Catalog.open(layout) as catalog:
            (line,) = repair(catalog, layout, findings=check(layout, level=CONTENTS))
            note = json.loads(
                (layout.quarantine / Path(path).name).with_suffix(".json").read_text()
            )
            assert (
                note["was"] == path
                and len(note["held"]) == len(held)
                and (layout.quarantine / Path(path).name).is_file()
            )
            lost = {uid for (uid,) in ask(layout, "SELECT traj_uid FROM lost_trajectory")}
            # the merged file's rows are still in the files before it
            assert (lost == held) != ("compact" in path), line
            play_what_is_open(layout, catalog)
        assert check(layout, level=CONTENTS) == []
        after = rows_of(layout)
        consumed = ask(
            layout,
            "SELECT 1 FROM lost_trajectory WHERE traj_uid NOT IN (SELECT traj_uid FROM trajectory)",
        )
        for uid, rows in before.items():
            if bytes.fromhex(uid.replace("-", "")) not in lost:
                assert after[uid] == rows
        # group 6 lacked one from the beginning
        assert len(after) == len(before) - len(consumed) + 1
        changed = {
            ordinal for ordinal, state in state_of(layout).items() if state != states[ordinal]
        }
        assert changed <= {6}  # it was open and is complete; what was complete is complete again


def test_a_claimed_batch_with_a_lost_group_is_rolled_back(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        batch = catalog.claim(n_groups=3, current_version=3, max_staleness=2)
        assert batch is not None
        (layout.root / batch.segments[0].path).unlink()
        (line,) = repair(catalog, layout, findings=check(layout, level=CONTENTS))
        assert f"batch {batch.batch_id} was rolled back" in line
        with pytest.raises(StoreError, match="is rolled_back"):
            catalog.settle(batch.batch_id, learner_step=2, filtered={}, version_in=3)
        assert (catalog.counts().open, catalog.counts().complete) == (2, 2)
        play_what_is_open(layout, catalog)
        again = catalog.claim(n_groups=3, current_version=3, max_staleness=2)
        assert again is not None and all(
            read_segment(layout, meta).num_rows for meta in again.segments
        )
    assert check(layout, level=CONTENTS) == []


def test_a_rolled_back_group_that_lost_rows_is_played_before_it_is_trained_on_again(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:
        for segment in catalog.live_segments():
            if segment.level:
                path = catalog.segment_metas([segment.segment_id])[0].path
        for retired in ask(layout, "SELECT path FROM segment WHERE retired_lsn IS NOT NULL"):
            (layout.root / retired[0]).unlink()
        (layout.root / path).unlink()
        repair(catalog, layout, findings=check(layout, level=CONTENTS))
        assert state_of(layout)[0] == "trained"  # what was trained on, was
        catalog.roll_back(0)
        assert (state_of(layout)[0], state_of(layout)[1]) == ("open", "open")
        play_what_is_open(layout, catalog)
    assert check(layout, level=CONTENTS) == []


def test_fsck_beside_a_busy_owner_reports_nothing(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    with Catalog.open(layout):
        write_open_sql(layout, macros=(), max_staleness=0)
    stop = threading.Event()
    removed = []

    def work() -> None:
        with Catalog.open(layout) as catalog:
            while not stop.is_set():
                play(layout, catalog, open_train_group(catalog, None))
                batch = catalog.claim(n_groups=1, current_version=0, max_staleness=0)
                assert batch is not None
                catalog.settle(
                    batch.batch_id, learner_step=batch.batch_id, filtered={}, version_in=0
                )
                compact_once(catalog, layout, policy=MERGE_TWO, skip=())
                export(catalog, layout)
                removed.extend(sweep_retired(catalog, layout, window_s=0.0))

    owner = threading.Thread(target=work)
    owner.start()
    try:
        while not layout.catalog.exists() or not layout.manifest.exists():
            assert owner.is_alive()
        while len(removed) < 12:
            assert owner.is_alive()
            assert check(layout, level=CONTENTS) == []
    finally:
        stop.set()
        owner.join()


def test_the_command_says_what_it_found_and_did(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(layout.root)
    assert main(["fsck", run]) == 0
    assert "whole" in capsys.readouterr().out
    DAMAGE["segment_damaged"](layout)
    assert main(["fsck", run, "--quick"]) == 0
    assert main(["fsck", run, "--format", "json"]) == 1
    assert '"what": "segment_damaged"' in capsys.readouterr().out
    with Catalog.open(layout):
        assert main(["fsck", run, "--repair"]) == 2
        assert "owns" in capsys.readouterr().err
    assert main(["fsck", run, "--repair"]) == 0
    assert "quarantine/" in capsys.readouterr().out
    assert main(["rebuild", run]) == 2
    assert "can be read" in capsys.readouterr().err
    layout.catalog.unlink()
    assert main(["fsck", run, "--repair"]) == 1
    assert main(["rebuild", run]) == 0
    assert "recovered" in capsys.readouterr().out
    assert main(["fsck", run]) == 0
    assert main(["fsck", str(layout.root / "segments")]) == 2


def test_a_segment_that_was_never_committed_tells_what_it_holds(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 6, size=3)
        segment = write_segment(
            layout, [make_trajectory(group, 2)], worker="w3", epoch=catalog.epoch
        )
    assert check(layout, level=CONTENTS) == []  # it may be about to be committed
    os.utime(layout.root / segment.path, (0, 0))
    (finding,) = check(layout, level=CONTENTS)
    assert (finding.what, finding.subject) == ("orphan", segment.path)
    assert "1 of its 1 trajectories are missing" in finding.detail and "rebuild" in finding.remedy


def test_a_file_that_is_put_back_is_kept_and_its_trajectories_count_again(
    intact: RunLayout, tmp_path: Path
) -> None:
    before, states = rows_of(intact), state_of(intact)
    for path, why in ask(intact, "SELECT path, retired_why FROM segment ORDER BY lsn"):
        if why is not None:  # only history: the merged file has its rows
            continue
        layout = copy_run(intact, tmp_path / Path(path).stem)
        for (old,) in ask(layout, "SELECT path FROM segment WHERE retired_lsn IS NOT NULL"):
            (layout.root / old).unlink()  # nothing is rescued
        kept = (layout.root / path).read_bytes()
        (layout.root / path).unlink()
        with Catalog.open(layout) as catalog:
            repair(catalog, layout, findings=check(layout, level=CONTENTS))
            rewrite_anew(layout.root / path, kept)
            sweep_orphans(catalog, layout, opened_us=2**62, before=None)
            (finding,) = check(layout, level=CONTENTS)
            assert (finding.what, finding.subject) == ("segment_returned", path)
            repair(catalog, layout, findings=[finding])
        assert check(layout, level=CONTENTS) == []
        assert (rows_of(layout), state_of(layout)) == (before, states)


def test_a_file_that_is_put_back_late_or_damaged_does_not_count(layout: RunLayout) -> None:
    (path,) = [
        path
        for (path,) in ask(
            layout, "SELECT path FROM segment WHERE retired_lsn IS NULL AND worker = 'w2'"
        )
    ]
    kept = (layout.root / path).read_bytes()
    (layout.root / path).unlink()
    with Catalog.open(layout) as catalog:
        repair(catalog, layout, findings=check(layout, level=CONTENTS))
        rewrite_anew(layout.root / path, kept[:-9])
        (line,) = repair(catalog, layout, findings=check(layout, level=CONTENTS))
        assert "not what was committed" in line and not (layout.root / path).exists()
        play_what_is_open(layout, catalog)
        before = rows_of(layout)
        rewrite_anew(layout.root / path, kept)
        assert (
            "0 trajectories" in repair(catalog, layout, findings=check(layout, level=CONTENTS))[0]
        )
        assert check(layout, level=CONTENTS) == []
        assert rows_of(layout) == before
        assert path in sweep_retired(catalog, layout, window_s=0.0)


def rewrite_anew(path: Path, data: bytes) -> None:
    """Write the file with its old time, as a restore from a backup does."""
    path.write_bytes(data)
    os.utime(path, (0, 0))


def test_the_hash_of_a_final_observation_is_checked(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        table = to_table([make_trajectory(open_train_group(catalog, None), 0)])
    assert malformed(table) == []
    texts = table["final_anchor_text"].to_pylist()
    number = table.column_names.index("final_anchor_text")
    changed = table.set_column(number, "final_anchor_text", [[*texts[:-1], "a light room"]])
    ((code, detail),) = malformed(changed)
    assert code == "state_hash" and detail.startswith("the final_state_hash of 'a light room' is")

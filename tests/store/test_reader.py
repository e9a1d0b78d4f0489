"""Outside readers: a bare DuckDB, the Python reader and the command line, also while a writer runs
or is killed.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import duckdb
import pyarrow.parquet as pq
import pytest

from cli.__main__ import main
from store import (
    Catalog,
    FormatError,
    LockedError,
    RunLayout,
    StoreError,
    VersionRecord,
    check_unowned,
    export,
    write_open_sql,
    write_segment,
)
from store.reading.open_sql import RUN_LINE, fixed, move, sql_literal
from store.reading.open_sql import VIEWS as VIEWS_SQL
from store.reading.reader import open_run
from tests.support.program import gigpo
from tests.support.run_views import connect
from tests.support.store_samples import make_trajectory, open_train_group, play

REPOSITORY = Path(__file__).resolve().parents[2]
VIEWS = [
    "stored_steps",
    "steps",
    "trajectories",
    "groups",
    "newest_round",
    "newest_results",
    "tasks",
    "anchor_groups",
    "lineage",
    "critic_values",
    "valued_steps",
    "replays",
    "versions",
    "metrics",
    "checkpoints",
    "unfinished",
    "components",
    "events",
    "weight_loads",
    "bad_rows",
    "staleness_violations",
    "task_overlap",
    "generation_overlap",
]


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout.create(tmp_path / "a 'quoted' run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=["CREATE MACRO twice(x) AS 2 * x;"], max_staleness=1)
    return layout


@pytest.fixture
def full(layout: RunLayout) -> RunLayout:
    """Two groups of two three-step trajectories: one trained at staleness 2 (one too many), one
    complete.
    """
    with Catalog.open(layout) as catalog:
        catalog.record_version(
            VersionRecord(version=0, path="weights/v000000", digest="d0", learner_step=None)
        )
        for ordinal in range(2):
            play(layout, catalog, open_train_group(catalog, ordinal), version=ordinal)
        batch = catalog.claim(n_groups=1, current_version=2, max_staleness=2)
        assert batch is not None
        catalog.settle(batch.batch_id, learner_step=1, filtered={}, version_in=2)
        catalog.record_metrics(learner_step=1, policy_version=2, values={"train/success": 0.5})
        catalog.record_metrics(learner_step=1, policy_version=2, values={"train/success": 0.75})
        export(catalog, layout)
    return layout


def query(layout: RunLayout, sql: str) -> list[tuple]:
    with connect(layout) as connection:
        return connection.sql(sql).fetchall()


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_typed_and_empty_before_the_first_commit(
    layout: RunLayout, view: str
) -> None:
    assert query(layout, f"SELECT count(*) FROM {view}") == [(0,)]


def test_the_newest_round_may_be_unplayed_its_results_are_of_the_last_with_a_whole_group(
    layout: RunLayout,
) -> None:
    with Catalog.open(layout) as catalog:
        for version, ordinal, is_played in ((0, 0, True), (2, 0, True), (2, 1, False)):
            group = catalog.open_group(
                ordinal=ordinal,
                task_id=f"h{ordinal}",
                split="heldout",
                size=1,
                evaluated_version=version,
            )
            if is_played:
                play(layout, catalog, group)
        play(layout, catalog, open_train_group(catalog, 0))
        export(catalog, layout)
        newest = "SELECT evaluated_version, ordinal FROM {} ORDER BY ALL"
        assert query(layout, newest.format("newest_round")) == [(2, 0), (2, 1)]
        assert query(layout, newest.format("newest_results")) == [(2, 0)]
        catalog.open_group(ordinal=0, task_id="h0", split="heldout", size=1, evaluated_version=4)
        export(catalog, layout)
    assert query(layout, newest.format("newest_round")) == [(4, 0)]
    assert query(layout, newest.format("newest_results")) == [(2, 0)]


def test_weight_loads_have_their_version_and_the_pause_in_all(layout: RunLayout) -> None:
    load = {"version": 7, "check_ms": 100.0, "pause_ms": 1.5, "start_ms": 2.0, "update_ms": 4.0}
    with Catalog.open(layout) as catalog:
        spaced = json.dumps({**load, "resume_ms": 8.0}, indent=1)
        other = '{"version": "seven", "pause_ms": [1]}'
        for worker, detail in (("w0", spaced), ("w1", "{"), ("w2", other), ("w3", "[7]")):
            catalog.log(component=worker, what="weights loaded", detail=detail)
        catalog.log(component="w0", what="merged", detail='{"version": 3}')
        export(catalog, layout)
    loaded = "SELECT worker, version, pause_ms FROM weight_loads ORDER BY worker"
    assert query(layout, loaded) == [
        ("w0", 7, 15.5),
        *[(worker, None, 0.0) for worker in ("w1", "w2", "w3")],
    ]


def test_bad_rows_are_named_by_their_keys(layout: RunLayout) -> None:
    rows = [{"traj_uid": str(UUID(int=k)), "step_index": k} for k in (1, 2)]
    details = (
        json.dumps({"learner_step": 7, "number": 1, "rows": rows}),
        json.dumps({"learner_step": 8, "number": 2, "rows": [{"traj_uid": "none"}]}),
        json.dumps({"learner_step": 9, "number": 1, "rows": "none"}),
        "no JSON",
    )
    with Catalog.open(layout) as catalog:
        for detail in details:
            catalog.log(component="learner", what="bad rows", detail=detail)
        export(catalog, layout)
    assert query(layout, "FROM bad_rows ORDER BY ALL") == [
        (7, 1, UUID(int=1), 1),
        (7, 1, UUID(int=2), 2),
        (8, 2, None, None),
    ]


def test_the_views_say_what_was_committed(full: RunLayout) -> None:
    assert query(full, "SELECT count(*), count(DISTINCT traj_uid) FROM steps") == [(12, 4)]
    assert query(
        full, "SELECT DISTINCT episode_return, n_steps, invalid_steps FROM trajectories"
    ) == [(3.0, 3, 1)]
    assert query(full, "SELECT state, n_members, n_won FROM groups ORDER BY ordinal") == [
        ("trained", 2, 1),
        ("complete", 2, 1),
    ]
    # The middle step has no anchor: it is in no anchor group, also not in one of all such steps.
    assert query(
        full, "SELECT anchor_text, n_steps, n_trajectories FROM anchor_groups ORDER BY ALL"
    ) == [
        *[("room 0", 2, 2)] * 2,
        *[("room 2", 2, 2)] * 2,
    ]
    assert query(
        full, "SELECT learner_step, task_id, staleness, oldest_weights_digest FROM lineage"
    ) == [(1, "task-0", 2, "d0")]
    assert query(full, "SELECT learner_step FROM staleness_violations") == [(1,)]
    assert query(full, "SELECT name, value FROM metrics") == [("train/success", 0.75)]
    assert query(full, "SELECT typeof(traj_uid), typeof(group_uid) FROM steps LIMIT 1") == [
        ("UUID", "UUID")
    ]
    found = query(full, "SELECT DISTINCT member, final_observation FROM trajectories ORDER BY 1")
    assert found == [
        (0, "a dark room"),
        (1, None),
    ]
    assert query(full, "SELECT DISTINCT typeof(final_state_hash) FROM steps") == [("UUID",)]
    assert query(full, "SELECT twice(21)") == [(42,)]


def test_a_duplicate_trajectory_is_seen_once(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        group = open_train_group(catalog, 0)
        for members in ((0,), (0, 1)):
            trajectories = [make_trajectory(group, member) for member in members]
            segment = write_segment(layout, trajectories, worker="w0", epoch=catalog.epoch)
            catalog.commit(segment, epoch=catalog.epoch)
        export(catalog, layout)
    assert query(layout, "SELECT count(*) FROM steps") == [(6,)]
    assert query(layout, "SELECT DISTINCT n_steps FROM trajectories") == [(3,)]


def test_a_task_in_both_splits_is_named(layout: RunLayout) -> None:
    with Catalog.open(layout) as catalog:
        open_train_group(catalog, 0)
        catalog.open_group(
            ordinal=0, task_id="task-0", split="heldout", size=1, evaluated_version=0
        )
        export(catalog, layout)
    assert query(layout, "SELECT task_id FROM task_overlap") == [("task-0",)]


def test_a_roll_back_keeps_its_lineage(full: RunLayout) -> None:
    with Catalog.open(full) as catalog:
        catalog.roll_back(0)
        export(catalog, full)
    assert query(full, "SELECT batch_state, live FROM lineage") == [("rolled_back", False)]
    assert query(full, "SELECT count(*) FROM groups WHERE state = 'complete'") == [(2,)]
    assert query(full, "SELECT count(*) FROM metrics") == [(0,)]


def test_open_sql_serves_a_bare_shell_in_the_run_directory(
    full: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(full.root)
    with duckdb.connect() as connection:
        connection.execute(full.open_sql.read_text())
        assert connection.execute("SELECT count(*) FROM steps").fetchall() == [(12,)]


def test_open_sql_works_from_any_directory(
    full: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a moved run, from inside it, and from anywhere once it has been told where it
    is.
    """

    def steps(open_sql: Path) -> list[tuple]:
        with duckdb.connect() as connection:
            connection.execute(open_sql.read_text())
            return connection.execute("SELECT count(*), getvariable('run') FROM steps").fetchall()

    other = RunLayout.create(tmp_path / "other's", config_yaml="a: 1\n")
    write_open_sql(other, macros=(), max_staleness=0)
    for place in (tmp_path, other.root):
        monkeypatch.chdir(place)
        assert steps(full.open_sql) == [(12, str(full.root))], (
            "not the run in whose directory it was started"
        )
    assert steps(other.open_sql) == [(0, ".")]
    monkeypatch.chdir(tmp_path)
    assert steps(other.open_sql) == [(0, str(other.root))]

    moved = full.root.rename(tmp_path / "moved")
    monkeypatch.chdir(moved)
    assert steps(moved / "open.sql") == [(12, ".")]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(duckdb.Error, match=re.escape(str(full.root))):
        steps(moved / "open.sql")
    assert query(RunLayout.open(moved), "SELECT count(*) FROM steps") == [(12,)], (
        "our reader knows where it is"
    )
    done = gigpo("fsck", "--repair", str(moved))
    assert f"repaired  open.sql names {moved}" in done.stdout
    assert steps(moved / "open.sql") == [(12, str(moved))]
    assert "repaired" not in gigpo("fsck", "--repair", str(moved)).stdout


def test_an_open_sql_of_an_older_code_is_read_and_moved(
    full: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = fixed(full.open_sql.read_text(), Path("."))
    assert RUN_LINE in older
    full.open_sql.write_text(older)
    assert query(full, "SELECT count(*) FROM steps") == [(12,)]
    assert move(full) and sql_literal(full.root) in full.open_sql.read_text()


def test_generation_overlap_is_the_covered_part_of_the_training_time(full: RunLayout) -> None:
    # Steps were generated in 2023, the batch was trained now: nothing covers it.
    assert query(full, "SELECT learner_step, fraction FROM generation_overlap") == [(1, 0.0)]


def test_requests_that_overlap_count_once_in_the_generation_overlap() -> None:
    _, _, view = VIEWS_SQL.read_text().partition("CREATE OR REPLACE VIEW generation_overlap")
    with duckdb.connect() as connection:
        connection.execute(
            """CREATE TABLE steps AS
            SELECT split, make_timestamp(begin_us) AS t_start, end_us - begin_us AS gen_us
            FROM (VALUES ('train', 0, 4), ('train', 2, 5), ('heldout', 3, 4), ('train', 9, 30),
                         ('imported', 30, 40)) AS requests(split, begin_us, end_us)"""
        )
        connection.execute(
            """CREATE TABLE lineage AS
            SELECT learner_step, 'trained' AS batch_state, make_timestamp(begin_us) AS claimed_at,
                   make_timestamp(end_us) AS trained_at
            FROM (VALUES (1, 1, 11), (2, 21, 25), (3, 30, 40))
                AS batches(learner_step, begin_us, end_us)"""
        )
        connection.execute(f"CREATE VIEW generation_overlap{view}")
        found = connection.sql("SELECT learner_step, fraction FROM generation_overlap ORDER BY 1")
        # of [1, 11): [1, 5) and [9, 11)
        assert found.fetchall() == [(1, 0.6), (2, 1.0), (3, 0.0)]


def test_a_reader_of_nothing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a run directory"):
        open_run(tmp_path)


def test_a_run_that_was_meant_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunLayout.create(tmp_path / "runs" / "a", config_yaml="")
    with pytest.raises(FormatError, match="check the path, did you mean 'runs/a'[?]"):
        RunLayout.open("a")
    for other in ("b", "x" * 300, "\0", tmp_path / "a"):
        with pytest.raises(StoreError) as told:
            RunLayout.open(other)
        assert "did you mean" not in str(told.value)


def test_the_command_line_answers_and_errs_in_one_line(full: RunLayout) -> None:
    root = str(full.root)
    assert "12" in gigpo("sql", root, "SELECT count(*) AS n FROM steps").stdout
    assert gigpo("sql", root, "SELECT 1 AS a, 'x' AS b", "--format", "csv").stdout.split() == [
        "a,b",
        "1,x",
    ]
    assert json.loads(gigpo("sql", root, "SELECT 1 AS a", "--format", "json").stdout) == {"a": 1}
    assert gigpo("sql", root, "SELECT * FROM steps", "--format", "json").returncode == 0
    for arguments, named in (
        (("sql", root, "SELECT nothing FROM steps"), "nothing"),
        (("sql", root, "SELEC 1"), "SELEC"),
        (("sql", root + "x", "SELECT 1"), "not a run directory"),
    ):
        answer = gigpo(*arguments)
        assert answer.returncode == 2
        assert named in answer.stderr and "Traceback" not in answer.stderr
        assert len(answer.stderr.splitlines()) == 1


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start_writer(tmp_path / "run")
    yield process
    process.kill()
    process.wait()


def start_writer(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.store_samples", str(root)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_live_reader_sees_every_trajectory_whole_and_never_less(
    writer: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert writer.stdout is not None
    for _ in range(3):
        assert writer.stdout.readline()
    seen = 0
    deadline = time.monotonic() + 3.0
    sql = """SELECT count(*), count(*) FILTER (n_steps <> 3),
                    (SELECT sum(n_members)::BIGINT FROM groups) FROM trajectories"""
    # a busy machine takes longer
    while (left_s := deadline - time.monotonic()) > 0 or (seen <= 6 and left_s > -300.0):
        with connect(RunLayout.open(tmp_path / "run")) as connection:
            trajectories, torn, in_groups = connection.sql(sql).fetchall()[0]
        assert torn == 0
        assert trajectories == in_groups  # segments and exported tables are of one moment
        assert trajectories >= seen
        seen = trajectories
    assert writer.poll() is None and seen > 6


def test_nothing_acknowledged_is_lost_and_nothing_doubled_by_kill_9(tmp_path: Path) -> None:
    root = tmp_path / "run"
    acknowledged: list[str] = []
    for lines in (1, 3, 2, 5):
        process = start_writer(root)
        assert process.stdout is not None
        acknowledged += [process.stdout.readline() for _ in range(lines)]
        time.sleep(0.003 * lines)  # somewhere between two writes, at a different place each time
        os.kill(process.pid, signal.SIGKILL)
        acknowledged += process.stdout.readlines()
        process.wait()
    done = {int(line) for line in acknowledged if line.strip()}
    layout = RunLayout.open(root)
    with Catalog.open(layout) as catalog:
        export(catalog, layout)
        counts = catalog.counts()
        with pytest.raises(StoreError, match="owns"):
            Catalog.open(layout)
    assert counts.complete >= len(done) >= 11
    assert counts.trajectories == 2 * counts.complete and counts.steps == 3 * counts.trajectories
    ordinals = {
        row[0] for row in query(layout, "SELECT ordinal FROM groups WHERE state = 'complete'")
    }
    assert done <= ordinals
    assert query(layout, "SELECT count(*), count(DISTINCT traj_uid) FROM trajectories") == [
        (counts.trajectories,) * 2
    ]
    assert query(layout, "SELECT count(*) FROM steps") == [(counts.steps,)]


ODD = (
    "SELECT [1, 2] AS ids, 'nan'::DOUBLE AS bad, 3::HUGEINT AS n, MAP {'a': [1.5]} AS m, "
    "'x'::BLOB AS b, NULL AS no"
)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("csv", 'ids,bad,n,m,b,no\r\n"[1, 2]",nan,3,"{""a"": [1.5]}",78,\r\n'),
        (
            "json",
            '{"ids": [1, 2], "bad": null, "n": 3, "m": {"a": [1.5]}, "b": "78", "no": null}\n',
        ),
    ],
)
def test_nested_columns_and_odd_values_are_printed(
    layout: RunLayout, form: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sql", str(layout.root), ODD, "--format", form]) == 0
    assert capsys.readouterr().out == expected


def test_a_table_says_when_it_is_not_all(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, n_rows, said in (
        (["FROM range(100)"], 100, ""),
        (["FROM range(101)"], 100, "only the first 100 rows; --limit shows more\n"),
        (
            ["FROM range(7)", "--limit", "2", "--format", "csv"],
            2,
            "only the first 2 rows; --limit shows more\n",
        ),
    ):
        assert main(["sql", str(layout.root), *arguments]) == 0
        printed = capsys.readouterr()
        assert sum(line.strip(" │").isdigit() for line in printed.out.splitlines()) == n_rows
        assert printed.err == said


def test_a_result_goes_to_a_new_file_outside_the_run(
    full: RunLayout,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "steps.parquet"
    monkeypatch.setattr("sys.stdin", io.StringIO("FROM steps"))
    arguments = ["sql", str(full.root), "--format", "parquet", "-"]
    assert main([*arguments, "--output", str(out)]) == 0
    written = pq.read_table(out)
    assert written.num_rows == 12 and "prompt_ids" in written.column_names
    (tmp_path / "link.parquet").symlink_to(full.root / "new.parquet")
    for output, named in (
        (out, "exists"),
        (full.root / "new.parquet", "inside the run"),
        (tmp_path / "link.parquet", "inside the run"),
        (full.root / "export" / ".." / "manifest.json", "inside the run"),
        (tmp_path / "no" / "such" / "directory", "there is no directory"),
        (None, "--output"),
    ):
        assert (
            main(
                [
                    *arguments[:-1],
                    "SELECT 1",
                    *(["--output", str(output)] if output is not None else []),
                ]
            )
            == 2
        )
        assert named in capsys.readouterr().err
    assert pq.read_table(out).num_rows == 12 and not (full.root / "new.parquet").exists()
    assert (
        main([*arguments[:-1], "SELECT INTERVAL 1 MONTH", "--output", str(tmp_path / "i.parquet")])
        == 2
    )
    assert not (tmp_path / "i.parquet").exists()  # nothing half-written


def test_an_earlier_moment_is_asked_by_its_lsn(
    full: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_run(full.root) as reader:
        now = reader.lsn
    assert now is not None
    sql = "SELECT count(*) AS n FROM lineage WHERE batch_state = 'trained'"
    counts = []
    for lsn in range(1, now + 1, max(1, now // 3)):
        assert main(["sql", str(full.root), sql, "--format", "csv", "--as-of", str(lsn)]) == 0
        counts.append(int(capsys.readouterr().out.split()[1]))
    assert counts == sorted(counts) and counts[0] == 0
    assert main(["sql", str(full.root), sql, "--as-of", str(now + 1_000)]) == 2


def test_a_run_that_somebody_writes_is_named_before_anything_starts(layout: RunLayout) -> None:
    check_unowned(layout)
    with Catalog.open(layout), pytest.raises(LockedError, match=str(os.getpid())):
        check_unowned(layout)
    check_unowned(layout)

"""Run hostile statements: nothing is written, nothing outside the run is read, and every limit
holds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import duckdb
import psutil
import pyarrow as pa
import pytest
from _pytest.mark import ParameterSet

from store import Catalog, RunLayout, StoreError, export, write_open_sql
from store.errors import SqlTimeout
from store.reading import landlock
from store.reading.reader import Reader, open_run
from tests.support import processes
from tests.support.hostile_statements import (
    DEEP,
    HEAVY,
    LEAKING,
    LOCKED_IN,
    READING,
    SECRET,
    SMUGGLED,
    WRITING,
    World,
    make_world,
)
from tests.support.processes import PATIENCE_S
from tests.support.sizes import some
from tests.support.store_samples import open_train_group, play

REPOSITORY = Path(__file__).resolve().parents[2]
N_STEPS = 6
LIMIT_S = 0.5  # of a heavy statement; every other takes milliseconds
ENDLESS = """SELECT count(*) FROM range(100000) a, range(100000) b, range(100000) c
             WHERE a.range + b.range + c.range = 7"""
# Of a process that locks itself in: libraries start no thread then.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
needs_landlock = pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
MODES = [pytest.param("landlock", marks=needs_landlock), "filesystem"]


def in_each_mode(statements: Sequence[str], *, every: int) -> list[ParameterSet]:
    """Return each mode with each statement; the weaker mode, shortened, with every n-th one."""
    others = some(statements, every=every if landlock.abi() else 1)
    chosen = [("landlock", statement) for statement in statements]
    return [
        pytest.param(mode, statement, id=f"{mode}-{statements.index(statement)}", marks=marks)
        for mode, statement in [*chosen, *(("filesystem", statement) for statement in others)]
        for marks in [needs_landlock if mode == "landlock" else ()]
    ]


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, tuple[World, Reader]]]:
    """Hold the world of each mode with its reader, once `world` has made them."""
    worlds: dict[str, tuple[World, Reader]] = {}
    yield worlds
    for _, reader in worlds.values():
        reader.close()


@pytest.fixture(params=MODES)
def world(
    request: pytest.FixtureRequest,
    opened: dict[str, tuple[World, Reader]],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    # Not of the module: pytest would make it anew whenever a test names the mode with a statement.
    mode = request.param
    if mode not in opened:
        made = make_world(tmp_path_factory.mktemp("sandbox"), protection=mode)
        opened[mode] = made, made.open()
    return opened[mode][0]


@pytest.fixture(scope="module")
def best_world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """With the protection that this machine has."""
    return make_world(tmp_path_factory.mktemp("sandbox"), protection=None)


@pytest.fixture
def reader(world: World, opened: dict[str, tuple[World, Reader]]) -> Reader:
    assert world.protection is not None
    return opened[world.protection][1]


def try_statement(world: World, reader: Reader, statement: str) -> str | None:
    """Return the answer, None if it was refused. The run, the files outside and the reader must
    not change.
    """
    before = world.fingerprint()
    answers, reasons = [], []
    for prefix in (
        ("", "readonly://") if world.protection == "filesystem" and "{" in statement else ("",)
    ):
        try:
            answers.append(
                str(
                    reader.sql(
                        world.fill(statement, prefix=prefix), timeout_s=LIMIT_S, max_rows=1_000
                    ).to_pylist()
                )
            )
        except StoreError as error:
            reasons.append(str(error))
    assert not any(SECRET in answer or "root:" in answer for answer in answers)
    assert not any("\n" in reason or not reason for reason in reasons)
    assert world.fingerprint() == before
    assert not Path("/dev/shm/out_of_the_sandbox").exists()
    assert reader.sql("SELECT count(*) AS n, twice(21) AS t FROM steps").to_pylist() == [
        {"n": N_STEPS, "t": 42}
    ]
    return "".join(answers) or None


@pytest.mark.shortened
@pytest.mark.parametrize(("world", "statement"), in_each_mode(WRITING, every=3), indirect=["world"])
def test_no_statement_writes(world: World, reader: Reader, statement: str) -> None:
    assert try_statement(world, reader, statement) is None


@pytest.mark.shortened
@pytest.mark.parametrize(("world", "statement"), in_each_mode(READING, every=3), indirect=["world"])
def test_no_statement_reads_outside_the_run(
    world: World, reader: Reader, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDEN_TOKEN", SECRET)
    hidden_table = pa.table({"a": [SECRET]})
    assert try_statement(world, reader, statement) is None
    assert hidden_table.num_rows == 1


@pytest.mark.parametrize(
    "path",
    ["config.yaml", "run.json", "signed.json", "catalog.sqlite", "open.sql", "*", "**/*.yaml",
     "segments/../config.yaml", "export/../config.yaml", "manifest.json/../config.yaml",
     "segments//..//config.yaml", "segments/w0/../../config.yaml", "segments/**/../config.yaml",
     "segments/link.yaml", "logs/driver.log"],
)  # fmt: skip
def test_no_statement_reads_the_settings_or_logs_of_the_run(
    path: str, world: World, reader: Reader
) -> None:
    """The attack: every user of the machine read the keys in a private run, through `gigpo view`.

    The views need the rows alone.
    """
    run = reader.layout.root
    for private in (run / "config.yaml", run / "signed.json", run / "logs" / "driver.log"):
        private.write_text(f"api_key: {SECRET}")
    with contextlib.suppress(FileExistsError):
        (run / "segments" / "link.yaml").symlink_to(run / "config.yaml")
    prefixes = ("", "readonly://") if world.protection == "filesystem" else ("",)
    read = "SELECT content[:4] FROM read_blob('{path}')"
    try:
        rows = read.format(path="{segment}")
        assert reader.sql(world.fill(rows, prefix=prefixes[-1])).num_rows == 1
        refused = read.format(path=f"{{run}}/{path}")
        for prefix in prefixes:
            try:  # with ** there may be no such file
                assert reader.sql(world.fill(refused, prefix=prefix)).num_rows == 0
            except StoreError as error:
                assert re.search(r"Permission ?Error|No files found", str(error))  # noqa: PT017
                assert SECRET not in str(error)  # noqa: PT017
    finally:
        (run / "segments" / "link.yaml").unlink()


@pytest.mark.shortened
@pytest.mark.parametrize(("world", "statement"), in_each_mode(LEAKING, every=3), indirect=["world"])
def test_what_may_be_answered_says_nothing_of_the_outside(
    world: World, reader: Reader, statement: str
) -> None:
    answer = try_statement(world, reader, statement)
    assert (
        answer is None
        or "secret" not in answer.replace("secret_", "").replace("_secret", "")
        or "duckdb" in statement
    )


@pytest.mark.shortened
@pytest.mark.parametrize(("world", "statement"), in_each_mode(HEAVY, every=4), indirect=["world"])
def test_no_statement_outlives_its_limit(world: World, reader: Reader, statement: str) -> None:
    assert try_statement(world, reader, statement) is None


@pytest.mark.shortened
@pytest.mark.parametrize(("world", "statement"), in_each_mode(DEEP, every=4), indirect=["world"])
def test_deep_nesting_costs_at_most_a_child(world: World, reader: Reader, statement: str) -> None:
    try_statement(world, reader, statement)


WITHOUT_DUCKDB = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from store.reading import sandbox
sandbox._lock_settings = lambda *_, **__: None
assert hasattr(sandbox, '_check_one_query')
sandbox._check_one_query = lambda sql: None
sandbox.serve(int(sys.argv[2]))"""


@needs_landlock
def test_the_kernel_alone_keeps_every_statement_in(
    best_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same child without DuckDB's settings and without the check of the text."""
    monkeypatch.setattr("store.reading.reader._BOOT", WITHOUT_DUCKDB)
    before = best_world.fingerprint()
    answers = []
    with best_world.open() as reader:
        # Statements that switch something on come last: DuckDB fails at it in every later query.
        for statement in sorted(
            [*WRITING, *READING, *LEAKING], key=lambda statement: "enable_" in statement
        ):
            with contextlib.suppress(StoreError):
                answers.append(
                    str(reader.sql(best_world.fill(statement), timeout_s=5.0).to_pylist())
                )
            assert best_world.fingerprint() == before, statement
    assert answers and not any(SECRET in answer or "root:" in answer for answer in answers)


def test_without_protection_the_same_statements_do_harm(tmp_path: Path) -> None:
    """The control: the statements work where nothing holds them, and the parser takes the smuggled
    ones for queries.
    """
    (canary := tmp_path / "canary").mkdir()
    with duckdb.connect() as connection:
        connection.execute(SMUGGLED[0].format(canary=canary))
        assert (canary / "out.csv").read_text() == "u\n1\n"
        assert connection.execute(
            f"SELECT content FROM read_text('{canary}/out.csv')"
        ).fetchall() == [("u\n1\n",)]
    assert (
        duckdb.extract_statements(SMUGGLED[0].format(canary=canary))[0].type
        == duckdb.StatementType.SELECT
    )


@pytest.mark.skipif(
    landlock.abi() < 4, reason="this kernel's Landlock knows no TCP, or there is none"
)
def test_locked_in_means_reading_one_directory_and_nothing_else(
    best_world: World, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-c", LOCKED_IN, str(tmp_path), str(best_world.canary)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ONE_THREAD, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# The run's directory becomes a link after it was looked at, and leads back before it is read again.
EXCHANGED = """
import os, sys
from pathlib import Path
from store.reading import landlock, sandbox
run, outside = map(Path, sys.argv[1:])
aside = run.with_name("aside")
open_run, restrict = sandbox.RunLayout.open, landlock.restrict
def exchange(path):
    layout = open_run(path)
    run.rename(aside)
    run.symlink_to(outside)
    return layout
def lead_back(readable):
    restrict(readable)
    print(outside.joinpath("secret").read_text())
sandbox.RunLayout.open, landlock.restrict = exchange, lead_back
order = {"parent": os.getppid(), "die_with_thread": False, "run": str(run), "copy_of": None}
order["run_id"] = open_run(run).info.run_id
sandbox._open(order | {"protection": "landlock", "lsn": None, "memory_limit": None})
"""


@needs_landlock
def test_a_run_that_is_exchanged_opens_no_other_directory(tmp_path: Path) -> None:
    """The attack: the owner of a run made it a link to / while it was opened."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    RunLayout.create(run, config_yaml="")
    outside.mkdir()
    (outside / "secret").write_text(SECRET)
    done = subprocess.run(
        [sys.executable, "-c", EXCHANGED, str(run), str(outside)],
        cwd=REPOSITORY,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert SECRET not in done.stdout
    assert "run was exchanged while it was opened" in done.stderr


@needs_landlock
def test_a_process_of_several_threads_is_not_taken_for_locked_in() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(StoreError, match="only the one that asks"):
            landlock.restrict([])
    finally:
        stop.set()
        thread.join()


def children() -> list[psutil.Process]:
    return processes.children("store.reading.sandbox")


def started_by(act: Callable[[], Reader]) -> tuple[Reader, psutil.Process]:
    before = children()
    reader = act()
    (child,) = [child for child in children() if child not in before]
    return reader, child


def test_a_child_has_no_environment_and_no_files_of_its_parent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIDDEN_TOKEN", SECRET)
    with (world.canary / "secret.txt").open() as leaked:
        os.set_inheritable(leaked.fileno(), True)
        reader, child = started_by(world.open)
        with reader:
            assert SECRET not in "".join(child.environ().values())
            targets = {os.readlink(fd) for fd in Path(f"/proc/{child.pid}/fd").iterdir()}
    assert all(target == "/dev/null" or target.startswith("socket:") for target in targets)


def test_tables_before_a_query_are_computed_once_until_others_are_asked_for(
    reader: Reader,
) -> None:
    drawn = ("drawn", "SELECT random() AS number, count(*) AS n FROM steps")
    doubled = ("doubled", "SELECT 2 * number AS number FROM drawn")
    once = reader.sql("SELECT number, n FROM drawn", tables=[drawn]).to_pylist()
    assert once[0]["n"] == N_STEPS
    again = reader.first(
        ", more AS (SELECT * FROM doubled) SELECT d.number, m.number AS twice FROM drawn AS d, "
        "more AS m",
        n_rows=1,
        tables=[drawn, doubled],
    )[0].to_pylist()
    assert again == [{"number": once[0]["number"], "twice": 2 * once[0]["number"]}]
    with pytest.raises(StoreError, match="no_such_table"):
        reader.sql("FROM broken", tables=[drawn, ("broken", "FROM no_such_table")])
    assert reader.sql("SELECT number FROM drawn", tables=[drawn]).to_pylist() == [
        {"number": once[0]["number"]}
    ]
    for other in ("SELECT 1; SELECT 2", "SELECT 1) TO 'x'", "DROP VIEW steps"):
        with pytest.raises(StoreError):
            reader.sql("FROM drawn", tables=[("drawn", other)])
    fresh = reader.sql("SELECT number FROM drawn", tables=[drawn]).to_pylist()
    assert fresh != [{"number": once[0]["number"]}], "only the last tables are kept"


def test_a_reader_survives_a_time_out_and_the_death_of_its_child(world: World) -> None:
    reader, child = started_by(world.open)
    with reader:
        with pytest.raises(SqlTimeout, match=r"within 0\.2 s"):
            reader.sql(ENDLESS, timeout_s=0.2)
        assert not child.is_running()
        assert reader.sql("FROM steps").num_rows == N_STEPS
        (child,) = [new for new in children() if reader_owns(reader, new)]
        child.kill()
        assert reader._child is not None
        # its main thread is a zombie before its other threads are gone
        while reader._child.process.poll() is None:
            time.sleep(0.01)
        assert reader.sql("FROM steps").num_rows == N_STEPS
        (child,) = [new for new in children() if reader_owns(reader, new)]
        killer = threading.Thread(target=kill_at_work, args=(child,))
        killer.start()
        with pytest.raises(StoreError, match="killed"):
            reader.sql(ENDLESS)
        killer.join()
        assert reader.sql("FROM steps").num_rows == N_STEPS
    assert not any(reader_owns(reader, new) for new in children())
    with pytest.raises(StoreError, match="closed"):
        reader.sql("SELECT 1")


def kill_at_work(child: psutil.Process) -> None:
    """Once it computes, as ENDLESS does."""
    before_s = child.cpu_times().user
    while child.cpu_times().user < before_s + 0.1:
        time.sleep(0.01)
    child.kill()


def reader_owns(reader: Reader, child: psutil.Process) -> bool:
    return reader._child is not None and reader._child.process.pid == child.pid


def test_limits_of_a_result_are_named(world: World, reader: Reader) -> None:
    assert reader.sql("FROM range(10)", max_rows=10).num_rows == 10
    with pytest.raises(StoreError, match="more than 9 rows; aggregate, add LIMIT"):
        reader.sql("FROM range(10)", max_rows=9)
    with pytest.raises(StoreError, match="over 1,000,000 bytes; ask for fewer"):
        reader.sql("SELECT repeat('x', 1000) FROM range(100000)", max_bytes=1_000_000)
    assert [
        (table.num_rows, more)
        for table, more in (reader.first("FROM range(3)", n_rows=n) for n in (0, 2, 3, 4))
    ] == [
        (0, True),
        (2, True),
        (3, False),
        (3, False),
    ]
    assert reader.sql("SELECT 1 AS a WHERE false").schema.names == ["a"]
    with pytest.raises(StoreError, match="more memory than it may have"):
        reader.sql("SELECT list(range) FROM range(1000000000)")
    with pytest.raises(StoreError, match="more than 0 and at most"):
        reader.sql("SELECT 1", timeout_s=0)


BIG = f"'{'x' * 10_000}'"


@pytest.mark.parametrize(
    "query",
    [
        f"SELECT {BIG}::ENUM({BIG}) AS a FROM range(1000)",
        f"SELECT [{BIG}::ENUM({BIG})] AS a FROM range(1000)",
        f"SELECT {{'b': {BIG}::ENUM({BIG})}} AS a FROM range(1000)",
        f"SELECT MAP {{{BIG}::ENUM({BIG}): 1}} AS a FROM range(1000)",
        "SELECT list_resize([NULL], 1000000) AS a",
        "SELECT [list_resize([NULL], 1000000)] AS a",
        "SELECT list_resize([true], 1000000, true) AS a",
        "SELECT {'b': list_resize([NULL], 1000000)} AS a",
        "SELECT list_resize([{'b': true}], 200000, {'b': true}) AS a",
        "SELECT [NULL, NULL, NULL, NULL]::INTEGER[4] AS a, [NULL] AS b FROM range(100000)",
    ],
)
def test_a_result_is_as_large_as_its_python_values(reader: Reader, query: str) -> None:
    """Arrow has one text for all rows of an ENUM, and no byte for a NULL in a list."""
    with pytest.raises(StoreError, match="over 1,000,000 bytes; ask for fewer"):
        reader.sql(query, max_bytes=1_000_000)


def test_an_enum_is_text_at_every_depth(reader: Reader) -> None:
    kind = "ENUM('a', 'b')"
    table = reader.sql(f"SELECT 'a'::{kind} AS x, ['b'::{kind}] AS y, {{'c': 'a'::{kind}}} AS z")
    assert table.to_pylist() == [{"x": "a", "y": ["b"], "z": {"c": "a"}}]
    assert table.schema.field("x").type == pa.string()


def test_a_snapshot_is_fixed_when_it_is_opened(world: World, tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=1)
    with Catalog.open(layout) as catalog:
        play(layout, catalog, open_train_group(catalog, 0))
        export(catalog, layout)
        with open_run(layout.root, protection=world.protection) as old:
            play(layout, catalog, open_train_group(catalog, 1))
            export(catalog, layout)
            with open_run(str(layout.root), protection=world.protection) as new:
                assert [reader.sql("FROM steps").num_rows for reader in (old, new)] == [6, 12]
                with pytest.raises(SqlTimeout):
                    old.sql(ENDLESS, timeout_s=0.1)
                # also of a fresh child
                assert [reader.sql("FROM steps").num_rows for reader in (old, new)] == [6, 12]
            with open_run(layout.root, as_of=old.lsn, protection=world.protection) as again:
                assert again.sql("FROM steps").num_rows == 6


def running_command(world: World) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A command line with an endless query, once its child is at work."""
    reader, child = started_by(world.open)
    with reader:
        reader.sql("SELECT 1")
        start_s = child.cpu_times().user  # what starting costs on this machine
    command = [sys.executable, "-m", "cli", "sql", str(world.layout.root), ENDLESS]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **streams)  # type: ignore[call-overload]
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for child in processes.children("store.reading.sandbox", of=process.pid):
            if child.cpu_times().user > 2 * start_s + 0.5:
                return process, child
        time.sleep(0.02)
    raise AssertionError("the query did not start")


@pytest.mark.parametrize(
    ("how", "status", "last_words"),
    [(signal.SIGINT, 130, "\ninterrupted\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
)
def test_nothing_is_left_of_a_command_that_is_interrupted(
    best_world: World, how: int, status: int, last_words: str
) -> None:
    process, child = running_command(best_world)
    os.killpg(process.pid, how)  # as a terminal does
    printed, said = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, printed, said) == (status, "", last_words)
    gone, alive = psutil.wait_procs([child], timeout=PATIENCE_S)
    assert gone and not alive


AS_NOBODY = """import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
import store.reading.read_only_files
from store.reading.sandbox import serve
os.setgroups([]); os.setgid(65534); os.setuid(65534)
serve(int(sys.argv[2]))"""  # the interpreter itself may be where only root may look


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_read_only_run_is_open_to_another_user(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "moved [run]"
    shutil.copytree(world.layout.root, root, symlinks=True)
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    parents = {
        parent: parent.stat().st_mode
        for parent in root.parents
        if parent != Path("/tmp") and parent != Path("/")
    }
    monkeypatch.setattr("store.reading.reader._BOOT", AS_NOBODY)
    try:
        for parent, mode in parents.items():
            parent.chmod(mode | 0o055)
        reader, child = started_by(lambda: open_run(root, protection=world.protection))
        with reader:
            assert child.uids().effective == 65534
            assert reader.sql("FROM steps").num_rows == N_STEPS
    finally:
        for parent, mode in parents.items():
            parent.chmod(mode)


def test_a_lower_limit_of_the_user_is_kept(tmp_path: Path) -> None:
    layout = RunLayout.create(tmp_path / "run", config_yaml="a: 1\n")
    write_open_sql(layout, macros=(), max_staleness=1)
    query = f"{sys.executable} -m cli sql {layout.root} 'SELECT 7 AS n' --format csv"
    command = f"ulimit -d 3000000; exec {query}"
    answer = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True)
    assert (answer.returncode, answer.stdout.split()) == (0, ["n", "7"]), answer.stderr


@pytest.mark.parametrize("query", ['SELECT 1 AS "{}"', "SELECT struct_pack({} := 1) AS a"])
def test_names_of_columns_are_bounded(reader: Reader, query: str) -> None:
    """The attack: `gigpo view` kept answers of one row whose column had a name of megabytes."""
    assert reader.sql(query.format("n" * 500_000)).num_rows == 1
    grown = query.format("n" * 500_000).replace("SELECT ", f"SELECT 2 AS {'m' * 400_000}, ", 1)
    assert reader.sql(grown).num_rows == 1
    with pytest.raises(StoreError, match="the names and types of the columns take"):
        reader.sql(grown.replace("m" * 400_000, "m" * 600_000))

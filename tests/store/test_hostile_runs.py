"""A stranger's run is read, checked and tended: nothing outside of it changes, and each fault is
one line that names it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import pytest

import store
from analysis.run_status import config_of
from cli.__main__ import main
from configs import Config, ConfigError
from driver import run_lock
from driver.preflight import check_same_run
from store import (
    RunLayout,
    StoreError,
    check_run,
    errors,
    export_selection,
    open_run,
    sign_run,
    write_open_sql,
)
from store.errors import FormatError, UnsafePathError
from store.exchange.dataset_export import live_files
from store.maintenance import fsck
from store.maintenance.fsck import CONTENTS, NAMES, check
from store.maintenance.rebuild_run_json import is_lost, rebuild_run_json
from store.reading import landlock, wire
from store.reading import reader as reader_module
from store.reading.manifest import export_nothing, parse_manifest, read_manifest
from store.reading.mirror import mirror
from store.reading.open_sql import RUN_LINE, placed
from store.reading.pins import Pin, oldest_pinned_lsn
from store.reading.query import _damaged
from store.remote_directory import local_directory
from store.untrusted import file_access as beneath
from store.untrusted.file_access import MAX_MANIFEST_BYTES, MAX_OPEN_SQL_BYTES
from tests.support.hostile_runs import (
    ATTACKS,
    BAD_PATHS,
    edit_json,
    hostile_run,
    make_outside,
    remove_deep,
    snapshot,
)
from tests.support.store_runs import copy_run, make_run

# HOSTILE_RUNS=all tries every command on every run, as `make test-crash` does. Otherwise each run gets
# two of the owner's commands.
EVERY = os.environ.get("HOSTILE_RUNS") == "all"
BLOCKED_S = 60  # a FIFO that is opened blocks for ever
NETWORK = re.compile(r"you did not make this run")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    layout = make_run(tmp_path_factory.mktemp("sound") / "run")
    layout.checkpoint_dir(1).mkdir()  # so that it can be forked
    return layout


@pytest.fixture
def copied(sound: RunLayout, tmp_path: Path) -> RunLayout:
    """Return a copy that a test may change."""
    return copy_run(sound, tmp_path / "copied")


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "outside").mkdir()
    yield make_outside(tmp_path / "outside")
    for name in ("segments", "export", "weights"):
        remove_deep(tmp_path / "run" / name)


@pytest.fixture(autouse=True)
def _nothing_blocks() -> Iterator[None]:
    def blocked(*_: object) -> None:
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, blocked)
    signal.alarm(BLOCKED_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def status(run: Path) -> None:
    run_lock.driver_of(run)
    with suppress(ConfigError):  # this run's text is no config
        config_of(run)


def fork(run: Path) -> None:
    store.fork(RunLayout.open(run), run.with_name("forked"), learner_step=1, config_yaml="")


READS: Mapping[str, Callable[[Path], object]] = {
    "files": live_files,
    "points": lambda run: store.restart_points(RunLayout.open(run)),
    "metrics": lambda run: store.metrics_since(RunLayout.open(run), 0),
    "trained": lambda run: store.trained_step(RunLayout.open(run), 1),
    "pinned": lambda run: oldest_pinned_lsn(RunLayout.open(run)),
    "pin": lambda run: Pin(RunLayout.open(run), 1).close(),
}
COMMANDS: Mapping[str, Callable[[Path], object]] = {
    "status": status,
    **READS,
    "fork": fork,
    "fsck": lambda run: main(["fsck", str(run)]),
    "compact": lambda run: main(["compact", str(run)]),
    "repair": lambda run: main(["fsck", "--repair", str(run)]),
    "rebuild": lambda run: main(["rebuild", "--force", str(run)]),
}


def commands(attack: str) -> Mapping[str, Callable[[Path], object]]:
    if EVERY:
        return COMMANDS
    others = ("fork", "fsck", "repair", "rebuild")
    names = ("status", *READS, others[list(ATTACKS).index(attack) % len(others)], "compact")
    return {name: COMMANDS[name] for name in names}


# Commands that have no use for what was attacked, so that they do their work all the same.
WORKS: Mapping[str, tuple[str, ...]] = {
    r".*: (signed.json|manifest.json|open.sql|outside.json|catalog.lock|readers|quarantine|logs|tensorboard|export)": (
        *("status", "points", "metrics", "trained", "pinned", "pin", "fork"),
    ),
    r".*: (config.yaml|driver.json)": (
        "points",
        "metrics",
        "trained",
        "pinned",
        "pin",
        "fork",
        "fsck",
    ),
    r"fifo: (manifest.json|open.sql)|huge: manifest.json|manifest: (segment|part|an absolute) .*": (
        "repair",
        "rebuild",
    ),
    r"manifest: (segment|part|an absolute) .*": ("status", "points", "metrics", "trained", "fork"),
    r"catalog: .*": ("status", "rebuild"),
    r"deep: .*": ("status", "points", "metrics", "trained", "fork"),
    r"open.sql: .*": tuple(COMMANDS.keys() - {"files"}),
}


def refusal(
    command: Callable[[Path], object], run: Path, capsys: pytest.CaptureFixture[str]
) -> str | None:
    """Return why the command did nothing, which is one line. Return None if it did its work."""
    try:
        code = command(run)
    except StoreError as error:
        lines = [str(error)]
    else:
        if not (isinstance(code, int) and code == 2):
            assert capsys.readouterr().err == ""
            return None
        lines = capsys.readouterr().err.splitlines()
    (line,) = lines
    assert "\n" not in line
    assert len(line) > 20 and not re.search(r"\bNone\b|Traceback|Error\(", line), line
    return line


def test_every_command_works_on_a_sound_run(
    sound: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(sound.root, tmp_path / "run"))
    refused = {name: refusal(command, run, capsys) for name, command in COMMANDS.items()}
    assert "hold duplicates; read it with SQL" in (refused.pop("files") or "")  # this run's
    assert set(refused.values()) == {None}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_outside_a_strangers_run_changes(
    attack: str,
    sound: RunLayout,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = hostile_run(sound, outside.parent / "run", attack, outside=outside)
    # the run is signed by another user
    monkeypatch.setenv("XDG_STATE_HOME", str(outside.parent / "state"))
    monkeypatch.chdir(outside)
    before = snapshot(outside)
    for name, command in commands(attack).items():
        refused = refusal(command, run, capsys)
        assert snapshot(outside) == before, name
        works = {
            name
            for pattern, names in WORKS.items()
            if re.fullmatch(pattern, attack)
            for name in names
        }
        assert refused is None or name not in works
        if attack.startswith("storage"):
            assert not (run / "mirror.lock").exists()  # a copy is in this user's cache


SQL = "SELECT count(*) AS n FROM steps"


@pytest.mark.parametrize(
    "attack",
    [
        "storage: /proc/self/cwd",
        "storage: a foreign directory",
        "open.sql: writes and names foreign files",
        "link: readers",
        "link: a segment",
    ],
)
def test_a_query_changes_and_shows_nothing_outside(
    attack: str, sound: RunLayout, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = hostile_run(sound, outside.parent / "run", attack, outside=outside)
    monkeypatch.chdir(outside)
    before, mine = snapshot(outside), snapshot(run)
    with suppress(StoreError), store.open_run(run, warn=False) as reader:
        assert reader.sql("SELECT * FROM steps").num_rows <= 45
        assert snapshot(outside) == before
    assert snapshot(outside) == before
    if attack.startswith("storage"):
        assert snapshot(run) == mine  # not even the run itself is written to


def test_the_network_is_asked_for_no_stranger(
    sound: RunLayout,
    outside: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = hostile_run(sound, outside.parent / "run", "storage: the network", outside=outside)
    monkeypatch.setattr(
        "store.storage.RemoteStorage._ask", lambda *_, **__: pytest.fail("the network was asked")
    )
    for command in (
        ["sql", str(run), SQL],
        ["fsck", str(run)],
        ["bias", str(run)],
        ["export", str(run), "d"],
    ):
        assert main(command) != 0
        assert NETWORK.search(capsys.readouterr().err), command
    for command in (
        ["compact", str(run)],
        ["rebuild", "--force", str(run)],
        ["fsck", "--repair", str(run)],
    ):
        assert main(command) != 0
        assert NETWORK.search(capsys.readouterr().err), command


def test_a_text_that_is_no_uri_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = f"run_dir={tmp_path / 'new'}"
    for command in (
        ["train", "--resume", "s3://[x"],
        ["train", "--resume", "s3://[x", new],
        ["train", "--fork", "s3://[x@1", new],
        ["fetch", "s3://[x", str(tmp_path / "new")],
    ):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "'s3://[x' is no URI (Invalid IPv6 URL)" in line
    assert not (tmp_path / "new").exists()


def test_a_command_that_an_error_proposes_runs_no_text_of_the_run(
    sound: RunLayout, outside: Path, tmp_path: Path
) -> None:
    run = hostile_run(sound, tmp_path / "run", "storage: no such scheme", outside=outside)
    uri = "s3://bucket/run?region=eu&touch${IFS}pwned&"
    edit_json(run / "run.json", lambda info: info.update(storage_uri=uri))
    with pytest.raises(StoreError) as found:
        store.open_run(run)
    command = str(found.value).partition("If you want that: ")[2].partition(",")[0]
    assert shlex.split(command) == ["gigpo", "fetch", uri, "DIR"]


def test_an_owner_writes_at_no_storage_that_a_stranger_chose(
    sound: RunLayout, outside: Path, tmp_path: Path
) -> None:
    victim = store.RunLayout.create(
        tmp_path / "victim", config_yaml="", storage_uri=(tmp_path / "shared").as_uri()
    )
    write_open_sql(victim, macros=(), max_staleness=0)
    run = hostile_run(sound, tmp_path / "run", "storage: no such scheme", outside=outside)
    edit_json(run / "run.json", lambda info: info.update(storage_uri=victim.info.storage_uri))
    before = snapshot(tmp_path / "shared")
    for command in ("compact", "rebuild", "repair"):
        with suppress(StoreError):
            COMMANDS[command](run)
        assert snapshot(tmp_path / "shared") == before, command
    with pytest.raises(StoreError, match="you did not make this run"):
        store.Catalog.open(RunLayout.open(run))
    sign_run(run)
    assert store.signed_texts(run)


def test_a_run_on_a_linked_path_and_a_copy_of_one_still_work(
    sound: RunLayout, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    shutil.copytree(sound.root, tmp_path / "disk" / "a")
    (tmp_path / "b").symlink_to(tmp_path / "disk" / "a")
    for run in (tmp_path / "runs" / "a", tmp_path / "b"):
        assert main(["fsck", "--repair", str(run)]) == 0
        assert main(["compact", str(run)]) == 0
        with store.open_run(run) as reader:
            assert reader.sql(SQL)["n"].to_pylist() == [45]


def test_a_readers_copy_is_private_and_not_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = store.RunLayout.create(
        tmp_path / "run", config_yaml="", storage_uri=(tmp_path / "shared").as_uri()
    )
    write_open_sql(layout, macros=(), max_staleness=0)
    before = {place: snapshot(tmp_path / place) for place in ("run", "shared")}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with store.open_run(layout.root) as reader:
        assert reader.sql(SQL)["n"].to_pylist() == [0]
    assert {place: snapshot(tmp_path / place) for place in before} == before
    copy = mirror(layout).root
    assert copy.is_relative_to(tmp_path / "cache") and copy.stat().st_mode & 0o077 == 0
    shutil.rmtree(tmp_path / "cache")  # may be removed at any time
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "async-gigpo").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link or another user's"):
        mirror(layout)


def test_a_manifest_names_no_file_twice(sound: RunLayout) -> None:
    """A reader would hold its rows as often, and an export would write them as often."""
    whole = json.loads(sound.manifest.read_text())
    empty, segment, *_ = whole["segments"]
    part = whole["tables"]["groups"][0]
    for change in (
        {"segments": [empty, segment, segment]},
        {"segments": [part["path"], segment]},
        {"tables": {**whole["tables"], "groups": [part, part]}},
        {"tables": {**whole["tables"], "ledger": [part]}},
    ):
        with pytest.raises(FormatError, match="it names .* twice"):
            parse_manifest(json.dumps({**whole, **change}).encode(), name="manifest.json")


def test_an_export_reads_no_file_twice(copied: RunLayout, tmp_path: Path) -> None:
    """The run's own open.sql sets the list of files."""
    text = copied.open_sql.read_text()
    again = "list_append(getvariable('segments'), getvariable('segments')[2])"
    copied.open_sql.write_text(f"{text}\nSET VARIABLE segments = {again};\n")
    with pytest.raises(FormatError, match="read a file twice"):
        export_selection(copied.root, tmp_path / "new", where=None, as_of=None)


def test_the_largest_manifest_is_read_by_all(
    copied: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads(copied.manifest.read_text())
    whole["superseded"] = {}
    n_more = MAX_MANIFEST_BYTES - len(json.dumps(whole)) - len(', "padding": ""')
    copied.manifest.write_text(json.dumps({**whole, "padding": "x" * n_more}))
    assert copied.manifest.stat().st_size == MAX_MANIFEST_BYTES
    with open_run(copied.root) as reader:
        assert reader.sql("SELECT count(*) > 0 AS ok FROM steps").to_pylist() == [{"ok": True}]
    copied.manifest.write_text(json.dumps({**whole, "padding": "x" * (n_more + 1)}))
    with pytest.raises(UnsafePathError, match="16,777,217 bytes, more than 16,777,216"):
        read_manifest(copied)
    monkeypatch.setattr("store.reading.manifest.MAX_MANIFEST_BYTES", 10)
    with pytest.raises(StoreError, match="more than 10: it names .* gigpo compact"):
        export_nothing(copied)


def test_an_open_sql_that_no_run_wrote_is_not_read(copied: RunLayout) -> None:
    copied.open_sql.write_text(copied.open_sql.read_text() + "-" * MAX_OPEN_SQL_BYTES)
    with pytest.raises(UnsafePathError, match="more than 1,048,576: no run wrote it"):
        open_run(copied.root)
    findings = check_run(copied.root, quick=True)
    assert "open_sql_missing" in {finding.what for finding in findings}


def test_the_place_of_a_run_is_a_whole_line(copied: RunLayout) -> None:
    """Looked for within a line, each copy of its first words would be followed to the end."""
    text = f"-- {RUN_LINE}\n"
    assert placed(copied, text) == text and placed(copied, f"{RUN_LINE}\n") != f"{RUN_LINE}\n"


@pytest.mark.parametrize("value", ["7", "NULL::VARCHAR", "'a plan'"])
def test_a_view_with_the_columns_of_a_plan_is_shown(
    value: str, copied: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"CREATE OR REPLACE VIEW groups AS SELECT NULL::INT AS explain_key, {value} AS x"
    query = text.replace(" AS x", " AS explain_value")
    copied.open_sql.write_text(f"{copied.open_sql.read_text()}\n{query};\n")
    assert main(["sql", str(copied.root), "FROM groups"]) == 0
    assert value.strip("'").partition(":")[0] in capsys.readouterr().out


@pytest.mark.parametrize("path", [*BAD_PATHS, "/etc/passwd", None, 3, ["export"]])
def test_a_manifest_names_only_what_the_store_would(sound: RunLayout, path: object) -> None:
    whole = json.loads(sound.manifest.read_text())
    for change in (
        {"segments": [path]},
        {"segments": [whole["segments"][0], path]},
        {"tables": {"groups": [{**whole["tables"]["groups"][0], "path": path}]}},
    ):
        with pytest.raises(FormatError):
            parse_manifest(json.dumps({**whole, **change}).encode(), name="manifest.json")
    assert read_manifest(sound) is not None
    if isinstance(path, str):
        whole["superseded"] = {path: {"lsn": 0, "at_us": 0}}
        parsed = parse_manifest(json.dumps(whole).encode(), name="manifest.json")
        assert parsed.superseded == {}, "nothing is removed by that name"


@pytest.mark.parametrize(
    "path",
    ["weights/../../outside", "/etc", "weights", "checkpoints/../run.json", "base/other", "../x"],
)
def test_only_published_weights_are_fetched_and_pruned(sound: RunLayout, path: str) -> None:
    with pytest.raises(FormatError, match="no run names such a file"):
        local_directory(sound, path)


def test_a_path_stays_beneath_its_root(outside: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "file").write_text("x")
    (root / "link").symlink_to(outside)
    (root / "a" / "link").symlink_to(outside / "text")
    os.mkfifo(root / "fifo")
    before = snapshot(outside)
    for path in ("link/text", "a/link", "../outside/text", "a/../../outside/text", "fifo", "a\0b"):
        with pytest.raises(UnsafePathError):
            beneath.read_bytes(root / path, root=root, at_most=1)
    for path in ("link/text", "../outside/text"):
        with pytest.raises(UnsafePathError):
            beneath.remove(root / path, root=root)
        with pytest.raises(UnsafePathError):
            beneath.remove_tree(root / path, root=root)
        with pytest.raises(UnsafePathError):
            beneath.rename(root / "a" / "file", root / path, root=root)
    with pytest.raises(IsADirectoryError):
        beneath.read_bytes(root / "a", root=root, at_most=1)
    assert [path.name for path, _ in beneath.walk(root, root=root)] == [
        "file",
        "link",
        "fifo",
        "link",
    ]
    beneath.remove_tree(root / "link", root=root)
    beneath.remove_tree(root / "a", root=root)
    assert sorted(path.name for path in root.iterdir()) == ["fifo"]
    assert snapshot(outside) == before


@pytest.mark.parametrize(
    "name", ["logs", "tensorboard", "weights", "checkpoints", "config.yaml", "driver.json"]
)
def test_a_run_with_a_link_does_not_go_on(name: str, sound: RunLayout, outside: Path) -> None:
    run = hostile_run(sound, outside.parent / "run", f"link: {name}", outside=outside)
    with pytest.raises(UnsafePathError, match=f"{name} is a symbolic link, and a run has none"):
        check_same_run(Config(run_dir=str(run)))


def test_a_model_that_an_evaluation_links_to_is_no_such_link(
    sound: RunLayout, tmp_path: Path
) -> None:
    run = RunLayout.open(shutil.copytree(sound.root, tmp_path / "run"))
    (tmp_path / "model").mkdir()
    run.weights_dir(0).symlink_to(tmp_path / "model")
    run.check_no_links()


def test_a_fork_of_a_run_whose_catalog_is_none_is_one_line(
    sound: RunLayout, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(sound.root, tmp_path / "run"))
    (run / "catalog.sqlite").write_text(
        "no catalog at all, but a text that is long enough to be looked at\n" * 99
    )
    with pytest.raises(FormatError, match="catalog.sqlite cannot be read"):
        fork(run)
    assert not list(tmp_path.glob("forked*"))


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StoreError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_query_process_keeps_its_message(kind: type[Exception]) -> None:
    answer = bytearray(
        json.dumps({"type": kind.__name__, "message": "w1 is a link; remove it"}).encode()
    )
    error = reader_module._error(answer)
    assert type(error) is kind
    assert str(error) == "w1 is a link; remove it"


def test_an_unsafe_path_that_the_query_process_meets_is_its_answer(
    sound: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"type": "UnsafePathError", "message": "w1 is a link; remove it"}).encode()
    with store.open_run(sound.root) as reader:
        monkeypatch.setattr(
            "store.reading.reader.wire.receive", lambda *_, **__: (wire.ERROR, bytearray(answer))
        )
        with pytest.raises(UnsafePathError, match="w1 is a link; remove it"):
            reader.sql(SQL)


def test_a_tree_that_is_too_deep_is_one_line(
    sound: RunLayout, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = hostile_run(sound, outside.parent / "run", "deep: segments", outside=outside)
    for command in ("fsck", "compact", "repair"):
        assert COMMANDS[command](run) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.fullmatch(r".*/segments(/d){17} lies too deep: .*; remove it", line), command
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsafePathError, match="lies too deep"):
        beneath.remove_tree(run / "segments", root=run)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list((run / "segments").glob("*/*.parquet"))


@pytest.mark.parametrize(
    "what", ["an empty meta", "no lsn in meta", "no tables", "a table less", "another schema"]
)
def test_a_fork_of_a_run_with_a_damaged_catalog_is_one_line(
    what: str, sound: RunLayout, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(sound.root, tmp_path / "run"))
    path = run / "catalog.sqlite"
    if what == "no tables":
        path.unlink()
    statements = {
        "an empty meta": ("DELETE FROM meta",),
        "no lsn in meta": (
            "DROP TABLE meta",
            "CREATE TABLE meta (lsn)",
            "INSERT INTO meta VALUES ('x')",
        ),
        "no tables": ("CREATE TABLE other (a)",),
        "a table less": ("DROP TABLE checkpoint",),
        "another schema": (
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_schema SET sql = 'CREATE TABLE grp (' WHERE name = 'grp'",
        ),
    }
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements[what]:
            connection.execute(statement)
    with pytest.raises(FormatError, match=r"catalog.sqlite.*gigpo rebuild") as caught:
        fork(run)
    assert "free space" not in str(caught.value)
    assert not list(tmp_path.glob("forked*"))


def _replace_manifest(run: Path, kind: str, *, outside: Path) -> None:
    path = run / "manifest.json"
    path.unlink()
    if kind == "a link":
        path.symlink_to(outside / "text")
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 42)  # sparse


@pytest.mark.parametrize("kind", ["a link", "a FIFO", "a directory", "a huge file"])
def test_a_manifest_that_is_no_file_is_a_finding_and_is_set_aside(
    kind: str, sound: RunLayout, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = RunLayout.open(shutil.copytree(sound.root, outside.parent / "run"))
    _replace_manifest(layout.root, kind, outside=outside)
    before = snapshot(outside)
    for level in (NAMES, CONTENTS):
        (finding,) = check(layout, level=level)
        assert (finding.what, finding.subject) == ("manifest_damaged", "manifest.json")
        assert ("remove it, then" in finding.remedy) == (kind == "a link")
    code = main(["fsck", "--repair", str(layout.root)])
    if kind == "a link":  # no owner opens a run with one: its quarantine would have it from then on
        assert code == 2
        assert "manifest.json is a symbolic link" in capsys.readouterr().err
        layout.manifest.unlink()
        code = main(["fsck", "--repair", str(layout.root)])
    assert code == 0
    assert check(layout, level=CONTENTS) == []
    assert snapshot(outside) == before


def test_a_catalog_that_is_no_file_is_a_finding(sound: RunLayout, outside: Path) -> None:
    layout = RunLayout.open(shutil.copytree(sound.root, outside.parent / "run"))
    layout.catalog.unlink()
    assert [finding.what for finding in check(layout, level=NAMES)] == ["catalog_missing"]
    layout.catalog.symlink_to(sound.catalog)
    (finding,) = check(layout, level=NAMES)
    assert (finding.what, finding.detail) == ("catalog_damaged", "it is a link, or no regular file")


def test_no_link_tells_that_a_run_is_here_or_where_its_files_are(
    sound: RunLayout, outside: Path
) -> None:
    run = outside.parent / "run"
    run.mkdir()
    for name in ("catalog.sqlite", "segments"):
        (run / name).symlink_to(sound.root / name)
    assert not is_lost(run)
    with pytest.raises(FormatError, match=r"no run.json in it\); check the path$"):
        RunLayout.open(run)
    (run / "fork.unfinished").symlink_to("nowhere")
    with pytest.raises(FormatError, match="a fork that was cut short"):
        RunLayout.open(run)
    (run / "backup").mkdir()
    (run / "backup" / "run.json").symlink_to(sound.run_json)
    assert not is_lost(run)
    with pytest.raises(StoreError, match="symbolic link.*put a backup of run.json back"):
        rebuild_run_json(run)
    assert not (run / "run.json").exists()


def test_a_reader_looks_behind_no_link_in_the_middle_of_a_path(
    sound: RunLayout, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(sound.root, tmp_path / "run"))
    worker = run / "segments" / "w1"
    # whole files of the very run, with the names they have in the manifest
    shutil.move(worker, tmp_path / "elsewhere")
    worker.symlink_to(tmp_path / "elsewhere")
    paths = sorted(str(path) for path in run.glob("segments/*/*.parquet"))
    assert (
        {path for path in paths if f"{worker}/" in path} == _damaged(paths, run, prefix="") != set()
    )
    for protection in ("landlock", "filesystem") if landlock.abi() > 0 else ("filesystem",):
        with store.open_run(run, warn=False, protection=protection) as reader:
            assert f"first {worker}/" in reader.left_out
            assert 0 < reader.sql(SQL)["n"][0].as_py() < 45


@pytest.mark.parametrize("name", ["a\0b.parquet", ".", "", "missing.parquet"])
def test_a_name_that_no_segment_has_is_left_out(name: str, sound: RunLayout) -> None:
    path = f"{sound.segments}/w1/{name}"
    assert _damaged([path], sound.root, prefix="") == {path}


@pytest.mark.parametrize("written", [b"\xff\xfe", b"\x1b[31m", "²".encode(), b""])
def test_a_lock_that_a_stranger_holds_and_wrote_to_is_one_line(
    written: bytes, copied: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: bytes that are no text ended `gigpo compact` with a traceback."""
    copied.catalog_lock.write_bytes(written)
    with copied.catalog_lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(["compact", str(copied.root)]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: process unknown owns .*catalog\.sqlite; .*\n", error), error


def test_a_catalog_that_is_damaged_while_the_run_is_checked_is_one_line(
    copied: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: files were exchanged in a loop beside `gigpo fsck`, which showed a traceback."""
    sound = fsck.check_manifest

    def damages(layout: RunLayout, *, contents: bool) -> object:
        with layout.catalog.open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * 3000)
        return sound(layout, contents=contents)

    monkeypatch.setattr(fsck, "check_manifest", damages)
    assert main(["fsck", str(copied.root)]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: .*catalog\.sqlite was damaged while .*\n", error), error

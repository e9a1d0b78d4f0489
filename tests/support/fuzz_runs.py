"""Craft run directories as a stranger might hand them over: links, paths, names, types, sizes,
texts.

Each mutation changes one thing of a whole run. `craft` applies one to four of them, chosen by a
seed.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.store_runs import make_run, rewrite

SECRET = "the-secret-of-the-reader"
DEEP = "@deep@"  # stands for 100,000 nested lists, which json.dumps cannot write
ESCAPE = "\x1b]52;c;aGVsbG8=\x07\x1b[31m\u009b31m\u202e[bold]x[/nope]"

CONFIG = """env:
  name: key_room
run_dir: {run}
learner:
  steps: 4
actors:
  workers: 1
"""
EVIL_MODULE = """import pathlib
pathlib.Path({mark!r}).write_text("code of the run was executed")
class Env: ...
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The crafted run, and the reader's own files around it. No command may change or show them."""

    base: Path

    @property
    def outside(self) -> Path:
        return self.base / "outside"

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def working(self) -> Path:
        """The directory that the commands are started in."""
        return self.base / "working"

    @property
    def template(self) -> Path:
        return self.base / "template"

    @property
    def run(self) -> Path:
        return self.base / "runs" / "stranger"

    def make(self) -> None:
        """Write the reader's files and one whole run."""
        for place in (self.outside, self.home, self.working):
            (place / "segments" / "w0").mkdir(parents=True)
            (place / "export").mkdir()
            (place / "readers").mkdir()
            (place / "keep.txt").write_text(SECRET)
            (place / ".profile").write_text(f"# {SECRET}\n")
            (place / "segments" / "w0" / "keep.parquet").write_text(SECRET)
            (place / "export" / "groups-0-1.parquet").write_text(SECRET)
            (place / "readers" / "1-2-abc").write_text(SECRET)
        layout = make_run(self.template)
        run_json = json.loads(layout.run_json.read_text())
        run_json["config_yaml"] = CONFIG.format(run=self.template)
        rewrite(layout.run_json, json.dumps(run_json).encode())
        (self.template / "config.yaml").write_text(CONFIG.format(run=self.template))
        (self.template / "outside.json").write_text("{}")
        driver = {
            "pid": 1,
            "started_ticks": 1,
            "host": socket.gethostname(),
            "ray_session": None,
            "run": str(self.run),
        }
        (self.template / "driver.json").write_text(json.dumps(driver))
        for directory in (
            "weights/v000003",
            "checkpoints/step000001",
            "base/policy",
            "tensorboard",
            "logs",
        ):
            (self.template / directory).mkdir(parents=True, exist_ok=True)
            (self.template / directory / "config.json").write_text("{}")

    def snapshot(self) -> dict[str, tuple[Any, ...]]:
        """Return kind, mode, size, modification time and content of everything that must stay as it
        is.
        """
        found: dict[str, tuple[Any, ...]] = {}
        for place in (self.outside, self.home, self.working):
            for path in [place, *sorted(place.rglob("*"))]:
                status = path.lstat()
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                mtime_ns = 0 if path.is_dir() else status.st_mtime_ns
                found[str(path)] = (
                    status.st_mode,
                    status.st_size if content else 0,
                    mtime_ns,
                    content,
                )
        return found


Mutation = Callable[[random.Random, Path, World], str]


def craft(world: World, seed: int) -> list[str]:
    """Make `world.run` anew from the template and change it. Return what was changed."""
    rng = random.Random(seed)
    discard(world.run)
    world.run.parent.mkdir(exist_ok=True)
    shutil.copytree(world.template, world.run)
    done = []
    chosen = rng.choices(MUTATIONS, weights=WEIGHTS, k=rng.choice((1, 1, 1, 2, 2, 3, 4)))
    chosen.sort(key=lambda mutation: mutation is special_file)  # others would wait for a FIFO
    for mutation in chosen:
        try:
            done.append(mutation(rng, world.run, world))
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            RecursionError,
            MemoryError,
            sqlite3.Error,
            pa.ArrowException,
        ) as error:  # an earlier one was in the way
            done.append(f"({mutation.__name__} not applied: {type(error).__name__})")
    return done


def discard(run: Path) -> None:
    """Remove a crafted run, also where it took its permissions away. Links are removed, not
    followed.
    """
    if not os.path.lexists(run):
        return
    for parent, names, _ in os.walk(run):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                with suppress(OSError):
                    os.chmod(path, 0o755)
    shutil.rmtree(run)


def _names(run: Path) -> list[str]:
    """Return every name that a run may have, whether it is there or not."""
    there = [path.relative_to(run).as_posix() for path in sorted(run.rglob("*"))]
    others = ["catalog.sqlite-wal", "catalog.sqlite-shm", "catalog.sqlite-journal", "mirror.lock", "readers", "quarantine",
              "published.json", "endpoint.json", "workers.wanted", "stopping", "report.html", "catalog.lock"]  # fmt: skip
    return there + others


def _target(rng: random.Random, world: World) -> str:
    return rng.choice(
        [
            str(world.outside),
            str(world.outside / "keep.txt"),
            str(world.outside / "not_there"),
            str(world.outside / "segments"),
            str(world.outside / "export"),
            str(world.home),
            str(world.home / ".profile"),
            str(world.home / ".bashrc"),
            "/proc/self/cwd",
            "/proc/self/cwd/keep.txt",
            "/proc/self/fd/0",
            "/dev/zero",
            "/etc/passwd",
            "..",
            "../../outside",
            "../../outside/keep.txt",
            ".",
        ]
    )


def _clear(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)


def link(rng: random.Random, run: Path, world: World) -> str:
    name, target = rng.choice(_names(run)), _target(rng, world)
    _clear(run / name)
    (run / name).symlink_to(target)
    return f"{name} -> {target}"


def loop(rng: random.Random, run: Path, world: World) -> str:
    name = rng.choice(_names(run))
    _clear(run / name)
    (run / name).symlink_to(run / name)
    return f"{name} -> itself"


def special_file(rng: random.Random, run: Path, world: World) -> str:
    name, kind = (
        rng.choice(_names(run)),
        rng.choice(("fifo", "socket", "directory", "file", "empty", "huge", "closed")),
    )
    path = run / name
    if kind == "closed":
        if not path.is_symlink():  # an earlier mutation leads it out of the run
            path.chmod(0)
        return f"{name} is unreadable"
    _clear(path)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            os.chdir(path.parent)  # a socket's path is limited to 107 bytes
            bound.bind(path.name)
            os.chdir(world.working)
    elif kind == "directory":
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(64 * 2**30)
    else:
        path.write_bytes(b"" if kind == "empty" else rng.randbytes(200))
    return f"{name} is a {kind}"


def strange_name(rng: random.Random, run: Path, world: World) -> str:
    name = rng.choice(
        (
            f"{ESCAPE}.parquet",
            "x" * 250,
            "a\nb.parquet",
            "$(touch x)",
            "groups-1-2.parquet",
            ".hidden",
            "-rf",
        )
    )
    place = rng.choice(
        ("segments/w0", "segments", "export", "readers", "weights", "checkpoints", "logs", ".")
    )
    (run / place).mkdir(exist_ok=True)
    (run / place / name.replace("/", "_")).write_bytes(rng.randbytes(20))
    return f"{place} has {name!r}"


def _value(rng: random.Random, world: World) -> Any:
    return rng.choice(
        [
            *(
                "",
                "x",
                ESCAPE,
                "a\x00b",
                "x" * 100_000,
                "NaN",
                "\ud83d",
                "'; DROP TABLE grp; --",
                "[/bold]",
            ),
            *(
                "/etc/passwd",
                str(world.outside / "keep.txt"),
                "../../outside/keep.txt",
                "segments/../../../outside/keep.txt",
            ),
            *(
                "segments/w0/../../../../outside/segments/w0/keep.parquet",
                "file:///proc/self/cwd",
                f"file://{world.outside}",
            ),
            *(
                f"file://{world.home}",
                "s3://bucket/x?endpoint_override=127.0.0.1:1&scheme=http",
                "http://127.0.0.1:1/",
            ),
            *(
                -1,
                0,
                1,
                2**31,
                2**63 - 1,
                2**63,
                2**64,
                -(2**63),
                10**400,
                1e308,
                float("nan"),
                float("inf"),
            ),
            *(None, True, [], {}, [[]], {"a": {}}, DEEP),
        ]
    )


def _replace_leaf(rng: random.Random, content: Any, value: Any) -> Any:
    """Replace one random value inside nested lists and objects."""
    if isinstance(content, dict) and content and rng.random() < 0.9:
        key = rng.choice(sorted(content))
        return {**content, key: _replace_leaf(rng, content[key], value)}
    if isinstance(content, list) and content and rng.random() < 0.9:
        place = rng.randrange(len(content))
        return [*content[:place], _replace_leaf(rng, content[place], value), *content[place + 1 :]]
    return value


def json_value(rng: random.Random, run: Path, world: World) -> str:
    name = rng.choice(
        ("run.json", "run.json", "manifest.json", "manifest.json", "driver.json", "outside.json")
    )
    value = _value(rng, world)
    content = _replace_leaf(rng, json.loads((run / name).read_text()), value)
    text = json.dumps(content).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)
    rewrite(run / name, text.encode())
    return f"{name}: a value is {str(value)[:60]!r}"


def run_field(rng: random.Random, run: Path, world: World) -> str:
    """Change a field of run.json by name, above all where the files are."""
    content = json.loads((run / "run.json").read_text())
    name = rng.choice(
        (
            "storage_uri",
            "storage_uri",
            "storage_uri",
            "config_yaml",
            "forked_from",
            "ancestors",
            "run_id",
        )
    )
    value = _value(rng, world)
    content[name] = value if name != "ancestors" else [value]
    text = json.dumps(content).replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)
    rewrite(run / "run.json", text.encode())
    return f"run.json: {name} = {str(value)[:60]!r}"


def storage_with_manifest(rng: random.Random, run: Path, world: World) -> str:
    """Point the run to a storage that has a manifest: the run's own, copied beside it."""
    content = json.loads((run / "run.json").read_text())
    content["storage_uri"] = rng.choice(
        (f"file://{world.outside}", "file:///proc/self/cwd", f"file://{run}", f"file://{run}/base")
    )
    rewrite(run / "run.json", json.dumps(content).encode())
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["lsn"] += 100
    manifest["segments"] = [
        *manifest["segments"][:1],
        rng.choice(("../../outside/keep.txt", "segments/../x", ".profile")),
    ]
    (run / "base" / "manifest.json").write_text(json.dumps(manifest))
    return f"storage {content['storage_uri']}, with a crafted manifest"


def superseded(rng: random.Random, run: Path, world: World) -> str:
    """Name files that are to be removed: export parts long superseded."""
    path = run / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in (
        "export/../../../outside/keep.txt",
        str(world.outside / "keep.txt"),
        "export/groups-0-1.parquet",
    ):
        manifest["superseded"][name] = {"lsn": 0, "at_us": 0}
    rewrite(path, json.dumps(manifest).encode())
    if rng.random() < 0.5:
        _clear(run / "export")
        (run / "export").symlink_to(world.outside / "export")
    return "crafted superseded files"


def raw_json(rng: random.Random, run: Path, world: World) -> str:
    name = rng.choice(("run.json", "manifest.json", "driver.json", "outside.json"))
    data = rng.choice(
        (
            b"",
            b"[]",
            b"null",
            b"1e999",
            b'"x"',
            b"{",
            b"\xff\xfe",
            b"[" * 200_000,
            b'{"a":' * 100_000,
            b"\x00",
        )
    )
    rewrite(run / name, data)
    return f"{name} is {data[:20]!r}"


def catalog_cell(rng: random.Random, run: Path, world: World) -> str:
    value = _value(rng, world)
    if (
        isinstance(value, list | dict | bool)
        or value == DEEP
        or (isinstance(value, int) and not -(2**63) <= value < 2**63)
    ):
        value = rng.randbytes(16)
    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
    with closing(sqlite3.connect(run / "catalog.sqlite")) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        tables = connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
        )
        table = rng.choice(sorted(name for (name,) in tables.fetchall()))
        column = rng.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,))
    return f"catalog {table}.{column} = {str(value)[:60]!r}"


def retired_segment(rng: random.Random, run: Path, world: World) -> str:
    """Name a file of the reader as a segment that was retired long ago."""
    path = rng.choice(
        (str(world.outside / "keep.txt"), "../../outside/keep.txt", "../../home/.profile")
    )
    with closing(sqlite3.connect(run / "catalog.sqlite")) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'trigger'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(
            "UPDATE OR IGNORE segment SET path = ? WHERE retired_lsn IS NOT NULL", (path,)
        )
    return f"a retired segment is {path}"


def catalog_schema(rng: random.Random, run: Path, world: World) -> str:
    statement = rng.choice(
        (
            "DROP TABLE segment; CREATE VIEW segment AS SELECT 1 AS segment_id",
            "CREATE TRIGGER evil AFTER UPDATE ON grp BEGIN DELETE FROM trajectory; END",
            "PRAGMA user_version = 99999",
            "PRAGMA application_id = -1",
            "DELETE FROM meta",
            "CREATE TABLE extra(x); INSERT INTO extra VALUES (zeroblob(1000000))",
            "PRAGMA journal_mode = DELETE",
            "DROP TABLE trajectory",
        )
    )
    with closing(sqlite3.connect(run / "catalog.sqlite")) as connection:
        connection.executescript(statement)
    return f"catalog: {statement}"


def damaged_bytes(rng: random.Random, run: Path, world: World) -> str:
    files = sorted(
        path
        for path in run.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**24
    )
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    if data and rng.random() < 0.5:
        for _ in range(rng.choice((1, 8, 64))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    else:
        del data[rng.randrange(len(data) + 1) :]
    rewrite(path, bytes(data))
    return f"{path.relative_to(run)} has other bytes"


def parquet_content(rng: random.Random, run: Path, world: World) -> str:
    """Replace the rows of a segment or an exported table by hostile ones of the same, or of
    another, shape.
    """
    files = sorted(path for path in run.rglob("*.parquet") if path.is_file())
    path = rng.choice(files)
    table = pq.read_table(path)
    name = rng.choice(table.column_names)
    place, kind = (
        table.column_names.index(name),
        rng.choice(("dropped", "other type", "null", "text", "large")),
    )
    if kind == "dropped":
        table = table.drop_columns([name])
    else:
        values: list[Any] = {
            "other type": [{"a": 1}],
            "null": [None],
            "text": [ESCAPE + SECRET[:3]],
            "large": [2**63 - 1],
        }[kind] * len(table)
        column = pa.array(values)
        if kind != "other type" and rng.random() < 0.7:
            with suppress(pa.ArrowException):
                column = column.cast(table.schema.field(name).type)
        table = table.set_column(place, name, column)
    metadata = rng.choice(
        (table.schema.metadata, {}, {"run_id": ESCAPE, "format": "99999999999999999999"})
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    rewrite(path, sink.getvalue().to_pybytes())
    return f"{path.relative_to(run)}: column {name} {kind}"


def open_sql(rng: random.Random, run: Path, world: World) -> str:
    keep = (run / "open.sql").read_text()
    evil = rng.choice(
        (
            f"COPY (SELECT 1) TO '{world.outside}/planted.txt';",
            f"ATTACH '{world.home}/planted.db';",
            f"CREATE VIEW stolen AS SELECT * FROM read_text('{world.outside}/keep.txt');",
            f"CREATE OR REPLACE VIEW steps AS SELECT * FROM read_text('{world.outside}/keep.txt');",
            "INSTALL httpfs; LOAD httpfs;",
            "SET home_directory='/tmp';",
            f"EXPORT DATABASE '{world.outside}/dump';",
            "CREATE TABLE x AS SELECT * FROM range(100000000000);",
            "SET memory_limit='500GB';",
            "SELECT 1/0;",
            "not sql at all;",
            ESCAPE,
        )
    )
    text = rng.choice((evil, keep + "\n" + evil, evil + "\n" + keep))
    rewrite(run / "open.sql", text.encode("utf-8", "replace"))
    return f"open.sql: {evil[:60]!r}"


def config_text(rng: random.Random, run: Path, world: World) -> str:
    """Name code of the stranger, or text that a YAML reader may choke on, in both copies of the
    config.
    """
    (run / "evil_module.py").write_text(EVIL_MODULE.format(mark=str(world.outside / "planted.txt")))
    text = rng.choice(
        (
            f"env:\n  name: {run}/evil_module.py:Env\n",
            "env:\n  name: evil_module:Env\n",
            "!!python/object/apply:os.system ['touch planted']",
            "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c "
            "[*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
            "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: "
            "[*e,*e,*e,*e,*e,*e,*e,*e,*e]\n",
            "[" * 50_000,
            "algorithm: 3",
            "algorithm:\n  gamma: .nan\n",
            "algorithm: [1, 2]",
            "- 1\n- 2\n",
            "",
            "x: ${oc.env:HOME}\n",
            "learner:\n  steps: ${oc.decode:'9**9**9'}\n",
            f"model:\n  path: {world.outside}\n",
            f"source: [{world.outside}]\n",
            "endpoint:\n  url: http://127.0.0.1:1/v1\n  model: x\n",
            f"run_dir: {world.outside}\nenv:\n  name: key_room\n",
            f"env:\n  name: '{ESCAPE.encode('unicode_escape').decode()}'\n",
        )
    )
    rewrite(run / "config.yaml", text.encode())
    content = json.loads((run / "run.json").read_text())
    rewrite(run / "run.json", json.dumps({**content, "config_yaml": text}).encode())
    return f"config: {text[:60]!r}"


def driver(rng: random.Random, run: Path, world: World) -> str:
    """Name a process and a session directory of the reader, as if they were the run's."""
    pid = int((world.base / "bystander.pid").read_text())
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    content = {
        "pid": rng.choice((pid, pid, -1, 0, 2**31, "1")),
        "started_ticks": ticks,
        "host": rng.choice((socket.gethostname(), socket.gethostname(), ESCAPE)),
        "ray_session": rng.choice(
            (
                None,
                str(world.outside),
                "/proc/self/cwd",
                str(world.home),
                f"{world.base}/gigpo-ray-x",
                3,
            )
        ),
        "run": str(run.resolve()),
    }
    (world.base / "gigpo-ray-x").mkdir(exist_ok=True)
    rewrite(run / "driver.json", json.dumps(content).encode())
    return f"driver.json: {content}"


WEIGHTED: dict[Mutation, int] = {
    link: 10,
    loop: 1,
    special_file: 6,
    strange_name: 2,
    json_value: 6,
    run_field: 5,
    storage_with_manifest: 3,
    superseded: 2,
    raw_json: 2,
    catalog_cell: 8,
    retired_segment: 2,
    catalog_schema: 2,
    damaged_bytes: 4,
    parquet_content: 4,
    open_sql: 3,
    config_text: 4,
    driver: 3,
}
MUTATIONS, WEIGHTS = list(WEIGHTED), list(WEIGHTED.values())


def _with_config(text: str, run: Path) -> None:
    """Give the run a config, in both copies."""
    rewrite(run / "config.yaml", text.encode())
    content = json.loads((run / "run.json").read_text())
    rewrite(run / "run.json", json.dumps({**content, "config_yaml": text}).encode())


def _rewrite_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Write a changed table in the place of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(change(pq.read_table(path)), sink)
    rewrite(path, sink.getvalue().to_pybytes())


def _without_rewards(run: Path) -> None:
    for path in sorted((run / "segments").rglob("*.parquet")):
        _rewrite_table(path, lambda table: table.drop_columns(["reward"]))


def _with_rows_twice(run: Path) -> None:
    """Hide from the views that some trajectories were committed twice."""

    def strange(table: pa.Table) -> pa.Table:
        paths = pa.array([{"a": 1}] * len(table), pa.struct([("a", pa.int64())]))
        return table.set_column(table.column_names.index("path"), "path", paths)

    for path in sorted((run / "export").glob("excluded-*.parquet")):
        _rewrite_table(path, strange)


def _without_meta(run: Path) -> None:
    with closing(sqlite3.connect(run / "catalog.sqlite")) as connection, connection:
        connection.execute("DELETE FROM meta")


@dataclass(frozen=True, kw_only=True, slots=True)
class HandMade:
    """A change of a whole run, and the command that once answered it with a traceback."""

    change: Callable[[Path], None]
    command: tuple[str, ...]  # RUN stands for the run
    said: str  # a pattern of the error


AS_OF = ("sql", "RUN", "SELECT 1", "--as-of", "5")
BAD_SETTING = r"error: .*: algorithm\.{}.*"
BAD_ROWS = r"error: the steps of .*stranger have no advantages: .*"
HAND_MADE = {
    **{
        f"audit of {setting}": HandMade(
            change=functools.partial(_with_config, f"algorithm: {{{setting}}}"),
            command=("audit", "RUN", *more),
            said=BAD_SETTING.format(setting.partition(":")[0]),
        )
        for setting, more in {
            "gamma: .nan": (),
            "omega: -1": ("omega=0", "--against"),
            "estimator: none": (),
            "anchor_history: 9223372036854775807": (),
            "group_filter: x": ("--against", "omega=0"),
        }.items()
    },
    "evaluation with a NaN": HandMade(
        change=functools.partial(_with_config, "env: {name: key_room}\nalgorithm: {gamma: .nan}"),
        command=("evaluate", "RUN", "--trust", "--dry-run"),
        said=r"error: algorithm\.gamma=nan.*",
    ),
    "audit without rewards": HandMade(
        change=_without_rewards, command=("audit", "RUN"), said=BAD_ROWS
    ),
    "audit against, without rewards": HandMade(
        change=_without_rewards, command=("audit", "RUN", "omega=0", "--against"), said=BAD_ROWS
    ),
    "audit of rows that are there twice": HandMade(
        change=_with_rows_twice, command=("audit", "RUN"), said=BAD_ROWS
    ),
    "sql as of, without meta": HandMade(
        change=_without_meta,
        command=AS_OF,
        said=r"error: .*catalog\.sqlite cannot be read \(malformed table meta: it has no row\).*",
    ),
}

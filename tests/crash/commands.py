"""Kill commands that change a run, or make a directory from one, at any call; give them again.

Each command has a world to work in, the command as a function of that directory, and checks for
the state after a kill, the state after it was given again, and the files that it only reads.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from cli.__main__ import main
from store import Catalog, RunLayout, StoreError, export, write_open_sql
from store.errors import FormatError
from store.exchange import fork as forked
from store.exchange.dataset_import import import_selection
from store.exchange.fork import UNFINISHED, fork
from store.hashing import file_digest
from store.maintenance.fsck import CONTENTS, check
from store.maintenance.rebuild import rebuild as make_catalog
from store.reading.reader import open_run
from tests.crash import tracer
from tests.crash.checks import ONCE, EndState, Line, end_state, missing_for_readers
from tests.crash.guards import change_a_byte
from tests.crash.lab import Failed
from tests.crash.workload import Diary
from tests.support.store_damage import a_file, an_export, ask, edit
from tests.support.store_runs import fingerprint, make_run
from tests.support.store_samples import open_train_group, play

STEP = 1  # the checkpoint that is forked
READERS = "readers/"  # pins of killed readers may stay in it
# findings in a fork that was not started yet
WRITTEN_AT_A_START = ("open_sql_missing", "manifest_missing")
WORDS_OF_A_REMEDY = (
    "gigpo",
    "export it again",
    "choose another",
    "give the command again",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    prepare: Callable[[Path], object]  # makes what it works on
    # the command, as a user gives it; given again it begins anew or goes on
    act: Callable[[Path], None]
    unchanged: str  # a directory of the world that it only reads; "" if there is none
    after_kill: Callable[[Path], list[str]]  # what is wrong with what a kill left
    result: Callable[[Path], RunLayout]  # the run that it changed or made


def said(*arguments: object) -> str:
    """Run a store command and return its output. Raises StoreError if it refuses."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(argument) for argument in arguments])
    if status != 0:
        raise StoreError(f"{arguments[0]} ended with {status}: {out.getvalue()} {err.getvalue()}")
    return out.getvalue()


def run_of(world: Path) -> RunLayout:
    """Return the run that commands work on or read."""
    return RunLayout.open(world / "run")


def make_damaged_run(world: Path) -> None:
    """Make a run with five kinds of damage that repair mends."""
    layout = make_run(world / "run")
    live = "state = 'complete' AND split = 'train'"
    change_a_byte(layout.root / a_file(layout, of=live))
    (layout.root / a_file(layout, of="split = 'heldout'")).unlink()
    edit("UPDATE grp SET n_steps = n_steps + 1 WHERE state = 'stale'")(layout)
    torn = an_export(layout)
    torn.chmod(0o644)
    torn.write_bytes(torn.read_bytes()[:-9])
    layout.manifest.write_text(layout.manifest.read_text()[:-9])
    layout.open_sql.write_text(layout.open_sql.read_text()[:-2000])


def make_lost_catalog(world: Path) -> None:
    """Make a run without a catalog, and with one file that is damaged."""
    layout = make_run(world / "run")
    change_a_byte(layout.root / a_file(layout))
    layout.catalog.write_bytes(b"\0" * layout.catalog.stat().st_size)


def make_forkable_run(world: Path) -> None:
    """Make a run that has a checkpoint with its weights."""
    layout = make_run(world / "run")
    for directory in (layout.checkpoint_dir(STEP), layout.weights_dir(2)):
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"\1" * 5_000)


def make_dataset(world: Path) -> None:
    """Make an export of one run, and another run to take it in."""
    with mock.patch("store.exchange.dataset_export.PART_BYTES", 1):  # several files
        said("export", make_run(world / "theirs").root, world / "dataset")
    assert len(list((world / "dataset").rglob("*.parquet"))) > 1
    make_run(world / "run")


def make_old_copy(world: Path) -> None:
    """Make a run and a copy of it. Then the run plays on, and no longer has some of its files."""
    layout = make_run(world / "run")
    for ordinal in (7, 8, 9):  # the last export removes what the one before replaced
        with Catalog.open(layout) as catalog, mock.patch("store.reading.manifest.GRACE_S", 0):
            play(layout, catalog, open_train_group(catalog, ordinal), version=1)
            export(catalog, layout)
        if ordinal == 7:
            fetch(world)
    copied = {path.name for path in (world / "made").rglob("*.parquet")}
    assert copied - {path.name for path in layout.root.rglob("*.parquet")}


def repair(world: Path) -> None:
    """Check and repair the run."""
    said("fsck", "--repair", world / "run")


def rebuild(world: Path) -> None:
    """Rebuild the catalog; a kill at the very end leaves a whole one, which only --force
    replaces.
    """
    said("rebuild", "--force", world / "run")


def make_fork(world: Path) -> None:
    """Fork the run unless that is done, and export the fork, as `gigpo train --fork` does."""
    made = world / "made"
    if not RunLayout.exists(made):
        fork(run_of(world), made, learner_step=STEP, config_yaml="a: 2\n")
    with Catalog.open(layout := RunLayout.open(made)) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        export(catalog, layout)


def take_in(world: Path) -> None:
    """Import the dataset."""
    said("import", world / "run", world / "dataset")


def fetch(world: Path) -> None:
    """Make or update a copy of the run: one file after the other, so that all calls come again."""
    with mock.patch("store.reading.mirror.PARALLEL", 1):
        said("fetch", (world / "run").as_uri(), world / "made")


def write_dataset(world: Path) -> None:
    """Export the run, unless that is done. Parts that a killed export left are removed first, as
    the refusal says.
    """
    dest = world / "dataset"
    if (dest / "dataset.json").exists():
        return
    try:
        said("export", world / "run", dest)
    except StoreError as error:
        if "an export to it was cut short; remove it" not in f"{error}":
            raise
        shutil.rmtree(dest)
        said("export", world / "run", dest)


def refused_or_whole(world: Path) -> list[str]:
    """Check that a run whose catalog is being replaced opens with all files, or not at all."""
    layout = run_of(world)
    held = len(list(layout.segments.rglob("*.parquet")))
    try:
        with Catalog.open(layout):
            pass
    except StoreError as error:
        return _without_remedy(error)
    known = len(ask(layout, "SELECT DISTINCT path FROM segment"))
    return [] if known >= held else [f"the catalog knows {known} of {held} files"]


def opens(world: Path) -> list[str]:
    """Check that the run can be owned again at once."""
    try:
        with Catalog.open(run_of(world)):
            return []
    except StoreError as error:
        return [f"it cannot be opened: {error}"]


def all_or_nothing(world: Path) -> list[str]:
    """Check that the run opens, and has all trajectories of the dataset or none."""
    broken = opens(world)
    imported = "SELECT count(*) FROM trajectory JOIN grp USING (group_uid) WHERE split = 'imported'"
    ((n,),) = ask(run_of(world), imported)
    whole = json.loads((world / "dataset" / "dataset.json").read_text())["n_trajectories"]
    return broken if n in (0, whole) else [*broken, f"{n} of {whole} trajectories are imported"]


def no_half_fork(world: Path) -> list[str]:
    """Check that the fork is whole or absent, and its unfinished directory whole or refused."""
    made, broken = world / "made", []
    for place in (made, made.with_name(made.name + UNFINISHED)):
        if not RunLayout.exists(place):
            continue
        try:
            layout = RunLayout.open(place)
        except FormatError as error:
            broken += _without_remedy(error) + ([f"{error}"] if place == made else [])
        else:
            lines = _errors(layout) if layout.catalog.is_file() else ["there is no catalog"]
            broken += [
                f"{place.name} opens, and {line}"
                for line in lines
                if not any(code in line for code in WRITTEN_AT_A_START)
            ]
    return broken


def no_half_dataset(world: Path) -> list[str]:
    """Check that a directory without dataset.json is refused, and one with it is whole."""
    dest, taker = world / "dataset", world / "taker"
    if not dest.exists():
        return []
    RunLayout.create(taker, config_yaml="a: 1\n")
    try:
        taken = import_selection(taker, dest).n_trajectories
    except FormatError as error:
        return _without_remedy(error) + ([f"{error}"] if (dest / "dataset.json").exists() else [])
    finally:
        shutil.rmtree(taker)
    with open_run(world / "run") as reader:
        shown = reader.sql("SELECT count(*) AS n FROM trajectories")["n"][0].as_py()
    return [] if taken == shown else [f"the dataset has {taken} of {shown} trajectories"]


def no_torn_copy(world: Path) -> list[str]:
    """Check that a copy that opens has every file that its manifest names."""
    if not RunLayout.exists(copy := world / "made"):
        return []
    return missing_for_readers(RunLayout.open(copy))


def made_a_run(world: Path) -> RunLayout:
    """Return a run that was made of the copy."""
    root = world / "rebuilt"
    shutil.copytree(world / "made", root)
    make_catalog(layout := RunLayout.open(root))
    return layout


def taken_in(world: Path) -> RunLayout:
    """Return a run that was made of the exported dataset."""
    layout = RunLayout.create(world / "taker", config_yaml="a: 1\n")
    with Catalog.open(layout) as catalog:
        write_open_sql(layout, macros=(), max_staleness=4)
        export(catalog, layout)
    import_selection(layout.root, world / "dataset")
    return layout


FETCH = Command(
    prepare=lambda world: make_run(world / "run"),
    act=fetch,
    unchanged="run",
    after_kill=no_torn_copy,
    result=made_a_run,
)
COMMANDS = {
    "repair": Command(
        prepare=make_damaged_run, act=repair, unchanged="", after_kill=opens, result=run_of
    ),
    "rebuild": Command(
        prepare=make_lost_catalog,
        act=rebuild,
        unchanged="",
        after_kill=refused_or_whole,
        result=run_of,
    ),
    "fork": Command(
        prepare=make_forkable_run,
        act=make_fork,
        unchanged="run",
        after_kill=no_half_fork,
        result=lambda world: RunLayout.open(world / "made"),
    ),
    "import": Command(
        prepare=make_dataset,
        act=take_in,
        unchanged="dataset",
        after_kill=all_or_nothing,
        result=run_of,
    ),
    "export": Command(
        prepare=lambda world: make_run(world / "run"),
        act=write_dataset,
        unchanged="run",
        after_kill=no_half_dataset,
        result=taken_in,
    ),
    "fetch": FETCH,
    "fetch again": replace(FETCH, prepare=make_old_copy),
}


def act(world: str, name: str) -> None:
    """Run a command: the entry of the traced process."""
    COMMANDS[name].act(Path(world))


def fork_once(root: str, diary_path: str) -> None:
    """Fork the run, for a recording that loses power."""
    diary = Diary(Path(diary_path))
    diary.phase("fork")
    fork(
        RunLayout.open(Path(root)),
        Path(root).with_name("made"),
        learner_step=STEP,
        config_yaml="a: 2\n",
    )
    diary.done("fork")


def copy_once(root: str, diary_path: str) -> None:
    """Fork the run where the file system has no hard links."""

    def no_links(*_: object, **__: object) -> None:
        raise OSError("Invalid cross-device link")

    forked.link_file = no_links
    shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]  # plain writes, which the tracer knows
    fork_once(root, diary_path)


def forked_whole(base: Path, diary: Sequence[Line], thorough: bool) -> list[str]:
    """Check that a fork that was announced is whole after a power cut, however thorough."""
    announced = any(line.get("done") == "fork" for line in diary)
    return no_half_fork(base) + (
        ["the fork is gone"] if announced and not RunLayout.exists(base / "made") else []
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Undisturbed:
    """The calls and the result of a command that nobody kills."""

    n_calls: int
    end: EndState
    files: dict[str, str]  # of what it may not change
    kept: frozenset[str]  # digests of all segment files, wherever they were moved


def undisturbed(name: str, directory: Path) -> Undisturbed:
    """Make the command's world in `directory`/world, and run the command in a copy of it."""
    command, world, copy = COMMANDS[name], directory / "world", directory / "undisturbed"
    world.mkdir()
    command.prepare(world)
    shutil.copytree(world, copy)
    trace = tracer.run("tests.crash.commands:act", copy, name, watched=copy)
    if trace.status != 0:
        raise Failed(trace.error or f"exit {trace.status}")
    layout = command.result(copy)
    broken = _errors(layout)
    assert not broken, broken
    return Undisturbed(
        n_calls=sum(call.name != "mark" for call in trace.calls),
        end=end_state(layout.root),
        files=_files(world / command.unchanged) if command.unchanged else {},
        kept=_segment_digests(world / "run"),
    )


def kill_and_give_again(
    name: str, directory: Path, kill_at: int, expected: Undisturbed
) -> list[str]:
    """Kill the command at its `kill_at`-th call, look, give it again, and compare the end with the
    undisturbed one.
    """
    command, world = COMMANDS[name], directory / f"{name}-{kill_at}"
    shutil.copytree(directory / "world", world)
    try:
        trace = tracer.run("tests.crash.commands:act", world, name, watched=world, kill_at=kill_at)
        if trace.status != -signal.SIGKILL:
            return [f"call {kill_at} never came: {trace.error or trace.status}"]
        broken = command.after_kill(world)
        again = tracer.run("tests.crash.commands:act", world, name)
        if again.status != 0:
            return [*broken, f"given again it failed: {again.error or again.status}"]
        if command.unchanged and _files(world / command.unchanged) != expected.files:
            broken.append(f"{command.unchanged}/ was changed")
        broken += [
            f"file {digest} is lost" for digest in expected.kept - _segment_digests(world / "run")
        ]
        layout = command.result(world)
        broken += _errors(layout) + _doubled(layout)
        end = end_state(layout.root)
        return broken + [
            f"the end differs in {table}"
            for table, rows in expected.end.items()
            if rows != end[table]
        ]
    except Exception as error:  # noqa: BLE001  the border of the process: told with the number of the call
        return [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(world)


def _files(root: Path) -> dict[str, str]:
    return {
        path: digest for path, digest in fingerprint(root).items() if not path.startswith(READERS)
    }


def _segment_digests(root: Path) -> frozenset[str]:
    return frozenset(
        file_digest(path.read_bytes())
        for path in root.rglob("*.parquet")
        if "export" not in path.parts
    )


def _errors(layout: RunLayout) -> list[str]:
    return [
        f"fsck: {finding}"
        for finding in check(layout, level=CONTENTS)
        if finding.severity == "error"
    ]


def _doubled(layout: RunLayout) -> list[str]:
    counted = {
        what: Counter(value for (value,) in ask(layout, query)) for what, query in ONCE.items()
    }
    return [
        f"{what} {value} is there {n} times"
        for what, values in counted.items()
        for value, n in values.items()
        if n > 1
    ]


def _without_remedy(error: StoreError) -> list[str]:
    text = str(error)
    return (
        []
        if "\n" not in text and any(words in text for words in WORDS_OF_A_REMEDY)
        else [f"no remedy in: {text}"]
    )

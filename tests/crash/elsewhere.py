"""The workload with its files in an object store: killed at a request to it or at a change of the
catalog, then tried again; or its disk is lost with it, and it goes on from the object store alone.

Everything that speaks to the object store runs in a process that was forked for it: its client has
threads, which a fork of a process that has used one would lack.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store import Catalog, RunLayout, bring_run, write_open_sql
from store.maintenance import sweep
from store.reading import manifest
from store.storage import RemoteStorage
from tests.crash import tracer, workload
from tests.crash.checks import broken_promises, end_state, read_diary, train_on

# where in a request the owner is killed: it never arrives, or its answer does not
BEFORE, AFTER = "before", "after"
NEVER = 0
ENDED_BEFORE = "it ended before"  # the point at which it was to be killed


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """The chances to be killed that an undisturbed life has."""

    requests: int
    files: int


def live(root: str, diary_path: str, uri: str, kill_at: str, when: str) -> None:
    """Live two rounds with compaction, retention and sweeps. Be killed `when` the `kill_at`-th
    request is made, or never.
    """
    sweep.ORPHAN_GRACE_S = manifest.GRACE_S = 0.0
    workload.EXPIRED_ROUNDS, workload.ROUNDS, workload.CHECKPOINT_EVERY = 1, 2, 1
    workload.uuid.uuid4 = lambda: workload.RUN_ID
    diary = workload.Diary(Path(diary_path))
    count = _kill_at_request(int(kill_at), when)
    _note_backups(diary)
    diary.phase("create")
    exists = RunLayout.exists(Path(root))
    layout = (
        RunLayout.open(Path(root))
        if exists
        else RunLayout.create(Path(root), config_yaml="a: 1\n", storage_uri=uri)
    )
    if not layout.open_sql.exists():
        write_open_sql(layout, macros=(), max_staleness=workload.NO_BOUND)
    diary.done("create")
    workload.own(layout, diary, rounds=workload.ROUNDS)
    diary.done("requests", n=count())


def bring(root: str, diary_path: str, uri: str, kill_at: str, when: str) -> None:
    """Bring the run to an empty disk. Be killed `when` the `kill_at`-th request is made, or never."""
    count = _kill_at_request(int(kill_at), when)
    bring_run(uri, Path(root), trusts=False)
    workload.Diary(Path(diary_path)).done("requests of bring", n=count())


def _kill_at_request(kill_at: int, when: str) -> Callable[[], int]:
    """Be killed at a request of this process. Return a function that counts them."""
    count = 0
    ask = RemoteStorage._ask

    def counted(
        self: RemoteStorage, doing: str, path: str, call: Callable[[], Any], **options: Any
    ) -> Any:
        nonlocal count
        count += 1
        number = count
        if number == kill_at and when == BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return ask(self, doing, path, call, **options)
        finally:  # an answer may be that there is no such file
            if number == kill_at and when == AFTER:
                os.kill(os.getpid(), signal.SIGKILL)

    RemoteStorage._ask = counted  # type: ignore[method-assign]
    return lambda: count


def _note_backups(diary: workload.Diary) -> None:
    back_up = Catalog.back_up

    def noted(self: Catalog) -> bool:
        made = back_up(self)
        if made:
            diary.done("backup")
        return made

    Catalog.back_up = noted  # type: ignore[method-assign]


def look_at_brought(root: str, diary_path: str) -> None:
    """Raise AssertionError unless all that was acknowledged before the last backup is there, all
    trajectories that were committed since are, and it can be trained on.
    """
    diary = read_diary(Path(diary_path))
    backups = [number for number, line in enumerate(diary) if line.get("done") == "backup"]
    n_backed_up = backups[-1] + 1 if backups else 0
    later = [line for line in diary[n_backed_up:] if line.get("done") in ("commit", "manifest")]
    known = [line for line in diary[:n_backed_up] if "done" in line or "phase" in line] + later
    layout = RunLayout.open(Path(root))
    broken = broken_promises(layout.root, known, thorough=True)
    broken += train_on(layout)
    assert not broken, broken


def look(root: str, diary_path: str, expected: str) -> None:
    """Raise AssertionError if promises are broken or the end is not `expected`. Write that file if
    it is not there.
    """
    broken = broken_promises(Path(root), read_diary(Path(diary_path)), thorough=True)
    assert not broken, broken
    end = repr(sorted(end_state(Path(root)).items()))
    if not Path(expected).exists():
        Path(expected).write_text(end)
    assert Path(expected).read_text() == end, "the end differs"


def undisturbed(directory: Path, uri: str) -> Calls:
    """Live once without a kill, and write down how it ends."""
    root, diary = directory / "undisturbed" / "run", directory / "undisturbed.diary"
    root.parent.mkdir()
    trace = tracer.run(
        "tests.crash.elsewhere:live",
        root,
        diary,
        uri,
        NEVER,
        BEFORE,
        watched=root.parent,
        marks=diary,
    )
    assert trace.status == 0, trace.error
    seen = tracer.run("tests.crash.elsewhere:look", root, diary, directory / "end")
    assert seen.status == 0, seen.error
    (requests,) = [line["n"] for line in read_diary(diary) if line.get("done") == "requests"]
    return Calls(requests=requests, files=sum(call.name != "mark" for call in trace.calls))


def kill_at_request(directory: Path, uri: str, number: int, when: str) -> str:
    """Kill the owner at that request and try again; return what is wrong, "" if nothing is."""
    root, diary = _place(directory, f"request-{number}-{when}")
    killed = tracer.run("tests.crash.elsewhere:live", root, diary, uri, number, when)
    return _tried_again(directory, uri, root, diary, killed)


def kill_at_call(directory: Path, uri: str, number: int) -> str:
    """Kill the owner at that change of a file beneath the run directory, and try again; return what
    is wrong.
    """
    root, diary = _place(directory, f"call-{number}")
    killed = tracer.run(
        "tests.crash.elsewhere:live",
        root,
        diary,
        uri,
        NEVER,
        BEFORE,
        watched=root.parent,
        marks=diary,
        kill_at=number,
    )
    return _tried_again(directory, uri, root, diary, killed)


def lose_disk_at_request(
    directory: Path, uri: str, number: int, when: str, *, bring_number: int
) -> str:
    """Kill the owner at a request and lose its disk. Bring the run to another disk, killed at a
    request too, and again. Return what is wrong, "" if nothing is.
    """
    root, diary = _place(directory, f"lost-{number}-{when}")
    killed = tracer.run("tests.crash.elsewhere:live", root, diary, uri, number, when)
    if killed.status != -signal.SIGKILL:
        return killed.error or ENDED_BEFORE
    shutil.rmtree(root)
    if not any(line.get("done") == "create" for line in read_diary(diary)):
        return ""  # there may be no run yet
    elsewhere = root.with_name("elsewhere")
    for kill_at in (bring_number, NEVER):
        brought = tracer.run("tests.crash.elsewhere:bring", elsewhere, diary, uri, kill_at, when)
        if kill_at != NEVER and brought.status != -signal.SIGKILL:
            return f"request {kill_at} of bring never came: {brought.error or brought.status}"
    if brought.status != 0:
        return f"it was not brought: {brought.error or brought.status}"
    seen = tracer.run("tests.crash.elsewhere:look_at_brought", elsewhere, diary)
    shutil.rmtree(elsewhere)
    return "" if seen.status == 0 else seen.error or f"{seen.status}"


def _place(directory: Path, name: str) -> tuple[Path, Path]:
    (directory / name).mkdir()
    return directory / name / "run", directory / f"{name}.diary"


def _tried_again(directory: Path, uri: str, root: Path, diary: Path, killed: tracer.Trace) -> str:
    if killed.status != -signal.SIGKILL:
        return killed.error or ENDED_BEFORE
    again = tracer.run("tests.crash.elsewhere:live", root, diary, uri, NEVER, BEFORE)
    if again.status != 0:
        return f"the retry failed: {again.error or again.status}"
    seen = tracer.run("tests.crash.elsewhere:look", root, diary, directory / "end")
    shutil.rmtree(root)
    return "" if seen.status == 0 else seen.error or f"{seen.status}"

"""The workload with its files in an object store: killed at a request to it or at a change of the
catalog, then tried again.

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

from store import RunLayout, write_open_sql
from store.maintenance import sweep
from store.reading import manifest
from store.storage import RemoteStorage
from tests.crash import tracer, workload
from tests.crash.checks import broken_promises, end_state, read_diary

# where in a request the owner is killed: it never arrives, or its answer does not
BEFORE, AFTER = "before", "after"
NEVER = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """How many chances to be killed an undisturbed life has."""

    requests: int
    files: int


def live(root: str, diary_path: str, uri: str, kill_at: str, when: str) -> None:
    """Live two rounds with compaction, retention and sweeps. Be killed `when` the `kill_at`-th
    request is made, or never.
    """
    sweep.ORPHAN_GRACE_S = manifest.GRACE_S = 0.0
    workload.EXPIRED_ROUNDS, workload.ROUNDS, workload.CHECKPOINT_EVERY = 1, 2, 1
    workload.uuid.uuid4 = lambda: workload.RUN_ID
    diary, count = workload.Diary(Path(diary_path)), 0
    ask = RemoteStorage._ask

    def counted(
        self: RemoteStorage, doing: str, path: str, call: Callable[[], Any], **options: Any
    ) -> Any:
        nonlocal count
        count += 1
        number = count
        if number == int(kill_at) and when == BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = ask(self, doing, path, call, **options)
        if number == int(kill_at) and when == AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    RemoteStorage._ask = counted  # type: ignore[method-assign]
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
    diary.done("requests", n=count)


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


def _place(directory: Path, name: str) -> tuple[Path, Path]:
    (directory / name).mkdir()
    return directory / name / "run", directory / f"{name}.diary"


def _tried_again(directory: Path, uri: str, root: Path, diary: Path, killed: tracer.Trace) -> str:
    if killed.status != -signal.SIGKILL:
        return f"it was not killed: {killed.error or killed.status}"
    again = tracer.run("tests.crash.elsewhere:live", root, diary, uri, NEVER, BEFORE)
    if again.status != 0:
        return f"the retry failed: {again.error or again.status}"
    seen = tracer.run("tests.crash.elsewhere:look", root, diary, directory / "end")
    shutil.rmtree(root)
    return "" if seen.status == 0 else seen.error or f"{seen.status}"

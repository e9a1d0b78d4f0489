"""Kill a run at system calls of its whole life, recover and retry: nothing is lost or doubled."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from tests.crash.checks import broken_promises, end_state, read_diary
from tests.crash.lab import (
    WORKERS,
    kill_and_retry,
    kill_anywhere,
    phases,
    record,
    run_workload,
    scratch,
    workers,
)

# How many system calls a run is killed at, each in a life of its own. They are spread over the
# phases, so it is at least the number of those, 12. There is no "all". `make test-crash`: 240.
POINTS = int(os.environ.get("STORE_CRASH_POINTS", "12"))
# Phases of the workload; each is hit. The store promises the first eight; a run needs the others
# besides.
PHASES = ("write", "commit", "claim", "settle", "manifest", "compaction", "retention", "recovery")
OTHER_PHASES = ("sweep", "open", "ledger", "create")
KILLED_AGAIN_EVERY = 4  # of the points: the first start afterwards is killed too, while it recovers
RECOVERY_CALLS = 120


# A run is looked at after every n-th call that changes its files. `make test-crash`: after each.
LOOK_EVERY = int(os.environ.get("STORE_LOOK_EVERY", "20"))


def spread(phase_of: Sequence[str], n: int) -> list[int]:
    """Return `n` numbers of calls, from 1, in order.

    Each phase has equally many of them, evenly over it. The rest are evenly over all calls.
    """
    chosen: set[int] = set()
    names = PHASES + OTHER_PHASES
    for name in names:
        calls = [number for number, phase in enumerate(phase_of, start=1) if phase == name]
        chosen.update(evenly(calls, n // len(names)))
    rest = [number for number in range(1, len(phase_of) + 1) if number not in chosen]
    return sorted(chosen | set(evenly(rest, n - len(chosen))))


def evenly(items: Sequence[int], n: int) -> list[int]:
    """Return `n` of the items, or all: the middle of each of n equal parts."""
    n = min(n, len(items))
    return [items[(2 * part + 1) * len(items) // (2 * n)] for part in range(n)]


def test_killed_anywhere_a_run_recovers_and_ends_as_if_it_had_not_been() -> None:
    pool = workers()
    with scratch() as directory:
        calls = pool.submit(record, directory / "dry").result().calls
        phase_of = [phase for phase in phases(calls) if phase]  # remarks are no calls of the store
        end = pool.submit(end_state, directory / "dry" / "run").result()
        points = [[number] for number in spread(phase_of, POINTS)]
        for number, kills in enumerate(points):
            if number % KILLED_AGAIN_EVERY == 0:
                kills.append(1 + number * RECOVERY_CALLS // len(points))
        killed = [
            pool.submit(kill_and_retry, directory / f"{kills[0]}", kills, end) for kills in points
        ]
        outcomes = [
            (kills, outcome.result()) for kills, outcome in zip(points, killed, strict=True)
        ]
    bad = [(kills, outcome.phases, outcome.broken) for kills, outcome in outcomes if outcome.broken]
    hit = Counter(phase for _, outcome in outcomes for phase in outcome.phases)
    print(
        f"{len(outcomes)} points of {len(phase_of)} calls, {hit.total()} kills: {dict(hit)}; "
        f"{len(bad)} bad"
    )
    assert bad == []
    assert len(outcomes) == POINTS and not {*PHASES, *OTHER_PHASES} - hit.keys()


def test_killed_between_any_two_writes_a_run_is_whole() -> None:
    """Each call is applied to a copy of the files, which is then what the kill would have left."""
    pool = workers()
    with scratch() as directory:
        recording = pool.submit(record, directory / "base").result()
        calls = [n for n, call in enumerate(recording.calls, start=1) if call.name != "mark"]
        points = calls[::LOOK_EVERY]
        parts = [
            pool.submit(kill_anywhere, recording, points[part::WORKERS]) for part in range(WORKERS)
        ]
        bad = [kill for part in parts for kill in part.result()]
    print(f"{len(points)} kills of {len(calls)} calls: {len(bad)} bad")
    assert bad == []


def test_an_undisturbed_run_is_whole_and_a_second_one_changes_nothing() -> None:
    pool = workers()
    with scratch() as directory:
        base = directory / "run"
        assert pool.submit(run_workload, base, traced=False).result().status == 0
        end = end_state(base / "run")
        assert {name for name, rows in end.items() if not rows} == set()
        # two groups for each of six steps; no step: null
        assert len(end["steps"]) == 12 and len(end["versions"]) == 7
        assert pool.submit(run_workload, base, traced=False).result().status == 0
        assert (
            broken_promises(base / "run", read_diary(base.with_suffix(".diary")), thorough=True)
            == []
        )
        assert end_state(base / "run") == end

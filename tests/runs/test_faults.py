"""Test what a run survives, and how it ends otherwise.

Components are killed and stopped, environments fail, and the disk is full.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from driver.run_lock import has_ended
from tests.support.fault_runs import (
    NAMED_WITHIN_S,
    SCRIPTED,
    FaultRun,
    check_nothing_lost,
    find_parts,
    processes_of,
    seen_now,
    started,
    untrained_model,
)
from tests.support.program import gigpo

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("model") / "untrained")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[FaultRun]:
    """One run that is broken again and again, and has to survive it all."""
    with started(tmp_path_factory.mktemp("faults") / "run", model, *SCRIPTED) as run:
        run.wait(
            lambda: (run.run / "open.sql").exists() and run.learner_step() >= 2,
            what="the second learner step",
        )
        yield run


def is_named(run: FaultRun, what: str, *words: str, before: int) -> Callable[[], bool]:
    """Whether a new event `what` has all these words in its detail."""
    return lambda: any(
        all(word in detail for word in words) for detail in run.events(what)[before:]
    )


@pytest.mark.parametrize(
    ("part", "how", "words"),
    [
        pytest.param(*("worker-0", signal.SIGKILL, ["worker-0", "died"]), marks=pytest.mark.faults),
        ("worker-0", signal.SIGSTOP, ["worker-0", "no sign of life"]),
        ("learner", signal.SIGKILL, ["learner", "died"]),
        pytest.param(
            *("learner", signal.SIGSTOP, ["learner", "no sign of life"]), marks=pytest.mark.faults
        ),
    ],
)
def test_a_component_that_is_killed_or_stopped_is_named_and_started_again(
    broken: FaultRun, part: str, how: signal.Signals, words: list[str]
) -> None:
    before, seen = len(broken.events("started again")), seen_now(broken)
    old = broken.part(part)
    old.send_signal(how)
    broken.wait(
        is_named(broken, "started again", *words, before=before),
        what=f"the name of {part}",
        within_s=NAMED_WITHIN_S,
    )
    broken.goes_on()
    assert has_ended(old)
    assert broken.part(part).pid != old.pid
    check_nothing_lost(broken, seen)


@pytest.mark.parametrize(
    ("how", "words"),
    [(signal.SIGKILL, ["exit code -9"]), (signal.SIGSTOP, ["did not answer within 3 s"])],
)
def test_an_environment_process_that_is_killed_or_stopped_costs_its_episodes_an_attempt(
    broken: FaultRun, how: signal.Signals, words: list[str]
) -> None:
    before = len(broken.events("episode failed"))
    broken.part("worker-0 environment")
    for process in find_parts(broken.run, "worker-0 environment"):
        process.send_signal(how)
    broken.wait(
        is_named(
            broken, "episode failed", "faulty_world", "key_room-train-", *words, before=before
        ),
        what="the name of the environment",
        within_s=NAMED_WITHIN_S,
    )
    broken.goes_on()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", ["in step '", "the door fell on the agent"]),
        ("hang", ["did not answer within 3 s"]),
        ("nonsense", ["step returned dict", "it must return a Transition"]),
        ("nan", ["reward=nan", "finite"]),
    ],
)
def test_an_environment_that_fails_once_is_named_and_its_episode_played_again(
    broken: FaultRun, fault: str, words: list[str]
) -> None:
    before, abandoned = len(broken.events("episode failed")), len(broken.events("group abandoned"))
    broken.tell(fault)
    broken.wait(
        is_named(broken, "episode failed", "key_room-train-", "member", *words, before=before),
        what="the name of the environment",
        within_s=NAMED_WITHIN_S,
    )
    broken.goes_on()
    assert len(broken.events("group abandoned")) == abandoned


def test_a_stopped_driver_stops_nobody_else(broken: FaultRun) -> None:
    broken.process.send_signal(signal.SIGSTOP)
    try:
        broken.goes_on()
        shown = gigpo("status", str(broken.run))
    finally:
        broken.process.send_signal(signal.SIGCONT)
    assert shown.returncode == 0, shown.stderr
    assert "(stopped)" in shown.stdout
    assert all(name in shown.stdout for name in ("driver", "learner", "worker-0"))
    broken.goes_on()


@pytest.mark.faults
def test_workers_join_and_leave_a_running_job(broken: FaultRun) -> None:
    assert gigpo("workers", str(broken.run), "2").returncode == 0
    farewell = "SELECT count(*) FROM events WHERE component = 'worker-1' AND what = 'gone'"
    broken.wait(
        lambda: broken.sql("SELECT count(*) FROM components WHERE name = 'worker-1'") == [(1,)],
        what="worker-1",
    )
    assert gigpo("workers", str(broken.run), "1").returncode == 0
    broken.wait(lambda: broken.sql(farewell) == [(1,)], what="worker-1's farewell")
    broken.goes_on()
    assert broken.part("worker-0").is_running()
    assert broken.find("worker-1") is None
    left = "SELECT waiting_on FROM components WHERE name = 'worker-1'"
    broken.wait(lambda: broken.sql(left) == [("gone",)], what="worker-1 shown as gone")


def test_z_stopped_from_outside_it_ends_in_order_and_leaves_nothing(broken: FaultRun) -> None:
    """Last, as it ends the run the others break."""
    seen = seen_now(broken)
    stopped = gigpo("stop", str(broken.run))
    assert stopped.returncode == 0, stopped.stderr + broken.said()
    assert "is stopped" in stopped.stdout
    code, last = broken.ended(within_s=10.0)
    assert code == 130, broken.said()
    assert (
        f"stopped in order, with a checkpoint at learner step {broken.learner_step()}; nothing that"
        in last
    ), broken.said()
    assert broken.sql("SELECT max(learner_step) FROM checkpoints") == [(broken.learner_step(),)]
    assert processes_of(broken.run) == []
    check_nothing_lost(broken, seen)
    again = gigpo("workers", str(broken.run), "2")
    assert again.returncode == 2
    assert "nobody drives" in again.stderr


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, "coordinator died"),
        (signal.SIGSTOP, "coordinator has not answered for 20 s"),
    ],
)
def test_without_a_coordinator_the_run_ends_with_the_cause_as_its_last_line(
    tmp_path: Path, model: Path, how: signal.Signals, words: str
) -> None:
    with started(tmp_path / "run", model, *SCRIPTED) as run:
        run.wait(
            lambda: (run.run / "open.sql").exists() and run.learner_step() >= 1,
            what="a learner step",
        )
        seen = seen_now(run)
        run.part("coordinator").send_signal(how)
        code, line = run.ended(within_s=60.0)
        assert code == 2
        assert words in line, run.said()
        assert processes_of(run.run) == []
    check_nothing_lost(run, seen)


@pytest.mark.faults
def test_an_environment_that_always_fails_ends_the_run_with_its_error(
    tmp_path: Path, model: Path
) -> None:
    with started(tmp_path / "run", model, *SCRIPTED) as run:
        run.tell("always raise")
        code, line = run.ended(within_s=120.0)
    assert code == 2
    assert "10 groups in a row were abandoned" in line and "the door fell on the agent" in line, (
        run.said()
    )
    log = run.run / "logs" / "worker-0.log"
    found = re.search(
        r"task train/key_room-train-\d+: .*, at .*/faulty_world.py:\d+ in \w+; log: (\S*)$", line
    )
    assert found and found[1] == str(log), run.said()
    assert "Traceback" in log.read_text() and line.count(str(log)) == 1
    assert processes_of(run.run) == []


@pytest.mark.faults
def test_after_a_killed_driver_the_same_command_finds_nothing_in_its_way(
    tmp_path: Path, model: Path
) -> None:
    with started(tmp_path / "run", model, *SCRIPTED) as run:
        run.wait(
            lambda: (run.run / "open.sql").exists() and run.learner_step() >= 1,
            what="a learner step",
        )
        seen = seen_now(run)
        left = processes_of(run.run)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        with started(tmp_path / "run", model, *SCRIPTED) as again:
            again.wait(lambda: "continues at learner step" in again.said(), what="the resume")
            assert not any(process.is_running() for process in left)
            again.goes_on()
            assert gigpo("stop", str(again.run)).returncode == 0
            check_nothing_lost(again, seen)
            assert processes_of(again.run) == []


@pytest.mark.faults
@pytest.mark.parametrize("part", ["learner", "worker-0"])
def test_a_full_disk_ends_the_run_with_the_file_it_could_not_write(
    tmp_path: Path, model: Path, part: str
) -> None:
    """Files that may not grow, which is the same error as a disk without room, and needs no disk of
    its own.
    """
    with started(tmp_path / "run", model, *SCRIPTED, "learner.checkpoint_every=3") as run:
        run.wait(
            lambda: (run.run / "open.sql").exists() and run.learner_step() >= 1,
            what="a learner step",
        )
        seen, component = seen_now(run), run.part(part)
        component.rlimit(psutil.RLIMIT_FSIZE, (1024, 1024))
        code, line = run.ended(within_s=90.0)
        time.sleep(0.5)
        assert code == 2
        assert f"{part} failed" in line and "File too large" in line, run.said()
        assert processes_of(run.run) == []
    check_nothing_lost(run, seen)


def out_of_memory(engine: psutil.Process) -> None:
    """Every allocation from now on fails, as on a machine that has no more."""
    engine.rlimit(psutil.RLIMIT_AS, (1, 1))


@pytest.mark.faults
def test_an_engine_that_is_killed_stopped_or_out_of_memory_is_started_again(
    tmp_path: Path, model: Path
) -> None:
    """The real engine. Also its weights may vanish: the next version serves."""
    with started(tmp_path / "run", model, "algorithm.group_filter=advantages") as run:
        run.wait(
            lambda: (run.run / "open.sql").exists() and run.learner_step() >= 1,
            what="a learner step",
        )
        for how, words in (
            (signal.SIGKILL, "lost its engine"),
            (signal.SIGSTOP, "has not answered for 3 s"),
            (out_of_memory, "lost its engine"),
        ):
            before, seen = len(run.events("started again")), seen_now(run)
            run.wait(lambda: run.find("worker-0 engine") is not None, what="an engine")
            engine = run.part("worker-0 engine")
            how(engine) if callable(how) else engine.send_signal(how)
            run.wait(
                is_named(run, "started again", "worker-0", words, before=before),
                what=words,
                within_s=NAMED_WITHIN_S,
            )
            run.goes_on()
            check_nothing_lost(run, seen)
        newest = sorted((run.run / "weights").iterdir())[-1]
        newest.rename(tmp_path / "vanished")
        run.goes_on()
        assert gigpo("stop", str(run.run)).returncode == 0, run.said()
        assert processes_of(run.run) == []
        check_nothing_lost(run, seen)

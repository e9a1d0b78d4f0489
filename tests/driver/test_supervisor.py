"""Test how the supervisor handles errors, restarts and stops."""

from __future__ import annotations

import itertools
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError, RayError, TaskCancelledError

import driver
from actors import (
    EngineLostError,
    EngineMemoryError,
    EngineStartError,
    PromptStuckError,
)
from cli.__main__ import main
from coordinator import Component
from driver import process_set, processes, worker_scaling
from driver import supervisor as supervisor_module
from driver.errors import ComponentFailed, Stopped
from driver.health import LOOKS
from driver.processes import LEARNER, ManagedProcess
from driver.supervisor import Supervisor
from envs import EnvironmentStuckError
from learner import RankError
from tests.support.processes import PATIENCE_S
from tests.support.supervisor_samples import (
    Actor,
    Calls,
    as_ray_passes_it_on,
    known,
    of_init,
    process,
    raised_by,
)


@pytest.mark.parametrize(
    "error",
    [
        # of a worker, heard of before the driver asked
        as_ray_passes_it_on(ExceptionGroup("loops", [ActorDiedError()])),
        # of the learner; Ray makes it an ActorDiedError as well
        as_ray_passes_it_on(ActorDiedError()),
        ActorDiedError(),
        as_ray_passes_it_on(ValueError("no such file")),
    ],
    ids=["worker's loops", "learner", "killed too", "error"],
)
def test_without_a_coordinator_nobody_else_is_to_blame(
    session: Supervisor, error: RayError
) -> None:
    session.coordinator = Calls(dead=True)  # type: ignore[assignment]
    with pytest.raises(ComponentFailed, match="coordinator died"):
        session._failed(process("worker-0"), error)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("worker-0", ActorDiedError(), "worker-0 died: its process was killed"),
        (
            "worker-0",
            as_ray_passes_it_on(ExceptionGroup("", [EngineLostError("it left")])),
            "lost its engine: it left",
        ),
        (
            "worker-0",
            as_ray_passes_it_on(ExceptionGroup("", [RayActorError()])),
            "lost touch with the coordinator",
        ),
        (
            LEARNER,
            as_ray_passes_it_on(RankError("rank 1 of the learner died")),
            "lost a rank: rank 1 of the learner died",
        ),
        (
            LEARNER,
            as_ray_passes_it_on(RankError("its GPU is full")),
            "lost a rank: its GPU is full",
        ),
        (
            "worker-0",
            as_ray_passes_it_on(ExceptionGroup("", [PromptStuckError("it loops")])),
            "worker-0 hangs: it loops",
        ),
        (
            "worker-0",
            as_ray_passes_it_on(ExceptionGroup("", [EnvironmentStuckError("it goes on")])),
            "worker-0 hangs: it goes on",
        ),
        ("worker-0", as_ray_passes_it_on(EngineMemoryError("no room")), "lost its engine: no room"),
        (
            "worker-0",
            TaskCancelledError(),
            "worker-0 was cancelled, as code of an environment can do",
        ),
    ],
)
@pytest.mark.parametrize("is_up", [True, False], ids=["while it runs", "while it starts"])
def test_who_is_lost_is_started_again(
    session: Supervisor, said: list[str], name: str, error: RayError, words: str, is_up: bool
) -> None:
    session.is_up = is_up
    failing = known(session, process(name, has_started=True))
    session._failed(failing, error)
    assert name in session.members.due and name not in session.members.processes
    calls: Any = session.coordinator
    shown, recorded = (
        [detail for what, detail in some if what == "started again"]
        for some in (calls.told, calls.recorded)
    )
    assert len(shown) == is_up and len(recorded) == (not is_up), (
        "what was said while it started is not shown once more"
    )
    assert words in (*shown, *recorded)[0]
    assert [line for line in said if words in line] == [
        f"started again: {detail}" for detail in recorded
    ]


def test_an_engine_that_was_up_before_is_started_again_whatever_its_start_says(
    session: Supervisor,
) -> None:
    failing = known(session, process("worker-0"))
    session._failed(
        failing, as_ray_passes_it_on(EngineStartError("ValueError: no such thing; its log is x"))
    )
    assert "worker-0" in session.members.due and not session.members.processes
    ((_, why), _) = session.coordinator.told  # type: ignore[attr-defined]
    assert why == "lost its engine: ValueError: no such thing; its log is x"


def test_an_engine_that_never_starts_ends_the_run_with_its_own_error(session: Supervisor) -> None:
    session.is_up = False
    with pytest.raises(
        ComponentFailed, match="worker-0 failed: EngineStartError: .* ValueError: no such thing"
    ):
        session._failed(
            process("worker-0"),
            as_ray_passes_it_on(
                EngineStartError("the vLLM engine did not start: ValueError: no such thing")
            ),
        )


def test_a_refusal_ends_the_run_with_its_cause_and_without_a_log_that_is_not_there(
    session: Supervisor,
) -> None:
    with pytest.raises(ComponentFailed) as failed:
        session._failed(process("worker-0"), of_init(raised_by(lambda: int("seven"))))
    assert (
        str(failed.value)
        == "worker-0 failed: ValueError: invalid literal for int() with base 10: 'seven'"
    )


def test_a_failed_part_names_its_log_once(session: Supervisor) -> None:
    log = session.logs / "worker-0.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    for error in (ValueError("no lamp"), ValueError(f"no lamp; log: {log}")):
        with pytest.raises(ComponentFailed) as failed:
            session._failed(process("worker-0"), as_ray_passes_it_on(error))
        assert str(failed.value) == f"worker-0 failed: ValueError: no lamp; log: {log}"


def test_a_rank_that_is_lost_too_often_ends_the_run(session: Supervisor) -> None:
    error = as_ray_passes_it_on(RankError("rank 1 of the learner died"))
    for _ in range(session.config.supervision.max_restarts):
        session._failed(process(LEARNER), error)
    with pytest.raises(
        ComponentFailed, match="learner lost a rank: rank 1 of the learner died, more than 5 times"
    ):
        session._failed(process(LEARNER), error)


def test_workers_that_are_asked_for_start_one_after_the_other(
    session: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(session, process(LEARNER, is_placed=True))
    monkeypatch.setattr(worker_scaling, "wanted_workers", lambda run: 50)
    session._follow_cluster()
    due = list(session.members.due.values())
    assert len(due) == 50
    assert [round(later - earlier, 6) for earlier, later in itertools.pairwise(due)] == [
        process_set.STAGGER_S
    ] * 49


def test_all_are_started_beside_the_coordinator_not_after_it(
    session: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    class Coming(Calls):
        def wait_until_up(self) -> None:
            happened.append("waited for")
            raise ComponentFailed("it does not come")

    def start(name: str, **given: object) -> ManagedProcess:
        happened.append(name)
        return process(name, handle=Actor())

    session.coordinator = Coming(dead=True)  # type: ignore[assignment]
    monkeypatch.setattr(processes, "start", start)
    with pytest.raises(ComponentFailed, match="it does not come"), session:
        pass
    assert happened == [LEARNER, "worker-0", "waited for"]


def test_while_it_starts_it_says_who_is_waited_for(
    session: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting takes up to a minute, of which nothing else is seen."""
    assert session._starting() == "starting the coordinator"
    for name, started in (
        (LEARNER, False),
        ("worker-0", False),
        ("worker-1", True),
        *((f"worker-{n}", False) for n in range(2, 9)),
    ):
        known(session, process(name, has_started=started))
    session.components = {
        LEARNER: Component(waiting_on="the model's start", waits_s=3.0, silent_s=0.0),
        "worker-0": Component(waiting_on="the engine's start", waits_s=3.0, silent_s=0.0),
    }
    assert session._starting() == (
        "starting learner (the model's start), worker-0 (the engine's start), "
        "worker-2 (loading libraries), worker-3 (loading libraries) and 5 more"
    )


def test_a_start_and_a_stop_that_take_long_say_so(
    session: Supervisor, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver.progress.FIRST_LINE_S", 0.0)
    monkeypatch.setattr("driver.progress.LINE_EVERY_S", 0.01)

    def wait_for_lines(n: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while len(said) < n:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    class Coming(Calls):
        def wait_until_up(self) -> None:
            wait_for_lines(3)

        def close(self) -> None:
            n = len(said)
            wait_for_lines(n + 2)

    session.coordinator = Coming()  # type: ignore[assignment]
    monkeypatch.setattr(
        processes,
        "start",
        lambda name, **given: process(name, handle=Actor(), has_started=True, is_placed=True),
    )
    monkeypatch.setattr(supervisor_module, "stop_in_order", lambda processes, **options: {})
    with session:
        n_of_start = len(said)
    assert n_of_start >= 3 and all(
        line.startswith("starting ") and line.endswith(" s so far") for line in said[:n_of_start]
    )
    assert said[n_of_start:] and all(
        line.startswith("closing the coordinator: ") for line in said[n_of_start:]
    )
    n_of_stop = len(said)
    time.sleep(0.05)
    assert len(said) == n_of_stop, "nothing is said once it has ended"


def test_a_lost_workers_last_heartbeat_is_not_held_against_the_one_after_it(
    session: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was cut off, and came back. The new one has no place yet."""
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.0)
    monkeypatch.setattr(processes, "has_process", lambda process: False)
    new = process("worker-0", is_placed=True)
    known(session, new)
    coordinator: Any = session.coordinator
    coordinator.components = {"worker-0": Component(waiting_on=None, waits_s=0.0, silent_s=99.0)}
    monkeypatch.setattr(
        Calls, "driver_tick", lambda self: SimpleNamespace(components=self.components, counts=None)
    )
    for _ in range(LOOKS):
        session._watch_once(lambda status: None)
    assert session.members.processes == {"worker-0": new} and not session.members.due
    assert coordinator.told == [("gone", "a last sign of life came after it was gone")]


def test_ctrl_c_ends_with_what_came_of_it(
    session: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "stop_in_order", lambda parts, **options: {})
    with (
        pytest.raises(Stopped, match="stopped in order, with a checkpoint at learner step 7"),
        session_entered(session),
    ):
        raise KeyboardInterrupt
    assert session.coordinator.closed  # type: ignore[attr-defined]


def test_a_second_ctrl_c_ends_at_once(session: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(parts: object, **options: object) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor_module, "stop_in_order", interrupted)
    with (
        pytest.raises(Stopped, match="ended at once, not in order: learner steps since"),
        session_entered(session),
    ):
        raise KeyboardInterrupt
    assert not session.coordinator.closed  # type: ignore[attr-defined]


def test_a_first_ctrl_c_while_a_finished_run_closes_leaves_it_in_order(
    session: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(parts: object, **options: object) -> dict[str, str]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr(supervisor_module, "stop_in_order", interrupted)
    with (
        pytest.raises(Stopped, match="stopped in order, with a checkpoint"),
        session_entered(session),
    ):
        pass
    assert session.coordinator.closed  # type: ignore[attr-defined]


def test_a_coordinator_that_dies_while_all_is_stopped_is_the_outcome(session: Supervisor) -> None:
    session.coordinator = Calls(dead=True)  # type: ignore[assignment]
    with (
        pytest.raises(Stopped, match="not stopped in order, as the coordinator died"),
        session_entered(session),
    ):
        raise KeyboardInterrupt


class session_entered:
    """A session as `with` has it, without starting anything."""

    def __init__(self, session: Supervisor) -> None:
        self.session = session

    def __enter__(self) -> Supervisor:
        return self.session

    def __exit__(self, *error: Any) -> None:
        self.session.__exit__(*error)


@pytest.mark.parametrize(
    ("stop", "arguments", "line"),
    [
        (
            Stopped("runs/a: stopped in order"),
            ["train", "c.yaml", "env.options={x: 1}"],
            "runs/a: stopped in order. Go on with:  gigpo train c.yaml 'env.options={x: 1}'",
        ),
        (
            KeyboardInterrupt(),
            ["train", "c.yaml", "--trust"],
            "stopped; no process of the run was up. Go on with:  gigpo train c.yaml\n",
        ),
        (
            KeyboardInterrupt(),
            ["train", "--resume", "a", "x=1"],
            "Go on with:  gigpo train --resume a x=1",
        ),
        (
            KeyboardInterrupt(),
            ["train", "--fork", "a@4", "run_dir=b"],
            "Go on with:  gigpo train --fork a@4 run_dir=b",
        ),
    ],
)
def test_train_says_what_came_of_ctrl_c(
    stop: KeyboardInterrupt,
    arguments: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise stop

    for name in ("settings_to_train", "settings_to_resume", "settings_to_fork"):
        monkeypatch.setattr(driver, name, interrupted)
    monkeypatch.setattr(driver.Interrupt, "listen", lambda interrupt: None)
    assert main(arguments) == 130
    assert line in capsys.readouterr().out


def test_ctrl_c_while_another_run_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "stop", interrupted)
    assert main(["stop", "runs/a"]) == 130
    assert "interrupted" in capsys.readouterr().err

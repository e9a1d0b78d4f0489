"""Test how the supervisor handles errors, restarts and stops, and which cause it names.

Test also how Ray is started, and the error of a process for which the machine has no room.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

import configs
import driver
from actors import (
    ENGINE_SOCKETS,
    EngineLostError,
    EngineMemoryError,
    EngineStartError,
    PromptStuckError,
)
from actors.prompting.prompt import PromptForm
from cli.__main__ import main
from configs import PromptConfig
from coordinator import Component, Coordinator
from driver import nodes, process_set, processes, shutdown, worker_scaling
from driver import supervisor as supervisor_module
from driver.cluster import DRIVER_DIRECTORY, cpus_of_a_process, ray_cluster
from driver.errors import DIED, ComponentFailed, Stopped, cause_of, describe_cause
from driver.health import LOOKS
from driver.processes import LEARNER, ManagedProcess, why_unplaced
from driver.run_lock import RUN_MARK, has_mark
from driver.shutdown import outcome, stop_in_order
from driver.supervisor import Supervisor
from envs import log_hint
from learner import RAY_HIDES_GPUS, RankError
from store import Catalog, RunLayout
from tests.support.processes import PATIENCE_S, children
from usage_statistics import usage_statistics_off

CONFIG = configs.from_yaml("{learner: {step_timeout_s: 500}}")


def as_ray_passes_it_on(error: BaseException) -> RayTaskError:
    """Return the error that `ray.get` raises for a call that raised `error`."""
    told = "".join(traceback.format_exception(error))
    return RayTaskError(
        "f", told, error, proctitle="ray::A", pid=1, ip="127.0.0.1"
    ).as_instanceof_cause()


def of_init(error: BaseException) -> ActorDiedError:
    """Return the error that `ray.get` raises for an actor whose `__init__` raised `error`."""
    told = "".join(traceback.format_exception(error))
    return ActorDiedError.from_task_error(
        RayTaskError("__init__", told, error, proctitle="ray::A", pid=1, ip="127.0.0.1")
    )


def raised_by(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is tested
        return error
    raise AssertionError("nothing was raised")


# causes


class UntalkativeTokenizer:
    """Stand for the tokenizer of a base model, which has no chat template."""

    eos_token_id = 0

    def apply_chat_template(self, *args: object, **options: object) -> list[int]:
        raise ValueError("tokenizer.chat_template is not set")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1]

    def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
        return ""

    def get_vocab(self) -> dict[str, int]:
        return {}


def bad_template(path: Path) -> Callable[[], object]:
    path.write_text("{system: hello}")
    return lambda: PromptForm(UntalkativeTokenizer(), PromptConfig(template=str(path)))


def locked(path: Path) -> Callable[[], object]:
    config = configs.from_yaml(f"{{run_dir: {path}, env: {{name: key_room}}}}")
    layout = RunLayout.create(path, config_yaml=configs.as_yaml(config), storage_uri="")
    owner = Catalog.open(layout)  # kept open by the closure

    def open_again() -> object:
        assert owner
        return Coordinator(config, learns=True)

    return open_again


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            lambda path: lambda: PromptForm(UntalkativeTokenizer(), PromptConfig()),
            ["ValueError: ", "chat template", "model"],
        ),
        (lambda path: bad_template(path / "mine.yaml"), ["mine.yaml"]),
        (lambda path: locked(path / "run"), ["LockedError: "]),
        (
            lambda path: (
                lambda: Coordinator(configs.from_yaml(f"{{run_dir: {path}/none}}"), learns=True)
            ),
            ["Error: ", "none"],
        ),
    ],
    ids=["chat template", "template file", "locked catalog", "no run"],
)
def test_what_an_actor_refuses_at_its_making_is_the_cause(
    tmp_path: Path, refusal: Callable[[Path], Callable[[], object]], words: list[str]
) -> None:
    error = raised_by(refusal(tmp_path))
    line = describe_cause(of_init(error))
    assert line == " ".join(f"{type(error).__name__}: {error}".split())
    assert all(word in line for word in words), line
    assert line == describe_cause(as_ray_passes_it_on(error))


def test_a_cause_is_found_through_processes_and_groups_and_kept_whole() -> None:
    cause = ValueError("line one\n  line two: use y")
    wrapped = as_ray_passes_it_on(ExceptionGroup("loops", [as_ray_passes_it_on(cause), KeyError()]))
    assert cause_of(wrapped) is cause
    assert (
        describe_cause(as_ray_passes_it_on(ActorDiedError()))
        == describe_cause(ActorDiedError())
        == DIED
    )
    assert describe_cause(wrapped) == "ValueError: line one line two: use y"
    long = describe_cause(ValueError("start " + "x" * 5000 + " remedy"))
    assert long.startswith("ValueError: start") and long.endswith("remedy") and len(long) < 1100


def test_a_log_that_is_not_there_is_not_named(tmp_path: Path) -> None:
    assert log_hint(tmp_path / "a.log") == ""
    (tmp_path / "a.log").write_text("")
    assert log_hint(tmp_path / "a.log") == f"; log: {tmp_path / 'a.log'}"


# who is to blame


def process(name: str, **changes: Any) -> ManagedProcess:
    """A process that was asked for long ago."""
    given: dict[str, Any] = {"handle": None, "where": None, "call": None, "asked_at_s": -1e9}
    return ManagedProcess(name=name, **given | changes)


class Calls:
    """A coordinator's process that answers, or is dead."""

    def __init__(self, *, dead: bool = False) -> None:
        self.is_lost, self.dead, self.told, self.closed = False, dead, [], False
        self.recorded: list[tuple[str, str]] = []  # events that nobody is shown
        self.handle = self.calls = self
        self.components: dict[str, Component] = {}

    def answer(self, reply: Any) -> Any:
        return reply

    def wait_until_up(self) -> None: ...

    def status(self) -> Any:
        if self.dead:
            self.is_lost = True
            raise ComponentFailed(f"coordinator {DIED}")
        return SimpleNamespace(components=self.components, learner_step=7)

    def checkpoints(self) -> Any:
        return (SimpleNamespace(learner_step=7),)

    def remove(self, name: str, why: str) -> None:
        self.told.append(("gone", why))

    def notice(self, what: str, detail: str) -> None:
        self.told.append((what, detail))

    def record(self, what: str, detail: str) -> None:
        self.recorded.append((what, detail))

    def close(self) -> None:
        self.closed = True

    def kill(self) -> None:
        pass


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: list[str]) -> Supervisor:
    monkeypatch.setattr(processes, "kill", lambda process: None)
    monkeypatch.setattr(supervisor_module, "CoordinatorProcess", lambda config, *, learns: Calls())
    config = configs.from_yaml(f"{{run_dir: {tmp_path}}}")
    made = Supervisor(config, "model", learns=True, say=said.append, say_stopping=lambda text: None)
    made.is_up = True
    return made


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
        ("worker-0", as_ray_passes_it_on(EngineMemoryError("no room")), "lost its engine: no room"),
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


# following a cluster


@pytest.fixture
def elastic(session: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Give a supervisor on a joined cluster, with a learner and the first two of 2 to 4 workers."""
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr(worker_scaling, "node_of", lambda handle: handle.node)
    monkeypatch.setattr(worker_scaling, "draining_nodes", dict)
    monkeypatch.setattr(processes, "has_process", lambda process: process.is_placed)
    monkeypatch.setattr(ray, "get", lambda call: None)
    workers = "{workers: {min: 2, max: 4}}"
    session.config = configs.from_yaml(f"{{run_dir: {session.config.run_dir}, actors: {workers}}}")
    session.scaling.config = session.config
    for name in (LEARNER, "worker-0", "worker-1"):
        place(session, name, node="a")
    return session


def known(session: Supervisor, process: ManagedProcess) -> ManagedProcess:
    """Have a process that the supervisor did not start."""
    session.members._processes[process.name] = process
    return process


def place(session: Supervisor, name: str, *, node: str) -> ManagedProcess:
    handle = Actor()
    handle.node = node
    given = {"handle": handle, "node": node, "call": f"run {name}"}
    return known(session, process(name, has_started=True, is_placed=True, **given))


def test_a_range_asks_for_its_most_once_the_run_has_begun(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic.is_up = False
    elastic._follow_cluster()
    assert not elastic.members.due
    elastic.is_up = True
    elastic._follow_cluster()
    assert list(elastic.members.due) == ["worker-2", "worker-3"]
    monkeypatch.setattr(worker_scaling, "wanted_workers", lambda run: 3)
    elastic._follow_cluster()
    assert list(elastic.members.due) == ["worker-2"], "gigpo workers RUN 3 comes before the range"


def test_on_one_machine_a_range_is_its_least(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    elastic._follow_cluster()
    assert not elastic.members.due


def test_a_worker_beyond_the_least_may_wait_for_a_place_in_silence(elastic: Supervisor) -> None:
    known(elastic, process("worker-2", handle=Actor()))
    elastic._look_for_place(elastic.members.processes["worker-2"])
    assert elastic.coordinator.told == []  # type: ignore[attr-defined]


def test_a_lost_learner_gets_its_place_before_more_workers(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(elastic, "worker-2", node="a")
    known(elastic, process("worker-3", handle=Actor()))
    known(elastic, process(LEARNER, handle=Actor(), asked_at_s=time.monotonic()))
    elastic._follow_cluster()
    assert list(elastic.members.processes) == [LEARNER, "worker-0", "worker-1", "worker-2"]
    assert not elastic.members.due, "worker-3 is not asked for until the learner has its place"
    elastic.members.processes[LEARNER].asked_at_s = -1e9
    monkeypatch.setattr(processes, "why_unplaced", lambda name, config: "no room")
    for _ in range(2):
        elastic._look_for_place(elastic.members.processes[LEARNER])
    asked = {name: each.handle.asked for name, each in elastic.members.processes.items()}
    assert asked == {LEARNER: [], "worker-0": [], "worker-1": [], "worker-2": ["leave"]}
    elastic.members.processes[LEARNER].is_placed = True
    elastic._follow_cluster()
    assert list(elastic.members.due) == ["worker-3"]


def test_a_worker_of_a_draining_node_leaves_in_order_and_is_asked_for_again(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving, calls = place(elastic, "worker-1", node="b"), elastic.coordinator
    monkeypatch.setattr(worker_scaling, "draining_nodes", lambda: {"b": 20.0})
    for _ in range(2):
        elastic.scaling.leave_draining_nodes()
    assert leaving.handle.asked == ["leave"]
    assert elastic.members.processes["worker-0"].handle.asked == []
    elastic._ended(leaving)  # its run
    assert leaving.handle.asked == ["leave", "close"]
    told: Any = calls.told  # type: ignore[attr-defined]
    assert told[-1] == ("gone", "left, with its node"), "its groups are free before it has closed"
    elastic._ended(leaving)  # its close
    assert "worker-1" in elastic.members.due and "worker-1" not in elastic.members.processes
    assert elastic.restarts.pause_s("worker-1") == 1.0, "the first that counts"


def test_a_worker_that_starts_on_a_draining_node_is_asked_for_again_at_once(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = place(elastic, "worker-1", node="b")
    starting.has_started = False
    monkeypatch.setattr(worker_scaling, "draining_nodes", lambda: {"b": 20.0})
    elastic.scaling.leave_draining_nodes()
    assert starting.handle.asked == [] and "worker-1" in elastic.members.due


def test_a_notice_that_is_too_short_counts_as_no_restart(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = place(elastic, "worker-1", node="b")
    monkeypatch.setattr(worker_scaling, "draining_nodes", lambda: {"b": 0.0})
    elastic.scaling.leave_draining_nodes()
    elastic._failed(leaving, ActorDiedError())
    assert "worker-1" in elastic.members.due and "worker-1" not in elastic.members.processes
    assert elastic.restarts.pause_s("worker-1") == 1.0


def test_nodes_may_drain_as_often_as_they_like(elastic: Supervisor) -> None:
    """A death after the notice counts as no restart, also the learner's, which does not leave."""
    elastic.scaling.drained_nodes.add("gone")
    for name in ("worker-1", LEARNER):
        for _ in range(elastic.config.supervision.max_restarts + 2):
            elastic.members._due.clear()
            elastic._failed(place(elastic, name, node="gone"), ActorDiedError())
            assert name in elastic.members.due
    for _ in range(elastic.config.supervision.max_restarts):
        elastic._failed(place(elastic, "worker-1", node="a"), ActorDiedError())
    with pytest.raises(ComponentFailed, match="more than 5 times"):
        elastic._failed(place(elastic, "worker-1", node="a"), ActorDiedError())


def test_a_worker_that_does_not_close_is_killed(
    elastic: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []
    monkeypatch.setattr(processes, "kill", lambda process: killed.append(process.name))
    leaving = place(elastic, "worker-1", node="a")
    elastic.scaling.leave(leaving, "left", within_s=0.0)
    elastic._ended(leaving)
    elastic.scaling.end_late_closings()
    assert killed == []
    leaving.closes_by_s = 0.0
    elastic.scaling.end_late_closings()
    assert killed == ["worker-1"] and "worker-1" not in elastic.members.processes


def test_the_number_of_workers_is_recorded_when_it_changes(elastic: Supervisor) -> None:
    elastic._tell_workers()
    elastic._tell_workers()
    place(elastic, "worker-2", node="a")
    elastic._tell_workers()
    assert elastic.coordinator.recorded == [  # type: ignore[attr-defined]
        ("workers", "2 play; 2 to 4 are wanted"),
        ("workers", "3 play; 2 to 4 are wanted"),
    ]


def test_a_part_of_each_notice_is_kept_for_the_last_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "time", SimpleNamespace(time=lambda: 1000.0))
    for notice_s, episodes_s in ((30.0, 20.0), (15.0, 5.0), (5.0, 0.0), (-3.0, 0.0), (600.0, 20.0)):
        assert nodes.grace_s(1000.0 + notice_s) == episodes_s
    assert nodes.grace_s(0.0) == 20.0, "Ray names no deadline"


# stopping


class Actor:
    """A handle whose calls are references to nothing, remembered by name."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda **given: self.asked.append(name) or f"{name} of {id(self)}"
        )


class World:
    """Ray and its clock: each call ends when it is due, or with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.ends_at_s, self.errors = 0.0, {}, {}
        monkeypatch.setattr(shutdown, "ray", self)
        monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def process(
        self, name: str, *, ends_at_s: float, error: RayError | None = None
    ) -> ManagedProcess:
        self.ends_at_s |= {f"run {name}": ends_at_s, f"where {name}": 0.0}
        self.errors[f"run {name}"] = error
        return process(
            name,
            handle=Actor(),
            where=f"where {name}",
            call=f"run {name}",
            has_started=True,
            is_placed=True,
        )

    def wait(
        self, calls: list[str], *, timeout: float, num_returns: int = 1
    ) -> tuple[list[str], list[str]]:
        done = [call for call in calls if self.ends_at_s.get(call, 0.0) <= self.now_s]
        if len(done) < num_returns:
            self.now_s += timeout
        return done, [call for call in calls if call not in done]

    def get(self, call: str) -> None:
        if error := self.errors.get(call):
            raise error


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_learner_may_finish_its_step_when_the_run_is_stopped(
    world: World, said: list[str]
) -> None:
    learner, worker = (
        world.process(LEARNER, ends_at_s=300.0),
        world.process("worker-0", ends_at_s=1.0),
    )
    coordinator = Calls()
    coordinator.components = {
        LEARNER: Component(waiting_on="learner step", waits_s=31.0, silent_s=0.0)
    }
    assert (
        stop_in_order([learner, worker], status=coordinator.status, config=CONFIG, say=said.append)
        == {}
    )
    assert learner.handle.asked == worker.handle.asked == ["stop", "close"]
    assert world.now_s >= 300.0
    assert said[0].startswith(
        "stopping for 0 s: waiting for learner (learner step, 31 s), worker-0; Ctrl-C once more"
    )
    assert "s: waiting for learner (learner step, 31 s); " in said[-1]
    assert len(set(said)) == len(said), (
        "who waits outside for news takes the same line again for silence"
    )


def test_who_does_not_stop_is_named_and_not_closed_beside_its_work(
    world: World, said: list[str]
) -> None:
    late, stuck = world.process(LEARNER, ends_at_s=501.0), world.process("worker-0", ends_at_s=61.0)
    failed = world.process(
        "worker-1", ends_at_s=1.0, error=as_ray_passes_it_on(ValueError("no disk"))
    )
    unstopped = stop_in_order(
        [late, stuck, failed], status=Calls().status, config=CONFIG, say=said.append
    )
    assert unstopped == {
        LEARNER: "it took longer than 500 s",
        "worker-0": "it took longer than 60 s",
        "worker-1": "ValueError: no disk",
    }
    assert late.handle.asked == stuck.handle.asked == failed.handle.asked == ["stop"]


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
        Calls, "status", lambda self: SimpleNamespace(components=self.components, counts=None)
    )
    for _ in range(LOOKS):
        session._watch_once(lambda status: None)
    assert session.members.processes == {"worker-0": new} and not session.members.due
    assert coordinator.told == [("gone", "a last sign of life came after it was gone")]


def test_a_learner_nobody_hears_of_is_not_waited_for(world: World, said: list[str]) -> None:
    coordinator = Calls()
    coordinator.components = {LEARNER: Component(waiting_on=None, waits_s=0.0, silent_s=99.0)}
    unstopped = stop_in_order(
        [world.process(LEARNER, ends_at_s=1e9)],
        status=coordinator.status,
        config=CONFIG,
        say=said.append,
    )
    assert "no sign of life for 99 s" in unstopped[LEARNER]
    assert world.now_s < 5.0


def test_who_has_no_process_yet_is_not_waited_for(world: World, said: list[str]) -> None:
    part = world.process("worker-0", ends_at_s=1e9)
    world.ends_at_s["where worker-0"] = 1e9
    assert stop_in_order([part], status=Calls().status, config=CONFIG, say=said.append) == {}
    assert world.now_s < 5.0


@pytest.mark.parametrize(
    ("unstopped", "learner_step", "checkpoint", "line"),
    [
        (
            {},
            7,
            7,
            "stopped in order, with a checkpoint at learner step 7; nothing that was committed is "
            "lost",
        ),
        (
            {},
            0,
            None,
            "stopped in order, before the first learner step; nothing that was committed is lost",
        ),
        (
            {LEARNER: "it took longer than 500 s"},
            7,
            5,
            "learner did not stop in order (it took longer than 500 s), learner steps after 5, the "
            "newest checkpoint, up to 7 "
            "are trained again; nothing that was committed is lost",
        ),
        (
            {LEARNER: "x"},
            2,
            None,
            "learner did not stop in order (x), learner steps (there is no checkpoint) up to 2 are "
            "trained again; nothing "
            "that was committed is lost",
        ),
    ],
)
def test_what_came_of_a_stop(
    unstopped: dict[str, str], learner_step: int, checkpoint: int | None, line: str
) -> None:
    assert outcome(unstopped, learner_step=learner_step, checkpoint=checkpoint) == line


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


# with Ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run's, with a GPU that is not there."""
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("RAY_ADDRESS", raising=False)
        environ.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 1}')
        environ.setenv("CUDA_VISIBLE_DEVICES", "0")
        environ.setenv(RUN_MARK, "not this process")  # `ray_cluster` leaves its own there
        with ray_cluster(str(tmp_path_factory.mktemp("run")), processes=1):
            yield


def test_ray_starts_without_processes_that_a_run_has_no_use_for(cluster: None) -> None:
    assert children("gcs_server", recursive=True) and children("raylet", recursive=True)
    assert not children("dashboard.py", recursive=True) + children("monitor.py", recursive=True)


def test_a_signal_to_the_drivers_process_group_is_not_for_ray(cluster: None) -> None:
    """Slurm and `timeout` signal the group. Ray would end, and with it the coordinator."""
    roots = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() in ("gcs_server", "raylet")
    ]
    assert {process.name() for process in roots} == {"gcs_server", "raylet"}
    processes = [*roots, *(child for root in roots for child in root.children(recursive=True))]
    assert os.getpgid(0) not in {os.getpgid(process.pid) for process in processes}


def test_the_raylet_and_its_workers_have_the_runs_mark(cluster: None) -> None:
    """Without it, what a killed driver left would not be removed.

    Ray's agents may overwrite their variables with their title. They end with their raylet.
    """
    (raylet,) = children("raylet", recursive=True)
    processes = [raylet, *raylet.children(recursive=True)]
    marked = [process for process in processes if not process.name().endswith("Agent")]
    mark = os.environ[RUN_MARK]
    assert [process for process in marked if not has_mark(process.pid, mark)] == []


ASKS_RAY = """
import sys
from ray._raylet import GcsClient
try:
    print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=20))
except Exception as error:
    print(type(error).__name__)
"""


def asks_ray(**token: str) -> str:
    """Ask the running Ray for all its keys from another process, and return the answer."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", ASKS_RAY, address]
    return subprocess.run(
        command, env={**environ, **token}, text=True, capture_output=True, check=False
    ).stdout.strip()


def test_a_neighbour_gets_no_answer_from_ray(cluster: None) -> None:
    """Whoever gets one can have any command run by this user."""
    wrong = asks_ray(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert wrong in ("AuthenticationError", "RpcError", "GetTimeoutError"), wrong
    path = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert asks_ray(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=path.read_text()).startswith("["), (
        "the attack itself works"
    )


def test_a_neighbour_cannot_enter_the_directory_of_the_sockets(cluster: None) -> None:
    directory = Path(os.environ[ENGINE_SOCKETS])
    sockets = [path for path in directory.rglob("*") if path.is_socket()]
    assert sockets, "Ray's are in it"
    assert (directory.stat().st_uid, directory.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    code = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("refused")
"""
    command = [sys.executable, "-c", code, str(sockets[0])]
    assert (
        subprocess.run(command, text=True, capture_output=True, check=False).stdout == "refused\n"
    )


def test_an_actor_sees_the_gpus_it_asked_for_and_no_others(cluster: None) -> None:
    class Looks:
        def gpus(self) -> str | None:
            return os.environ.get("CUDA_VISIBLE_DEVICES")

    handles = [ray.remote(Looks).options(num_cpus=0, num_gpus=n).remote() for n in (0, 0.5, 0.5)]
    try:
        assert ray.get([handle.gpus.remote() for handle in handles]) == ["", "0", "0"]
    finally:
        for handle in handles:
            ray.kill(handle)


def test_a_cluster_that_is_joined_hides_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    with ray_cluster("runs/x", processes=1):
        variables = asked["runtime_env"]["env_vars"]
    expected = {RUN_MARK, DRIVER_DIRECTORY, *RAY_HIDES_GPUS, *usage_statistics_off({})}
    assert variables.keys() == expected


def test_ray_tells_what_an_actor_refused(cluster: None) -> None:
    class Refuses:  # here, so that its process need not import this module
        def __init__(self) -> None:
            raise ValueError("the value is 7;\nuse 8")

        def where(self) -> None: ...

    refused = ray.remote(Refuses).options(num_cpus=0).remote()
    with pytest.raises(ActorDiedError) as died:
        ray.get(refused.where.remote())
    assert died.value.actor_init_failed
    assert describe_cause(died.value) == "ValueError: the value is 7; use 8"


def test_a_process_without_a_place_is_named_with_what_it_asks_for(
    cluster: None, session: Supervisor, said: list[str]
) -> None:
    class Sits:
        def where(self) -> None: ...

    session.is_up, session.config = False, configs.from_yaml("{actors: {gpus_per_worker: 1}}")
    first, second = (ray.remote(Sits).options(num_cpus=0, num_gpus=1).remote() for _ in range(2))
    ray.get(first.where.remote())
    deadline_s = time.monotonic() + PATIENCE_S
    while ray.available_resources().get("GPU"):  # what is free is counted a moment later
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    placed, unplaced = (process("worker-0", handle=handle) for handle in (first, second))
    session._look_for_place(placed)
    assert placed.is_placed and said == []
    with pytest.raises(
        ComponentFailed,
        match=r"worker-0 has had no place for .* of the 1 of the cluster 0 are free",
    ):
        session._look_for_place(unplaced)
    session.is_up = True
    session._look_for_place(unplaced)
    session._look_for_place(unplaced)
    ((what, detail),) = session.coordinator.told  # type: ignore[attr-defined]
    assert what == "no place" and "it asks for 1 GPUs" in detail


def test_in_a_joined_cluster_a_process_without_a_gpu_asks_for_a_cpu(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So none is put on a head that has none. In a private Ray more may be started later."""
    config = configs.from_yaml("{}")
    assert cpus_of_a_process() == 0
    assert why_unplaced("worker-0", config).startswith("Ray has not started a process")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere:6379")
    assert cpus_of_a_process() == 1
    assert why_unplaced("worker-0", config).startswith("it asks for 1 CPUs, and of the 1 of the")

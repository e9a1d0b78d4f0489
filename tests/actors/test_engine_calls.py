"""Test errors of calls to the engine, with a double for the engine."""

from __future__ import annotations

import asyncio
import errno
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from actors.concurrency import RequestGate
from actors.inference import vllm_engine, vllm_policy
from actors.inference.vllm_policy import VLLMPolicy
from actors.policy import EngineLostError, Prompt
from configs import ActorsConfig
from tests.support.processes import PATIENCE_S

# The words of vLLM 0.32 where an engine has no memory left.
NO_MEMORY = Exception("Call to collective_rpc method failed: Cannot allocate memory")
PROMPT = Prompt(token_ids=(1, 2), actions=None)


class BrokenEngine:
    """Raise one error from every call."""

    errored = False

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> Any:
        raise self.error

    async def get_weight_version(self) -> str:
        raise self.error

    async def pause_generation(self, **how: object) -> None:
        raise self.error

    async def form(self, *given: object) -> Any:
        raise self.error


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """List the engines whose process was stopped."""
    engines: list[object] = []

    async def stop_engine(llm: object, processes: object) -> None:
        engines.append(llm)

    monkeypatch.setattr(vllm_policy, "stop_engine", stop_engine)
    monkeypatch.setattr(vllm_policy, "tensor_shapes", lambda path: {})
    monkeypatch.setattr(vllm_policy, "load_image_form", lambda path: None)
    return engines


def policy_on(error: Exception) -> VLLMPolicy:
    policy = VLLMPolicy(
        model_path=Path("model"),
        dtype="float32",
        lora=None,
        actors=ActorsConfig(max_response_tokens=4),
        max_model_tokens=64,
        gate=RequestGate(1),
        stop_token_ids=[0],
        stop=[],
        tokenizer=None,
        log_path=Path("engine.log"),
        statistics=False,
    )
    policy._llm = policy._requests = BrokenEngine(error)  # type: ignore[assignment]
    return policy


class ClosingEngine:
    """Close as vLLM's client does: in a thread, the sockets before the reader of answers.

    The thread is slow, as on a busy machine, so the event loop sees the closed sockets meanwhile.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.answers: asyncio.Queue[Exception] = asyncio.Queue()
        self.logged: list[Exception] = []
        self.failed: list[Exception] = []
        self.output_handler = asyncio.create_task(self.read())
        self.output_processor = SimpleNamespace(propagate_error=self.failed.append)

    async def read(self) -> None:
        self.logged.append(await self.answers.get())  # vLLM logs it with a traceback

    def shutdown(self, timeout: float | None = None) -> None:
        is_seen = threading.Event()
        self.loop.call_soon_threadsafe(self.answers.put_nowait, EngineDeadError())
        for _ in range(3):  # turns of the event loop
            is_seen.clear()
            self.loop.call_soon_threadsafe(is_seen.set)
            assert is_seen.wait(PATIENCE_S)
        self.loop.call_soon_threadsafe(self.output_handler.cancel)


def test_an_engine_that_is_stopped_logs_no_traceback_and_nobody_waits_for_it() -> None:
    async def stopped() -> ClosingEngine:
        engine = ClosingEngine()
        await asyncio.sleep(0)  # its reader waits
        await vllm_engine.stop_engine(engine, [])  # type: ignore[arg-type]
        return engine

    engine = asyncio.run(stopped())
    assert engine.logged == []
    assert [type(error) for error in engine.failed] == [EngineLostError]


CALLS: dict[str, Callable[[VLLMPolicy], Awaitable[object]]] = {
    "generate": lambda policy: policy.generate(PROMPT, seed=0, temperature=1.0),
    "answers": lambda policy: policy.answers(),
    "count preemptions": lambda policy: policy.preempted(),
    "stage files": lambda policy: policy.load_weights(version=1, path=Path("v000001"), digest="ab"),
    "stage what was sent": lambda policy: policy.load_received(version=1, digest="ab"),
    "join a broadcast": lambda policy: policy.join_broadcast("127.0.0.1:1"),
    "close": lambda policy: policy.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_MEMORY, "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (EngineGenerateError("a step failed"), "a step failed"),
        (EngineDeadError(), "the vLLM engine process died"),
    ],
    ids=["no memory", "no thread", "no step", "dead"],
)
def test_whatever_a_call_to_the_engine_raises_the_engine_is_lost(
    stopped: list[object],
    call: Callable[[VLLMPolicy], Awaitable[object]],
    error: Exception,
    words: str,
) -> None:
    with pytest.raises(EngineLostError, match=words) as lost:
        asyncio.run(_awaited(call(policy_on(error))))
    assert lost.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [VLLMClientError("the prompt is too long"), ValueError("seed"), TypeError("no text")]
)
def test_a_request_that_the_engine_refuses_is_the_callers_fault(
    stopped: list[object], error: Exception
) -> None:
    with pytest.raises(type(error)) as refused:
        asyncio.run(_awaited(CALLS["generate"](policy_on(error))))
    assert refused.value is error


def test_an_engine_that_fails_in_mid_load_and_at_its_end_is_stopped_and_names_the_load(
    stopped: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_on(NO_MEMORY)

    async def verified(*given: object, **more: object) -> str:
        return "ab"

    monkeypatch.setattr(policy, "_verify", verified)
    with pytest.raises(
        EngineLostError, match="loading version 1 from v000001 failed.*Cannot allocate memory"
    ) as lost:
        asyncio.run(_awaited(CALLS["stage files"](policy)))
    assert lost.value.__cause__ is NO_MEMORY
    assert len(stopped) == 1 and policy._llm is None


@pytest.mark.parametrize(
    ("error", "is_files_fault"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False),
        (OSError("Cannot allocate memory (os error 12)"), False),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), True),
    ],
)
def test_memory_that_lacks_while_weights_are_read_is_not_blamed_on_the_file(
    error: Exception, is_files_fault: bool
) -> None:
    from actors.inference import vllm_weight_loader

    staging: Future[vllm_weight_loader.Staged] = Future()
    staging.set_exception(error)
    engine = object.__new__(vllm_weight_loader.FileWeightTransferEngine)
    engine._staging = staging
    if is_files_fault:
        assert engine.staged() == ("", str(error))
    else:
        with pytest.raises(OSError, match=re.escape(str(error))):
            engine.staged()


class ReceivingEngine:
    """Stand in for an engine of `processes`, to which the learner sends weights at the second look.

    `calls` lists what was asked of it.
    """

    errored = False

    def __init__(self, *, processes: int, arrive_whole: bool) -> None:
        parallel = SimpleNamespace(tensor_parallel_size=processes)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.processes = processes
        self.shapes = {"w": [2]} if arrive_whole else {}
        self.calls: list[str] = []
        # A call came to the first process only; then both receive, and one ends later.
        self.looks = iter(
            [[None, {}], [None, None], [self.shapes, None], [self.shapes, {"w": [2]}]]
        )
        self.may_stop = iter([[True, False], [True, True]])

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[Any]:
        self.calls.append(f"{method} {args[0]}" if method == "let_receive" else method)
        answers = next(self.looks) if method == "stage_received" else [True, True]
        if self.calls[-1] == "let_receive False":
            answers = next(self.may_stop)
        return list(answers)[: self.processes]

    async def pause_generation(self, **how: object) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")


@pytest.mark.parametrize("arrive_whole", [True, False])
@pytest.mark.parametrize("processes", [1, 2])
def test_an_engine_of_several_processes_pauses_before_it_receives(
    stopped: list[object], monkeypatch: pytest.MonkeyPatch, processes: int, arrive_whole: bool
) -> None:
    """Two groups of one GPU may not have messages at once: NCCL may deadlock."""
    engine = ReceivingEngine(processes=processes, arrive_whole=arrive_whole)
    policy = policy_on(NO_MEMORY)
    policy._llm = engine  # type: ignore[assignment]
    policy._shapes = {"w": [2]}
    replaced: list[str] = []

    async def replace(llm: object, *, source: str, **more: object) -> None:
        replaced.append(source)

    monkeypatch.setattr(vllm_policy, "_replace_weights", replace)
    monkeypatch.setattr(vllm_policy, "WeightLoad", lambda **load: load["received"])
    loaded = asyncio.run(_awaited(CALLS["stage what was sent"](policy)))
    look = "stage_received"
    if processes == 1:
        assert engine.calls == [look] * 3, "it generates meanwhile"
    else:
        assert engine.calls == [
            *(look, "pause", "let_receive True"),
            *(look, look, look),
            *("let_receive False", "let_receive False", "resume"),
        ]
    assert loaded == (True if arrive_whole else None)
    assert replaced == (["(received)"] if arrive_whole else []) and not stopped


async def _awaited(call: Awaitable[object]) -> object:
    return await call

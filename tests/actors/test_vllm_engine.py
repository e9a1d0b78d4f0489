"""Test the error of an engine that does not start, and the count of preempted requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors import EngineLostError, EngineMemoryError, EngineStartError
from actors.inference.vllm_engine import start_failures
from actors.inference.vllm_preemptions import PreemptionCounter
from configs import ConfigError

VLLMS = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
# Logs in the form that `engine_environment` asks for. The first record is an older engine's.
BEFORE = """2026-11-22 18:00:00,000 7 ERROR vllm.v1.engine.core: EngineCore failed to start.
KeyError: 'older'
"""
LOGGED = """2026-11-22 18:00:01,000 8 INFO vllm.v1.engine.core: Initializing a V1 LLM engine
2026-11-22 18:00:02,000 8 ERROR vllm.v1.engine.core: EngineCore failed to start.
Traceback (most recent call last):
  File "vllm/v1/engine/core.py", line 1, in run_engine_core
    raise RuntimeError
{error}
2026-11-22 18:00:03,000 8 INFO vllm.v1.engine.core: going down
"""
NO_MEMORY = (
    "ValueError: Free memory on device cuda:0 (9.1/79.1 GiB) on startup is less than desired GPU "
    "memory utilization "
    "(0.85, 67.2 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
    "processes."
)


def fail_to_start(log: Path, error: Exception, *, logged: str) -> None:
    with start_failures(log):
        log.write_text(logged)
        raise error


def test_settings_that_vllm_refuses_are_one_line_and_our_own_errors_pass(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with pytest.raises(EngineStartError, match="ValueError: no such method, or none; its log is"):
        fail_to_start(log, ValueError("no such method,\n or none"), logged="")
    with pytest.raises(ConfigError, match="another model"):
        fail_to_start(log, ConfigError("give another model"), logged="")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NO_MEMORY, EngineMemoryError),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB.",
            EngineMemoryError,
        ),
        ("AssertionError: Error in memory profiling. Initial free memory 7 GiB", EngineMemoryError),
        ("ValueError: No available memory for the cache blocks.", EngineStartError),
    ],
)
def test_an_engine_that_does_not_start_is_lost_with_its_own_words(
    tmp_path: Path, error: str, kind: type[Exception]
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(BEFORE)
    with pytest.raises(EngineLostError) as lost:
        fail_to_start(log, RuntimeError(VLLMS), logged=BEFORE + LOGGED.format(error=error))
    assert type(lost.value) is kind
    told = error.removeprefix("torch.")
    assert str(lost.value) == f"the vLLM engine did not start: {told}; its log is {log}"


def test_without_an_error_in_the_log_there_are_vllms_words(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="RuntimeError: Engine core initialization failed"):
        fail_to_start(tmp_path / "x", RuntimeError(VLLMS), logged="")


def test_preemptions_are_counted_from_answers_but_not_those_of_new_weights() -> None:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType

    counter = PreemptionCounter()

    def event(kind: EngineCoreEventType) -> EngineCoreEvent:
        return EngineCoreEvent.new_event(kind)

    counter.add(None)
    counter.add([event(EngineCoreEventType.SCHEDULED), event(EngineCoreEventType.PREEMPTED)])
    with counter.leave_out():
        by_weights = event(EngineCoreEventType.PREEMPTED)
        counter.add([by_weights])
    counter.add([by_weights, event(EngineCoreEventType.PREEMPTED)])  # an answer tells them late
    assert counter.take() == 2
    assert counter.take() == 0

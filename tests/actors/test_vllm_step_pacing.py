"""Test when a CPU engine's step waits for more requests, with a clock that a test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from actors.inference import vllm_step_pacing
from actors.inference.vllm_step_pacing import FORGET, STEP_EVERY_S, StepPacer, paced

MODEL_S = STEP_EVERY_S / 4  # one step of a small model


class Engine:
    """Have the parts of vLLM's EngineCoreProc that a step uses; each request needs one step."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.requests = 0  # in the scheduler
        self.arrivals: list[tuple[float, int]] = []  # (time, how many), not taken in yet
        self.steps: list[int] = []  # requests of each
        self.slept_s: list[float] = []
        self.scheduler = SimpleNamespace(get_num_unfinished_requests=lambda: self.requests)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds

    def _process_input_queue(self) -> None:
        self.requests += sum(n for at_s, n in self.arrivals if at_s <= self.now_s)
        self.arrivals = [arrival for arrival in self.arrivals if arrival[0] > self.now_s]

    def step(self) -> bool:
        self.steps.append(self.requests)
        self.requests = 0
        self.now_s += MODEL_S
        return True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(vllm_step_pacing, "time", engine)
    return engine


def test_a_step_waits_for_the_requests_that_were_there_before(engine: Engine) -> None:
    step = paced(Engine.step, max_requests=64)
    engine.requests = 8
    step(engine)
    engine.arrivals = [(engine.now_s, 1), (engine.now_s + MODEL_S, 6), (engine.now_s + 1.0, 1)]
    engine._process_input_queue()
    step(engine)
    assert engine.steps == [8, 7]
    assert engine.slept_s == [pytest.approx(STEP_EVERY_S - MODEL_S)]


@pytest.mark.parametrize(
    ("before", "now", "max_requests", "why"),
    [
        (8, 8, 64, "all are there"),
        (60, 16, 64, "a quarter of all that may come is there"),
        (1, 1, 64, "it is alone"),
        (8, 0, 64, "weights are being loaded"),
    ],
)
def test_a_step_does_not_wait_when(
    engine: Engine, before: int, now: int, max_requests: int, why: str
) -> None:
    step = paced(Engine.step, max_requests=max_requests)
    for requests in (before, now):
        engine.requests = requests
        step(engine)
    assert not engine.slept_s, why


def test_a_model_that_takes_longer_never_waits() -> None:
    pacer = StepPacer(max_requests=64)
    pacer.note_step(16, began_s=0.0)
    assert pacer.wait_s(1, now_s=STEP_EVERY_S / 2) > 0.0
    assert pacer.wait_s(1, now_s=STEP_EVERY_S) == 0.0


def test_the_last_request_soon_stops_waiting_for_others() -> None:
    pacer, now_s, n_waits = StepPacer(max_requests=64), 0.0, 0
    pacer.note_step(16, began_s=now_s)
    while wait_s := pacer.wait_s(1, now_s=now_s):
        now_s += wait_s
        pacer.note_step(1, began_s=now_s)
        n_waits += 1
    # 16 requests are forgotten when fewer than two are expected
    assert 16 * FORGET**n_waits <= 1.0 < 16 * FORGET ** (n_waits - 1)
    assert now_s < 0.3


def test_a_step_without_the_model_is_not_counted(engine: Engine) -> None:
    """vLLM steps every millisecond while generation is paused."""
    step = paced(lambda engine: engine.step() and engine.now_s < 101.0, max_requests=64)
    engine.requests = 8
    step(engine)
    engine.now_s += 1.0
    for _ in range(3):
        engine.requests = 2
        step(engine)
    assert engine.steps == [8, 2, 2, 2]
    assert not engine.slept_s

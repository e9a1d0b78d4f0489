"""Test how many threads a CPU engine gets on machines of all sizes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from actors.inference.engine_process import ENGINE_CORES, engine_environment
from configs import ActorsConfig

TINY, SMOLLM2, QWEN = 1_600_000, 538_000_000, 3_100_000_000  # bytes of weights


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Return the threads and the cores that an engine of a model gets on a machine."""

    def of(actors: ActorsConfig, *, cores: int, model: int) -> tuple[int, int]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(model)
        variables = engine_environment(actors, tmp_path, tmp_path / "engine.log")
        return int(variables["OMP_NUM_THREADS"]), len(variables[ENGINE_CORES].split(","))

    return of


@pytest.mark.parametrize(
    ("cores", "workers", "model", "expected"),
    [
        (1, 1, QWEN, 1),
        (2, 1, TINY, 1),
        (2, 1, QWEN, 1),
        (8, 1, TINY, 1),
        (8, 1, SMOLLM2, 6),
        (8, 3, SMOLLM2, 1),
        (8, 16, SMOLLM2, 1),
        (64, 1, TINY, 1),
        (64, 1, SMOLLM2, 13),
        (64, 1, QWEN, 62),
        (64, 4, QWEN, 14),
    ],
)
def test_auto_is_a_share_of_the_machine_as_far_as_the_model_gains(  # type: ignore[no-untyped-def]
    threads, cores: int, workers: int, model: int, expected: int
) -> None:
    actors = ActorsConfig(workers=workers)
    assert threads(actors, cores=cores, model=model) == (expected, cores)


def test_listed_cores_are_all_used(threads) -> None:  # type: ignore[no-untyped-def]
    actors = ActorsConfig(cpu_cores="0,2-3", workers=2)
    assert threads(actors, cores=8, model=TINY) == (3, 3)


@pytest.mark.parametrize(
    ("cores", "expected"), [("0-3", "0,2|1,3"), ("0-2", "0,2|1"), ("1", "1|1")]
)
def test_the_processes_of_an_engine_divide_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: str, expected: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    actors = ActorsConfig(cpu_cores=cores, engine={"tensor_parallel_size": 2})
    variables = engine_environment(actors, tmp_path, tmp_path / "engine.log")
    assert variables[ENGINE_CORES] == expected

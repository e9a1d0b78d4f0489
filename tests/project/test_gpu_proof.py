"""`make gpu-proof` in its tiny form, and what it does with a section that fails."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from learner.data.micro_batch import micro_batches
from tests.support.learner_samples import table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "gpu_proof"
DEADLINE_S = 1200.0  # the sections have limits of their own; this one is for a machine that hangs
SECTIONS = (
    "environment",
    "attention",
    "output_layer",
    "training",
    "throughput",
    "adapters",
    "mismatch",
    "publishing",
    "sharing",
    "transfer",
)
# Packages that the GPU machine does not have and that are not carried there.
ABSENT = {"ray", "vllm", "textworld", "gymnasium", "moto", "polars", "datasets"}


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of the command, as Python would run it."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = importlib.util.spec_from_file_location("gpu_proof_main", FOLDER / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NEEDS_CUDA = {
    f"{part}: needs CUDA"
    for part in (
        "variable-length kernel",
        "memory against the plan",
        "TF32",
        "deterministic mode",
        "copy from the device, pageable and pinned",
        "CUDA IPC",
        "captured CUDA graph",
        "pinned memory",
        "gloo on device memory",
        "NCCL of one rank, pinned memory, copies on a stream",
        "NCCL between two processes, on two GPUs",
    )
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


# Two have a second process, one looks which modules its process has loaded.
OWN_PROCESS = ("sharing", "transfer", "environment")


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in OWN_PROCESS])
def test_a_section_passes_on_a_cpu_and_claims_nothing_that_needs_a_gpu(
    proof: ModuleType, work: Path, section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: in one of its own, each would load torch and DeepSpeed again."""
    for name, value in proof.environment("cpu").items():
        monkeypatch.setenv(name, value)
    proof.run_section(Namespace(child=section, device="cpu", work=work))
    found = json.loads((work / f"{section}.json").read_text())
    assert proof.status(found, ended=None) == "passed", found
    assert set(found["skipped"]) <= NEEDS_CUDA
    if section == "throughput":
        # a CPU has no peak to compare with
        assert {figures["mfu"] for figures in found["figures"].values()} == {None}


@pytest.mark.slow
def test_a_command_keeps_the_result_of_a_section_beside_earlier_ones(tmp_path: Path) -> None:
    output = tmp_path / "proof.json"
    output.write_text('{"an earlier section": {"status": "passed"}}')
    command = [sys.executable, str(FOLDER), "all", "--device", "cpu", "--output", str(output)]
    done = subprocess.run(
        [*command, *(word for name in OWN_PROCESS for word in ("--only", name))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == {*OWN_PROCESS}
    for section in last.values():
        assert section["status"] == "passed" and section["checks_passed"]
        assert set(section["skipped"]) <= NEEDS_CUDA
    assert {*json.loads(output.read_text())} == {"an earlier section", *OWN_PROCESS}


@pytest.mark.slow
def test_all_sections_pass_on_a_cpu_and_none_claims_what_needs_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "proof.json"
    output.write_text('{"an earlier section": {"status": "passed"}}')
    command = [sys.executable, str(FOLDER), "all", "--device", "cpu", "--output", str(output)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    kept = json.loads(output.read_text())
    assert tuple(last) == SECTIONS
    assert tuple(kept) == ("an earlier section", *SECTIONS)
    assert {result["status"] for result in last.values()} == {"passed"}
    assert all(result["checks_passed"] for result in last.values())
    skipped = {line for result in last.values() for line in result["skipped"]}
    assert skipped == NEEDS_CUDA
    figures = kept["throughput"]["figures"]
    assert all(figures[name]["mfu"] is None for name in figures), (
        "a CPU has no peak to compare with"
    )


def test_a_section_that_raises_is_recorded_with_its_traceback(
    proof: ModuleType, tmp_path: Path
) -> None:
    proof.run_section(Namespace(child="no_section", device="cpu", work=tmp_path))
    found = json.loads((tmp_path / "no_section.json").read_text())
    assert proof.status(found, ended=None) == "failed"
    (error,) = found["errors"]
    assert error["error"] == "ModuleNotFoundError: No module named 'gpu_proof.no_section'"
    assert "Traceback" in error["traceback"]


def test_a_section_that_is_killed_or_hangs_is_no_pass(
    proof: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    for script, limit_s, status in (
        ("echo last words; kill -9 $$", DEADLINE_S, "died"),
        ("sleep 1000", 0.2, "took longer than 0.2 s"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        result = proof.run_child("any", device="cpu", work=tmp_path, limit_s=limit_s)
        assert result["status"] == status
        if status == "died":
            assert result["returncode"] == -9 and result["log"] == ["last words"]


def test_what_was_not_checked_has_not_passed(proof: ModuleType) -> None:
    passed, failed = {"name": "a", "passed": True}, {"name": "b", "passed": False}
    for found, status in (
        ({}, "failed"),
        ({"checks": [passed]}, "passed"),
        ({"checks": [passed, failed]}, "failed"),
        ({"checks": [passed], "errors": [{}]}, "failed"),
        ({"checks": [], "skipped": ["graph: needs CUDA"]}, "needs CUDA"),
    ):
        assert proof.status(found, ended=None) == status
    assert proof.status({"checks": [passed]}, ended="died") == "died"


def test_the_commands_stay_below_ten_minutes(proof: ModuleType) -> None:
    assert set(proof.COMMANDS) == {"correctness", "speed", "sharing"}
    assert all(sum(limits.values()) <= 570 for limits in proof.COMMANDS.values())


def test_a_gpu_that_is_asked_for_has_to_be_there(
    proof: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="sees no CUDA device"):
        proof.chosen_device("cuda")
    assert proof.chosen_device("auto") == "cpu"


def test_a_value_that_is_not_finite_is_no_success(proof: ModuleType, tmp_path: Path) -> None:
    report = proof.Report(path=tmp_path / "record.json")
    report.at_most("equal", 1.0, 1.0)
    report.at_most("above", 1.5, 1.0)
    report.at_most("nan", float("nan"), 1.0)
    report.at_most("infinite", float("-inf"), 1.0)
    assert [check["passed"] for check in report.checks] == [True, False, False, False]
    assert json.loads(report.path.read_text())["checks"][2]["value"] == "nan"


WITHOUT_THEM = f"""
import sys
from importlib.machinery import PathFinder

class Absent(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [Absent if finder is PathFinder else finder for finder in sys.meta_path]
sys.path[0:0] = [{str(ROOT)!r}, {str(FOLDER.parent)!r}]
from gpu_proof import ray_stand_in
assert ray_stand_in.install()
from gpu_proof import environment
for name in environment.MODULES:
    __import__(f"learner.{{name}}")
"""


def test_the_learner_needs_nothing_that_the_gpu_machine_lacks() -> None:
    """Ray is absent there, so its stand-in must be enough for all the learner's modules."""
    subprocess.run([sys.executable, "-c", WITHOUT_THEM], check=True, timeout=DEADLINE_S)


def test_the_stand_in_leaves_a_ray_that_is_there_alone(proof: ModuleType) -> None:
    import ray

    assert not proof.ray_stand_in.install()
    assert sys.modules["ray"] is ray


def test_operations_are_counted_by_hand(proof: ModuleType) -> None:
    from gpu_proof import flops, shapes

    shape = shapes.ModelShape(
        name="worked",
        layers=1,
        hidden=4,
        heads=2,
        kv_heads=1,
        feed_forward=3,
        vocabulary=10,
        tied=True,
    )
    assert flops.matrix_elements(shape) == 84
    # Two sequences of 3 and 1 tokens, with 2 and 1 response tokens.
    rows = table(([1, 2], [3, 4], [-1.0, -1.0], 1.0), ([5], [6], [-1.0], 1.0))
    batches = micro_batches(rows, micro_batch_tokens=100, ranks=1)
    attention = 6 * 1 * 4 * (3**2 + 1**2)
    assert flops.update_flops(shape, batches, frozen=False) == 6 * 84 * 4 + 6 * 40 * 3 + attention
    assert flops.update_flops(shape, batches, frozen=True) == 4 * 84 * 4 + 4 * 40 * 3 + attention
    assert flops.peak_tflops("NVIDIA H100 80GB HBM3") == 989.0
    assert flops.peak_tflops("NVIDIA H100 PCIe") == 756.0
    assert flops.peak_tflops("cpu") is None


def test_the_real_shapes_are_those_of_the_published_models(proof: ModuleType) -> None:
    from gpu_proof import flops, shapes

    small, large = shapes.QWEN_1_5B, shapes.QWEN_7B
    assert small == shapes.ON_GPU.real and large == shapes.ON_GPU.adapted
    assert round((flops.matrix_elements(small) + small.vocabulary * small.hidden) / 1e9, 2) == 1.54
    assert (
        round((flops.matrix_elements(large) + 2 * large.vocabulary * large.hidden) / 1e9, 2) == 7.62
    )


def test_kernel_calls_are_counted_without_hiding_the_signature(
    proof: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.11 and 2.13 differ in it, and the learner looks at it."""
    import inspect

    from gpu_proof import attention

    def kernel(query: int, *, scale: float) -> tuple[int, float]:
        return query, scale

    monkeypatch.setattr(attention.attention, "varlen_attn", kernel)
    with attention.counted_kernel() as calls:
        counting: Any = attention.attention.varlen_attn
        assert inspect.signature(counting) == inspect.signature(kernel)
        assert counting(1, scale=2.0) == (1, 2.0)
    assert len(calls) == 1 and attention.attention.varlen_attn is kernel


def test_lengths_are_unequal_and_add_up(proof: ModuleType) -> None:
    from gpu_proof import attention

    assert attention.unequal_lengths(10, 3) == [6, 3, 1]
    for n_tokens, n_sequences in ((80, 1), (80, 64), (4096, 7)):
        lengths = attention.unequal_lengths(n_tokens, n_sequences)
        assert len(lengths) == n_sequences and sum(lengths) == n_tokens and min(lengths) > 0


def test_wheels_have_the_projects_versions(proof: ModuleType) -> None:
    from gpu_proof import wheels

    assert wheels.pinned("duckdb") == "duckdb==2.0.0"
    assert wheels.pinned("deepspeed") == "deepspeed==0.19.8"
    assert wheels.pinned("blake3").startswith("blake3==1.")

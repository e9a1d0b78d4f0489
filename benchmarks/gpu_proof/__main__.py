"""Prove on one GPU what needs no vLLM and no Ray; docs/gpu.md says what each section proves.

    python benchmarks/gpu_proof correctness --device cuda      # under 10 minutes each on one H100
    python benchmarks/gpu_proof speed --device cuda
    python benchmarks/gpu_proof sharing --device cuda
    python benchmarks/gpu_proof all --device cpu               # tiny shapes, about a minute

Every section runs in a process of its own with a time limit. One that fails is recorded with its
traceback, and the next one runs. Each result is written into --output as soon as it is there; that
file keeps the sections of earlier commands. The last line printed is the command's results as JSON.
The exit status is 1 if a check failed, a section raised, was killed or ran out of time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# In place of this folder, whose module names would otherwise hide others.
sys.path[0:1] = [str(ROOT), str(HERE.parent)]

from gpu_proof import ray_stand_in  # noqa: E402
from gpu_proof.report import Report, one_line, plain, write_json  # noqa: E402
from gpu_proof.shapes import ON_CPU, ON_GPU, Proof  # noqa: E402

# Seconds that each section may take; those of a command stay below 10 minutes together. After a
# dot, one case of a section: DeepSpeed keeps memory of closed engines, so each has a process.
COMMANDS = {
    "correctness": {"environment": 90, "attention": 110, "output_layer": 80, "training": 260},
    "speed": {
        "throughput.zero1": 90,
        "throughput.plain": 40,
        "throughput.zero2": 45,
        "throughput.zero3": 50,
        "throughput.reference": 50,
        "adapters.tf32": 110,
        "adapters.float32": 80,
        "mismatch": 45,
    },
    "sharing": {"publishing": 45, "sharing": 180, "transfer": 150},
}
CPU_LIMITS = 10  # times as long: a busy CPU must not fail the proof
OUTPUT = ROOT / "runs" / "gpu_proof.json"
SHARED_MEMORY, SHARED_MEMORY_GIB = Path("/dev/shm"), 40  # a 7B model twice, and room
LOG_LINES = 20  # of a section that ended badly, kept in the record


def main() -> None:
    args = arguments()
    if args.child:
        run_section(args)
        return
    device = chosen_device(args.device)
    results = run_command(args, device=device)
    print(json.dumps(plain(results)))
    sys.exit(any(result["status"] not in ("passed", "needs CUDA") for result in results.values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=(*COMMANDS, "all"))
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--only", metavar="SECTION", action="append", help="run this section only")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON file to write into")
    parser.add_argument("--work", type=Path, help="existing directory for models and checkpoints")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the section that this process runs
    args = parser.parse_args()
    full = [section for sections in COMMANDS.values() for section in sections]
    known = list(dict.fromkeys([*full, *(section.partition(".")[0] for section in full)]))
    unknown = set(args.only or ()) - set(known)
    if unknown:
        parser.error(f"--only {unknown.pop()} is no section; the sections are {', '.join(known)}")
    return args


def chosen_device(asked: str) -> str:
    """Return "cuda" or "cpu". Exit with the reason if CUDA was asked for and is not there."""
    import torch  # here: a child sets its environment first

    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        sys.exit(
            f"torch {torch.__version__} sees no CUDA device; see nvidia-smi, or use --device cpu"
        )
    if asked != "auto":
        return asked
    return "cuda" if found else "cpu"


def run_command(args: argparse.Namespace, *, device: str) -> dict[str, dict[str, Any]]:
    """Run the sections of a command one after the other; return their results by name."""
    commands = COMMANDS.values() if args.command == "all" else (COMMANDS[args.command],)
    limits: dict[str, float] = {}
    for name, limit_s in (item for sections in commands for item in sections.items()):
        if device == "cpu":  # all cases in one process: the memory is small, starting takes longer
            name, limit_s = name.partition(".")[0], limit_s * CPU_LIMITS
        if not args.only or {name, name.partition(".")[0]} & set(args.only):
            limits[name] = limits.get(name, 0) + limit_s
    if not limits:
        sys.exit(f"--only {' '.join(args.only)} names no section of {args.command}")
    results = {}
    with work_directory(args.work) as work:
        for name, limit_s in limits.items():
            result = run_child(name, device=device, work=work, limit_s=limit_s)
            results[name] = result
            keep(args.output, name, result)
            print(line_of(name, result), flush=True)
    return {name: shortened(result) for name, result in results.items()}


def run_child(name: str, *, device: str, work: Path, limit_s: float) -> dict[str, Any]:
    """Run one section in a process group of its own; end it when its time is up."""
    record, log = work / f"{name}.json", work / f"{name}.log"
    record.unlink(missing_ok=True)
    command = [sys.executable, str(HERE), "all", "--child", name, "--device", device]
    started_s = time.monotonic()
    with log.open("w") as output:
        child = subprocess.Popen(
            [*command, "--work", str(work)],
            cwd=ROOT,
            env=environment(device),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = child.wait(limit_s)
            ended = "died" if returncode else None
        except subprocess.TimeoutExpired:
            ended, returncode = f"took longer than {limit_s} s", None
        finally:
            if child.poll() is None:
                # Not reaped, so the number is still its group's and nobody else's.
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    found = json.loads(record.read_text()) if record.is_file() else {}
    result = {
        "status": status(found, ended=ended),
        "device": device,
        "seconds": time.monotonic() - started_s,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **found,
    }
    if ended:
        lines = log.read_text(errors="replace").splitlines()
        result |= {"returncode": returncode, "log": lines[-LOG_LINES:]}
    return result


def status(found: Mapping[str, Any], *, ended: str | None) -> str:
    """Name the outcome: a section without a single check has not passed."""
    if ended:
        return ended
    if found.get("errors") or not all(check["passed"] for check in found.get("checks", ())):
        return "failed"
    if found.get("checks"):
        return "passed"
    return "needs CUDA" if found.get("skipped") else "failed"


def environment(device: str) -> dict[str, str]:
    """Return a section's environment: the device it may see, no downloads, few log lines."""
    variables = dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LOCAL_RANK": "0",
    }
    if device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return variables


def run_section(args: argparse.Namespace) -> None:
    """Run one section in this process; its record is the result, also if it raises."""
    ray_stand_in.install()
    import torch

    name, _, case = args.child.partition(".")
    report = Report(path=args.work / f"{args.child}.json")
    proof = Proof(
        device=torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu"),
        shapes=ON_GPU if args.device == "cuda" else ON_CPU,
        case=case,
        work=args.work,
        report=report,
    )
    if not proof.on_gpu:
        torch.set_num_threads(1)  # tiny shapes gain nothing, and a busy machine makes threads wait
    with report.case("section"):
        section = importlib.import_module(f"gpu_proof.{name}")
        gc.freeze()  # DeepSpeed collects garbage at every start, most of a tiny engine's time
        section.run(proof)


def keep(output: Path, name: str, result: Mapping[str, Any]) -> None:
    """Put one section's result into the file, beside those of earlier sections and commands."""
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        record = json.loads(output.read_text()) if output.exists() else {}
    except ValueError as error:
        sys.exit(
            f"{output} is no JSON file ({one_line(error)}); move it away or name another --output"
        )
    write_json(output, record | {name: result})


def line_of(name: str, result: Mapping[str, Any]) -> str:
    """Return one line for a person: outcome, time, and what failed."""
    checks = result.get("checks", [])
    failed = [check["name"] for check in checks if not check["passed"]]
    failed += [f"{error['case']}: {error['error']}" for error in result.get("errors", [])]
    text = f"{name:20s} {result['status']}, {result['seconds']:.1f} s, {len(checks)} checks"
    return "\n    ".join([text, *failed, *result.get("skipped", [])])


def shortened(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result for the last line: passed checks are a number, errors one line each."""
    checks: Sequence[Mapping[str, Any]] = result.get("checks", [])
    return {
        "status": result["status"],
        "device": result["device"],
        "seconds": result["seconds"],
        "checks_passed": sum(check["passed"] for check in checks),
        "checks_failed": [check for check in checks if not check["passed"]],
        "errors": [f"{error['case']}: {error['error']}" for error in result.get("errors", [])],
        "skipped": result.get("skipped", []),
        "figures": result.get("figures", {}),
    }


@contextmanager
def work_directory(given: Path | None) -> Iterator[Path]:
    """Yield a directory for models: in shared memory if there is room, so that no disk slows it."""
    if given is None and SHARED_MEMORY.is_dir():
        disk = os.statvfs(SHARED_MEMORY)
        if disk.f_bavail * disk.f_frsize >= SHARED_MEMORY_GIB * 2**30:
            given = SHARED_MEMORY
    with tempfile.TemporaryDirectory(prefix="gpu_proof_", dir=given) as directory:
        yield Path(directory)


if __name__ == "__main__":
    main()

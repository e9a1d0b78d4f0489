"""Prepare the process of an engine: its environment variables, and the server that forks it.

    variables = preload_vllm(actors, model_path, log_path)    # early; returns at once
    with environment(variables), engines_from_server(variables):
        llm = AsyncLLM.from_engine_args(...)

Importing vLLM takes ten seconds of a core. vLLM would start an engine afresh after the worker has
imported it, which takes twice as long. A CPU engine is therefore forked from a server process that
imports vLLM while the worker does. GPU engines start vLLM's way.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import math
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from configs import REFUSED_ARGUMENTS, ActorsConfig, least_workers, parallel_sizes
from printable import did_you_mean
from store import COMPILED, compiler_elsewhere, own_cache, weight_files
from usage_statistics import usage_statistics_off

# directory of the sockets that connect a worker with its engine; needs a short path
ENGINE_SOCKETS = "VLLM_RPC_BASE_PATH"
# vLLM obeys it only if the model has a process of its own; else engine_worker.py does
ENGINE_CORES = "VLLM_CPU_OMP_THREADS_BIND"
PROCESS_SEPARATOR = "|"  # between the lists of cores of an engine's processes
# Of a model's weights. Threads wait for each other dozens of times in a step, so a small model
# gains nothing from more of them.
BYTES_PER_THREAD = 40_000_000
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ARGUMENT_CLASSES = ("EngineArgs", "AsyncEngineArgs")
LIBRARIES = "LD_LIBRARY_PATH"
NO_FOLDER = "/nonexistent"  # Debian keeps this name free
PRELOADED = "actors.inference.fork_server_preload"  # the server imports it before it serves

_server_variables: dict[str, str] = {}  # environment variables of this process's server


def engine_fault(actors: ActorsConfig) -> str:
    """Return in one line why vLLM cannot serve `actors.gpus_per_worker`; "" if it can.

    vLLM's CUDA build has no CPU engine: it would start on GPU 0, which the run has not counted.
    Its CPU build has no GPU engine.
    """
    is_cpu_build, asked = _is_cpu_build(), f"actors.gpus_per_worker={actors.gpus_per_worker:g}"
    if is_cpu_build and actors.gpus_per_worker:
        return (
            f"{asked} asks for an engine on a GPU, and the vLLM installed here is the CPU build; "
            "set it to 0, or set up again: make setup EXTRA=cuda VENV=.venv-cuda"
        )
    if not is_cpu_build and not actors.gpus_per_worker:
        return (
            f"{asked} asks for a CPU engine, and the vLLM installed here is the CUDA build, which "
            "has none; share a GPU: actors.gpus_per_worker=0.5 learner.gpus_per_rank=0.5, or set "
            "up again: make setup EXTRA=cpu VENV=.venv-cpu"
        )
    return ""


def _is_cpu_build() -> bool:
    """Return whether vLLM is its CPU build, told from its distribution as vLLM itself does it."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return True  # only the distribution "vllm-cpu" installs the module under another name


def unknown_argument_fault(actors: ActorsConfig) -> str:
    """Return in one line which of `actors.engine` vLLM does not have; "" if it has them all.

    vLLM is not imported, which takes ten seconds: the names are read from its source. If that is
    not here or has another form, vLLM itself refuses wrong names when the engine starts.
    """
    known = _argument_names() if actors.engine else []
    for name in actors.engine:
        if known and name not in known:
            passed = [each for each in known if each not in REFUSED_ARGUMENTS]
            return (
                f"actors.engine.{name} is no argument of vLLM{did_you_mean(name, passed)}; leave "
                "it out"
            )
    return ""


def _argument_names() -> list[str]:
    """Return the names of the fields of vLLM's EngineArgs and AsyncEngineArgs."""
    package = importlib.util.find_spec("vllm")
    folders = package.submodule_search_locations if package else None
    file = Path(folders[0], "engine", "arg_utils.py") if folders else None
    if file is None or not file.is_file():
        return []
    return [
        field.target.id
        for part in ast.parse(file.read_text()).body
        if isinstance(part, ast.ClassDef) and part.name in ARGUMENT_CLASSES
        for field in part.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
    ]


def engine_environment(actors: ActorsConfig, model_path: Path, log_path: Path) -> dict[str, str]:
    """Return an engine's variables.

    Raises ValueError if the installed vLLM has no such engine. Raises StoreError if an engine on a
    GPU can have no cache of compiled code.
    """
    if fault := engine_fault(actors) or unknown_argument_fault(actors):
        raise ValueError(fault)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_config_path = log_path.with_suffix(".logging.json")
    log_config_path.write_text(json.dumps(_log_config(log_path)))
    variables = {
        "HF_HUB_OFFLINE": "1",
        **usage_statistics_off(os.environ),
        **from_installed_files(os.environ),
        "VLLM_LOGGING_CONFIG_PATH": str(log_config_path),
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if private := os.environ.get(ENGINE_SOCKETS):
        # vLLM's processes meet at a file there, also if there is only one. Who can open it can lock
        # it, and keep the engine from starting.
        variables["TMPDIR"] = private
    if actors.batch_invariant:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if actors.gpus_per_worker:
        # Raises where `keep_compiled_code` takes a temporary directory.
        compiled = {COMPILED: str(own_cache("compiled"))}
        return variables | compiled | compiler_elsewhere({**os.environ, **compiled})
    cores = engine_cores(actors.cpu_cores)
    return variables | {
        # else a CPU engine adds a third process, for the model
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # At the first request vLLM would compile the rank of a sampled token with a C++ compiler,
        # which takes 17 s. No request asks for the rank.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(engine_threads(actors, len(cores), model_path=model_path)),
        ENGINE_CORES: PROCESS_SEPARATOR.join(
            ",".join(map(str, part)) for part in cores_of_processes(actors, cores)
        ),
    }


def from_installed_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a process, and all that it starts, takes no code from the current
    directory, which may be a stranger's run.

    vLLM and Python start processes with -m and -c, which would import from there. OpenCV, which
    vLLM imports, puts its folder and a colon before LD_LIBRARY_PATH. With nothing after the colon
    every later program, such as lscpu, would load its libraries from there first.
    """
    folders = [folder for folder in environ.get(LIBRARIES, "").split(os.pathsep) if folder]
    return {"PYTHONSAFEPATH": "1", LIBRARIES: os.pathsep.join(folders or [NO_FOLDER])}


def engine_cores(cpu_cores: str) -> list[int]:
    """Return the cores of `actors.cpu_cores`: "0,2-3" is [0, 2, 3], "auto" all that are allowed."""
    allowed = sorted(os.sched_getaffinity(0))
    if cpu_cores == "auto":
        return allowed
    cores: list[int] = []
    for part in cpu_cores.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(
                f"actors.cpu_cores={cpu_cores!r} is not a list of cores; "
                'write "auto", "0" or "0,2-3"'
            )
        cores.extend(range(int(first), int(last or first) + 1))
    if not set(cores) <= set(allowed):
        raise ValueError(
            f"actors.cpu_cores={cpu_cores!r} names cores that are not there; this process has "
            f"{allowed}"
        )
    return cores


def cores_of_processes(actors: ActorsConfig, cores: Sequence[int]) -> list[Sequence[int]]:
    """Divide an engine's cores among its processes; all have all of them if there are too few."""
    n = math.prod(parallel_sizes(actors))
    return [cores[number::n] if n <= len(cores) else cores for number in range(n)]


def engine_threads(actors: ActorsConfig, n_cores: int, *, model_path: Path) -> int:
    """Return the threads of a CPU engine on `n_cores`: one for each core that is listed.

    "auto" leaves one core to learner and coordinator, and one to each worker with its environments:
    threads that have to share a core make all others wait. It takes no more than the model gains
    from. The threads are not bound, so engines do not meet on the same cores.
    """
    if actors.cpu_cores != "auto":
        return n_cores
    share = (n_cores - 1) // least_workers(actors) - 1
    gains = sum(file.stat().st_size for file in weight_files(model_path)) // BYTES_PER_THREAD
    return max(1, min(share, gains))


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables while a process starts, then restore the environment.

    Removes also what vLLM sets meanwhile (LD_PRELOAD, ...): environment processes that start later
    must not inherit it.
    """
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def preload_vllm(actors: ActorsConfig, model_path: Path, log_path: Path) -> dict[str, str]:
    """Begin to import vLLM for a CPU engine, beside this process's other work.

    Returns the environment variables of the engine. The first call starts this process's server,
    which ends with this process, and with the *thread* of that call.
    """
    variables = engine_environment(actors, model_path, log_path)
    if actors.gpus_per_worker or _server_variables:
        return variables
    _server_variables.update(variables)
    multiprocessing.set_forkserver_preload([PRELOADED])
    # Python puts the server's socket there. Its usual path may be longer than a socket's can be.
    before, tempfile.tempdir = tempfile.tempdir, os.environ.get(ENGINE_SOCKETS, tempfile.tempdir)
    try:
        with environment(variables):
            multiprocessing.forkserver.ensure_running()
    finally:
        tempfile.tempdir = before
    return variables


@contextlib.contextmanager
def engines_from_server(variables: Mapping[str, str]) -> Iterator[None]:
    """Make vLLM fork engines from the server, if it imported vLLM under the same variables."""
    if variables != _server_variables:
        yield
        return
    from vllm.v1.engine import utils

    get_mp_context = utils.get_mp_context

    def fork_server() -> Any:
        get_mp_context()  # for its side effects
        return multiprocessing.get_context("forkserver")

    utils.get_mp_context = fork_server
    try:
        yield
    finally:
        utils.get_mp_context = get_mp_context


def _log_config(log_path: Path) -> dict[str, object]:
    """Return the argument of logging.config.dictConfig for this process and the engine's."""
    levels = {
        "vllm.v1.core": "WARNING",  # three lines for every change of weights
        # reports layers without weights, or with tied ones, as "failed to load"
        "vllm.model_executor.model_loader.reload": "ERROR",
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}
        },
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(log_path), "formatter": "line"}
        },
        "loggers": {"vllm": {"handlers": ["file"], "level": "INFO", "propagate": False}}
        | {name: {"level": level} for name, level in levels.items()},
    }

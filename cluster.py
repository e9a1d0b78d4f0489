"""The Ray that a run's processes live in: a private one, or a cluster that somebody has started."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from actors import ENGINE_SOCKETS
from runs import RUN_MARK, own_ray_session

RAY_DIRECTORY = "gigpo-ray-"


@contextmanager
def ray_cluster(run_dir: str) -> Iterator[None]:
    """Joins the cluster that RAY_ADDRESS names, else starts a private one and removes everything of it at the end.

    All its processes carry RUN_MARK, by which `runs.py` knows them. SIGTERM means what it did before: Ray puts a handler of its
    own there.
    """
    handler = signal.getsignal(signal.SIGTERM)
    mark = {RUN_MARK: str(Path(run_dir).resolve())}
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        ray.init(ignore_reinit_error=True, log_to_driver=False, runtime_env={"env_vars": mark})
        signal.signal(signal.SIGTERM, handler)
        yield
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default, 15, would starve a run on a busy machine
    os.environ.update(mark)
    # Known before Ray is up, which may be interrupted while it starts; in /tmp, as names of sockets must be short.
    directory = tempfile.mkdtemp(prefix=f"{RAY_DIRECTORY}{os.getpid()}-", dir="/tmp")
    own_ray_session(Path(run_dir), directory)
    os.environ[ENGINE_SOCKETS] = directory  # an engine that is killed leaves them there, and they go with it
    try:
        try:
            ray.init(
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                configure_logging=False,
                _temp_dir=directory,
            )
        except SystemExit:  # what Ray makes of a SIGTERM while it starts
            raise KeyboardInterrupt from None
        signal.signal(signal.SIGTERM, handler)
        yield
    finally:
        ray.shutdown()
        del os.environ[ENGINE_SOCKETS]
        shutil.rmtree(directory, ignore_errors=True)


def available_gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))

"""Fork CPU engines from a server process that has imported vLLM already.

    preload(variables)                        # as early as possible; returns at once
    with engines_from_server(variables):
        llm = AsyncLLM.from_engine_args(...)

Importing vLLM takes ten seconds of a core. vLLM would start an engine afresh after the worker has
imported it, which takes twice as long. With the server both import it at the same time. GPU engines
start vLLM's way.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from actors.inference.engine_environment import ENGINE_SOCKETS, environment

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PRELOADED = "actors.inference.fork_server_preload"  # the server imports it before it serves

_server_variables: dict[str, str] = {}  # environment variables of this process's server


def preload(variables: Mapping[str, str]) -> None:
    """Start this process's server, if there is none, with additional environment variables.

    It ends with this process, and with the *thread* that calls this function.
    """
    if not _server_variables:
        _server_variables.update(variables)
        multiprocessing.set_forkserver_preload([PRELOADED])
        with environment(variables), _short_socket_path():
            multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def _short_socket_path() -> Iterator[None]:
    """Make Python put the server's socket into the run's short directory for sockets.

    The path of Python's temporary directory may be longer than that of a socket can be.
    """
    before = tempfile.tempdir
    tempfile.tempdir = os.environ.get(ENGINE_SOCKETS, before)
    try:
        yield
    finally:
        tempfile.tempdir = before


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

"""A fork server for CPU engines: it loads vLLM while the worker loads it too, and an engine is then
a copy of it.

vLLM takes ten seconds of a core to import. Its own way, in a Ray process, is to start an engine
afresh once the worker has imported it: twice the time on the clock. GPU engines keep to that way.

    begin_loading(variables)                  # as early as can be; returns at once
    with engines_from_server(variables):
        llm = AsyncLLM.from_engine_args(...)
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
LOADED = "actors.inference.fork_server_preload"  # what the server imports before it serves

_begun_with: dict[str, str] = {}  # environment variables of this process's server


def begin_loading(variables: Mapping[str, str]) -> None:
    """Starts this process's server, if there is none, with these environment variables on top of
    its own.

    It ends with this process, and with the *thread* that calls this.
    """
    if not _begun_with:
        _begun_with.update(variables)
        multiprocessing.set_forkserver_preload([LOADED])
        with environment(variables), _short_names():
            multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def _short_names() -> Iterator[None]:
    """Python puts the server's socket into its temporary directory, whose name may be longer than a
    socket's can be.
    """
    before = tempfile.tempdir
    tempfile.tempdir = os.environ.get(ENGINE_SOCKETS, before)
    try:
        yield
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def engines_from_server(variables: Mapping[str, str]) -> Iterator[None]:
    """While this lasts, vLLM starts engines from the server, if that has these variables: it loaded
    vLLM under them.
    """
    if variables != _begun_with:
        yield
        return
    from vllm.v1.engine import utils

    vllms_own = utils.get_mp_context

    def fork_server() -> Any:
        vllms_own()  # for what else it does
        return multiprocessing.get_context("forkserver")

    utils.get_mp_context = fork_server
    try:
        yield
    finally:
        utils.get_mp_context = vllms_own

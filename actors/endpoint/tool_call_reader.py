"""Read tool calls in a child process, which is ended when a reply takes too long.

    reader = ToolCallReader(tokenizer, name="auto")       # takes seconds
    content, calls = reader.read(text, tools, label="program 'a' on task train/7")
    reader.close()

Regular expressions of vLLM's parsers take exponential time for some short texts, and hold the
thread they run in. One child of this process imports vLLM, and forks a child for each reader:

    worker  --- a socket for each reader --->  fork server  -- fork -->  reader's child

The kernel ends a reader's child that has used its time. The next reply gets a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from actors.endpoint.conversation import Tools
from actors.endpoint.vllm_tool_calls import ToolCallParser
from actors.inference.engine_process import from_installed_files
from actors.prompting.chat_template import Tokenizer
from actors.prompting.messages import ToolCall
from printable import one_line, say

# Seconds of CPU. A reply of 32,000 honest characters takes milliseconds.
READ_CPU_S = 0.5
OPEN_CPU_S = 60.0  # to find the parser
ANSWER_TIMEOUT_S = 120.0  # for the same on a machine that is busy
IMPORT_TIMEOUT_S = 300.0
MORE_BYTES = 1 << 30  # of memory, for one reader's child
_LENGTH = struct.Struct("<Q")
_BOOT = """import json, socket, sys
sys.path[:] = json.loads(sys.argv[1])
from actors.endpoint.tool_call_reader import serve_forks
serve_forks(socket.socket(fileno=int(sys.argv[2])))"""


class ToolCallReader:
    """Find the parser for a tokenizer, as `ToolCallParser`, and read replies with it.

    Takes seconds. Raises ValueError. Threads may share it, and wait for one another.
    """

    def __init__(self, tokenizer: Tokenizer, *, name: str) -> None:
        self._tokenizer, self._name = pickle.dumps(tokenizer), name
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        with self._lock:
            self._open()

    def read(self, text: str, tools: Tools, *, label: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text beside the calls, and the calls. A malformed call is text.

        So is one that takes longer than READ_CPU_S; a line says so, with the label.
        """
        with self._lock:
            try:
                if self._channel is None:
                    self._open()
                content, calls = self._ask({"text": text, "tools": list(tools)})
            except (OSError, EOFError):
                self._close()
                why = f"prompt.tool_parser={self._name!r} did not read it within {READ_CPU_S:g} s"
            except ValueError as error:
                why = str(error)
            else:
                return content, tuple(ToolCall(**call) for call in calls)
        say(f"{label}: a reply of {len(text):,} characters counts as text without calls: {why}")
        return text, ()

    def close(self) -> None:
        with self._lock:
            self._close()

    def _open(self) -> None:
        self._channel = _FORK_SERVER.fork(self._tokenizer)
        try:
            fault = self._ask({"name": self._name})
        except (OSError, EOFError):
            self._close()
            raise ValueError(
                f"prompt.tool_parser={self._name!r}: no parser is found within {OPEN_CPU_S:g} s; "
                "name the one of the model's family"
            ) from None
        if fault:
            self._close()
            raise ValueError(fault)

    def _ask(self, question: dict[str, object]) -> Any:
        assert self._channel is not None
        _send(self._channel, json.dumps(question).encode())
        return json.loads(_receive(self._channel))

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None


class _ForkServer:
    """The child of this process that imports vLLM. It ends when this process does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, tokenizer: bytes) -> socket.socket:
        """Return the socket to a new child with this tokenizer. Raises ValueError."""
        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_TIMEOUT_S)
        with self._lock, theirs:
            is_new = self._channel is None
            fault = self._ask(theirs, tokenizer)
            if fault is None and not is_new:  # the server was killed since it forked the last child
                fault = self._ask(theirs, tokenizer)
        if fault == "":
            return ours
        ours.close()
        raise ValueError(fault or "the process that reads tool calls has ended; is memory short?")

    def _ask(self, theirs: socket.socket, tokenizer: bytes) -> str | None:
        """Return why no child was forked, "" if it was, and None if the server has ended."""
        if self._channel is None:
            self._channel = self._started()
        try:
            socket.send_fds(self._channel, [b"F"], [theirs.fileno()])
            _send(self._channel, tokenizer)
            return _receive(self._channel).decode()
        except (OSError, EOFError):
            self._channel.close()
            self._channel = None
            return None

    def _started(self) -> socket.socket:
        channel, theirs = socket.socketpair()
        channel.settimeout(IMPORT_TIMEOUT_S)
        path = [str(Path(__file__).resolve().parents[2]), *map(os.path.abspath, sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **from_installed_files(os.environ)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return channel


_FORK_SERVER = _ForkServer()


def serve_forks(channel: socket.socket) -> None:
    """Fork a child for each socket that comes through `channel`, until that is closed."""
    fault = ""
    try:  # here, so that each child has them already
        importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        importlib.import_module("vllm.tool_parsers")
    except Exception as error:  # noqa: BLE001  a process border: the worker raises it
        fault = f"the parsers of tool calls are vLLM's, which cannot be imported: {one_line(error)}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no child waits to be asked how it ended
    known = b""
    tokenizer: Any = None
    while True:
        flag, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not flag:
            return
        with contextlib.closing(socket.socket(fileno=descriptors[0])) as theirs:
            data = _receive(channel)
            digest = hashlib.blake2b(data).digest()
            if digest != known and not fault:  # a large one takes a second
                known, tokenizer = digest, pickle.loads(data)
            if not fault and os.fork() == 0:
                channel.close()
                with contextlib.suppress(EOFError, OSError):
                    _serve(theirs, tokenizer)
                os._exit(0)
        _send(channel, fault.encode())


def _serve(channel: socket.socket, tokenizer: Tokenizer) -> None:
    """Find the parser that the first message names, and read the text of each further one."""
    has_bytes = getattr(psutil.Process().memory_info(), "data", 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with contextlib.suppress(ValueError):  # a lower limit is there already
        resource.setrlimit(resource.RLIMIT_DATA, (has_bytes + MORE_BYTES, hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in a regular expression
    name = json.loads(_receive(channel))["name"]
    signal.setitimer(signal.ITIMER_PROF, OPEN_CPU_S)
    try:
        parser = ToolCallParser(tokenizer, name=name)
    except Exception as error:  # noqa: BLE001  a process border: the worker raises it
        _send(channel, json.dumps(str(error) or type(error).__name__).encode())
        return
    _send(channel, json.dumps("").encode())
    while True:
        asked = json.loads(_receive(channel))
        signal.setitimer(signal.ITIMER_PROF, READ_CPU_S)
        content, calls = parser.read(asked["text"], asked["tools"])
        answer = json.dumps((content, [asdict(call) for call in calls])).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(channel, answer)


def _send(channel: socket.socket, data: bytes) -> None:
    channel.sendall(_LENGTH.pack(len(data)) + data)


def _receive(channel: socket.socket) -> bytes:
    """Return the next message. Raises EOFError, and OSError, TimeoutError among them."""
    (length,) = _LENGTH.unpack(_receive_bytes(channel, _LENGTH.size))
    return _receive_bytes(channel, length)


def _receive_bytes(channel: socket.socket, n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes:
        part = channel.recv(min(n_bytes - len(data), 1 << 20))
        if not part:
            raise EOFError("the channel is closed")
        data += part
    return bytes(data)

"""Serve an OpenAI-compatible API whose answers a test decides, and record the requests."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# status, JSON (a text or bytes are sent as they are), headers
Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]


class ChatServer(ThreadingHTTPServer):
    """Names of models, or a text that is sent instead of their list."""

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Answer], models: list[str] | str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.models = answer, models
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.headers: list[str] = []  # of all requests
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            return self._send(404, {})
        names = self.server.models
        listed = {"data": [{"id": name} for name in names]} if isinstance(names, list) else names
        self._send(200, listed)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.keys.add(self.headers.get("Authorization", ""))
            answer = self.server.answer(body)
        self._send(answer[0], answer[1], *answer[2:])

    def _send(self, status: int, answer: object, headers: Mapping[str, str] | None = None) -> None:
        self.server.headers.append(str(self.headers))
        if isinstance(answer, str):
            answer = answer.encode()
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def chat_server(
    answer: Callable[[dict[str, Any]], Answer], *, models: list[str] | str | None = None
) -> Iterator[ChatServer]:
    with ChatServer(answer, ["quick-7b", "slow-70b"] if models is None else models) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def said(text: object, finish_reason: str = "stop", **more: object) -> Answer:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": finish_reason,
        **more,
    }
    return 200, {
        "object": "chat.completion",
        "choices": [choice],
        "usage": {"completion_tokens": 3},
    }


def plays_key_room(body: dict[str, Any]) -> Answer:
    """Unlock or take if possible, else go where the request's seed says."""
    listed = re.findall(r"^- (.+)$", body["messages"][-1]["content"], re.MULTILINE)
    sure = [action for action in ("unlock door", "take key") if action in listed]
    action = sure[0] if sure else random.Random(body["seed"]).choice(listed or ["wait"])
    return said(f"<action>{action}</action>")

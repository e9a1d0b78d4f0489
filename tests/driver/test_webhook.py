"""An alarm is posted once when it turns on and once when it turns off, and never delays a run."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import configs
from configs import Config, ConfigError
from driver import webhook as webhook_module
from driver.trackers.follow import follow_metrics
from driver.webhook import AlarmWebhook, webhook_url
from tests.driver.test_tensorboard_writer import Run

VARIABLE = "GIGPO_TEST_WEBHOOK"


class Receiver:
    """A real HTTP server that keeps what is posted to it."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.status, self.pause_s = 200, 0.0
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                time.sleep(receiver.pause_s)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.posts.append(json.loads(body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *line: object) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=s3cret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    made = Receiver()
    monkeypatch.setenv(VARIABLE, made.url)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    yield made
    made.catalog.close()


def config_of(run: Run) -> Config:
    config = configs.Config()
    alarms = replace(config.alarms, webhook_env=VARIABLE)
    return replace(config, run_dir=str(run.layout.root), trackers=[], alarms=alarms)


def figures(*, ess: float, is_on: bool) -> Mapping[str, float]:
    return {
        "loss/ess": ess,
        "alarm/ess": float(is_on),
        "alarm/length": 0.0,
        "tokens/response_per_row": 10.0,
        "tokens/response_per_row_at_start": 10.0,
    }


def drive(run: Run, said: list[str], *ess: float) -> None:
    """Drive the run once, with a look after each learner step."""
    config = config_of(run)
    consumers = [AlarmWebhook(config, run.layout, say=said.append)]
    with follow_metrics(config, run.layout, say=said.append, consumers=consumers) as metrics:
        metrics.follow()
        for value in ess:
            run.train(1, loss=1.0)
            run.record(figures(ess=value, is_on=value < 0.1), version=run.version - 1)
            metrics.follow()


def test_an_alarm_is_posted_when_it_turns_on_and_when_it_turns_off(
    run: Run, receiver: Receiver
) -> None:
    said: list[str] = []
    drive(run, said, 0.9, 0.05, 0.04, 0.8)
    assert said == []
    assert receiver.posts == [
        {
            "run": str(run.layout.root),
            "learner_step": 2,
            "alarm": "ess",
            "state": "on",
            "value": 0.05,
            "text": "learner step 2: loss/ess 0.05 is below alarms.ess_below=0.1",
        },
        {
            "run": str(run.layout.root),
            "learner_step": 4,
            "alarm": "ess",
            "state": "off",
            "value": 0.8,
            "text": "learner step 4: loss/ess 0.8 is no longer below alarms.ess_below=0.1",
        },
    ]


def test_a_resumed_run_posts_nothing_twice_and_what_changed_meanwhile(
    run: Run, receiver: Receiver
) -> None:
    said: list[str] = []
    drive(run, said, 0.05)
    drive(run, said, 0.04)
    assert [post["state"] for post in receiver.posts] == ["on"]
    # recorded, and the driver was killed before it looked
    run.train(1, loss=1.0)
    run.record(figures(ess=0.7, is_on=False), version=run.version - 1)
    drive(run, said)
    assert [(post["state"], post["learner_step"]) for post in receiver.posts] == [
        ("on", 1),
        ("off", 3),
    ]
    run.roll_back(2)  # there the alarm was on
    drive(run, said)
    assert [post["state"] for post in receiver.posts] == ["on", "off", "on"]
    assert said == []


@pytest.mark.parametrize(
    "url",
    [
        "https://user:s3cret@hooks.example/x",
        "https://s3cret@hooks.example/x",
        "https://hooks.example/s3cret part",
        "https://hooks.example/s3cret\n",
        "https://hooks.example:s3cret/x",
        "https://hooks.example:99999/s3cret",
        "https://hooks.example/\u00e9s3cret",
        "https://[s3cret/x",
        "https:///s3cret",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_the_start_and_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, url)
    config = configs.Config()
    config = replace(config, alarms=replace(config.alarms, webhook_env=VARIABLE))
    with pytest.raises(ConfigError, match="the URL in this environment variable") as refused:
        webhook_url(config)
    assert "s3cret" not in str(refused.value) and refused.value.__suppress_context__


def test_the_text_of_an_error_is_not_said(run: Run, receiver: Receiver) -> None:
    """It may quote a part of the URL."""
    said: list[str] = []
    webhook = AlarmWebhook(config_of(run), run.layout, say=said.append)
    webhook._url = "http://host:s3cret@x"  # as if the check at the start had missed it
    webhook._queue("alarm/ess", learner_step=1, values=dict(figures(ess=0.05, is_on=True)))
    webhook.close()
    assert len(said) == 1 and "could not be posted" in said[0] and "s3cret" not in said[0]


def test_a_run_that_gets_a_webhook_late_posts_no_old_alarms(run: Run, receiver: Receiver) -> None:
    for ess in (0.05, 0.9):
        run.train(1, loss=1.0)
        run.record(figures(ess=ess, is_on=ess < 0.1), version=run.version - 1)
    drive(run, [], 0.9)
    assert receiver.posts == []


def test_a_server_that_refuses_is_one_line_without_the_url(run: Run, receiver: Receiver) -> None:
    receiver.status = 500
    said: list[str] = []
    drive(run, said, 0.05, 0.9, 0.05)
    assert len(receiver.posts) == 3
    assert len(said) == 1 and "the server answered 500" in said[0] and VARIABLE in said[0]
    assert "s3cret" not in said[0] and "127.0.0.1" not in said[0]


def test_no_server_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9/s3cret")
    said: list[str] = []
    drive(run, said, 0.05, 0.9)
    assert len(said) == 1 and "ConnectError" in said[0] and "s3cret" not in said[0]


def test_a_slow_server_does_not_delay_the_run(
    run: Run, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_module, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(webhook_module, "MAX_QUEUED", 1)
    receiver.pause_s = 60.0
    said: list[str] = []
    drive(run, said, 0.05, 0.9, 0.05, 0.9, 0.05)  # each look would wait for a minute
    assert len(said) == 1
    assert "posts wait already" in said[0] or "TimeoutError" in said[0] or "timed out" in said[0]


def drips(connection: socket.socket, *, piece: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.recv(65536)
        while True:
            connection.sendall(piece)
            time.sleep(0.001)


@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"x"])
def test_an_answer_without_end_keeps_no_later_alarm_from_being_posted(
    piece: bytes, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: each byte came within the time-out, so the first post never ended."""
    monkeypatch.setattr(webhook_module, "TIMEOUT_S", 0.5)
    said: list[str] = []
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    asked.append(listener.accept()[0])
                    drip = partial(drips, asked[-1], piece=piece)
                    threading.Thread(target=drip, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{listener.getsockname()[1]}/")
        drive(run, said, 0.05, 0.9, 0.05)
        for connection in asked:
            connection.close()
    assert len(asked) == 3
    assert len(said) == 1 and "TimeoutError" in said[0]


@pytest.mark.parametrize(("value", "why"), [("", "is not set"), ("s3cret", "holds no URL")])
def test_a_variable_without_a_url_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    config = configs.Config()
    config = replace(config, alarms=replace(config.alarms, webhook_env=VARIABLE))
    with pytest.raises(ConfigError, match=why) as error:
        webhook_url(config)
    assert "s3cret" not in str(error.value)
    assert "s3cret" not in configs.as_yaml(config)

"""Prometheus reads our newest figures, and vLLM's own of every worker."""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

import configs
from configs import Config, ConfigError
from coordinator import Component, Status
from driver import prometheus
from driver.prometheus import metric_name, prometheus_endpoint
from store import Counts


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def status(**changes: Any) -> Status:
    counts = Counts(
        open=3, leased=2, complete=4, claimed=1, trained=9, stale=0, filtered=0, trajectories=80,
        steps=300,
    )  # fmt: skip
    made = Status(
        counts=counts,
        version=5,
        learner_step=4,
        metrics={"loss/ess": 0.75, "alarm/ess": 0.0},
        components={
            "worker-0": Component(waiting_on="admission", waits_s=3.0, silent_s=0.5),
            "learner": Component(waiting_on=None, waits_s=8.0, silent_s=0.1),
        },
        heldout_open=0,
        notices={},
    )
    return replace(made, **changes)


def engine() -> Sequence[Any]:
    """Return figures from a real registry, named as vLLM names them."""
    registry = CollectorRegistry()
    running = Gauge("vllm:num_requests_running", "r", ["model_name"], registry=registry)
    running.labels(model_name="m").set(6)
    tokens = Counter("vllm:prompt_tokens", "t", ["model_name"], registry=registry)
    tokens.labels(model_name="m").inc(100)
    latency = Histogram("vllm:e2e_request_latency_seconds", "l", buckets=(1, 2), registry=registry)
    latency.observe(1.5)
    return list(registry.collect())


def scrape(port: int) -> Mapping[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def config_of(port: int) -> Config:
    return replace(configs.Config(), run_dir="runs/a", metrics_port=port)


RUN = ("run", "runs/a")


def test_a_scrape_has_our_figures_and_those_of_every_engine() -> None:
    port = free_port()
    both = {"worker-0": engine(), "worker-1": engine()}
    with prometheus_endpoint(config_of(port), lambda: both) as figures:
        assert ("gigpo_learner_step", (RUN,)) not in scrape(port), "nobody has looked yet"
        show = figures.after(lambda status: None)
        show(status())
        first = scrape(port)
        show(status(learner_step=5))
        second = scrape(port)
    assert first["gigpo_loss_ess", (RUN,)] == 0.75
    assert first["gigpo_groups", (RUN, ("state", "complete"))] == 4
    assert first["gigpo_component_waits_seconds", (("component", "worker-0"), RUN)] == 3.0
    assert first["gigpo_component_waits_seconds", (("component", "learner"), RUN)] == 0.0
    assert second["gigpo_learner_step", (RUN,)] == 5
    for worker in ("worker-0", "worker-1"):
        labels = (("model_name", "m"), RUN, ("worker", worker))
        assert first["vllm:num_requests_running", labels] == 6
        for scraped in (first, second):  # a scrape takes nothing away
            assert scraped["vllm:prompt_tokens_total", labels] == 100
            assert scraped["gigpo_trajectories_total", (RUN,)] == 80
        bucket = (("le", "2.0"), RUN, ("worker", worker))
        assert first["vllm:e2e_request_latency_seconds_bucket", bucket] == 1
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_only_this_machine_is_answered() -> None:
    port = free_port()
    with prometheus_endpoint(config_of(port), dict), socket.socket() as other:
        other.bind(("127.0.0.2", port))  # a server on all addresses would hold it


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=x", "text/plain", ""])
def test_every_scraper_gets_the_same_format(accept: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The attack: an unknown version was a traceback of the run, as often as somebody liked."""
    port = free_port()
    with prometheus_endpoint(config_of(port), dict):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics", headers={"Accept": accept})
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read() == b""
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:9400", 200), ("LocalHost:9400", 200), ("localhost", 200), ("127.0.0.1.evil.example", 421),
     ("evil.example:9400", 421), ("localhost.evil.example", 421), ("", 421)],
)  # fmt: skip
def test_a_page_whose_name_leads_to_this_machine_is_refused(host: str, status: int) -> None:
    port = free_port()
    with prometheus_endpoint(config_of(port), dict):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics", headers={"Host": host})
        answer = connection.getresponse()
        assert (answer.status, b"served to" in answer.read()) == (status, status == 421)


def test_silent_connections_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: 650 silent connections took as many threads and files of the driver."""
    monkeypatch.setattr(prometheus, "CONNECTION_S", 1.0)
    monkeypatch.setattr(prometheus, "MAX_CONNECTIONS", 3)
    port = free_port()
    before = threading.active_count()
    with prometheus_endpoint(config_of(port), dict) as figures, ExitStack() as held:
        figures.after(lambda status: None)(status())
        silent = [
            held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(12)
        ]
        silent[0].sendall(b"GET /metrics HTTP/1.1\r\nX: half of a head")
        assert threading.active_count() <= before + 1 + 2 * 3  # the server, handlers and timers
        assert [one.recv(1) for one in silent] == [b""] * 12  # all are closed by the server
        deadline = time.monotonic() + 30
        while True:
            try:
                assert ("gigpo_learner_step", (RUN,)) in scrape(port)
                break
            except OSError:  # a handler ends just now
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_threads_that_cannot_be_started_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """After sixteen of them the port was off for good."""
    port, start, n_failed = free_port(), threading.Thread.start, 0

    def fail(thread: threading.Thread) -> None:
        nonlocal n_failed
        n_failed += 1
        raise RuntimeError("can't start new thread")

    with prometheus_endpoint(config_of(port), dict) as figures:
        figures.after(lambda status: None)(status())
        monkeypatch.setattr(prometheus._Server, "handle_error", lambda *_: None)
        for made in (threading.Thread, threading.Timer):
            monkeypatch.setattr(made, "start", fail)
            for _ in range(prometheus.MAX_CONNECTIONS + 1):
                with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
                    client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                    with suppress(ConnectionError):
                        client.recv(1)
            monkeypatch.setattr(made, "start", start)
        assert n_failed == 2 * (prometheus.MAX_CONNECTIONS + 1)
        assert ("gigpo_learner_step", (RUN,)) in scrape(port)


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"metrics_port={port}: Address already in use"),
            prometheus_endpoint(config_of(port), dict),
        ):
            pass


def test_names_are_those_that_prometheus_allows() -> None:
    assert metric_name("time/step_s") == "gigpo_time_step_s"
    assert metric_name("a b/ü") == "gigpo_a_b__"

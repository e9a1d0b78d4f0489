"""Serve a run's newest figures to Prometheus, on 127.0.0.1.

    with prometheus_endpoint(config, supervisor.engine_metrics) as figures:
        supervisor.train(figures.after(progress.show))

`gigpo_*` are our figures, as of the supervisor's last look. `vllm:*` are the engines' own, asked
of the workers at each scrape: without a scrape they cost nothing.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from configs import Config, ConfigError
from coordinator import Status

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

ADDRESS = "127.0.0.1"
MAX_CONNECTIONS = 16  # at once; Prometheus needs one
OWN_NAME = re.compile(r"(localhost|127(\.\d+){3})(:\d+)?", re.IGNORECASE)  # in a Host header
CONNECTION_S = 30.0  # for a whole request and its answer
EngineMetrics = Callable[[], Mapping[str, Sequence[Family]]]  # by worker
GROUP_STATES = ("open", "leased", "complete", "claimed", "trained", "stale", "filtered")


class _Server(ThreadingMixIn, WSGIServer):
    """Answer a few connections at once, each for a bounded time.

    Every user of the machine can connect, and each connection is a thread and a file of the driver.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(*arguments, **settings)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread, or close the connection if too many are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, and end it after CONNECTION_S, also one that drips bytes."""
        end = threading.Timer(CONNECTION_S, _shut_down, args=(request,))
        end.daemon = True
        try:
            end.start()
        except RuntimeError:  # the thread of the timer could not be started
            self.shutdown_request(request)
        else:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()


class _Handler(WSGIRequestHandler):
    def handle(self) -> None:
        """Answer a request. A client that goes is no error."""
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing for a scrape."""


def _answering_to_own_name(figures: WSGIApplication) -> WSGIApplication:
    """Return the application, which refuses a web page whose own name leads to this machine."""

    def answer(request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if OWN_NAME.fullmatch(request.get("HTTP_HOST", ADDRESS)):
            # In the one format that all scrapers read. Some values of the header end in an error.
            return figures({**request, "HTTP_ACCEPT": ""}, start)
        start("421 Misdirected Request", [("Content-Type", "text/plain")])
        return [b"the metrics are served to 127.0.0.1 and localhost only\n"]

    return answer


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it ended just now
        connection.shutdown(socket.SHUT_RDWR)


class RunFigures(Collector):
    """The figures of one run, as Prometheus collects them."""

    def __init__(self, run: str, engine_metrics: EngineMetrics) -> None:
        self._run, self._engine_metrics = run, engine_metrics
        self._status: Status | None = None  # before the first look

    def after(self, show: Callable[[Status], None]) -> Callable[[Status], None]:
        """Return a `show` that also keeps the status for the next scrape."""

        def show_and_keep(status: Status) -> None:
            show(status)
            self._status = status

        return show_and_keep

    def collect(self) -> Iterator[Family]:
        """Yield all figures. Called by the server's thread at each scrape."""
        status = self._status
        if status is not None:
            yield from self._ours(status)
        yield from self._engines()

    def _ours(self, status: Status) -> Iterator[Family]:
        for name, value in sorted(status.metrics.items()):
            yield self._gauge(metric_name(name), f"{name}, see docs/metrics.md", value)
        yield self._gauge("gigpo_learner_step", "learner steps trained", status.learner_step)
        yield self._gauge("gigpo_policy_version", "newest announced version", status.version)
        yield self._gauge(
            "gigpo_heldout_open_groups", "held-out groups to be played", status.heldout_open
        )
        counts = {each.name: getattr(status.counts, each.name) for each in fields(status.counts)}
        groups = GaugeMetricFamily(
            "gigpo_groups", "training groups by state", labels=("run", "state")
        )
        for state in GROUP_STATES:
            groups.add_metric((self._run, state), counts[state])
        yield groups
        for name in ("trajectories", "steps"):
            counter = CounterMetricFamily(
                f"gigpo_{name}", f"{name} committed since the run began", labels=("run",)
            )
            counter.add_metric((self._run,), counts[name])
            yield counter
        waits = GaugeMetricFamily(
            "gigpo_component_waits_seconds", "how long it has waited, 0 while it works",
            labels=("run", "component"),
        )  # fmt: skip
        silent = GaugeMetricFamily(
            "gigpo_component_silent_seconds", "seconds since its last heartbeat",
            labels=("run", "component"),
        )  # fmt: skip
        for name, component in status.components.items():
            waits_s = component.waits_s if component.waiting_on is not None else 0.0
            waits.add_metric((self._run, name), waits_s)
            silent.add_metric((self._run, name), component.silent_s)
        yield waits
        yield silent

    def _engines(self) -> Iterator[Family]:
        """Yield each figure of vLLM once, with the samples of all workers."""
        families: dict[str, Family] = {}
        for worker, found in sorted(self._engine_metrics().items()):
            for one in found:
                family = families.setdefault(
                    one.name, Family(one.name, one.documentation, one.type)
                )
                family.samples.extend(
                    sample._replace(labels={**sample.labels, "run": self._run, "worker": worker})
                    for sample in one.samples
                )
        yield from families.values()

    def _gauge(self, name: str, help_text: str, value: float) -> Family:
        gauge = GaugeMetricFamily(name, help_text, labels=("run",))
        gauge.add_metric((self._run,), value)
        return gauge


def metric_name(name: str) -> str:
    """Return the name that Prometheus allows: loss/ess is gigpo_loss_ess."""
    return f"gigpo_{re.sub('[^a-zA-Z0-9_]', '_', name)}"


@contextmanager
def prometheus_endpoint(config: Config, engine_metrics: EngineMetrics) -> Iterator[RunFigures]:
    """Serve the figures on `metrics_port`, or only keep them if it is 0.

    Raises ConfigError if the port is taken.
    """
    figures = RunFigures(config.run_dir, engine_metrics)
    if not config.metrics_port:
        yield figures
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(figures)
    try:
        server = make_server(
            ADDRESS,
            config.metrics_port,
            _answering_to_own_name(make_wsgi_app(registry)),
            server_class=_Server,
            handler_class=_Handler,
        )
    except OSError as error:
        raise ConfigError(
            f"metrics_port={config.metrics_port}: {error.strerror or error}; give another port"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield figures
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

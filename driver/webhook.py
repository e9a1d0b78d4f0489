"""Post alarms to a URL, once when one turns on and once when it turns off.

    webhook = AlarmWebhook(config, layout, say=say)
    webhook.take(rows)          # a consumer of the metrics, see trackers/follow.py
    webhook.close()

A thread posts, with a deadline and a short queue, so that no server delays a run. The URL may hold
a secret: it comes from the environment variable `alarms.webhook_env`, and nothing shows it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from configs import Config, ConfigError
from driver.trackers.delivered import DeliveredMetrics, by_step
from learner import describe_alarm
from model_server import http_client
from printable import one_line
from store import Metric, RunLayout, StoreError

ALARM = "alarm/"  # the begin of the metrics that are alarms
TIMEOUT_S = 10.0  # of one post and its answer, however slowly that comes
MAX_QUEUED = 100  # posts
CLOSE_S = 15.0  # for the posts that are queued when the run ends
FAULT_CHARACTERS = 200  # of an error, in a line of the screen


def webhook_url(config: Config) -> str:
    """Return the URL, "" if there is no webhook. Raises ConfigError, which does not show it."""
    name = config.alarms.webhook_env
    if not name:
        return ""
    url = os.environ.get(name, "")
    if not url.startswith(("http://", "https://")):
        state = "is not set" if not url else "holds no URL"
        raise ConfigError(
            f"alarms.webhook_env={name}: this environment variable {state}; set it to "
            "http(s)://..., or leave the setting out"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # its text quotes the URL
        is_usable = False
    # Checked here, because an error of the client may quote a URL that it cannot send.
    if not is_usable or parts.username is not None or not re.fullmatch(r"[!-~]+", url):
        raise ConfigError(
            f"alarms.webhook_env={name}: the URL in this environment variable cannot be used; it "
            "is ASCII, http(s)://HOST[:PORT]/..., without a user name and without blanks"
        ) from None
    return url


class AlarmWebhook:
    """The webhook of one run. It knows, also after a restart, what was posted."""

    def __init__(self, config: Config, layout: RunLayout, *, say: Callable[[str], None]) -> None:
        self._config, self._say, self._url = config, say, webhook_url(config)
        self._run = str(layout.root)
        self._delivered = DeliveredMetrics(
            layout, "webhook"
        )  # its notes: 1 for an alarm that was posted as on
        self._is_first = True
        self._is_said = False  # a failure, once
        self._posts: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._post_all, name="webhook", daemon=True)
        self._thread.start()

    def wants(self) -> bool:
        return True

    def take(self, rows: Sequence[Metric], *, has_all_rows: bool) -> None:
        """Queue a post for each alarm that is not as the last post said.

        Of the rows of earlier starts only the newest count: what turned on and off meanwhile is no
        news.
        """
        steps = list(by_step(rows))
        if self._is_first:
            self._is_first = False
            newest = max(
                (row.learner_step for row in rows if row.name.startswith(ALARM)), default=0
            )
            steps = [(step, values) for step, values in steps if step == newest]
        changed = False
        for learner_step, values in steps:
            for name in (name for name in values if name.startswith(ALARM)):
                is_on = bool(values[name])
                if is_on != bool(self._delivered.notes.get(name, 0)):
                    self._delivered.notes[name] = int(is_on)
                    changed = True
                    self._queue(name, learner_step=learner_step, values=values)
        if changed:
            try:
                self._delivered.save()
            except StoreError as error:  # a full disk
                self._fail(str(error))

    def close(self) -> None:
        """Wait for the queued posts, CLOSE_S at most."""
        try:
            self._posts.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _queue(self, name: str, *, learner_step: int, values: dict[str, float]) -> None:
        text, value = describe_alarm(name, values, learner_step=learner_step, config=self._config)
        post = {
            "run": self._run,
            "learner_step": learner_step,
            "alarm": name.removeprefix(ALARM),
            "state": "on" if values[name] else "off",
            "value": value,
            "text": text,
        }
        try:
            self._posts.put_nowait(post)
        except queue.Full:
            self._fail(f"{MAX_QUEUED} posts wait already")

    def _post_all(self) -> None:
        while (post := self._posts.get()) is not None:
            try:
                status = asyncio.run(self._post(post))
            except Exception as error:  # noqa: BLE001  # the border to the network: said once
                self._fail(type(error).__name__)  # its text may quote a part of the URL
            else:
                if not 200 <= status < 300:  # a redirect too: it is not followed
                    self._fail(f"the server answered {status}")

    async def _post(self, post: dict[str, Any]) -> int:
        """Return the status of the answer."""
        async with asyncio.timeout(TIMEOUT_S), http_client() as client:
            headers = {"accept-encoding": "identity"}  # the client unpacks nothing
            response = await client.post(self._url, json=post, headers=headers)
        return response.status_code

    def _fail(self, why: str) -> None:
        """Say once that a post failed. The URL is in no message."""
        if not self._is_said:
            self._is_said = True
            text = one_line(why.replace(self._url, "(the URL)"))[:FAULT_CHARACTERS]
            name = self._config.alarms.webhook_env
            self._say(
                f"an alarm could not be posted to the URL in {name}: {text}. The run goes on, and "
                "this is said once"
            )

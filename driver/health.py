"""Decide when a component is lost, and how often it is started again."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from configs import SupervisionConfig
from coordinator import Component
from learner import LEARNER_STEP

# Silent looks in a row. After a busy spell the coordinator receives all heartbeats at once, but
# possibly after it answered the driver.
LOOKS = 2
FIRST_PAUSE_S = 1.0  # before a component is started again; doubles each time
LONGEST_PAUSE_S = 30.0
RESTART_WINDOW_S = 3600.0  # restarts longer ago do not count
STARVING_S = 30.0  # a process that waits longer is named, with what it waits for
DRIVER = "driver"  # it asks, so it is alive


class HealthMonitor:
    """Read the components' heartbeats. Name the silent ones, and each long wait once."""

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._silent_looks: defaultdict[str, int] = defaultdict(int)
        self._named: set[tuple[str, str | None]] = set()  # (component, reason of the wait)
        self._longest_step_s = 0.0  # that was named

    def silent(self, components: Mapping[str, Component]) -> dict[str, str]:
        """Return the components that have been silent for too long, with a description."""
        found = {}
        for name, component in components.items():
            is_silent = name != DRIVER and component.silent_s > self._config.silent_s
            self._silent_looks[name] = self._silent_looks[name] + 1 if is_silent else 0
            if self._silent_looks[name] >= LOOKS:
                waited = component.waiting_on
                last = f"waited for {waited}" if waited else "was working"
                found[name] = (
                    f"gave no sign of life for {component.silent_s:.0f} s (it {last} then): "
                    "stopped, or hung"
                )
        return found

    def starving(self, components: Mapping[str, Component]) -> dict[str, str]:
        """Return the components that newly wait for longer than STARVING_S.

        Waiting for admission is no trouble. A learner step is named only if it takes twice as long
        as the longest one named before.
        """
        now = {
            (name, component.waiting_on): component
            for name, component in components.items()
            if component.waiting_on not in (None, "admission") and component.waits_s > STARVING_S
        }
        found = {}
        for (name, reason), component in now.items():
            if reason == LEARNER_STEP:
                if component.waits_s >= 2 * self._longest_step_s:
                    self._longest_step_s = component.waits_s
                    found[name] = f"has been at one learner step for {component.waits_s:.0f} s"
            elif (name, reason) not in self._named:
                found[name] = f"has waited {component.waits_s:.0f} s for {reason}"
        self._named = set(now)
        return found


class Restarts:
    """Limit the restarts of each component, with a growing pause before each."""

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._at_s: defaultdict[str, list[float]] = defaultdict(list)

    def pause_s(self, name: str) -> float | None:
        """Count a restart. Return the pause before it, None if there were too many."""
        now = time.monotonic()
        recent = [at for at in self._at_s[name] if now - at < RESTART_WINDOW_S]
        if len(recent) >= self._config.max_restarts:
            return None
        self._at_s[name] = [*recent, now]
        return min(FIRST_PAUSE_S * 2 ** len(recent), LONGEST_PAUSE_S)

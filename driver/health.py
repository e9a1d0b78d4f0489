"""When a component counts as lost, and how often it is started again. Decides only;
`driver/supervisor.py` acts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

from configs import SupervisionConfig
from coordinator import Component
from learner import LEARNER_STEP

# in a row; a coordinator that was busy for long hears everybody's beats at once, after it was asked
LOOKS = 2
FIRST_PAUSE_S = 1.0  # before a component is started again; doubles each time
LONGEST_PAUSE_S = 30.0
RESTART_WINDOW_S = 3600.0  # restarts longer ago do not count
STARVING_S = 30.0  # a process that waits longer is named, with what it waits for
DRIVER = "driver"  # it asks, so it is alive


class Watch:
    """Consumes what the coordinator heard; says who is silent, and once for each wait who has
    waited for long.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._silent: defaultdict[str, int] = defaultdict(int)  # looks in a row
        # (component, what it waits for) that were said
        self._named: set[tuple[str, str | None]] = set()
        self._longest_step_s = 0.0  # that was named; long steps are no news where all are long

    def silent(self, components: Mapping[str, Component]) -> dict[str, str]:
        """Components nobody has heard of for too long, and what to say of each."""
        found = {}
        for name, component in components.items():
            is_silent = name != DRIVER and component.silent_s > self._config.silent_s
            self._silent[name] = self._silent[name] + 1 if is_silent else 0
            if self._silent[name] >= LOOKS:
                last = (
                    f"waited for {component.waiting_on}" if component.waiting_on else "was working"
                )
                found[name] = (
                    f"gave no sign of life for {component.silent_s:.0f} s (it {last} then): "
                    "stopped, or hung"
                )
        return found

    def starving(self, components: Mapping[str, Component]) -> dict[str, str]:
        """Who has waited for longer than STARVING_S and was not named yet for this wait.
        Admission is no trouble.

        Of learner steps only one that takes twice as long as the longest that was named.
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
    """A limit and a growing pause for each component."""

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._at_s: defaultdict[str, list[float]] = defaultdict(list)

    def pause_s(self, name: str) -> float | None:
        """How long to wait before `name` is started again, which is then counted; None: it was done
        too often.
        """
        now = time.monotonic()
        recent = [at for at in self._at_s[name] if now - at < RESTART_WINDOW_S]
        if len(recent) >= self._config.max_restarts:
            return None
        self._at_s[name] = [*recent, now]
        return min(FIRST_PAUSE_S * 2 ** len(recent), LONGEST_PAUSE_S)

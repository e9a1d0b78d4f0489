"""Remember which metrics a consumer was given, so that no start gives it one twice.

    delivered = DeliveredMetrics(layout, "wandb")
    for learner_step, values in delivered.new(rows): ...   # written down before they are returned

`RUN/given.json` has, for each consumer, the highest learner step of every metric. A metric's
learner steps only grow, until a roll-back. Steps that are trained again were given before, and most
trackers cannot take a point back.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from store import (
    GIVEN_FILE,
    READ_WRITE,
    Metric,
    RunLayout,
    StoreError,
    parse_object,
    read_run_file,
    write_atomically,
)


class DeliveredMetrics:
    """Keep which metrics one consumer was given, and notes of its own beside them."""

    def __init__(self, layout: RunLayout, consumer: str) -> None:
        """Read the file. Raises StoreError if it is damaged."""
        self._layout, self._consumer = layout, consumer
        known = self._read().get(consumer, {})
        try:
            self._steps = {str(name): int(step) for name, step in known.get("steps", {}).items()}
            self.notes = {str(name): int(note) for name, note in known.get("notes", {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise self._damaged(error) from None

    def new(
        self, rows: Sequence[Metric], *, counted: str = ""
    ) -> list[tuple[int, dict[str, float]]]:
        """Return the values not given yet, by learner step, and write down that they are given.

        `counted` is the note that counts the learner steps returned. A driver that is killed right
        after that has not given them. Twice would be worse.
        """
        new = [row for row in rows if row.learner_step > self._steps.get(row.name, -1)]
        found = list(by_step(new))
        if new:
            self._steps |= {row.name: row.learner_step for row in new}
            if counted:
                self.notes[counted] = self.notes.get(counted, 0) + len(found)
            self.save()
        return found

    def save(self) -> None:
        """Write the file. Raises StoreError: a full disk."""
        mine = {"steps": self._steps, "notes": self.notes}
        text = json.dumps({**self._read(), self._consumer: mine}, indent=1)
        path = self._layout.root / GIVEN_FILE
        write_atomically(path, text.encode(), mode=READ_WRITE, beneath=self._layout.root)

    def _read(self) -> dict[str, Any]:
        try:
            return dict(parse_object(read_run_file(self._layout.root, GIVEN_FILE)))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> StoreError:
        path = self._layout.root / GIVEN_FILE
        return StoreError(
            f"{path} is not readable ({error}); remove it: trackers then get all metrics again"
        )


def by_step(rows: Sequence[Metric]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield each learner step with its values. `rows` are ordered by learner step."""
    for learner_step, some in itertools.groupby(rows, key=lambda row: row.learner_step):
        yield learner_step, {row.name: row.value for row in some}

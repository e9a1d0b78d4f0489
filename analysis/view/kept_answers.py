"""Keep the answers of a run's queries in a bounded part of the memory.

answers = KeptAnswers(128 << 20)
answers.keep(key, table)
answers.get(key)          # None if it was dropped: the oldest used goes first
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import pyarrow as pa

from store import StoreError

ENTRY_BYTES, CHARACTER_BYTES = 1000, 4  # of an answer beside its rows, and of a text at most


class AnswerKey(NamedTuple):
    """A query of a snapshot, whose answer never changes."""

    lsn: int
    query: str  # with its tables
    n_rows: int | None
    times_as_text: bool


class KeptAnswers:
    """Answers, and errors of queries themselves, by key. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._answers: OrderedDict[AnswerKey, pa.Table | StoreError] = OrderedDict()
        self.n_bytes = 0

    @property
    def n_kept(self) -> int:
        return len(self._answers)

    def get(self, key: AnswerKey) -> pa.Table | StoreError | None:
        """Return the answer, None if it is not kept."""
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)

    def keep(self, key: AnswerKey, answer: pa.Table | StoreError) -> None:
        """Keep an answer, and drop those that were not used for longest. The newest one stays."""
        with self._lock:
            if key in self._answers:
                return
            self._answers[key] = answer
            self.n_bytes += _size(key, answer)
            while self.n_bytes > self._max_bytes and len(self._answers) > 1:
                self.n_bytes -= _size(*self._answers.popitem(last=False))

    def clear(self) -> None:
        """Drop all answers."""
        with self._lock:
            self._answers.clear()
            self.n_bytes = 0


def _size(key: AnswerKey, answer: pa.Table | StoreError) -> int:
    """Return the bytes of an answer and its query, which may be 1 MiB and stand in an error."""
    query = ENTRY_BYTES + CHARACTER_BYTES * len(key.query)
    if isinstance(answer, StoreError):
        return query + CHARACTER_BYTES * len(str(answer))
    return query + int(answer.nbytes) + int(answer.schema.serialize().size)

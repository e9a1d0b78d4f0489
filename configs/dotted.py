"""Name the settings of a config by their dotted keys, `learner.steps`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from configs.schema import WorkerRange


def dotted_settings(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (`a.b.c`, value) for every setting of a config. A range of workers is one value."""
    if isinstance(value, WorkerRange):
        yield prefix[:-1], dataclasses.asdict(value)
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from dotted_settings(getattr(value, item.name), f"{prefix}{item.name}.")
    else:
        yield prefix[:-1], value

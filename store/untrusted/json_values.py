"""Check values of JSON files that others may have written or damaged. Each raises ValueError."""

from __future__ import annotations

import json
from collections.abc import Mapping

INT64_MAX = 2**63 - 1  # SQLite, Parquet and DuckDB take no larger number


def parse_object(data: bytes | str) -> dict[str, object]:
    """Return the JSON object in `data`. Raises ValueError for other values and deep nesting."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is no JSON object but a {type(content).__name__}")
    return content


def parse_numbers(data: bytes | str) -> list[float]:
    """Return the JSON list of numbers in `data`. Raises ValueError for anything else."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, list) or not all(type(item) in (int, float) for item in content):
        raise ValueError("it is no JSON list of numbers")
    return [float(item) for item in content]


def integer(content: Mapping[str, object], name: str) -> int:
    """Return a whole number from 0 to INT64_MAX. Raises ValueError naming the field."""
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= INT64_MAX:
        raise ValueError(f"{name} is {value!r:.80}, not a whole number from 0 to {INT64_MAX}")
    return value


def text(content: Mapping[str, object], name: str) -> str:
    """Return a text. Raises ValueError naming the field, also for half a character."""
    value = content.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.80}, not a text")
    _check_whole(value, name)
    return value


def optional_text(content: Mapping[str, object], name: str) -> str | None:
    """Return a text or None. Raises ValueError naming the field."""
    return None if content.get(name) is None else text(content, name)


def texts(content: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return a list of texts, empty if it is not there. Raises ValueError naming the field."""
    values = content.get(name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} is {values!r:.80}, not a list of texts")
    for value in values:
        _check_whole(value, name)
    return tuple(values)


def _check_whole(value: str, name: str) -> None:
    """Raise ValueError for half a character, which JSON can name: no file and no table takes it."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {value!r:.80}, which has half a character") from None


def objects(content: Mapping[str, object], name: str) -> dict[str, object]:
    """Return an object within the object. Raises ValueError naming the field."""
    value = content.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.80}, not an object")
    return value


def entries(content: Mapping[str, object], name: str) -> list[dict[str, object]]:
    """Return a list of objects. Raises ValueError naming the field."""
    values = content.get(name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError(f"{name} is {values!r:.80}, not a list of objects")
    return values

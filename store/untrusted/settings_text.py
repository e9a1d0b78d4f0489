"""Parse the settings in a run's config.yaml or run.json. A stranger may have written the text.

    settings = parse_settings_text(text)
    uri = setting(settings, "store.uri")

Nothing in the text is resolved: scalars stay text, so it makes no number, date or object.
`configs/` parses the settings that a run is started with. This package must not import it, and
needs single values only.
"""

from __future__ import annotations

from collections.abc import Iterable

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from bounded_yaml import MAX_SETTINGS_DEPTH, MAX_SETTINGS_EVENTS, bounded_events
from printable import REASON_CHARACTERS, one_line

Collection = dict[str, object] | list[object]
NULLS = ("", "~", "null", "Null", "NULL")


def parse_settings_text(text: object) -> dict[str, object]:
    """Return the settings in a YAML text: mappings, lists, texts and None.

    Raises ValueError for aliases, merge keys, tags, repeated keys, and too long or too deeply
    nested texts, which no run writes.
    """
    if not isinstance(text, str):
        raise ValueError(f"it is no text but a {type(text).__name__}")
    try:
        content = _content(
            bounded_events(text, max_events=MAX_SETTINGS_EVENTS, max_depth=MAX_SETTINGS_DEPTH)
        )
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {one_line(error)[:REASON_CHARACTERS]}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("it has no `key: value` lines")
    return content


def setting(settings: dict[str, object], key: str) -> object:
    """Return the value of a dotted key, None if it is not there."""
    value: object = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _content(events: Iterable[Event]) -> object:
    """Return the value that the events describe. Raises ValueError for more than a run writes."""
    documents: list[object] = []
    open_collections: list[Collection] = [documents]
    keys: list[str | None] = [None]  # of each open collection: the key whose value comes next

    def add(value: object) -> None:
        collection, key = open_collections[-1], keys[-1]
        if isinstance(collection, list):
            collection.append(value)
        elif key is not None:
            collection[key] = value
            keys[-1] = None
        elif not isinstance(value, str):
            raise ValueError("it has a key that is a collection")
        elif value in collection:
            raise ValueError(f"it has the key {value!r:.80} twice")
        else:
            keys[-1] = value

    for event in events:
        if isinstance(event, AliasEvent):
            raise ValueError("it has an alias (*), and a run's settings are written out")
        if isinstance(event, DocumentStartEvent) and documents:
            raise ValueError("it has several documents")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"it has the tag {event.tag!r:.80}, and a run's settings have none")
        if isinstance(event, ScalarEvent):
            is_key = isinstance(open_collections[-1], dict) and keys[-1] is None
            if is_key and event.value == "<<":
                raise ValueError("it has a merge key (<<), and a run's settings are written out")
            is_null = event.style is None and event.value in NULLS and not is_key
            add(None if is_null else event.value)
        elif isinstance(event, MappingStartEvent | SequenceStartEvent):
            collection: Collection = {} if isinstance(event, MappingStartEvent) else []
            add(collection)
            open_collections.append(collection)
            keys.append(None)
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            open_collections.pop()
            keys.pop()
    return documents[0] if documents else None

"""Parse the settings in a run's config.yaml or run.json. A stranger may have written the text.

    settings = parse_settings_text(text)
    uri = setting(settings, "store.uri")

Nothing in the text is resolved: scalars stay text, so it makes no number, date or object. The work
is bounded. `configs/` parses the settings that a run is started with. This package must not import
it, and needs single values only.
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

from printable import REASON_CHARACTERS, one_line

MAX_CHARACTERS = 2**20  # of a text; the settings of a run have some 5,000
MAX_EVENTS = 100_000  # of the YAML parser: about one for each value
# The YAML scanner looks at every open collection of a line for each character behind it.
MAX_DEPTH = 64  # of open collections; the settings of a run have 5
Collection = dict[str, object] | list[object]
NULLS = ("", "~", "null", "Null", "NULL")


def parse_settings_text(text: object) -> dict[str, object]:
    """Return the settings in a YAML text: mappings, lists, texts and None.

    Raises ValueError for aliases, merge keys, tags, repeated keys, and too long or too deeply
    nested texts, which no run writes.
    """
    if not isinstance(text, str):
        raise ValueError(f"they are no text but a {type(text).__name__}")
    if len(text) > MAX_CHARACTERS:
        n = f"{len(text):,} characters"
        raise ValueError(f"they have {n}; settings have at most {MAX_CHARACTERS:,}")
    try:
        content = _content(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"they are no YAML: {one_line(error)[:REASON_CHARACTERS]}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError("they are no `key: value` lines")
    return content


def setting(settings: dict[str, object], key: str) -> object:
    """Return the value of a dotted key, None if it is not there."""
    value: object = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _content(events: Iterable[Event]) -> object:
    """Return the value that the events describe. Raises ValueError for more than a run writes."""
    whole: list[object] = []
    open_collections: list[Collection] = [whole]
    keys: list[str | None] = [None]  # of each open collection: the key whose value comes next

    def add(value: object) -> None:
        collection, key = open_collections[-1], keys[-1]
        if isinstance(collection, list):
            collection.append(value)
        elif key is not None:
            collection[key] = value
            keys[-1] = None
        elif not isinstance(value, str):
            raise ValueError("they have a key that is a collection")
        elif value in collection:
            raise ValueError(f"they have the key {value!r:.80} twice")
        else:
            keys[-1] = value

    for number, event in enumerate(events):
        if number >= MAX_EVENTS:
            raise ValueError(f"they have more than {MAX_EVENTS:,} parts")
        if isinstance(event, AliasEvent):
            raise ValueError("they have an alias (*), and a run's settings are written out")
        if isinstance(event, DocumentStartEvent) and whole:
            raise ValueError("they are several documents")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"they have the tag {event.tag!r:.80}, and a run's settings have none")
        if isinstance(event, ScalarEvent):
            is_key = isinstance(open_collections[-1], dict) and keys[-1] is None
            if is_key and event.value == "<<":
                raise ValueError("they have a merge key (<<), and a run's settings are written out")
            is_null = event.style is None and event.value in NULLS and not is_key
            add(None if is_null else event.value)
        elif isinstance(event, MappingStartEvent | SequenceStartEvent):
            collection: Collection = {} if isinstance(event, MappingStartEvent) else []
            add(collection)
            open_collections.append(collection)
            keys.append(None)
            if len(keys) > MAX_DEPTH + 1:  # `whole` is not one of the text's
                raise ValueError(f"their values are nested more than {MAX_DEPTH} deep")
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            open_collections.pop()
            keys.pop()
    return whole[0] if whole else None

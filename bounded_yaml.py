"""Read the events of a YAML text that is not trusted, within bounds.

    for event in bounded_events(text, max_events=10_000, max_depth=8):

Values are not made here. A caller that makes them checks aliases and numbers too: an alias repeats
a value, and YAML reads a long number in quadratic time.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

MAX_CHARACTERS = 2**20  # of a YAML text; the settings of a run have some 5,000
MAX_SETTINGS_EVENTS = 100_000  # of a run's settings: about one for each value
MAX_SETTINGS_DEPTH = 64  # of a run's settings, which are nested 5 deep
TEXT_TAG = "tag:yaml.org,2002:str"


def bounded_events(text: str, *, max_events: int, max_depth: int) -> Iterator[yaml.Event]:
    """Yield the parser's events. Raises ValueError at the first one beyond a bound, and YAMLError.

    `max_depth` bounds open collections: the YAML scanner looks at every one of them for each
    character behind it.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if number >= max_events:
            raise ValueError(f"it has more than {max_events:,} parts")
        if depth > max_depth:
            raise ValueError(f"its values are nested more than {max_depth} deep")
        yield event

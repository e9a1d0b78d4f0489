"""Follow the settings of a run only if this user made or trusts it.

    trusted_texts(run)      # before a class, model or server that its settings name is used
    check_own_run(run)      # before anything in it is written or removed
    trust(run)              # for --trust: from now on the run counts as one of this user's

The settings of a run name Python classes, directories, servers and storage. A program that only
reads the run's rows follows none of them.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from store.errors import FormatError, StoreError, UnsafePathError
from store.run_names import CONFIG_FILE, RUN_JSON
from store.untrusted import json_values
from store.untrusted.file_access import is_file, read_text
from store.untrusted.own_directory import check_own_directory, opened_by_own_links
from store.untrusted.settings_text import parse_settings_text, setting
from store.untrusted.signatures import (
    RunTexts,
    is_config_changed,
    sign_run,
    signed_texts,
    texts_in,
)

# Settings that name something outside the run, and what the program does with it.
FOLLOWED = {
    "env.name": "imports the environment",
    "env.options": "gives it the options",
    "environments.*.env.name": "imports the environment",
    "environments.*.env.options": "gives it the options",
    "environments.*.prompt.template": "reads the template",
    "model.path": "loads the model",
    "loss.teacher": "loads the teacher, or sends texts to it,",
    "critic.path": "loads the critic",
    "prompt.template": "reads the template",
    "store.uri": "reads and writes, with your credentials,",
    "endpoint.url": "sends texts to",
    "endpoint.api_key_env": "sends the secret in the variable",
    "source": "reads the runs",
    "trackers": "sends figures to",
    "alarms.webhook_env": "posts alarms to the address in the variable",
}
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
SHOWN_CHARACTERS, SHOWN_ITEMS = 200, 8  # of one setting

# Trusted runs that cannot be signed, for example because they are on read-only media.
_trusted_now: set[Path] = set()


def trust(run: Path) -> None:
    """Count the run as one of this user's. Raises StoreError if there is no run."""
    root = run.absolute()
    if not is_file(root / RUN_JSON, root=root):
        text = f"{run} is not a run directory, so --trust says nothing about it"
        raise FormatError(f"{text}; leave it out")
    try:
        is_signed = sign_run(run)
    except UnsafePathError:
        raise
    except OSError:  # another user signed it
        is_signed = False
    except StoreError as error:  # on read-only media, or in another user's run
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in NOT_WRITABLE:
            raise
        is_signed = False
    if not is_signed:
        with opened_by_own_links(run) as (_, place):
            _trusted_now.add(place)


def is_trusted(run: Path) -> bool:
    """Return whether this user made or trusts the run that lies here now.

    To follow its settings, use `trusted_texts`. Raises StoreError if others can read this user's
    key.
    """
    return trusted_texts_or_none(run) is not None


def check_own_run(run: Path, *, instead: str = "copy it to a directory of yours") -> None:
    """Raise StoreError unless the run's directory is this user's, or the run is trusted.

    Call it before anything is written or removed there, see `check_own_directory`.
    """
    check_own_directory(run, may_be_anothers=is_trusted(run), instead=instead)


def trusted_texts(run: Path) -> RunTexts:
    """Return the texts of a run that this user made or trusts.

    Follow these settings, and do not read the files again: others may lie there by then. Raises
    StoreError, naming what the settings do, for a stranger's run, and UnsafePathError for one
    behind a link of another user.
    """
    texts = trusted_texts_or_none(run)
    if texts is not None:
        return texts
    with suppress(FileNotFoundError), opened_by_own_links(run):
        pass  # raises for a link, which --trust would not help
    found = _settings(run)
    named = [f"{does} {value}" for key, does in FOLLOWED.items() for value in _values(found, key)]
    does = f"this {'; '.join(named)}" if named else "what its settings name is imported and loaded"
    if is_config_changed(run):
        raise StoreError(
            f"{run / CONFIG_FILE} has changed since the run was last started, and its settings may "
            f"run any code: {does}. Add --trust, once, if you know who changed it"
        )
    raise StoreError(
        f"{run} was not made by you on this machine, and its settings may run any code: {does}. "
        "Add --trust, once, if you know who made it"
    )


def trusted_texts_or_none(run: Path) -> RunTexts | None:
    """Return what `trusted_texts` does, None for a stranger's run."""
    with suppress(OSError), opened_by_own_links(run) as (directory, place):
        if place in _trusted_now:
            return texts_in(directory, place)
    return signed_texts(run)


def _values(texts: list[dict[str, object]], key: str) -> list[str]:
    """Return the values of a setting in each text, each once, for a terminal."""
    shown = [_shown(value) for settings in texts for value in _found(settings, key)]
    return list(dict.fromkeys(filter(None, shown)))[:SHOWN_ITEMS]


def _found(settings: dict[str, object], key: str) -> list[object]:
    """Return the values of a key, in which * stands for every name."""
    section, _, rest = key.partition(".*.")
    if not rest:
        return [setting(settings, key)]
    entries = setting(settings, section)
    own = entries.values() if isinstance(entries, dict) else ()
    return [setting(entry, rest) for entry in own if isinstance(entry, dict)]


def _shown(value: object) -> str:
    """Return a setting in ASCII, cut. Collections within a collection are not shown."""
    if isinstance(value, Mapping):
        some = islice(value.items(), SHOWN_ITEMS)
        items = [f"{_shown_one(key)}: {_shown_one(one)}" for key, one in some]
    elif isinstance(value, list):
        items = [_shown_one(one) for one in value[:SHOWN_ITEMS]]
    else:
        items = [_shown_one(value)] if value else []
    return ", ".join(items)[:SHOWN_CHARACTERS]


def _shown_one(value: object) -> str:
    return "..." if isinstance(value, Mapping | list) else ascii(value)[:SHOWN_CHARACTERS]


def _settings(run: Path) -> list[dict[str, object]]:
    """Return the settings of config.yaml and of run.json, as far as they can be read."""
    root = run.absolute()
    found: list[dict[str, object]] = []
    with suppress(OSError, ValueError):
        found.append(parse_settings_text(read_text(root / CONFIG_FILE, root=root)))
    with suppress(OSError, ValueError):
        run_json = json_values.parse_object(read_text(root / RUN_JSON, root=root))
        found.append(parse_settings_text(json_values.text(run_json, "config_yaml")))
    return found

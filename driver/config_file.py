"""Load the config file that a command names, unless it is a stranger's.

    given = load_config("configs/quickstart.yaml", overrides, trusts=False)
    given.config, given.trusted

`RUN/config.yaml` has the settings of a run, so whoever made the run says what it names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import configs
from configs import Config
from store import (
    CONFIG_FILE,
    EXCHANGED,
    RUN_JSON,
    SIGNS_OF_A_RUN,
    RunLayout,
    RunTexts,
    StoreError,
    belongs_to_other_user,
    decoded,
    is_trusted,
    limited_memory,
    links_and_end,
    trust,
    trusted_texts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenConfig:
    """The settings of a config file, and the runs that its files lie in, if --trust was given."""

    config: Config
    trusted: Sequence[Path]


def load_config(file: str, overrides: Sequence[str], *, trusts: bool) -> GivenConfig:
    """Return the settings of a config file with `key=value` overrides.

    `trusts` counts a run whose directory has the file, or one that it builds on, as made by this
    user. Raises ConfigError; StoreError for a file anywhere in a stranger's run, before it is read.
    """
    trusted: list[Path] = []

    def read(path: Path) -> str:
        places, signed = links_and_end(path), None
        for run in _runs_around(places):
            # Not one further up: the command does not name it, so anybody may have put it there.
            if trusts and run in _folders(places) and RunLayout.exists(run):
                trust(run)
                trusted.append(run)
            texts = _trusted_texts(run, path, places)
            if run / CONFIG_FILE in places:
                if texts.config is None:
                    raise StoreError(f"{path} {EXCHANGED}")
                signed = texts.config
        # Not read again: somebody else may have put other settings in its place since.
        return configs.read_file(path) if signed is None else decoded(signed, path=path)

    config = configs.load(file, overrides, read=read)
    return GivenConfig(config=config, trusted=trusted)


def _trusted_texts(run: Path, path: Path, places: Sequence[Path]) -> RunTexts:
    """Return the settings of a run around the file. Raises StoreError for a stranger's."""
    elsewhere = f"copy {path.name} elsewhere, if you know who made it"
    if run not in _folders(places) and not is_trusted(run):
        raise StoreError(
            f"{path} lies in {run}, a run that was not made by you on this machine, and its "
            f"settings may run any code; {elsewhere}"
        )
    if not os.path.lexists(run / RUN_JSON):
        raise StoreError(
            f"{path} lies in {run}, a run without its {RUN_JSON}, so nobody knows who made it; "
            f"bring that back (gigpo rebuild {run}), or {elsewhere}"
        )
    with limited_memory([run]):  # an error quotes the settings of a stranger's run
        return trusted_texts(run)


def _runs_around(places: Sequence[Path]) -> list[Path]:
    """Return the runs in which the places lie, however deep: those of a file, and of its links."""
    folders = _folders(places)
    above = dict.fromkeys(run for folder in folders for run in folder.parents)
    return [
        *filter(_has_run, folders),
        *(each for each in above if _has_run(each) and not _came_later(each, places)),
    ]


def _has_run(folder: Path) -> bool:
    """Return whether a run is there, which may have lost its run.json.

    Whoever made a run says what its run.json is: a link, or nothing beside its other files. One
    other sign alone may be of anything.
    """
    return os.path.lexists(folder / RUN_JSON) or len(_signs_of_a_run(folder)) > 1


def _came_later(run: Path, places: Sequence[Path]) -> bool:
    """Return whether others put the run above files of the user's own.

    Who may write in a directory above them, such as /tmp, can do that.
    """
    run_json = run / RUN_JSON
    told_by = [run_json] if os.path.lexists(run_json) else _signs_of_a_run(run)
    below = [place for place in places if place.is_relative_to(run)]
    return all(map(belongs_to_other_user, told_by)) and all(
        _is_own_below(run, place) for place in below
    )


def _signs_of_a_run(folder: Path) -> list[Path]:
    return [folder / name for name in SIGNS_OF_A_RUN if os.path.lexists(folder / name)]


def _is_own_below(run: Path, file: Path) -> bool:
    """Return whether the file, and each directory between it and `run`, is this user's."""
    between = (each for each in file.parents if each.is_relative_to(run) and each != run)
    return not any(map(belongs_to_other_user, (file, *between)))


def _folders(places: Sequence[Path]) -> list[Path]:
    """Return the folder of each place, once."""
    return list(dict.fromkeys(place.parent for place in places))

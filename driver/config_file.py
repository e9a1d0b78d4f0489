"""Load the config file that a command names, unless it is a stranger's.

    given = load_config("configs/quickstart.yaml", overrides, trusts=False)
    given.config, given.trusted

`RUN/config.yaml` has the settings of a run, so whoever made the run says what it names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import configs
from configs import Config
from store import (
    CONFIG_FILE,
    RUN_JSON,
    StoreError,
    decoded,
    is_lost,
    is_trusted,
    limited_memory,
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
        text = None
        for run in _runs_around(path):
            # Not one further up: the command does not name it, so anybody may have put it there.
            is_named = run in _folders(path) and _has_run_json(run)
            if trusts and is_named:
                trust(run)
                trusted.append(run)
            if not is_named and not is_trusted(run):
                raise StoreError(
                    f"{path} lies in {run}, a run that was not made by you on this machine, and "
                    "its settings may run any code; if you know who made the file, copy it "
                    "elsewhere"
                )
            with limited_memory([run]):  # an error quotes the settings of a stranger's run
                texts = trusted_texts(run)
            # Not read again: somebody else may have put other settings in its place since.
            if run / CONFIG_FILE in (path.absolute(), path.resolve()):
                if CONFIG_FILE not in texts:
                    raise StoreError(f"{path} was exchanged while it was opened; open it again")
                text = decoded(texts[CONFIG_FILE], path=path)
        return configs.read_file(path) if text is None else text

    config = configs.load(file, overrides, read=read)
    return GivenConfig(config=config, trusted=trusted)


def _folders(path: Path) -> tuple[Path, Path]:
    """Return the folders that have a file: as it was named, and of the end of a link."""
    return path.absolute().parent, path.resolve().parent


def _runs_around(path: Path) -> list[Path]:
    """Return the runs in which the file lies, however deep; of a link, also those of its end.

    Whoever made a run says what its run.json is: a link, or nothing beside its other files.
    """
    folders = _folders(path)
    around = dict.fromkeys(each for folder in folders for each in (folder, *folder.parents))
    return [each for each in around if _has_run_json(each) or (each in folders and is_lost(each))]


def _has_run_json(folder: Path) -> bool:
    """Return whether a run.json is there, but not one that a third user put into a folder for all.

    In /tmp anybody may make files, and nobody else can remove them.
    """
    try:
        its, file = folder.stat(), (folder / RUN_JSON).lstat()
    except OSError:
        return os.path.lexists(folder / RUN_JSON)
    me, for_all = os.geteuid(), stat.S_ISVTX | stat.S_IWOTH
    is_strangers = me != 0 and file.st_uid not in (me, its.st_uid)
    return not (is_strangers and its.st_mode & for_all == for_all)

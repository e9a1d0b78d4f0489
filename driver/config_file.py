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
from store import CONFIG_FILE, decoded, is_lost, limited_memory, trust, trusted_texts


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenConfig:
    """The settings of a config file, and the runs that its files lie in, if --trust was given."""

    config: Config
    trusted: Sequence[Path]


def load_config(file: str, overrides: Sequence[str], *, trusts: bool) -> GivenConfig:
    """Return the settings of a config file with `key=value` overrides.

    `trusts` counts a run in which the file, or one that it builds on, lies as made by this user.
    Raises ConfigError; StoreError for a stranger's run that is not trusted, before it is read.
    """
    trusted: list[Path] = []

    def read(path: Path) -> str:
        text = None
        for run in _runs_around(path):
            if trusts:
                trust(run)
                trusted.append(run)
            with limited_memory([run]):  # an error quotes the settings of a stranger's run
                texts = trusted_texts(run)
            # Not read again: somebody else may have put other settings in its place since.
            is_config = run / CONFIG_FILE in (path.absolute(), path.resolve())
            if is_config and CONFIG_FILE in texts:
                text = decoded(texts[CONFIG_FILE], path=path)
        return configs.read_file(path) if text is None else text

    config = configs.load(file, overrides, read=read)
    return GivenConfig(config=config, trusted=trusted)


def _runs_around(path: Path) -> list[Path]:
    """Return the runs in which the file lies, however deep; of a link, also those of its end.

    Whoever made a run says what its run.json is: a link, or nothing beside its other files.
    """
    folders = dict.fromkeys((*path.absolute().parents, *path.resolve().parents))
    return [each for each in folders if os.path.lexists(each / "run.json") or is_lost(each)]

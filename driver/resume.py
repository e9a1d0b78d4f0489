"""A run goes on: python cli/train.py --resume RUN [key=value ...]

    RUN/config.yaml     the settings of the run's newest start; run.json keeps those of its first
    RUN/outside.json    what the run uses that is not in its directory, so that it is known again elsewhere

Nothing in a run's directory names a place, so it may be moved or copied. What lies outside, a model
or a template file, is looked for where it was; where that is another place, say so:
`model.path=...`. It has to be the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import configs
from analysis import CONFIG_FILE
from configs import Config, ConfigError
from store import (
    READ_WRITE,
    RunLayout,
    check_trusted,
    made_by_this_user,
    parse_object,
    read_run_file,
    sign_run,
    write_atomically,
)

OUTSIDE_FILE = "outside.json"
OUTSIDE = ("model.path", "prompt.template")
END_BYTES = 2**20  # of each file of a model: two models of one shape have other numbers there


def load(run: Path, overrides: Sequence[str]) -> Config:
    """The settings of the run's newest start, with `overrides` on top.

    Raises ConfigError, FormatError for what is no run, StoreError for a stranger's run that is not
    trusted.
    """
    layout = RunLayout.open(run)
    check_trusted(run)
    if any(text.partition("=")[0] == "run_dir" for text in overrides):
        raise ConfigError(
            f"--resume {run} goes on in that directory; leave run_dir= out, and move the directory "
            "if you like"
        )
    try:
        text, name = read_run_file(run, CONFIG_FILE), str(run / CONFIG_FILE)
    except FileNotFoundError:  # of a run that an older cli/train.py made
        text, name = layout.info.config_yaml, f"the config in {layout.run_json}"
    return replace(configs.load_saved(text, overrides, name=name), run_dir=str(run))


def remember(config: Config) -> None:
    """Write for the next `load` what the run is started with. Paths become absolute ones. Raises
    StoreError: a full disk.
    """
    run = Path(config.run_dir)
    if not (run / OUTSIDE_FILE).is_file():
        marks = json.dumps({key: _mark(path) for key, path in outside(config).items()}, indent=1)
        write_atomically(run / OUTSIDE_FILE, marks.encode(), mode=READ_WRITE, beneath=run)
    there = {key: str(path.absolute()) for key, path in outside(config).items()}
    model = replace(config.model, path=there.get("model.path", config.model.path))
    prompt = replace(config.prompt, template=there.get("prompt.template", config.prompt.template))
    text = configs.as_yaml(replace(config, model=model, prompt=prompt))
    if made_by_this_user(run):
        # first: killed in between, the run still has a signed config.yaml
        sign_run(run, config=text.encode())
    write_atomically(run / CONFIG_FILE, text.encode(), mode=READ_WRITE, beneath=run)


def differences(config: Config, recorded: Config) -> list[str]:
    """`key: old -> new` for every setting of `config` that is another run's than `recorded`, that
    of run.json.

    What lies outside may be at another path if it is the same.
    """
    changed = configs.forbidden_changes(recorded, config)
    path = Path(config.run_dir) / OUTSIDE_FILE
    try:
        marks = parse_object(read_run_file(path.parent, OUTSIDE_FILE))
    except (FileNotFoundError, NotADirectoryError):
        marks = {}
    except ValueError as error:
        raise ConfigError(
            f"{path} is not readable ({error}); remove it, and give the paths the run was made with"
        ) from None
    moved = {
        key for key, place in outside(config).items() if key in marks and marks[key] == _mark(place)
    }
    return [line for line in changed if line.partition(":")[0] not in moved]


def outside(config: Config) -> Mapping[str, Path]:
    """Those of OUTSIDE that are files or directories."""
    paths = dict(zip(OUTSIDE, (config.model.path, config.prompt.template), strict=True))
    return {key: Path(path) for key, path in paths.items() if path and Path(path).exists()}


def _mark(path: Path) -> str:
    """128 bits of a file's bytes; of a directory, of its files' names, sizes and ends: a model may
    be large.
    """
    digest = blake2b(digest_size=16)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        with file.open("rb") as content:
            size = content.seek(0, os.SEEK_END)
            digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
            for start in sorted({0, max(0, size - END_BYTES)}) if path.is_dir() else [0]:
                content.seek(start)
                digest.update(content.read(END_BYTES if path.is_dir() else -1))
    return digest.hexdigest()

"""Load the settings of a fork, and make it.

    gigpo train --fork RUN@STEP run_dir=NEW [key=value ...]

A fork is a new run from a kept checkpoint of another. It has the other's settings but for those
given, and its rollouts and lineage up to that learner step. The other run is only read, and may be
training. The same command again goes on with the fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import configs
import store
from configs import Config, ConfigError
from driver import resume
from store import Catalog, RunLayout, StoreError, parse_run_step

# Settings that a fork shares with its run: the tasks of its groups, and the shape of its weights.
KEPT = ("env.name", "env.options", "environments", "model.")


def load(source: str, overrides: Sequence[str]) -> Config:
    """Return the settings of the fork of `source`, RUN@STEP. Raises ConfigError, StoreError."""
    run, _ = parse(source)
    run_dir, others = configs.split_run_dir(overrides)
    if run_dir is None:
        raise ConfigError(f"--fork {source} makes a new run; give its directory: run_dir=...")
    root = Path(run_dir)
    if RunLayout.exists(root):
        _check_is_the_fork(RunLayout.open(root), source)
        return resume.load(root, others)
    recorded = resume.load(run, [])
    config = replace(resume.load(run, others), run_dir=str(root))
    kept = (*KEPT, "source:") if recorded.source else KEPT
    forbidden = configs.forbidden_changes(recorded, config)
    if changed := [line for line in forbidden if line.startswith(kept)]:
        raise ConfigError(
            f"--fork {source} goes on with that run's model, tasks and offline groups "
            f"({'; '.join(changed)}); leave these as they are"
        )
    if recorded.store.uri and config.store.uri == recorded.store.uri:
        raise ConfigError(
            f"--fork {source} has its files in {recorded.store.uri}; give the fork a place of its "
            "own, store.uri=..., or store.uri= for its run_dir"
        )
    return config


def make(source: str, config: Config) -> None:
    """Make the fork in `config.run_dir`, unless it exists. Raises StoreError.

    If the other run has removed the weights that workers begin with, they are made from its
    checkpoint.
    """
    root = Path(config.run_dir)
    if not RunLayout.exists(root):
        run, learner_step = source_of(source)
        store.fork(
            run,
            root,
            learner_step=learner_step,
            config_yaml=configs.as_yaml(config),
            storage_uri=config.store.uri or None,
            private=configs.holds_secrets(config),
        )
    layout = RunLayout.open(root)
    with Catalog.open(layout) as catalog:
        newest, checkpoint = catalog.latest_version(), catalog.live_checkpoints()[-1]
        store.export(catalog, layout)
    assert newest is not None, "a checkpoint has weights"
    directory = layout.root / newest.path
    if newest.version != checkpoint.version or directory.is_dir():
        return
    from learner import export_checkpoint  # here: it loads torch

    try:
        digest = export_checkpoint(layout, checkpoint.learner_step, dest=directory)
    # a damaged checkpoint, or the base model is gone
    except (ValueError, FileNotFoundError) as error:
        raise StoreError(
            f"the weights of learner step {checkpoint.learner_step} cannot be made: {error}"
        ) from error
    if digest != newest.digest:
        raise StoreError(
            f"{directory} has digest {digest}, published was {newest.digest}; fork another "
            "learner step"
        )
    store.publish_directory(layout, directory)


def parse(source: str) -> tuple[Path, int]:
    """Split RUN@STEP, whose step is at least 1. A URI gives a directory with the run's settings.

    Raises ConfigError, StoreError.
    """
    try:
        _, step = parse_run_step(source)
    except StoreError:
        step = None
    if not step:
        raise ConfigError(
            f"--fork {source}: give a run and one of its learner steps, e.g. runs/a@40"
        )
    location = source.rpartition("@")[0]
    run = store.run_at(location)
    if store.is_uri(location) and not RunLayout.exists(run):
        raise ConfigError(f"--fork {source}: no run is at {location}; give the store.uri of a run")
    return run, step


def source_of(source: str) -> tuple[RunLayout, int]:
    """Return the run and the step of RUN@STEP; the run with its catalog, also of a URI.

    Raises StoreError, for a stranger's run too.
    """
    run, step = parse(source)
    store.bring_catalog(source.rpartition("@")[0])
    return RunLayout.open(run), step


def _check_is_the_fork(layout: RunLayout, source: str) -> None:
    """Raise ConfigError if the run in the fork's directory is another one."""
    run, step = parse(source)
    wanted, found = f"{RunLayout.open(run).info.run_id}@{step}", layout.info.forked_from
    if found != wanted:
        made = f"is a fork of run {found}" if found else "is no fork"
        raise ConfigError(
            f"{layout.root} {made}, not of {source}, which is run {wanted}; choose another run_dir"
        )

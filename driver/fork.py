"""A new run from any kept checkpoint of another: gigpo train --fork RUN@STEP run_dir=NEW
[key=value ...]

The new run has the other's settings but for those given, its rollouts and its lineage up to that
learner step, and goes on by itself. The other is only read, and may be training. A second time the
command goes on with the new run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import configs
import store
from configs import Config, ConfigError
from driver import resume
from store import Catalog, RunLayout, StoreError

# the tasks of its groups, and the shape of its weights
STAY = ("env.name", "env.options", "model.")


def load(text: str, overrides: Sequence[str]) -> Config:
    """The settings of the fork `text`, RUN@STEP, with `overrides` on top. Raises ConfigError,
    StoreError.
    """
    run, _ = parsed(text)
    given = [override for override in overrides if override.startswith("run_dir=")]
    if not given:
        raise ConfigError(f"--fork {text} makes a new run; give its directory: run_dir=...")
    root = Path(given[-1].removeprefix("run_dir="))
    others = [override for override in overrides if override not in given]
    if RunLayout.exists(root):
        _check_is_the_fork(RunLayout.open(root), text)
        return resume.load(root, others)
    recorded = resume.load(run, [])
    config = replace(resume.load(run, others), run_dir=str(root))
    changed = [
        line for line in configs.forbidden_changes(recorded, config) if line.startswith(STAY)
    ]
    if changed:
        raise ConfigError(
            f"--fork {text} goes on with that run's model and tasks ({'; '.join(changed)}); leave "
            "these as they are"
        )
    return config


def make(text: str, config: Config) -> None:
    """The fork in `config.run_dir`, unless it was made before; with the weights that workers begin
    with, also where the other run has removed them. Raises StoreError.
    """
    run, learner_step = parsed(text)
    root = Path(config.run_dir)
    if not RunLayout.exists(root):
        store.fork(
            RunLayout.open(run),
            root,
            learner_step=learner_step,
            config_yaml=configs.as_yaml(config),
        )
    layout = RunLayout.open(root)
    with Catalog.open(layout) as catalog:
        newest, checkpoint = catalog.latest_version(), catalog.live_checkpoints()[-1]
        store.export(catalog, layout)
    assert newest is not None, "a checkpoint has weights"
    directory = layout.root / newest.path
    if newest.version == checkpoint.version and not directory.is_dir():
        # here, as torch comes with it: `--status` imports this file too
        from learner import export_checkpoint

        try:
            digest = export_checkpoint(layout, checkpoint.learner_step, directory)
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


def parsed(text: str) -> tuple[Path, int]:
    """Example: `runs/a@40` is runs/a and 40."""
    run, at, step = text.rpartition("@")
    if not at or not step.isdigit() or int(step) < 1:
        raise ConfigError(f"--fork {text}: give a run and one of its learner steps, e.g. runs/a@40")
    return Path(run), int(step)


def _check_is_the_fork(layout: RunLayout, text: str) -> None:
    run, step = parsed(text)
    wanted = f"{RunLayout.open(run).info.run_id}@{step}"
    if layout.info.forked_from != wanted:
        made = (
            f"is a fork of run {layout.info.forked_from}"
            if layout.info.forked_from
            else "is no fork"
        )
        raise ConfigError(
            f"{layout.root} {made}, not of {text}, which is run {wanted}; choose another run_dir"
        )

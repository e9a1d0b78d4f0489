"""What is looked at and made before the processes of a run start: its tasks, its directory, the GPUs it asks for."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

import configs
import resume
from cluster import available_gpus
from configs import Config, ConfigError
from envs import is_program, list_tasks, try_environment
from store import RunLayout, check_unowned, write_open_sql


def check_same_run(config: Config) -> None:
    """A run is continued by one process at a time, with the config it was made with. Raises LockedError, ConfigError."""
    from learner import with_published  # here and below, as torch comes with it

    root = Path(config.run_dir)
    if RunLayout.exists(root):
        layout = RunLayout.open(root)
        check_unowned(layout)
        changed = resume.differences(config, with_published(configs.from_yaml(layout.info.config_yaml)))
        if changed:
            raise ConfigError(
                f"{root} was made by another config ({'; '.join(changed)}); go on with its own settings (--resume {root} "
                f"without these), or begin a new run: another run_dir, or --fork {root}@STEP run_dir=NEW"
            )


def open_run(config: Config) -> RunLayout:
    """The run directory, made now if it is not there."""
    from gigpo import advantages_macro
    from learner import advantage_settings

    root = Path(config.run_dir)
    if RunLayout.exists(root):
        layout = RunLayout.open(root)
    else:
        layout = RunLayout.create(root, config_yaml=configs.to_yaml(config), storage_uri=config.store.uri)
    write_open_sql(layout, macros=[advantages_macro(advantage_settings(config))], max_staleness=config.max_staleness)
    return layout


def check_tasks(config: Config, console: Console) -> None:
    """Makes the games that are missing and starts the environment once. Raises EnvironmentFailed."""
    with console.status(f"tasks of {config.env.name} (games are made once and kept)"):
        splits = list_tasks(config.env.name, config.env.options)
        if is_program(config.env.name) and (config.actors.scripted or not config.model.path):
            raise ConfigError(
                f"env.name={config.env.name} is an agent program: it needs a model that can chat, from its first episode on; "
                "set model.path, and leave actors.scripted=false"
            )
        try_environment(config.env.name, config.env.options, splits["train"][0], answer_timeout_s=config.env.answer_timeout_s)
    console.print(
        f"{config.env.name}: {len(splits['train'])} training tasks, {len(splits['heldout'])} held out",
    )


def check_gpus(config: Config, *, learns: bool) -> None:
    """Ray would wait for ever for a GPU that is not there. Raises ConfigError."""
    actors, learner = config.actors, config.learner
    workers = configs.n_workers(config) if learns else actors.workers
    wanted, there = workers * actors.gpus_per_worker + learns * learner.ranks * learner.gpus_per_rank, available_gpus()
    if wanted > there:
        raise ConfigError(
            f"the config asks for {wanted} GPUs (actors.workers x actors.gpus_per_worker + learner.ranks x "
            f"learner.gpus_per_rank), Ray has {there}; set both to 0 for a CPU run, or join a cluster with RAY_ADDRESS"
        )

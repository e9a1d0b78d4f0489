"""Play every held-out task with the weights of a run, a checkpoint, a model or a server.

A run is evaluated in its own store, if no settings are given. Otherwise the evaluation makes a run
directory of its own, `run_dir=NEW`. Started again, it goes on where it was stopped: stored episodes
are not played again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

import configs
from actors import ChatPolicy
from analysis import show_evaluation
from configs import Config, ConfigError
from coordinator import Status
from driver import resume, run_control, run_lock
from driver.cluster import ray_cluster
from driver.config_file import load_config
from driver.environment_check import check_tasks, try_tasks
from driver.model_download import try_model, with_model
from driver.preflight import (
    check_algorithm,
    check_engine_arguments,
    check_gpus,
    check_run_dir,
    check_same_run,
    check_writable,
    disk_faults,
    make_or_open_run,
    show_missing,
)
from driver.processes import n_processes
from driver.progress import Progress, said_while, said_with_spinner
from driver.prometheus import prometheus_endpoint
from driver.screen import shown_in
from driver.supervisor import Supervisor
from driver.trackers.follow import follow_metrics
from driver.trackers.tracker import check_trackers
from printable import shell_word
from store import (
    BASE_POLICY,
    RunLayout,
    StoreError,
    VersionRecord,
    check_unowned,
    files_digest,
    is_published,
    keep_compiled_code,
    open_run,
    parse_run_step,
    trust,
    weight_files,
)

# A round is opened whole: each episode is a group of its own.
NEWEST_WEIGHTS = """
SELECT count(DISTINCT task_id) AS n_tasks, count(*) AS n_episodes,
    count(*) FILTER (state = 'open') AS n_open
FROM newest_round WHERE evaluated_version = (SELECT max(version) FROM versions)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    """The evaluation round of the newest weights, all 0 if there is none."""

    n_tasks: int
    n_episodes: int  # opened
    n_open: int  # of these, still to be played


def evaluate(
    weights: str,
    overrides: Sequence[str],
    *,
    console: Console,
    trusts: bool,
    dry_run: bool,
    all_settings: bool,
) -> None:
    """Evaluate `weights`: RUN, RUN@STEP or a config file. Show success by task type.

    `trusts` counts the run as made by this user. `dry_run` only shows the settings that differ from
    the defaults (all of them if `all_settings`), and what is missing here. Raises UserError.
    """
    keep_compiled_code()  # the weights' names come from the learner's package
    if trusts:
        _trust(weights, overrides)
    config = new_run_settings(weights, overrides) if overrides else own_run_settings(weights)
    check_algorithm(config)  # the views of a new run have its settings
    check_engine_arguments(config)
    check_run_dir(config)
    check_trackers(config)
    _check_endpoint(config, console)
    if dry_run:
        missing: list[str] = []
        if is_config(weights):  # the weights of a run are copied when its evaluation starts
            config, missing, needs = try_model(config)
            missing += disk_faults(needs)
        settings = configs.as_yaml(config) if all_settings else configs.differences(config)
        console.print(settings)
        show_missing([*missing, *try_tasks(config, console)], console)
        return
    check_writable(config)
    if overrides:
        _evaluate_in_new_run(config, weights, console=console)
    elif not is_evaluated(config):
        config = with_model(config, console)  # downloads it if the cache has lost it
        check_tasks(config, console)
        _play(config, console, in_new_run=False)
    show_evaluation(Path(config.run_dir), console)


def _trust(weights: str, overrides: Sequence[str]) -> None:
    """Count the evaluated run, or those of a config, as made by this user.

    A config may lie in a run, and its run_dir may be one.
    """
    if not is_config(weights):
        trust(parse_run_step(weights)[0])
        return
    given = load_config(weights, overrides, trusts=True)
    run = Path(given.config.run_dir)
    if RunLayout.exists(run) or not given.trusted:
        trust(run)


def own_run_settings(run: str) -> Config:
    """Return the settings to evaluate a run in its own store. Raises ConfigError, StoreError."""
    if run.rpartition("@")[0] or is_config(run):
        raise ConfigError(
            f"{run} is evaluated in a store of its own; give its directory: run_dir=..."
        )
    layout = RunLayout.open(Path(run))
    run_lock.check_idle(
        layout.root,
        instead=f"evaluate its newest weights beside it: gigpo evaluate {run} run_dir=NEW",
    )
    check_unowned(layout)
    return resume.load(Path(run), [])


def new_run_settings(weights: str, overrides: Sequence[str]) -> Config:
    """Return the settings of an evaluation in a new run. Raises ConfigError, StoreError."""
    new, others = configs.split_run_dir(overrides)
    if new is None:
        raise ConfigError(
            f"gigpo evaluate {weights} with settings of its own needs a directory of its own: "
            "run_dir=NEW"
        )
    if is_config(weights):
        return _settings_of_config(weights, overrides)
    return _settings_of_run(weights, others, new=new)


def _settings_of_config(file: str, overrides: Sequence[str]) -> Config:
    """Return the settings to evaluate the model or the server that a config names."""
    config = load_config(file, overrides, trusts=False).config
    if not config.model.path and not config.endpoint.url:
        raise ConfigError(
            f"{file} has no model.path; give the model to evaluate: model.path=... or "
            "endpoint.url=..."
        )
    if config.endpoint.url:
        return configs.without_model(config)
    # The model itself is evaluated. It has no adapters.
    return replace(config, model=replace(config.model, lora_rank=0))


def _settings_of_run(weights: str, overrides: Sequence[str], *, new: str) -> Config:
    """Return the settings to evaluate RUN or RUN@STEP in the directory `new`."""
    run, step = parse_run_step(weights)
    if any(text.startswith("model.path=") for text in overrides):
        raise ConfigError(
            f"model.path= beside {weights}, whose weights are evaluated; leave it out, or give a "
            "config instead"
        )
    config = resume.load(run, overrides)
    if config.store.uri == resume.load(run, []).store.uri:  # that of RUN
        config = replace(config, store=replace(config.store, uri=""))
    if config.endpoint.url:  # the run's tasks and settings
        if step is not None:
            raise ConfigError(
                f"endpoint.url= beside {weights}, whose weights are evaluated; leave it out, or "
                f"give {run} instead"
            )
        return replace(configs.without_model(config), run_dir=new)
    model = Path(new) / _weights_name(run, step)
    return replace(
        config, run_dir=new, source=[], model=replace(config.model, path=str(model), lora_rank=0)
    )


def is_config(weights: str) -> bool:
    """Return whether the weights are named by a YAML file, not by a run."""
    return weights.endswith((".yaml", ".yml"))


def _evaluate_in_new_run(config: Config, weights: str, *, console: Console) -> None:
    """Evaluate in the directory of `config`, and make it if it is not there."""
    if is_config(weights):
        config = with_model(config, console)
    # First: another user may have put an evaluation of theirs there since run_dir was checked.
    run_lock.make_run_directory(Path(config.run_dir), private=configs.holds_secrets(config))
    try:
        check_same_run(config)
    except ConfigError as error:
        raise ConfigError(
            f"{weights} is evaluated in a directory of its own: give another run_dir, as {error}"
        ) from None
    if is_evaluated(config):
        return
    if not is_config(weights) and not config.endpoint.url:
        run, step = parse_run_step(weights)
        _copy_weights(run, step, model=Path(config.model.path))
    configs.check_model_path(config)
    check_tasks(config, console)
    make_or_open_run(config)
    resume.remember(config)
    _play(config, console, in_new_run=True)


def is_evaluated(config: Config) -> bool:
    """Return whether every held-out task was played often enough with the run's newest weights."""
    run = Path(config.run_dir)
    if not RunLayout.exists(run):
        return False
    with open_run(run) as reader:
        (newest,) = reader.records(NEWEST_WEIGHTS, _Round)
    n_wanted = config.evaluation.final_episodes_per_task * newest.n_tasks
    return n_wanted > 0 and newest.n_open == 0 and newest.n_episodes >= n_wanted


def _weights_name(run: Path, step: int | None) -> str:
    """Return the directory name of the weights: different weights have different names."""
    layout = RunLayout.open(run)
    return f"{layout.info.run_id}-" + (
        f"v{_newest_version(layout).version:06d}" if step is None else f"step{step:06d}"
    )


def _newest_version(layout: RunLayout) -> VersionRecord:
    """Return the newest version whose files are there. Raises StoreError."""
    from learner import find_version

    try:
        return find_version(layout, None)
    except ValueError as error:
        raise StoreError(f"{layout.root} has no weights to evaluate: {error}") from error


def _copy_weights(run: Path, step: int | None, *, model: Path) -> None:
    """Write the weights to evaluate as a Hugging Face directory, unless it exists.

    Raises StoreError.
    """
    from learner import export_checkpoint, export_version

    if model.is_dir():
        return
    layout = RunLayout.open(run)
    try:
        if step is None:
            export_version(layout, _newest_version(layout), dest=model)
        else:
            export_checkpoint(layout, step, dest=model)
    except (ValueError, FileNotFoundError) as error:
        raise StoreError(
            f"{run}{'' if step is None else f'@{step}'} cannot be evaluated: {error}"
        ) from error


def _check_endpoint(config: Config, console: Console) -> None:
    """Ask the model server once before anything starts. Raises EndpointFailed."""
    if not config.endpoint.url:
        return

    async def ask() -> None:
        policy = ChatPolicy(config)
        try:
            await policy.try_once(temperature=config.evaluation.temperature)
        finally:
            await policy.close()

    with said_with_spinner(f"asking {config.endpoint.url} once", console):
        asyncio.run(ask())
    console.print(f"{config.endpoint.model} answers at {config.endpoint.url}")


def _play(config: Config, console: Console, *, in_new_run: bool) -> None:
    """Play every held-out task `final_episodes_per_task` times with the run's newest weights.

    A new run has no weights yet: its version 0 is the model, or the server that plays.
    """
    run = Path(config.run_dir)
    # Without model.path a server plays, and no process reads this directory.
    model_path = config.model.path or str(run / BASE_POLICY)
    with run_lock.driving(run, private=configs.holds_secrets(config)), ExitStack() as ray:
        with said_while(lambda: "starting Ray", console.print):
            processes = n_processes(config, learns=False)
            ray.enter_context(ray_cluster(config.run_dir, processes=processes))
        check_gpus(config, learns=False)
        layout = RunLayout.open(run)
        with (
            follow_metrics(config, layout, say=console.print) as metrics,
            Supervisor(
                config,
                model_path,
                learns=False,
                say=console.print,
                say_stopping=partial(run_control.say_stopping, run),
            ) as supervisor,
            prometheus_endpoint(config, supervisor.engine_metrics) as figures,
            Progress(config, title="evaluating", screen=shown_in(console)) as progress,
        ):
            show: Callable[[Status], None] = progress.show_evaluation
            newest = supervisor.status().version
            has_weights = newest >= 0
            if has_weights:
                check_written(layout, newest)
            if config.endpoint.url:
                if not has_weights:
                    supervisor.publish(endpoint_as_version_zero(layout, config))
            else:
                if in_new_run and not has_weights:
                    supervisor.publish(model_as_version_zero(layout, Path(model_path)))
                show = metrics.after(show)
            supervisor.evaluate(config.evaluation.final_episodes_per_task, figures.after(show))


def check_written(layout: RunLayout, version: int) -> None:
    """Raise StoreError if the learner was killed before it had written its newest version."""
    directory = layout.weights_dir(version)
    if not directory.is_dir() and not is_published(layout, layout.relative(directory)):
        raise StoreError(
            f"version {version} of {layout.root} was announced, and its learner ended before the "
            f"files were written; go on with it: gigpo train --resume {shell_word(layout.root)}, "
            "or evaluate an older version: give run_dir=NEW"
        )


def model_as_version_zero(layout: RunLayout, model: Path) -> VersionRecord:
    """Link the model as version 0 of the weights. Nobody changes it, so no copy is needed."""
    directory = layout.weights_dir(0)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not directory.exists():
        directory.unlink(missing_ok=True)  # a broken link
        target = model.resolve()
        if target.is_relative_to(layout.root.resolve()):  # then the run can be moved with it
            target = Path(os.path.relpath(model, directory.parent))
        directory.symlink_to(target, target_is_directory=True)
    digest = files_digest(weight_files(directory))
    return VersionRecord(
        version=0, path=layout.relative(directory), digest=digest, learner_step=None
    )


def endpoint_as_version_zero(layout: RunLayout, config: Config) -> VersionRecord:
    """Record the server and its model in `endpoint.json`, in place of weights."""
    directory = layout.weights_dir(0)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "endpoint.json"
    asked = {
        "url": config.endpoint.url,
        "model": config.endpoint.model,
        "body": config.endpoint.body,
    }
    path.write_text(json.dumps(asked, indent=1) + "\n")
    return VersionRecord(
        version=0, path=layout.relative(directory), digest=files_digest([path]), learner_step=None
    )

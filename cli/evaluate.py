"""Plays every held-out task, and shows the success by task type with confidence intervals.

python cli/evaluate.py RUN                                        a run's newest weights, into the
run's own store python cli/evaluate.py RUN run_dir=NEW [key=value ...]            likewise with
other tasks or settings, into a store of its own python cli/evaluate.py RUN@STEP run_dir=NEW
[key=value ...]       the weights of one of its checkpoints
python cli/evaluate.py CONFIG model.path=MODEL run_dir=NEW ...    any Hugging Face model
python cli/evaluate.py CONFIG|RUN endpoint.url=http://HOST:PORT/v1 endpoint.model=NAME run_dir=NEW
...
                                                              any model behind an OpenAI-compatible server
python cli/evaluate.py --compare RUN OTHER                        two that were evaluated, task by
task

Tasks: env.options, e.g. env.options.heldout=valid_unseen. Episodes of each:
evaluation.final_episodes_per_task, each with a sampling seed of its own. evaluation.temperature=0
is greedy. The same command goes on where it was stopped: episodes that are in the store are not
played again. --dry-run shows what would be evaluated, and whether it can be. More:
docs/evaluation.md
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from cli.command_lines import evaluate_options

if __name__ == "__main__":  # --help and mistakes are answered here: the imports below take seconds
    evaluate_options(sys.argv[1:], description=__doc__)

from rich.console import Console

import configs
from actors import ChatPolicy, EndpointFailed, weight_files
from analysis import evaluation_stats as evaluation
from configs import Config, ConfigError
from driver import resume
from driver import run_control as runs
from driver.errors import ComponentFailed
from driver.preflight import (
    check_gpus,
    check_run_dir,
    check_same_run,
    check_tasks,
    check_writable,
    disk_faults,
    open_run,
    show_missing,
    try_model,
    try_tasks,
    with_model,
)
from driver.processes import n_processes
from driver.progress import Progress, said_while, said_with_spinner
from driver.ray_cluster import ray_cluster
from driver.shutdown import Interrupt
from driver.supervisor import Supervisor
from driver.tensorboard_writer import tensorboard_files
from envs import EnvironmentFailed
from printable import fail, plain_console, protect_terminal
from store import RunLayout, StoreError, VersionRecord, check_unowned, files_digest, trust


def main(arguments: list[str]) -> int:
    options = evaluate_options(arguments, description=__doc__)
    Interrupt().listen()
    console = plain_console(soft_wrap=True)
    try:
        if options.compare:
            first, second = options.compare
            evaluation.show_evaluation_comparison(first, second, console)
            return 0
        if options.trust:
            trust(trusted_run(options.weights, options.overrides))
        config = (
            asked_config(options.weights, options.overrides)
            if options.overrides
            else own_config(options.weights)
        )
        check_run_dir(config)
        check_endpoint(config, console)
        if options.dry_run:
            # the weights of a run are taken when its evaluation starts
            config, missing, needs = (
                try_model(config) if is_config(options.weights) else (config, [], [])
            )
            console.print(configs.as_yaml(config), markup=False)
            show_missing([*missing, *disk_faults(needs), *try_tasks(config, console)], console)
            return 0
        check_writable(config)
        if options.overrides:
            evaluate_apart(config, options.weights, console)
        else:
            # the run's own commit, where the cache has lost it
            config = with_model(config, console)
            check_tasks(config, console)
            play(config, console, apart=False)
        evaluation.show_evaluation(Path(config.run_dir), console)
    except (ConfigError, StoreError, EnvironmentFailed, ComponentFailed, EndpointFailed) as error:
        fail(error)
        return 2
    except KeyboardInterrupt as stop:
        again = shlex.join(["python", "cli/evaluate.py", *arguments])
        console.print(
            f"\n{str(stop) or 'stopped; no process was up'}. Go on with:  {again}", markup=False
        )
        return 130
    return 0


def trusted_run(weights: str, overrides: Sequence[str]) -> Path:
    """Return the run that --trust is about: the one that is evaluated; of a config the one in its
    run_dir.
    """
    return (
        Path(configs.load(weights, overrides).run_dir)
        if is_config(weights)
        else run_and_step(weights)[0]
    )


def own_config(run: str) -> Config:
    """Of a run that is evaluated in its own store. Raises ConfigError, StoreError."""
    if run.rpartition("@")[0] or is_config(run):
        raise ConfigError(
            f"{run} is evaluated in a store of its own; give its directory: run_dir=..."
        )
    layout = RunLayout.open(Path(run))
    runs.check_idle(
        layout.root,
        instead=f"evaluate its newest weights beside it: python cli/evaluate.py {run} run_dir=NEW",
    )
    check_unowned(layout)
    return resume.load(Path(run), [])


def asked_config(weights: str, overrides: Sequence[str]) -> Config:
    """Of an evaluation with a directory of its own. Raises ConfigError, StoreError."""
    directories = [
        text.removeprefix("run_dir=") for text in overrides if text.startswith("run_dir=")
    ]
    if not directories:
        raise ConfigError(
            f"cli/evaluate.py {weights} with settings of its own needs a directory of its own: "
            "run_dir=NEW"
        )
    if is_config(weights):
        config = configs.load(weights, overrides)
        if not config.model.path and not config.endpoint.url:
            raise ConfigError(
                f"{weights} has no model.path; give the model to evaluate: model.path=... or "
                "endpoint.url=..."
            )
        return configs.without_model(config) if config.endpoint.url else config
    run, step = run_and_step(weights)
    others = [text for text in overrides if not text.startswith("run_dir=")]
    if any(text.startswith("model.path=") for text in others):
        raise ConfigError(
            f"model.path= beside {weights}, whose weights are evaluated; leave it out, or give a "
            "config instead"
        )
    config, new = resume.load(run, others), directories[-1]
    if config.endpoint.url:  # the run's tasks and settings
        if step is not None:
            raise ConfigError(
                f"endpoint.url= beside {weights}, whose weights are evaluated; leave it out, or "
                f"give {run} instead"
            )
        return replace(configs.without_model(config), run_dir=new)
    model = Path(new) / weights_name(run, step)
    return replace(
        config, run_dir=new, source=[], model=replace(config.model, path=str(model), lora_rank=0)
    )


def is_config(weights: str) -> bool:
    """Whether the first argument is a YAML file, not a run."""
    return weights.endswith((".yaml", ".yml"))


def run_and_step(text: str) -> tuple[Path, int | None]:
    """Example: `runs/a@40` is runs/a and 40, `runs/a` its newest weights."""
    run, at, step = text.rpartition("@")
    if not at:
        return Path(text), None
    if not step.isdigit():
        raise ConfigError(
            f"{text}: give a run, or a run and one of its checkpoints' learner steps, e.g. "
            "runs/a@40"
        )
    return Path(run), int(step)


def evaluate_apart(config: Config, weights: str, console: Console) -> None:
    """In the directory of `config`, which is made now if it is not there."""
    if is_config(weights):
        config = with_model(config, console)
    try:
        check_same_run(config)
    except ConfigError as error:
        raise ConfigError(
            f"{weights} is evaluated in a directory of its own: give another run_dir, as {error}"
        ) from None
    if not is_config(weights) and not config.endpoint.url:
        take_weights(*run_and_step(weights), Path(config.model.path))
    configs.check_model_path(config)
    check_tasks(config, console)
    open_run(config)
    resume.remember(config)
    play(config, console, apart=True)


def weights_name(run: Path, step: int | None) -> str:
    """Of their directory: other weights have another one, so that they are not taken for those that
    were evaluated.
    """
    layout = RunLayout.open(run)
    return f"{layout.info.run_id}-" + (
        f"v{newest_version(layout).version:06d}" if step is None else f"step{step:06d}"
    )


def newest_version(layout: RunLayout) -> VersionRecord:
    """Of those whose files are there. Raises StoreError."""
    from learner import find_version

    try:
        return find_version(layout, None)
    except ValueError as error:
        raise StoreError(f"{layout.root} has no weights to evaluate: {error}") from error


def take_weights(run: Path, step: int | None, model: Path) -> None:
    """The weights to evaluate, as a Hugging Face directory `model`, unless they are there already.
    Raises StoreError.
    """
    from learner import export_checkpoint, export_version

    if model.is_dir():
        return
    layout = RunLayout.open(run)
    try:
        if step is None:
            export_version(layout, newest_version(layout), model)
        else:
            export_checkpoint(layout, step, model)
    # there is none, it is damaged, or the base model is gone
    except (ValueError, FileNotFoundError) as error:
        raise StoreError(
            f"{run}{'' if step is None else f'@{step}'} cannot be evaluated: {error}"
        ) from error


def check_endpoint(config: Config, console: Console) -> None:
    """One question to the server of others, before anything starts. Raises EndpointFailed, in one
    line.
    """
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
    console.print(f"{config.endpoint.model} answers at {config.endpoint.url}", markup=False)


def play(config: Config, console: Console, *, apart: bool) -> None:
    """Every held-out task, `final_episodes_per_task` times, with the newest weights of the
    directory; `apart` the model's.
    """
    run = Path(config.run_dir)
    # of an endpoint: nobody looks at it
    model_path = config.model.path or str(run / "base" / "policy")
    with runs.driving(run), ExitStack() as ray:
        with said_while(lambda: "starting Ray", partial(console.print, markup=False)):
            ray.enter_context(
                ray_cluster(config.run_dir, processes=n_processes(config, learns=False))
            )
        check_gpus(config, learns=False)
        with (
            tensorboard_files(RunLayout.open(run), partial(console.print, markup=False)) as curves,
            Supervisor(
                config,
                model_path,
                learns=False,
                say=partial(console.print, markup=False),
                say_stopping=partial(runs.say_stopping, run),
            ) as session,
            Progress(config, "evaluating", console) as progress,
        ):
            if (apart or config.endpoint.url) and session.status().version < 0:
                layout = RunLayout.open(run)
                session.publish(
                    served(layout, config)
                    if config.endpoint.url
                    else version_zero(layout, Path(model_path))
                )
            show = (
                progress.show_evaluation
                if config.endpoint.url
                else curves.beside(progress.show_evaluation)
            )
            session.evaluate(config.evaluation.final_episodes_per_task, show)


def version_zero(layout: RunLayout, model: Path) -> VersionRecord:
    """What the engines start from, by its digest; a link, as nobody changes it."""
    directory = layout.weights_dir(0)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if not directory.exists():
        directory.unlink(missing_ok=True)  # a link to what was elsewhere
        # then the directory may be moved
        inside = model.resolve().is_relative_to(layout.root.resolve())
        directory.symlink_to(
            os.path.relpath(model, directory.parent) if inside else model.resolve(),
            target_is_directory=True,
        )
    digest = files_digest(weight_files(directory))
    return VersionRecord(
        version=0, path=layout.relative(directory), digest=digest, learner_step=None
    )


def served(layout: RunLayout, config: Config) -> VersionRecord:
    """Of others' weights there is a file that says whose they are."""
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


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main(sys.argv[1:]))

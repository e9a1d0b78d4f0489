"""Trains an agent: python cli/train.py CONFIG [key=value ...] [--dry-run], or --resume, --status,
--stop RUN, --workers RUN N

A new run from another's checkpoint: python cli/train.py --fork RUN@STEP run_dir=NEW [key=value ...]

Without playing anything, from what other runs have stored: python cli/train.py CONFIG
source=RUN[@where] ...

     configs ── read once ──┐
                            ▼
     envs ──► actors ──► store ──► gigpo ──► learner
                 ▲                              │
                 └────── numbered weights ◄─────┘

Wiring only: reads the config, makes what is missing (games, a base policy), starts the processes,
waits, stops them. The same command continues a run that was stopped or killed; so does --resume
RUN, which needs no config.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from cli.command_lines import train_options

if __name__ == "__main__":  # --help and mistakes are answered here: the imports below take seconds
    train_options(sys.argv[1:])

from rich.console import Console

import configs
from actors import sample_chats
from analysis import report
from configs import Config, ConfigError
from driver import fork as forking
from driver import offline_sources as sources
from driver import resume
from driver import run_control as runs
from driver.errors import ComponentFailed
from driver.preflight import (
    FAILURE_LOG,
    check_gpus,
    check_loss,
    check_run_dir,
    check_same_run,
    check_tasks,
    check_writable,
    disk_faults,
    missing_gpus,
    open_run,
    run_need,
    show_missing,
    try_model,
    try_tasks,
    with_model,
)
from driver.processes import n_processes
from driver.progress import Progress, said_while
from driver.ray_cluster import ray_cluster
from driver.shutdown import Interrupt
from driver.supervisor import Supervisor
from driver.tensorboard_writer import tensorboard_files
from envs import EnvironmentFailed, is_program, list_tasks
from printable import fail, plain_console, protect_terminal
from store import RunLayout, StoreError, trust


def main(arguments: list[str]) -> int:
    options = train_options(arguments)
    Interrupt().listen()
    console = plain_console(soft_wrap=True)
    try:
        if answered(options, console):
            return 0
        config = asked_config(options)
        check_loss(config)
        check_run_dir(config)  # before a download, which may take an hour
        if options.dry_run:
            dry_run(config, console)
            return 0
        config = with_model(config, console)
        if options.fork:
            forking.make(options.fork, config)
        train(config, console)
    except (ConfigError, StoreError, EnvironmentFailed, ComponentFailed) as error:
        fail(error)
        return 2
    except KeyboardInterrupt as stop:
        return interrupted(stop, options, console)
    return 0


def asked_config(options: argparse.Namespace) -> Config:
    """Raises ConfigError; StoreError if the run to go on with is none, or a stranger's that is not
    trusted.
    """
    given = [text for text in (options.config, *options.overrides) if text]
    if options.resume:
        run = Path(options.resume)
        trust_if_asked(options, run)
        config = resume.load(run, given)
    elif options.fork:
        trust_if_asked(options, forking.parsed(options.fork)[0])
        config = forking.load(options.fork, given)
    else:
        config = configs.load(options.config, options.overrides)
        run = Path(config.run_dir)
        there = [run] if RunLayout.exists(run) else []
        for asked_about in [*there, *sources.runs(config)] or [run]:
            trust_if_asked(options, asked_about)
    if config.endpoint.url:
        raise ConfigError(
            f"endpoint.url={config.endpoint.url} is for python cli/evaluate.py: a server gives "
            "neither its tokens nor their "
            "log-probabilities, so nothing can be trained from it; leave it out"
        )
    return config


def trust_if_asked(options: argparse.Namespace, run: Path) -> None:
    """With --trust, count the run as one of this user's. Raises StoreError for what is no run."""
    if options.trust:
        trust(run)


def interrupted(stop: KeyboardInterrupt, options: argparse.Namespace, console: Console) -> int:
    """Says what came of a Ctrl-C or SIGTERM, and how to go on; the exit status."""
    # of --status, ...: the run asked about is another process's
    if not (options.config or options.resume or options.fork):
        console.print("\ninterrupted")
    else:
        named = {"--resume": options.resume, "--fork": options.fork}
        words = [word for option, run in named.items() if run for word in (option, run)]
        given = [text for text in (options.config, *options.overrides) if text]
        again = shlex.join(["python", "cli/train.py", *words, *given])
        console.print(
            f"\n{str(stop) or 'stopped; no process of the run was up'}. Go on with:  {again}",
            markup=False,
        )
    return 130


def answered(options: argparse.Namespace, console: Console) -> bool:
    """Whether something was asked about another run, which is then done. Raises StoreError."""
    if options.status:
        runs.status(Path(options.status), console)
    elif options.stop:
        runs.stop(Path(options.stop), console)
    elif options.workers:
        run, number = options.workers
        if not number.isdigit() or int(number) < 1:
            raise ConfigError(
                f"--workers {run} {number}: the number of workers must be a whole number above 0"
            )
        if RunLayout.exists(Path(run)) and configs.is_offline(
            configs.from_yaml(RunLayout.open(run).info.config_yaml)
        ):
            raise ConfigError(
                f"--workers {run} {number}: the run plays nothing (offline.share=1), so it has no "
                "workers; leave it"
            )
        runs.ask_for_workers(Path(run), int(number))
        console.print(f"{run}: {number} workers from now on")
    return bool(options.status or options.stop or options.workers)


def dry_run(config: Config, console: Console) -> None:
    """Show what a start would do, and what it would miss here. Make nothing.

    Raises what a start would raise, as far as that is known here.
    """
    config, missing, needs = try_model(config)
    check_same_run(config)
    console.print(configs.as_yaml(config) + configs.describe_plan(config), markup=False)
    missing += missing_gpus(config) + disk_faults([run_need(config), *needs])
    if not configs.is_offline(config):
        missing += try_tasks(config, console)
    check_new_sources(config, console)
    show_missing(missing, console)


def check_new_sources(config: Config, console: Console) -> None:
    """Of a run that is there already they have been taken in."""
    if config.source and not RunLayout.exists(Path(config.run_dir)):
        sources.check_sources(config, console)


def train(config: Config, console: Console) -> None:
    """One run from wherever it stands to its last learner step, and its held-out evaluation."""
    configs.check_model_path(config)
    check_writable(config)
    with runs.driving(Path(config.run_dir)) as n_leftovers:
        if n_leftovers:
            console.print(
                f"removed {n_leftovers} processes that an earlier start of {config.run_dir} left "
                "behind"
            )
        check_same_run(config)
        if not configs.is_offline(config):
            check_tasks(config, console)
        check_new_sources(config, console)
        if (trained_to := report.trained_to(config)) > config.learner.steps:
            console.print(
                f"{config.run_dir} is trained to learner step {trained_to} already, so "
                f"learner.steps={config.learner.steps} "
                "trains nothing; raise learner.steps to go on"
            )
        if not report.is_finished(config):
            with ExitStack() as ray:
                with said_while(lambda: "starting Ray", partial(console.print, markup=False)):
                    ray.enter_context(
                        ray_cluster(config.run_dir, processes=n_processes(config, learns=True))
                    )
                run_to_the_end(config, console)
    report.show_report(config, console)


def run_to_the_end(config: Config, console: Console) -> None:
    """On a cluster that is there."""
    check_gpus(config, learns=True)
    with said_while(lambda: f"opening {config.run_dir}", partial(console.print, markup=False)):
        layout = open_run(config)  # only now: a run directory keeps the config it was made with
    resume.remember(config)
    model_path = config.model.path or str(make_base_policy(config, console))
    if config.source:
        sources.take(config, console)
    with (
        tensorboard_files(layout, partial(console.print, markup=False)) as curves,
        session_of(config, model_path, config, console) as session,
        Progress(config, "training", console) as progress,
    ):
        console.print(f"{layout.root}: {session.restored}")
        learner_step = session.train(curves.beside(progress.show))
        if learner_step < config.learner.steps:
            console.print(
                f"stored rollouts are used up after learner step {learner_step}; raise offline.uses "
                "to go on"
            )
        if not configs.is_offline(config):
            episodes_per_task = config.evaluation.final_episodes_per_task
            session.evaluate(episodes_per_task, curves.beside(progress.show_evaluation))


def make_base_policy(config: Config, console: Console) -> Path:
    """A tiny model that plays random but valid commands: cloned, in a run of its own, from a
    scripted player.

    For an agent program it is the untrained model itself. A run that trains from others has theirs.
    """
    with said_while(lambda: "loading libraries", partial(console.print, markup=False)):
        from learner import copy_weights, make_tiny_model, train_tokenizer

    directory = Path(config.run_dir) / "base"
    policy = directory / "policy"
    if config.source:
        return sources.base_policy(config, policy)
    if policy.is_dir():
        return policy
    if is_program(config.env.name):  # nobody can play it by a script, so there is nothing to clone
        console.print(
            f"no model.path: a tiny model made from nothing, in {policy}; it has to learn to write "
            "first"
        )
        texts = (
            text
            for task in list_tasks(config.env.name, config.env.options)["train"]
            for text in task.data.values()
        )
        tokenizer = train_tokenizer(texts, vocabulary_size=config.model.tiny.vocabulary_size)
        make_tiny_model(policy, tokenizer, config.model.tiny, seed=config.seed)
        return policy
    console.print(
        f"no model.path: cloning a tiny base policy from a scripted player, in {directory}",
    )
    untrained = directory / "untrained"
    if not untrained.is_dir():
        log = Path(config.run_dir) / "logs" / FAILURE_LOG
        with said_while(
            lambda: "making a tokenizer and a tiny model", partial(console.print, markup=False)
        ):
            chats = sample_chats(config, log=log)
            tokenizer = train_tokenizer(chats, vocabulary_size=config.model.tiny.vocabulary_size)
            make_tiny_model(untrained, tokenizer, config.model.tiny, seed=config.seed)
    clone = replace(
        configs.cloning_config(config), run_dir=str(directory), store=replace(config.store, uri="")
    )
    layout = open_run(clone)
    with (
        tensorboard_files(layout, partial(console.print, markup=False)) as curves,
        session_of(clone, str(untrained), config, console) as session,
        Progress(clone, "cloning", console) as progress,
    ):
        session.train(curves.beside(progress.show))
        version = session.status().version
    runs.goes_on(Path(config.run_dir))
    copy_weights(layout.weights_dir(version), policy, follow_links=False)
    console.print(f"the base policy is cloned: {policy}. Next comes the training", markup=False)
    return policy


def session_of(config: Config, model_path: str, driven: Config, console: Console) -> Supervisor:
    """`driven` is the config of the run that this process drives, of which another may be a
    part.
    """
    say_stopping = partial(runs.say_stopping, Path(driven.run_dir))
    return Supervisor(
        config,
        model_path,
        learns=True,
        say=partial(console.print, markup=False),
        say_stopping=say_stopping,
    )


if __name__ == "__main__":
    protect_terminal()
    sys.exit(main(sys.argv[1:]))

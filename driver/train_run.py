"""Train a run from its settings to its last learner step and its held-out evaluation.

`settings_to_train` and `settings_to_begin` read the settings of a new run, `settings_to_resume`
those of a run that goes on, `settings_to_fork` those of a new run from another's checkpoint.
`train` makes what is missing (a download, games, a base policy), starts the processes, waits and
stops them. `dry_run` only shows what `train` would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console

import configs
from actors import sample_chats
from analysis import is_finished, show_report, trained_to, write_report_file
from configs import Config, ConfigError
from coordinator import check_order
from driver import fork, offline_sources, resume, run_control, run_lock
from driver.cluster import ray_cluster
from driver.config_file import load_config
from driver.environment_check import FAILURE_LOG, check_tasks, try_tasks
from driver.model_download import try_model, with_model
from driver.preflight import (
    check_algorithm,
    check_engine_arguments,
    check_gpus,
    check_loss,
    check_run_dir,
    check_same_run,
    check_writable,
    disk_faults,
    make_or_open_run,
    missing_gpus,
    run_need,
    show_missing,
)
from driver.processes import n_processes
from driver.progress import Progress, said_while
from driver.prometheus import prometheus_endpoint
from driver.screen import Screen
from driver.supervisor import Supervisor
from driver.trackers.follow import Consumer, follow_metrics
from driver.trackers.tracker import check_trackers
from driver.webhook import AlarmWebhook, webhook_url
from envs import is_program, list_tasks
from printable import one_line
from store import (
    BASE_POLICY,
    TRAIN,
    RunLayout,
    check_fork,
    is_published,
    keep_compiled_code,
    open_storage,
    publish_directory,
    trust,
)


def settings_to_train(config_file: str, overrides: Sequence[str], *, trusts: bool) -> Config:
    """Return the settings of a config file with `key=value` overrides.

    `trusts` counts the runs in which the file lies, and in run_dir, and its sources, as made by
    this user. Raises ConfigError; StoreError for a stranger's run that is not trusted.
    """
    given = load_config(config_file, overrides, trusts=trusts)
    config = given.config
    if trusts:
        for run in _runs_named(config) or ([] if given.trusted else [Path(config.run_dir)]):
            trust(run)
    return _checked(config)


def settings_to_begin(
    config_file: str, uri: str, overrides: Sequence[str], *, trusts: bool
) -> Config:
    """Return the settings of a new run whose store.uri is `uri`. Raises as `settings_to_train`.

    Its directory is the one in which `gigpo train --resume URI` would go on. `trusts` is needed
    there, and says nothing about a run that is not made yet.
    """
    root, others = resume.directory_of(uri, overrides)
    overrides = [*others, f"store.uri={uri}", f"run_dir={root}"]
    config = load_config(config_file, overrides, trusts=trusts).config
    if trusts:
        for run in _runs_named(config):
            trust(run)
    return _checked(config)


def _runs_named(config: Config) -> list[Path]:
    """Return the runs that exist among run_dir and the sources."""
    there = [Path(config.run_dir)] if RunLayout.exists(Path(config.run_dir)) else []
    return [*there, *offline_sources.source_runs(config)]


def settings_to_resume(run: Path, overrides: Sequence[str], *, trusts: bool) -> Config:
    """Return the settings of a run's newest start with overrides. Raises as `settings_to_train`."""
    if trusts:
        trust(run)
    return _checked(resume.load(run, overrides))


def settings_to_fork(source: str, overrides: Sequence[str], *, trusts: bool) -> Config:
    """Return the settings of the fork `source`, RUN@STEP. Raises as `settings_to_train`."""
    if trusts:
        trust(fork.parse(source)[0])
    config = _checked(fork.load(source, overrides))
    if trusts:
        for played in offline_sources.source_runs(config):
            trust(played)
    if not RunLayout.exists(Path(config.run_dir)):
        run, learner_step = fork.source_of(source)
        check_fork(run, Path(config.run_dir), learner_step=learner_step)
    return config


def _checked(config: Config) -> Config:
    """Refuse settings that cannot train, before a download that may take an hour."""
    if config.endpoint.url:
        raise ConfigError(
            f"endpoint.url={config.endpoint.url} is for gigpo evaluate: a server gives neither its "
            "tokens nor their log-probabilities, so nothing can be trained from it; leave it out"
        )
    check_algorithm(config)
    check_loss(config)
    check_engine_arguments(config)
    if configs.draws_by_weight(config):
        check_order(config.tasks.order)
    check_trackers(config)
    webhook_url(config)
    check_run_dir(config)
    if config.store.uri:
        open_storage(config.store.uri)  # refuses a scheme; nothing is contacted
    return config


def dry_run(
    config: Config, screen: Screen, *, all_settings: bool, estimates: bool, fork_of: str = ""
) -> bool:
    """Show what `train` would do and what is missing on this machine. Make nothing.

    Show the settings that differ from the defaults, or all of them if `all_settings`. If
    `estimates`, show how fast the run would be, and return whether it fits its GPUs. Raise the
    errors of `train`, as far as they are known here.
    """
    console = screen.console
    config, missing, needs = try_model(config)
    check_same_run(config)
    if not missing:
        offline_sources.check_vocabularies(config)
    settings = configs.as_yaml(config) if all_settings else configs.differences(config)
    console.print(settings + configs.describe_plan(config))
    if estimates:
        console.print(configs.describe_estimate(config))
    missing += missing_gpus(config) + disk_faults([run_need(config), *needs])
    if not configs.is_offline(config):
        missing += try_tasks(config, console)
    _check_new_sources(config, console, fork_of=fork_of)
    show_missing(missing, console)
    fits = not (estimates and configs.misfits(config))
    if not fits:
        console.print("this does not fit its GPUs: see the lines `does not fit` above")
    return fits


def train(config: Config, screen: Screen, *, fork_of: str = "") -> None:
    """Train a run from wherever it stands to its end, and show its report.

    `fork_of` is the RUN@STEP that a new run begins from. Raises UserError.
    """
    console = screen.console
    keep_compiled_code()
    config = with_model(config, console)
    if fork_of:
        # Before the fork exists: the next start would skip the check.
        _check_new_sources(config, console, fork_of=fork_of)
        fork.make(fork_of, config)
    configs.check_model_path(config)
    offline_sources.check_vocabularies(config)
    check_writable(config)
    run = Path(config.run_dir)
    with run_lock.driving(run, private=configs.holds_secrets(config)) as n_leftovers:
        if n_leftovers:
            console.print(f"removed {n_leftovers} processes that an earlier start of {run} left")
        check_same_run(config)
        if not configs.is_offline(config):
            check_tasks(config, console)
        _check_new_sources(config, console, fork_of="")
        if (step := trained_to(config)) > config.learner.steps:
            console.print(
                f"{run} is trained to learner step {step} already, so "
                f"learner.steps={config.learner.steps} trains nothing; raise learner.steps to go on"
            )
        if not is_finished(config):
            with ExitStack() as ray:
                with said_while(lambda: "starting Ray", console.print):
                    ray.enter_context(
                        ray_cluster(config.run_dir, processes=n_processes(config, learns=True))
                    )
                _train_to_the_end(config, screen)
    report_file = _report_file(run, screen.warn)
    screen.event("end", run=config.run_dir, learner_step=trained_to(config))
    show_report(config, screen.end, report_file=report_file)


def _report_file(run: Path, warn: Callable[[str], None]) -> Path | None:
    """Write RUN/report.html. The training is done, so any failure is one line, not its end."""
    try:
        return write_report_file(run)
    except Exception as error:  # noqa: BLE001  # of libraries that only draw: told, not raised
        why = one_line(error) or type(error).__name__
        warn(f"the report of {run} could not be written: {why}; try: gigpo report {run}")
        return None


def _check_new_sources(config: Config, console: Console, *, fork_of: str) -> None:
    """Check the sources of a new run. An existing run has already imported its sources.

    A fork of a run with sources keeps the groups of these, and imports none.
    """
    if not config.source or RunLayout.exists(Path(config.run_dir)):
        return
    forked = None
    if fork_of:
        forked, _ = fork.source_of(fork_of)
        if resume.load(forked.root, []).source:
            return
    offline_sources.check_sources(config, console, forked=forked)


def _train_to_the_end(config: Config, screen: Screen) -> None:
    """Train and evaluate on the Ray cluster that this process is connected to."""
    console = screen.console
    check_gpus(config, learns=True)
    with said_while(lambda: f"opening {config.run_dir}", console.print):
        # Only now: the directory keeps the settings of this first start.
        layout = make_or_open_run(config)
    resume.remember(config)
    model_path = config.model.path or str(_make_base_policy(config, screen))
    if not config.model.path and not is_published(layout, BASE_POLICY):
        publish_directory(layout, Path(model_path))
    if config.source:
        offline_sources.import_sources(config, Path(model_path), console)
    consumers: list[Consumer] = [screen.lines] if screen.lines else []
    if config.alarms.webhook_env:
        consumers.append(AlarmWebhook(config, layout, say=screen.warn))
    with (
        follow_metrics(
            config, layout, say=screen.warn, tell=console.print, consumers=consumers
        ) as metrics,
        _supervisor(config, model_path=model_path, driven=config, screen=screen) as supervisor,
        prometheus_endpoint(config, supervisor.engine_metrics) as figures,
        Progress(config, title="training", screen=screen) as progress,
    ):
        console.print(f"{layout.root}: {supervisor.restored}")
        screen.event("start", run=config.run_dir, run_id=layout.info.run_id)
        metrics.follow()  # those of earlier starts
        learner_step = supervisor.train(figures.after(metrics.after(progress.show)))
        if learner_step < config.learner.steps:
            console.print(
                f"offline rollouts are used up after learner step {learner_step}; raise "
                "offline.uses to go on"
            )
        if not configs.is_offline(config):
            episodes_per_task = config.evaluation.final_episodes_per_task
            show = figures.after(metrics.after(progress.show_evaluation))
            supervisor.evaluate(episodes_per_task, show)


def _make_base_policy(config: Config, screen: Screen) -> Path:
    """Make the tiny model that the training begins with, and return its directory.

    A run with sources has theirs. With files of chats only, and for an agent program, it is an
    untrained model. Any other run clones it from a scripted policy, so that it plays random but
    valid commands.
    """
    policy = Path(config.run_dir) / BASE_POLICY
    if config.source and not offline_sources.only_chats(config):
        return offline_sources.copy_base_policy(config, policy)
    if policy.is_dir():
        return policy
    if config.source:
        screen.console.print(f"no model.path: a tiny model made from nothing, in {policy}")
        with offline_sources.chat_texts(config) as texts:
            _make_tiny_model(policy, config, texts=texts)
        return policy
    by_name = configs.environments(config)
    # nobody can play a program by a script, so there is nothing to clone
    if any(is_program(own.env.name) for own in by_name.values()):
        screen.console.print(
            f"no model.path: a tiny model made from nothing, in {policy}; it has to learn to write "
            "first"
        )
        listed = [list_tasks(own.env.name, own.env.options)[TRAIN] for own in by_name.values()]
        texts = (text for tasks in listed for task in tasks for text in task.data.values())
        _make_tiny_model(policy, config, texts=texts)
    else:
        screen.console.print(
            f"no model.path: cloning a tiny base policy from a scripted policy, in {policy.parent}"
        )
        _clone_scripted_policy(policy, config, screen=screen)
        screen.console.print(f"the base policy is cloned: {policy}. Next comes the training")
    return policy


def _clone_scripted_policy(policy: Path, config: Config, *, screen: Screen) -> None:
    """Train a tiny model on what the scripted policy writes, in a run beside `policy`."""
    untrained = policy.with_name("untrained")
    if not untrained.is_dir():
        log = Path(config.run_dir) / "logs" / FAILURE_LOG
        with said_while(lambda: "making a tokenizer and a tiny model", screen.console.print):
            sampled = [sample_chats(own, log=log) for own in configs.environments(config).values()]
            _make_tiny_model(untrained, config, texts=chain.from_iterable(sampled))
    clone = replace(
        configs.cloning_config(config),
        run_dir=str(policy.parent),
        store=replace(config.store, uri=""),
        # The others would show it as another run beside the one that matters.
        trackers=[name for name in config.trackers if name == "tensorboard"],
    )
    layout = make_or_open_run(clone)
    with (
        follow_metrics(clone, layout, say=screen.warn) as metrics,
        _supervisor(clone, model_path=str(untrained), driven=config, screen=screen) as supervisor,
        Progress(clone, title="cloning", screen=screen) as progress,
    ):
        supervisor.train(metrics.after(progress.show))
        version = supervisor.status().version
    run_control.clear_stopping(Path(config.run_dir))
    from learner import copy_weights  # here: it loads torch

    copy_weights(layout.weights_dir(version), policy, follow_links=False)


def _make_tiny_model(directory: Path, config: Config, *, texts: Iterable[str]) -> None:
    """Make a tokenizer of the texts, and a model for it."""
    from learner import make_tiny_model, train_tokenizer  # here: they load torch

    tiny = config.model.tiny
    tokenizer = train_tokenizer(texts, vocabulary_size=tiny.vocabulary_size)
    make_tiny_model(directory, tokenizer=tokenizer, config=tiny, seed=config.seed)


def _supervisor(config: Config, *, model_path: str, driven: Config, screen: Screen) -> Supervisor:
    """Return the supervisor of one training.

    `driven` has the run that this process drives. It is another one while a base policy is cloned.
    """
    return Supervisor(
        config,
        model_path,
        learns=True,
        say=screen.console.print,
        warn=screen.warn,
        say_stopping=partial(run_control.say_stopping, Path(driven.run_dir)),
    )

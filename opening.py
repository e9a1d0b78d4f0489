"""What is looked at and made before the processes of a run start: its tasks, its directory, the GPUs it asks for."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

import configs
import resume
import runs
from actors import images_fault, sees_images
from cluster import available_gpus
from configs import Config, ConfigError
from envs import EnvironmentFailed, Task, is_program, list_tasks_apart, try_environment
from store import RunLayout, check_unowned, write_open_sql

SLOW_S, SAID_EVERY_S = 2.0, 30.0
FAILURE_LOG = "environment.log"  # of the check before a start; a worker has a log of its own


def published(config: Config) -> Config:
    """With every number of its loss written out. Where others' models play there is none, and torch need not be loaded."""
    if config.endpoint.url:
        return config
    from learner import with_published  # here and below: a status or a stop needs nothing of it

    return with_published(config)


def check_run_dir(config: Config) -> None:
    """The directory of a run is one, or is to be made, or has nothing else in it. Raises ConfigError."""
    root = Path(config.run_dir)
    try:
        there = next(path for path in (root, *root.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, or a folder that may not be looked into
        raise ConfigError(f"run_dir={config.run_dir!r}: {error.strerror}; give another, e.g. run_dir=runs/mine") from error
    if not config.run_dir or not there.is_dir():
        why = f"{there} is no directory" if config.run_dir else "it is empty"
        raise ConfigError(f"run_dir={config.run_dir!r}: {why}; give a directory to be made, e.g. run_dir=runs/mine")
    if there is root and not RunLayout.exists(root):
        others = sorted(path.name for path in root.iterdir() if not path.name.startswith((".", *runs.BEFORE_IT_IS_ONE)))
        if others:
            raise ConfigError(
                f"run_dir={config.run_dir!r} is no run and has other things in it ({', '.join(others[:3])}); "
                "give a directory of its own, e.g. run_dir=runs/mine"
            )


def check_writable(config: Config) -> None:
    """Make sure that files can be made in the run directory, and leave it as it was. Raises ConfigError."""
    root = Path(config.run_dir)
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = (error.strerror if isinstance(error, OSError) else None) or error
        message = f"run_dir={config.run_dir!r} cannot be written: {why}; give another, e.g. run_dir=runs/mine"
        raise ConfigError(message) from error
    finally:
        _remove_empty(made)


def check_same_run(config: Config) -> None:
    """A run is continued by one process at a time, with the config it was made with. Raises LockedError, ConfigError."""
    root = Path(config.run_dir)
    if RunLayout.exists(root):
        layout = RunLayout.open(root)
        check_unowned(layout)
        changed = resume.differences(config, published(configs.from_yaml(layout.info.config_yaml)))
        if changed:
            raise ConfigError(
                f"{root} was made by another config ({'; '.join(changed)}); go on with its own settings (--resume {root} "
                f"without these), or begin a new run: another run_dir, or --fork {root}@STEP run_dir=NEW"
            )


def open_run(config: Config) -> RunLayout:
    """The run directory, made now if it is not there."""
    root = Path(config.run_dir)
    if RunLayout.exists(root):
        layout = RunLayout.open(root)
    else:
        layout = RunLayout.create(root, config_yaml=configs.to_yaml(config), storage_uri=config.store.uri)
    write_open_sql(layout, macros=_macros(config), max_staleness=config.max_staleness)
    return layout


def _macros(config: Config) -> list[str]:
    """advantages(), of a run that may have some."""
    if config.endpoint.url:
        return []
    from gigpo import advantages_macro
    from learner import advantage_settings

    return [advantages_macro(advantage_settings(config))]


def check_tasks(config: Config, console: Console) -> None:
    """Makes the games that are missing and starts the environment once.

    Raises EnvironmentFailed; ConfigError if it shows images that the model is not shown.
    """
    env, name = config.env, config.env.name
    with _failure_log(Path(config.run_dir) / "logs" / FAILURE_LOG) as log:
        with said_when_slow(f"listing the tasks of {name} (games are made once and kept)", console):
            splits = list_tasks_apart(name, env.options, playable=True, log=log)
        assert splits is not None  # as it is to be played
        if is_program(name):
            _check_program(config)
        with said_when_slow(f"starting {name} once", console):
            seen = try_environment(name, env.options, splits["train"][0], answer_timeout_s=env.answer_timeout_s, log=log)
    if seen is not None and seen.images and config.endpoint.url:
        raise ConfigError(f"env.name={name} shows images, which are not sent to endpoint.url; have the environment show text")
    if seen is not None and (fault := images_fault(seen, sees_images=_model_sees_images(config), style=config.prompt.style)):
        raise ConfigError(f"env.name={name}: {fault}")
    console.print(task_counts(name, splits))


def try_model(config: Config) -> None:
    """For a dry run: a model that is here is looked at, another may be where the run will be. Raises ConfigError."""
    if config.model.path and Path(config.model.path).exists():
        configs.check_model_path(config)


def try_tasks(config: Config, console: Console) -> None:
    """For a dry run: the number of tasks, where none has to be made for that. Raises EnvironmentFailed, ConfigError.

    An unknown environment, and options that are unknown, missing or impossible, are refused. What else goes wrong is only said:
    files that are not here may be where the run will be.
    """
    name = config.env.name
    try:
        log = Path(tempfile.mkdtemp(prefix="gigpo-dry-run-")) / FAILURE_LOG  # a dry run makes no run directory
        with _failure_log(log), said_when_slow(f"listing the tasks of {name}", console):
            splits = list_tasks_apart(name, config.env.options, playable=False, log=log)
    except EnvironmentFailed as error:
        if not error.may_work_elsewhere:
            raise
        console.print(f"its tasks are not known here: {error}", markup=False)
        return
    if is_program(name):
        _check_program(config)
    made = f"{name}: its tasks are made when a run starts, so they are not counted here"
    console.print(made if splits is None else task_counts(name, splits), markup=False)


@contextmanager
def _failure_log(log: Path) -> Iterator[Path]:
    """Keep the log of an environment that fails within the block; remove it, and the folder made for it, otherwise.

    Raises ConfigError if it cannot be written.
    """
    made = [log.parent, *(folder for folder in log.parents[1:] if not folder.exists())]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)  # of an earlier start
    except OSError as error:
        raise ConfigError(f"cannot write {log}: {error.strerror}; give another run_dir") from error
    try:
        yield log
    except EnvironmentFailed:
        if not log.exists():  # the message has all there is to know
            _remove_empty(made)
        raise
    except BaseException:
        log.unlink(missing_ok=True)
        _remove_empty(made)
        raise
    log.unlink(missing_ok=True)
    _remove_empty(made)


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):  # something else is in it by now
        for folder in folders:
            folder.rmdir()


def task_counts(name: str, splits: Mapping[str, Sequence[Task]]) -> str:
    return f"{name}: {len(splits['train'])} training tasks, {len(splits['heldout'])} held out"


def _model_sees_images(config: Config) -> bool:
    """Of the model that is begun with. One of our own making sees none; a source's is looked at when a worker loads it."""
    return sees_images(config.model.path) if config.model.path else bool(config.source)


def _check_program(config: Config) -> None:
    name = config.env.name
    if config.endpoint.url:
        raise ConfigError(
            f"env.name={name} is an agent program, which calls its model by itself: endpoint.url is for environments only"
        )
    if config.actors.scripted:
        raise ConfigError(f"env.name={name} is an agent program, which calls a model by itself; leave actors.scripted=false")


@contextmanager
def said_when_slow(what: str, console: Console) -> Iterator[None]:
    """A line after SLOW_S, and again now and then: where the output is no terminal nothing else would be seen."""
    started, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        pause_s = SLOW_S
        while not ended.wait(pause_s):
            console.print(f"{what}: {time.monotonic() - started:.0f} s so far", markup=False)
            pause_s = SAID_EVERY_S

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        with console.status(what):
            yield
    finally:
        ended.set()
        teller.join()


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

"""Check the environment before a start: list its tasks, and start it once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from rich.console import Console

from actors import images_fault, sees_images
from configs import Config, ConfigError, environments
from driver.preflight import remove_empty
from driver.progress import said_with_spinner
from envs import (
    EnvironmentFailed,
    Task,
    is_program,
    list_tasks_in_child,
    missing_packages,
    try_environment,
)
from store import HELDOUT, TRAIN

FAILURE_LOG = "environment.log"  # of this check; a worker has a log of its own


def check_tasks(config: Config, console: Console) -> None:
    """Make the games that are missing, and start each environment once.

    Raises EnvironmentFailed; ConfigError if one shows images that the model cannot see.
    """
    for own in environments(config).values():
        _check_tasks(own, console)


def _check_tasks(config: Config, console: Console) -> None:
    env, name = config.env, config.env.name
    with _failure_log(Path(config.run_dir) / "logs" / FAILURE_LOG) as log:
        with said_with_spinner(
            f"listing the tasks of {name} (games are made once and kept)", console
        ):
            splits = list_tasks_in_child(name, env.options, creating=True, log=log)
        assert splits is not None, "playable tasks are always listed"
        if is_program(name):
            _check_program(config)
        with said_with_spinner(f"starting {name} once", console):
            seen = try_environment(
                name,
                env.options,
                splits[TRAIN][0],
                answer_timeout_s=env.answer_timeout_s,
                log=log,
            )
    if seen is not None:
        if seen.images and config.endpoint.url:
            raise ConfigError(
                f"env.name={name} shows images, which are not sent to endpoint.url; have the "
                "environment show text"
            )
        sees = _model_sees_images(config)
        if fault := images_fault(seen, sees_images=sees, style=config.prompt.style):
            raise ConfigError(f"env.name={name}: {fault}")
    console.print(_task_counts(name, splits))


def try_tasks(config: Config, console: Console) -> list[str]:
    """Show the number of tasks for a dry run, unless they must be made to be counted.

    Returns a line for each thing missing. Raises EnvironmentFailed; ConfigError for an unknown
    environment, and for options that are unknown, missing or impossible.
    """
    each = [_try_tasks(own, console) for own in environments(config).values()]
    return list(dict.fromkeys(chain.from_iterable(each)))


def _try_tasks(config: Config, console: Console) -> list[str]:
    name = config.env.name
    missing = [fault] if (fault := missing_packages(name)) else []
    try:
        # a dry run makes no run directory
        log = Path(tempfile.mkdtemp(prefix="gigpo-dry-run-")) / FAILURE_LOG
        with _failure_log(log), said_with_spinner(f"listing the tasks of {name}", console):
            splits = list_tasks_in_child(name, config.env.options, creating=False, log=log)
    except EnvironmentFailed as error:
        if not error.may_work_elsewhere:
            raise
        return [*missing, f"tasks: {error}"]
    if is_program(name):
        _check_program(config)
    uncounted = f"{name}: its tasks are made when a run starts, so they are not counted here"
    console.print(uncounted if splits is None else _task_counts(name, splits))
    return missing


@contextmanager
def _failure_log(log: Path) -> Iterator[Path]:
    """Keep the log, and the folders made for it, only if the environment fails in the block.

    Raises ConfigError if it cannot be written.
    """
    made = [log.parent, *(folder for folder in log.parents[1:] if not folder.exists())]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)  # of an earlier start
    except OSError as error:
        raise ConfigError(f"cannot write {log}: {error.strerror}; give another run_dir") from error
    is_kept = False
    try:
        yield log
    except EnvironmentFailed:
        is_kept = log.exists()  # without a log, the message has all there is to know
        raise
    finally:
        if not is_kept:
            log.unlink(missing_ok=True)
            remove_empty(made)


def _task_counts(name: str, splits: Mapping[str, Sequence[Task]]) -> str:
    return f"{name}: {len(splits[TRAIN])} training tasks, {len(splits[HELDOUT])} held out"


def _model_sees_images(config: Config) -> bool:
    """Return whether the first model sees images.

    A model that the run makes sees none. A source's model is checked when a worker loads it.
    """
    return sees_images(config.model.path) if config.model.path else bool(config.source)


def _check_program(config: Config) -> None:
    """Refuse settings that an agent program cannot have. Raises ConfigError."""
    name = config.env.name
    if config.endpoint.url:
        raise ConfigError(
            f"env.name={name} is an agent program, which calls its model by itself; endpoint.url "
            "is for environments only"
        )
    if config.actors.scripted:
        raise ConfigError(
            f"env.name={name} is an agent program, which calls a model by itself; leave "
            "actors.scripted=false"
        )

"""What is looked at and made before the processes of a run start: its tasks, its directory, the
GPUs it asks for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

import configs
from actors import engine_fault, images_fault, sees_images
from configs import Config, ConfigError
from driver import model_download as hub
from driver import resume
from driver import run_control as runs
from driver.progress import said_with_spinner
from driver.ray_cluster import available_gpus, gpus_of_this_machine
from envs import (
    EnvironmentFailed,
    Task,
    is_program,
    list_tasks_in_child,
    missing_packages,
    try_environment,
)
from store import RunLayout, check_trusted, check_unowned, write_open_sql

FAILURE_LOG = "environment.log"  # of the check before a start; a worker has a log of its own


def check_loss(config: Config) -> None:
    """Raise ConfigError for parts of the loss that do not go together."""
    from learner import objective_of  # here and below: a status or a stop needs nothing of it

    objective_of(config.loss)


def check_run_dir(config: Config) -> None:
    """The directory of a run is one, or is to be made, or has nothing else in it.

    Raises ConfigError; StoreError if it is a stranger's run that is not trusted.
    """
    root = Path(config.run_dir)
    try:
        there = next(path for path in (root, *root.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, or a folder that may not be looked into
        raise ConfigError(
            f"run_dir={config.run_dir!r}: {error.strerror}; give another, e.g. run_dir=runs/mine"
        ) from error
    if not config.run_dir or not there.is_dir():
        why = f"{there} is no directory" if config.run_dir else "it is empty"
        raise ConfigError(
            f"run_dir={config.run_dir!r}: {why}; give a directory to be made, e.g. "
            "run_dir=runs/mine"
        )
    if RunLayout.exists(root):
        check_trusted(root)
    elif there is root:
        others = sorted(
            path.name
            for path in root.iterdir()
            if not path.name.startswith((".", *runs.BEFORE_IT_IS_ONE))
        )
        if others:
            raise ConfigError(
                f"run_dir={config.run_dir!r} is no run and has other things in it "
                f"({', '.join(others[:3])}); "
                "give a directory of its own, e.g. run_dir=runs/mine"
            )


def check_writable(config: Config) -> None:
    """Make sure that files can be made in the run directory, and leave it as it was. Raises
    ConfigError.
    """
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
    """A run is continued by one process at a time, with the config it was made with, and has no
    links that lead elsewhere.

    Raises LockedError, ConfigError, StoreError.
    """
    root = Path(config.run_dir)
    if RunLayout.exists(root):
        layout = RunLayout.open(root)
        layout.check_no_links()  # logs and curves are written from here on
        runs.check_idle(root, instead="choose another run_dir")
        check_unowned(layout)
        changed = resume.differences(config, configs.from_yaml(layout.info.config_yaml))
        if changed:
            raise ConfigError(
                f"{root} was made by another config ({'; '.join(changed)}); go on with its own "
                f"settings (--resume {root} "
                f"without these), or begin a new run: another run_dir, or --fork {root}@STEP "
                "run_dir=NEW"
            )


def open_run(config: Config) -> RunLayout:
    """The run directory, made now if it is not there."""
    root = Path(config.run_dir)
    if RunLayout.exists(root):
        layout = RunLayout.open(root)
    else:
        layout = RunLayout.create(
            root, config_yaml=configs.as_yaml(config), storage_uri=config.store.uri
        )
    write_open_sql(layout, macros=_macros(config), max_staleness=config.max_staleness)
    return layout


def _macros(config: Config) -> list[str]:
    """advantages(), of a run that may have some."""
    if config.endpoint.url:
        return []
    from gigpo import AdvantageSettings, advantages_macro

    return [advantages_macro(AdvantageSettings.of(config.algorithm))]


def check_tasks(config: Config, console: Console) -> None:
    """Makes the games that are missing and starts the environment once.

    Raises EnvironmentFailed; ConfigError if it shows images that the model is not shown.
    """
    env, name = config.env, config.env.name
    with _failure_log(Path(config.run_dir) / "logs" / FAILURE_LOG) as log:
        with said_with_spinner(
            f"listing the tasks of {name} (games are made once and kept)", console
        ):
            splits = list_tasks_in_child(name, env.options, creating=True, log=log)
        assert splits is not None  # as it is to be played
        if is_program(name):
            _check_program(config)
        with said_with_spinner(f"starting {name} once", console):
            seen = try_environment(
                name,
                env.options,
                splits["train"][0],
                answer_timeout_s=env.answer_timeout_s,
                log=log,
            )
    if seen is not None and seen.images and config.endpoint.url:
        raise ConfigError(
            f"env.name={name} shows images, which are not sent to endpoint.url; have the "
            "environment show text"
        )
    if seen is not None and (
        fault := images_fault(
            seen, sees_images=_model_sees_images(config), style=config.prompt.style
        )
    ):
        raise ConfigError(f"env.name={name}: {fault}")
    console.print(task_counts(name, splits))


def with_model(config: Config, console: Console) -> Config:
    """Return the config with the directory of its model, which is downloaded now if it is a
    repository of the Hub.

    Raises ConfigError if it cannot be had.
    """
    repository = _repository(config)
    if repository is None:
        return config
    found = hub.find(repository)
    if found is None:
        found = _download(repository, console)
    return replace(config, model=replace(config.model, path=str(found)))


def _repository(config: Config) -> hub.Repository | None:
    """Return the repository of the Hub that model.path names, at the commit that the run began
    with.
    """
    repository, root = hub.named(config.model.path), Path(config.run_dir)
    if repository is None or not RunLayout.exists(root):
        return repository
    return hub.pinned(
        repository, configs.from_yaml(RunLayout.open(root).info.config_yaml).model.path
    )


def _download(repository: hub.Repository, console: Console) -> Path:
    with hub.asked_once(repository) as (answer, download):
        if answer.fault:
            raise ConfigError(hub.unreachable(repository, answer))
        if faults := disk_faults([download_need(answer.n_bytes)]):
            raise ConfigError(f"model.path={repository.name}: {faults[0]}")
        repository = replace(repository, commit=answer.commit)
        what = f"downloading {repository}, {answer.n_files} files, {answer.n_bytes / configs.GIB:.1f} GiB, to {hub.cache()}"
        console.print(f"{what}; if it is stopped, the same command goes on", markup=False)
        with nullcontext() if console.is_terminal else said_with_spinner(what, console):
            answer = download()
    if answer.fault:
        raise ConfigError(hub.unreachable(repository, answer))
    found = hub.find(repository)
    if found is None:
        lacking = hub.lacks(hub.directory(repository))
        raise ConfigError(
            f"model.path={repository.name!r} lacks {lacking} on the Hugging Face Hub; give another "
            "model"
        )
    return found


def try_model(config: Config) -> tuple[Config, list[str], list[DiskNeed]]:
    """Look at the model for a dry run. Return the config with its directory if it is here.

    Otherwise return also a line on what is missing, and the disk space that its download needs.
    Raises ConfigError for a directory that is no model, and for a repository that the Hub does not
    give.
    """
    path = config.model.path
    repository = _repository(config)
    if repository is None:
        if path and not Path(path).exists():
            return config, [f"model.path={path}: there is no such directory here"], []
        configs.check_model_path(config)
        return config, [], []
    found = hub.find(repository)
    if found is not None:
        config = replace(config, model=replace(config.model, path=str(found)))
        configs.check_model_path(config)
        return config, [], []
    if repository.commit is not None:  # the run recorded it, so it is no other model
        recorded = hub.directory(repository)
        config = replace(config, model=replace(config.model, path=str(recorded)))
    answer = hub.look(repository)
    if answer.is_refused:
        raise ConfigError(hub.unreachable(repository, answer))
    if answer.fault:
        return config, [hub.unreachable(repository, answer)], []
    size = f"{answer.n_files} files, {answer.n_bytes / configs.GIB:.1f} GiB"
    missing = [
        f"model.path={repository.name} is not downloaded; a start downloads it ({size}, to "
        f"{hub.cache()})"
    ]
    return config, missing, [download_need(answer.n_bytes)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskNeed:
    """Disk space that a start needs."""

    name: str  # the user of the space
    place: str  # the directory, in the words of the user
    directory: Path  # need not exist yet
    n_bytes: float
    remedy: str


def run_need(config: Config) -> DiskNeed:
    """Return the space that the weights and checkpoints of a run need."""
    return DiskNeed(
        name="the run",
        place=f"run_dir={config.run_dir}",
        directory=Path(config.run_dir),
        n_bytes=configs.disk_bytes(config),
        remedy="keep less (learner.keep_checkpoints, learner.keep_versions)",
    )


def download_need(n_bytes: int) -> DiskNeed:
    """Return the space that a download of `n_bytes` into the Hub's cache needs."""
    return DiskNeed(
        name="the download of the model",
        place=str(hub.cache()),
        directory=hub.cache(),
        n_bytes=n_bytes,
        remedy="set HF_HUB_CACHE to a directory on a larger disk",
    )


def disk_faults(needs: Sequence[DiskNeed]) -> list[str]:
    """Return a line for each disk that is too small for all its needs together."""
    on_disk: dict[int, list[DiskNeed]] = {}
    for need in needs:
        on_disk.setdefault(_device(need.directory), []).append(need)
    return [fault for group in on_disk.values() if (fault := _disk_fault(group))]


def _disk_fault(needs: Sequence[DiskNeed]) -> str | None:
    """Return in one line that one disk is too small for these needs together."""
    free_bytes = shutil.disk_usage(_existing(needs[0].directory)).free
    if sum(need.n_bytes for need in needs) <= free_bytes:
        return None
    places = " and ".join(need.place for need in needs)
    wanted = " and ".join(
        f"{need.name} needs {need.n_bytes / configs.GIB:.1f} GiB" for need in needs
    )
    remedies = ", or ".join(need.remedy for need in needs)
    free = f"{free_bytes / configs.GIB:.1f} GiB free"
    return f"the disk of {places} has {free} and {wanted}; free some, or {remedies}"


def _device(directory: Path) -> int:
    """Return the number of the disk that a directory is on, or will be on."""
    return _existing(directory).stat().st_dev


def _existing(directory: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    path = directory.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def show_missing(missing: Sequence[str], console: Console) -> None:
    """Show what a start would not find here. It may be where the run will be."""
    if missing:
        console.print("missing here:\n" + "\n".join(f"  {line}" for line in missing), markup=False)
    else:
        console.print("nothing is missing here")


def try_tasks(config: Config, console: Console) -> list[str]:
    """Show the number of tasks for a dry run, where none has to be made for that. Return a line for
    each thing missing.

    Raises EnvironmentFailed, ConfigError for an unknown environment, and for options that are
    unknown, missing or impossible.
    """
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
    made = f"{name}: its tasks are made when a run starts, so they are not counted here"
    console.print(made if splits is None else task_counts(name, splits), markup=False)
    return missing


@contextmanager
def _failure_log(log: Path) -> Iterator[Path]:
    """Keep the log of an environment that fails within the block; remove it, and the folder made
    for it, otherwise.

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
    """Of the model that is begun with. One of our own making sees none; a source's is looked at
    when a worker loads it.
    """
    return sees_images(config.model.path) if config.model.path else bool(config.source)


def _check_program(config: Config) -> None:
    name = config.env.name
    if config.endpoint.url:
        raise ConfigError(
            f"env.name={name} is an agent program, which calls its model by itself: endpoint.url "
            "is for environments only"
        )
    if config.actors.scripted:
        raise ConfigError(
            f"env.name={name} is an agent program, which calls a model by itself; leave "
            "actors.scripted=false"
        )


def missing_gpus(config: Config) -> list[str]:
    """Return a line if a start here would lack GPUs. A cluster that RAY_ADDRESS names is not
    asked.
    """
    wanted, there = configs.gpus_needed(config, learns=True), gpus_of_this_machine()
    if wanted <= there or os.environ.get("RAY_ADDRESS"):
        return []
    return [
        f"GPUs: the config asks for {wanted}, this machine has {there}; RAY_ADDRESS joins a cluster"
    ]


def check_gpus(config: Config, *, learns: bool) -> None:
    """Refuse GPUs that are not there, for which Ray would wait for ever, and an engine that vLLM's
    build does not have.

    Nodes that are joined by RAY_ADDRESS may have another build than this one; there the worker
    refuses. Raises ConfigError.
    """
    wanted, there = configs.gpus_needed(config, learns=learns), available_gpus()
    if wanted > there:
        raise ConfigError(
            f"the config asks for {wanted} GPUs (actors.workers x actors.gpus_per_worker + "
            "learner.ranks x "
            f"learner.gpus_per_rank), Ray has {there}; set both to 0 for a CPU run, or join a "
            "cluster with RAY_ADDRESS"
        )
    plays = configs.n_workers(config) > 0 or not learns
    has_engine = plays and not config.actors.scripted and not config.endpoint.url
    if has_engine and not os.environ.get("RAY_ADDRESS") and (fault := engine_fault(config.actors)):
        raise ConfigError(fault)

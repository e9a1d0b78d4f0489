"""Check the run directory, the GPUs and the disk before a start, and make the run directory."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import configs
from actors import engine_fault, unknown_argument_fault
from configs import AlgorithmConfig, Config, ConfigError
from driver import resume, run_lock
from driver.cluster import available_gpus, gpus_of_this_machine, is_joined
from store import (
    MADE_BEFORE_RUN_JSON,
    RunLayout,
    check_no_links,
    check_own_directory,
    check_owner,
    check_unowned,
    keep_private,
    limited_memory,
    write_open_sql,
)

# Copied for an evaluation, before its run is made.
COPIED_WEIGHTS = re.compile(r"[0-9a-f]{32}-(v|step)[0-9]+")


def check_loss(config: Config) -> None:
    """Check that the parts of the loss go together. Raises ConfigError."""
    from learner import objective_of  # here: `gigpo status` needs no torch

    objective_of(config.loss)


def check_algorithm(config: Config) -> None:
    """Check the settings of advantages and filter, by gigpo's bounds. Raises ConfigError."""
    # Here: `gigpo status` needs no Arrow.
    from gigpo import AdvantageSettings, check_group_filter, check_no_unread

    try:
        check_group_filter(config.algorithm.group_filter)
        settings = AdvantageSettings.of(config.algorithm)
        check_no_unread(settings, defaults=AdvantageSettings.of(AlgorithmConfig()))
    except ValueError as error:
        raise ConfigError(f"algorithm.{error}") from None


def check_engine_arguments(config: Config) -> None:
    """Check that vLLM has the arguments of `actors.engine`, and can split the model by them.

    Raises ConfigError.
    """
    if fault := unknown_argument_fault(config.actors):
        raise ConfigError(fault)
    configs.check_heads(config)


def check_run_dir(config: Config) -> None:
    """Check that run_dir is a run, can be made, or is empty.

    Raises ConfigError; StoreError for a stranger's run that is not trusted, and for a directory
    that is no run yet and is another user's or has links.
    """
    root = Path(config.run_dir)
    try:
        there = next(path for path in (root, *root.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, or a folder that may not be read
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
        with limited_memory([root]):  # an error quotes the settings of a stranger's run
            RunLayout.open(root).check_trusted()
        check_own_directory(root, may_be_anothers=True)
    elif there is root:
        expected = (".", *MADE_BEFORE_RUN_JSON)
        names = sorted(path.name for path in root.iterdir() if not path.name.startswith(expected))
        others = [name for name in names if not COPIED_WEIGHTS.fullmatch(name)]
        if others:
            raise ConfigError(
                f"run_dir={config.run_dir!r} is no run and has other things in it "
                f"({', '.join(others[:3])}); give a directory of its own, e.g. run_dir=runs/mine"
            )
        check_no_links(root)
        check_own_directory(root)
    else:
        check_own_directory(root, is_made=False)  # what is on the way


def check_writable(config: Config) -> None:
    """Check that files can be made in run_dir, and leave it as it was. Raises ConfigError."""
    root = Path(config.run_dir)
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"run_dir={config.run_dir!r} cannot be written: {why}; give another, e.g. "
            "run_dir=runs/mine"
        ) from error
    finally:
        remove_empty(made)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders up to the first that is not empty or not there."""
    try:
        for folder in folders:
            folder.rmdir()
    except OSError:  # something else is in it by now
        return


def check_same_run(config: Config) -> None:
    """Check that an existing run is idle, has these settings, and has no links out of it.

    Raises LockedError, ConfigError, StoreError.
    """
    root = Path(config.run_dir)
    if not RunLayout.exists(root):
        return
    layout = RunLayout.open(root)
    layout.check_no_links()  # from here on, logs and metrics are written into it
    run_lock.check_idle(root, instead="choose another run_dir")
    check_unowned(layout)
    recorded = configs.from_yaml(layout.info.config_yaml)
    changed = resume.differences(config, recorded)
    if changed:
        raise ConfigError(
            f"{root} was made by another config ({'; '.join(changed)}); go on with its own "
            f"settings (--resume {root} without these), or begin a new run: another run_dir, or "
            f"--fork {root}@STEP run_dir=NEW"
        )


def make_or_open_run(config: Config) -> RunLayout:
    """Open the run directory, or make it. Nobody else may enter one whose settings hold secrets.

    Raises StoreError, before anything is written into the storage, if the run goes on elsewhere or
    the storage is not the one that this user chose.
    """
    root = Path(config.run_dir)
    if configs.holds_secrets(config):
        keep_private(root)
    if RunLayout.exists(root):
        layout = RunLayout.open(root)
        check_owner(layout)
    else:
        text = configs.as_yaml(config)
        configs.from_yaml(text)  # written out it may be longer than it is read
        layout = RunLayout.create(root, config_yaml=text, storage_uri=config.store.uri)
    write_open_sql(layout, macros=_macros(config), max_staleness=config.max_staleness)
    return layout


def _macros(config: Config) -> list[str]:
    """Return the SQL macro `advantages`, unless a model server plays."""
    if config.endpoint.url:
        return []
    from gigpo import AdvantageSettings, advantages_macro

    # With a critic the steps need its values.
    relation = "valued_steps" if configs.has_critic(config) else "steps"
    return [advantages_macro(AdvantageSettings.of(config.algorithm), relation=relation)]


def missing_gpus(config: Config) -> list[str]:
    """Return a line if a start here would lack GPUs. Does not ask the cluster of RAY_ADDRESS."""
    wanted, there = configs.gpus_needed(config, learns=True), gpus_of_this_machine()
    if wanted <= there or os.environ.get("RAY_ADDRESS"):
        return []
    return [
        f"GPUs: the config asks for {wanted}, this machine has {there}; RAY_ADDRESS joins a cluster"
    ]


def check_gpus(config: Config, *, learns: bool) -> None:
    """Refuse GPUs that Ray does not have, and an engine that this build of vLLM does not have.

    Ray would wait for ever. A range of workers is for a cluster that grows: there the supervisor
    waits for places, with a deadline. Nodes that RAY_ADDRESS joins may have another build of vLLM;
    a worker there refuses the engine. Raises ConfigError.
    """
    wanted, there = configs.gpus_needed(config, learns=learns), available_gpus()
    may_grow = is_joined() and isinstance(config.actors.workers, configs.WorkerRange)
    if wanted > there and not may_grow:
        raise ConfigError(
            f"the config asks for {wanted} GPUs (actors.workers x actors.gpus_per_worker + "
            f"learner.ranks x learner.gpus_per_rank), Ray has {there}; set both to 0 for a CPU "
            "run, or join a cluster with RAY_ADDRESS"
        )
    plays = configs.n_workers(config) > 0 or not learns
    has_engine = plays and not config.actors.scripted and not config.endpoint.url
    if has_engine and not os.environ.get("RAY_ADDRESS") and (fault := engine_fault(config.actors)):
        raise ConfigError(fault)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskNeed:
    """Disk space that a start needs."""

    name: str  # of what is written, for the message
    place: str  # the directory, in the user's words
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
        remedy="keep less (learner.keep_every, learner.keep_versions)",
    )


def disk_faults(needs: Sequence[DiskNeed]) -> list[str]:
    """Return a line for each disk that is too small for all its needs together."""
    on_disk: dict[int, list[DiskNeed]] = {}
    for need in needs:
        on_disk.setdefault(_device(need.directory), []).append(need)
    return [fault for group in on_disk.values() if (fault := _disk_fault(group))]


def _disk_fault(needs: Sequence[DiskNeed]) -> str | None:
    """Return a line if one disk is too small for these needs together."""
    free_bytes = shutil.disk_usage(_existing(needs[0].directory)).free
    if sum(need.n_bytes for need in needs) <= free_bytes:
        return None
    places = " and ".join(need.place for need in needs)
    wanted = " and ".join(f"{need.name} needs {configs.size_text(need.n_bytes)}" for need in needs)
    remedies = ", or ".join(need.remedy for need in needs)
    free = f"{configs.size_text(free_bytes)} free"
    return f"the disk of {places} has {free} and {wanted}; free some, or {remedies}"


def _device(directory: Path) -> int:
    """Return the number of the disk that a directory is on, or will be on."""
    return _existing(directory).stat().st_dev


def _existing(directory: Path) -> Path:
    """Return the directory, or its nearest parent that exists."""
    path = directory.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def show_missing(missing: Sequence[str], console: Console) -> None:
    """Show what a start would not find on this machine. The run may be started on another one."""
    if missing:
        console.print("missing here:\n" + "\n".join(f"  {line}" for line in missing))
    else:
        console.print("nothing is missing here")

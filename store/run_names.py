"""Name the files and directories of a run, and check names that somebody else wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from store.errors import FormatError, StoreError

RUN_JSON = "run.json"  # the run's id and first settings, written once
SIGNED = "signed.json"  # its maker's signatures of run.json and config.yaml
PRIMARY = "primary.json"  # the token of the primary directory of a run with store.uri
REVOKED = "revoked"  # in the storage, by token of PRIMARY: the PRIMARY that replaces it
SHOWN = "shown"  # in the storage, by token: the lsn of the newest manifest of that directory
# Files in a directory that is no run yet: it is being made from another run, or brought from a
# storage. The last act of either removes its file.
FORK_MARKER, BRING_MARKER = "fork.unfinished", "bring.unfinished"
STORED_FORK_MARKERS = "unfinished_forks"  # in the storage, by run id: a fork that is not whole
MANIFEST = "manifest.json"  # what readers may read; in the storage
# By each of them a run is known that has lost its run.json.
SIGNS_OF_A_RUN = ("segments", "catalog.sqlite", MANIFEST, "backup/run.json")
# Every path that a manifest or a catalog may name, relative to the run's root.
SEGMENT_PATH = re.compile(r"segments/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}/[0-9a-f]{32}\.parquet")
EXPORT_PATH = re.compile(r"export/([a-z]+-[0-9]+-[0-9]+|empty_steps)\.parquet")
VERSION_PATH = re.compile(r"weights/v[0-9]+")
CHECKPOINT_PATH = re.compile(r"checkpoints/step[0-9]+")
BASE_POLICY = "base/policy"  # of a run that began without model.path
PUBLISHED_PATH = re.compile(f"{VERSION_PATH.pattern}|{CHECKPOINT_PATH.pattern}|{BASE_POLICY}")
CONFIG_FILE = "config.yaml"  # settings of the newest start; run.json keeps those of the first
OUTSIDE_FILE = "outside.json"  # digests of the files that a run uses outside its directory
DRIVER_FILE = "driver.json"  # the process that drives the run
WANTED_WORKERS_FILE = "workers.wanted"  # the number of workers that was asked for
GIVEN_FILE = "given.json"  # the metrics that trackers and the webhook have been given
DRIVER_LOCK = "driver.lock"  # held while a process begins or ends to drive the run
STOPPING_FILE = "stopping"  # the driver's last line while it stops the run
UNREAD_FILE = "log.unread"  # the number of commits that were lost with a damaged log
REPORT_FILE = "report.html"  # what the run showed, for people; the end of a training writes it

# Every name at the top of a run's directory. `base` holds another run.
DIRECTORIES_OF_A_RUN = (
    "segments",
    "export",
    "weights",
    "checkpoints",
    "readers",
    "quarantine",
    "backup",
    "logs",
    "tensorboard",
    "trackers",
    "untrained",  # the model with which a behaviour cloning run began
)
FILES_OF_A_RUN = (
    RUN_JSON,
    SIGNED,
    PRIMARY,
    MANIFEST,
    "published.json",
    "open.sql",
    "mirror.lock",
    CONFIG_FILE,
    OUTSIDE_FILE,
    DRIVER_FILE,
    DRIVER_LOCK,
    WANTED_WORKERS_FILE,
    STOPPING_FILE,
    GIVEN_FILE,
    UNREAD_FILE,
    REPORT_FILE,
)
OF_A_RUN = frozenset({*DIRECTORIES_OF_A_RUN, *FILES_OF_A_RUN, "base"})
OWN_COPIES = (f"backup/{RUN_JSON}", f"quarantine/{RUN_JSON}")  # in the directory, of run.json
_TEMPORARY = re.compile(r"\..*\.tmp")  # of an unfinished file
# Names in a run's directory whose first start was killed before it wrote run.json, or that is the
# root of a new file system.
MADE_BEFORE_RUN_JSON = (
    RUN_JSON,
    SIGNED,
    PRIMARY,
    "segments",
    "export",
    "weights",
    "checkpoints",
    "logs",
    "backup",
    DRIVER_FILE,
    DRIVER_LOCK,
    WANTED_WORKERS_FILE,
    STOPPING_FILE,
    "lost+found",
)


def stored_fork_marker(run_id: str) -> str:
    """Return the path of the marker in the storage of a fork that is not whole."""
    return f"{STORED_FORK_MARKERS}/{run_id}"


def without_other_runs(paths: Iterable[str]) -> list[str]:
    """Return the paths of a storage that a run has there. Another run may lie beneath it.

    Of that one PRIMARY is written first.
    """
    known = [path for path in paths if is_of_a_run(path.partition("/")[0])]
    others = {
        f"{directory}/"
        for directory, _, name in (path.rpartition("/") for path in known)
        if directory and _is_sign_of_another_run(directory, name)
    }
    return [path for path in known if not path.startswith(tuple(others))]


def _is_sign_of_another_run(directory: str, name: str) -> bool:
    """Return whether a file says that a run is in a directory. A model may have a run.json."""
    return name == PRIMARY or (name == RUN_JSON and not PUBLISHED_PATH.fullmatch(directory))


def is_of_a_run(name: str) -> bool:
    """Return whether a run, whole or not, has such a name at the top of its directory or storage.

    Somebody's files may lie beside them.
    """
    is_known = name in (
        *OF_A_RUN,
        FORK_MARKER,
        BRING_MARKER,
        STORED_FORK_MARKERS,
        REVOKED,
        SHOWN,
    )
    return is_known or name.startswith("catalog.") or _TEMPORARY.fullmatch(name) is not None


def parse_run_step(text: str) -> tuple[Path, int | None]:
    """Split RUN@STEP: `runs/a@40` is runs/a and 40, `runs/a` is runs/a and None.

    Raises StoreError.
    """
    run, at, step = text.rpartition("@")
    if not at:
        return Path(text), None
    if not run or not step.isdecimal():
        raise StoreError(
            f"{text}: give a run, or a run and one of its checkpoints' learner steps, e.g. "
            "runs/a@40"
        )
    return Path(run), int(step)


def checked_name(path: object, pattern: re.Pattern[str], *, where: str) -> str:
    """Return `path` if the store would have given this name. Raises FormatError."""
    if isinstance(path, str) and pattern.fullmatch(path):
        return path
    raise FormatError(
        f"{where} names {path!r}, and no run names such a file; do not use this run, or restore a "
        "backup"
    )

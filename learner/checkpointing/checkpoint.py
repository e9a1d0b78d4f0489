"""What a run needs to go on bit for bit: weights, optimizer state, random states, and where it was.

    save_checkpoint(engine, Path("checkpoints/step000010"), learner_step=10, version=11, lsn=420)
    point = load_checkpoint(engine, Path("checkpoints/step000010"))      # point.learner_step == 10

All ranks call these together. A checkpoint does not depend on the ZeRO stage or on the number of
ranks, so a run may go on with others. It is a directory that appears whole or not at all; of KIND
master, exp_avg and exp_avg_sq (`full_state.py`):

    KIND-rank00000.safetensors   float32 tensors by parameter name; rank r of R writes parameters r, r + R, r + 2 R, ...
    checkpoint.json              a `Content`: where it was, and those files with their digests

Parameters that are not trained, LoRA's base, are not in it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from learner.checkpointing.rng_state import RandomStates, random_states, restore_random_states
from learner.distributed.optimizer_state import (
    KINDS,
    Parameters,
    read_state,
    read_steps,
    shape_of,
    trainable,
    write_state,
)
from learner.files.atomic_directory import (
    UNFINISHED_SUFFIX,
    atomic_directory,
    names_the_disk,
    prune_oldest,
)
from learner.files.safetensors_writer import SHARD_BYTES, write_shards
from learner.training.engine import Engine
from learner.training.update_stats import from_all_ranks
from printable import UserError
from store import files_digest, parse_object, whole

POINT_FILE = "checkpoint.json"
FORMAT_VERSION = 2  # 1 was DeepSpeed's own files
FILE_NAME = re.compile(r"[a-z_]+-rank[0-9]+[0-9a-z-]*\.safetensors")  # beside checkpoint.json
OLDER = "use an older checkpoint"


class CheckpointError(UserError, ValueError):
    """A checkpoint that cannot be loaded; the message says which and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPoint:
    learner_step: int
    version: int  # policy version of these weights
    n_updates: int  # optimizer updates applied so far
    lsn: int  # of the catalog: what the run had done when it was written


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """What one rank wrote of one kind."""

    kind: str
    names: Sequence[str]
    n_bytes: int
    digest: str  # of all of them in order, as `shards.py` says


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """checkpoint.json, the same whichever rank made it."""

    format_version: int
    point: CheckpointPoint
    # of the trained parameters; for people, as is the stage: neither has to stay as it is
    dtype: str
    zero_stage: int
    adam_steps: int
    parameters: dict[str, list[int]]  # name -> shape of the trained ones
    files: list[Files]
    random_states: list[RandomStates]  # by rank


def save_checkpoint(
    engine: Engine, dest: Path, *, learner_step: int, version: int, lsn: int
) -> None:
    """Durable when rank 0 returns. Nothing is seen of it before.

    The other ranks return as soon as all files are written. Not a collective waits for a disk to
    say that it has them, which may take any time, so no time-out of the group can end a run whose
    disk is slow. Raises OSError, naming `dest`, if the disk does not take it: nothing is left of
    it, and older checkpoints stay.
    """
    point = CheckpointPoint(
        learner_step=learner_step, version=version, n_updates=engine.n_updates, lsn=lsn
    )
    if engine.rank == 0:
        with atomic_directory(dest) as unfinished:
            content = _written(engine, unfinished, point)
            (unfinished / POINT_FILE).write_text(json.dumps(asdict(content)) + "\n")
    else:
        with names_the_disk(dest):
            _written(engine, dest.with_name(dest.name + UNFINISHED_SUFFIX), point)


def load_checkpoint(engine: Engine, source: Path) -> CheckpointPoint:
    """Restores the engine and the random states of this process.

    Raises CheckpointError, on every rank, if it is damaged or of another model; the engine is as it
    was then.
    """
    content = read_content(source)
    share = slice(engine.rank, None, engine.ranks)
    faults = from_all_ranks(_fault(source, content, share=share), ranks=engine.ranks)
    if any(faults):
        raise CheckpointError(next(filter(None, faults)))
    parameters = trainable(engine.policy.causal_lm)
    check_parameters(source, content.parameters, parameters)
    write_state(
        engine.deepspeed, parameters, saved_tensors(source, content), steps=content.adam_steps
    )
    engine.n_updates = content.point.n_updates
    # a rank that was not there has nothing to go on with
    if engine.rank < len(content.random_states):
        restore_random_states(content.random_states[engine.rank])
    return content.point


def read_content(source: Path) -> Content:
    """Of the checkpoint in the directory `source`. Raises CheckpointError if it is not one of this
    code's.
    """
    path = source / POINT_FILE
    try:
        record: dict[str, Any] = parse_object(path.read_bytes())
        found = whole(record, "format_version")
        content = _parsed(record) if found == FORMAT_VERSION else None
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{source} is not a whole checkpoint (no {POINT_FILE} in it); {OLDER}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); {OLDER}"
        ) from error
    if content is None:
        remedy = "start the run anew" if found < FORMAT_VERSION else "update the code"
        raise CheckpointError(
            f"{source} has format version {found}, this code reads {FORMAT_VERSION}; {remedy}"
        )
    return content


def check_whole(source: Path, content: Content) -> None:
    """Reads all files. Raises CheckpointError for one that is missing, cut or changed."""
    fault = _fault(source, content, share=slice(None))
    if fault:
        raise CheckpointError(fault)


def check_parameters(
    source: Path, saved: Mapping[str, Sequence[int]], parameters: Parameters
) -> None:
    """Raises CheckpointError naming the first difference between what was saved, name -> shape, and
    what is trained here.
    """
    here = {name: shape_of(parameter) for name, parameter in parameters.items()}
    wrong = [name for name in [*here, *saved] if here.get(name) != saved.get(name)]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{source} is of another model: {len(set(wrong))} trained parameters differ, the first "
            f"is {name}, of shape "
            f"{saved.get(name, 'missing')} there and {here.get(name, 'missing')} here. Use the "
            "model.path, model.lora_rank "
            "and model.tiny it was written with"
        )


def saved_tensors(source: Path, content: Content) -> Callable[[str, str], torch.Tensor]:
    """(parameter name, kind) -> the float32 tensor, read from the disk when asked for."""
    where: dict[tuple[str, str], Any] = {}
    for files in content.files:
        for name in files.names:
            file = safe_open(source / name, framework="pt")
            where |= {(parameter, files.kind): file for parameter in file.keys()}  # noqa: SIM118 (no mapping)

    def saved(parameter: str, kind: str) -> torch.Tensor:
        tensor: torch.Tensor = where[parameter, kind].get_tensor(parameter)
        return tensor

    return saved


def prune_checkpoints(
    checkpoints_dir: Path, *, live: Collection[str], keep: int, keep_every: int
) -> list[str]:
    """Removes all but the newest `keep` and those of every `keep_every`-th learner step (0: none);
    returns the names removed.

    Keep 2, and every 10th: of steps 5, 10, 15, 20, 25, 30 step 5 and 15 are removed. Those whose
    names are not `live`, the catalog's, go first: the run fell back behind them, or ended before it
    announced them, so no restart begins there, and they must not count as two that could be loaded.
    """
    names = [path.name for path in checkpoints_dir.iterdir()]
    steps = {name: int(number[0]) for name in names if (number := re.search(r"\d+$", name))}
    abandoned = sorted(steps.keys() - set(live))
    for name in abandoned:
        shutil.rmtree(checkpoints_dir / name)
    kept = frozenset(name for name, step in steps.items() if keep_every and step % keep_every == 0)
    return abandoned + prune_oldest(checkpoints_dir, keep=keep, kept=kept)


def _parsed(record: dict[str, Any]) -> Content:
    point, files = CheckpointPoint(**record["point"]), [Files(**item) for item in record["files"]]
    for name in (name for of_kind in files for name in of_kind.names):
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            raise ValueError(f"it names {name!r:.80}, and no checkpoint has such a file")
    states = [RandomStates(**item) for item in record["random_states"]]
    return Content(**record | {"point": point, "files": files, "random_states": states})


def _written(engine: Engine, directory: Path, point: CheckpointPoint) -> Content:
    """Writes this rank's files; returns the whole checkpoint's content."""
    dist.barrier()  # until rank 0 has made the directory
    parameters = trainable(engine.policy.causal_lm)
    mine = [_write_kind(engine, parameters, directory, kind) for kind in KINDS]
    per_rank = from_all_ranks((mine, random_states()), ranks=engine.ranks)
    return Content(
        format_version=FORMAT_VERSION,
        point=point,
        dtype=str(next(iter(parameters.values())).dtype).removeprefix("torch."),
        zero_stage=engine.learner.zero_stage,
        adam_steps=read_steps(engine.deepspeed, parameters),
        parameters={name: shape_of(parameter) for name, parameter in parameters.items()},
        files=[files for files_of_rank, _ in per_rank for files in files_of_rank],
        random_states=[states for _, states in per_rank],
    )


def _write_kind(engine: Engine, parameters: Parameters, directory: Path, kind: str) -> Files:
    gathered = read_state(engine.deepspeed, parameters, kind)
    stem = f"{kind}-rank{engine.rank:05d}"
    share = islice(gathered, engine.rank, None, engine.ranks)
    shards = write_shards(
        share, directory, stem=stem, shard_bytes=SHARD_BYTES, send=None, spare_in=None
    )
    return Files(kind=kind, names=shards.files, n_bytes=shards.n_bytes, digest=shards.digest)


def _fault(source: Path, content: Content, *, share: slice) -> str | None:
    """What is wrong with the files of the checkpoint; of these ones only, in their order, the bytes
    are looked at.
    """
    for number, files in enumerate(content.files):
        paths = [source / name for name in files.names]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            return f"{missing[0]} is missing; {OLDER}"
        if sum(path.stat().st_size for path in paths) != files.n_bytes:
            return f"{paths[0]} is not as long as it was written; {OLDER}"
        if number in range(len(content.files))[share] and files_digest(paths) != files.digest:
            return f"{paths[0]} was changed after it was written (digest); {OLDER}"
    return None

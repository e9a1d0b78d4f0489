"""Save and restore everything a run needs to continue bit for bit.

    copy = copy_checkpoint(engine, learner_step=10, version=11, lsn=420)
    # from here on the engine may train
    write_checkpoint(copy, Path("checkpoints/step000010"), others=others)
    point = load_checkpoint(engine, Path("checkpoints/step000010"))  # point.learner_step == 10

All ranks copy and load together. They write without a collective, so a thread may write while
training goes on. A checkpoint does not depend on the ZeRO stage or on the number of ranks, so a run
may continue with others. It is a directory that appears whole or not at all. Its files, for each
KIND of master, exp_avg and exp_avg_sq (`optimizer_state.py`):

    KIND-rank00000.safetensors   float32 tensors by parameter name; rank r of R writes
                                 parameters r, r + R, r + 2 R, ...
    critic_KIND-rank00000.safetensors   the same of the critic, if the run has one; its parameters'
                                 names begin with "critic."
    checkpoint.json              a `Content`: the position, and these files with their digests

Parameters that are not trained, such as LoRA's base, are not in it.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from configs import read_description
from learner.distributed.deepspeed_setup import from_all_ranks
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
    names_of_ours,
    names_the_disk,
    remove_directory,
)
from learner.publishing.publish import SHARD_BYTES, write_shards
from learner.training.engine import Engine
from printable import UserError
from store import file_digest, files_digest, integer, parse_object

POINT_FILE = "checkpoint.json"
DIGEST = "digest"  # its field
FORMAT_VERSION = 2  # 1 was DeepSpeed's own files
CRITIC = "critic."  # begins the names of the critic's parameters
FILE_NAME = re.compile(r"[a-z_]+-rank[0-9]+[0-9a-z-]*\.safetensors")  # beside checkpoint.json
OLDER = "use an older checkpoint"


class CheckpointError(UserError, ValueError):
    """A checkpoint cannot be loaded. The message names it and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPoint:
    """Position of a run at a checkpoint."""

    learner_step: int
    version: int  # policy version of these weights
    n_updates: int  # optimizer updates applied so far
    lsn: int  # the catalog's log sequence number at that time


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Files that one rank wrote of one kind."""

    kind: str
    names: Sequence[str]
    n_bytes: int
    digest: str  # BLAKE3 of all of them, in order


FilesOfRank = Callable[[], list[Files]]  # waits for another rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomStates:
    """Random states of one process, as JSON: nothing of ours is pickled to disk.

    Bytes are in hex. The two tuples become lists in JSON.
    """

    torch: str
    cuda: Sequence[str]  # by device
    numpy: tuple[str, list[int], int, int, float]  # from np.random.get_state
    python: tuple[int, list[int], float | None]  # from random.getstate


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Content of checkpoint.json, the same whichever rank made it."""

    format_version: int
    point: CheckpointPoint
    # dtype and stage are for people: a run may continue with others.
    dtype: str
    zero_stage: int
    adam_steps: int
    parameters: dict[str, list[int]]  # name -> shape of the trained ones
    files: list[Files]
    random_states: list[RandomStates]  # by rank
    critic_adam_steps: int = 0  # 0 without a critic, and in checkpoints from before there was one
    digest: str = ""  # of all this; "" in checkpoints from before there was one

    @property
    def policy_parameters(self) -> dict[str, list[int]]:
        """Return the parameters without the critic's."""
        named = self.parameters.items()
        return {name: shape for name, shape in named if not name.startswith(CRITIC)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Copies of one rank's parameters of one kind, in main memory."""

    kind: str
    stem: str  # begins the names of their files
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCopy:
    """Everything that one rank writes of a checkpoint. Training does not change it."""

    content: Content  # of the whole checkpoint, without files
    shares: Sequence[Share]


def copy_checkpoint(engine: Engine, *, learner_step: int, version: int, lsn: int) -> CheckpointCopy:
    """Copy this rank's part of a checkpoint into main memory. All ranks call it together."""
    point = CheckpointPoint(
        learner_step=learner_step, version=version, n_updates=engine.n_updates, lsn=lsn
    )
    trained = _trained(engine)
    shares = [_copy_share(engine, one, kind=kind) for one in trained for kind in KINDS]
    adam_steps = [read_steps(one.deepspeed, one.parameters) for one in trained]
    parameters = trained[0].parameters
    content = Content(
        format_version=FORMAT_VERSION,
        point=point,
        dtype=str(next(iter(parameters.values())).dtype).removeprefix("torch."),
        zero_stage=engine.learner.zero_stage,
        adam_steps=adam_steps[0],
        parameters={
            f"{one.prefix}{name}": shape_of(parameter)
            for one in trained
            for name, parameter in one.parameters.items()
        },
        files=[],
        random_states=[
            RandomStates(**states)
            for states in from_all_ranks(asdict(random_states()), ranks=engine.ranks)
        ],
        critic_adam_steps=sum(adam_steps[1:]),
    )
    return CheckpointCopy(content=content, shares=shares)


def write_checkpoint(
    copy: CheckpointCopy, dest: Path, *, others: Callable[[], Sequence[FilesOfRank]]
) -> None:
    """Write a checkpoint, on rank 0. It is on disk when this returns, and invisible before.

    `others` has each other rank begin `write_files`, and returns a function for each that waits for
    its answer. Raises OSError, naming `dest`, if the disk fails: nothing is left of it, and older
    checkpoints stay.
    """
    with atomic_directory(dest) as unfinished:
        answers = others()
        files = write_files(copy, dest)
        for answer in answers:
            files += answer()
        record = asdict(replace(copy.content, files=files))
        record[DIGEST] = _digest_of(record)
        (unfinished / POINT_FILE).write_text(json.dumps(record) + "\n")


def write_files(copy: CheckpointCopy, dest: Path) -> list[Files]:
    """Write the files of one rank into the unfinished directory of `dest`, which rank 0 has made.

    Raises OSError naming `dest`.
    """
    directory = dest.with_name(dest.name + UNFINISHED_SUFFIX)
    with names_the_disk(dest):
        return [_write_share(share, directory) for share in copy.shares]


def load_checkpoint(engine: Engine, source: Path) -> CheckpointPoint:
    """Restore the engine and the random states of this process.

    Raises CheckpointError on every rank, before any change to the engine, if the checkpoint is
    damaged or of another model.
    """
    content = read_content(source)
    share = slice(engine.rank, None, engine.ranks)
    faults = from_all_ranks(_find_fault(source, content, share=share), ranks=engine.ranks)
    if any(faults):
        raise CheckpointError(next(filter(None, faults)))
    trained = _trained(engine)
    parameters = {
        f"{one.prefix}{name}": parameter
        for one in trained
        for name, parameter in one.parameters.items()
    }
    check_parameters(source, saved=content.parameters, parameters=parameters)
    saved = saved_tensors(source, content)
    for one in trained:
        write_state(
            one.deepspeed,
            one.parameters,
            saved=partial(_with_prefix, saved, one.prefix),
            steps=content.critic_adam_steps if one.prefix else content.adam_steps,
        )
    engine.n_updates = content.point.n_updates
    # A rank that did not exist then starts with its own random state.
    if engine.rank < len(content.random_states):
        restore_random_states(content.random_states[engine.rank])
    return content.point


def read_content(source: Path) -> Content:
    """Read checkpoint.json. Raises CheckpointError if this code cannot read it."""
    path = source / POINT_FILE
    try:
        record: dict[str, Any] = parse_object(read_description(path))
        found = integer(record, "format_version")
        if found == FORMAT_VERSION and record.get(DIGEST, "") not in ("", _digest_of(record)):
            raise ValueError("it was changed after it was written")
        content = _parse_content(record) if found == FORMAT_VERSION else None
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
    """Read all files. Raises CheckpointError if one is missing, cut or changed."""
    fault = _find_fault(source, content, share=slice(None))
    if fault:
        raise CheckpointError(fault)


def check_parameters(
    source: Path, *, saved: Mapping[str, Sequence[int]], parameters: Parameters
) -> None:
    """Raise CheckpointError for the first shape that differs from the trained parameters."""
    here = {name: shape_of(parameter) for name, parameter in parameters.items()}
    wrong = [name for name in [*here, *saved] if here.get(name) != saved.get(name)]
    if wrong:
        name = wrong[0]
        shapes = f"{saved.get(name, 'missing')} there and {here.get(name, 'missing')} here"
        raise CheckpointError(
            f"{source} is of another model: {len(set(wrong))} trained parameters differ, the first "
            f"is {name}, of shape {shapes}. Use the model.path, model.lora_rank, model.tiny, "
            "algorithm.estimator and critic.path it was written with"
        )


def saved_tensors(source: Path, content: Content) -> Callable[[str, str], torch.Tensor]:
    """Return a function from (parameter name, kind) to the float32 tensor, read when asked for."""
    where: dict[tuple[str, str], Any] = {}
    for files in content.files:
        for name in files.names:
            try:
                file = safe_open(source / name, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{source / name} is damaged ({error}); {OLDER}") from error
            names = file.keys()  # not a mapping: it cannot be iterated itself
            where |= {(parameter, files.kind): file for parameter in names}
    for name, shape in content.parameters.items():
        for kind in KINDS:
            held = where.get((name, kind))
            found = None if held is None else held.get_slice(name)
            if found is None or found.get_shape() != shape or found.get_dtype() != "F32":
                raise CheckpointError(
                    f"{source} has no {kind} of {name} in its shape {shape}; {OLDER}"
                )
    return lambda parameter, kind: where[parameter, kind].get_tensor(parameter)


def kept_checkpoints(
    names: Iterable[str], *, live: Collection[str], keep: int, keep_every: int
) -> set[str]:
    """Return the names of the newest `keep` checkpoints and every `keep_every`-th (0: none).

    With keep=2 and keep_every=10, steps 5 and 15 of 5, 10, 15, 20, 25, 30 are not kept. Nor are
    names that are not `live` in the catalog: the run went back behind them, or ended before it
    announced them, so no restart uses them.
    """
    steps = {name: int(number[0]) for name in names if (number := re.search(r"\d+$", name))}
    left = sorted(steps.keys() & set(live), key=lambda name: steps[name])
    return {*left[-keep:], *(name for name in left if keep_every and steps[name] % keep_every == 0)}


def prune_checkpoints(
    checkpoints_dir: Path, *, kept: Callable[[list[str]], Collection[str]]
) -> None:
    """Remove checkpoints. `kept` gets the names that are there, and returns some."""
    names = names_of_ours(checkpoints_dir)
    for name in sorted(set(names) - set(kept(names))):
        remove_directory(checkpoints_dir / name)


def _digest_of(record: Mapping[str, Any]) -> str:
    """Return the digest of checkpoint.json's content, in whatever form JSON gave it."""
    rest = {name: value for name, value in record.items() if name != DIGEST}
    return file_digest(json.dumps(rest, sort_keys=True).encode())


def _parse_content(record: dict[str, Any]) -> Content:
    point, files = CheckpointPoint(**record["point"]), [Files(**item) for item in record["files"]]
    for of_kind in files:
        if of_kind.kind not in KINDS or not isinstance(of_kind.names, list) or not of_kind.names:
            raise ValueError(f"its files of kind {of_kind.kind!r:.40} are of no kind or unnamed")
        for name in of_kind.names:
            if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
                raise ValueError(f"it names {name!r:.80}, and no checkpoint has such a file")
    if not isinstance(record["parameters"], dict):
        raise TypeError("its parameters are no mapping")
    states = [RandomStates(**item) for item in record["random_states"]]
    return Content(**record | {"point": point, "files": files, "random_states": states})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """One network with an optimizer: the policy's, and the critic's."""

    prefix: str  # of its parameters' names in the checkpoint
    deepspeed: Any
    parameters: Parameters


def _trained(engine: Engine) -> list[_Trained]:
    """Return the policy and, if there is one, the critic."""
    policy = trainable(engine.policy.causal_lm)
    trained = [_Trained(prefix="", deepspeed=engine.deepspeed, parameters=policy)]
    if engine.critic is not None:
        network = trainable(engine.critic.network)
        critic = _Trained(prefix=CRITIC, deepspeed=engine.critic.deepspeed, parameters=network)
        trained.append(critic)
    return trained


def _with_prefix(
    saved: Callable[[str, str], torch.Tensor], prefix: str, name: str, kind: str
) -> torch.Tensor:
    return saved(f"{prefix}{name}", kind)


def _copy_share(engine: Engine, trained: _Trained, *, kind: str) -> Share:
    gathered = read_state(trained.deepspeed, trained.parameters, kind=kind)
    tensors = {
        f"{trained.prefix}{name}": torch.empty_like(tensor, device="cpu").copy_(tensor)
        for name, tensor in islice(gathered, engine.rank, None, engine.ranks)
    }
    stem = f"{trained.prefix.replace('.', '_')}{kind}-rank{engine.rank:05d}"
    return Share(kind=kind, stem=stem, tensors=tensors)


def _write_share(share: Share, directory: Path) -> Files:
    shards = write_shards(
        share.tensors.items(), directory, stem=share.stem, shard_bytes=SHARD_BYTES
    )
    return Files(kind=share.kind, names=shards.files, n_bytes=shards.n_bytes, digest=shards.digest)


def _find_fault(source: Path, content: Content, *, share: slice) -> str | None:
    """Return the first fault of the checkpoint's files; only those in `share` are read."""
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


def random_states() -> RandomStates:
    """Return the random states of torch (all devices), numpy and python."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RandomStates(
        torch=_hex(torch.get_rng_state()),
        cuda=[_hex(state) for state in cuda],
        numpy=(kind, keys.tolist(), position, has_gauss, cached),
        python=(version, list(internal), gauss),
    )


def restore_random_states(states: RandomStates) -> None:
    """Restore random states. Those of devices that this process lacks are left out."""
    torch.set_rng_state(_from_hex(states.torch))
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(states.cuda[:n_devices]):
        torch.cuda.set_rng_state(_from_hex(state), device)
    kind, keys, position, has_gauss, cached = states.numpy
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = states.python
    random.setstate((version, tuple(internal), gauss))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

"""Write the policy of a run for other programs: a version, a checkpoint, or LoRA adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import configs
import store
from configs import Config
from learner.checkpoint import check_parameters, check_whole, read_content, saved_tensors
from learner.distributed.optimizer_state import MASTER, trainable
from learner.files.atomic_directory import new_directory
from learner.model.lora import add_adapters, merged, read_adapter, write_adapter
from learner.model.policy_model import load_policy
from learner.model.vision import checkpoint_names
from learner.publishing.publish import SIDE_FILE_SUFFIXES, WEIGHTS_SUFFIX, write_weights
from printable import UNSAFE, UserError
from store import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    RunLayout,
    VersionRecord,
    check_adapter,
    check_consent,
    copy_adapter,
    copy_first,
    directory_to_read,
    files_digest,
    is_adapter,
    open_file_in,
    private_directory,
    tensor_shapes,
    weight_files,
)

# Places of a base model made for a run: of one without model.path, and of one that clones it.
MADE_BASE_MODELS = ("base/policy", "untrained")
# Of a version's configuration, tokenizer and weight index. Large tokenizers have 40 MB.
MAX_SIDE_BYTES = 256 << 20


class ExportError(UserError, ValueError):
    """The requested model cannot be exported. The message gives the reason and the alternatives."""


def find_version(layout: RunLayout, number: int | None) -> VersionRecord:
    """Return the published version `number`, the newest for None.

    Raises ExportError naming the versions whose files are there.
    """
    versions = {version.version: version for version in _versions(layout)}
    there = _whose_files_are_there(layout, versions.values())
    if number is None and there:
        return there[-1]
    if number is not None and versions.get(number) in there:
        return versions[number]
    asked = "its newest version" if number is None else f"version {number}"
    gone = "was never published"
    if number in versions:
        gone = "has no files: they were removed, or its learner was ended before it wrote them"
    raise ExportError(f"{asked} of {layout.root} {gone}; {_what_there_is(layout, there)}")


def newest_checkpoint(layout: RunLayout) -> int:
    """Return the learner step of the newest checkpoint. Raises ExportError if there is none."""
    with store.open_run(layout.root, warn=False) as reader:
        rows = reader.rows(
            "SELECT learner_step FROM checkpoints WHERE live ORDER BY learner_step DESC"
        )
    for row in rows:
        if layout.checkpoint_dir(row["learner_step"]).is_dir():
            return int(row["learner_step"])
    raise ExportError(f"{layout.root} has no checkpoint yet; adapters are in checkpoints only")


def export_version(layout: RunLayout, version: VersionRecord, *, dest: Path) -> str:
    """Write a published version as a whole model, and check its digest.

    Return the digest of the written weights: an adapter is merged into the base model. Raises
    ExportError and StoreError.
    """
    with directory_to_read(layout, version.path) as source:
        if is_adapter(source):
            return _export_merged(layout, version, source=source, dest=dest)
        return _export_whole(layout, version, source=source, dest=dest)


def _export_whole(layout: RunLayout, version: VersionRecord, *, source: Path, dest: Path) -> str:
    """Copy the files of a version, and compare the copy's digest with the published. Return it."""
    try:
        with new_directory(dest) as unfinished:
            with _opened_version(layout, source) as (directory, is_link):
                _copy_version(directory, unfinished, source=source, follows_links=is_link)
            _check_model(unfinished, source=source)
            names = [path.name for path in weight_files(unfinished)]
            for index in configs.weight_indexes(unfinished):
                if others := sorted(configs.files_of_index(index) - {*names}):
                    raise ExportError(
                        f"{source / index.name} names {others[0]}, which the version's digest does "
                        "not cover; export another version, or a checkpoint"
                    )
            digest = files_digest([unfinished / name for name in names])
            if digest != version.digest:
                raise ExportError(
                    f"{source} has digest {digest}, published was {version.digest}: it was changed "
                    "or cut; export another version, or a checkpoint"
                )
    except FileNotFoundError as error:
        raise ExportError(
            f"version {version.version} was removed while it was copied; ask for a newer one"
        ) from error
    return digest


def _check_model(copy: Path, *, source: Path) -> None:
    """Raise ConfigError, which names `source`, unless the copy can be loaded as a model.

    The owner of the source could put a FIFO in place of a file that is opened by its path.
    """
    try:
        configs.check_model_directory(copy)
    except configs.ConfigError as error:
        raise configs.ConfigError(str(error).replace(str(copy), str(source))) from None


@contextmanager
def _opened_version(layout: RunLayout, source: Path) -> Iterator[tuple[int, bool]]:
    """Give the descriptor of a version's directory, and whether a link leads there.

    Version 0 of an evaluation is a link to a model outside of the run, which must be trusted.
    Otherwise the owner of a run may put a link in place of any directory at any moment, so none is
    followed, and all files are those of one descriptor. A copy in this user's cache is nobody
    else's. Raises StoreError and OSError.
    """
    is_link = source.is_symlink()
    if not is_link and source.is_relative_to(layout.root):
        with layout.opened_directory(source) as directory:
            yield directory, False
        return
    if is_link:
        layout.check_trusted()
    directory = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield directory, is_link
    finally:
        os.close(directory)


def _copy_version(directory: int, dest: Path, *, source: Path, follows_links: bool) -> None:
    """Copy the files of a version that `write_weights` may have written.

    `directory` is the descriptor of `source`. The owner of a run may put a link in place of a file
    at any moment, so one is followed only in a model outside of a trusted run.
    Raises ExportError for names that nobody gives a file, and for more than MAX_SIDE_BYTES beside
    the weights: no digest covers those files, and a stranger's would fill the disk. Raises
    UnsafePathError for a link, and for what is no regular file.
    """
    files = [
        path
        for path in (source / name for name in sorted(os.listdir(directory)))
        if path.suffix in (WEIGHTS_SUFFIX, *SIDE_FILE_SUFFIXES)
        and path.name != "complete.json"  # it only marks a finished download
    ]
    for path in files:
        if UNSAFE.search(path.name):
            raise ExportError(
                f"{source} has a file {path.name!r:.200}, with characters that no file of a model "
                "has in its name; remove it, or export another version"
            )
    n_bytes = 0
    for path in files:
        if follows_links:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
        else:
            descriptor = open_file_in(directory, path.name, path=path)
        with open(descriptor, "rb"), (dest / path.name).open("wb") as copy:
            size = os.fstat(descriptor).st_size
            if path.suffix != WEIGHTS_SUFFIX:
                n_bytes += size
            if n_bytes > MAX_SIDE_BYTES:
                raise ExportError(
                    f"the files of {source} beside its weights have {n_bytes:,} bytes, more "
                    f"than {MAX_SIDE_BYTES:,}: no run wrote them; export another version, or a "
                    "checkpoint"
                )
            copy_first(descriptor, copy, n_bytes=size)


def export_adapter_version(layout: RunLayout, version: VersionRecord, *, dest: Path) -> str:
    """Copy a version's adapter as a peft directory, and check its digest. Return the digest.

    Raises ExportError and StoreError.
    """
    with directory_to_read(layout, version.path) as source:
        if not is_adapter(source):
            raise ExportError(
                f"version {version.version} of {layout.root} was published as whole weights; give "
                "RUN@STEP for the adapters of a checkpoint, or leave out --adapter"
            )
        with new_directory(dest) as unfinished:
            _copy_adapter(layout, version, source, unfinished)
    return version.digest


def _copy_adapter(layout: RunLayout, version: VersionRecord, source: Path, dest: Path) -> None:
    """Copy the files of a version's adapter, and compare the copy's digest with the published."""
    try:
        with _opened_version(layout, source) as (directory, _):
            copy_adapter(directory, dest, source=source)
    except FileNotFoundError as error:
        raise ExportError(
            f"version {version.version} was removed while it was copied, or lacks {error.filename};"
            " ask for a newer one"
        ) from error
    digest = files_digest([dest / ADAPTER_FILE])
    if digest != version.digest:
        raise ExportError(
            f"{source} has digest {digest}, published was {version.digest}: it was changed or cut; "
            "export another version, or a checkpoint"
        )


def _export_merged(layout: RunLayout, version: VersionRecord, *, source: Path, dest: Path) -> str:
    """Merge a version's adapter into the base model, and write it. Return the digest."""
    config = configs.from_yaml(layout.info.config_yaml)
    base = base_model(layout, config).resolve()
    with private_directory("gigpo-adapter-") as copy:
        _copy_adapter(layout, version, source, copy)
        check_adapter(
            copy,
            rank=config.model.lora_rank,
            alpha=config.model.lora_alpha,
            base_shapes=tensor_shapes(base),
            base_digest=files_digest(weight_files(base)),
        )
        disable_progress_bar()  # the output is one line
        model = load_policy(
            base, dtype=config.model.dtype, gradient_checkpointing=False, temperature=1.0
        ).causal_lm
        add_adapters(model, rank=config.model.lora_rank, alpha=config.model.lora_alpha)
        read_adapter(model, copy)
    return write_weights(merged(model), dest, source_dir=base)


def export_checkpoint(layout: RunLayout, learner_step: int, *, dest: Path) -> str:
    """Write a checkpoint's weights with the base model's other files. Return their digest.

    Raises ExportError and CheckpointError.
    """
    model, base = _restored(layout, learner_step)
    as_merged = (name.replace(".base_layer.", ".") for name in model.state_dict())
    names = checkpoint_names(base, as_merged)
    return write_weights(
        ((names.get(name, name), tensor) for name, tensor in merged(model)),
        dest,
        source_dir=base,
    )


def export_adapter(layout: RunLayout, learner_step: int, *, dest: Path) -> str:
    """Write a peft adapter directory. Return the digest of its weights.

    Raises ExportError and CheckpointError.
    """
    if not configs.from_yaml(layout.info.config_yaml).model.lora_rank:
        raise ExportError(
            f"{layout.root} has model.lora_rank=0: there are no adapters; leave out --adapter"
        )
    model, _ = _restored(layout, learner_step)
    write_adapter(model, dest)
    return files_digest(weight_files(dest))


def base_model(layout: RunLayout, config: Config) -> Path:
    """Return the Hugging Face directory of a run's base model, whose weights are version 0.

    Raises FileNotFoundError naming its place if it is not there. Raises StoreError for a stranger's
    run: transformers loads the model, and follows what its files name.
    """
    layout.check_trusted()
    candidates = [layout.root / name for name in MADE_BASE_MODELS]
    if config.model.path:
        candidates = [Path(config.model.path)]
    there = [path for path in candidates if (path / "config.json").is_file()]
    if not there:
        raise FileNotFoundError(
            f"{candidates[0]}, the base model of {layout.root}, is not here; a checkpoint needs "
            "its configuration and tokenizer, and what is not trained. Bring it back"
        )
    return there[0]


def _restored(layout: RunLayout, learner_step: int) -> tuple[PreTrainedModel, Path]:
    """Return the model of a checkpoint, with its adapters, and the base model's directory.

    Raises StoreError for a stranger's run: its files are opened by path.
    """
    layout.check_trusted()
    source = layout.checkpoint_dir(learner_step)
    if not source.is_dir():
        there = _whose_files_are_there(layout, _versions(layout))
        raise ExportError(
            f"{layout.root} has no checkpoint of learner step {learner_step}; "
            f"{_what_there_is(layout, there)}"
        )
    config = configs.from_yaml(layout.info.config_yaml)
    content = read_content(source)
    check_whole(source, content)
    # An adapter's configuration names it, so the path must be absolute.
    base = base_model(layout, config).resolve()
    disable_progress_bar()  # the output is one line
    model = load_policy(
        base, dtype=config.model.dtype, gradient_checkpointing=False, temperature=1.0
    ).causal_lm
    if config.model.lora_rank:
        add_adapters(model, rank=config.model.lora_rank, alpha=config.model.lora_alpha)
    parameters = trainable(model)
    check_parameters(source, saved=content.policy_parameters, parameters=parameters)
    saved = saved_tensors(source, content)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(saved(name, MASTER))
    return model, base


def _versions(layout: RunLayout) -> list[VersionRecord]:
    """Return all versions ever announced, oldest first."""
    with store.open_run(layout.root, warn=False) as reader:
        rows = reader.rows(
            "SELECT version, path, digest, learner_step FROM versions ORDER BY version"
        )
    return [VersionRecord(**row) for row in rows]


def _whose_files_are_there(
    layout: RunLayout, versions: Iterable[VersionRecord]
) -> list[VersionRecord]:
    # For these very settings: `open_run` may have read others, which were put there meanwhile.
    check_consent(layout)
    exists = layout.storage.exists
    return [
        version
        for version in versions
        if exists(f"{version.path}/config.json") or exists(f"{version.path}/{ADAPTER_CONFIG_FILE}")
    ]


def _what_there_is(layout: RunLayout, there: list[VersionRecord]) -> str:
    numbers = [str(version.version) for version in there]
    names = sorted(path.name for path in layout.checkpoints.glob("step*"))
    steps = [str(int(match[1])) for name in names if (match := re.fullmatch(r"step(\d+)", name))]
    return (
        f"there are versions {', '.join(numbers) or '(none)'} and checkpoints of learner steps "
        f"{', '.join(steps) or '(none)'}"
    )

"""Write a published version of a run as a model, or as a LoRA adapter, for other programs.

The run may be a stranger's: its files are copied first, and what is checked is the copy.
"""

from __future__ import annotations

import os
from pathlib import Path

import configs
from learner.files.atomic_directory import new_directory
from learner.model.lora import merged, read_adapter
from learner.publishing.base_model import base_model, load_base_model
from learner.publishing.exportable import ExportError
from learner.publishing.publish import SIDE_FILE_SUFFIXES, write_weights
from printable import UNSAFE
from store import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    WEIGHTS_SUFFIX,
    OpenedVersion,
    RunLayout,
    VersionRecord,
    check_adapter,
    check_side_files,
    copy_adapter,
    copy_first,
    files_digest,
    opened_version,
    private_directory,
    tensor_shapes,
    weight_files,
)


def export_version(layout: RunLayout, version: VersionRecord, *, dest: Path) -> str:
    """Write a published version as a whole model, and check its digest.

    Return the digest of the written weights: an adapter is merged into the base model. Raises
    ExportError and StoreError.
    """
    with opened_version(layout, version.path) as source:
        if source.has_file(ADAPTER_CONFIG_FILE):
            return _export_merged(layout, version, source, dest)
        return _export_whole(version, source, dest)


def _export_whole(version: VersionRecord, source: OpenedVersion, dest: Path) -> str:
    """Copy the files of a version, and compare the copy's digest with the published. Return it."""
    with new_directory(dest) as unfinished:
        try:
            _copy_model(source, unfinished)
        except FileNotFoundError as error:
            raise ExportError(
                f"version {version.version} was removed while it was copied; ask for a newer one"
            ) from error
        _check_model(unfinished, source=source.path)
        names = [path.name for path in weight_files(unfinished)]
        for index in configs.weight_indexes(unfinished):
            if others := sorted(configs.files_of_index(index) - {*names}):
                raise ExportError(
                    f"{source.path / index.name} names {others[0]}, which the version's digest "
                    "does not cover; export another version, or a checkpoint"
                )
        _check_digest([unfinished / name for name in names], version, source)
    return version.digest


def _check_digest(copies: list[Path], version: VersionRecord, source: OpenedVersion) -> None:
    """Raise ExportError unless the copied weights are those that were published."""
    digest = files_digest(copies)
    if digest != version.digest:
        raise ExportError(
            f"{source.path} has digest {digest}, published was {version.digest}: it was changed or "
            "cut; export another version, or a checkpoint"
        )


def _check_model(copy: Path, *, source: Path) -> None:
    """Raise ConfigError, which names `source`, unless the copy can be loaded as a model.

    The owner of the source could put a FIFO in place of a file that is opened by its path.
    """
    try:
        configs.check_model_directory(copy)
    except configs.ConfigError as error:
        raise configs.ConfigError(str(error).replace(str(copy), str(source))) from None


def _copy_model(source: OpenedVersion, dest: Path) -> None:
    """Copy the files that `write_weights` may have written.

    Raises ExportError for names that nobody gives a file, WeightFileError as `check_side_files`,
    OSError, and UnsafePathError for a link, and for what is no regular file.
    """
    names = [
        name
        for name in source.names()
        if Path(name).suffix in (WEIGHTS_SUFFIX, *SIDE_FILE_SUFFIXES)
        and name != "complete.json"  # it only marks a finished download
    ]
    if unsafe := next(filter(UNSAFE.search, names), None):
        raise ExportError(
            f"{source.path} has a file {unsafe!r:.200}, with characters that no file of a model "
            "has in its name; remove it, or export another version"
        )
    sizes: dict[str, int] = {}
    for name in names:
        descriptor = source.open_file(name)
        with open(descriptor, "rb"), (dest / name).open("wb") as copy:
            sizes[name] = os.fstat(descriptor).st_size
            check_side_files(sizes, of=source.path)
            copy_first(descriptor, copy, n_bytes=sizes[name])


def export_adapter_version(layout: RunLayout, version: VersionRecord, *, dest: Path) -> str:
    """Copy a version's adapter as a peft directory, and check its digest. Return the digest.

    Raises ExportError and StoreError.
    """
    with opened_version(layout, version.path) as source:
        if not source.has_file(ADAPTER_CONFIG_FILE):
            raise ExportError(
                f"version {version.version} of {layout.root} was published as whole weights; give "
                "RUN@STEP for the adapters of a checkpoint, or leave out --adapter"
            )
        with new_directory(dest) as unfinished:
            _copy_adapter(version, source, unfinished)
    return version.digest


def _copy_adapter(version: VersionRecord, source: OpenedVersion, dest: Path) -> None:
    """Copy the files of a version's adapter, and compare the copy's digest with the published."""
    try:
        copy_adapter(source, dest)
    except FileNotFoundError as error:
        raise ExportError(
            f"version {version.version} was removed while it was copied, or lacks {error.filename};"
            " ask for a newer one"
        ) from error
    _check_digest([dest / ADAPTER_FILE], version, source)


def _export_merged(
    layout: RunLayout, version: VersionRecord, source: OpenedVersion, dest: Path
) -> str:
    """Merge a version's adapter into the base model, and write it. Return the digest."""
    config = configs.from_yaml(layout.info.config_yaml)
    base = base_model(layout, config)
    with private_directory("gigpo-adapter-") as copy:
        _copy_adapter(version, source, copy)
        check_adapter(
            copy,
            rank=config.model.lora_rank,
            alpha=config.model.lora_alpha,
            base_shapes=tensor_shapes(base),
            base_digest=files_digest(weight_files(base)),
        )
        model = load_base_model(base, config)
        read_adapter(model, copy)
    return write_weights(merged(model), dest, source_dir=base)

"""Write numbered weights: complete Hugging Face directories that appear whole or not at all.

    digest = write_weights(engine.weights(), Path("policy"), source_dir=base)
    digest = publish_weights(
        engine.weights(), Path("weights/v000008"), source_dir=base, fsync=fsync, send=None
    )

The digest is that of `safetensors_writer.write_shards`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from learner.files.atomic_directory import (
    BackgroundFsync,
    atomic_directory,
    new_directory,
)
from learner.files.safetensors_writer import SHARD_BYTES, Send, write_shards
from store import StoreError

# All files but the weights: config, generation config, tokenizer, chat template.
SIDE_FILE_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
WEIGHT_INDEX = ".index.json"  # maps tensors to files, if there are several


def write_weights(
    weights: Iterable[tuple[str, torch.Tensor]], dest: Path, *, source_dir: Path | str
) -> str:
    """Write a model directory that transformers and vLLM load. Return the digest of its weights.

    `weights` are (Hugging Face name, tensor) pairs, consumed one by one: no more than one file of a
    large model is held. Configuration and tokenizer come from the base model in `source_dir`. The
    dtype in the configuration becomes that of the weights; a loader would otherwise convert them
    silently. Raises ValueError for floating-point weights of several dtypes, and FileExistsError
    if `dest` exists.
    """
    with new_directory(dest) as unfinished:
        return _write(weights, unfinished, source_dir=Path(source_dir), send=None)


def publish_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    dest: Path,
    *,
    source_dir: Path | str,
    fsync: BackgroundFsync,
    send: Send | None,
) -> str:
    """Write a model directory like `write_weights`, without waiting for the disk.

    It is whole for every reader as soon as it is visible, also if this process is killed. It
    survives a power cut after `fsync.wait()`. `send`, from `Broadcast.round`, gets its weight
    files.
    """
    with fsync.visible_whole(dest) as unfinished:
        return _write(weights, unfinished, source_dir=Path(source_dir), send=send)


def copy_weights(source: Path, dest: Path, *, follow_links: bool) -> None:
    """Copy a model directory. `dest` appears whole or not at all.

    Links are followed only from a directory that this user chose: the Hub's cache consists of
    links. Otherwise a link raises StoreError.
    """
    with atomic_directory(dest) as unfinished:
        shutil.copytree(source, unfinished, symlinks=not follow_links, dirs_exist_ok=True)
        # Look at the copy: links were copied as links, so nobody can put one in the source after
        # this check.
        link = next((path for path in unfinished.rglob("*") if path.is_symlink()), None)
        if link is not None:
            shutil.rmtree(unfinished)
            raise StoreError(
                f"{source / link.relative_to(unfinished)} is a symbolic link; put what it leads to "
                "in its place"
            )


def _write(
    weights: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    *,
    source_dir: Path,
    send: Send | None,
) -> str:
    dtypes: set[torch.dtype] = set()

    def noting_dtypes() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if tensor.is_floating_point():
                dtypes.add(tensor.dtype)
            yield name, tensor

    shards = write_shards(
        noting_dtypes(), directory, stem="model", shard_bytes=SHARD_BYTES, send=send
    )
    if len(dtypes) != 1:
        raise ValueError(f"weights of one version need one dtype, not {sorted(map(str, dtypes))}")
    if len(shards.files) > 1:
        index = {"metadata": {"total_size": shards.n_bytes}, "weight_map": dict(shards.file_of)}
        (directory / f"model.safetensors{WEIGHT_INDEX}").write_text(
            json.dumps(index, indent=2) + "\n"
        )
    _copy_side_files(source_dir, directory, dtype=dtypes.pop())
    return shards.digest


def _copy_side_files(source_dir: Path, directory: Path, *, dtype: torch.dtype) -> None:
    for path in sorted(source_dir.iterdir()):
        if path.suffix in SIDE_FILE_SUFFIXES and not path.name.endswith(WEIGHT_INDEX):
            shutil.copyfile(path, directory / path.name)
    config = json.loads((source_dir / "config.json").read_text())
    config.pop("torch_dtype", None)  # older name of `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

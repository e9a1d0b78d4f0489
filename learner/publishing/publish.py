"""Numbered weights on disk: a complete Hugging Face directory that appears whole or not at all.

    digest = write_weights(engine.weights(), Path("policy"), source_dir=base)  # BLAKE3 of the weight files
    digest = publish_weights(engine.weights(), Path("weights/v000008"), source_dir=base, behind=behind, send=None)
    prune_versions(Path("weights"), keep=4)

`directories.py` makes it appear whole, `shards.py` writes and hashes the files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from learner.files.atomic_directory import BackgroundFsync, atomic_directory, prune_oldest
from learner.files.page_reuse import keep_spare
from learner.files.safetensors_writer import SHARD_BYTES, Send, write_shards
from store import StoreError

WEIGHTS_STEM, WEIGHTS_PATTERN = "model", "*.safetensors"
# Everything of a model directory but its weights: config, generation config, tokenizer, chat
# template.
SIDE_FILE_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
# which tensor is in which file, where there are several
WEIGHT_INDEX = "model.safetensors.index.json"
WEIGHT_INDEX_SUFFIX = ".index.json"


def write_weights(
    weights: Iterable[tuple[str, torch.Tensor]], dest: Path, *, source_dir: Path | str
) -> str:
    """Writes a model directory that transformers and vLLM load; returns the digest of its weight
    files (`shards.py`).

    Consumes (Hugging Face name, tensor) one by one; of a large model no more than one file is held.
    Configuration and tokenizer come from `source_dir`, the base model; the recorded dtype becomes
    that of the weights, or a loader would silently convert them to the base model's. Raises
    ValueError for floating-point weights of several dtypes.
    """
    with atomic_directory(dest) as unfinished:
        return _write(weights, unfinished, source_dir=Path(source_dir), send=None, spare_in=None)


def publish_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    dest: Path,
    *,
    source_dir: Path | str,
    behind: BackgroundFsync,
    send: Send | None,
) -> str:
    """As `write_weights`, without waiting for the disk; the weight files are also given to `send`,
    as `Broadcast.round` has it.

    The directory is whole for everyone as soon as it is visible, also if this process is killed;
    that it survives a power cut too is known after `behind.wait()`.
    """
    with behind.visible_whole(dest) as unfinished:
        return _write(
            weights, unfinished, source_dir=Path(source_dir), send=send, spare_in=dest.parent
        )


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a model directory in the order of their digest; none if there are
    none.
    """
    return sorted(directory.glob(WEIGHTS_PATTERN))


def copy_weights(source: Path, dest: Path, *, follow_links: bool) -> None:
    """Copy a model directory. `dest` appears whole or not at all.

    Follow links only in a directory that this user chose: a snapshot in the Hub's cache is made of
    them. Otherwise raise StoreError for a link.
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


def prune_versions(weights_dir: Path, *, keep: int) -> list[str]:
    """Removes all but the newest `keep` versions; returns the names removed. A file of theirs is
    kept to be written over.
    """
    versions = sorted(path for path in weights_dir.iterdir() if path.is_dir() and not path.suffix)
    # a link is to what is not ours
    for version in (path for path in versions[:-keep] if not path.is_symlink()):
        for file in weight_files(version)[:1]:
            keep_spare(weights_dir, file)
    return prune_oldest(weights_dir, keep=keep, kept=frozenset())


def _write(
    weights: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    *,
    source_dir: Path,
    send: Send | None,
    spare_in: Path | None,
) -> str:
    dtypes: set[torch.dtype] = set()

    def noting_dtypes() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if tensor.is_floating_point():
                dtypes.add(tensor.dtype)
            yield name, tensor

    shards = write_shards(
        noting_dtypes(),
        directory,
        stem=WEIGHTS_STEM,
        shard_bytes=SHARD_BYTES,
        send=send,
        spare_in=spare_in,
    )
    if len(dtypes) != 1:
        raise ValueError(f"weights of one version need one dtype, not {sorted(map(str, dtypes))}")
    if len(shards.files) > 1:
        index = {"metadata": {"total_size": shards.n_bytes}, "weight_map": dict(shards.file_of)}
        (directory / WEIGHT_INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _copy_side_files(source_dir, directory, dtype=dtypes.pop())
    return shards.digest


def _copy_side_files(source_dir: Path, directory: Path, *, dtype: torch.dtype) -> None:
    for path in sorted(source_dir.iterdir()):
        if path.suffix in SIDE_FILE_SUFFIXES and not path.name.endswith(WEIGHT_INDEX_SUFFIX):
            shutil.copyfile(path, directory / path.name)
    config = json.loads((source_dir / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of the same entry
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

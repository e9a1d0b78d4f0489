"""Numbered weights on disk: a complete Hugging Face directory that appears whole or not at all.

    digest = write_weights(engine.state_dict(), Path("weights/v000008"), source_dir=base)  # SHA-256 of the weight file
    prune_versions(Path("weights"), keep=4)

`visible_last` is the writing itself, which checkpoints and the tiny model share.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

WEIGHTS_FILE = "model.safetensors"
UNFINISHED_SUFFIX, REPLACED_SUFFIX = ".tmp", ".old"
# Everything of a model directory but its weights: config, generation config, tokenizer, chat template.
SIDE_FILE_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".tiktoken")
WEIGHT_INDEX_SUFFIX = ".index.json"  # names shards that the published single file does not have


def write_weights(state_dict: Mapping[str, torch.Tensor], dest: Path, *, source_dir: Path | str) -> str:
    """Writes a model directory that transformers and vLLM load; returns the SHA-256 of its weight file, in hex.

    Configuration and tokenizer come from `source_dir`, the base model; the recorded dtype becomes that of the weights,
    or a loader would silently convert them to the base model's.
    """
    source_dir = Path(source_dir)
    dtypes = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
    if len(dtypes) != 1:
        raise ValueError(f"weights of one version need one dtype, not {sorted(map(str, dtypes))}")
    with visible_last(dest) as unfinished:
        for path in sorted(source_dir.iterdir()):
            if path.suffix in SIDE_FILE_SUFFIXES and not path.name.endswith(WEIGHT_INDEX_SUFFIX):
                shutil.copyfile(path, unfinished / path.name)
        config = json.loads((source_dir / "config.json").read_text())
        config.pop("torch_dtype", None)  # the older name of the same entry
        config["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state_dict.items()}
        save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
        digest = file_digest(unfinished / WEIGHTS_FILE)
    return digest


def copy_weights(source: Path, dest: Path) -> None:
    """Copies a model directory; `dest` appears whole or not at all."""
    with visible_last(dest) as unfinished:
        shutil.copytree(source, unfinished, dirs_exist_ok=True)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def prune_versions(weights_dir: Path, *, keep: int) -> list[str]:
    """Removes all but the newest `keep` versions; returns the names removed."""
    return prune_oldest(weights_dir, keep=keep)


def prune_oldest(parent: Path, *, keep: int) -> list[str]:
    """Removes all directories but the last `keep` by name, and what dead writers left; returns the names removed."""
    if keep < 1:
        raise ValueError(f"keep={keep} would remove the newest directory of {parent} too; keep at least 1")
    names = sorted(path.name for path in parent.iterdir() if path.is_dir())
    unfinished = [name for name in names if name.endswith((UNFINISHED_SUFFIX, REPLACED_SUFFIX))]
    removed = unfinished + [name for name in names if name not in unfinished][:-keep]
    for name in removed:
        shutil.rmtree(parent / name)
    return removed


@contextmanager
def visible_last(dest: Path) -> Iterator[Path]:
    """A directory to fill; it gets its name, by one rename, only when all in it is on disk.

    What is there under that name already is replaced: only a process that died between the rename and the announcement
    in the catalog leaves one, so nobody reads it. (An announced number is never used again.)
    """
    unfinished, replaced = (dest.with_name(dest.name + suffix) for suffix in (UNFINISHED_SUFFIX, REPLACED_SUFFIX))
    for leftover in (unfinished, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    unfinished.mkdir(parents=True)
    yield unfinished
    for path in [*unfinished.rglob("*"), unfinished]:
        _fsync(path)
    if dest.exists():
        dest.rename(replaced)
    unfinished.rename(dest)
    _fsync(dest.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

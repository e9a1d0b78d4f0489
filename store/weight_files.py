"""Find the weight files of a model."""

from __future__ import annotations

from pathlib import Path

from store.errors import StoreError


class WeightFileError(StoreError):
    """Weights are missing, damaged or of another model. An engine refuses them unchanged."""


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files at `path`, in the order of their digest.

    `path` is a file, or a directory of them. Raises WeightFileError if there is none.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise WeightFileError(
            f"no weights at {path}: give a .safetensors file, or a directory that holds some"
        )
    return files

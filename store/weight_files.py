"""Find the weight files of a model, and encode and decode the head of one.

A safetensors file is its head, then the tensors' bytes. The head is 8 bytes with the length of the
JSON text, little-endian, and the text. The format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from store.errors import StoreError

N_LENGTH_BYTES = 8  # safetensors: the length of the head comes first
ALIGNMENT_BYTES = 8  # safetensors: the head is filled up to a multiple
MOST_HEAD_BYTES = 100 * 2**20  # safetensors' own bound
METADATA = "__metadata__"
WEIGHTS_SUFFIX = ".safetensors"
# Of a version's configuration, tokenizer and weight index. Large tokenizers have 40 MB.
MAX_SIDE_BYTES = 256 << 20
# Name in the format -> name of the torch dtype.
SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}


class WeightFileError(StoreError):
    """Weights are missing, damaged or of another model. An engine refuses them unchanged."""


def check_side_files(sizes: Mapping[str, int], *, of: object) -> None:
    """Raise WeightFileError if the files beside the weights have more than MAX_SIDE_BYTES together.

    `sizes` are those in bytes of all files of a version, by name, and `of` is its place. No digest
    covers the files beside the weights, and a stranger's would fill the disk.
    """
    n_bytes = sum(size for name, size in sizes.items() if not name.endswith(WEIGHTS_SUFFIX))
    if n_bytes > MAX_SIDE_BYTES:
        raise WeightFileError(
            f"the files of {of} beside its weights have {n_bytes:,} bytes, more than "
            f"{MAX_SIDE_BYTES:,}: no model has so much; remove what is not of it, or take another"
        )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    name: str
    dtype: str  # key of SAFETENSORS_DTYPES
    shape: list[int]
    begin: int  # bytes from the end of the head
    end: int


def encode_safetensors_head(entries: Sequence[TensorEntry]) -> bytes:
    """Return the head of a file with these tensors."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(N_LENGTH_BYTES, "little") + text


def decode_safetensors_head(head: bytes) -> list[TensorEntry]:
    """Return the tensors of a file, empty ones included, in the order of its head."""
    header = json.loads(head[N_LENGTH_BYTES:])
    header.pop(METADATA, None)
    entries = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        entries.append(
            TensorEntry(name=name, dtype=entry["dtype"], shape=entry["shape"], begin=begin, end=end)
        )
    return entries


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Return name and shape of every tensor at `path`, a file or a directory of files.

    Raises WeightFileError if a file is cut or damaged.
    """
    shapes: dict[str, list[int]] = {}
    for file in weight_files(path):
        try:
            entries = _entries(file)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightFileError(
                f"{file} is not a whole safetensors file ({error}); publish it again"
            ) from error
        shapes |= {entry.name: entry.shape for entry in entries}
    return shapes


def _entries(path: Path) -> list[TensorEntry]:
    """Return the tensors that a file holds. Raises ValueError for one with too few bytes."""
    with path.open("rb") as file:
        length = file.read(N_LENGTH_BYTES)
        n_bytes = int.from_bytes(length, "little")
        if len(length) < N_LENGTH_BYTES or n_bytes > MOST_HEAD_BYTES:
            raise ValueError(f"its head would have {n_bytes} bytes")
        head = length + file.read(n_bytes)
    entries = decode_safetensors_head(head)
    needed = len(head) + max((entry.end for entry in entries), default=0)
    if path.stat().st_size < needed:
        raise ValueError(f"{path.stat().st_size} of {needed} bytes")
    return entries

"""Named tensors as safetensors files of bounded size, hashed while they are written.

    shards = write_shards(engine.weights(), directory, stem="model", shard_bytes=SHARD_BYTES, send=None, spare_in=None)
    shards.digest == store.files_digest([directory / name for name in shards.files])

The digest is BLAKE3, in hex, of the files in order as if they were one: `cat model*.safetensors |
b3sum`. It is the only cryptographic hash here that keeps up with writing; SHA-256 would take longer
than all else between learner and engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from learner.files.page_reuse import open_over, take_spare

SHARD_BYTES = 4 * 2**30  # of tensors; no more than one file's are held at a time
SUFFIX = ".safetensors"
# Names of the format, https://github.com/huggingface/safetensors#format
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_ALIGNMENT_BYTES = 8
# takes a file in pieces: its head, and each tensor that is not empty
Send = Callable[[Sequence[memoryview]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    digest: str
    files: tuple[str, ...]  # names in the directory, in order
    n_bytes: int
    file_of: Mapping[str, str]  # tensor -> file


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    *,
    stem: str,
    shard_bytes: int,
    send: Send | None,
    spare_in: Path | None,
) -> Shards:
    """Writes the tensors as they come, in files of at most `shard_bytes` unless one tensor is
    larger; each is sent meanwhile. The first may be written over a file that was kept in `spare_in`
    (`spare.py`).

    A tensor is kept, without a copy, until its file is full: whoever makes them must not change one
    meanwhile. Five tensors of 4 bytes each, with 8 bytes a file: {a, b} {c, d} {e} in
    stem-00001-of-00003 and so on.
    """
    digest = blake3()
    file_of: dict[str, int] = {}
    numbered: list[Path] = []
    for number, part in enumerate(_parts(tensors, shard_bytes=shard_bytes), start=1):
        path = directory / f"{stem}-{number:05d}{SUFFIX}"
        if spare_in is not None:
            take_spare(spare_in, path)
        _write(path, part, digest, send=send)
        numbered.append(path)
        file_of |= dict.fromkeys(part, number)
    files = [
        f"{stem}-{number:05d}-of-{len(numbered):05d}{SUFFIX}"
        for number in range(1, len(numbered) + 1)
    ]
    if len(files) == 1:
        files = [f"{stem}{SUFFIX}"]
    for path, name in zip(numbered, files, strict=True):
        path.rename(directory / name)
    return Shards(
        digest=digest.hexdigest(),
        files=tuple(files),
        n_bytes=sum((directory / name).stat().st_size for name in files),
        file_of={tensor: files[number - 1] for tensor, number in file_of.items()},
    )


def _parts(
    tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """At least one part, so that no tensors at all are a file too. Each is emptied before the next
    is filled.
    """
    part: dict[str, torch.Tensor] = {}
    n_bytes = 0
    for name, tensor in tensors:
        if part and n_bytes + tensor.nbytes > shard_bytes:
            yield part
            part.clear()
            n_bytes = 0
        part[name] = tensor.detach().cpu().contiguous()
        n_bytes += tensor.nbytes
    yield part


def _write(
    path: Path, tensors: Mapping[str, torch.Tensor], digest: blake3, *, send: Send | None
) -> None:
    """One file: 8 bytes with the length of the header, the header, the tensors' bytes. Also added
    to `digest`, and sent.

    safetensors' own writer gives no hold on the bytes: hashing would be a second pass over the
    file.
    """
    # As safetensors sorts them: with the widest types first every tensor is aligned to its type.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header = _header(ordered)
    pieces = [memoryview(bytearray(len(header).to_bytes(8, "little") + header))]
    pieces += [
        memoryview(tensor.view(-1).view(torch.uint8).numpy())
        for tensor in ordered.values()
        if tensor.numel()
    ]
    with (
        open_over(path) as file,
        ThreadPoolExecutor(1) as hashing,
        ThreadPoolExecutor(1) as sending,
    ):
        # all three release the GIL
        beside: list[Future[Any]] = [hashing.submit(digest.update, piece) for piece in pieces]
        if send is not None:
            beside.append(sending.submit(send, pieces))
        for piece in pieces:
            written = 0
            while written < len(piece):  # a raw file may take less than it was given
                written += file.write(piece[written:])
        file.truncate()
        for future in beside:
            future.result()


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; only {', '.join(DTYPE_NAMES.values())} can be written"
            )
        end = start + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)

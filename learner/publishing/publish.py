"""Write numbered weights: complete Hugging Face directories that appear whole or not at all.

    digest = write_weights(engine.weights(), Path("policy"), source_dir=base)

    copy = WeightsCopy()
    digest = copy.take(engine.weights())    # from here on the engine may train
    copy.write(Path("weights/v000008"), source_dir=base, send=None)

The digest is BLAKE3, in hex, of the weight files in order as if they were one: `cat
model*.safetensors | b3sum`. No other cryptographic hash here is as fast as writing: SHA-256 would
take longer than everything else between learner and engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3

from learner.files.atomic_directory import new_directory, visible_whole
from learner.publishing.copy_model import copy_file
from store import (
    ADAPTER_FILE,
    SAFETENSORS_DTYPES,
    WEIGHTS_SUFFIX,
    StoreError,
    TensorEntry,
    check_side_files,
    encode_safetensors_head,
)

SHARD_BYTES = 4 * 2**30  # of one file; `write_weights` holds the tensors of one at a time
DTYPE_NAMES = {getattr(torch, dtype): name for name, dtype in SAFETENSORS_DTYPES.items()}
# Receives a file in pieces: its head, and each tensor that is not empty.
Send = Callable[[Sequence[memoryview]], None]
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
        return _write(weights, unfinished, source_dir=Path(source_dir))


class WeightsCopy:
    """Hold a copy of the newest weights in main memory, to be written while training goes on."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}  # kept: new memory costs more than the copying
        self._digest = ""

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
        """Copy the weights over those of the version before. Return the digest of their files."""
        for name, tensor in weights:
            if name not in self._tensors:
                self._tensors[name] = host_memory(tensor)
            self._tensors[name].copy_(tensor)
        self._digest = weights_digest(self._tensors.items())
        return self._digest

    @property
    def n_bytes(self) -> int:
        """Return the size of the copy, which is that of the files without their heads."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def write(self, dest: Path, *, source_dir: Path | str, send: Send | None) -> None:
        """Write a model directory like `write_weights`, without waiting for the disk.

        It is whole for every reader as soon as it is visible, also if this process is killed. It
        survives a power cut after `sync_whole`. `send`, from `Broadcast.round`, gets its weight
        files meanwhile. Raises StoreError if the copy was changed since `take`.
        """
        # At the speed of the network, whatever the disk's is.
        with ThreadPoolExecutor(1) as sending:
            sent: Future[None] | None = None
            if send is not None:
                sent = sending.submit(
                    send_files, self._tensors.items(), send, shard_bytes=SHARD_BYTES
                )
            self._write_files(dest, source_dir=Path(source_dir))
            if sent is not None:
                sent.result()

    def _write_files(self, dest: Path, *, source_dir: Path) -> None:
        with visible_whole(dest) as unfinished:
            digest = _write(self._tensors.items(), unfinished, source_dir=source_dir)
            self._check(digest, dest)

    def write_adapter(self, dest: Path, *, write_others: Callable[[Path], None]) -> None:
        """Write an adapter directory like `write`. The copy is of `adapter_weights`.

        `write_others` writes the other files of an adapter into a directory.
        """
        with visible_whole(dest) as unfinished:
            # peft and vLLM read one file.
            shards = write_shards(
                self._tensors.items(),
                unfinished,
                stem=Path(ADAPTER_FILE).stem,
                shard_bytes=SHARD_BYTES,
            )
            write_others(unfinished)
            self._check(shards.digest, dest)

    def _check(self, digest: str, dest: Path) -> None:
        if digest != self._digest:
            raise StoreError(
                f"{dest} was announced with digest {self._digest}, its files have {digest}: this "
                "machine's memory is not sound; start the run again"
            )


def host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return unset main memory for a copy of `tensor`. It is pinned for a tensor on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the digest that `write_weights` gives for these weights."""
    digest = blake3(max_threads=blake3.AUTO)
    for part in _parts(weights, shard_bytes=SHARD_BYTES):
        for piece in _pieces(part):
            digest.update(piece)
    return digest.hexdigest()


def _write(
    weights: Iterable[tuple[str, torch.Tensor]], directory: Path, *, source_dir: Path
) -> str:
    shards = write_shards(weights, directory, stem="model", shard_bytes=SHARD_BYTES)
    if len(shards.dtypes) != 1:
        found = sorted(map(str, shards.dtypes))
        raise ValueError(f"weights of one version need one dtype, not {found}")
    if len(shards.files) > 1:
        index = {"metadata": {"total_size": shards.n_bytes}, "weight_map": dict(shards.file_of)}
        (directory / f"model.safetensors{WEIGHT_INDEX}").write_text(
            json.dumps(index, indent=2) + "\n"
        )
    _copy_side_files(source_dir, directory, dtype=next(iter(shards.dtypes)))
    return shards.digest


def _copy_side_files(source_dir: Path, directory: Path, *, dtype: torch.dtype) -> None:
    copied = [
        path
        for path in sorted(source_dir.iterdir())
        if path.suffix in SIDE_FILE_SUFFIXES and not path.name.endswith(WEIGHT_INDEX)
    ]
    check_side_files({path.name: path.stat().st_size for path in copied}, of=source_dir)
    for path in copied:
        copy_file(path, directory / path.name)
    config = json.loads((directory / "config.json").read_text())
    config.pop("torch_dtype", None)  # older name of `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    digest: str
    files: tuple[str, ...]  # names in the directory, in order
    n_bytes: int
    file_of: Mapping[str, str]  # tensor -> file
    dtypes: frozenset[torch.dtype]  # of the floating-point tensors


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    *,
    stem: str,
    shard_bytes: int,
) -> Shards:
    """Write the tensors in files of at most `shard_bytes`, or of one larger tensor.

    A tensor is kept, without a copy, until its file is written: it must not change before. Five
    tensors of 4 bytes each, with 8 bytes a file: {a, b} {c, d} {e}, in stem-00001-of-00003 and so
    on.
    """
    digest = blake3()
    file_of: dict[str, int] = {}
    dtypes: set[torch.dtype] = set()
    numbered: list[Path] = []
    for number, part in enumerate(_parts(tensors, shard_bytes=shard_bytes), start=1):
        path = directory / f"{stem}-{number:05d}{WEIGHTS_SUFFIX}"
        _write_shard(path, tensors=part, digest=digest)
        numbered.append(path)
        file_of |= dict.fromkeys(part, number)
        dtypes |= {tensor.dtype for tensor in part.values() if tensor.is_floating_point()}
    paths = [directory / f"{stem}{WEIGHTS_SUFFIX}"]
    if len(numbered) > 1:
        last = f"-of-{len(numbered):05d}{WEIGHTS_SUFFIX}"
        paths = [path.with_name(f"{path.stem}{last}") for path in numbered]
    for path, name in zip(numbered, paths, strict=True):
        path.rename(name)
    return Shards(
        digest=digest.hexdigest(),
        files=tuple(path.name for path in paths),
        n_bytes=sum(path.stat().st_size for path in paths),
        file_of={tensor: paths[number - 1].name for tensor, number in file_of.items()},
        dtypes=frozenset(dtypes),
    )


def send_files(
    tensors: Iterable[tuple[str, torch.Tensor]], send: Send, *, shard_bytes: int
) -> None:
    """Send the files that `write_shards` writes of these tensors."""
    for part in _parts(tensors, shard_bytes=shard_bytes):
        send(_pieces(part))


def _parts(
    tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each file; one empty part if there are no tensors.

    A part is emptied before the next is filled.
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


def _write_shard(path: Path, *, tensors: Mapping[str, torch.Tensor], digest: blake3) -> None:
    """Write one file, and add it to `digest`.

    safetensors' own writer does not expose the bytes, so hashing would be a second pass over the
    file.
    """
    pieces = _pieces(tensors)
    # Writing and hashing both release the GIL.
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hashing:
        hashed = [hashing.submit(digest.update, piece) for piece in pieces]
        for piece in pieces:
            written = 0
            while written < len(piece):  # a raw file may accept only a part
                written += file.write(piece[written:])
        for future in hashed:
            future.result()


def _pieces(tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """Return the bytes of one file: its head, and each tensor that is not empty."""
    # As safetensors sorts them: with the widest types first every tensor is aligned to its type.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    head = memoryview(bytearray(encode_safetensors_head(_entries(ordered))))
    bodies = [
        memoryview(tensor.view(-1).view(torch.uint8).numpy())
        for tensor in ordered.values()
        if tensor.numel()
    ]
    return [head, *bodies]


def _entries(tensors: Mapping[str, torch.Tensor]) -> list[TensorEntry]:
    entries, begin = [], 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; only {', '.join(DTYPE_NAMES.values())} can be written"
            )
        end = begin + tensor.nbytes
        dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
        begin = end
    return entries

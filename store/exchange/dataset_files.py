"""Read and describe the files of a dataset: trajectories as a directory of plain Parquet files.

    storage, dataset = open_dataset("datasets/won")
    for name, rows in part_tables(storage, dataset): ...

`dataset.json` is written last: without it a dataset is not whole. The directory may be a URI as
well: s3://bucket/won?region=eu-central-1.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from store.atomic_write import READ_ONLY, make_directory, write_atomically
from store.errors import DigestError, FormatError, StoreError
from store.hashing import file_digest
from store.run_json import check_format, checked_run_id
from store.segment_encoding import decode
from store.storage import LocalStorage, Storage, open_storage
from store.untrusted import json_values
from store.untrusted.limited_process import in_limited_process
from store.untrusted.memory_limit import allowed_bytes
from store.user_cache import own_cache

DATASET_JSON = "dataset.json"
MAX_DATASET_JSON_BYTES = 64 << 20  # a group takes 40; as many as a million
BINARY, TEXT = "binary", "text"
UIDS = {BINARY: "16 bytes each", TEXT: "text, as in SQL"}
README = """# {n_trajectories} trajectories, {n_steps} steps

From run {run_id} at lsn {lsn}; condition: {where}.
One row per step, whole trajectories only; `dataset.json` has the details.
`traj_uid`, `group_uid`, `state_hash` and `final_state_hash` are {uid_form}. Load it with any of

    pandas.read_parquet("{here}/data")
    polars.scan_parquet("{here}/data/*.parquet")
    datasets.load_dataset("parquet", data_dir="{here}/data")["train"].select_columns(
        ["response_ids"]
    ).with_format("torch")
    duckdb.sql("SELECT * FROM '{here}/data/*.parquet'")

or take it into another run: `gigpo import RUN {here}`.
"""
MAX_GROUP_SIZE = 1 << 16  # members; the published runs have 8
MAX_FOLDERS = 100  # one inside the other, which a copy of a part makes
PARTS = "data"  # the directory of a dataset's files


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetFile:
    """One file of a dataset."""

    path: str
    digest: str
    n_bytes: int
    n_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The content of dataset.json, which is written last: without it a dataset is not whole."""

    format: str
    run_id: str
    lsn: int
    where: str | None
    created_us: int
    n_trajectories: int
    n_steps: int
    # group_uid in hex -> its size in its own run, whether all members are here or not
    groups: Mapping[str, int]
    parts: tuple[DatasetFile, ...]
    uids: str = BINARY

    def size_of(self, group_uid: bytes) -> int:
        """Return the size of a group in its own run. Raises FormatError if it is not told."""
        size = self.groups.get(group_uid.hex())
        if size is None:
            raise FormatError(
                f"{DATASET_JSON} does not tell the size of group {group_uid.hex()}; export it again"
            )
        return size


def write_description(dataset: Dataset, storage: Storage) -> None:
    """Write the dataset's README and, last, the file by which it counts as whole."""
    facts = {
        "where": dataset.where or "none, all of it",
        "here": storage.locate("").rstrip("/"),
        "uid_form": UIDS[dataset.uids],
    }
    storage.write("README.md", README.format(**{**dataclasses.asdict(dataset), **facts}).encode())
    storage.write(DATASET_JSON, json.dumps(dataclasses.asdict(dataset), indent=1).encode())


def open_dataset(location: str) -> tuple[Storage, Dataset]:
    """Return where the files of a dataset are on this machine, and what its dataset.json says.

    That of a URI is fetched to this user's cache, once. Raises FormatError for a dataset that no
    run can take in, DigestError if a file was changed.
    """
    here = in_limited_process(_local_copy, location, at_most_bytes=allowed_bytes())
    storage = open_storage(here)
    return storage, read_dataset(storage)


def _local_copy(location: str) -> str:
    """Return the directory of a dataset: `location`, or a copy of what is at that URI."""
    storage = open_storage(location)
    if isinstance(storage, LocalStorage):
        return location
    dataset = read_dataset(storage)
    content = json.dumps(dataclasses.asdict(dataset), indent=1).encode()
    copy = own_cache("datasets", file_digest(content))
    held = LocalStorage(copy)
    if held.exists(DATASET_JSON):
        return str(copy)
    for part in dataset.parts:
        path = copy / part.path
        data = storage.read(part.path, at_most=part.n_bytes)
        _check_unchanged(part, data, name=storage.locate(part.path))
        make_directory(path.parent, beneath=copy)
        write_atomically(path, data, mode=READ_ONLY, beneath=copy)
    write_atomically(copy / DATASET_JSON, content, mode=READ_ONLY, beneath=copy)
    return str(copy)


def read_dataset(storage: Storage) -> Dataset:
    """Read dataset.json. Raises FormatError for a dataset that no run can take in."""
    name = storage.locate(DATASET_JSON)
    try:
        data = storage.read(DATASET_JSON, at_most=MAX_DATASET_JSON_BYTES).to_pybytes()
    except StoreError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise FormatError(
            f"{name} is not there: no dataset, or one that was not written to its end; "
            "export it again"
        ) from error
    try:
        content: dict[str, Any] = json_values.parse_object(data)
        check_format(content, name=name)
        groups = json_values.objects(content, "groups")
        parts = tuple(
            DatasetFile(
                path=json_values.text(part, "path"),
                digest=json_values.text(part, "digest"),
                n_bytes=json_values.integer(part, "n_bytes"),
                n_steps=json_values.integer(part, "n_steps"),
            )
            for part in json_values.entries(content, "parts")
        )
        _check_distinct(parts)
        checked = {
            "run_id": checked_run_id(json_values.text(content, "run_id")),
            "groups": {uid: _size(groups, uid) for uid in groups},
            "parts": parts,
        }
        dataset = Dataset(**{**content, **checked})
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{name} is damaged ({error!r}); export it again") from error
    if dataset.uids != BINARY:
        raise FormatError(
            f"{name}: its uids are text, for other programs; "
            "export it again without --text-uids to use it in a run"
        )
    return dataset


def _check_distinct(parts: Sequence[DatasetFile]) -> None:
    """Raise ValueError for a file that is named twice, or lies in very many folders.

    A few megabytes of JSON may name one file so often that reading it again and again takes days.
    The digest of each file is compared with its content, so equal digests are equal files.
    """
    seen: set[str] = set()
    for part in parts:
        if part.path.count("/") > MAX_FOLDERS:
            raise ValueError(f"{part.path:.80} is a part in more than {MAX_FOLDERS} folders")
        if part.digest in seen:
            raise ValueError(f"{part.path:.80} is a part that it names twice")
        seen.add(part.digest)


def _size(groups: Mapping[str, Any], uid: str) -> int:
    """Return the size of a group. Raises ValueError for one that no run has."""
    size = json_values.integer(groups, uid)
    if not 1 <= size <= MAX_GROUP_SIZE:
        raise ValueError(f"group {uid:.40} has {size:.3g} members")
    return size


def part_tables(storage: Storage, dataset: Dataset) -> Iterator[tuple[str, pa.Table]]:
    """Yield the name and the rows of each file of a dataset.

    Raises DigestError if a file was changed, FormatError if no run wrote it.
    """
    for part in dataset.parts:
        name, data = storage.locate(part.path), storage.read(part.path)
        _check_unchanged(part, data, name=name)
        yield name, decode(data, path=name)


def _check_unchanged(part: DatasetFile, data: pa.Buffer, *, name: str) -> None:
    if file_digest(data) != part.digest:
        raise DigestError(
            f"{name} is not the file that was exported; copy it again, or export again"
        )

"""Read and describe a dataset directory, which `gigpo export` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from store.errors import DigestError, FormatError
from store.hashing import file_digest
from store.layout import check_format
from store.records import uid_text
from store.storage import Storage
from store.untrusted import json_values

DATASET_JSON = "dataset.json"
BINARY, TEXT = "binary", "text"
UID_COLUMNS = ("traj_uid", "group_uid", "state_hash")
UIDS = {BINARY: "16 bytes each", TEXT: "text, as in SQL"}
README = """# {n_trajectories} trajectories, {n_steps} steps

From run {run_id} at lsn {lsn}; condition: {where}.
One row per step, whole trajectories only; `dataset.json` has the details.
`traj_uid`, `group_uid` and `state_hash` are {uid_form}. Load it with any of

    pandas.read_parquet("{here}/data")
    polars.scan_parquet("{here}/data/*.parquet")
    datasets.load_dataset("parquet", data_dir="{here}/data")["train"].select_columns(
        ["response_ids"]
    ).with_format("torch")
    duckdb.sql("SELECT * FROM '{here}/data/*.parquet'")

or take it into another run: `gigpo import RUN {here}`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
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
    parts: tuple[Part, ...]
    uids: str = BINARY


def read_dataset(storage: Storage) -> Dataset:
    """Read dataset.json. Raises FormatError for a dataset that no run can take in."""
    name = storage.locate(DATASET_JSON)
    if not storage.exists(DATASET_JSON):
        raise FormatError(
            f"{name} is not there: no dataset, or one that was not written to its end; export it "
            "again"
        )
    try:
        content: dict[str, Any] = json_values.parse_object(storage.read(DATASET_JSON).to_pybytes())
        check_format(content, name=name)
        parts = json_values.entries(content, "parts")
        groups = json_values.objects(content, "groups")
        dataset = Dataset(
            **{
                **content,
                "parts": tuple(
                    Part(
                        path=json_values.text(part, "path"),
                        digest=json_values.text(part, "digest"),
                        n_bytes=json_values.whole(part, "n_bytes"),
                        n_steps=json_values.whole(part, "n_steps"),
                    )
                    for part in parts
                ),
                "run_id": json_values.text(content, "run_id"),
                "groups": {uid: json_values.whole(groups, uid) for uid in groups},
            }
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{name} is damaged ({error!r}); export it again") from error
    if dataset.uids != BINARY:
        raise FormatError(
            f"{name}: its uids are text, for other programs; export it again without --text-uids "
            "to use it in a run"
        )
    return dataset


def read_part(storage: Storage, part: Part) -> pa.Buffer:
    """Return the bytes of one file of a dataset. Raises DigestError if it was changed."""
    data = storage.read(part.path)
    if file_digest(data) != part.digest:
        raise DigestError(
            f"{storage.locate(part.path)} is not the file that was exported; copy it again, or "
            "export again"
        )
    return data


def with_text_uids(table: pa.Table) -> pa.Table:
    """Return the table with its uids as the SQL views show them."""
    for name in UID_COLUMNS:
        coded = table[name].combine_chunks().dictionary_encode()
        texts = pa.array([uid_text(uid) for uid in coded.dictionary.to_pylist()], pa.string())
        column = texts.take(coded.indices)
        table = table.set_column(table.schema.get_field_index(name), name, column)
    return table

"""Write a dataset as a stranger may: whatever rows, under whatever run id."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from store import FORMAT
from store.hashing import file_digest
from store.segments import encode


def write_dataset(dest: Path, table: pa.Table, *, run_id: str, size: int) -> Path:
    """Write the rows, all of groups of this size, as `gigpo export` does. Return `dest`."""
    data = encode(table, metadata={"run_id": run_id, "worker": "export", "epoch": "0"})
    (dest / "data").mkdir(parents=True)
    (dest / "data/part-00000.parquet").write_bytes(memoryview(data))
    part = {
        "path": "data/part-00000.parquet",
        "digest": file_digest(data),
        "n_bytes": len(data),
        "n_steps": table.num_rows,
    }
    content = {
        "format": FORMAT,
        "run_id": run_id,
        "lsn": 1,
        "where": None,
        "created_us": 1,
        "n_trajectories": len(set(table["traj_uid"].to_pylist())),
        "n_steps": table.num_rows,
        "groups": {group_uid.hex(): size for group_uid in set(table["group_uid"].to_pylist())},
        "uids": "binary",
        "parts": [part],
    }
    (dest / "dataset.json").write_text(json.dumps(content))
    return dest

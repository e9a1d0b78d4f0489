"""Write a dataset as a stranger may: whatever rows, under whatever run id."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from store import FORMAT
from store.hashing import file_digest
from store.segment_encoding import encode


def write_dataset(dest: Path, *tables: pa.Table, run_id: str, size: int) -> Path:
    """Write the rows, all of groups of this size, as `gigpo export` does: a file for each table.

    Return `dest`.
    """
    (dest / "data").mkdir(parents=True)
    parts = []
    for number, table in enumerate(tables):
        data = encode(table, metadata={"run_id": run_id, "worker": "export", "epoch": "0"})
        path = f"data/part-{number:05d}.parquet"
        (dest / path).write_bytes(memoryview(data))
        digest = file_digest(data)
        part = {"path": path, "digest": digest, "n_bytes": len(data), "n_steps": table.num_rows}
        parts.append(part)
    rows = pa.concat_tables(tables)
    content = {
        "format": FORMAT,
        "run_id": run_id,
        "lsn": 1,
        "where": None,
        "created_us": 1,
        "n_trajectories": len(set(rows["traj_uid"].to_pylist())),
        "n_steps": rows.num_rows,
        "groups": {
            group_uid.hex(): size for group_uid in set(rows["group_uid"].to_pylist()) - {None}
        },
        "uids": "binary",
        "parts": parts,
    }
    (dest / "dataset.json").write_text(json.dumps(content))
    return dest

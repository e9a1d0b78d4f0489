"""Which stored steps are trained on: `offline.train_on`, an SQL condition over a step's columns and
its advantage.

check_train_on("won AND advantage > 0")        # ConfigError for what is no condition on these
columns mask = trained_on(rows, "won")                 # rows with advantages; live ones are always
trained on
"""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from configs import ConfigError
from store import SEGMENT_SCHEMA

IMPORTED = "imported"  # the `split` of a stored row
ADVANTAGE_TYPES = {
    "step_return": pa.float64(),
    "episode_advantage": pa.float64(),
    "step_advantage": pa.float64(),
    "advantage": pa.float64(),
    "anchor_size": pa.int64(),
}


def check_train_on(condition: str) -> None:
    """Raises ConfigError unless the condition can be asked; empty, it is none."""
    schema = pa.schema(
        [*SEGMENT_SCHEMA, *(pa.field(name, kind) for name, kind in ADVANTAGE_TYPES.items())]
    )
    if condition:
        trained_on(schema.empty_table(), condition)


def trained_on(rows: pa.Table, condition: str) -> pa.ChunkedArray:
    """Booleans, one a row: live, or stored and the condition holds. Reads `split` and the columns
    of the condition.

    Raises ConfigError for what is no condition, or none on the values of these rows, as
    `task_id::INT > 3`.
    """
    live = pc.not_equal(rows["split"], IMPORTED)
    try:
        # without our parentheses it closes none of them
        duckdb.extract_statements(f"SELECT 1 WHERE {condition}")
        with duckdb.connect(
            config={"enable_external_access": False, "lock_configuration": True}
        ) as connection:
            connection.register(
                "steps", rows.append_column("row_of_batch", pa.array(range(len(rows)), pa.int64()))
            )
            held = connection.sql(
                f"SELECT row_of_batch FROM steps WHERE (\n{condition}\n)"
            ).to_arrow_table()["row_of_batch"]
    except duckdb.Error as error:
        raise ConfigError(
            f"offline.train_on={condition!r} cannot be asked of these steps "
            f"({' '.join(str(error).split())}); write it as after "
            "WHERE, over a step's columns and its advantages. A run that has begun goes on with "
            "another one"
        ) from error
    return pc.or_(
        live, pc.is_in(pa.array(range(len(rows)), pa.int64()), value_set=held.combine_chunks())
    )

"""python -m store sql RUN "SELECT ..." [--format table|csv|json] [--limit N]"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import sys
from decimal import Decimal
from pathlib import Path

import duckdb

from store.errors import StoreError
from store.reading.query import run_sql

DEFAULT_ROWS = 100  # shown of a table; csv and json give all


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m store", description="Asks a run, also while it is training.")
    commands = parser.add_subparsers(dest="command", required=True)
    sql = commands.add_parser("sql", help="one SELECT over steps, trajectories, groups, anchor_groups, lineage, metrics, ...")
    sql.add_argument("run", type=Path, help="a run directory")
    sql.add_argument("query", help="one SELECT")
    sql.add_argument("--format", choices=("table", "csv", "json"), default="table")
    sql.add_argument("--limit", type=whole, default=DEFAULT_ROWS, help=f"rows of a table (default {DEFAULT_ROWS})")
    options = parser.parse_args(arguments)
    try:
        show(run_sql(options.run, options.query), form=options.format, limit=options.limit)
    except BrokenPipeError:  # `| head`: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (StoreError, duckdb.Error) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def show(relation: duckdb.DuckDBPyRelation, *, form: str, limit: int) -> None:
    if form == "table":
        relation.show(max_rows=limit, max_width=terminal_width())
    elif form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(relation.columns)
        writer.writerows(relation.fetchall())
    else:
        for row in relation.fetchall():
            print(json.dumps(dict(zip(relation.columns, map(jsonable, row), strict=True)), ensure_ascii=False))


def jsonable(value: object) -> object:
    """As JSON has it: no NaN, whole numbers of any size as numbers, what it has no type for as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | None) else str(value)


def whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def terminal_width() -> int:
    """As wide as the terminal; wide enough to be read by a program where there is none."""
    return os.get_terminal_size().columns if sys.stdout.isatty() else 250


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

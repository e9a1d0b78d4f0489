"""python -m store fetch URI DIR: a readable copy of a run whose segments are in an object store."""

from __future__ import annotations

import argparse
from pathlib import Path

from printable import printable

DESCRIPTION = """Copies what readers see of a run, from its store.uri, into a directory on which DuckDB's open.sql, the Python
reader and `python -m store sql` work. Called again it catches up with the run. Credentials come from the environment."""


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "fetch", help="a readable copy of a run in an object store", description=DESCRIPTION
    )
    parser.add_argument(
        "uri",
        metavar="URI",
        help="the store.uri of the run, such as s3://bucket/run?region=eu-central-1",
    )
    parser.add_argument(
        "dest", type=Path, metavar="DIR", help="a new directory, or an earlier copy of the run"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from store.reading.manifest import read_manifest
    from store.reading.mirror import fetch

    layout = fetch(options.uri, options.dest)
    manifest = read_manifest(layout)
    assert manifest is not None, "fetch writes it last"
    n_segments = len(manifest.segments) - 1
    print(
        printable(
            f"run {layout.info.run_id} as of lsn {manifest.lsn}: {n_segments} segments in "
            f"{layout.root}"
        )
    )
    return 0

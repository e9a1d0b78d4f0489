"""python -m store rebuild RUN: a new run.json and a new catalog from what else is there of the
run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from printable import printable

DESCRIPTION = """Makes a new catalog when catalog.sqlite is lost or unreadable: trajectories and groups from the segment files,
everything else from the tables exported every second, or every minute at the least. Says what was recovered and what could not
be. The old catalog and files that cannot be used are moved to quarantine/, nothing is deleted.

A run.json that is lost or damaged is made anew first, from the catalog, the manifest, the segments and config.yaml."""


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "rebuild",
        help="make a lost catalog or run.json anew",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--force", action="store_true", help="also where the catalog can be read")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from store.errors import StoreError  # the others bring Arrow
    from store.layout import RunLayout
    from store.maintenance.fsck import CATALOG, FATAL, check
    from store.maintenance.rebuild import rebuild
    from store.maintenance.run_json import is_lost, rebuild_run_json

    lines = rebuild_run_json(options.run_dir) if is_lost(options.run_dir) else []
    for line in lines:
        print(printable(f"recovered  {line}"))
    layout = RunLayout.open(options.run_dir)
    if not options.force and not FATAL.intersection(
        finding.what for finding in check(layout, level=CATALOG)
    ):
        if lines:  # only run.json was lost
            return 0
        raise StoreError(
            f"{layout.catalog} can be read; a rebuild would lose what is not exported (--force "
            "does it anyway)"
        )
    report = rebuild(layout)
    for line in report.recovered:
        print(printable(f"recovered  {line}"))
    for line in report.lost:
        print(printable(f"lost       {line}"))
    return 0

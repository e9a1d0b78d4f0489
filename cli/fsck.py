"""python -m store fsck RUN: whether a run is whole; with --repair, what is not is set aside and
played again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from printable import printable

if TYPE_CHECKING:
    from store.maintenance.finding import Finding

CLEAN, FINDINGS = 0, 1
DESCRIPTION = """Checks a run, also while a job works on it: the catalog against itself, every file against the catalog, every
row against its page's checksum, its trajectory and its state hash. Exit status: 0 whole (leftovers are warnings), 1 errors
found, 2 it could not be checked.

--repair needs the run for itself. Damaged files are moved to quarantine/, never deleted. Groups that lose trajectories and are
still to be trained on are played again; what was trained on stays in the lineage."""


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "fsck",
        help="check a run, or repair it",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the catalog and the files' sizes only, not what is in them",
    )
    parser.add_argument("--repair", action="store_true", help="mend what can be mended")
    parser.add_argument(
        "--format", choices=("table", "json"), default="table", help="json: one object a line"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from store.catalog.catalog import Catalog  # and with it Arrow
    from store.layout import RunLayout
    from store.maintenance.fsck import CONTENTS, NAMES, check
    from store.maintenance.repair import REPAIRED_WARNINGS, repair
    from store.reading import open_sql

    layout = RunLayout.open(options.run_dir)
    level = NAMES if options.quick else CONTENTS
    findings = check(layout, level=level)
    if options.repair and open_sql.move(layout):
        line = f"open.sql names {layout.root}, where the run is now"
        print(
            json.dumps({"repaired": line})
            if options.format == "json"
            else printable(f"repaired  {line}")
        )
    if options.repair and any(
        finding.severity == "error" or finding.what in REPAIRED_WARNINGS for finding in findings
    ):
        _show(findings, form=options.format)
        # its remedy says: rebuild
        if any(finding.what.startswith("catalog") for finding in findings):
            return FINDINGS
        with Catalog.open(layout) as catalog:
            for line in repair(catalog, layout, check(layout, level=level)):
                print(
                    json.dumps({"repaired": line})
                    if options.format == "json"
                    else printable(f"repaired  {line}")
                )
        findings = check(layout, level=level)
    _show(findings, form=options.format)
    n = sum(finding.severity == "error" for finding in findings)
    if options.format == "table":
        print(
            printable(
                f"{layout.root}: {f'{n} errors' if n else 'whole'}, {len(findings) - n} warnings"
            )
        )
    return FINDINGS if n else CLEAN


def _show(findings: Sequence[Finding], *, form: str) -> None:
    for finding in findings:
        if form == "json":
            print(json.dumps(dataclasses.asdict(finding)))
        else:
            line = f"{finding.severity:<9} {finding.what}: {finding.subject}: {finding.detail}; {finding.remedy}"
            print(printable(line))

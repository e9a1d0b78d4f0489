"""python -m store compact RUN: merges small files, drops old trajectories if asked, and removes
what nobody needs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.store_arguments import days_above_zero, seconds, whole
from printable import printable

DEFAULT_WINDOW_S = 900.0
DESCRIPTION = """Does for a run that nobody is writing what a running one does by itself.

Files that were replaced stay for the snapshot window, for shells and readers that were told of them; call it again later, or
give --snapshot-window 0 where nobody reads. A run of an older format is upgraded."""


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compact",
        help="merge small files, drop old trajectories if asked, remove what nobody needs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--keep-days",
        type=days_above_zero,
        metavar="D",
        help="drop what was consumed and is older (default: keep all)",
    )
    parser.add_argument(
        "--keep-versions",
        type=whole(at_least=1),
        metavar="N",
        help="drop what was consumed and is of none of the newest N policy versions (default: keep all)",
    )
    parser.add_argument(
        "--snapshot-window",
        type=seconds,
        metavar="S",
        default=DEFAULT_WINDOW_S,
        help="seconds that replaced files are kept (default: %(default)g)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from store.catalog.catalog import Catalog  # and with it Arrow
    from store.clock import now_us
    from store.layout import RunLayout
    from store.maintenance.compact import COMPACTION_POLICY, merges
    from store.maintenance.retention import expire_old
    from store.maintenance.sweep import sweep_orphans, sweep_retired
    from store.reading.manifest import export

    layout = RunLayout.open(options.run_dir)
    with Catalog.open(layout) as catalog:
        opened_us, before = now_us(), catalog.live_segments()
        expired = expire_old(
            catalog, layout, keep_days=options.keep_days, keep_versions=options.keep_versions
        )
        left_out = {
            segment_id
            for result in merges(catalog, layout, policy=COMPACTION_POLICY, skip=())
            for segment_id in result.left_out
        }
        export(catalog, layout)  # only what the manifest no longer shows may be removed
        removed = sweep_retired(catalog, layout, window_s=options.snapshot_window)
        foreign = sweep_orphans(catalog, layout, opened_us=opened_us, named=())
        export(catalog, layout)
        after = catalog.live_segments()
    n_bytes = [sum(file.n_bytes for file in files) for files in (before, after)]
    print(printable(f"live files    {len(before)} -> {len(after)}"))
    print(printable(f"live bytes    {n_bytes[0]:,} -> {n_bytes[1]:,}"))
    print(printable(f"expired files {len(expired)}"))
    print(printable(f"removed files {len(removed)}"))
    for text, paths in (
        ("left out: damaged (see the events view), or too large", sorted(left_out)),
        ("not ours, left alone", foreign),
    ):
        for path in paths:
            print(printable(f"{text}: {path}"))
    return 0

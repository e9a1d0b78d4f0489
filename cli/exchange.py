"""python -m store export RUN DIR [--where SQL] [--groups] [--as-of LSN], and python -m store import
RUN DIR
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cli.store_arguments import whole
from printable import printable

EXPORT = """Writes whole trajectories as plain Parquet files that any tool reads, with their digests in dataset.json.

The condition is SQL on the columns of the view `trajectories`, and of `groups` where the names differ:

    --where "won AND n_steps < 20"
    --where "state = 'trained' AND version_min >= 10"
    --where "group_uid IN (SELECT group_uid FROM lineage WHERE learner_step BETWEEN 5 AND 9)"

With --groups whole groups are written: all trajectories of each group in which the condition holds for one. Only whole groups
can be trained on (cli/train.py CONFIG source=DIR).

DIR is a new directory, or a URI such as s3://bucket/name?region=eu-central-1."""
IMPORT = """Takes a directory that `export` wrote into a run that nobody is writing. SQL sees its trajectories, under their own
uids; they are never played, trained on or counted as outstanding. What the run has already stays as it is."""


def add(commands: argparse._SubParsersAction) -> None:
    form = argparse.RawDescriptionHelpFormatter
    exporter = commands.add_parser(
        "export", help="some trajectories as a dataset", description=EXPORT, formatter_class=form
    )
    exporter.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    exporter.add_argument("dest", metavar="DIR", help="a new directory, or a URI")
    exporter.add_argument("--where", metavar="SQL", help="which trajectories (default: all)")
    exporter.add_argument(
        "--groups",
        action="store_true",
        help="whole groups, in which the condition holds for a trajectory",
    )
    exporter.add_argument(
        "--text-uids",
        action="store_true",
        help="uids as text, as in SQL; no run takes such a dataset in",
    )
    exporter.add_argument(
        "--as-of", type=whole(at_least=0), metavar="LSN", help="as the run was then (default: now)"
    )
    exporter.set_defaults(run=run_export)
    importer = commands.add_parser(
        "import", help="such a dataset into a run", description=IMPORT, formatter_class=form
    )
    importer.add_argument("run_dir", type=Path, metavar="RUN", help="a run directory")
    importer.add_argument("source", metavar="DIR", help="what `export` wrote")
    importer.set_defaults(run=run_import)


def run_export(options: argparse.Namespace) -> int:
    import pyarrow as pa

    from store.errors import FormatError
    from store.exchange.datasets import export_selection

    try:
        dataset = export_selection(
            options.run_dir,
            options.dest,
            where=options.where,
            as_of=options.as_of,
            whole_groups=options.groups,
            text_uids=options.text_uids,
        )
    # values of views that the store does not make
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise FormatError(
            f"the views of {options.run_dir} hold what no run has ({error}); python -m store fsck "
            f"--repair {options.run_dir}"
        ) from error
    n_bytes = sum(part.n_bytes for part in dataset.parts)
    line = (
        f"{dataset.n_trajectories:,} trajectories of {len(dataset.groups):,} groups, "
        f"{dataset.n_steps:,} steps: "
        f"{len(dataset.parts)} files, {n_bytes:,} bytes in {options.dest}"
    )
    print(printable(line))
    n_missing = sum(dataset.groups.values()) - dataset.n_trajectories
    if n_missing:
        why = "they were never played" if options.groups else "--groups exports whole groups"
        line = f"{n_missing:,} more trajectories of these groups are not in it, and only whole groups can be trained on; {why}"
        print(printable(line))
    return 0


def run_import(options: argparse.Namespace) -> int:
    from store.exchange.datasets import import_selection

    report = import_selection(options.run_dir, options.source)
    print(
        printable(
            f"{report.n_trajectories:,} trajectories, {report.n_steps:,} steps are new; "
            f"{report.n_known:,} were known"
        )
    )
    return 0

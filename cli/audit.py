"""gigpo audit: the advantages of a stored run under other settings."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import Command, run_argument, settings_argument
from cli.output_file import check_new_file, write_new_file
from printable import plain_console, say

# Groups that the run played, and groups that it took from other runs.
TRAINING = "split = 'train' OR group_uid IN (SELECT group_uid FROM groups WHERE source IS NOT NULL)"
OWN_SETTINGS = ""
EPILOG = """\b
Examples:
  gigpo audit runs/a                                  the run's own settings
  gigpo audit runs/a estimator=rloo                   another estimator
  gigpo audit runs/a omega=0 --against                another setting beside the run's own
  gigpo audit runs/a gamma=0.9 --against gamma=1.0    two settings side by side
  gigpo audit runs/a group_filter=returns --against --plot what.svg
  gigpo audit runs/a --where "split = 'train'" --output rows.parquet
"""


@click.command(cls=Command, epilog=EPILOG)
@run_argument
@settings_argument
@click.option(
    "--against",
    multiple=True,
    is_flag=False,
    flag_value=OWN_SETTINGS,
    metavar="[KEY=VALUE]",
    help="Compare with this setting (repeat it for more), or alone with the run's own.",
)
@click.option(
    "--where",
    default=TRAINING,
    metavar="SQL",
    show_default=True,
    help="Report only steps for which this condition on the columns of `steps` holds.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the rows to a Parquet file.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.svg",
    help="Draw which steps are trained differently, by learner step.",
)
def audit(
    *,
    run: Path,
    settings: tuple[str, ...],
    against: tuple[str, ...],
    where: str,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Compute the advantages of a stored run under other settings.

    Nothing is trained. Settings are those of `algorithm`; one that is not named is the run's own.
    The run may be training meanwhile.

    Advantages are computed from whole groups, or from whole batches where an estimator whitens over
    a batch; --where only selects what is reported. Groups that were in no batch are whitened
    together, each split separately. An offline group that was used several times counts once, at
    its last learner step, or once a batch where something is whitened.
    """
    import pyarrow.parquet as pq

    import store
    from analysis import (
        audit_rows,
        changed_setting,
        describe_settings,
        plot_settings,
        run_setting,
        show_audit,
    )

    own = run_setting(run)
    named = {"a": changed_setting(own, settings)}
    if against:
        named["b"] = changed_setting(own, [text for text in against if text != OWN_SETTINGS])
    check_new_file("--output", output, run=run)
    check_new_file("--plot", plot, run=run)
    if plot is not None:
        _check_plot(plot, is_compared=bool(against))
    with store.open_run(run) as reader:
        rows = audit_rows(reader, named, where=where)
        show_audit(reader, rows, named=named, console=plain_console(soft_wrap=False))
    if output is not None:
        write_new_file(
            "--output",
            output,
            write=lambda file: pq.write_table(rows, file, compression="zstd"),
            run=run,
        )
        say(f"{len(rows)} rows in {output}")
    if plot is not None:
        drawing = plot_settings(rows, describe_settings(named))
        write_new_file("--plot", plot, write=lambda file: file.write(drawing.encode()), run=run)
        say(f"a plot in {plot}")


def _check_plot(file: Path, *, is_compared: bool) -> None:
    if file.suffix != ".svg":
        svg = file.with_suffix(".svg").name
        raise click.UsageError(f"--plot {file}: only SVG can be drawn; name it {svg}")
    if not is_compared:
        raise click.UsageError(
            f"--plot {file} shows two settings; add --against, alone for the run's own"
        )

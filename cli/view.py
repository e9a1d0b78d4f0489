"""gigpo view: look at runs in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import Command, RunPath, WholeNumber, as_of_option

LAST_PORT = 65_535  # of TCP
EPILOG = """\b
Examples:
  gigpo view runs/a
  gigpo view runs/a runs/b --port 8800 --no-browser
\b
On another machine: ssh -L 8800:127.0.0.1:8800 THAT_MACHINE, then open http://127.0.0.1:8800/
"""


@click.command(cls=Command, epilog=EPILOG)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath(path_type=Path))
@click.option(
    "--port",
    type=WholeNumber(at_least=0, at_most=LAST_PORT),
    default=0,
    help="Listen on this port of the loopback.  [default: a free one]",
)
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@as_of_option
def view(*, runs: tuple[Path, ...], port: int, no_browser: bool, as_of: int | None) -> None:
    """Look at runs in a browser, also while they train. Ctrl-C ends it.

    The pages are served to this machine only, load nothing from elsewhere, and change nothing in
    the runs. Every panel shows its query. A link with a log number shows the same rows again.
    """
    from analysis import serve_view

    serve_view(runs, port=port, opens_browser=not no_browser, as_of=as_of)

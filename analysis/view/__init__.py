"""Show a run in a browser: `gigpo view RUN`. Pages are read in this order:

pages/              one module a page: the queries, and how each is shown; PAGES lists them all
page.py             Page, and PageRequest: an address's parameters and its snapshot
panel.py            Panel: one query with a title and an explanation, and its way to HTML
charts.py           lines, bars and steps with one look
shades.py           colours of advantages
graph_layout.py     places of a graph's nodes and edges
token_texts.py      texts of token ids, from the run's own tokenizer
png.py              images of steps as PNG
heldout_rounds.py   evaluations of held-out tasks, with intervals
timeline_trace.py   the timeline as a trace for other programs
group_query.py      one group's steps without scanning the others
downloads.py        an answer as a file: CSV or Arrow
sql_text.py         values placed into a query, so that the query that is shown can be run as it is
text.py             texts of a run made visible, cut, and safe in HTML
nested_text.py      lists and records as text, no longer than what is shown
html.py             the templates and their filters
snapshots.py        readers by (run, lsn), and their answers
kept_answers.py     answers of queries, in a bounded part of the memory
memory.py           the reserve of memory that no query may take
report_file.py      several panels as one HTML file that needs no server: `gigpo report`
report_summary.py   its sentences: did it learn, is it stable, what limits it
run_settings.py     a run's settings, and those that differ from others
connections.py      how many clients the server has, and its threads
guard.py            whom the server answers, and for how long an answer is kept
server.py           the application: routes, and the answers of pages

To add a page: write pages/NAME.py with a `PAGE`, add it to PAGES in pages/__init__.py. Panels need
no server: `render_panel(panel, ask)` gives the HTML of one, where `ask` answers a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def serve_view(runs: Sequence[Path], *, port: int, opens_browser: bool, as_of: int | None) -> None:
    """Serve the runs on this machine until Ctrl-C. Raises StoreError if one cannot be read."""
    from analysis.view.server import serve

    serve(runs, port=port, opens_browser=opens_browser, as_of=as_of)


def write_report_file(
    run: Path,
    *,
    output: Path | None = None,
    as_of: int | None = None,
    overwrites: bool = False,
) -> Path:
    """Write what the run showed into one HTML file, by default RUN/report.html. Return its path.

    A file that is no report is replaced only if `overwrites`. Raises StoreError.
    """
    from analysis.view.report_file import write

    return write(run, output=output, as_of=as_of, overwrites=overwrites)

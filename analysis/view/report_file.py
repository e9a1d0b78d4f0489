"""Write what a run showed into one HTML file that needs no network and no server: `gigpo report`.

The file holds the panels, their queries, and Bokeh's script, which draws the charts. Its policy
lets a browser run these scripts only and load nothing. At the end of a training the driver writes
it to RUN/report.html.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from markupsafe import Markup

from analysis.view.charts import intervals, lines
from analysis.view.heldout_rounds import ROUNDS, round_columns
from analysis.view.html import BOKEH_SCRIPT, STATIC, html
from analysis.view.page import PageRequest
from analysis.view.pages import run as run_page
from analysis.view.pages.anchor import HINTS, wrong_states
from analysis.view.pages.funnel import FUNNEL, REASONS, UNFINISHED
from analysis.view.pages.lineage import with_presence
from analysis.view.panel import (
    Ask,
    Chart,
    Panel,
    as_table,
    render_panel,
    show_rows,
)
from analysis.view.report_summary import SUMMARY, show_summary
from analysis.view.run_settings import default_settings, differing, settings_of
from analysis.view.sql_text import Tables, fill
from analysis.view.text import plain
from printable import shell_word
from store import (
    READ_WRITE,
    REPORT_FILE,
    Reader,
    RunLayout,
    StoreError,
    check_own_run,
    open_file,
    open_run,
    opened_by_own_links,
    write_atomically_in,
)

MAX_BYTES = 5_000_000  # of a report
MAX_PANEL_BYTES = 120_000  # of the HTML of a panel; 1.3 MB are Bokeh's script
GENERATOR = "gigpo report"
MARK = f'<meta name="generator" content="{GENERATOR}">'
MARK_WITHIN_BYTES = 4096  # of the begin of the file
MAX_ROWS = 100_000  # of an answer
MAX_ANSWER_BYTES = 64 << 20  # of an answer
ALL_STEPS = 10**12  # learner steps
WRONG_STATES = 12  # rows of the table
CAUSE_CHARACTERS = 2_000  # of the detail of one event
NEWEST = 20  # rows of tables that grow with the run

METRIC = "SELECT learner_step, value FROM metrics WHERE name = $name ORDER BY learner_step"
STABILITY = {
    "loss/entropy": (
        "Entropy",
        "How open the policy's choice of tokens still is, in nats. Near 0 it explores nothing.",
    ),
    "loss/mismatch_kl": (
        "Mismatch",
        "How far the learner's probabilities are from those the tokens were sampled with, in "
        "nats (an estimate of the KL divergence).",
    ),
    "loss/ess": (
        "Effective sample size",
        "The share of sampled tokens that still counts after importance weights. 100 % is on "
        "policy.",
    ),
    "loss/grad_norm": ("Gradient norm", "Before clipping, mean over the updates of a step."),
}
FRACTIONS = ("loss/ess",)
# A long run gives up many groups for the same reason: one row for each kind, with the last cause.
INCIDENTS = f"""
WITH found AS ({run_page.HAPPENED})
SELECT component, what, count(*) AS times, min(logged_at) AS first_at, max(logged_at) AS last_at,
       arg_max(left(detail, $characters), logged_at) AS last_cause
FROM found GROUP BY ALL ORDER BY last_at DESC LIMIT $rows
"""
CHECKPOINTS = """
SELECT learner_step, version, saved_at, path FROM checkpoints WHERE live
ORDER BY learner_step DESC LIMIT $rows
"""
VERSIONS = """
SELECT version, learner_step, published_at, left(digest, 16) AS digest_begin
FROM versions ORDER BY version DESC LIMIT $rows
"""
IDENTITY = """
SELECT (SELECT max(entered_at) FROM ledger) AS changed_at,
       (SELECT max(learner_step) FROM checkpoints WHERE live) AS checkpoint
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Some panels under one heading."""

    title: str
    panels: Sequence[Panel]


def write(run: Path, *, output: Path | None, as_of: int | None, overwrites: bool) -> Path:
    """Write the report of a run, by default to RUN/report.html, and return its path.

    An existing file is replaced if it is a report, or if `overwrites`. Raises StoreError.
    """
    path = (run / REPORT_FILE if output is None else output).absolute()
    _check_place(path, run=run.absolute(), overwrites=overwrites)
    with open_run(run, as_of=as_of, warn=False) as reader:
        text = compose(reader, name=str(run))
    if output is None:
        check_own_run(run, instead="write the report elsewhere: --output FILE")
    data = text.encode(errors="backslashreplace")
    # The queries took a while. No link of another user leads to what is replaced.
    with opened_by_own_links(path.parent) as (directory, _):
        _check_place(path, run=run.absolute(), overwrites=overwrites)
        write_atomically_in(directory, path.name, data, mode=READ_WRITE, path=path)
    return path


def compose(reader: Reader, *, name: str) -> str:
    """Return the text of the report. `name` is the run's path as it was given. Raises StoreError.

    A panel whose query fails shows the error.
    """

    def ask(query: str, n_rows: int | None = None, *, tables: Tables = ()) -> pa.Table:
        if n_rows is not None:
            return reader.first(query, n_rows=n_rows, tables=tables, times_as_text=True)[0]
        return reader.sql(
            query,
            max_rows=MAX_ROWS,
            max_bytes=MAX_ANSWER_BYTES,
            tables=tables,
            times_as_text=True,
        )

    lsn = reader.lsn
    assert lsn is not None, "an open reader shows some lsn"
    (identity,) = ask(IDENTITY).to_pylist()
    scripts = [BOKEH_SCRIPT.read_text("utf-8"), (STATIC / "report.js").read_text("utf-8")]
    assert all("</script" not in script and "\r" not in script for script in scripts)
    style = "".join((STATIC / each).read_text("utf-8") for each in ("view.css", "report.css"))
    shown = []
    for section in sections(name, reader.layout, lsn, ask):
        panels = [_bounded(panel, ask, run=name, lsn=lsn) for panel in section.panels]
        heading = {"title": section.title, "name": section.title.lower().replace(" ", "-")}
        shown.append({**heading, "panels": Markup("").join(panels)})
    text = html(
        "report.html",
        policy=_policy(scripts),
        generator=GENERATOR,
        style=Markup(style),
        bokeh=Markup(scripts[0]),
        script=Markup(scripts[1]),
        name=plain(Path(name).resolve().name, at_most=120),
        run_id=reader.layout.info.run_id[:8],
        lsn=lsn,
        changed_at=str(identity["changed_at"] or "")[:19],
        left_out=reader.left_out,
        sections=shown,
        commands=commands(name, lsn, checkpoint=identity["checkpoint"]),
    )
    assert len(text.encode(errors="backslashreplace")) <= MAX_BYTES
    return text


def sections(run: str, layout: RunLayout, lsn: int, ask: Ask) -> list[Section]:
    """Return the panels of the report, in order. `run` is the path as it was given."""
    asked = PageRequest(
        parameters={},
        run=run,
        run_number=0,
        runs=[run],
        lsn=lsn,
        is_live=False,
        is_foreign=False,
        ask=ask,
        ask_run=lambda number, query: ask(query),
        lsn_of=lambda number: lsn,
        layout_of=lambda number: layout,
        has_left=lambda: False,
    )
    key_figures = replace(run_page.figures(), title="Key figures")
    limits = run_page.limits("over all learner steps", n_steps=ALL_STEPS, version=0)
    stability = [*map(_metric, STABILITY), run_page.alarms()]
    return [
        Section(title="In short", panels=[_summary()]),
        Section(
            title="Learning",
            panels=[
                key_figures,
                run_page.success(),
                *run_page.by_environment(asked),
                _heldout(),
            ],
        ),
        Section(title="Stability", panels=stability),
        Section(title="Speed", panels=[limits, run_page.times(n_steps=ALL_STEPS)]),
        Section(title="Dropped", panels=_dropped()),
        Section(title="Incidents", panels=[_incidents()]),
        Section(title="Mistakes", panels=[_mistakes(asked)]),
        Section(title="Weights", panels=[_checkpoints(run), _versions()]),
        Section(title="Settings", panels=[_settings(layout)]),
    ]


def show_settings(layout: RunLayout) -> Markup:
    """Show the settings that are not at their defaults. Raises ConfigError, StoreError."""
    settings = settings_of(layout)
    # A run of an earlier version lacks some.
    known = {key: value for key, value in default_settings().items() if key in settings}
    found = differing(settings, known)
    if not found:
        return Markup('<p class="empty">All settings are at their defaults.</p>')
    names = ("setting", "value", "default")
    return as_table(pa.table(dict(zip(names, map(list, zip(*found, strict=True)), strict=True))))


def show_heldout(table: pa.Table) -> Chart:
    """Draw the success of each evaluation with its interval."""
    return intervals(
        pa.table(round_columns(table.to_pylist())),
        x="version",
        y="success",
        names={"version": "policy version", "success": "held-out success"},
        height=260,
    )


def commands(run: str, lsn: int, *, checkpoint: int | None) -> list[tuple[str, str]]:
    """Return (what for, command) pairs that repeat the run and look further."""
    word, file = shell_word(run), shell_word(f"{run}/config.yaml")
    fork = "STEP" if checkpoint is None else checkpoint
    again = shell_word(f"run_dir={run}-again")
    return [
        ("train it again from the begin", f"gigpo train {file} {again}"),
        ("go on with it", f"gigpo train --resume {word} learner.steps=STEPS"),
        (
            "train another way from its newest checkpoint",
            f"gigpo train --fork {shell_word(f'{run}@{fork}')} {again} KEY=VALUE",
        ),
        ("look at every group, state and episode", f"gigpo view {word}"),
        ("see this moment again", f"gigpo view {word} --as-of {lsn}"),
        ("make this report again", f"gigpo report {word} --as-of {lsn}"),
        ("play the held-out tasks again", f"gigpo evaluate {word}"),
        ("are the dropped groups different?", f"gigpo bias {word} --as-of {lsn}"),
        ("what would another setting have trained?", f"gigpo audit {word} omega=0 --against"),
        ("is the run whole?", f"gigpo fsck {word}"),
    ]


def is_report(path: Path) -> bool:
    """Return whether a report of ours is there, which may be replaced."""
    try:
        with open(open_file(path, root=path.parent), "rb") as file:
            return MARK.encode() in file.read(MARK_WITHIN_BYTES)
    except OSError:
        return False


def _check_place(path: Path, *, run: Path, overwrites: bool) -> None:
    is_own = path == run / REPORT_FILE
    if not is_own and path.resolve().is_relative_to(run.resolve()):
        raise StoreError(
            f"{path} is inside the run, which belongs to its writers; write it elsewhere, or leave "
            f"out --output for {REPORT_FILE}"
        )
    if path.is_dir():
        raise StoreError(f"{path} is a directory; name a file")
    if not path.parent.is_dir():
        if is_own:
            return  # there is no run: its reader says so
        raise StoreError(f"{path}: there is no directory {path.parent}; make it first")
    if (path.exists() or path.is_symlink()) and not overwrites and not is_report(path):
        raise StoreError(
            f"{path} is there and is no report; name another file, or give --overwrite"
        )


def _bounded(panel: Panel, ask: Ask, *, run: str, lsn: int) -> Markup:
    """Return the panel's HTML, with fewer rows if it would be too long.

    A chart keeps every n-th row, a table the first ones.
    """
    render = partial(render_panel, run=run, lsn=lsn, template="report_panel.html")
    shown = render(panel, ask)
    kept = n_rows = None
    while len(shown.encode(errors="backslashreplace")) > MAX_PANEL_BYTES and kept != 0:
        if kept is None:
            kept = n_rows = ask(panel.query, tables=panel.tables).num_rows
        kept //= 2
        fewer = replace(
            panel, explains=f"{panel.explains} Too long to show all: {kept} of {n_rows} rows."
        )
        shown = render(fewer, partial(_thinned, ask, kept, is_chart='class="chart"' in shown))
    return shown


def _thinned(
    ask: Ask,
    kept: int,
    query: str,
    n_rows: int | None = None,
    *,
    tables: Tables = (),
    is_chart: bool,
) -> pa.Table:
    table = ask(query, n_rows, tables=tables)
    if not is_chart or not kept:
        return table.slice(0, kept)
    return table.take([at * table.num_rows // kept for at in range(min(kept, table.num_rows))])


def _summary() -> Panel:
    return Panel(
        title="What the run did",
        explains="Intervals are of 95 %. The figures below say how they came about.",
        query=SUMMARY,
        show=show_summary,
        width="full",
    )


def _dropped() -> list[Panel]:
    return [
        Panel(
            title="What became of the groups",
            explains="A group is several attempts at one task, and the unit of training.",
            query=FUNNEL,
            empty="No group was handed out.",
            width="full",
        ),
        Panel(
            title="Why groups were not trained on",
            explains="The recorded reasons, with numbers left out. Filtered groups teach nothing; "
            "stale ones were played by weights that are too old.",
            query=REASONS,
            empty="Every group was trained on, or still can be.",
        ),
        Panel(
            title="Attempts that gave no episode",
            explains="They were begun and not finished: why, and how far they got.",
            query=UNFINISHED,
            empty="Every attempt that was begun gave an episode.",
        ),
        replace(run_page.staleness(), width="full"),
    ]


def _incidents() -> Panel:
    return Panel(
        title="What went wrong",
        explains="What failed or was given up, how often, and the cause of the last time.",
        query=fill(INCIDENTS, rows=NEWEST, characters=CAUSE_CHARACTERS),
        empty="Nothing went wrong.",
        width="full",
    )


def _mistakes(asked: PageRequest) -> Panel:
    """Return the states in which the policy goes wrong, without links: there is no server."""
    show = partial(show_rows, links={}, hints=HINTS, hidden=("group_uid", "state_hash"))
    return replace(wrong_states(asked, rows=WRONG_STATES), show=show)


def _checkpoints(run: str) -> Panel:
    return Panel(
        title="Checkpoints",
        explains=f"The newest {NEWEST} that were saved. A run goes on, or is forked, from one that "
        "is on disk.",
        query=fill(CHECKPOINTS, rows=NEWEST),
        combine=partial(with_presence, run),
        empty="No checkpoint was saved.",
    )


def _versions() -> Panel:
    return Panel(
        title="Versions",
        explains=f"The newest {NEWEST} published sets of weights, with the begin of their digests. "
        "Most files are removed later.",
        query=fill(VERSIONS, rows=NEWEST),
        empty="No weights were published.",
    )


def _settings(layout: RunLayout) -> Panel:
    return Panel(
        title="Settings that differ from the defaults",
        explains="Of the newest start of the run, also if the report is of an earlier moment.",
        content=partial(show_settings, layout),
        width="full",
    )


def _metric(name: str) -> Panel:
    title, explains = STABILITY[name]
    return Panel(
        title=title,
        explains=explains,
        query=fill(METRIC, name=name),
        show=partial(
            lines,
            x="learner_step",
            y=["value"],
            names={"learner_step": "learner step", "value": title.lower()},
            is_fraction=name in FRACTIONS,
        ),
        empty="No learner step has this figure.",
    )


def _heldout() -> Panel:
    return Panel(
        title="Held-out success",
        explains="Tasks that are never trained on, by the weights that played them. Whiskers are "
        "95 % intervals (Wilson); episodes of one task count for less than independent ones.",
        query=ROUNDS,
        show=show_heldout,
        empty="Nothing was played on held-out tasks.",
    )


def _policy(scripts: Sequence[str]) -> str:
    """Return the policy of the file: its own scripts may run, and nothing is loaded."""
    digests = [
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts
    ]
    allowed = " ".join(f"'sha256-{each}'" for each in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )

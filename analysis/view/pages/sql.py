"""Show the answer of any SELECT: as a table, as a chart, as a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pyarrow as pa
from markupsafe import Markup

from analysis.view.charts import bars, lines, steps
from analysis.view.html import html
from analysis.view.page import Page, PageRequest
from analysis.view.panel import Chart, Panel

SHOWN_ROWS = 5_000  # of an answer; a file has all
CHARTS: Mapping[str, Callable[..., Chart]] = {"lines": lines, "bars": bars, "steps": steps}
# They stand in docs/sql.md too, where each is explained.
EXAMPLES = (
    (
        "Success per policy version",
        """SELECT version_min AS version, avg(won::INT) AS success, count(*) AS episodes
FROM trajectories WHERE split = 'train' GROUP BY 1 ORDER BY 1""",
    ),
    (
        "Success on held-out tasks",
        """SELECT evaluated_version AS version, sum(n_won) / sum(n_members) AS success,
       sum(n_members) AS episodes
FROM groups WHERE split = 'heldout' AND state = 'complete' GROUP BY 1 ORDER BY 1""",
    ),
    (
        "The states of all groups, with the reasons",
        """SELECT split, state, regexp_replace(reason, '[0-9]+', 'N', 'g') AS reason,
       count(*) AS groups, sum(n_steps) AS steps
FROM groups GROUP BY ALL ORDER BY groups DESC""",
    ),
    (
        "Rows that were trained on, by staleness",
        """SELECT staleness, count(*) AS groups, sum(n_steps) AS rows
FROM lineage JOIN groups USING (group_uid)
WHERE batch_state = 'trained' AND live GROUP BY 1 ORDER BY 1""",
    ),
    (
        "States from which episodes are most often lost",
        """SELECT any_value(s.anchor_text) AS state, count(DISTINCT s.traj_uid) AS episodes,
       count(DISTINCT s.traj_uid) FILTER (t.won) / count(DISTINCT s.traj_uid) AS success
FROM steps s JOIN trajectories t USING (traj_uid)
WHERE s.split = 'train' AND s.state_hash IS NOT NULL
GROUP BY s.state_hash HAVING episodes >= 8 ORDER BY success, episodes DESC LIMIT 20""",
    ),
    (
        "Sizes of anchor groups",
        """SELECT anchor_size, count(*) AS steps, count(*) / sum(count(*)) OVER () AS share
FROM advantages() GROUP BY 1 ORDER BY 1""",
    ),
    (
        "The transcript of one lost episode",
        """SELECT step_index, obs_text, action_text, reward, is_action_valid, version_min
FROM steps WHERE traj_uid =
    (SELECT traj_uid FROM trajectories WHERE NOT won ORDER BY started_at DESC LIMIT 1)
ORDER BY step_index""",
    ),
    (
        "How the episodes ended",
        """SELECT 'trajectory' AS ended_as, count(*) AS episodes, avg(n_steps) AS steps
FROM trajectories WHERE split = 'train'
UNION ALL SELECT why, count(*), avg(n_steps) FROM unfinished WHERE split = 'train'
GROUP BY 1 ORDER BY episodes DESC""",
    ),
)
FIRST = """SELECT learner_step, value AS success
FROM metrics WHERE name = 'train/success' ORDER BY learner_step"""


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the form with the answer, and a chart of it where one is chosen."""
    query = (asked.text("q") or FIRST).replace("\r\n", "\n")
    x, y = asked.text("x"), asked.text("y")
    kind = asked.text("chart")
    form = html(
        "sql_form.html",
        asked=asked,
        query=query,
        examples=EXAMPLES,
        x=x,
        y=y,
        kind=kind,
        kinds=list(CHARTS),
    )
    if asked.is_foreign and asked.text("q"):
        waits = Markup(
            '<p class="warning">Another site brought this query. Read it before you run it.</p>'
        )
        return [_answer(form + waits, query="SELECT 'not asked yet' AS answer")]
    found = [_answer(form, query=query, alone=query != FIRST)]
    if x or y or kind:
        found.append(
            Panel(
                title="Chart",
                explains=f"The first {SHOWN_ROWS:,} rows of the answer.",
                query=query,
                show=partial(show_chart, kind=kind or "lines", x=x, y=y),
                n_rows=SHOWN_ROWS,
                alone=True,
                width="full",
            )
        )
    return found


def show_chart(table: pa.Table, *, kind: str, x: str | None, y: str | None) -> Chart:
    """Draw columns of an answer over another one.

    Without names: the first column, and the numbers among the others. Raises ValueError if a named
    column is not there or nothing is a number.
    """
    names = table.column_names
    x = x or names[0]
    if y is None:
        y = ", ".join(
            each for each in names if each != x and _is_number(table.schema.field(each).type)
        )
        if not y:
            raise ValueError(f"beside {x} the answer has no column of numbers to draw")
    wanted = [each.strip() for each in y.split(",")]
    for name in (x, *wanted):
        if name not in names:
            raise ValueError(f"the answer has no column {name!r}; it has {', '.join(names)}")
    numbers = [each for each in wanted if _is_number(table.schema.field(each).type)]
    if not numbers:
        raise ValueError(f"{y} is no number; choose a column of numbers for y")
    if kind not in CHARTS or not _is_number(table.schema.field(x).type):
        kind = "bars"
    return CHARTS[kind](table, x=x, y=numbers)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


def _answer(form: Markup, *, query: str, alone: bool = False) -> Panel:
    return Panel(
        title="Answer",
        explains="One SELECT over the run, asked in a process that can read the run and nothing "
        "else. Views: steps, trajectories, groups, ledger, lineage, metrics, versions, events, …",
        query=query,
        above=form,
        n_rows=SHOWN_ROWS,
        alone=alone,
        empty="The answer has no rows.",
        width="full",
    )


PAGE = Page(
    path="/sql",
    title="SQL",
    question="Anything else?",
    panels=panels,
    follows=False,
)

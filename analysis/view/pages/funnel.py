"""Show the funnel: what became of the groups that were handed out, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from analysis.view.charts import bars
from analysis.view.html import html
from analysis.view.page import Page, PageRequest
from analysis.view.panel import Panel, show_rows
from analysis.view.sql_text import fill

# A group is in one of them at a time; the first three are still to be trained on.
STATES = ("open", "complete", "claimed", "trained", "filtered", "stale", "abandoned")
MEANINGS = {
    "open": "handed out; some of its episodes are still being played",
    "complete": "all episodes are there; it waits for the learner",
    "claimed": "in a batch that the learner works on",
    "trained": "its steps changed the weights",
    "filtered": "it was in a batch, but teaches nothing: its episodes do not differ",
    "stale": "given up, because it was played by weights that are too old",
    "abandoned": "given up, because it could not be played",
}
BINS = 40  # of policy versions along the axis

FUNNEL = """
WITH reached AS (
    SELECT group_uid, bool_or(state = 'complete') AS was_complete,
           bool_or(state = 'claimed') AS was_claimed
    FROM ledger GROUP BY group_uid)
SELECT split, count(*) AS opened,
       count(*) FILTER (was_complete) AS completed, count(*) FILTER (was_claimed) AS claimed_once,
       count(*) FILTER (state = 'open') AS open, count(*) FILTER (state = 'complete') AS complete,
       count(*) FILTER (state = 'claimed') AS claimed,
       count(*) FILTER (state = 'trained') AS trained,
       count(*) FILTER (state = 'filtered') AS filtered, count(*) FILTER (state = 'stale') AS stale,
       count(*) FILTER (state = 'abandoned') AS abandoned
FROM groups LEFT JOIN reached USING (group_uid) GROUP BY split ORDER BY split DESC LIMIT 20
"""
REASONS = """
SELECT split, state, regexp_replace(reason, '[0-9]+', 'N', 'g') AS reason, count(*) AS groups,
       sum(n_steps) AS steps
FROM groups WHERE state IN ('filtered', 'stale', 'abandoned')
GROUP BY ALL ORDER BY groups DESC LIMIT 100
"""
BY_VERSION = """
WITH width AS (
    SELECT greatest(1, ceil((max(version_min) + 1) / $bins))::BIGINT AS width FROM groups)
SELECT version_min // width * width AS from_version,
       count(*) FILTER (state = 'trained') AS trained,
       count(*) FILTER (state = 'filtered') AS filtered,
       count(*) FILTER (state = 'stale') AS stale,
       count(*) FILTER (state = 'abandoned') AS abandoned,
       count(*) FILTER (state IN ('open', 'complete', 'claimed')) AS waiting
FROM groups, width WHERE split = 'train' AND version_min IS NOT NULL
GROUP BY ALL ORDER BY from_version
"""
UNFINISHED = """
SELECT split, why, count(*) AS attempts, avg(n_steps) AS steps, max(ended_at) AS last_at
FROM unfinished GROUP BY ALL ORDER BY attempts DESC
"""


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of the funnel."""
    return [
        Panel(
            title="From open to trained",
            explains="A group is several attempts at one task, and the unit of training. Each "
            "count leads to its groups.",
            query=FUNNEL,
            show=partial(show_funnel, asked),
            empty="No group was handed out yet.",
            width="full",
        ),
        Panel(
            title="Why groups were not trained on",
            explains="The recorded reasons, with numbers left out.",
            query=REASONS,
            show=partial(show_reasons, asked),
            empty="Every group was trained on, or still can be.",
        ),
        Panel(
            title="By policy version",
            explains="What became of training groups, by the oldest version of the weights that "
            "played them.",
            query=fill(BY_VERSION, bins=BINS),
            show=partial(
                bars,
                x="from_version",
                y=["trained", "filtered", "stale", "abandoned", "waiting"],
                names={"from_version": "policy version"},
            ),
        ),
        Panel(
            title="Attempts that gave no episode",
            explains="They were begun and not finished: why, and how far they got on average.",
            query=UNFINISHED,
            empty="Every attempt that was begun gave an episode, or is being played.",
        ),
    ]


def show_funnel(asked: PageRequest, table: pa.Table) -> Markup:
    """Show for each split the stages, and where groups left them."""
    return html(
        "funnel.html",
        splits=[_split(asked, row) for row in table.to_pylist()],
        meanings=MEANINGS,
    )


def show_reasons(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the reasons. Each leads to its groups."""

    def address(row: Mapping[str, Any]) -> str:
        return asked.link("/groups", state=row["state"], split=row["split"], reason=row["reason"])

    return show_rows(table, links={"reason": address, "groups": address}, hints=MEANINGS)


def _split(asked: PageRequest, row: Mapping[str, Any]) -> dict[str, Any]:
    opened = row["opened"]
    counts = {state: row[state] for state in STATES}
    stages = [
        ("handed out", opened, 1.0),
        ("played", row["completed"], row["completed"] / opened),
    ]
    if row["split"] == "train":
        stages += [
            ("in a batch", row["claimed_once"], row["claimed_once"] / opened),
            ("trained on", row["trained"], row["trained"] / opened),
        ]
    return {
        "name": row["split"],
        "opened": opened,
        "stages": stages,
        "counts": [
            (state, count, asked.link("/groups", state=state, split=row["split"]))
            for state, count in counts.items()
            if count or state in ("open", "complete", "trained")
        ],
        "all_groups": asked.link("/groups", split=row["split"]),
    }


PAGE = Page(
    path="/funnel",
    title="Funnel",
    question="What became of the groups that were handed out, and why?",
    panels=panels,
)

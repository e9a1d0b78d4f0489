"""List groups: all of a state, a split, a task or a range of versions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pyarrow as pa
from markupsafe import Markup

from analysis.view.html import html
from analysis.view.page import Page, PageRequest
from analysis.view.pages.funnel import MEANINGS, STATES
from analysis.view.panel import Panel, show_rows
from analysis.view.sql_text import fill

LIMIT = 500
SPLITS = ("train", "heldout", "imported")

GROUPS = """
SELECT group_uid, task_id, split, state, reason, n_won, n_members AS episodes, n_steps AS steps,
       version_min, version_max, opened_at
FROM groups WHERE {conditions}
ORDER BY opened_at DESC LIMIT $limit
"""
CONDITIONS = {
    "state": "state = $state",
    "split": "split = $split",
    "task": "task_id = $task",
    "reason": "regexp_replace(reason, '[0-9]+', 'N', 'g') = $reason",
    "from_version": "version_min >= $from_version",
    "to_version": "version_min <= $to_version",
}


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the list, with the form that selects."""
    values: dict[str, str | int | None] = {
        name: asked.integer(name) if name.endswith("_version") else asked.text(name)
        for name in CONDITIONS
    }
    given = {name: value for name, value in values.items() if value is not None}
    conditions = " AND ".join(CONDITIONS[name] for name in given) or "TRUE"
    return [
        Panel(
            title="Groups",
            explains=f"The newest {LIMIT} groups that fit. A row leads to the group's episodes, a "
            "task to its groups.",
            query=fill(GROUPS.format(conditions=conditions), limit=LIMIT, **given),
            show=partial(show_groups, asked),
            above=html(
                "groups_form.html",
                asked=asked,
                values=values,
                states=STATES,
                meanings=MEANINGS,
                splits=SPLITS,
            ),
            empty="No group fits.",
            width="full",
        )
    ]


def show_groups(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the groups. Each leads to its page, and its task to the task's groups."""
    group = asked.row_link("/group", {"group": "group_uid"})
    task = asked.row_link("/groups", {"task": "task_id"})
    return show_rows(table, links={"group_uid": group, "task_id": task})


PAGE = Page(
    path="/groups",
    title="Groups",
    question="Which groups are in this state, of this task, of these versions?",
    panels=panels,
    is_start=False,
    example="SELECT state, split FROM groups WHERE state = 'trained' LIMIT 1",
)

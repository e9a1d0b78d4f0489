"""List the pages, in the order of the navigation. The first one is the start."""

from __future__ import annotations

from analysis.view.page import Page
from analysis.view.pages import (
    anchor,
    compare,
    funnel,
    group,
    groups,
    run,
    sql,
    task,
    trajectory,
)

PAGES: tuple[Page, ...] = (
    run.PAGE,
    funnel.PAGE,
    groups.PAGE,
    group.PAGE,
    anchor.PAGE,
    trajectory.PAGE,
    task.PAGE,
    compare.PAGE,
    sql.PAGE,
)

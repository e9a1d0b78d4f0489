"""List the pages, in the order of the navigation. The first one is the start."""

from __future__ import annotations

from analysis.view.page import Page
from analysis.view.pages import (
    anchor,
    compare,
    funnel,
    graph,
    group,
    groups,
    lineage,
    run,
    sql,
    staleness,
    task,
    timeline,
    trajectory,
    what_if,
)

PAGES: tuple[Page, ...] = (
    run.PAGE,
    funnel.PAGE,
    groups.PAGE,
    group.PAGE,
    anchor.PAGE,
    graph.PAGE,
    trajectory.PAGE,
    task.PAGE,
    what_if.PAGE,
    staleness.PAGE,
    lineage.PAGE,
    timeline.PAGE,
    compare.PAGE,
    sql.PAGE,
)

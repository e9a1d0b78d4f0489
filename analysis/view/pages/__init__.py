"""List the pages, in the order of the navigation. The first one is the start."""

from __future__ import annotations

from analysis.view.page import Page
from analysis.view.pages import anchor, funnel, graph, group, groups, run, sql, what_if

PAGES: tuple[Page, ...] = (
    run.PAGE,
    funnel.PAGE,
    groups.PAGE,
    group.PAGE,
    anchor.PAGE,
    graph.PAGE,
    what_if.PAGE,
    sql.PAGE,
)

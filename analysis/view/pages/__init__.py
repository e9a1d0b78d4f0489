"""List the pages, in the order of the navigation. The first one is the start."""

from __future__ import annotations

from analysis.view.page import Page
from analysis.view.pages import (
    anchor,
    funnel,
    group,
    groups,
    lineage,
    run,
    sql,
    staleness,
    timeline,
)

PAGES: tuple[Page, ...] = (
    run.PAGE,
    funnel.PAGE,
    groups.PAGE,
    group.PAGE,
    anchor.PAGE,
    staleness.PAGE,
    lineage.PAGE,
    timeline.PAGE,
    sql.PAGE,
)

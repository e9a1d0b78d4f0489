"""List the pages, in the order of the navigation. The first one is the start.

run.py         is it learning, what limits its speed, is anything wrong?
funnel.py      what became of the groups that were handed out
groups.py      a list of groups
group.py       one group: its episodes side by side
anchor.py      one anchor state, and which actions paid there
graph.py       states and moves of a group or a task; its query is in graph_moves.sql
trajectory.py  the transcript of one episode
task.py        one task under successive versions
what_if.py     advantages under other settings
staleness.py   learner steps against policy versions
lineage.py     from a row to its file, weights, learner step and checkpoint, and back
timeline.py    who works and who waits, over time; its queries are in timeline_*.sql
compare.py     two runs
sql.py         any SELECT
"""

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

"""Show one group: its episodes side by side, step by step, coloured by their advantages."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from analysis.view.group_query import NEWEST_GROUP, TERMS, group_steps
from analysis.view.html import html, json_script
from analysis.view.page import Page, PageRequest
from analysis.view.panel import Panel, show_rows
from analysis.view.shades import SHADES, shade_class
from analysis.view.sql_text import fill
from analysis.view.text import ACTION_CHARACTERS, plain

MANY_STEPS = 40  # from here on cells are narrow
MAX_STEPS = 4_000  # that are drawn

NEIGHBOURS = """
WITH alike AS (
    SELECT group_uid, lag(group_uid) OVER by_time AS before, lead(group_uid) OVER by_time AS after
    FROM groups WHERE task_id = (SELECT any_value(task_id) FROM groups WHERE group_uid = $group)
    WINDOW by_time AS (ORDER BY opened_at, group_uid))
SELECT g.*, l.learner_step, l.staleness, a.before, a.after
FROM groups AS g JOIN alike AS a USING (group_uid)
LEFT JOIN (
    SELECT group_uid, max(learner_step) AS learner_step, arg_max(staleness, learner_step)
        AS staleness
    FROM lineage WHERE live GROUP BY group_uid) AS l USING (group_uid)
WHERE g.group_uid = $group
"""
LANES = """
SELECT s.member, s.traj_uid, s.step_index, s.won, s.reward, s.is_action_valid, s.truncated,
       left(s.action_text, $characters) AS action, s.state_hash,
       left(s.anchor_text, $characters) AS anchor, s.version_min, s.version_max,
       a.advantage, a.episode_advantage, a.step_advantage, a.anchor_size
FROM steps AS s LEFT JOIN terms AS a USING (traj_uid, step_index)
ORDER BY s.member, s.step_index
"""
EPISODES = """
SELECT member, any_value(traj_uid) AS traj_uid, any_value(won) AS won, count(*) AS steps,
       sum(reward) AS episode_return, count(*) FILTER (NOT is_action_valid) AS invalid_actions,
       bool_or(truncated) AS truncated, min(version_min) AS version_min,
       max(version_max) AS version_max, sum(len(response_ids)) AS tokens,
       sum(gen_us) / 1e6 AS generating_s, sum(env_us) / 1e6 AS environment_s
FROM steps GROUP BY member ORDER BY member
"""
ANCHORS = """
SELECT any_value(s.anchor_text) AS state, s.state_hash, count(*) AS visits,
       count(DISTINCT s.traj_uid) AS episodes, count(DISTINCT s.action_text) AS actions,
       max(a.step_advantage) - min(a.step_advantage) AS spread
FROM steps AS s JOIN terms AS a USING (traj_uid, step_index)
WHERE s.state_hash IS NOT NULL
GROUP BY s.state_hash ORDER BY spread DESC, visits DESC LIMIT 50
"""
# Most attempts of a stale or abandoned group may have given no episode.
UNFINISHED = """
SELECT number AS attempt, why, n_steps AS steps, n_response_tokens AS tokens, worker, version,
       begun_at, ended_at
FROM unfinished WHERE group_uid = $group ORDER BY begun_at, attempt
"""
HISTORY = """
SELECT entered_at, state, reason FROM ledger WHERE group_uid = $group ORDER BY lsn
"""


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of a group.

    An address that names none leads to the newest trained group of mixed outcome.
    """
    group = asked.uid("group")
    if group is None:
        newest = asked.rows(NEWEST_GROUP)
        group = uuid.UUID(newest[0]["group_uid"]) if newest else uuid.UUID(int=0)
    steps = group_steps(asked, group)
    return [
        Panel(
            title="Group",
            explains="Several attempts at one task from the same start: what they are compared "
            "with is each other.",
            query=fill(NEIGHBOURS, group=group),
            show=partial(show_group, asked),
            empty="The run has no such group at this moment.",
            width="full",
        ),
        Panel(
            title="Episodes step by step",
            explains="A row is an episode, a cell a step. Blue steps become more likely, orange "
            "ones less. Point at a cell: steps in the same state are framed, and compared with it.",
            query=fill(LANES, characters=ACTION_CHARACTERS),
            tables=[steps, TERMS],
            show=partial(show_lanes, asked, group),
            empty="No episode of the group is there yet.",
            width="full",
        ),
        Panel(
            title="Episodes",
            explains="Outcome and cost of each attempt. A uid leads to the transcript.",
            query=EPISODES,
            tables=[steps],
            show=partial(show_episodes, asked),
            later=True,
            empty="No episode of the group is there yet.",
            width="full",
        ),
        Panel(
            title="Anchor states",
            explains="States that were met more than once can be compared; the spread says how "
            "much the choice of action mattered there.",
            query=ANCHORS,
            tables=[steps, TERMS],
            show=partial(show_anchors, asked, group),
            later=True,
            empty="No step of the group has an anchor state.",
            width="full",
        ),
        Panel(
            title="Unfinished attempts",
            explains="Attempts that were begun and gave no episode: why, and how far they got.",
            query=fill(UNFINISHED, group=group),
            empty="Every attempt that was begun gave an episode, or is being played.",
        ),
        Panel(
            title="History",
            explains="The states that the group was in, and why (UTC).",
            query=fill(HISTORY, group=group),
        ),
    ]


def show_group(asked: PageRequest, table: pa.Table) -> Markup:
    """Show what the group is, with links to the same task's groups before and after."""
    row = table.slice(0, 1).to_pylist()[0]
    return html(
        "group_figures.html",
        row=row,
        task=asked.link("/task", task=row["task_id"]),
        before=row["before"] and asked.link("/group", group=row["before"]),
        after=row["after"] and asked.link("/group", group=row["after"]),
    )


def show_lanes(asked: PageRequest, group: uuid.UUID, table: pa.Table) -> Markup:
    """Show the episodes as lanes."""
    rows = table.slice(0, MAX_STEPS).to_pylist()
    largest = max(
        (abs(row["advantage"]) for row in rows if row["advantage"] is not None), default=0
    )
    cells = [{"number": at, **_cell(asked, group, row, largest)} for at, row in enumerate(rows)]
    by_lane = groupby(zip(rows, cells, strict=True), key=lambda pair: pair[0]["member"])
    lanes = [_lane(asked, list(pairs)) for _, pairs in by_lane]
    return html(
        "group_lanes.html",
        lanes=lanes,
        largest=largest,
        is_long=max(len(lane["cells"]) for lane in lanes) > MANY_STEPS,
        shades=[shade_class(shade / SHADES, 1.0) for shade in range(-SHADES, SHADES + 1)],
        data=json_script([cell["details"] for cell in cells], kind="cells"),
        n_left_out=table.num_rows - len(rows),
    )


def show_episodes(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the episodes as a table."""
    trajectory = asked.row_link("/trajectory", {"traj": "traj_uid"})
    return show_rows(table, links={"traj_uid": trajectory})


def show_anchors(asked: PageRequest, group: uuid.UUID, table: pa.Table) -> Markup:
    """Show the anchor states. Each leads to its page."""
    anchor = asked.row_link("/anchor", {"state": "state_hash"}, group=group)
    return show_rows(table, links={"state": anchor, "state_hash": anchor})


def _lane(asked: PageRequest, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict:
    rows = [row for row, _ in pairs]
    oldest, newest = min(r["version_min"] for r in rows), max(r["version_max"] for r in rows)
    return {
        "member": rows[0]["member"],
        "won": any(row["won"] for row in rows),
        "reward": sum(row["reward"] for row in rows),
        "truncated": any(row["truncated"] for row in rows),
        "versions": str(oldest) if oldest == newest else f"{oldest} to {newest}",
        "link": asked.link("/trajectory", traj=rows[0]["traj_uid"]),
        "cells": [cell for _, cell in pairs],
    }


def _cell(
    asked: PageRequest, group: uuid.UUID, row: Mapping[str, Any], largest: float
) -> dict[str, Any]:
    advantage = row["advantage"]
    state = row["state_hash"]
    if not row["is_action_valid"]:
        mark = "×"
    elif row["reward"]:
        mark = "+" if row["reward"] > 0 else "−"
    else:
        mark = "·" if row["anchor_size"] == 1 or state is None else ""
    return {
        "mark": mark,
        "shade": shade_class(advantage, largest),
        "state": state or "",
        "link": asked.link("/trajectory", traj=row["traj_uid"], step=row["step_index"]),
        "title": f"step {row['step_index']}: {plain(row['action'], at_most=80)}",
        "details": {
            "step": f"{row['step_index']} of episode {row['member']}",
            "action": plain(row["action"], at_most=ACTION_CHARACTERS),
            "state": plain(row["anchor"] or "", at_most=200) or "without an anchor state",
            "advantage": _terms(row),
            "size": _size(row),
            "trajectory": asked.link("/trajectory", traj=row["traj_uid"], step=row["step_index"]),
            "anchor": asked.link("/anchor", group=group, state=state) if state else "",
        },
    }


def _terms(row: Mapping[str, Any]) -> str:
    if row["advantage"] is None:
        return "unknown"
    return (
        f"{row['advantage']:+.2f} = {row['episode_advantage']:+.2f} for the episode, "
        f"{row['step_advantage']:+.2f} for the step"
    )


def _size(row: Mapping[str, Any]) -> str:
    size = row["anchor_size"]
    if size is None or row["state_hash"] is None:
        return "nothing"
    return "nothing: no other step was in this state" if size == 1 else f"{size - 1} other steps"


PAGE = Page(
    path="/group",
    title="Group",
    question="What did the attempts at one task do differently, and which steps get the credit?",
    panels=panels,
    follows=False,
    example='SELECT group_uid AS "group" FROM groups WHERE n_steps > 0 ORDER BY opened_at LIMIT 1',
)

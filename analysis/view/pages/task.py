"""Show one task under successive policy versions: when it was first won, how it was last lost.

Without a task in the address: all tasks, those that are still lost first. Everything but the two
transcripts comes from the small table of groups.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from analysis.view.charts import lines
from analysis.view.group_query import group_versions
from analysis.view.html import html
from analysis.view.page import BadAddressError, Page, PageRequest
from analysis.view.panel import Chart, Panel, show_rows
from analysis.view.sql_text import Value, fill

LISTED_TASKS = 200
LISTED_GROUPS = 300
SHOWN_RESULTS = 16  # newest groups of a task in the list
POINTS = 16  # of the average in the chart, beside those at the task's own versions
TEXT_CHARACTERS = 1_500
SHOWN_STEPS = 200
SPLITS = ("train", "heldout", "imported")

# Groups whose episodes are all there. `play_order` is their order in the run. An evaluation plays a
# task in several groups of the same version: they are counted together.
PLAYED = """
WITH played AS (
    SELECT *, n_won / n_members AS success,
           version_min IS NOT DISTINCT FROM max(version_min) OVER (PARTITION BY task_id)
               AS is_newest,
           row_number() OVER (
               PARTITION BY task_id ORDER BY version_min, opened_at, group_uid) AS play_order
    FROM groups WHERE n_members > 0 AND state NOT IN ('open', 'abandoned'){conditions})
"""
CONDITIONS = {
    "split": " AND split = $split",
    "text": " AND contains(lower(task_id), lower($text))",
    "task": " AND task_id = $task",
}
TASKS = (
    PLAYED
    + """
SELECT task_id AS task, string_agg(DISTINCT split, ', ' ORDER BY split) AS split,
       sum(n_won) FILTER (is_newest)::BIGINT AS newest_won,
       sum(n_members) FILTER (is_newest)::BIGINT AS newest_of,
       arg_max(version_min, play_order) AS newest_version,
       sum(n_won) / sum(n_members) AS success, count(*) AS groups,
       min(version_min) FILTER (n_won > 0) AS first_won_version,
       list({'group_uid': group_uid, 'n_won': n_won, 'n_members': n_members,
             'version': version_min} ORDER BY play_order DESC)[:$results] AS results
FROM played GROUP BY task_id
ORDER BY newest_won / newest_of, success, groups DESC, task LIMIT $rows
"""
)
FIGURES = (
    PLAYED
    + """
SELECT string_agg(DISTINCT split, ', ' ORDER BY split) AS split, count(*) AS groups,
       sum(n_members)::BIGINT AS episodes, sum(n_won) / sum(n_members) AS success,
       arg_min(n_won, play_order) AS first_won, arg_min(n_members, play_order) AS first_of,
       arg_min(version_min, play_order) AS first_version,
       sum(n_won) FILTER (is_newest)::BIGINT AS newest_won,
       sum(n_members) FILTER (is_newest)::BIGINT AS newest_of,
       arg_max(version_min, play_order) AS newest_version,
       min(version_min) FILTER (n_won > 0) AS first_win_version,
       max(version_min) FILTER (n_won < n_members) AS last_loss_version,
       sum(n_steps) / sum(n_members) AS steps
FROM played HAVING count(*) > 0
"""
)
# The average of all training tasks is taken over the groups of about the same versions.
OVER_VERSIONS = """
WITH played AS (
    SELECT split, version_min AS version, n_won, n_members, task_id = $task AS is_task
    FROM groups WHERE n_members > 0 AND state NOT IN ('open', 'abandoned') AND split <> 'imported'
        AND version_min IS NOT NULL),
own AS (
    SELECT version, if(split = 'train', n_won / n_members, NULL) AS train,
           if(split = 'heldout', n_won / n_members, NULL) AS heldout
    FROM played WHERE is_task),
span AS (
    SELECT min(version) AS oldest, max(version) AS newest, (newest - oldest) / $points AS width
    FROM own HAVING count(*) > 0),
points AS (
    SELECT version FROM own
    UNION
    SELECT (oldest + width * number)::BIGINT FROM span, range($points + 1) AS r(number)),
average AS (
    SELECT points.version, sum(n_won) / sum(n_members) AS all_tasks
    FROM span, points LEFT JOIN played
        ON split = 'train' AND abs(played.version - points.version) <= greatest(1, width)
    GROUP BY ALL)
SELECT version, all_tasks, train, heldout FROM average LEFT JOIN own USING (version)
ORDER BY version
"""
TURNS = (
    PLAYED
    + """
SELECT arg_min(group_uid, play_order) FILTER (n_won > 0) AS first_win,
       arg_max(group_uid, play_order) FILTER (n_won < n_members) AS last_loss
FROM played
"""
)
# Each of the two reads the steps of one group only.
TWO = """
WITH won AS (
    FROM steps WHERE group_uid = $won{won_versions} AND won
    QUALIFY member = min(member) OVER ()),
lost AS (
    FROM steps WHERE group_uid = $lost{lost_versions} AND NOT won
    QUALIFY member = min(member) OVER ())
SELECT which, step_index AS step, traj_uid, group_uid, member, version_min, version_max,
       left(obs_text, $characters) AS observation, len(obs_text) > $characters AS is_cut,
       left(action_text, $characters) AS action,
       is_action_valid, reward, state_hash, truncated, count(*) OVER (PARTITION BY which) AS steps
FROM (SELECT 'won' AS which, * FROM won UNION ALL BY NAME SELECT 'lost' AS which, * FROM lost)
ORDER BY step, which DESC LIMIT $rows
"""
GROUPS = (
    PLAYED
    + """,
consumed AS (
    SELECT group_uid, max(learner_step) AS learner_step FROM lineage WHERE live GROUP BY group_uid)
SELECT g.group_uid, g.split, g.state, g.version_min AS version, g.n_won AS won,
       g.n_members AS episodes, g.success, g.n_steps / g.n_members AS mean_steps, c.learner_step,
       g.opened_at
FROM played AS g LEFT JOIN consumed AS c USING (group_uid) ORDER BY play_order DESC LIMIT $rows
"""
)
HINTS = {
    "version": "the oldest version of the weights that played it",
    "success": "fraction of its episodes that were won",
    "mean_steps": "steps of an episode, on average",
    "learner_step": "the batch that consumed it",
}


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of one task, or the list of tasks."""
    task = asked.text("task")
    if task is None:
        return [task_list(asked)]
    known = fill("SELECT 1 AS known FROM groups WHERE task_id = $task LIMIT 1", task=task)
    if not asked.rows(known):
        raise BadAddressError("the run has no group of this task at this moment")
    ask_task = partial(of_played, task=task)
    turns = asked.rows(ask_task(TURNS))

    return [
        Panel(
            title="Task",
            explains="How the attempts at it ended, from the first to the newest group.",
            query=ask_task(FIGURES),
            show=partial(show_figures, asked, task),
            empty="No group of this task is complete yet.",
            width="full",
        ),
        Panel(
            title="Success over versions",
            explains="Each diamond is a group of this task: the fraction of its episodes that "
            "were won. The line is the average of all training tasks at that time.",
            query=fill(OVER_VERSIONS, task=task, points=POINTS),
            show=show_over_versions,
            width="full",
        ),
        two_transcripts(asked, turns[0] if turns else {}),
        Panel(
            title="Groups of this task",
            explains="Newest first. A uid leads to the group's episodes, step by step.",
            query=ask_task(GROUPS, rows=LISTED_GROUPS),
            show=partial(show_groups, asked),
            empty="No group of this task is complete yet.",
            width="full",
        ),
    ]


def of_played(query: str, **values: Value) -> str:
    """Return a query that begins with PLAYED, for the groups that fit the given conditions."""
    conditions = "".join(CONDITIONS[name] for name in CONDITIONS if name in values)
    return fill(query.replace("{conditions}", conditions), **values)


def task_list(asked: PageRequest) -> Panel:
    """Return the list of tasks, with the form that selects."""
    given = {name: value for name in ("split", "text") if (value := asked.text(name))}
    return Panel(
        title="Tasks",
        explains="Those that the newest policy still loses come first. A cell is a group, oldest "
        "on the left: the fuller, the more of its episodes were won.",
        query=of_played(TASKS, rows=LISTED_TASKS, results=SHOWN_RESULTS, **given),
        show=partial(show_tasks, asked),
        above=html("task_form.html", asked=asked, given=given, splits=SPLITS),
        empty="No task fits.",
        width="full",
    )


def show_tasks(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the tasks, each with the results of its newest groups."""
    rows = []
    for row in table.to_pylist():
        results = [
            {
                "link": asked.link("/group", group=str(result["group_uid"])),
                "title": f"version {result['version']}: {result['n_won']} of "
                f"{result['n_members']} won",
                "height": 18 * result["n_won"] / result["n_members"],
            }
            for result in reversed(row["results"])
        ]
        rows.append({**row, "link": asked.link("/task", task=row["task"]), "cells": results})
    return html("task_list.html", rows=rows, is_cut=len(rows) == LISTED_TASKS, limit=LISTED_TASKS)


def show_figures(asked: PageRequest, task: str, table: pa.Table) -> Markup:
    """Say in one sentence how it went, and show the figures behind it."""
    row = table.slice(0, 1).to_pylist()[0]
    return html(
        "task_figures.html",
        row=row,
        task=task,
        sentence=sentence(row),
        groups=asked.link("/groups", task=task),
        tasks=asked.link("/task"),
    )


def sentence(row: Mapping[str, Any]) -> str:
    """Return in one sentence how the policy came to win the task, or did not."""
    newest = f"{row['newest_won']} of {row['newest_of']}"
    if row["success"] == 0:
        return "No attempt at this task has been won yet."
    if row["success"] == 1:
        return "Every attempt at this task was won."
    at = f" at version {row['newest_version']}" if row["newest_version"] is not None else ""
    if row["newest_won"] == 0:
        return f"It was won before, and lost again: {newest} won{at}."
    if row["newest_won"] == row["newest_of"] and row["first_won"] < row["first_of"]:
        return (
            f"The policy has learnt it: {row['first_won']} of {row['first_of']} were won in its "
            f"first group, {newest}{at}."
        )
    return f"It is won now and then: {newest}{at}."


def show_over_versions(table: pa.Table) -> Chart:
    """Draw the task's groups over the average of all training tasks."""
    there = [name for name in table.column_names if table.column(name).null_count < len(table)]
    return lines(
        table,
        x="version",
        y=["all_tasks"] if not table.column("all_tasks").null_count else [],
        points=[name for name in ("train", "heldout") if name in there],
        names={
            "version": "policy version",
            "all_tasks": "all training tasks",
            "train": "this task, in training",
            "heldout": "this task, held out",
        },
        is_fraction=True,
    )


def two_transcripts(asked: PageRequest, turns: Mapping[str, Any]) -> Panel:
    """Return the panel of the first win beside the last loss."""
    found: dict[str, uuid.UUID] = {}
    versions: dict[str, str] = {}
    for which, column in (("won", "first_win"), ("lost", "last_loss")):
        text = turns.get(column)
        found[which] = uuid.UUID(text) if text else uuid.UUID(int=0)
        versions[f"{which}_versions"] = group_versions(asked, found[which]) if text else ""
    query = TWO
    for name, condition in versions.items():
        query = query.replace(f"{{{name}}}", condition)
    return Panel(
        title="First win and last loss",
        explains="Two attempts from the same start, action by action. The first step at which "
        "they did different things is marked.",
        query=fill(
            query,
            won=found["won"],
            lost=found["lost"],
            characters=TEXT_CHARACTERS,
            rows=2 * SHOWN_STEPS,
        ),
        show=partial(show_two, asked),
        empty="No episode of this task is there yet.",
        width="full",
    )


def show_two(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the two transcripts side by side, with the step at which they part."""
    by_step: dict[int, dict[str, dict[str, Any]]] = {}
    heads: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        state = row["state_hash"]
        row["link"] = asked.link("/trajectory", traj=row["traj_uid"], step=row["step"])
        row["anchor"] = asked.link("/anchor", group=row["group_uid"], state=state) if state else ""
        by_step.setdefault(row["step"], {})[row["which"]] = row
        heads.setdefault(row["which"], row)
    pairs = [
        {"step": step, "won": both.get("won"), "lost": both.get("lost")}
        for step, both in sorted(by_step.items())
    ]
    return html(
        "task_two.html",
        pairs=pairs,
        parts_at=parting_step(pairs),
        heads=heads,
        links={
            which: asked.link("/trajectory", traj=head["traj_uid"]) for which, head in heads.items()
        },
    )


def parting_step(pairs: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first step at which two episodes did different things, None if there is none."""
    for pair in pairs:
        won, lost = pair["won"], pair["lost"]
        if won is None or lost is None:
            return None
        if won["action"] != lost["action"]:
            step: int = pair["step"]
            return step
    return None


def show_groups(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the task's groups. Each leads to its page."""
    group = asked.row_link("/group", {"group": "group_uid"})
    return show_rows(table, links={"group_uid": group}, hints=HINTS)


PAGE = Page(
    path="/task",
    title="Task over time",
    question="Which tasks are still lost, and when did the policy learn the others?",
    panels=panels,
    follows=False,
    example="SELECT task_id AS task FROM groups WHERE n_steps > 0 "
    "ORDER BY n_won > 0 AND n_won < n_members DESC, opened_at LIMIT 1",
)

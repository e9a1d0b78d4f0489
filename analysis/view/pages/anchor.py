"""Show one anchor state: all actions that a group took in the same state, and which of them paid.

GiGPO's step advantages compare the steps of one group that were taken in the same state. This page
shows the comparison: each visit is a dot, placed by the return that followed it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from analysis.view.charts import bars
from analysis.view.group_query import TERMS, batches_steps, group_steps
from analysis.view.html import html
from analysis.view.page import Page, PageRequest
from analysis.view.panel import Chart, Panel, show_rows
from analysis.view.shades import shade_class
from analysis.view.sql_text import fill
from analysis.view.text import ACTION_CHARACTERS, plain

RECENT_STEPS = 10  # learner steps whose groups the list of states looks at
LISTED_STATES = 50  # rows of the list
STATE_CHARACTERS = 2_000  # of one state
SHARE_ACTIONS = 6  # with a colour of their own in the chart over versions; the others are "other"
VERSION_BUCKETS = 12  # bars of the chart over versions
STRIP_WIDTH = 260.0  # pixels
STRIP_MARGIN = 8.0  # pixels on both sides, so that the outermost marks are whole
OTHER = "other actions"

# The return that the group's episodes lose in a state: they mix actions, and the best of these
# would have given more. Only groups of the last learner steps say what the policy does now.
WRONG = """, actions AS (
    SELECT s.group_uid, s.state_hash, any_value(s.task_id) AS task_id,
           any_value(left(s.anchor_text, $state_characters)) AS state,
           left(s.action_text, $characters) AS action, count(*) AS visits,
           avg(a.step_return) AS mean_return,
           bool_and(s.is_action_valid) AND count(DISTINCT s.traj_uid) > 1 AS is_sure
    FROM steps AS s JOIN terms AS a USING (traj_uid, step_index)
    WHERE s.state_hash IS NOT NULL AND a.anchor_size > 1
    GROUP BY s.group_uid, s.state_hash, action)
SELECT any_value(state) AS state, any_value(task_id) AS task, sum(visits) AS visits,
       arg_max(action, visits) AS usual_action,
       arg_max(action, mean_return) FILTER (is_sure) AS best_action,
       arg_max(visits, mean_return) FILTER (is_sure) AS tried,
       max(mean_return) FILTER (is_sure) * sum(visits) - sum(mean_return * visits) AS lost_return,
       lost_return / sum(visits) AS lost_per_visit,
       group_uid, state_hash
FROM actions GROUP BY group_uid, state_hash HAVING count(*) > 1 AND lost_return > 0
ORDER BY lost_return DESC LIMIT $rows
"""
STATE = """
SELECT any_value(left(anchor_text, $state_characters)) AS anchor,
       arg_min(left(obs_text, $state_characters), member * 1000000 + step_index) AS observation,
       any_value(task_id) AS task_id, count(*) AS visits, count(DISTINCT traj_uid) AS episodes,
       (SELECT count(DISTINCT traj_uid) FROM steps) AS group_size,
       count(DISTINCT action_text) AS actions
FROM steps WHERE state_hash = $state HAVING count(*) > 0
"""
ACTIONS = """, visits AS (
    SELECT left(s.action_text, $characters) AS action, s.traj_uid, s.member, s.step_index,
           s.won, s.is_action_valid, s.admissible_actions,
           a.step_return, a.step_advantage, a.advantage
    FROM steps AS s JOIN terms AS a USING (traj_uid, step_index)
    WHERE s.state_hash = $state),
tried AS (
    SELECT action, count(*) AS visits, count(DISTINCT traj_uid) AS episodes,
           avg(step_return) AS mean_return, avg(step_advantage) AS step_advantage,
           avg(advantage) AS advantage, avg(won::INT) AS won, bool_and(is_action_valid) AS is_valid,
           list({'traj_uid': traj_uid, 'member': member, 'step_index': step_index, 'won': won,
                 'step_return': step_return, 'step_advantage': step_advantage}
                ORDER BY step_return) AS dots
    FROM visits GROUP BY action)
FROM tried
UNION ALL BY NAME
SELECT DISTINCT left(action, $characters) AS action, 0 AS visits
FROM (SELECT unnest(admissible_actions) AS action FROM visits)
WHERE left(action, $characters) NOT IN (SELECT action FROM tried)
ORDER BY mean_return DESC NULLS LAST, action LIMIT 200
"""
VISITS = """, after AS (
    SELECT *, lead(left(anchor_text, $state_characters)) OVER by_step AS leads_to,
           if(terminated OR truncated, final_state_hash, lead(state_hash) OVER by_step) AS next_hash
    FROM steps WINDOW by_step AS (PARTITION BY traj_uid ORDER BY step_index))
SELECT s.member AS episode, s.step_index AS step, left(s.action_text, $characters) AS action,
       a.step_return, a.step_advantage, a.episode_advantage, a.advantage, s.won,
       if(s.terminated OR s.truncated,
          'the end' || coalesce(': ' || left(s.final_anchor_text, $state_characters), ''),
          s.leads_to) AS leads_to,
       s.traj_uid, if(s.next_hash IN (SELECT state_hash FROM steps), s.next_hash, NULL) AS next_hash
FROM after AS s JOIN terms AS a USING (traj_uid, step_index)
WHERE s.state_hash = $state
ORDER BY a.step_return DESC, s.member, s.step_index
"""
LEARNT = """
WITH visits AS (
    SELECT version_min AS version, left(action_text, $characters) AS action FROM steps
    WHERE state_hash = $state AND split <> 'imported'
      AND task_id = (SELECT any_value(task_id) FROM groups WHERE group_uid = $group)),
span AS (
    SELECT greatest(1, ceil((max(version) - min(version) + 1) / $buckets))::BIGINT AS width
    FROM visits),
common AS (
    SELECT action FROM visits GROUP BY action ORDER BY count(*) DESC, action LIMIT $actions)
SELECT version // width * width AS version,
       if(action IN (FROM common), action, $other) AS action, count(*) AS visits
FROM visits, span GROUP BY ALL ORDER BY version, visits DESC
"""
ELSEWHERE = """
SELECT any_value(left(s.anchor_text, $state_characters)) AS state, s.state_hash,
       count(*) AS visits, count(DISTINCT s.action_text) AS actions,
       max(a.step_advantage) - min(a.step_advantage) AS spread
FROM steps AS s JOIN terms AS a USING (traj_uid, step_index)
WHERE s.state_hash IS NOT NULL
GROUP BY s.state_hash ORDER BY spread DESC, visits DESC LIMIT 50
"""
HINTS = {
    "lost_return": "how much higher the sum of returns would be, had every visit taken the best",
    "usual_action": "the action that was chosen most often",
    "best_action": "the valid action, tried in two episodes, with the highest mean return",
    "tried": "how often the best action was chosen",
    "lost_per_visit": "the same for one visit",
    "step_return": "discounted rewards from this step to the end of its episode, less penalties",
    "step_advantage": "A_S: how far the return is above the other visits of this state",
    "episode_advantage": "A_E: how far the episode's return is above the group's other episodes",
    "advantage": "A = A_E + omega * A_S: above zero the action becomes more likely",
    "spread": "how much the step advantages in this state differ",
}


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the panels of one anchor state, or a list of states to look at."""
    group, state = asked.uid("group"), asked.uid("state")
    if group is None or state is None:
        return [wrong_states(asked, rows=LISTED_STATES)]
    of_state = partial(
        fill,
        state=state,
        characters=ACTION_CHARACTERS,
        state_characters=STATE_CHARACTERS,
    )
    steps = group_steps(asked, group)
    return [
        Panel(
            title="State",
            explains="What the environment says identifies this state. Steps of one group with "
            "the same state form an anchor group.",
            query=of_state(STATE),
            tables=[steps],
            show=partial(show_state, asked, group),
            empty="The group has no step in this state at this moment.",
            width="full",
        ),
        Panel(
            title="Which action wins",
            explains="A row is an action, a dot one visit, placed by the return that followed: "
            "further right is better. Blue visits become more likely, orange ones less.",
            query=of_state(ACTIONS),
            tables=[steps, TERMS],
            show=partial(show_actions, asked),
            empty="Nothing was tried here.",
            width="full",
        ),
        Panel(
            title="Has the policy learnt it",
            explains="How often each action was chosen in this state, by policy version: "
            "all attempts at this task.",
            query=fill(
                LEARNT,
                group=group,
                state=state,
                characters=ACTION_CHARACTERS,
                buckets=VERSION_BUCKETS,
                actions=SHARE_ACTIONS,
                other=OTHER,
            ),
            show=show_learnt,
            later=True,
        ),
        Panel(
            title="Other states of this group",
            explains="Where the choice of action mattered most comes first.",
            query=of_state(ELSEWHERE),
            tables=[steps, TERMS],
            show=partial(show_states, asked, group),
        ),
        Panel(
            title="Visits",
            explains="Each visit of the state: what was done, what it was worth, where it led.",
            query=of_state(VISITS),
            tables=[steps, TERMS],
            show=partial(show_visits, asked, group),
            width="full",
        ),
    ]


def wrong_states(asked: PageRequest, *, rows: int) -> Panel:
    """Return the panel of the states in which the policy still loses most return."""
    return Panel(
        title="Where the policy still goes wrong",
        explains=f"States of the groups of the last {RECENT_STEPS} learner steps in which one "
        "action, in at least two episodes, gave more than what the policy usually does. The "
        "costliest come first. Tasks that were always lost are not here, as nothing can be "
        "compared: see Task over time.",
        tables=[batches_steps(asked, RECENT_STEPS), TERMS],
        query=fill(
            WRONG,
            rows=rows,
            characters=ACTION_CHARACTERS,
            state_characters=STATE_CHARACTERS,
        ),
        show=partial(show_wrong, asked),
        empty="In no state did one action, tried in two episodes, give more than the others.",
        width="full",
        later=True,
    )


def show_wrong(asked: PageRequest, table: pa.Table) -> Markup:
    """Show the costliest states. Each leads to its page."""
    links = {
        "state": asked.row_link("/anchor", {"group": "group_uid", "state": "state_hash"}),
        "task": asked.row_link("/task", {"task": "task"}),
    }
    return show_rows(table, links=links, hints=HINTS, hidden=("group_uid", "state_hash"))


def show_state(asked: PageRequest, group: uuid.UUID, table: pa.Table) -> Markup:
    """Show the state, with links to its group and task."""
    row = table.slice(0, 1).to_pylist()[0]
    return html(
        "anchor_state.html",
        row=row,
        group=asked.link("/group", group=group),
        graph=asked.link("/graph", group=group),
        task=asked.link("/task", task=row["task_id"]),
    )


def show_actions(asked: PageRequest, table: pa.Table) -> Markup:
    """Show each action with its visits as dots on a common scale of returns."""
    rows = table.to_pylist()
    tried = [row for row in rows if row["visits"]]
    dots = [dot for row in tried for dot in row["dots"]]
    returns = [dot["step_return"] for dot in dots]
    low, high = min(returns), max(returns)
    largest = max(abs(dot["step_advantage"]) for dot in dots)
    for row in tried:
        row["strip"] = [
            _dot(asked, dot, low=low, high=high, largest=largest) for dot in row["dots"]
        ]
        row["mean_at"] = _position(row["mean_return"], low=low, high=high)
        row["shade"] = shade_class(row["step_advantage"], largest)
    return html(
        "anchor_actions.html",
        tried=tried,
        untried=[row["action"] for row in rows if not row["visits"]],
        differ=high > low,
        low=low,
        high=high,
        middle=_position(sum(returns) / len(returns), low=low, high=high),
        width=STRIP_WIDTH,
    )


def show_learnt(table: pa.Table) -> Chart:
    """Draw the share of each action over policy versions."""
    rows = table.to_pylist()
    by_version: dict[int, dict[str, int]] = {}
    totals: dict[str, int] = {}
    for row in rows:
        by_version.setdefault(row["version"], {})[row["action"]] = row["visits"]
        totals[row["action"]] = totals.get(row["action"], 0) + row["visits"]
    actions = sorted(totals, key=lambda action: (action == OTHER, -totals[action]))
    columns: dict[str, list[Any]] = {"version": [f"{version}" for version in by_version]}
    names = {"version": "policy version"}
    for number, action in enumerate(actions):
        names[f"action_{number}"] = plain(action, at_most=30)
        columns[f"action_{number}"] = [
            counts.get(action, 0) / sum(counts.values()) for counts in by_version.values()
        ]
    shares = [name for name in columns if name != "version"]
    return bars(pa.table(columns), x="version", y=shares, names=names, is_fraction=True)


def show_states(asked: PageRequest, group: uuid.UUID, table: pa.Table) -> Markup:
    """Show the group's anchor states. Each leads to its page."""
    anchor = asked.row_link("/anchor", {"state": "state_hash"}, group=group)
    return show_rows(table, links={"state": anchor}, hints=HINTS, hidden=("state_hash",))


def show_visits(asked: PageRequest, group: uuid.UUID, table: pa.Table) -> Markup:
    """Show each visit, with links to its transcript and to the state that followed."""
    links = {
        "action": asked.row_link("/trajectory", {"traj": "traj_uid", "step": "step"}),
        "leads_to": asked.row_link("/anchor", {"state": "next_hash"}, group=group),
    }
    return show_rows(table, links=links, hints=HINTS, hidden=("traj_uid", "next_hash"))


def _dot(
    asked: PageRequest, dot: Mapping[str, Any], *, low: float, high: float, largest: float
) -> dict[str, Any]:
    outcome = "won" if dot["won"] else "not won"
    return {
        "at": _position(dot["step_return"], low=low, high=high),
        "shade": shade_class(dot["step_advantage"], largest),
        "link": asked.link("/trajectory", traj=dot["traj_uid"], step=dot["step_index"]),
        "title": f"episode {dot['member']}, step {dot['step_index']}, {outcome}: return "
        f"{dot['step_return']:.2f}, step advantage {dot['step_advantage']:+.2f}",
    }


def _position(value: float, *, low: float, high: float) -> float:
    """Return the place of a return on the strip, in units of its width."""
    if high == low:
        return STRIP_WIDTH / 2
    return STRIP_MARGIN + (value - low) / (high - low) * (STRIP_WIDTH - 2 * STRIP_MARGIN)


PAGE = Page(
    path="/anchor",
    title="Anchor state",
    question="Which action wins in this state, and does the policy choose it?",
    panels=panels,
    follows=False,
    example='SELECT group_uid AS "group", state_hash AS state FROM anchor_groups '
    "ORDER BY n_trajectories DESC, group_uid, state_hash LIMIT 1",
)

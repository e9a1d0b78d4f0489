"""Show the state graph: where the episodes of a group went, and which ways paid.

States are nodes, merged over the episodes; actions are edges. A node's colour is the mean return
that followed from there, an edge's colour the mean step advantage of what was done.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from analysis.view.graph_layout import DENSE, ROOMY, Layout, lay_out
from analysis.view.group_query import NEWEST_GROUP, TERMS, group_steps
from analysis.view.html import html, json_script, number
from analysis.view.page import Page, PageRequest
from analysis.view.panel import Panel, show_rows
from analysis.view.shades import SHADES, shade_class
from analysis.view.sql_text import fill
from analysis.view.text import plain

MAX_STATES = 150  # nodes of their own: the most visited ones; the rest is one node
MAX_EDGES = 400  # that are drawn
MAX_MOVES = 4_000  # rows of the query: some 25 for each state; the "Moves" are a table
TASK_GROUPS = 40  # the newest ones of a task
ROOMY_STATES = 24  # up to here nodes have room for a text
VALUES = 4  # shades of a node
TEXT_CHARACTERS = 300  # of a state or an action, in a box beside the graph
LINE_CHARACTERS = 25  # of each of the two lines in a roomy node
LABEL_CHARACTERS = 20  # of the action on an edge
TITLE_ACTION_CHARACTERS = 80  # of an action in the text under the pointer, which is one line
TITLE_STATE_CHARACTERS = 120  # of a state there
LISTED_ACTION_CHARACTERS = 60  # of each action in the box of an edge
LISTED_ACTIONS = 12  # in the box of an edge: the most frequent ones
NO_DIFFERENCE = 1e-6  # advantages below it are rounding
LAST_ROW = 1 << 62  # stands for the first step of "all other states", which are drawn last
THINNEST, THICKEST = 1.0, 8.0
FREQUENT = 20  # visits of a way as thick as can be, or more if the graph has more
WON, LOST, CUT_OFF = "won", "lost", "cut off"
ENDINGS = (WON, LOST, CUT_OFF)
NO_ANCHOR, OTHER = "none", "other"
MERGED = {NO_ANCHOR: "steps without an anchor state", OTHER: "all other states"}

ABOUT = """
SELECT task_id, n_won, n_members, state FROM groups WHERE group_uid = $group
"""
# `steps` of the task's newest groups only, also for advantages(): it reads the nearest `steps`.
OF_TASK = """
WITH chosen AS (
    SELECT group_uid, version_min, version_max FROM groups
    WHERE task_id = $task AND n_steps > 0 ORDER BY opened_at DESC, group_uid LIMIT $groups)
SELECT s.* EXCLUDE (prompt_ids, response_ids, response_logprobs, images)
FROM steps AS s SEMI JOIN chosen USING (group_uid)
WHERE version_min >= (SELECT min(version_min) FROM chosen)
  AND version_max <= (SELECT max(version_max) FROM chosen)
"""
MOVES = Path(__file__).with_name("graph_moves.sql").read_text().rstrip()
HINTS = {
    "mean_return": "discounted rewards from this step to the end of its episode, less penalties",
    "step_advantage": "A_S: how far the return is above that of the other visits of the state",
    "won": "fraction of these visits whose episode was won",
    "leads_to": "the state after the action; at the end, where it is not known, the outcome",
}


@dataclass(kw_only=True, slots=True)
class State:
    """A node that is no ending: the visits of one state."""

    node: str
    text: str
    group: str
    number: int = 0  # by first visit, from 1
    first_step: int = 0
    visits: int = 0
    starts: int = 0
    ends: int = 0  # episodes that were not won, and whose final observation is this state
    return_sum: float = 0.0
    won_sum: float = 0.0
    actions: set[str] = field(default_factory=set)

    @property
    def mean_return(self) -> float:
        """Return the mean return that followed."""
        return self.return_sum / self.visits

    @property
    def won(self) -> float:
        """Return the fraction of visits whose episode was won."""
        return self.won_sum / self.visits

    @property
    def is_merged(self) -> bool:
        """Tell whether it is not one state."""
        return self.node in MERGED


@dataclass(kw_only=True, slots=True)
class Edge:
    """All actions that led from one node to another."""

    begin: str
    end: str
    moves: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def visits(self) -> int:
        """Return how often it was gone."""
        return sum(move["visits"] for move in self.moves)

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the visits."""
        total: float = sum(move[name] * move["visits"] for move in self.moves)
        return total / self.visits


def panels(asked: PageRequest) -> Sequence[Panel]:
    """Return the graph of a group or of a task: the newest mixed group if none is named."""
    group, task = asked.uid("group"), asked.text("task")
    query = fill(MOVES, states=MAX_STATES, characters=TEXT_CHARACTERS, rows=MAX_MOVES)
    if group is None and task is not None:
        steps = ("steps", fill(OF_TASK, task=task, groups=TASK_GROUPS))
    else:
        if group is None:
            newest = asked.rows(NEWEST_GROUP)
            group = uuid.UUID(newest[0]["group_uid"]) if newest else uuid.UUID(int=0)
        steps = group_steps(asked, group)
    is_task = group is None
    empty = "No step of it is there at this moment."
    return [
        Panel(
            title="Graph",
            explains="From top to bottom: states by their first visit. A greener state is worth "
            "more; a blue way was better than the others from its state, an orange one worse. An "
            "episode that is not won ends in the state that it saw last, where that is known.",
            query=query,
            tables=[steps, TERMS],
            show=partial(show_graph, asked),
            empty=empty,
            width="full",
            above=_scope(asked, group, task),
            later=is_task,
            alone=is_task,
        ),
        Panel(
            title="Moves",
            explains="The same in words: what was done in each state, where it led, and what the "
            "return was. States in the order of the graph, better moves first.",
            query=query,
            tables=[steps, TERMS],
            show=partial(show_moves, asked),
            empty=empty,
            width="full",
            later=is_task,
            alone=is_task,
        ),
    ]


def show_graph(asked: PageRequest, table: pa.Table) -> Markup:
    """Draw the graph, with its states as a table beside it."""
    rows = table.to_pylist()
    states, edges = states_of(rows), edges_of(rows)
    loops = [edge for edge in edges if edge.begin == edge.end and edge.begin in MERGED]
    others = [edge for edge in edges if edge not in loops]
    drawn = sorted(others, key=lambda edge: -edge.visits)[:MAX_EDGES]
    ends = {edge.end for edge in edges}
    ended = [ending for ending in ENDINGS if ending in ends]
    layout, is_roomy = _layout(states, drawn, ended)
    largest = max((abs(edge.mean("step_advantage")) for edge in drawn), default=0.0)
    # With few visits all ways are thin: thickness is for what is gone often.
    most_visits = max([FREQUENT, *(edge.visits for edge in drawn)])
    low = min(state.mean_return for state in states)
    high = max(state.mean_return for state in states)
    by_node = {state.node: state for state in states}
    # Each thing that is drawn, with the cell that the box beside the graph shows for it. Frequent
    # edges come last, so that they lie above the others.
    shown_edges = [
        (
            _edge(asked, edge, layout, by_node, largest=largest, most_visits=most_visits),
            _edge_cell(asked, edge, by_node),
        )
        for edge in reversed(drawn)
    ]
    shown_nodes = [
        (_node(asked, state, layout, low=low, high=high), _node_cell(asked, state))
        for state in states
    ]
    shown_ends = [_ending(ending, edges, layout) for ending in ended]
    everything = [*shown_edges, *shown_nodes, *shown_ends]
    for number_of_cell, (shown, _) in enumerate(everything):
        shown["cell"] = number_of_cell
    return html(
        "graph.html",
        layout=layout,
        sizes=ROOMY if is_roomy else DENSE,
        is_roomy=is_roomy,
        edges=[shown for shown, _ in shown_edges],
        nodes=[shown for shown, _ in shown_nodes],
        ends=[shown for shown, _ in shown_ends],
        data=json_script([cell for _, cell in everything], kind="cells"),
        shades=[shade_class(level, SHADES) for level in range(-SHADES, SHADES + 1)],
        values=range(VALUES + 1),
        largest=largest,
        low=low,
        high=high,
        n_states=sum(not state.is_merged for state in states),
        n_moves=len(rows),
        n_won=sum(edge.visits for edge in edges if edge.end == WON),
        n_ended=sum(row["ends"] for row in rows),
        n_edges_left_out=len(edges) - len(loops) - len(drawn),
        has_other=OTHER in by_node,
        max_states=MAX_STATES,
        is_cut=len(rows) >= MAX_MOVES,
        worst=_most_decisive_move(asked, rows, by_node, sign=-1),
        best=_most_decisive_move(asked, rows, by_node, sign=1),
    )


def show_moves(asked: PageRequest, table: pa.Table) -> Markup:
    """Show each action of each state as a row."""
    rows = table.to_pylist()
    by_node = {state.node: state for state in states_of(rows)}

    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return (by_node[row["node"]].number, -row["mean_return"], row["action"], row["leads_to"])

    def name(node: str) -> str:
        return node if node not in by_node else f"{by_node[node].number} {by_node[node].text}"

    listed = [
        {
            "state": name(row["node"]),
            "action": row["action"] + ("" if row["is_valid"] else "  (invalid)"),
            "leads_to": name(row["leads_to"]),
            "visits": row["visits"],
            "episodes": row["episodes"],
            "mean_return": row["mean_return"],
            "step_advantage": round(row["step_advantage"], 6),
            "won": row["won"],
            "begin": _anchor(asked, by_node.get(row["node"])),
            "end": _anchor(asked, by_node.get(row["leads_to"])),
        }
        for row in sorted(rows, key=order)
    ]
    return show_rows(
        pa.Table.from_pylist(listed),
        links={"state": lambda row: row["begin"], "leads_to": lambda row: row["end"]},
        hints=HINTS,
        hidden=("begin", "end"),
    )


def states_of(rows: Sequence[Mapping[str, Any]]) -> list[State]:
    """Return the states of the moves, numbered by their first visit."""
    found: dict[str, State] = {}
    for row in rows:
        node = row["node"]
        if node not in found:
            text = MERGED.get(node) or row["state"] or "a state without a text"
            found[node] = State(
                node=node, text=text, group=row["group_uid"], first_step=row["first_step"]
            )
        state = found[node]
        state.first_step = min(state.first_step, row["first_step"])
        state.visits += row["visits"]
        state.starts += row["starts"]
        state.return_sum += row["mean_return"] * row["visits"]
        state.won_sum += (row["won"] or 0.0) * row["visits"]
        state.actions.add(row["action"])
    for row in rows:
        if row["leads_to"] in found:
            found[row["leads_to"]].ends += row["ends"]
    states = sorted(
        found.values(),
        key=lambda state: (state.node == OTHER, state.first_step, -state.visits, state.node),
    )
    for number_of_state, state in enumerate(states, start=1):
        state.number = number_of_state
    return states


def edges_of(rows: Sequence[Mapping[str, Any]]) -> list[Edge]:
    """Return the edges: moves with the same ends are one."""
    found: dict[tuple[str, str], Edge] = {}
    for row in rows:
        ends = row["node"], row["leads_to"]
        found.setdefault(ends, Edge(begin=ends[0], end=ends[1])).moves.append(row)
    return list(found.values())


def _layout(
    states: Sequence[State], edges: Sequence[Edge], ended: Sequence[str]
) -> tuple[Layout, bool]:
    """Return the layout, and whether its nodes have room for texts."""
    by_step: dict[int, list[str]] = {}
    for state in states:
        step = state.first_step if state.node != OTHER else LAST_ROW
        by_step.setdefault(step, []).append(state.node)
    rows = [by_step[step] for step in sorted(by_step)]
    is_roomy = len(states) <= ROOMY_STATES and max(len(row) for row in rows) <= ROOMY.row_at_most
    if ended:
        rows.append(list(ended))
    ends = {(edge.begin, edge.end) for edge in edges}
    return lay_out(rows, ends, sizes=ROOMY if is_roomy else DENSE), is_roomy


def _edge(
    asked: PageRequest,
    edge: Edge,
    layout: Layout,
    by_node: Mapping[str, State],
    *,
    largest: float,
    most_visits: int,
) -> dict[str, Any]:
    """Return how an edge is drawn, by the largest advantage and the most visits of all edges."""
    label = plain(_usual_action(edge), at_most=LABEL_CHARACTERS)
    n_more, advantage = len(edge.moves) - 1, edge.mean("step_advantage")
    return {
        "curve": layout.edges[edge.begin, edge.end],
        "begin": edge.begin,
        "end": edge.end,
        "link": _anchor(asked, by_node[edge.begin]),
        "shade": shade_class(advantage, largest),
        "thickness": THINNEST + (THICKEST - THINNEST) * (edge.visits / most_visits) ** 0.5,
        "is_invalid": not any(move["is_valid"] for move in edge.moves),
        "label": label + (f" +{n_more}" if n_more else ""),
        "title": f"{_actions(edge)}: state {_ends(edge, by_node)}, {edge.visits} visits, mean "
        f"return {edge.mean('mean_return'):.3g}, step advantage {advantage:+.2f}",
    }


def _edge_cell(asked: PageRequest, edge: Edge, by_node: Mapping[str, State]) -> Mapping[str, str]:
    """Return the text of an edge in the box beside the graph."""
    frequent = sorted(edge.moves, key=lambda move: -move["visits"])[:LISTED_ACTIONS]
    return {
        "what": f"{_actions(edge)}, from state {_ends(edge, by_node)}",
        "text": "; ".join(
            f"{plain(move['action'], at_most=LISTED_ACTION_CHARACTERS)}"
            f"{'' if move['is_valid'] else ' (invalid)'} × {move['visits']}"
            for move in frequent
        ),
        "visits": f"{edge.visits}",
        "return": f"{edge.mean('mean_return'):.3g} on average",
        "advantage": f"{edge.mean('step_advantage'):+.2f} on average",
        "won": f"{edge.mean('won'):.0%} of the visits",
        "anchor": _anchor(asked, by_node[edge.begin]) or "",
    }


def _usual_action(edge: Edge) -> str:
    """Return the action that was done most often."""
    usual: str = max(edge.moves, key=lambda move: move["visits"])["action"]
    return usual


def _actions(edge: Edge) -> str:
    """Return the usual action, and how many others led the same way."""
    others = f" and {len(edge.moves) - 1} more" if len(edge.moves) > 1 else ""
    return plain(_usual_action(edge), at_most=TITLE_ACTION_CHARACTERS) + others


def _ends(edge: Edge, by_node: Mapping[str, State]) -> str:
    """Return the two ends of an edge: `3 to state 4`, `3 to won`."""
    goal = f"state {by_node[edge.end].number}" if edge.end in by_node else edge.end
    return f"{by_node[edge.begin].number} to {goal}"


def _node(
    asked: PageRequest, state: State, layout: Layout, *, low: float, high: float
) -> dict[str, Any]:
    """Return how a state is drawn, by the lowest and the highest mean return of all states."""
    text = _node_text(state)
    return {
        "state": state,
        "at": layout.nodes[state.node],
        "link": _anchor(asked, state),
        "value": round((state.mean_return - low) / (high - low) * VALUES) if high > low else 0,
        "lines": _lines(text),
        "text": text,
        "title": f"state {state.number}: {text[:TITLE_STATE_CHARACTERS]}, {state.visits} visits, "
        f"mean return {number(state.mean_return)}",
    }


def _node_cell(asked: PageRequest, state: State) -> Mapping[str, str]:
    """Return the text of a state in the box beside the graph."""
    return {
        "what": f"state {state.number}, first met at step {state.first_step}",
        "text": _node_text(state),
        "visits": f"{state.visits}, with {len(state.actions)} different actions"
        + (f", {state.starts} episodes begin here" if state.starts else "")
        + (f", {state.ends} end here and are not won" if state.ends else ""),
        "return": f"{state.mean_return:.3g} on average from here",
        "advantage": "is that of its actions",
        "won": f"{state.won:.0%} of the visits",
        "anchor": _anchor(asked, state) or "",
    }


def _node_text(state: State) -> str:
    return plain(state.text, at_most=TEXT_CHARACTERS).replace("\\n", " ")


def _ending(
    ending: str, edges: Sequence[Edge], layout: Layout
) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return how an outcome is drawn, and its text in the box beside the graph."""
    n_ended = sum(edge.visits for edge in edges if edge.end == ending)
    shown = {"name": ending, "at": layout.nodes[ending], "episodes": n_ended}
    what = f"the end of {n_ended} episodes: {ending}"
    return shown, {"what": what, "visits": f"{n_ended}", "anchor": ""}


def _most_decisive_move(
    asked: PageRequest,
    rows: Sequence[Mapping[str, Any]],
    by_node: Mapping[str, State],
    *,
    sign: int,
) -> dict[str, Any] | None:
    """Return the move that loses (sign -1) or gains most, over its visits."""
    some = [
        row
        for row in rows
        if row["step_advantage"] * sign > NO_DIFFERENCE and row["node"] not in MERGED
    ]
    if not some:
        return None
    row = max(some, key=lambda row: sign * row["step_advantage"] * row["visits"])
    state = by_node[row["node"]]
    return {**row, "number": state.number, "link": _anchor(asked, state)}


def _anchor(asked: PageRequest, state: State | None) -> str | None:
    if state is None or state.is_merged:
        return None
    return asked.link("/anchor", group=state.group, state=state.node)


def _lines(text: str) -> list[str]:
    """Break a text into two lines for a node."""
    if len(text) <= LINE_CHARACTERS:
        return [text]
    space = text.rfind(" ", 0, LINE_CHARACTERS + 1)
    at = space if space > LINE_CHARACTERS // 2 else LINE_CHARACTERS
    rest = text[at:].strip()
    return [text[:at], rest if len(rest) <= LINE_CHARACTERS else rest[: LINE_CHARACTERS - 1] + "…"]


def _scope(asked: PageRequest, group: uuid.UUID | None, task: str | None) -> Markup:
    """Return what the graph is of, with links to the alternatives."""
    found = asked.rows(fill(ABOUT, group=group)) if group is not None else []
    about = found[0] if found else None
    of_task = task if about is None else about["task_id"]
    return html(
        "graph_scope.html",
        about=about,
        task=of_task,
        n_groups=TASK_GROUPS,
        group_link=asked.link("/group", group=group) if about else None,
        what_if=asked.link("/whatif", group=group) if about else None,
        whole_task=asked.link("/graph", task=of_task) if about else None,
        task_link=asked.link("/task", task=of_task) if of_task is not None else None,
    )


PAGE = Page(
    path="/graph",
    title="State graph",
    question="Which ways did the attempts take, where do they part, and which ones pay?",
    panels=panels,
    follows=False,
    example='SELECT group_uid AS "group" FROM groups WHERE n_steps > 0 ORDER BY opened_at LIMIT 1',
)

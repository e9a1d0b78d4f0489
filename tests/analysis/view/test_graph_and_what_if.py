"""The graph of states, and the comparison with another setting, on figures worked out by hand.

Both episodes of a group of the test run go room 0, a step without an anchor, room 2, the end, with
rewards 0, 1 and 2; the first is won. The action of the first step is invalid: a penalty of 0.1.
"""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from analysis.view.graph_layout import DENSE, lay_out, order_rows
from analysis.view.pages.graph import edges_of, states_of
from store import RunLayout, open_run
from tests.analysis.view.conftest import HOSTILE


@pytest.fixture(scope="module")
def group(layout: RunLayout) -> str:
    with open_run(layout.root) as reader:
        (row,) = reader.rows(
            "SELECT group_uid FROM groups WHERE state = 'trained' ORDER BY task_id LIMIT 1"
        )
    return str(row["group_uid"])


def test_the_graph_of_a_group(client: TestClient, group: str) -> None:
    page = client.get("/graph", params={"group": group}).text
    text = " ".join(re.sub("<[^>]+>", " ", page).split())
    assert "2 states, 4 moves; 1 of 2 episodes won" in text
    assert len(re.findall(r'class="node[" ]', page)) == 5, "three nodes, won and lost"
    # 0 + 0.95 * 1 + 0.95^2 * 2 - 0.1 = 2.655 follows from room 0
    assert "2.65 on average from here" in page or "2.66 on average from here" in page
    assert page.count("/anchor?group=") >= 2 and f"/whatif?group={group}" in page


def test_the_graph_of_a_task_takes_a_hostile_name(client: TestClient) -> None:
    page = client.get("/graph", params={"task": HOSTILE, "panel": "graph"}).text
    assert "1 of 2 episodes won" in page and "<script>alert" not in page
    assert client.get("/graph", params={"group": "x"}).status_code == 400


def test_moves_with_the_same_ends_are_one_edge() -> None:
    row = {"state": "a", "group_uid": "g", "first_step": 0, "starts": 1, "ends": 0, "won": 1.0}
    move = row | {"node": "a", "leads_to": "a", "step_advantage": 0.0}
    rows = [
        move | {"action": "x", "visits": 3, "mean_return": 1.0},
        move | {"action": "y", "visits": 1, "mean_return": 5.0},
    ]
    (state,), (edge,) = states_of(rows), edges_of(rows)
    assert (state.visits, state.mean_return, state.number) == (4, 2.0, 1)
    assert (edge.visits, edge.mean("mean_return")) == (4, 2.0)


def test_a_layout_crosses_few_edges_and_is_the_same_again() -> None:
    edges = {("a", "d"), ("b", "c"), ("d", "a"), ("c", "c"), ("a", "b")}
    assert order_rows([["a", "b"], ["c", "d"]], edges) in (
        [["a", "b"], ["d", "c"]],
        [["b", "a"], ["c", "d"]],
    )
    layout = lay_out([["a", "b"], ["c", "d"]], edges, sizes=DENSE)
    assert layout == lay_out([["a", "b"], ["c", "d"]], edges, sizes=DENSE)
    assert set(layout.edges) == edges
    assert len({*layout.nodes.values()}) == 4


def test_what_if_counts_the_flips(client: TestClient, group: str) -> None:
    same = client.get("/whatif", params={"group": group, "omega": ""}).text
    assert "Nothing is changed" in same and "No step flips" in same
    page = client.get("/whatif", params={"group": group}).text
    assert "With omega 0, no step would be pushed the other way" in page
    assert "<small>of 6</small>" in page and 'value="0"' in page


def test_a_bad_setting_is_said_once_in_one_line(client: TestClient, group: str) -> None:
    for name, value in {"gamma": "2", "omega": "x", "estimator": HOSTILE}.items():
        page = client.get("/whatif", params={"group": group, name: value})
        errors = re.findall(r'class="error">([^<]*)', page.text)
        assert page.status_code == 200 and len(errors) == 1 and "<script>alert" not in page.text
        assert errors[0].startswith(name) and "\n" not in errors[0]
        assert "Weigh again" in page.text and "Steps that flip" not in page.text
    assert client.get("/whatif", params={"steps": "0"}).status_code == 400

"""Pages of an anchor state, an episode and a task: figures that were worked out by hand."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from starlette.testclient import TestClient

from analysis.view.server import make_app
from store import RunLayout, open_run, state_hash
from tests.analysis.view.worked_run import HOSTILE, LONG, make_worked_run

TOKEN = "the-token"
MAZE_1 = "SELECT group_uid::VARCHAR AS uid FROM groups WHERE task_id = 'maze' AND version_min = 1"


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return make_worked_run(tmp_path_factory.mktemp("worked") / "run")


@pytest.fixture(scope="module")
def viewer(worked: RunLayout) -> Iterator[TestClient]:
    app = make_app([worked.root], token=TOKEN)
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield client


def one(layout: RunLayout, query: str) -> str:
    with open_run(layout.root) as reader:
        (row,) = reader.rows(query)
    return str(row["uid"])


def episode(layout: RunLayout, member: int, *, task: str = "maze", version: int = 1) -> str:
    return one(
        layout,
        "SELECT DISTINCT traj_uid::VARCHAR AS uid FROM steps "
        f"WHERE task_id = '{task}' AND version_min = {version} AND member = {member}",
    )


def state(text: str) -> str:
    return str(uuid.UUID(bytes=state_hash(text)))


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def words(page: str) -> str:
    """The text of a page in one line."""
    parser = _Words()
    parser.feed(page)
    return " ".join(" ".join(parser.found).split())


def panel(page: str, title: str) -> str:
    """The part of a page that is one panel, without its query."""
    (found,) = re.findall(rf'<section[^>]*id="[^"]*{title}"[^>]*>.*?</section>', page, re.DOTALL)
    return re.sub(r'<div class="sql".*?</div>', "", found, flags=re.DOTALL)


def rows_of(part: str) -> list[str]:
    return [words(row) for row in re.findall(r"<tr>?.*?</tr>", part, re.DOTALL)]


def test_the_action_that_pays_best_is_named(viewer: TestClient, worked: RunLayout) -> None:
    group = one(worked, MAZE_1)
    page = viewer.get("/anchor", params={"group": group, "state": state("hall")})
    assert page.status_code == 200
    shown = panel(page.text, "which-action-wins")
    # open door: (4 + 4 + 0) / 3; go back and wait: 0. The mean of all five visits is 8 / 5.
    assert "open door pays best: a return of 2.67 on average, 0 after wait." in words(shown)
    _, first, *others = rows_of(shown)
    assert re.search(r"open door .* 2\.67 \+1\.07 3 3 67 %$", first)
    assert {re.sub(r" step .*", "", row)[:7] for row in others} == {"go back", "wait in"}
    assert all(row.endswith("0 -1.60 1 1 0 %") for row in others)
    assert "never tried by this group: jump ." in words(shown)
    assert re.findall(r"<dd>(\d+)", panel(page.text, "state"))[:3] == ["5", "4", "3"]


def test_an_episode_that_is_not_won_leads_to_the_state_that_it_saw_last(
    viewer: TestClient, worked: RunLayout
) -> None:
    group = one(worked, MAZE_1)
    hall = f"/anchor?state={state('hall')}&amp;group={group}"
    page = viewer.get("/anchor", params={"group": group, "state": state("room")}).text
    visits = panel(page, "visits")
    assert [row[row.index("the end") :] for row in rows_of(visits)[1:]] == [
        *["the end"] * 2,
        "the end: hall",
    ]
    assert visits.count(hall) == 1
    cave = one(worked, MAZE_1.replace("maze", "cave").replace("= 1", "= 2"))
    shown = viewer.get("/anchor", params={"group": cave, "state": state(LONG)}).text
    assert "the end: hall" in shown and f"state={state('hall')}" not in shown, "no step is there"
    graph = viewer.get("/graph", params={"group": group}).text
    assert "2 states, 5 moves; 2 of 4 episodes won" in words(graph)
    assert "2 end here" in words(graph) and "end-cut-off" not in graph
    assert "end-cut-off" in viewer.get("/graph", params={"group": cave}).text


def test_the_return_that_is_lost_is_counted(viewer: TestClient) -> None:
    page = viewer.get("/anchor", params={"panel": "where-the-policy-still-goes-wrong"})
    rows = rows_of(page.text)[1:]
    # the room: gold is worth 8, three visits had 16; the hall: 5 visits x 8/3 - 8
    assert rows[0].endswith("maze 3 take gold take gold 2 8 2.67") and "room" in rows[0]
    assert rows[1].endswith("maze 5 open door open door 3 5.33 1.07") and "hall" in rows[1]
    assert len(rows) == 2, "a state in which all actions paid the same loses nothing"


def test_a_state_that_was_not_met_is_said(viewer: TestClient, worked: RunLayout) -> None:
    group = one(worked, MAZE_1)
    page = viewer.get("/anchor", params={"group": group, "state": state("nowhere")})
    assert page.status_code == 200 and "has no step in this state" in page.text
    assert viewer.get("/anchor", params={"group": "x", "state": "y"}).status_code == 400


def test_a_step_shows_its_advantage_and_its_parts(viewer: TestClient, worked: RunLayout) -> None:
    page = viewer.get("/trajectory", params={"traj": episode(worked, 3)}).text
    steps = re.findall(r'<details class="step".*?</div>\n</div>\n</details>', page, re.DOTALL)
    assert len(steps) == 2
    hall, room = (words(step) for step in steps)
    # Episode returns are 8, 8, 0, 0: A_E = 0 - 4. The hall's mean is 1.6, the room's 16 / 3.
    assert "advantage A -5.60 episode A E -4.00 step A S -1.60 return from here 0" in hall
    assert "advantage A -9.33 episode A E -4.00 step A S -5.33 return from here 0" in room
    assert "4 other visits of this state" in hall and "2 other visits of this state" in room
    assert "what the group did here return visits take gold 8 2 take dust 0 1" in room
    assert "30 tokens, were cut to fit" in room and "2 earlier turns" in room
    assert "New weights arrived" in room and "New weights arrived" not in hall
    assert "1.5 s engine, 20 ms environment" in hall
    assert "cut off here" in room
    assert "saw in the end You have left the room." in room and "saw in the end" not in hall
    assert (
        "Step 1 cost most: take dust was followed by a return of 0; take gold gave the group 8 in "
        "the same state on average." in words(page)
    )


def test_the_best_attempt_has_no_costly_step(viewer: TestClient, worked: RunLayout) -> None:
    page = words(viewer.get("/trajectory", params={"traj": episode(worked, 0)}).text)
    assert "cost most" not in page and "outcome won return 8 steps 2" in page


def test_tokens_are_shaded_by_their_probability(viewer: TestClient, worked: RunLayout) -> None:
    page = viewer.get("/trajectory", params={"traj": episode(worked, 0), "step": 0}).text
    strips = re.findall(r'<div class="mono text tokens">(.*?)</div>', page)
    tokens = re.findall(
        r'<span class="tok (tok-\d)" title="([^"]*)">(.*?)</span>(?=<span class="tok|$)', strips[0]
    )
    # e^-0.0625 = 0.94, e^-0.5 = 0.61, e^-1.5 = 0.22, e^-2.5 = 0.082, e^-4 = 0.018
    assert [shade for shade, _, _ in tokens] == [
        "tok-0",
        "tok-1",
        "tok-2",
        "tok-3",
        "tok-4",
        "tok-0",
    ]
    assert [tip for _, tip, _ in tokens][:2] == ["-0.06: 94 %, token 0", "-0.50: 61 %, token 1"]
    assert [words(text) for _, _, text in tokens] == [
        *("take", "gold", "·", "é", "<script>alert(1)</script>", "⟨99⟩"),
    ]
    assert "<script>alert" not in page
    assert "take gold take" in words(page), "the prompt, with its line feed"


def test_a_picture_is_drawn_from_its_pixels(viewer: TestClient, worked: RunLayout) -> None:
    page = viewer.get("/trajectory", params={"traj": episode(worked, 0)}).text
    (address,) = re.findall(r'<img class="seen" src="([^"]*)"', page)
    assert address.startswith("data:image/png;base64,")


def test_an_episode_leads_to_its_neighbours(viewer: TestClient, worked: RunLayout) -> None:
    lsn = viewer.get("/lsn").json()["lsn"]
    address = {"traj": episode(worked, 1), "step": 1, "as_of": lsn}
    page = viewer.get("/trajectory", params=address).text
    assert f'rel="prev" href="/trajectory?traj={episode(worked, 0)}&amp;as_of={lsn}"' in page
    assert f'rel="next" href="/trajectory?traj={episode(worked, 2)}&amp;as_of={lsn}"' in page
    group = one(worked, MAZE_1)
    assert f'href="/anchor?group={group}&amp;state={state("room")}&amp;as_of={lsn}"' in page
    assert f'href="/group?group={group}&amp;as_of={lsn}"' in page
    assert f'href="/task?task=maze&amp;as_of={lsn}"' in page
    assert re.findall(r'id="step-(\d)" open data-scroll-here', page) == ["1"]
    assert page.count('<details class="step"') == 2


def test_a_start_without_an_episode_shows_a_lost_one(viewer: TestClient) -> None:
    page = words(viewer.get("/trajectory").text)
    assert "outcome cut off return 0 steps 2" in page and "go back" in page


@pytest.mark.parametrize(
    "address",
    [
        "/trajectory?traj=x",
        f"/trajectory?traj={uuid.UUID(int=1)}",
        f"/trajectory?traj={uuid.UUID(int=1)}&step=x",
        "/task?task=unknown",
        "/task?task=%00",
        "/task?text=%00",
    ],
)
def test_a_bad_address_is_explained_in_a_line(address: str, viewer: TestClient) -> None:
    answer = viewer.get(address)
    assert answer.status_code == 400
    (reason,) = re.findall(r'class="error">([^<]*)', answer.text)
    assert reason.strip() and "\n" not in reason.strip()


def test_a_step_that_is_no_step_is_explained(viewer: TestClient, worked: RunLayout) -> None:
    traj = episode(worked, 0)
    assert viewer.get(f"/trajectory?traj={traj}&step=-1").status_code == 400
    assert "it has no such step" in viewer.get(f"/trajectory?traj={traj}&step=5000").text


def test_hostile_and_long_texts_are_text(viewer: TestClient, worked: RunLayout) -> None:
    traj = episode(worked, 0, task="cave", version=2)
    for page in (viewer.get(f"/trajectory?traj={traj}").text, viewer.get("/task?task=cave").text):
        assert 'class="error"' not in page
        assert "<script>alert" not in page and "&lt;script&gt;alert" in page
        assert "{{7*7}}" in page
        assert not re.search("[\x00-\x08\x1b\u202a-\u202e\u2066-\u2069\u200b]", page)
        assert len(page) < 300_000
        assert HOSTILE not in page
    page = viewer.get(f"/trajectory?traj={traj}").text
    # "You are in the ", a million letters, "."
    assert "The first 20,000 of 1,000,016 characters" in page


def test_tasks_that_are_still_lost_come_first(viewer: TestClient) -> None:
    cave, maze = rows_of(panel(viewer.get("/task").text, "tasks"))[1:]
    assert cave.startswith("cave 0 of 1") and cave.endswith("0 % 1 never 2 train")
    # maze: 2 of 4, then 2 of 2
    assert maze.startswith("maze 2 of 2") and maze.endswith("67 % 2 1 3 train")
    assert "version 1: 2 of 4 won version 3: 2 of 2 won" in maze
    assert len(rows_of(panel(viewer.get("/task?text=AZ").text, "tasks"))) == 2
    assert "No task fits" in viewer.get("/task?split=heldout").text


def test_a_task_shows_how_it_was_learnt(viewer: TestClient) -> None:
    page = viewer.get("/task?task=maze").text
    assert 'class="error"' not in page
    assert (
        "The policy has learnt it: 2 of 4 were won in its first group, 2 of 2 at version 3."
        in words(page)
    )
    shown = words(panel(page, "first-win-and-last-loss"))
    assert "step 0: open door in the attempt that won, go back in the one that lost." in shown
    assert "first win version 1, episode 0, 2 steps" in shown
    assert "last loss version 1, episode 2, 2 steps" in shown
    assert "No attempt at this task has been won yet." in viewer.get("/task?task=cave").text
    assert "it was never won" in viewer.get("/task?task=cave").text

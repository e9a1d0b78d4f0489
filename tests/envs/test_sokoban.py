"""Sokoban: the rules and rewards by hand, the rooms by properties."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import Task
from envs.sokoban import MOVES, Room, SokobanEnv, parse_room

OPTIONS: dict[str, object] = {
    "rows": 6,
    "columns": 6,
    "boxes": 2,
    "least_moves": 2,
    "most_moves": 8,
    "train_rooms": 40,
    "heldout_rooms": 10,
    "seed": 0,
}
# A box to push right onto the upper target, then one to push down onto the lower one.
ROOM = """\
# # # # # #
# P X O _ #
# _ _ _ _ #
# _ _ X _ #
# _ _ O _ #
# # # # # #"""


def task(room: str) -> Task:
    return Task(id="t", env_name="sokoban", split="train", seed=0, data={"room": room})


def started(room: str) -> SokobanEnv:
    env = SokobanEnv(OPTIONS)
    env.reset(task(room))
    return env


def test_a_room_solved_by_hand_and_what_every_move_is_worth() -> None:
    env = SokobanEnv(OPTIONS)
    first = env.reset(task(ROOM))
    assert (first.text, first.anchor, first.actions) == (
        ROOM,
        None,
        ("up", "down", "left", "right"),
    )
    moves = ("right", "down", "right", "down")
    seen = [env.step(move) for move in moves]
    # a box comes onto its target; two steps; the other box comes onto its own, which was the last
    assert [t.reward for t in seen] == pytest.approx([0.9, -0.1, -0.1, 10.9])
    assert [t.terminated for t in seen] == [t.won for t in seen] == [False, False, False, True]
    assert all(t.valid and not t.truncated for t in seen)
    assert seen[0].observation.text.splitlines()[1] == "# _ P √ _ #"
    assert seen[3].observation.text.splitlines()[3:5] == ["# _ _ P _ #", "# _ _ √ _ #"]


def test_a_box_pushed_off_its_target_costs_what_it_earned() -> None:
    env = started(ROOM.replace("# P X O _ #", "# P √ _ _ #").replace("# _ _ O _ #", "# _ _ O _ #"))
    transition = env.step("right")
    assert transition.reward == pytest.approx(-1.1)
    assert transition.observation.text.splitlines()[1] == "# _ S X _ #"


@pytest.mark.parametrize(
    ("row", "move"),
    [
        ("# P X # _ #", "right"),  # a box against a wall
        ("# P X X _ #", "right"),  # a box against a box
        ("# P X √ _ #", "right"),
        ("# P _ _ _ #", "left"),  # a wall
        ("# P _ _ _ #", "up"),
    ],
)
def test_what_is_in_the_way_stays_and_the_step_costs_all_the_same(row: str, move: str) -> None:
    room = ROOM.replace("# P X O _ #", row)
    transition = started(room).step(move)
    assert transition.observation.text == room
    assert (transition.reward, transition.valid, transition.terminated) == (
        pytest.approx(-0.1),
        True,
        False,
    )


@pytest.mark.parametrize(
    ("action", "word"),
    [
        ("Down", "down"),
        ("i push it downwards", "down"),
        # the first of up, down, left, right, still that occurs: not the first in the text
        ("left, then up", "up"),
        ("stand still", "still"),
        ("jump", None),
        ("", None),
    ],
)
def test_an_action_is_read_as_upstream_reads_it(action: str, word: str | None) -> None:
    room = ROOM.replace("# P X O _ #", "# _ X O _ #").replace("# _ _ _ _ #", "# _ P _ _ #")
    env, other = started(room), started(room)
    transition = env.step(action)
    assert transition.valid == (word is not None)
    assert transition.observation == other.step(word or "still").observation
    if word in (None, "still"):
        assert (transition.observation.text, transition.reward) == (room, pytest.approx(-0.1))


def distances_by_playing(room: Room) -> int | None:
    """Moves of a shortest solution, played forwards: nothing here is shared with how rooms are made
    but `moved`.
    """
    reached, latest = {room}, [room]
    for moves in range(1, 40):
        latest = [
            after
            for before, way in product(latest, MOVES)
            if (after := before.moved(way)) not in reached
        ]
        reached.update(latest)
        if any(after.is_solved for after in latest):
            return moves
    return None


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(5, 6),
    columns=st.integers(5, 6),
    boxes=st.integers(1, 2),
    split=st.sampled_from(["train", "heldout"]),
)
def test_every_room_can_be_solved_in_as_many_moves_as_its_task_says(
    seed: int, rows: int, columns: int, boxes: int, split: str
) -> None:
    changed = {
        "seed": seed,
        "rows": rows,
        "columns": columns,
        "boxes": boxes,
        "train_rooms": 2,
        "heldout_rooms": 2,
    }
    for task in SokobanEnv.tasks(split, OPTIONS | changed):
        room = parse_room(task.data["room"])
        assert room.to_text() == task.data["room"]
        assert (room.size, len(room.boxes), len(room.targets)) == ((rows, columns), boxes, boxes)
        assert (
            not room.is_solved
            and room.player in room.floor - room.boxes
            and room.boxes | room.targets <= room.floor
        )
        assert all(0 < row < rows - 1 and 0 < column < columns - 1 for row, column in room.floor)
        moves = distances_by_playing(room)
        assert task.data["type"] == f"{moves} moves" and moves is not None and 2 <= moves <= 8


def test_the_splits_share_no_layout_whatever_the_seed_and_the_numbers_of_rooms() -> None:
    def layouts(split: str, **changes: object) -> set[tuple[object, ...]]:
        rooms = [
            parse_room(task.data["room"]) for task in SokobanEnv.tasks(split, OPTIONS | changes)
        ]
        return {(room.floor, room.targets) for room in rooms}

    small = {"rows": 5, "columns": 5, "boxes": 1}
    assert not layouts("train", train_rooms=100, **small) & layouts(
        "heldout", heldout_rooms=20, seed=7, **small
    )
    tasks = [*SokobanEnv.tasks("train", OPTIONS), *SokobanEnv.tasks("heldout", OPTIONS)]
    assert len({task.id for task in tasks}) == len({task.data["room"] for task in tasks}) == 50
    assert tasks[:40] == SokobanEnv.tasks("train", OPTIONS)
    assert SokobanEnv.tasks("train", OPTIONS | {"train_rooms": 10}) == tasks[:10]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"size": 6}, "options missing or unknown: size"),
        ({"boxes": 0}, "boxes=0 must be a whole number, at least 1"),
        ({"boxes": 15}, "boxes=15 must be at most 14 in 6x6"),
        ({"least_moves": 9}, "least_moves=9 must be at most most_moves=8"),
        ({"rows": 3, "boxes": 1, "train_rooms": 1000}, "there is no other 3x6 train room"),
        (
            {"rows": 12, "columns": 12, "boxes": 5, "most_moves": 200},
            "with boxes=5 and most_moves=200 a room of 70 cells has more than 100,000 positions to "
            "search.*ask for fewer boxes",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(
    changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        SokobanEnv.tasks("train", OPTIONS | changes)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="split 'test' is not one of"):
        SokobanEnv.tasks("test", OPTIONS)

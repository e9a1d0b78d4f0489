"""Images of observations: drawn, checked, sent between processes and over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import uvloop

from envs import EnvironmentPool, Observation, Task, environment_class
from envs.adapters.http_client import KEY_VARIABLE, observation_from_json, observation_to_json
from envs.hosting.http_server import Server
from envs.sokoban import BOX, BOX_EDGE, FLOOR, PLAYER, TARGET, WALL, draw_room
from envs.validation import checked_answer

OPTIONS: dict[str, object] = {
    **{
        "rows": 4,
        "columns": 5,
        "boxes": 1,
        "least_moves": 1,
        "most_moves": 3,
        "train_rooms": 2,
        "heldout_rooms": 1,
        "seed": 0,
    }
}
SEEN = OPTIONS | {"observation": "image"}
Sokoban = environment_class("sokoban")


def test_each_kind_of_cell_has_its_own_colours() -> None:
    image = draw_room("# _ O\nX P S\n√ # #", cell_pixels=10)
    assert image.shape == (30, 30, 3) and image.dtype == np.uint8
    middle = {sign: tuple(image[row * 10 + 5, column * 10 + 5]) for row, column, sign in
              [(0, 0, "#"), (0, 1, "_"), (0, 2, "O"), (1, 0, "X"), (1, 1, "P"), (1, 2, "S"),
               (2, 0, "√")]}  # fmt: skip
    assert middle == {
        "#": WALL,
        "_": FLOOR,
        "O": TARGET,
        "X": BOX,
        "P": PLAYER,
        "S": PLAYER,
        "√": TARGET,
    }
    kinds = {sign: draw_room(sign, cell_pixels=4).tobytes() for sign in "#_OX√PS"}
    assert len(set(kinds.values())) == 7, "even the smallest cells differ"
    colours = {tuple(pixel) for pixel in draw_room("√", cell_pixels=28).reshape(-1, 3)}
    assert colours == {FLOOR, BOX_EDGE, BOX, TARGET}


def test_sokoban_shows_the_room_as_it_is_and_keeps_its_anchor() -> None:
    task = Sokoban.tasks("train", SEEN)[0]
    assert task == Sokoban.tasks("train", OPTIONS)[0], "the same rooms, however they are shown"
    env, of_text = Sokoban(SEEN), Sokoban(OPTIONS)
    for seen, read in [
        (env.reset(task), of_text.reset(task)),
        (env.step("up").observation, of_text.step("up").observation),
    ]:
        (image,) = seen.images
        assert replace(seen, images=()) == read and read.images == ()
        assert (image == draw_room(seen.text, cell_pixels=28)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation": "sound"}, "observation='sound' is not one of 'text', 'image'"),
        ({"cell_pixels": 3}, "cell_pixels=3 must"),
    ],
)
def test_options_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sokoban(SEEN | change)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([np.zeros((2, 2, 3), np.uint8)], "images of type list"),
        ((np.zeros((2, 2, 3), np.float32),), "float32"),
        ((np.zeros((2, 2), np.uint8),), r"\(2, 2\)"),
        ((np.zeros((2, 2, 4), np.uint8),), r"\(2, 2, 4\)"),
        ((np.zeros((0, 2, 3), np.uint8),), "without a pixel"),
        (("room.png",), "an image that is str"),
    ],
)
def test_what_is_no_image_is_refused(images: object, message: str) -> None:
    with pytest.raises(TypeError, match=f"reset returned .*{message}"):
        checked_answer("reset", Observation(text="", images=images))  # type: ignore[arg-type]


def test_json_gives_back_the_pixels_and_says_nothing_of_none() -> None:
    image = np.arange(2 * 1 * 3, dtype=np.uint8).reshape(2, 1, 3)
    fields = json.loads(
        json.dumps(
            observation_to_json(Observation(text="a", images=(image, image.transpose(1, 0, 2))))
        )
    )
    assert fields["images"][0] == {"height": 2, "width": 1, "pixels": "AAECAwQF"}
    one, other = observation_from_json(fields).images
    assert (one == image).all() and (other == image.transpose(1, 0, 2)).all()
    assert "images" not in observation_to_json(Observation(text="a"))
    assert observation_from_json({"text": "a"}) == Observation(text="a")
    for wrong in ({"height": 1}, {"pixels": "!"}, {"pixels": "AAAA"}):
        with pytest.raises(ValueError, match="base64 of height"):
            observation_from_json(
                {"text": "a", "images": [{"height": 2, "width": 1, "pixels": "AAECAwQF"} | wrong]}
            )


async def _first_image(pool: EnvironmentPool, task: Task) -> np.ndarray:
    async with pool.environment() as environment:
        (image,) = (await environment.reset(task)).images
        (after,) = (await environment.step("still")).observation.images
    assert (image == after).all()
    return image


def test_images_come_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "a key")

    async def played() -> np.ndarray:
        server = Server(
            "sokoban", SEEN, processes=1, answer_timeout_s=20.0, key="a key", max_sessions=1
        )
        port = await server.start("127.0.0.1", 0)
        pool = EnvironmentPool(
            "remote", {"url": f"http://127.0.0.1:{port}"}, processes=1, answer_timeout_s=20.0
        )
        try:
            return await _first_image(pool, Sokoban.tasks("train", SEEN)[0])
        finally:
            pool.close()
            await server.close()

    task = Sokoban.tasks("train", SEEN)[0]
    assert (asyncio.run(played()) == draw_room(task.data["room"], cell_pixels=28)).all()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_answers_longer_than_a_socket_holds_arrive_whole(run: Callable) -> None:
    """uvloop, which Ray's actors run on, makes sockets it watches non-blocking."""
    options = SEEN | {"cell_pixels": 200}  # 2.4 MB

    async def played() -> list[np.ndarray]:
        pool = EnvironmentPool("sokoban", options, processes=1, answer_timeout_s=20.0)
        try:
            return await asyncio.gather(
                *(_first_image(pool, task) for task in Sokoban.tasks("train", options) * 3)
            )
        finally:
            pool.close()

    for task, image in zip(Sokoban.tasks("train", options) * 3, run(played()), strict=True):
        assert (image == draw_room(task.data["room"], cell_pixels=200)).all()

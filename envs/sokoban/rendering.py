"""A Sokoban room in pixels, drawn from its grid of signs: flat colours, a shape for each kind of
thing.

image = drawn_room("# # #\n# P #\n# # #", cell_pixels=28)       # uint8 [84, 84, 3]

# wall, dark      _ floor, light      O target, a small red square      X box, a brown square with a
darker edge P the player, a green disc      S the player on a target      √ a box on a target, with
the target in its middle
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LEAST_CELL_PIXELS = 4  # below it a box has no edge
WALL, FLOOR, TARGET = (60, 60, 70), (235, 225, 200), (200, 40, 40)
BOX, BOX_EDGE, PLAYER = (180, 120, 50), (110, 70, 25), (40, 140, 70)
BOX_SHARE, BOX_EDGE_SHARE, TARGET_SHARE, PLAYER_SHARE = 0.8, 0.6, 0.35, 0.7  # of the cell's side


def drawn_room(text: str, *, cell_pixels: int) -> NDArray[np.uint8]:
    """[rows * cell_pixels, columns * cell_pixels, 3] of a room as `Room.drawn` writes it."""
    rows = [[_cell(sign, cell_pixels) for sign in line.split(" ")] for line in text.split("\n")]
    return np.concatenate([np.concatenate(row, axis=1) for row in rows], axis=0)


@lru_cache(maxsize=64)
def _cell(sign: str, cell_pixels: int) -> NDArray[np.uint8]:
    cell = np.empty((cell_pixels, cell_pixels, 3), np.uint8)
    cell[:] = WALL if sign == "#" else FLOOR
    # 0 in the middle, 1 at the cell's edge
    off_centre = np.abs(np.arange(cell_pixels) * 2 + 1 - cell_pixels) / cell_pixels
    down, right = off_centre[:, None], off_centre[None, :]
    square = np.maximum(down, right)
    if sign in "X√":
        cell[square <= BOX_SHARE] = BOX_EDGE
        cell[square <= BOX_EDGE_SHARE] = BOX
    if sign in "O√S":
        cell[square <= (TARGET_SHARE if sign != "S" else BOX_SHARE)] = TARGET
    if sign in "PS":
        cell[down**2 + right**2 <= PLAYER_SHARE**2] = PLAYER
    return cell

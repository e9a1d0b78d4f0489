"""Write pixels as a PNG, and as an address that holds it."""

from __future__ import annotations

import base64
import struct
import zlib

from store import CHANNELS

MAX_SIDE = 512  # of a picture in a page; a larger one is thinned to every n-th pixel
TRUE_COLOUR = 2


def picture_address(pixels: bytes, *, height: int, width: int) -> str | None:
    """Return a picture as a data: address, None if the pixels are not those of such a picture."""
    if height <= 0 or width <= 0 or len(pixels) != height * width * CHANNELS:
        return None
    every = -(-max(height, width) // MAX_SIDE)
    rows = [_row(pixels, at, width=width, every=every) for at in range(0, height, every)]
    data = png(rows, width=len(rows[0]) // CHANNELS)
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png(rows: list[bytes], *, width: int) -> bytes:
    """Return a PNG of rows of pixels from the top: red, green, blue of each."""
    head = struct.pack(">IIBBBBB", width, len(rows), 8, TRUE_COLOUR, 0, 0, 0)
    lines = b"".join(b"\0" + row for row in rows)  # 0: the row is not filtered
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", head),
            _chunk(b"IDAT", zlib.compress(lines, 1)),
            _chunk(b"IEND", b""),
        ]
    )


def _row(pixels: bytes, at: int, *, width: int, every: int) -> bytes:
    row = pixels[at * width * CHANNELS : (at + 1) * width * CHANNELS]
    if every == 1:
        return row
    return b"".join(row[x * CHANNELS : (x + 1) * CHANNELS] for x in range(0, width, every))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

"""Images of rows of the store, as they are carried in a micro-batch: in bytes, eight times smaller
than a vision tower's input.

images = row_images(rows)                       # None: no row has one
images_of(images, rows_S)                       # of each of these rows
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

CHANNELS = 3

RowImages = tuple[NDArray[np.uint8], ...]  # each [height, width, 3]


def row_images(rows: pa.Table) -> pa.ChunkedArray | None:
    """The column `images`, None if the table has none or all of it is null."""
    if "images" not in rows.column_names or rows["images"].null_count == rows.num_rows:
        return None
    return rows["images"]


def images_of(images: pa.ChunkedArray, rows_S: NDArray[np.int64]) -> tuple[RowImages, ...]:
    """Of each row; () of a row without. Copies nothing it need not: of thousands of rows they are
    hundreds of megabytes.
    """
    return tuple(tuple(_image(image) for image in images[int(row)].values or ()) for row in rows_S)


def _image(image: pa.StructScalar) -> NDArray[np.uint8]:
    pixels = np.frombuffer(image["pixels"].as_buffer(), np.uint8)
    return pixels.reshape(image["height"].as_py(), image["width"].as_py(), CHANNELS)

"""Images of an observation: what counts as one, and how they are written in JSON for environments
over HTTP.

{"height": 2, "width": 1, "pixels": "AAAA////"}     a black pixel above a white one, base64 of
height * width * 3 bytes
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.base import Observation

CHANNELS = 3  # red, green, blue


def check_images(images: object, *, what: str) -> None:
    """Raises TypeError unless they are a tuple of uint8 arrays [height, width, 3]; `what` made
    them.
    """
    if not isinstance(images, tuple):
        raise TypeError(
            f"{what} returned images of type {type(images).__name__}; they must be a tuple of "
            "arrays"
        )
    for image in images:
        if (
            not isinstance(image, np.ndarray)
            or image.dtype != np.uint8
            or image.ndim != 3
            or image.shape[2] != CHANNELS
        ):
            found = (
                f"{image.dtype} {image.shape}"
                if isinstance(image, np.ndarray)
                else type(image).__name__
            )
            raise TypeError(
                f"{what} returned an image that is {found}; it must be a uint8 array [height, "
                f"width, {CHANNELS}]"
            )
        if not image.size:
            raise TypeError(f"{what} returned an image without a pixel, {image.shape}")


def observation_to_json(observation: Observation) -> dict[str, Any]:
    """The fields of an Observation as JSON has them; no `images` where there are none, as older
    clients know none.
    """
    fields = asdict(replace(observation, images=()))
    del fields["images"]
    return fields | (
        {"images": [_image_to_json(image) for image in observation.images]}
        if observation.images
        else {}
    )


def observation_from_json(fields: Mapping[str, Any]) -> Observation:
    """Raises ValueError for images that are not as `observation_to_json` writes them; TypeError for
    an unknown field.
    """
    images: Sequence[Mapping[str, Any]] = fields.get("images") or ()
    return Observation(**{**fields, "images": tuple(_image_from_json(image) for image in images)})


def _image_to_json(image: NDArray[np.uint8]) -> dict[str, Any]:
    height, width, _ = image.shape
    return {"height": height, "width": width, "pixels": base64.b64encode(image.tobytes()).decode()}


def _image_from_json(fields: Mapping[str, Any]) -> NDArray[np.uint8]:
    try:
        pixels = np.frombuffer(base64.b64decode(fields["pixels"], validate=True), np.uint8)
        return pixels.reshape(int(fields["height"]), int(fields["width"]), CHANNELS)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError(
            "an image is no object of height, width and pixels, base64 of height * width * "
            f"{CHANNELS} bytes: {error!r}"
        ) from None

"""Images in prompts: how many tokens a model's processor makes of one, and the numbers its vision
tower is given.

    form = load_image_form("models/Qwen2.5-VL-3B-Instruct")     # None: a model that sees no images
    form.expanded((5, 99, 6), images)                           # (5, 99, 99, 99, 99, 6), for an image of four tokens
    pixel_values_PD, grid_I3 = form.pixel_values(images)

P patches of all images, D numbers each, I images. The processor of the model's directory does the
resizing and normalising, in the learner too (`learner/model/vision.py`), always on PIL: both must
see the same numbers, and PIL is there without torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from configs import VISION_MODEL_TYPES, loaded, model_type

if TYPE_CHECKING:
    import torch

Image = NDArray[np.uint8]  # [height, width, 3]


class ImageForm:
    """Made by `load_image_form`. Pure."""

    def __init__(self, processor: Any, *, image_token_id: int) -> None:
        self.image_token_id = image_token_id
        self.patches_per_token = processor.merge_size**2
        self._processor = processor

    def n_tokens(self, image: Image) -> int:
        return (
            int(self._processor.get_number_of_image_patches(*image.shape[:2], {}))
            // self.patches_per_token
        )

    def expanded(self, token_ids: Sequence[int], images: Sequence[Image]) -> tuple[int, ...]:
        """With the k-th image token, which stands for the k-th image, repeated as often as that has
        tokens.

        Raises ValueError where there are not as many image tokens as images.
        """
        n_places = sum(token == self.image_token_id for token in token_ids)
        if n_places != len(images):
            raise ValueError(
                f"the chat template of the model in model.path makes {n_places} image tokens of "
                f"{len(images)} images; "
                "take the chat template that belongs to the model"
            )
        sizes = iter([self.n_tokens(image) for image in images])
        return tuple(
            token
            for given in token_ids
            for token in [given] * (next(sizes) if given == self.image_token_id else 1)
        )

    def places(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[tuple[int, int]]:
        """(first token, tokens) of each image in a prompt that was `expanded`."""
        places, start = [], 0
        for image in images:
            start = token_ids.index(self.image_token_id, start)
            places.append((start, self.n_tokens(image)))
            start += places[-1][1]
        return places

    def pixel_values(self, images: Sequence[Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """(pixel_values_PD float32, grid_I3 int64: patches of each image in time, height and
        width).
        """
        values = self._processor(images=list(images), return_tensors="pt")
        return values["pixel_values"], values["image_grid_thw"]


def load_image_form(model_path: str | Path) -> ImageForm | None:
    """Of the processor in a model's directory. None for a model whose `model_type` is none of
    VISION_MODEL_TYPES.
    """
    if not sees_images(model_path):
        return None
    # here: the driver and the coordinator never need it
    from transformers import AutoImageProcessor

    # a model's own code never runs here
    from_files = {"local_files_only": True, "trust_remote_code": False}
    processor = loaded(
        "image processor",
        model_path,
        lambda: AutoImageProcessor.from_pretrained(model_path, backend="pil", **from_files),
    )
    return ImageForm(processor, image_token_id=_config(model_path)["image_token_id"])


def sees_images(model_path: str | Path) -> bool:
    return model_type(str(model_path)) in VISION_MODEL_TYPES


def _config(model_path: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    return content

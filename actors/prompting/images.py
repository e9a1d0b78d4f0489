"""Count an image's tokens, and compute the vision tower's input from it.

    form = load_image_form("models/Qwen2.5-VL-3B-Instruct")  # None: the model sees no images
    form.expanded((5, 99, 6), images)                        # (5, 99, 99, 99, 99, 6), four tokens
    pixel_values_PF, grid_I3 = form.pixel_values(images)

P patches of all images, D numbers each, I images. The image processor of the model's directory
resizes and normalises, in the learner too (`learner/model/vision.py`). Both use its PIL version, so
that they see the same numbers and need no torchvision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.policy import Image
from configs import SAFE_LOADING, VISION_MODEL_TYPES, load_safely, model_type

if TYPE_CHECKING:
    import torch


class ImageForm:
    """Turn images into tokens and numbers. Made by `load_image_form`. Pure."""

    def __init__(self, processor: Any, *, image_token_id: int) -> None:
        self.image_token_id = image_token_id
        self.patches_per_token = processor.merge_size**2
        self._processor = processor

    def n_tokens(self, image: Image) -> int:
        n_patches = int(self._processor.get_number_of_image_patches(*image.shape[:2], {}))
        return n_patches // self.patches_per_token

    def expanded(self, token_ids: Sequence[int], images: Sequence[Image]) -> tuple[int, ...]:
        """Repeat the k-th image token as often as the k-th image has tokens.

        Raises ValueError unless there are as many image tokens as images.
        """
        n_image_tokens = sum(token == self.image_token_id for token in token_ids)
        if n_image_tokens != len(images):
            raise ValueError(
                f"the chat template of the model in model.path makes {n_image_tokens} image tokens "
                f"of {len(images)} images; take the chat template that belongs to the model"
            )
        sizes = iter([self.n_tokens(image) for image in images])
        expanded: list[int] = []
        for token in token_ids:
            expanded += [token] * (next(sizes) if token == self.image_token_id else 1)
        return tuple(expanded)

    def spans(self, token_ids: Sequence[int], images: Sequence[Image]) -> list[tuple[int, int]]:
        """Return (first token, number of tokens) of each image in an `expanded` prompt."""
        spans, start = [], 0
        for image in images:
            start = token_ids.index(self.image_token_id, start)
            spans.append((start, self.n_tokens(image)))
            start += spans[-1][1]
        return spans

    def pixel_values(self, images: Sequence[Image]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixel_values_PF (float32) and grid_I3 (int64).

        The grid has each image's number of patches in time, height and width.
        """
        values = self._processor(images=list(images), return_tensors="pt")
        return values["pixel_values"], values["image_grid_thw"]


def load_image_form(model_path: str | Path) -> ImageForm | None:
    """Load the image processor of a model's directory; None for a model that sees no images."""
    if not sees_images(model_path):
        return None
    # Imported here: the driver and the coordinator import this module, and never need it.
    from transformers import AutoImageProcessor

    processor = load_safely(
        "image processor",
        model_path,
        load=lambda: AutoImageProcessor.from_pretrained(model_path, backend="pil", **SAFE_LOADING),
    )
    config = json.loads((Path(model_path) / "config.json").read_text())
    return ImageForm(processor, image_token_id=config["image_token_id"])


def sees_images(model_path: str | Path) -> bool:
    return model_type(str(model_path)) in VISION_MODEL_TYPES

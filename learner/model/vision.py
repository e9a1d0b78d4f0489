"""Train vision models: add images to a packed forward pass, and name the weights to publish.

    vision = load_vision(path, config)                  # None: a model of text alone
    packed = vision.packed(causal_lm, batch)            # `embedded` of `packed_hidden`
    names = names_to_publish(path, policy=policy, learner=learner)  # as in the base model's files

A vision tower turns an image's patches into one vector per image token, in place of that token's
embedding. Positions have three parts: time, height and width. They are equal for text, the location
in the image for image tokens, and text after an image continues after the largest part. The tower
computes all images of a micro-batch together; its attention keeps them apart. So packing rows and
cutting updates into micro-batches changes nothing.

Letters as in `micro_batch.py`; I images, P patches of all of them, D numbers each, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoImageProcessor, PreTrainedModel

from configs import SAFE_LOADING, VISION_MODEL_TYPES, LearnerConfig, load_safely, model_type
from learner.data.micro_batch import MicroBatch
from learner.distributed.deepspeed_setup import PARTITIONED

# Prefix of a parameter -> its prefix in files written before transformers had one scheme for all
# vision models, such as those of Qwen2.5-VL.
OLDER_PREFIXES = (("model.language_model.", "model."), ("model.visual.", "visual."))


class Vision:
    """A model's image processor. `load_vision` makes it."""

    def __init__(self, processor: Any, *, image_token_id: int, merge_size: int) -> None:
        self._processor = processor
        self._image_token_id, self._merge_size = image_token_id, merge_size

    def packed(self, causal_lm: PreTrainedModel, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return embeddings [1, T, H] and positions [3, 1, T] of a micro-batch, on its device.

        They depend on every parameter of the tower, also without an image, so that all ranks
        exchange the same gradients. Raises ValueError if a sequence has fewer image tokens than its
        images need.
        """
        embedded_1TH = causal_lm.get_input_embeddings()(batch.input_ids_T.unsqueeze(0))
        images = list(chain.from_iterable(batch.images_S))
        if not images:
            embedded_1TH = embedded_1TH + nothing_of(causal_lm, embedded_1TH)
            positions_31T = batch.position_ids_T.expand(3, 1, -1)
            return {"inputs_embeds": embedded_1TH, "position_ids": positions_31T}
        values = self._processor(images=images, return_tensors="pt")
        grid_I3 = values["image_grid_thw"].numpy() // [1, self._merge_size, self._merge_size]
        positions_31T, is_image_T = self._positions(batch, grid_I3)
        seen = causal_lm.base_model.get_image_features(
            values["pixel_values"].to(causal_lm.device),
            values["image_grid_thw"].to(causal_lm.device),
            return_dict=True,
        )
        seen_KH = torch.cat(list(seen.pooler_output)).to(embedded_1TH.dtype)
        is_image_1T1 = is_image_T.to(batch.input_ids_T.device)[None, :, None]
        embedded_1TH = embedded_1TH.masked_scatter(is_image_1T1, seen_KH)
        return {"inputs_embeds": embedded_1TH, "position_ids": positions_31T}

    def _positions(
        self, batch: MicroBatch, grid_I3: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions [3, 1, T], and which tokens belong to images [T]."""
        is_pad_T = (batch.input_ids_T == self._image_token_id).cpu().numpy()
        bounds = batch.bounds_Sp1.tolist()
        parts, first = [], 0
        for start, end, images in zip(bounds[:-1], bounds[1:], batch.images_S, strict=True):
            parts.append(image_positions(is_pad_T[start:end], grid_I3[first : first + len(images)]))
            first += len(images)
        positions_3T, is_image_T = (
            np.concatenate(part, axis=-1) for part in zip(*parts, strict=True)
        )
        positions_31T = torch.from_numpy(positions_3T).unsqueeze(1).to(batch.input_ids_T.device)
        return positions_31T, torch.from_numpy(is_image_T)


def image_positions(
    is_pad_L: NDArray[np.bool_], grids_I3: Sequence[Sequence[int]] | NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return each token's position [3, L], and whether it belongs to an image [L].

    The three rows are time, height and width. `is_pad_L` marks the image token. `grids_I3` has the
    number of tokens of each image in the three directions. Two words, an image of 2 x 3 tokens, one
    word: the image begins at 2, and the word continues after its largest part.

        time      0 1   2 2 2 2 2 2   5
        height    0 1   2 2 2 3 3 3   5
        width     0 1   2 3 4 2 3 4   5

    Images come first. An image token after the last of them was sampled by the policy: a word
    without a meaning, for the engine too. Raises ValueError if an image has too few tokens.
    """
    parts = []
    at = 0
    next_position = 0
    is_image_L = np.zeros_like(is_pad_L)
    for grid in grids_I3:
        n_tokens = int(np.prod(grid))
        n_before = int(np.argmax(is_pad_L[at:])) if is_pad_L[at:].any() else len(is_pad_L) - at
        parts.append(np.tile(next_position + np.arange(n_before), (3, 1)))
        at, next_position = at + n_before, next_position + n_before
        if is_pad_L[at : at + n_tokens].sum() < n_tokens:
            raise ValueError(
                f"an image of {n_tokens} tokens has fewer in its row; was it played with another "
                "processor?"
            )
        is_image_L[at : at + n_tokens] = True
        parts.append(next_position + np.indices(tuple(int(n) for n in grid)).reshape(3, -1))
        at, next_position = at + n_tokens, next_position + int(max(grid))
    parts.append(np.tile(next_position + np.arange(len(is_pad_L) - at), (3, 1)))
    return np.concatenate(parts, axis=1), is_image_L


def nothing_of(causal_lm: PreTrainedModel, like: torch.Tensor) -> torch.Tensor:
    """Return 0 with a gradient of 0 for every trained parameter of the tower."""
    nothing = like.new_zeros(())
    for parameter in causal_lm.base_model.visual.parameters():
        if parameter.requires_grad:
            nothing = nothing + parameter.sum() * 0.0
    return nothing.to(like.dtype)


def load_vision(path: Path, config: Any) -> Vision | None:
    """Load a model's image processor, on PIL as in the actors, or return None for a text model."""
    if model_type(str(path)) not in VISION_MODEL_TYPES:
        return None
    processor = load_safely(
        "image processor",
        path,
        load=lambda: AutoImageProcessor.from_pretrained(path, backend="pil", **SAFE_LOADING),
    )
    return Vision(processor, image_token_id=config.image_token_id, merge_size=processor.merge_size)


def names_to_publish(path: Path, *, policy: Any, learner: LearnerConfig) -> Mapping[str, str]:
    """Map parameter names to those in the files of `path`, from which engines load the model.

    Raises ValueError for a vision model with ZeRO 3: a rank without images would wait for ever for
    the tower's parts.
    """
    if policy.vision is None:
        return {}
    if learner.zero_stage == PARTITIONED:
        raise ValueError(
            f"learner.zero_stage={PARTITIONED} with a vision model is not supported; use 1 or 2"
        )
    return checkpoint_names(path, policy.causal_lm.state_dict())


def checkpoint_names(path: Path, names: Iterable[str]) -> Mapping[str, str]:
    """Map each parameter name to the one in the files of `path`, or to itself if there is none."""
    present: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            present |= set(tensors.keys())
    found = {}
    for name in names:
        older = [
            old + name.removeprefix(new) for new, old in OLDER_PREFIXES if name.startswith(new)
        ]
        found[name] = next((one for one in (name, *older) if one in present), name)
    return found

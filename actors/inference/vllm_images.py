"""Images into vLLM: a prompt of token ids goes there with the numbers for the vision tower, which
we make ourselves.

vLLM's own way would expand image tokens again that are expanded already, and needs a processor for
videos, which needs torchvision; there is no build of that for every torch. So
`patch_vllm_for_images` tells it, in each process that asks, that the model sees one kind of thing,
images, of at most so many tokens: all that it still wants to know.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.policy import Prompt
from actors.prompting.images import ImageForm, sees_images

IMAGE = "image"  # vLLM's name of the modality


def image_arguments(model_path: Path) -> dict[str, Any]:
    """More arguments of an engine that is about to be started here, none for a model that sees no
    images.
    """
    if not sees_images(model_path):
        return {}
    patch_vllm_for_images()
    return {
        # vLLM makes nothing for images without one; what is sampled is not read with it
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {IMAGE: 1},
        # it would make an image of the largest size, by the processor that is not there
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,  # of what is processed by vLLM
        # Of a request whose image lies in a cached prefix the engine keeps no pixels
        # (`strip_covered_mm_data`), and lacks them when new weights empty the cache under it: vLLM
        # 0.32 then dies of "Expected number of multimodal embeddings to match".
        "enable_prefix_caching": False,
        "mm_device_do_normalize": False,  # what it is given is normalised
        "worker_extension_cls": "actors.inference.vllm_vision_extension.VisionWorkerExtension",
    }


def engine_input(prompt: Prompt, form: ImageForm | None) -> Any:
    """The prompt as `AsyncLLM.generate` takes it."""
    from vllm.inputs.engine import mm_input, tokens_input

    if not prompt.images:
        return tokens_input(list(prompt.token_ids))
    from transformers import BatchFeature
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    assert form is not None, "a prompt with images is made with an ImageForm"
    pixel_values_PD, grid_I3 = form.pixel_values(prompt.images)
    items = MultiModalKwargsItems.from_hf_inputs(
        BatchFeature({"pixel_values": pixel_values_PD, "image_grid_thw": grid_I3}),
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(IMAGE, grid_I3.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
        },
    )
    places = form.places(prompt.token_ids, prompt.images)
    return mm_input(
        list(prompt.token_ids),
        items,
        # By content: what the tower made of an image is used again while the weights are the same.
        {
            IMAGE: [
                hashlib.blake2b(repr(image.shape).encode() + image.tobytes()).hexdigest()
                for image in prompt.images
            ]
        },
        {IMAGE: [PlaceholderRange(offset=offset, length=length) for offset, length in places]},
    )


def patch_vllm_for_images() -> None:
    """From now on this process needs no processor of vLLM's, and no torchvision, for models of
    VISION_MODEL_TYPES.
    """
    if importlib.util.find_spec("torchvision") is None:
        # vLLM takes one function of it, by the name of the module that needs torchvision; its twin
        # on PIL has that too.
        twin = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", twin)
    from vllm.model_executor.models.qwen2_5_vl import (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessingInfo,
    )
    from vllm.model_executor.models.qwen2_vl import (
        Qwen2VLForConditionalGeneration,
        Qwen2VLProcessingInfo,
    )

    _register(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessingInfo)
    _register(Qwen2VLForConditionalGeneration, Qwen2VLProcessingInfo)


def _register(model: Any, info: Any) -> None:
    from vllm import ModelRegistry

    class ImagesOnly(info):
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {IMAGE: 1}

        def get_mm_max_tokens_per_item(
            self, seq_len: int, mm_counts: Mapping[str, int]
        ) -> Mapping[str, int]:
            return {IMAGE: seq_len}

    model._processor_factory = replace(model._processor_factory, info=ImagesOnly)
    # By its class: by its name vLLM would look at it in a process of its own, which knows nothing
    # of this.
    ModelRegistry.register_model(model.__name__, model)

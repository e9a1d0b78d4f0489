"""Give images to vLLM: token ids with the vision tower's input, computed by `ImageForm`.

vLLM's own processing would expand image tokens a second time. It also needs a video processor, and
so torchvision, which has no build for every torch. `patch_vllm_for_images` therefore tells vLLM, in
each process, the facts that it still asks for: the model sees images only, of bounded size.
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
    """Return the engine's arguments for images, and patch vLLM; {} for a text model."""
    if not sees_images(model_path):
        return {}
    patch_vllm_for_images()
    return {
        # vLLM needs a tokenizer to accept images. Outputs are not read with it.
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {IMAGE: 1},
        # profiling would need the missing processor, to make an image of the largest size
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,  # vLLM processes nothing
        # The engine drops the pixels of an image in a cached prefix (`strip_covered_mm_data`), and
        # lacks them when new weights empty the cache: vLLM 0.32 then dies with "Expected number of
        # multimodal embeddings to match".
        "enable_prefix_caching": False,
        "mm_device_do_normalize": False,  # the input is normalised already
        "worker_extension_cls": "actors.inference.vllm_vision_extension.VisionWorkerExtension",
    }


def engine_input(prompt: Prompt, form: ImageForm | None) -> Any:
    """Return the prompt as `AsyncLLM.generate` takes it."""
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
    pixel_values_PF, grid_I3 = form.pixel_values(prompt.images)
    items = MultiModalKwargsItems.from_hf_inputs(
        BatchFeature({"pixel_values": pixel_values_PF, "image_grid_thw": grid_I3}),
        {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(IMAGE, grid_I3.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True),
        },
    )
    spans = form.spans(prompt.token_ids, prompt.images)
    return mm_input(
        list(prompt.token_ids),
        items,
        # Keys by content: the tower's output is reused for equal images until the weights change.
        {
            IMAGE: [
                hashlib.blake2b(repr(image.shape).encode() + image.tobytes()).hexdigest()
                for image in prompt.images
            ]
        },
        {IMAGE: [PlaceholderRange(offset=offset, length=length) for offset, length in spans]},
    )


def patch_vllm_for_images() -> None:
    """Make vLLM in this process serve VISION_MODEL_TYPES without its processor and torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        # vLLM imports one function from the module that needs torchvision. The PIL module has it.
        models = "transformers.models.qwen2_vl"
        pil = importlib.import_module(f"{models}.image_processing_pil_qwen2_vl")
        sys.modules.setdefault(f"{models}.image_processing_qwen2_vl", pil)
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
    # Registered by its class: for a name vLLM would inspect the model in an unpatched process.
    ModelRegistry.register_model(model.__name__, model)

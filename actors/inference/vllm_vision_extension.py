"""Prepare the engine process of a vision model; vLLM imports this before it looks at the model."""

from actors.inference.engine_worker import WorkerExtension
from actors.inference.vllm_images import patch_vllm_for_images

patch_vllm_for_images()


class VisionWorkerExtension(WorkerExtension):
    """Change nothing: vLLM imports this module because this class is named in its settings."""

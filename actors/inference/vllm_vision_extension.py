"""`weight_transfer.WorkerExtension` for a vision model's engine, which imports this before it looks
at the model.
"""

from actors.inference.vllm_images import patch_vllm_for_images
from actors.inference.vllm_weight_loader import WorkerExtension

patch_vllm_for_images()


class VisionWorkerExtension(WorkerExtension):
    """The same; its name is what has this module imported."""

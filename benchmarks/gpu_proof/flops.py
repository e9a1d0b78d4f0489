"""Count the floating-point operations that an update needs, and name the peak rate of a GPU.

    6 N T            N elements of the layers' matrices, T tokens: 2 forward, 4 backward
    6 V H R          the output layer; only the R response tokens need it
    6 A sum L^2      causal attention of each layer, A heads times their size, L tokens of each
                     sequence: half of 2 * 2 L^2 A forward, twice that backward

With frozen matrices the backward pass makes no gradient of them: 4 N T, and 4 V H R. Adapters and
whatever the implementation computes twice (checkpointed layers, the output layer) are not counted.
Model FLOP utilisation (MFU) is this number over the time and over the dense bf16 peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpu_proof.shapes import ModelShape

if TYPE_CHECKING:
    from learner.data.micro_batch import MicroBatch

# Dense bf16 TFLOP/s from NVIDIA's data sheets, by a part of the driver's name; the first counts.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}


def peak_tflops(device_name: str) -> float | None:
    """Return the device's dense bf16 peak in TFLOP/s, None if the table lacks it."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def matrix_elements(shape: ModelShape) -> int:
    """Count the elements of the layers' matrices, without the output layer.

    Hidden 4, two query heads and one key head of size 2, feed-forward 3, one layer:
    q 16 + k 8 + v 8 + o 16 + three of 12 = 84.
    """
    key = shape.hidden // shape.heads * shape.kv_heads
    attention = 2 * shape.hidden * shape.hidden + 2 * shape.hidden * key
    return shape.layers * (attention + 3 * shape.hidden * shape.feed_forward)


def update_flops(shape: ModelShape, batches: Sequence[MicroBatch], *, frozen: bool) -> float:
    """Count the operations of one update over these micro-batches; see the module's docstring."""
    n_tokens = sum(batch.n_tokens for batch in batches)
    n_response_tokens = sum(batch.n_response_tokens for batch in batches)
    squares = sum(float(batch.bounds_Sp1.diff().double().square().sum()) for batch in batches)
    passes = 4.0 if frozen else 6.0
    return (
        passes * matrix_elements(shape) * n_tokens
        + passes * shape.vocabulary * shape.hidden * n_response_tokens
        + 6.0 * shape.layers * shape.hidden * squares
    )

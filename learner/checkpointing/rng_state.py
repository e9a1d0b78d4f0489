"""The random states of this process, as JSON: nothing of ours is pickled to disk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomStates:
    """Bytes are in hex; the two tuples are lists after a way through JSON."""

    torch: str
    cuda: Sequence[str]  # by device
    numpy: tuple[str, list[int], int, int, float]  # as np.random.get_state has them
    python: tuple[int, list[int], float | None]  # as random.getstate has them


def random_states() -> RandomStates:
    """Of torch (all its devices), numpy and python."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    version, internal, gauss = random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RandomStates(
        torch=_hex(torch.get_rng_state()),
        cuda=[_hex(state) for state in cuda],
        numpy=(kind, keys.tolist(), position, has_gauss, cached),
        python=(version, list(internal), gauss),
    )


def restore_random_states(states: RandomStates) -> None:
    """Those of devices that are not here are left out."""
    torch.set_rng_state(_from_hex(states.torch))
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in enumerate(states.cuda[:n_devices]):
        torch.cuda.set_rng_state(_from_hex(state), device)
    kind, keys, position, has_gauss, cached = states.numpy
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = states.python
    random.setstate((version, tuple(internal), gauss))


def _hex(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

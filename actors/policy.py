"""Define the policy interface: prompt token ids in, response token ids and log-probabilities out.

    completion = await policy.generate(prompt, seed=seed, temperature=1.0)

Token ids are stored and trained on. The environment gets their text, which is never tokenised
again. `ScriptedPolicy` is the implementation without a model, for behaviour cloning and for tests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]  # [height, width, 3]


class EngineLostError(RuntimeError):
    """The engine is gone, or was stopped because it may hold a mixture of weights.

    Start a new policy.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    # admissible actions of the observation; only a scripted policy reads them
    actions: tuple[str, ...] | None
    # the action that the environment demonstrates; only a scripted policy reads it
    demonstrated: str | None = None
    # turns and tokens that the prompt would have without a token budget, and lacks
    n_dropped_turns: int = 0
    n_dropped_tokens: int = 0
    # in the order of their image tokens in `token_ids`
    images: tuple[Image, ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural log, after temperature, one per token id, as sampled
    finish_reason: str  # "stop", "length" or "abort"
    # oldest and newest policy version that sampled a token of this completion
    version_min: int
    version_max: int


class Policy(Protocol):
    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion: ...


class ScriptedPolicy:
    """Write the demonstrated action in the answer format, else a random admissible action.

    `encode_answer` turns an action into the response's token ids, end token included, see
    `PromptForm`. The choice among n actions has log-probability log(1/n). It is recorded on the
    first token; the other tokens get 0, so that the sum is that of the response. An environment may
    list an action of any length: a response ends after `max_tokens` tokens, as a model's does.
    """

    def __init__(
        self,
        encode_answer: Callable[[str, int | None], Sequence[int]],
        *,
        max_tokens: int | None = None,
    ) -> None:
        self.encode_answer = encode_answer
        self.max_tokens = max_tokens

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        choices = (prompt.demonstrated,) if prompt.demonstrated is not None else prompt.actions
        if not choices:
            raise ValueError(
                "a scripted policy needs an environment that lists its admissible actions; this "
                "one lists none"
            )
        action = random.Random(seed).choice(choices)
        encoded = tuple(self.encode_answer(action, self.max_tokens))
        token_ids = encoded[: self.max_tokens]
        logprobs = (-math.log(len(choices)),) + (0.0,) * (len(token_ids) - 1)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="stop" if len(token_ids) == len(encoded) else "length",
            version_min=0,
            version_max=0,
        )

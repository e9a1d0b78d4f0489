"""What an agent needs from a policy: token ids in, token ids and their log-probabilities out.

    completion = await policy.generate(prompt, seed=seed, temperature=1.0)

Tokens are the truth: text is made from them for the environment and never tokenised again.
`ScriptedPolicy` is the public double behind the same interface: it plays without a model, to clone
from and to test with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from actors.prompting.images import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    token_ids: tuple[int, ...]
    # admissible actions of this observation; only a scripted policy reads them
    actions: tuple[str, ...] | None
    demonstrated: str | None = None  # the observation's; likewise
    # earlier turns that were to be shown and that the token budget had no room for
    n_dropped_turns: int = 0
    n_dropped_tokens: int = 0  # tokens of the prompt without a budget, less those it has
    images: tuple[Image, ...] = field(
        default=(), compare=False
    )  # uint8 [height, width, 3], in the order of their image tokens in `token_ids`


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # natural log, after temperature, one per token id, as sampled
    finish_reason: str  # "stop", "length" or "abort"
    version_min: int  # oldest and newest policy version that wrote a token of this completion
    version_max: int


class Policy(Protocol):
    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion: ...


class ScriptedPolicy:
    """Writes the demonstrated action in the answer format, or, where there is none, one of the n
    admissible ones at random.

    `encode_answer` turns an action into the response's token ids, end token included. The
    log-probability of the choice, 0 or log(1/n), is put on the first token, 0 on the rest, so that
    they sum to that of the response.
    """

    def __init__(self, encode_answer: Callable[[str], Sequence[int]]) -> None:
        self.encode_answer = encode_answer

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        choices = (prompt.demonstrated,) if prompt.demonstrated is not None else prompt.actions
        if not choices:
            raise ValueError(
                "a scripted policy needs an environment that lists its admissible actions; this "
                "one lists none"
            )
        token_ids = tuple(self.encode_answer(random.Random(seed).choice(choices)))
        logprobs = (-math.log(len(choices)),) + (0.0,) * (len(token_ids) - 1)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="stop",
            version_min=0,
            version_max=0,
        )

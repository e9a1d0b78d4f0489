"""Doubles that take time instead of working, behind the interfaces of the real ones: what
`simulation.py` is made of.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from actors.policy import Completion, Prompt, ScriptedPolicy
from actors.prompting.prompt import PromptForm
from envs import Environment, Observation, Task, Transition


@dataclass(frozen=True, kw_only=True, slots=True)
class Delay:
    """Log-normal seconds: exp(sigma * z) * median_s with z standard normal; sigma 0 is always the
    median.
    """

    median_s: float
    sigma: float

    def draw(self, source: random.Random) -> float:
        return self.median_s * math.exp(source.gauss(0.0, self.sigma))


class LocalHandle:
    """Looks like the Ray handle of a component of this process: `await handle.lease.remote("w0")`.

    A message takes `delay` to arrive and as much again to be answered, and arrives also if its
    sender is gone by then. `target` may be replaced, as by a restart. Its methods are plain
    functions, which answer at once.
    """

    def __init__(self, target: object, *, delay: Delay | None, seed: int) -> None:
        self.target, self._delay, self._random = target, delay, random.Random(seed)

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given, **named: self._send(name, given, named))

    def _send(
        self, name: str, given: tuple[Any, ...], named: dict[str, Any]
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def arrive() -> None:
            try:
                result, deliver = getattr(self.target, name)(*given, **named), answer.set_result
            except Exception as error:  # noqa: BLE001  what is a process border with Ray
                result, deliver = error, answer.set_exception
            loop.call_later(self._travel_s(), lambda: None if answer.done() else deliver(result))

        loop.call_later(self._travel_s(), arrive)
        return answer

    def _travel_s(self) -> float:
        return 0.0 if self._delay is None else self._delay.draw(self._random)


class ByteTokenizer:
    """One token per byte of UTF-8, token 0 ends an answer: enough for a PromptForm without a
    model.
    """

    eos_token_id = 0

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> list[int]:
        return list("".join(message["content"] for message in conversation).encode())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token for token in token_ids if token).decode(errors="replace")

    def get_vocab(self) -> dict[str, int]:
        return {}


class SimulatedPolicy:
    """A ScriptedPolicy that takes its time and has a version, which may change under a running
    request.
    """

    def __init__(self, form: PromptForm, *, delay: Delay, source: random.Random) -> None:
        self.version = -1  # no weights yet
        self._scripted = ScriptedPolicy(form.encode_answer)
        self._delay, self._random = delay, source

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        first = self.version
        await asyncio.sleep(self._delay.draw(self._random))
        completion = await self._scripted.generate(prompt, seed=seed, temperature=temperature)
        return replace(completion, version_min=first, version_max=self.version)


class DelayedEnvironment:
    """A quick environment of this process whose answers take `delay`, by sleeping."""

    def __init__(self, environment: Environment, *, delay: Delay, source: random.Random) -> None:
        self._environment, self._delay, self._random = environment, delay, source

    async def reset(self, task: Task) -> Observation:
        await asyncio.sleep(self._delay.draw(self._random))
        return self._environment.reset(task)

    async def step(self, action: str) -> Transition:
        await asyncio.sleep(self._delay.draw(self._random))
        return self._environment.step(action)

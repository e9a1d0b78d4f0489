"""Make prompts in a thread, so that the event loop goes on and a looping chat template is noticed.

prompt = await SHORT_PROMPTS.make(lambda: form.prompt(...), tokenizer=tokenizer, label="task 7")
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from actors.prompting.chat_template import Tokenizer, model_setting

# For one prompt. The largest budgets take tens of seconds, because a prompt is tokenised again for
# every cut that is tried.
PROMPT_TIMEOUT_S = 300.0

T = TypeVar("T")


class PromptStuckError(RuntimeError):
    """A prompt was not made in time. Its thread cannot be ended.

    End the process, and start a new worker.
    """


class PromptThread:
    """Make prompts one after the other in a thread.

    The event loop stays free to send heartbeats. A chat template is a program that comes with the
    model, and may loop on a short text too.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt")
        # start and error message of the prompt that the thread makes now
        self._current: tuple[float, str] | None = None

    async def make(self, prompt: Callable[[], T], *, tokenizer: Tokenizer, label: str) -> T:
        """Return `prompt()`; `label` names the episode in errors. Unblocked by the thread.

        Raises PromptStuckError if the prompt in the thread, this one or an earlier one, takes
        longer than PROMPT_TIMEOUT_S. Time in the thread's queue does not count.
        """

        def timed() -> T:
            self._current = (time.monotonic(), _stuck(label, tokenizer))
            try:
                return prompt()
            finally:
                self._current = None

        making = asyncio.wrap_future(self._thread.submit(timed))
        try:
            while True:
                current, left_s = self._current, PROMPT_TIMEOUT_S
                if current is not None:
                    left_s += current[0] - time.monotonic()
                done, _ = await asyncio.wait({making}, timeout=max(0.0, left_s))
                if done:
                    return making.result()
                if current is not None and current is self._current and left_s <= 0:
                    raise PromptStuckError(current[1])
        finally:
            making.cancel()


def _stuck(label: str, tokenizer: Tokenizer) -> str:
    return (
        f"the prompt of {label} is not made after {PROMPT_TIMEOUT_S:g} s: the chat template of the "
        f"tokenizer in {model_setting(tokenizer)} loops; put a chat_template.jinja that does not "
        "beside it"
    )


# A short prompt takes milliseconds, and does not wait for a long one.
SHORT_PROMPTS, LONG_PROMPTS = PromptThread(), PromptThread()

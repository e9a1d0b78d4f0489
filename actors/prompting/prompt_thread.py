"""Make prompts in a thread, so that the event loop goes on and a looping chat template is noticed.

prompt = await SHORT_PROMPTS.make(lambda: form.prompt(...), tokenizer=tokenizer, label="task 7")

Prompts that are asked for at the same moment are one batch. Waking a thread, and the event loop
again, takes longer than most prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from actors.prompting.chat_template import Tokenizer, model_setting

# For one prompt. The largest budgets take tens of seconds, because a prompt is tokenised again for
# every cut that is tried.
PROMPT_TIMEOUT_S = 300.0
# When a batch has taken so long, its prompts are handed out as far as they are made.
KEPT_BACK_S = 0.01

T = TypeVar("T")


class PromptStuckError(RuntimeError):
    """A prompt was not made in time. Its thread cannot be ended.

    End the process, and start a new worker.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    prompt: Callable[[], Any]
    tokenizer: Tokenizer
    label: str
    made: asyncio.Future[Any]


class PromptThread:
    """Make prompts one after the other in a thread.

    The event loop stays free to send heartbeats. A chat template is a program that comes with the
    model, and may loop on a short text too.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompt")
        self._current: tuple[float, _Wanted] | None = None  # start, and what the thread makes now
        self._loop: asyncio.AbstractEventLoop | None = None  # the one that `_wanted` is of
        self._wanted: list[_Wanted] = []  # to be sent in the next turn of the event loop
        self._batches: set[asyncio.Task[None]] = set()  # a loop holds its tasks weakly

    async def make(self, prompt: Callable[[], T], *, tokenizer: Tokenizer, label: str) -> T:
        """Return `prompt()`; `label` names the episode in errors. Unblocked by the thread.

        Raises PromptStuckError if the prompt in the thread, this one or an earlier one, takes
        longer than PROMPT_TIMEOUT_S. Time in the thread's queue does not count.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the loop before has ended
            self._loop, self._wanted = loop, []
        if not self._wanted:
            loop.call_soon(self._send)
        made: asyncio.Future[Any] = loop.create_future()
        self._wanted.append(_Wanted(prompt=prompt, tokenizer=tokenizer, label=label, made=made))
        return cast(T, await made)

    def _send(self) -> None:
        batch, self._wanted = self._wanted, []
        waiting = asyncio.ensure_future(self._wait_for(batch))
        self._batches.add(waiting)
        waiting.add_done_callback(self._batches.discard)

    async def _wait_for(self, batch: Sequence[_Wanted]) -> None:
        """Have the thread make a batch, and give its callers an error if a prompt is stuck."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        making = self._thread.submit(self._make_all, batch, loop, ended)
        try:
            while True:
                current, left_s = self._current, PROMPT_TIMEOUT_S
                if current is not None:
                    left_s += current[0] - time.monotonic()
                done, _ = await asyncio.wait({ended}, timeout=max(0.0, left_s))
                if done:
                    return
                if current is not None and current is self._current and left_s <= 0:
                    error = PromptStuckError(_stuck(current[1]))
                    return _deliver([(wanted, error) for wanted in batch], ended)
        finally:
            making.cancel()

    def _make_all(
        self,
        batch: Sequence[_Wanted],
        loop: asyncio.AbstractEventLoop,
        ended: asyncio.Future[None],
    ) -> None:
        made: list[tuple[_Wanted, Any]] = []
        began_s = time.monotonic()
        for wanted in batch:
            self._current = (time.monotonic(), wanted)
            try:
                made.append((wanted, None if wanted.made.cancelled() else wanted.prompt()))
            # The caller gets any error, also a panic of the tokenizer, which is written in Rust.
            except BaseException as error:  # noqa: BLE001
                made.append((wanted, error))
            finally:
                self._current = None
            if time.monotonic() - began_s > KEPT_BACK_S and wanted is not batch[-1]:
                loop.call_soon_threadsafe(_deliver, made, None)
                made, began_s = [], time.monotonic()
        loop.call_soon_threadsafe(_deliver, made, ended)


def _deliver(made: Sequence[tuple[_Wanted, Any]], ended: asyncio.Future[None] | None) -> None:
    """Give callers their prompts, or errors in their place, and end the wait for the batch.

    Cancelled callers want nothing.
    """
    if ended is not None and not ended.done():
        ended.set_result(None)
    for wanted, result in made:
        if wanted.made.done():
            continue
        if isinstance(result, BaseException):
            wanted.made.set_exception(result)
        else:
            wanted.made.set_result(result)


def _stuck(wanted: _Wanted) -> str:
    return (
        f"the prompt of {wanted.label} is not made after {PROMPT_TIMEOUT_S:g} s: the chat template "
        f"of the tokenizer in {model_setting(wanted.tokenizer)} loops; put a chat_template.jinja "
        "that does not beside it"
    )


# A short prompt takes milliseconds, and does not wait for a long one.
SHORT_PROMPTS, LONG_PROMPTS = PromptThread(), PromptThread()

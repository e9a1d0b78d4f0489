"""Send an answer from the engine's process as a whole, not token by token.

vLLM sends every token as soon as it is sampled. `FINAL_ONLY` only makes the process that asked wait
for the last one. A message costs both processes more than the tokens in it.

    whole = WholeAnswers()
    outputs = whole.add(outputs, requests)    # after each step: the finished requests, in one piece
    outputs = whole.take()                    # before new weights: the tokens of the old ones

Tokens reach the other process with the version that sampled them: what was held back is sent before
the version changes. `send_whole_answers` patches the engine of this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists

ONLY_CLIENT = 0  # vLLM's number of the process that asks, our worker


class WholeAnswers:
    """Hold back the tokens of unfinished requests. One engine has one."""

    def __init__(self) -> None:
        self._parts: dict[str, list[EngineCoreOutput]] = {}  # by request

    def add(
        self, outputs: Sequence[EngineCoreOutput], requests: Mapping[str, Any]
    ) -> list[EngineCoreOutput]:
        """Return the outputs to send, after a step. `requests` are vLLM's, the unfinished ones."""
        due = []
        for output in outputs:
            if output.finished:
                due.append(joined([*self._parts.pop(output.request_id, ()), output]))
            elif can_wait(requests[output.request_id].sampling_params):
                self._parts.setdefault(output.request_id, []).append(output)
            else:
                due.append(output)
        if len(self._parts) > len(requests):  # some were aborted
            self._parts = {name: held for name, held in self._parts.items() if name in requests}
        return due

    def take(self) -> list[EngineCoreOutput]:
        """Return all that was held back, one output for each request."""
        due = [joined(parts) for parts in self._parts.values()]
        self._parts = {}
        return due


def can_wait(params: SamplingParams | None) -> bool:
    """Return whether nobody needs a request's tokens before its end.

    The other process looks for texts that end an answer, so it needs each token at once.
    """
    return (
        params is not None
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.stop
    )


def joined(parts: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the outputs of several steps of one request as one. It changes the last of them."""
    first, last = parts[0], parts[-1]
    if first is not last:
        last.new_token_ids = list(chain.from_iterable(part.new_token_ids for part in parts))
        last.prefill_stats = first.prefill_stats
        found = [part.new_logprobs for part in parts if part.new_logprobs is not None]
        if found:
            last.new_logprobs = LogprobsLists(
                np.concatenate([logprobs.logprob_token_ids for logprobs in found]),
                np.concatenate([logprobs.logprobs for logprobs in found]),
                np.concatenate([logprobs.sampled_token_ranks for logprobs in found]),
            )
    return last


def send_whole_answers() -> None:
    """Make the engine in this process send whole answers. Call it before the engine's loop begins.

    An engine that keeps statistics goes on as before: they measure the time of each token.
    """
    whole = WholeAnswers()
    attach, change = EngineCoreProc._attach_weight_version, EngineCoreProc.set_weight_version

    def attach_and_hold(engine: Any, outputs: dict[int, EngineCoreOutputs]) -> None:
        attach(engine, outputs)
        if engine.log_stats:
            return
        for client, message in list(outputs.items()):
            message.outputs = whole.add(message.outputs, engine.scheduler.requests)
            if not message.outputs:
                del outputs[client]

    def send_and_change(engine: Any, weight_version: str) -> None:
        if due := whole.take():
            message = EngineCoreOutputs(outputs=due, weight_version=engine._weight_version)
            engine.output_queue.put_nowait((ONLY_CLIENT, message))
        change(engine, weight_version)

    EngineCoreProc._attach_weight_version = attach_and_hold
    EngineCoreProc.set_weight_version = send_and_change

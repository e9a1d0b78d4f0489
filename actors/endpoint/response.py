"""A completion as a chat client gets to see it: cut to what the request allowed, and written as
OpenAI's JSON. Pure.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.policy import Completion
from actors.prompting.chat_template import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    text: str  # without the stop text, as OpenAI has it
    token_ids: tuple[int, ...]  # with the tokens that complete the stop text: these were sampled
    logprobs: tuple[float, ...]
    finish_reason: str  # "stop" or "length"
    ended: bool  # the last token is the model's own end


def cut_reply(
    completion: Completion, tokenizer: Tokenizer, *, max_tokens: int, stop: Sequence[str]
) -> Reply:
    """The first tokens of a completion: up to those that complete a text of `stop`, and at most
    `max_tokens`.

    Each token was sampled given those before it alone, so the first ones have the distribution, and
    the log-probabilities, that they would have if generation had stopped there.
    """
    token_ids = completion.token_ids[:max_tokens]
    reason = "length" if len(token_ids) < len(completion.token_ids) else completion.finish_reason
    text = _text(tokenizer, token_ids)
    found = [one for one in stop if one in text]
    ended = reason == "stop" and not found
    if found:
        one = min(found, key=lambda one: text.find(one) + len(one))  # the first to be complete
        # The fewest tokens whose text has it; a longer beginning has it too.
        n = bisect_left(
            range(len(token_ids)), True, key=lambda n: one in _text(tokenizer, token_ids[:n])
        )
        token_ids, text, reason = token_ids[:n], text[: text.find(one)], "stop"
    return Reply(
        text=text,
        token_ids=token_ids,
        logprobs=completion.logprobs[: len(token_ids)],
        finish_reason=reason,
        ended=ended,
    )


def chat_completion(
    replies: Sequence[Reply],
    tokenizer: Tokenizer,
    *,
    reply_id: str,
    model: str,
    n_prompt: int,
    logprobs: bool,
) -> dict[str, object]:
    """The body of an answer with a choice for each reply; `n_prompt` in tokens."""
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": reply.text, "refusal": None},
                "logprobs": _logprobs(reply, tokenizer) if logprobs else None,
                "finish_reason": reply.finish_reason,
            }
            for index, reply in enumerate(replies)
        ],
        "usage": _usage(replies, n_prompt=n_prompt),
    }


def chunks(body: dict[str, object], *, include_usage: bool) -> Iterator[dict[str, object]]:
    """The same answer as a client that asked for a stream reads it. Each reply comes in one piece,
    when it is whole.
    """
    common = {**body, "object": "chat.completion.chunk"}
    del common["usage"]
    choices = body["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        shown = {
            "index": choice["index"],
            "delta": choice["message"],
            "logprobs": choice["logprobs"],
            "finish_reason": None,
        }
        yield {**common, "choices": [shown]}
        yield {
            **common,
            "choices": [
                {**shown, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
            ],
        }
    if include_usage:
        yield {**common, "choices": [], "usage": body["usage"]}


def _usage(replies: Sequence[Reply], *, n_prompt: int) -> dict[str, int]:
    n_response = sum(len(reply.token_ids) for reply in replies)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_response,
        "total_tokens": n_prompt + n_response,
    }


def _logprobs(reply: Reply, tokenizer: Tokenizer) -> dict[str, object]:
    tokens = [
        tokenizer.decode([token_id], skip_special_tokens=False) for token_id in reply.token_ids
    ]
    shown = zip(tokens, reply.logprobs, strict=True)
    content: list[dict[str, object]] = [
        {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in shown
    ]
    return {"content": content, "refusal": None}


def _text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)

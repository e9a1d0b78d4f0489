"""Cut a completion to the request's limits, and write it as OpenAI's JSON. Pure functions."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from actors.endpoint.conversation import Tools
from actors.endpoint.tool_call_reader import ToolCallReader
from actors.policy import Completion
from actors.prompting.chat_template import Tokenizer
from actors.prompting.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    text: str  # without the stop text, as OpenAI has it
    message: Message  # the text, or the tool calls in it and the rest of it
    completion: Completion  # as cut, including the sampled tokens of the stop text
    ended: bool  # the last token is the model's end token


def cut_reply(
    completion: Completion, tokenizer: Tokenizer, *, max_tokens: int, stop: Sequence[str]
) -> Reply:
    """Keep the tokens up to those that complete a text of `stop`, and at most `max_tokens`.

    A token's distribution depends only on the tokens before it. So the kept tokens have the
    log-probabilities that they would have if generation had stopped there.
    """
    token_ids = completion.token_ids[:max_tokens]
    reason = "length" if len(token_ids) < len(completion.token_ids) else completion.finish_reason
    text = _text(tokenizer, token_ids)
    found = [one for one in stop if one in text]
    ended = reason == "stop" and not found
    if found:
        first = min(found, key=lambda one: text.find(one) + len(one))  # the first one completed
        # Search the fewest tokens whose text has it; with more tokens the text has it too.
        n = bisect_left(
            range(len(token_ids)), True, key=lambda n: first in _text(tokenizer, token_ids[:n])
        )
        token_ids = token_ids[:n]
        text = text[: text.find(first)]
        reason = "stop"
    logprobs = completion.logprobs[: len(token_ids)]
    cut = replace(completion, token_ids=token_ids, logprobs=logprobs, finish_reason=reason)
    message = Message(role="assistant", content=text)
    return Reply(text=text, message=message, completion=cut, ended=ended)


def with_calls(
    reply: Reply, tokenizer: Tokenizer, *, reader: ToolCallReader, tools: Tools, label: str
) -> Reply:
    """Return the reply with the tool calls that `reader` finds in it. Waits for its process.

    They are read from the tokens: in some models the marks of a call are special tokens.
    """
    token_ids = reply.completion.token_ids
    said = token_ids[: len(token_ids) - reply.ended]
    text = tokenizer.decode(said, skip_special_tokens=False)
    content, calls = reader.read(text, tools, label=label)
    if not calls:
        return reply
    message = Message(role="assistant", content=content, tool_calls=calls)
    return replace(reply, message=message)


def chat_completion(
    replies: Sequence[Reply],
    tokenizer: Tokenizer,
    *,
    reply_id: str,
    model: str,
    n_prompt: int,
    logprobs: bool,
) -> dict[str, object]:
    """Return the body of an answer with one choice per reply; `n_prompt` is in tokens."""
    n_response = sum(len(reply.completion.token_ids) for reply in replies)
    return {
        "id": reply_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": index,
                "message": _message(reply.message),
                "logprobs": _logprobs(reply.completion, tokenizer) if logprobs else None,
                "finish_reason": _finish_reason(reply),
            }
            for index, reply in enumerate(replies)
        ],
        "usage": {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_response,
            "total_tokens": n_prompt + n_response,
        },
    }


def chunks(body: dict[str, object], *, include_usage: bool) -> Iterator[dict[str, object]]:
    """Yield the answer as a stream. Each reply comes in one piece, when it is complete."""
    common = {**body, "object": "chat.completion.chunk"}
    del common["usage"]
    choices = body["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
            ]
        text = {
            "index": choice["index"],
            "delta": delta,
            "logprobs": choice["logprobs"],
            "finish_reason": None,
        }
        end = {**text, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield {**common, "choices": [text]}
        yield {**common, "choices": [end]}
    if include_usage:
        yield {**common, "choices": [], "usage": body["usage"]}


def _message(message: Message) -> dict[str, object]:
    if not message.tool_calls:
        return {"role": "assistant", "content": message.content, "refusal": None}
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    content = message.content or None
    return {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls}


def _finish_reason(reply: Reply) -> str:
    reason = reply.completion.finish_reason
    return "tool_calls" if reply.message.tool_calls and reason == "stop" else reason


def _logprobs(completion: Completion, tokenizer: Tokenizer) -> dict[str, object]:
    content: list[dict[str, object]] = []
    for token_id, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        token = tokenizer.decode([token_id], skip_special_tokens=False)
        content.append({"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _text(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)

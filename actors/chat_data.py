"""Turn chats of a file into trajectories to clone: each reply of the assistant is a step.

    chats = read_chats(Path("chats.jsonl"))        # one chat a line or, in Parquet, a row
    found = chat_trajectories(chats, tokenizer, ...)

A chat has `messages` as in the OpenAI API and, if it has tool calls, `tools`; both may be JSON
texts. `id` names it. Prompts are written with the model's own chat template, and each begins
with the tokens of the prompt and the reply before it. So the learner sees a chat as one sequence,
and learns the replies only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import TemplateError
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from actors.endpoint.conversation import Conversation, PromptTooLong, Tools
from actors.endpoint.request import ChatMessage, first_fault, refused
from actors.policy import Completion, Prompt
from actors.prompting.chat_template import Tokenizer, chat_variables, longest_token
from actors.prompting.messages import Message, ToolCall, parse_arguments, seen_text
from actors.rollout.step_records import (
    NO_OUTCOME_YET,
    EpisodeIds,
    SampledAnswer,
    step_of,
    trajectory_of,
)
from configs import ConfigError
from envs import Observation, Task
from printable import one_line
from store import TRAIN, Step, Trajectory, now_us, open_file_by_own_links, uid, valid_text

ENV_NAME = "chat"  # environment name of the trajectories
SUFFIXES = (".jsonl", ".parquet")
ROWS_READ = 1000  # of a Parquet file at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOfFile:
    place: str  # file and number of the chat, from 1
    name: str
    messages: tuple[Message, ...]
    tools: Tools


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundChats:
    """The chats of a file as trajectories, one group each."""

    trajectories: list[Trajectory]
    n_cut: int  # chats that lost their later replies, because they are too long
    n_left_out: int  # chats whose first reply is too long already


def _from_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Row(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, fail_fast=True), BeforeValidator(_from_json)
    ]
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(_from_json)] = None
    id: str | None = None


def is_chat_file(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.is_file()


def read_chats(path: Path) -> Iterator[ChatOfFile]:
    """Yield the chats of a file, in order.

    Raises ConfigError that names the chat and the field, and for a file without chats.
    """
    number = 0
    for number, content in enumerate(_rows(path), start=1):
        place = f"{path}: chat {number}"
        try:
            row = _Row.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"{place}: {refused(*first_fault(error))}") from None
        messages = tuple(_without_surrogates(message.plain()) for message in row.messages)
        if not any(message.role == "assistant" for message in messages[1:]):
            raise ConfigError(
                f"{place} has no reply of the assistant after another message; leave it out"
            )
        yield ChatOfFile(
            place=place,
            name=valid_text(row.id or f"chat-{number}"),
            messages=messages,
            tools=row.tools or (),
        )
    if not number:
        raise ConfigError(f"{path} has no chats; it needs one JSON object a line, or one row each")


def _without_surrogates(message: Message) -> Message:
    """Return a message without lone surrogates, which no tokenizer takes."""
    return Message(
        role=valid_text(message.role),
        content=valid_text(message.content),
        tool_calls=tuple(
            ToolCall(
                id=valid_text(call.id),
                name=valid_text(call.name),
                arguments=valid_text(call.arguments),
            )
            for call in message.tool_calls
        ),
        tool_call_id=valid_text(message.tool_call_id),
        name=valid_text(message.name),
    )


def chat_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file's chats, to train a tokenizer on. Raises as `read_chats`.

    Calls have the form of Hermes and Qwen2.5, as in the tiny model's chat template.
    """
    for chat in read_chats(path):
        for message in chat.messages:
            if message.content:
                yield message.content
            for call in message.tool_calls:
                # Without its form, each character of "arguments" is a token of every call.
                written = {"name": call.name, "arguments": parse_arguments(call.arguments)}
                yield f"<tool_call>{json.dumps(written, ensure_ascii=False)}</tool_call>"


def chat_trajectories(
    chats: Iterable[ChatOfFile],
    tokenizer: Tokenizer,
    *,
    file_id: str,
    thinking: bool | None,
    max_tokens: int,
) -> FoundChats:
    """Write the chats with the tokenizer's chat template.

    A chat ends before the first reply that does not end within `max_tokens`, prompt included. Uids
    are made of `file_id` and the chat's number. Raises ConfigError for a chat that the template
    does not take.
    """
    trajectories: list[Trajectory] = []
    n_cut = n_left_out = 0
    longest = longest_token(tokenizer)
    for number, chat in enumerate(chats):
        conversation = Conversation(
            tokenizer,
            chat_variables=chat_variables(thinking),
            max_characters=max_tokens * longest,
        )
        steps, is_whole = _steps(chat, conversation, tokenizer=tokenizer, max_tokens=max_tokens)
        if not steps:
            n_left_out += 1
            continue
        n_cut += not is_whole
        trajectories.append(
            trajectory_of(
                steps,
                task=Task(id=chat.name, env_name=ENV_NAME, split=TRAIN, seed=0),
                ids=EpisodeIds.of(uid("chat", file_id, number), 0),
                won=True,  # somebody chose it as an example
                task_score=None,
                final=None,
            )
        )
    return FoundChats(trajectories=trajectories, n_cut=n_cut, n_left_out=n_left_out)


def _rows(path: Path) -> Iterator[object]:
    """Yield the rows of a file as Python values. Raises ConfigError for an unreadable file.

    The run keeps them, and others may be able to read it. So no link of another user leads to a
    file that is neither theirs nor for everybody to read.
    """
    try:
        with open(open_file_by_own_links(path), "rb") as file:
            if path.suffix == ".parquet":
                parquet = pq.ParquetFile(file)
                columns = [name for name in parquet.schema_arrow.names if name in _Row.model_fields]
                for batch in parquet.iter_batches(ROWS_READ, columns=columns):
                    yield from batch.to_pylist()
                return
            # Its owner may make it longer meanwhile, without end.
            n_left, number = os.fstat(file.fileno()).st_size, 0
            while line := file.readline(n_left):
                n_left, number = n_left - len(line), number + 1
                if line.strip():
                    yield _parsed(line.decode(), place=f"{path}: line {number}")
    except ConfigError:
        raise
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} cannot be read as chats: {one_line(error)}") from None


def _parsed(line: str, *, place: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is no JSON: {one_line(error)}") from None


def _steps(
    chat: ChatOfFile, conversation: Conversation, *, tokenizer: Tokenizer, max_tokens: int
) -> tuple[list[Step], bool]:
    """Return a step for each reply, and whether all of them fit."""
    ends = [end for end, message in enumerate(chat.messages) if end and message.role == "assistant"]
    steps: list[Step] = []
    for end in ends:
        before, reply = chat.messages[:end], chat.messages[end]
        try:
            prompt_ids = conversation.prompt(before, tools=chat.tools)
            response_ids = conversation.written(before, reply=reply, tools=chat.tools)
        except PromptTooLong:
            break
        except (TemplateError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{chat.place}: the reply in messages[{end}] cannot be written: {one_line(error)}"
            ) from None
        token_ids = prompt_ids + response_ids
        if len(token_ids) > max_tokens:
            break
        conversation.record(before, reply=reply, token_ids=token_ids, ended=True, tools=chat.tools)
        steps.append(
            step_of(
                SampledAnswer(
                    prompt=Prompt(token_ids=prompt_ids, actions=None),
                    completion=_as_written(response_ids),
                    t_start_us=now_us(),
                    gen_us=0,
                ),
                step_index=len(steps),
                observation=Observation(text=seen_text(before)),
                anchor=None,  # no other chat can share the state
                action=tokenizer.decode(response_ids, skip_special_tokens=True),
                is_valid=True,
                outcome=replace(NO_OUTCOME_YET, terminated=end == ends[-1]),
            )
        )
    return steps, len(steps) == len(ends)


def _as_written(response_ids: tuple[int, ...]) -> Completion:
    """Return a reply that nobody sampled. Cloning does not read its log-probabilities."""
    return Completion(
        token_ids=response_ids,
        logprobs=(0.0,) * len(response_ids),
        finish_reason="stop",
        version_min=0,
        version_max=0,
    )

"""Serve an OpenAI-compatible HTTP endpoint that records each chat completion as a Step.

    endpoint = Endpoint(policy, tokenizer, config=config)
    await endpoint.start()                    # on this event loop, at 127.0.0.1, on a free port
    with endpoint.episode(ids, rules, progress=progress, label="task 7") as recording:
        ...                                   # a program calls recording.client.base_url
        steps = recording.steps()
    await endpoint.close()

It serves POST /v1/chat/completions and GET /v1/models. The API key tells which episode a request
belongs to. A request whose client has gone is cancelled, so that a reply that nobody got is no
step.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from aiohttp import web
from jinja2 import TemplateError

from actors.endpoint.conversation import Conversation, PromptTooLong, Tools
from actors.endpoint.request import ChatRequest, RequestError, parse_request, refused, takes_long
from actors.endpoint.response import Reply, chat_completion, chunks, cut_reply, with_calls
from actors.endpoint.tool_call_reader import ToolCallReader
from actors.policy import Completion, Policy, Prompt
from actors.prompting.chat_template import Tokenizer, chat_variables, longest_token
from actors.prompting.messages import Message, seen_text
from actors.prompting.prompt_thread import LONG_PROMPTS, SHORT_PROMPTS, PromptStuckError
from actors.rollout.episode import AttemptProgress, EpisodeRules, completion_of
from actors.rollout.step_records import EpisodeIds, SampledAnswer, anchor_of, step_of
from configs import Config, max_model_tokens
from envs import (
    LINGERING_S,
    MALFORMED_REQUEST,
    NO_OTHER_PROTOCOL,
    ClientSettings,
    GuardedSite,
    Observation,
    content_encoding,
    end_connection,
    server_logger,
    wants_other_protocol,
)
from printable import one_line
from row_bounds import MAX_EPISODE_BYTES
from store import Step, now_us, uid_text

MAX_BODY_BYTES = 64 * 2**20  # whatever the model takes
MIN_BODY_BYTES = 2**20
BYTES_PER_CHARACTER = 6  # in JSON, where a character may be written as "\\u1234"
BODY_TIMEOUT_S = 60.0  # for a client to send its whole request
IDLE_TIMEOUT_S = 120.0  # for a connection without a complete request
CLOSE_TIMEOUT_S = 1.0  # for answers that are being written
T = TypeVar("T")
KEY = re.compile("episode-([0-9]{1,19})-[0-9a-f]{32}")  # number of an episode, and its signature


HAS_ENDED = "this episode has ended; its API key is of no use"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Question:
    """One request, as its answers are generated, read and recorded."""

    messages: tuple[Message, ...]
    tools: Tools
    observation: Observation  # the step's: the messages' text, and the request's anchor
    prompt: Prompt
    reader: ToolCallReader | None  # None: replies are not searched for tool calls


class Recording:
    """Record one episode: its limits, and its steps so far. Unblocked by the policy."""

    def __init__(
        self,
        ids: EpisodeIds,
        rules: EpisodeRules,
        *,
        progress: AttemptProgress,
        conversation: Conversation,
        client: ClientSettings,
        label: str,
    ) -> None:
        self.ids = ids
        self.rules = rules
        self._progress = progress
        self.conversation = conversation
        self.client = client
        self.label = label  # for errors
        self.cut_off = ""  # why a request was refused because the episode is too long
        self.failure: Exception | None = None  # of the policy or the chat template
        self.is_over = False
        self._numbers = itertools.count()  # of completions, in the order of the requests
        self._n_in_flight = 0
        self._recorded: dict[int, Step] = {}

    def steps(self) -> list[Step]:
        """Return the steps in the order of their requests, numbered without gaps.

        They lack reward, end and the program's time.
        """
        in_order = sorted(self._recorded.items())
        return [replace(step, step_index=index) for index, (_, step) in enumerate(in_order)]

    @contextmanager
    def reserve(self, n_more: int) -> Iterator[None]:
        """Count `n_more` completions as in flight. Raises as `refuse_beyond`."""
        self.refuse_beyond(n_more)
        self._n_in_flight += n_more
        try:
            yield
        finally:
            self._n_in_flight -= n_more

    def numbers(self, n: int) -> list[int]:
        """Return the numbers of the next n completions."""
        return [next(self._numbers) for _ in range(n)]

    def record(
        self, number: int, reply: Reply, *, question: _Question, sampled: SampledAnswer
    ) -> None:
        """Keep a reply as a step, and its tokens for prompts that go on from it."""
        step = step_of(
            replace(sampled, completion=reply.completion),  # without the tokens that were cut off
            step_index=number,
            observation=question.observation,
            anchor=anchor_of(question.observation),
            action=reply.text,
            is_valid=reply.completion.finish_reason == "stop",
        )
        self._recorded[number] = step
        self._progress.add(step)
        self.conversation.record(
            question.messages,
            reply=reply.message,
            token_ids=question.prompt.token_ids + reply.completion.token_ids,
            ended=reply.ended,
            tools=question.tools,
        )

    def refuse_beyond(self, n_more: int) -> None:
        """Raise RequestError if the episode has no room for `n_more` completions, or is over."""
        if self.is_over:
            raise _episode_over(HAS_ENDED)
        if len(self._recorded) + self._n_in_flight + n_more > self.rules.max_steps:
            why = (
                f"the episode has had the {self.rules.max_steps} chat completions that "
                "env.max_steps allows"
            )
            self.mark_cut_off(why)
            raise _episode_over(why)
        if self._progress.is_full:
            why = (
                f"the episode has had {MAX_EPISODE_BYTES} bytes of texts and tokens; send shorter "
                "messages, or fewer"
            )
            self.mark_cut_off(why)
            raise _episode_over(why)

    def mark_cut_off(self, why: str) -> None:
        """Note that the episode is too long: a program that ends with that error did not fail."""
        self.cut_off = why


class Endpoint:
    """Serve one policy to the programs of a worker."""

    def __init__(self, policy: Policy, tokenizer: Tokenizer, *, config: Config) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.base_url = ""  # known when it listens
        self._model = Path(config.run_dir).name  # as /v1/models names it
        self._max_response_tokens = config.actors.max_response_tokens
        self._max_model_tokens = max_model_tokens(config)  # prompt and response together
        self._chat_variables = chat_variables(config.prompt.thinking)
        self._tool_parser_name = config.prompt.tool_parser
        self._reader: ToolCallReader | None = None  # made at the first request with tools
        # Waits for the reader's process, while the event loop has heartbeats to send.
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tool-calls")
        self._secret = secrets.token_bytes(32)
        self._numbers = itertools.count()
        self._open: dict[int, Recording] = {}
        self._max_characters = self._max_model_tokens * longest_token(tokenizer)
        longest = max(MIN_BODY_BYTES, BYTES_PER_CHARACTER * self._max_characters)
        self._max_body_bytes = min(MAX_BODY_BYTES, longest)
        app = web.Application(middlewares=[_errors_as_json], client_max_size=self._max_body_bytes)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            shutdown_timeout=CLOSE_TIMEOUT_S,
            keepalive_timeout=IDLE_TIMEOUT_S,
            lingering_time=LINGERING_S,
            logger=server_logger(),
        )

    async def start(self) -> None:
        await self._runner.setup()
        await GuardedSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()
        self._reading.shutdown(wait=False, cancel_futures=True)
        if self._reader is not None:
            await asyncio.to_thread(self._reader.close)

    @contextmanager
    def episode(
        self,
        ids: EpisodeIds,
        rules: EpisodeRules,
        *,
        progress: AttemptProgress,
        label: str = "an episode",
    ) -> Iterator[Recording]:
        """Record requests with its API key during the `with` block; refuse later ones."""
        number = next(self._numbers)
        client = ClientSettings(base_url=self.base_url, api_key=self._key(number))
        conversation = Conversation(
            self.tokenizer,
            chat_variables=self._chat_variables,
            max_characters=self._max_characters,
        )
        recording = self._open[number] = Recording(
            ids,
            rules,
            progress=progress,
            conversation=conversation,
            client=client,
            label=label,
        )
        try:
            yield recording
        finally:
            recording.is_over = True
            del self._open[number]

    def _key(self, number: int) -> str:
        signature = hmac.new(self._secret, str(number).encode(), hashlib.sha256).hexdigest()[:32]
        return f"episode-{number}-{signature}"

    def _recording(self, request: web.Request) -> Recording:
        """Return the request's episode. Raises RequestError: 401 unknown key, 410 ended episode."""
        _, _, key = request.headers.get("Authorization", "").partition(" ")
        found = KEY.fullmatch(key)
        number = int(found[1]) if found else -1
        if not found or not hmac.compare_digest(key, self._key(number)):
            message = (
                "this API key belongs to no episode; use the one that `run(task, client)` was given"
            )
            raise RequestError(message, status=401, code="invalid_api_key", param=None)
        if number not in self._open:
            raise _episode_over(HAS_ENDED)
        return self._open[number]

    async def _models(self, request: web.Request) -> web.Response:
        self._recording(request)
        _check_no_page(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "async-gigpo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        recording = self._recording(request)
        _check_no_page(request)
        if encoding := content_encoding(request):
            message = f"the body is compressed ({encoding}); send it as it is"
            raise RequestError(message, status=415, code="unsupported_encoding", param=None)
        if wants_other_protocol(request):
            raise refused(NO_OTHER_PROTOCOL, None)
        # Reserved before anything is read: a program that sends a thousand requests at once would
        # fill the memory with them, and the prompts of other episodes would wait for theirs.
        with recording.reserve(1):
            asked = parse_request(await self._read(request, recording))
            with recording.reserve(asked.n_choices - 1):
                number, replies, n_prompt = await self._answer(recording, asked)
        body = chat_completion(
            replies,
            self.tokenizer,
            reply_id=f"chatcmpl-{uid_text(recording.ids.traj_uid)}-{number}",
            model=self._model,
            n_prompt=n_prompt,
            logprobs=bool(asked.logprobs),
        )
        if not asked.stream:
            return web.json_response(body)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        for chunk in chunks(body, include_usage=asked.include_usage):
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _read(self, request: web.Request, recording: Recording) -> bytes:
        """Read the request's body.

        Raises RequestError if it is too long for the model, late, or not packed as its head says.
        """
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            size = f"the request has more than {self._max_body_bytes} bytes"
            raise self._too_long(recording, size) from None
        except TimeoutError:
            why = f"the request did not arrive within {BODY_TIMEOUT_S:g} s"
            raise RequestError(why, status=408, code="request_timeout", param=None) from None
        except MALFORMED_REQUEST as error:
            why = f"the body of the request is not readable: {one_line(error)}"
            raise refused(why, None) from None

    async def _answer(
        self, recording: Recording, asked: ChatRequest
    ) -> tuple[int, list[Reply], int]:
        """Generate, cut and record the completions of a request.

        Returns the number of the first one, all replies, and the number of prompt tokens.
        """
        question = await self._question(recording, asked)
        recording.refuse_beyond(0)  # a thread took time, in which the episode may have ended
        numbers = recording.numbers(asked.n_choices)
        answers = await self._generate(recording, question.prompt, numbers=numbers)
        n_prompt = len(question.prompt.token_ids)
        replies = self._cut_replies(answers, asked, n_prompt=n_prompt)
        if question.reader is not None:
            replies = await self._with_calls(
                replies, question.reader, tools=question.tools, label=recording.label
            )
        recording.refuse_beyond(0)
        for number, answer, reply in zip(numbers, answers, replies, strict=True):
            recording.record(number, reply, question=question, sampled=answer)
        return numbers[0], replies, n_prompt

    async def _question(self, recording: Recording, asked: ChatRequest) -> _Question:
        """Read a request: make its prompt, and the reader of tool calls if it offers tools."""
        messages = asked.conversation()
        n_anchor = len(asked.anchor or "")
        if n_anchor > self._max_characters:
            most = f"at most {self._max_characters}, as many as a prompt"
            raise refused(f"anchor has {n_anchor} characters; {most}", "anchor")
        reader = await self._tool_call_reader(recording) if asked.reads_calls else None
        tools = asked.offered
        token_ids = await self._prompt(recording, messages, tools=tools)
        return _Question(
            messages=messages,
            tools=tools,
            observation=Observation(text=seen_text(messages), anchor=asked.anchor),
            prompt=Prompt(token_ids=token_ids, actions=None),
            reader=reader,
        )

    def _cut_replies(
        self, answers: Sequence[SampledAnswer], asked: ChatRequest, *, n_prompt: int
    ) -> list[Reply]:
        """Cut each completion to the limits of the request, the run and the model."""
        room = self._max_model_tokens - n_prompt
        max_tokens = min(asked.token_limit or room, self._max_response_tokens, room)
        return [
            cut_reply(
                answer.completion, self.tokenizer, max_tokens=max_tokens, stop=asked.stop or ()
            )
            for answer in answers
        ]

    async def _with_calls(
        self, replies: Sequence[Reply], reader: ToolCallReader, *, tools: Tools, label: str
    ) -> list[Reply]:
        """Return the replies with the tool calls in them, which a thread reads."""
        read = partial(
            with_calls, tokenizer=self.tokenizer, reader=reader, tools=tools, label=label
        )
        loop = asyncio.get_running_loop()
        return [await loop.run_in_executor(self._reading, read, reply) for reply in replies]

    async def _tool_call_reader(self, recording: Recording) -> ToolCallReader:
        """Make the reader of tool calls in a thread, once. Raises RequestError without a parser."""
        if self._reader is not None:
            return self._reader
        try:
            return await self._in_thread(recording, self._make_reader, takes_long=True)
        except ValueError as error:
            raise refused(str(error), "tools") from None

    def _make_reader(self) -> ToolCallReader:
        if self._reader is None:  # the thread has made one for another request meanwhile
            self._reader = ToolCallReader(self.tokenizer, name=self._tool_parser_name)
        return self._reader

    async def _prompt(
        self, recording: Recording, messages: tuple[Message, ...], *, tools: Tools
    ) -> tuple[int, ...]:
        """Make the prompt in a thread: the event loop has heartbeats to send."""
        try:
            prompt_ids = await self._in_thread(
                recording,
                lambda: recording.conversation.prompt(messages, tools=tools),
                takes_long=takes_long(messages),
            )
        except PromptTooLong as error:
            raise self._too_long(recording, str(error)) from None
        if len(prompt_ids) >= self._max_model_tokens:
            raise self._too_long(recording, f"the prompt has {len(prompt_ids)} tokens")
        return prompt_ids

    async def _in_thread(
        self, recording: Recording, work: Callable[[], T], *, takes_long: bool
    ) -> T:
        """Return `work()`, which uses the chat template. Raises RequestError if that fails."""
        thread = LONG_PROMPTS if takes_long else SHORT_PROMPTS
        try:
            return await thread.make(work, tokenizer=self.tokenizer, label=recording.label)
        except PromptStuckError as error:
            recording.failure = error
            raise RequestError(str(error), status=500, code="prompt_failed", param=None) from error
        except TemplateError as error:
            raise refused(
                f"the model's chat template does not take these messages: {error}", "messages"
            ) from None

    def _too_long(self, recording: Recording, size: str) -> RequestError:
        limit = f"the model takes {self._max_model_tokens} tokens, prompt and reply together"
        why = f"{size}; {limit}"
        recording.mark_cut_off(why)
        return RequestError(why, status=400, code="context_length_exceeded", param=None)

    async def _generate(
        self, recording: Recording, prompt: Prompt, *, numbers: list[int]
    ) -> list[SampledAnswer]:
        """Sample a completion for each number at once. All have the time that the last one took."""
        started_us, started = now_us(), time.perf_counter()
        tasks = [
            asyncio.ensure_future(self._complete(recording, prompt, number=number))
            for number in numbers
        ]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        gen_us = round((time.perf_counter() - started) * 1e6)
        return [
            SampledAnswer(
                prompt=prompt, completion=completion, t_start_us=started_us, gen_us=gen_us
            )
            for completion in completions
        ]

    async def _complete(self, recording: Recording, prompt: Prompt, *, number: int) -> Completion:
        rules = recording.rules
        try:
            return await completion_of(
                self.policy, prompt, step_index=number, ids=recording.ids, rules=rules
            )
        except TimeoutError:
            why = f"no reply within actors.turn_timeout_s={rules.turn_timeout_s:g}"
            recording.mark_cut_off(why)
            raise _episode_over(why) from None
        except Exception as error:  # process border: `ProgramEpisodes` raises it in the worker
            recording.failure = error
            message = f"the policy failed: {type(error).__name__}: {error}"
            raise RequestError(message, status=500, code="policy_failed", param=None) from error


def _check_no_page(request: web.Request) -> None:
    """Raise RequestError for a web page's request, which a program does not make."""
    if "Origin" in request.headers:
        message = "this server is not for pages of a browser, and the request names an Origin"
        raise RequestError(message, status=403, code="origin_refused", param=None)


def _episode_over(why: str) -> RequestError:
    return RequestError(why, status=410, code="episode_over", param=None)


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error in OpenAI's form, with a header that tells clients not to retry."""
    try:
        return await handler(request)
    except RequestError as error:
        status = error.status
        message = str(error)
        code = error.code
        param = error.param
    except web.HTTPException as error:
        status = error.status
        code = "not_supported"
        param = None
        message = f"{request.method} {request.path}: {error.reason}"
        if status in (404, 405):
            message += "; there are POST /v1/chat/completions and GET /v1/models"
    except Exception as error:  # noqa: BLE001 - process border: the program gets the error
        traceback.print_exc()
        status = 500
        code = "internal_error"
        param = None
        message = f"{type(error).__name__}: {error}"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    response = web.json_response(body, status=status, headers={"x-should-retry": "false"})
    if status in (401, 404, 405):  # without a key, or before it was looked at
        end_connection(request, response)
    return response

"""Test the endpoint over HTTP, with the openai client and by hand, and the steps it records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Mapping
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import ValidationError

from actors.endpoint import request
from actors.endpoint.request import ChatRequest
from actors.endpoint.server import Endpoint, Recording
from actors.policy import Completion, EngineLostError, Prompt
from actors.rollout.episode import AttemptProgress, request_seed
from envs import ClientSettings
from store import state_hash
from tests.support.chat_samples import IDS, TextPolicy, completion, encode, rules, served, tokenizer

EOS = 1
GUESS = {"role": "user", "content": "guess my number"}


def call_of(arguments: str) -> dict[str, object]:
    function = {"name": "low", "arguments": arguments}
    return {"id": "1", "type": "function", "function": function}


CALL = call_of("{}")


async def post(
    client: ClientSettings, body: object, *, path: str = "/chat/completions"
) -> tuple[int, Any]:
    """Return status and JSON of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {client.api_key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(client.base_url + path, data=data, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


def ask(**fields: object) -> dict[str, object]:
    return {"model": "any", "messages": [GUESS], **fields}


def test_the_openai_client_plays_and_every_completion_is_a_step() -> None:
    policy = TextPolicy(["it is 7", "it is 12"])
    progress = AttemptProgress()

    async def body(endpoint: Endpoint) -> tuple[Recording, Any, Any, Any]:
        with endpoint.episode(IDS, rules(), progress=progress) as recording:
            client = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            messages: list[Any] = [{"role": "system", "content": "play"}, GUESS]
            first = await client.chat.completions.create(
                model="gpt-x", messages=messages, temperature=0.0, logprobs=True
            )
            messages += [
                first.choices[0].message,
                {"role": "user", "content": [{"type": "text", "text": "too low"}]},
            ]
            second = await client.chat.completions.create(
                model="gpt-x", messages=messages, extra_body={"anchor": "below 12"}
            )
            models = await client.models.list()
            await client.close()
        return recording, first, second, models

    recording, first, second, models = served(policy, body)
    one, two = recording.steps()
    assert (progress.n_steps, progress.n_response_tokens) == (
        2,
        len(one.response_ids) + len(two.response_ids),
    )
    assert [choice.message.content for choice in first.choices] == ["it is 7"]
    assert [(entry.token, entry.logprob) for entry in first.choices[0].logprobs.content] == [
        (tokenizer().decode([token]), -0.5 - place) for place, token in enumerate(one.response_ids)
    ]
    assert second.choices[0].logprobs is None
    assert (first.model, [model.id for model in models.data]) == ("number-game", ["number-game"])
    assert first.usage.prompt_tokens == len(one.prompt_ids)
    assert (first.usage.completion_tokens, first.choices[0].finish_reason) == (
        len(one.response_ids),
        "stop",
    )
    assert one.response_ids == (*encode("it is 7"), EOS)
    assert one.response_logprobs == tuple(-0.5 - place for place in range(len(one.response_ids)))
    assert (
        two.prompt_ids[: len(one.prompt_ids + one.response_ids)]
        == one.prompt_ids + one.response_ids
    )
    assert [prompt.token_ids for prompt in policy.prompts] == [one.prompt_ids, two.prompt_ids]
    assert [(step.version_min, step.version_max) for step in (one, two)] == [(0, 1), (1, 2)]
    assert (one.obs_text, one.anchor_text, one.action_text) == (
        "guess my number",
        "guess my number",
        "it is 7",
    )
    assert (two.obs_text, two.anchor_text, two.action_text) == ("too low", "below 12", "it is 12")
    assert two.state_hash == state_hash("below 12")
    assert one.is_action_valid and (one.reward, one.terminated, one.truncated) == (
        0.0,
        False,
        False,
    )
    assert policy.seeds == [request_seed(IDS.traj_uid, 0), request_seed(IDS.traj_uid, 1)]
    assert policy.temperatures == [0.7, 0.7]  # the run's, whatever the request says


def test_a_stream_brings_the_same_reply() -> None:
    async def body(endpoint: Endpoint) -> list[Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            client = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            stream = await client.chat.completions.create(
                model="m",
                messages=[GUESS],
                n=2,
                stream=True,
                stream_options={"include_usage": True},
            )
            seen = [chunk async for chunk in stream]
            await client.close()
        assert len(recording.steps()) == 2
        return seen

    *seen, last = served(TextPolicy(["it is 7", "12"]), body)
    texts = {0: "", 1: ""}
    for chunk in seen:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "it is 7", 1: "12"}
    assert [c.finish_reason for chunk in seen for c in chunk.choices] == [
        None,
        "stop",
        None,
        "stop",
    ]
    assert (last.choices, last.usage.completion_tokens) == (
        [],
        len(encode("it is 7")) + len(encode("12")) + 2,
    )


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"top_logprobs": 5}, "top_logprobs", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"best_off": 2}, "best_off", "not a field"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [GUESS, {"role": "tools", "content": "x"}]}, "messages[1].role", "'tool'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "'assistant'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]", "content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
            "is missing",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages[0]",
            "a message of the user has tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call_of("[1]")]}]},
            "messages[0].tool_calls[0].function.arguments",
            "a JSON object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call_of("{")]}]},
            "messages[0].tool_calls[0].function.arguments",
            "Expecting",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "not JSON"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"n": True}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "integer"),
        ({"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"anchor": 3}, "anchor", "string"),
        ({"anchor": "x" * 900_000}, "anchor", "as many as a prompt"),
    ],
)
def test_a_field_that_is_not_served_is_refused_by_name(
    fields: dict[str, object], param: str, says: str
) -> None:
    async def body(endpoint: Endpoint) -> tuple[int, Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            answer = await post(recording.client, ask(**fields))
            assert recording.steps() == []
            return answer

    status, answer = served(TextPolicy(["7"]), body)
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (
        400,
        param,
        "invalid_request_error",
    )
    assert says in answer["error"]["message"]


def test_it_serves_on_the_event_loop_that_ray_takes_where_uvloop_is_installed() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def body(endpoint: Endpoint) -> tuple[int, Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            return await post(recording.client, ask())

    status, _ = served(TextPolicy(["7"]), body, loop_factory=uvloop.new_event_loop)
    assert status == 200


def test_a_field_that_makes_no_difference_is_accepted() -> None:
    fields = {
        "temperature": 2,
        "top_p": 0.1,
        "seed": 3,
        "user": "me",
        "tools": [],
        "response_format": {"type": "text"},
    }

    async def body(endpoint: Endpoint) -> int:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            return (await post(recording.client, ask(**fields, stop=None, logit_bias={})))[0]

    assert served(TextPolicy(["7"]), body) == 200


def test_errors_of_other_kinds() -> None:
    async def body(endpoint: Endpoint) -> list[tuple[int, Any]]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            client = recording.client
            short = ClientSettings(base_url=client.base_url, api_key="sk-mine")
            forged = ClientSettings(base_url=client.base_url, api_key=client.api_key[:-1] + "g")
            answers = [
                await post(short, ask()),
                await post(forged, ask()),
                await post(client, b"{no json"),
                await post(client, ask(), path="/responses"),
                await post(client, ask(messages=[{"role": "system", "content": "x"}])),
                await post(client, ask(messages=[{"role": "user", "content": "guess " * 200}])),
            ]
            assert recording.cut_off
        return [*answers, await post(client, ask())]

    answers = served(TextPolicy(["7"]), body, template="plain")
    statuses = [(status, answer["error"]["code"]) for status, answer in answers]
    assert statuses == [
        (401, "invalid_api_key"),
        (401, "invalid_api_key"),
        (400, "invalid_value"),
        (404, "not_supported"),
        (400, "invalid_value"),
        (400, "context_length_exceeded"),
        (410, "episode_over"),
    ]
    messages = [answer["error"]["message"] for _, answer in answers]
    assert "POST /v1/chat/completions" in messages[3]
    assert "no system messages here" in messages[4]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/nowhere"])
def test_what_a_stranger_sends_after_his_refusal_is_not_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a body in chunks of one byte, which was read for 10 s more."""
    monkeypatch.setattr("actors.endpoint.server.LINGERING_S", 1000.0)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def body(endpoint: Endpoint) -> bytes:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + 10 * b"1\r\na\r\n")
            async with asyncio.timeout(60.0):
                return await reader.read()
        finally:
            writer.close()

    assert b" 40" in served(TextPolicy(["7"]), body)


def test_an_episode_with_too_many_texts_for_one_file_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.rollout.episode.MAX_EPISODE_BYTES", 10)

    async def body(endpoint: Endpoint) -> list[int]:
        with endpoint.episode(IDS, rules(max_steps=3), progress=AttemptProgress()) as recording:
            statuses = [(await post(recording.client, ask()))[0] for _ in range(2)]
            assert "bytes of texts and tokens" in recording.cut_off
            assert len(recording.steps()) == 1
            return statuses

    assert served(TextPolicy(["7"]), body) == [200, 410]


def test_the_openai_client_raises_its_own_errors_and_asks_for_none_of_them_again() -> None:
    policy = TextPolicy(["7"])

    async def body(endpoint: Endpoint) -> None:
        with endpoint.episode(IDS, rules(max_steps=1), progress=AttemptProgress()) as recording:
            client = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            with pytest.raises(openai.BadRequestError, match="tools") as refused:
                await client.chat.completions.create(
                    model="m", messages=[GUESS], tools=[{"type": "function"}]
                )  # type: ignore[list-item]
            assert refused.value.param == "tools[0].function"
            await client.chat.completions.create(model="m", messages=[GUESS])
            with pytest.raises(
                openai.APIStatusError, match="the 1 chat completions that env.max_steps allows"
            ) as too_many:
                await client.chat.completions.create(model="m", messages=[GUESS])
            assert too_many.value.status_code == 410
        with pytest.raises(openai.APIStatusError, match="this episode has ended"):
            await client.chat.completions.create(model="m", messages=[GUESS])
        with pytest.raises(openai.AuthenticationError, match="belongs to no episode"):
            await client.with_options(api_key="sk-wrong").models.list()
        await client.close()

    served(policy, body)
    assert len(policy.prompts) == 1


@pytest.mark.parametrize(
    ("fields", "text", "n_tokens", "reason"),
    [
        ({}, "it is 7 or 12", 40, "stop"),
        ({"max_tokens": 2}, None, 2, "length"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, None, 3, "length"),
        ({"max_tokens": 10**6}, "it is 7 or 12", 40, "stop"),
        ({"stop": " or"}, "it is 7", 40, "stop"),
    ],
)
def test_a_reply_is_as_long_as_asked_for(
    fields: dict[str, object], text: str | None, n_tokens: int, reason: str
) -> None:
    async def body(endpoint: Endpoint) -> tuple[Any, Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            _, answer = await post(recording.client, ask(**fields))
        return answer["choices"][0], recording.steps()[0]

    choice, step = served(TextPolicy(["it is 7 or 12"]), body)
    whole = (*encode("it is 7 or 12"), EOS)
    assert step.response_ids == whole[: len(step.response_ids)]
    assert len(step.response_ids) == len(step.response_logprobs) <= n_tokens
    assert len(step.response_ids) == n_tokens or n_tokens == 40
    assert (
        choice["message"]["content"]
        == step.action_text
        == (text or tokenizer().decode(whole[:n_tokens]))
    )
    assert (choice["finish_reason"], step.finish_reason, step.is_action_valid) == (
        reason,
        reason,
        reason == "stop",
    )


class Slow:
    """Reply with the prompt's last word; the first request is answered last."""

    def __init__(self) -> None:
        self.n_asked = self.n_cancelled = 0
        self.all_there = asyncio.Event()

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        number, self.n_asked = self.n_asked, self.n_asked + 1
        try:
            await self.all_there.wait()
            await asyncio.sleep(0.02 * (3 - number))
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise
        return completion((*encode(str(number)), EOS), finish_reason="stop", version=number)


def test_requests_at_once_are_steps_in_the_order_they_came() -> None:
    policy = Slow()

    async def body(endpoint: Endpoint) -> Recording:
        with endpoint.episode(IDS, rules(max_steps=3), progress=AttemptProgress()) as recording:
            asking = []
            for n in (1, 2):
                asking.append(asyncio.create_task(post(recording.client, ask(n=n))))
                while policy.n_asked < sum(range(n + 1)):
                    await asyncio.sleep(0.005)
            # the three that are under way are all there may be
            status, _ = await post(recording.client, ask())
            policy.all_there.set()
            await asyncio.gather(*asking)
        assert status == 410
        return recording

    steps = served(policy, body).steps()
    assert [(step.step_index, step.action_text) for step in steps] == [(0, "0"), (1, "1"), (2, "2")]


def test_a_reply_that_nobody_got_is_no_step() -> None:
    policy = Slow()

    async def body(endpoint: Endpoint) -> Recording:
        with endpoint.episode(
            IDS, rules(max_steps=1, turn_timeout_s=1000.0), progress=AttemptProgress()
        ) as recording:
            given_up = asyncio.create_task(post(recording.client, ask()))
            while not policy.n_asked:
                await asyncio.sleep(0.005)
            given_up.cancel()
            while not policy.n_cancelled:
                await asyncio.sleep(0.005)
            policy.all_there.set()
            assert (await post(recording.client, ask()))[0] == 200
        return recording

    assert [(step.step_index, step.action_text) for step in served(policy, body).steps()] == [
        (0, "1")
    ]


def test_a_reply_that_comes_after_the_end_is_no_step() -> None:
    policy = Slow()

    async def body(endpoint: Endpoint) -> tuple[int, Recording]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            late = asyncio.create_task(post(recording.client, ask()))
            while not policy.n_asked:
                await asyncio.sleep(0.005)
        policy.all_there.set()
        return (await late)[0], recording

    status, recording = served(policy, body)
    assert (status, recording.steps()) == (410, [])


class Failing:
    def __init__(self, failures: list[Exception | str]) -> None:
        self.failures = failures

    async def generate(self, prompt: Prompt, *, seed: int, temperature: float) -> Completion:
        failure = self.failures.pop(0)
        if isinstance(failure, Exception):
            raise failure
        if failure == "hang":
            await asyncio.sleep(60)
        return completion(encode("7"), finish_reason=failure, version=0)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (RuntimeError("gone"), "RuntimeError: gone"),
        ("abort", "EngineLostError: the engine aborted"),
    ],
)
def test_a_failure_of_the_policy_is_kept_and_nobody_asks_again(
    failure: Exception | str, says: str
) -> None:
    policy = Failing(["stop", failure, "stop"])

    async def body(endpoint: Endpoint) -> Recording:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            client = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            await client.chat.completions.create(model="m", messages=[GUESS])
            with pytest.raises(openai.InternalServerError, match=says):
                await client.chat.completions.create(model="m", messages=[GUESS])
            await client.close()
        return recording

    recording = served(policy, body)
    assert recording.failure is failure or isinstance(recording.failure, EngineLostError)
    assert [step.finish_reason for step in recording.steps()] == ["stop"]
    assert policy.failures == ["stop"]


def test_a_reply_that_takes_too_long_cuts_the_episode_off() -> None:
    async def body(endpoint: Endpoint) -> tuple[int, str]:
        with endpoint.episode(
            IDS, rules(turn_timeout_s=0.05), progress=AttemptProgress()
        ) as recording:
            status, _ = await post(recording.client, ask())
            return status, recording.cut_off

    assert served(Failing(["hang"]), body) == (410, "no reply within actors.turn_timeout_s=0.05")


def test_it_listens_on_this_machine_alone() -> None:
    async def body(endpoint: Endpoint) -> None:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        assert host == "127.0.0.1"
        with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
            elsewhere.connect(("127.0.0.2", int(port)))

    served(TextPolicy(["7"]), body)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[" * 200_000, "invalid_value"),
        (b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "invalid_value"),
        (
            json.dumps({"messages": [{"role": "user", "content": "x" * 900_000}]}).encode(),
            "context_length_exceeded",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": ""}] * 20_000}).encode(),
            "context_length_exceeded",
        ),
        (b"x" * 2**21, "context_length_exceeded"),
    ],
    ids=["deep", "deep messages", "long", "many", "body"],
)
def test_a_request_beyond_measure_is_refused_and_the_next_one_answered(
    body: bytes, code: str
) -> None:
    async def ask_both(endpoint: Endpoint) -> tuple[int, Any, int, str]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            status, answer = await post(recording.client, body)
            return status, answer, (await post(recording.client, ask()))[0], recording.cut_off

    status, answer, after, cut_off = served(TextPolicy(["7"]), ask_both)
    assert (status, answer["error"]["code"], after) == (400, code, 200)
    assert bool(cut_off) == (code == "context_length_exceeded"), (
        "so that the episode counts as truncated"
    )


@pytest.mark.parametrize("around", ["%s", '[{"role": "user", "content": %s}]'])
def test_one_wrong_message_is_enough_for_an_error(around: str) -> None:
    """Stop at the first wrong message, where a million would make an error each."""
    body = '{"messages": %s}' % (around % ("[" + "1," * 200 + "1]"))
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate_json(body)
    assert raised.value.error_count() == 1


def test_an_error_quotes_no_more_than_a_line() -> None:
    async def body(endpoint: Endpoint) -> tuple[int, Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            return await post(recording.client, ask(n="7" * 100_000))

    status, answer = served(TextPolicy(["7"]), body)
    assert status == 400
    assert answer["error"]["message"].startswith("n='777") and len(answer["error"]["message"]) < 400


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"],
    ids=["nothing", "half a header"],
)
def test_a_connection_without_a_request_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.endpoint.server.IDLE_TIMEOUT_S", 0.1)

    async def body(endpoint: Endpoint) -> bytes:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        end = await asyncio.wait_for(reader.read(), timeout=40)
        writer.close()
        return end

    assert served(TextPolicy(["7"]), body) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nExpect: \xff\r\nContent-Length: 0\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nExpect: x\r\nContent-Length: 0\r\n\r\n",
        b"POST http://[ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nA: " + b"\x1b[31m" * 2000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
    ],
    ids=["Expect in bytes", "unknown Expect", "no address", "long header", "many headers"],
)
def test_a_malformed_request_without_a_key_is_at_most_a_line_of_the_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack: each wrote a traceback into the worker's log, of any user of the machine."""

    async def body(endpoint: Endpoint) -> None:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError):  # it is closed at once
            writer.write(sent + b"\r\n")
            await asyncio.wait_for(reader.readline(), timeout=40)
        writer.close()

    served(TextPolicy(["7"]), body)
    shown = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert "Traceback" not in shown and "\x1b" not in shown and len(shown) < 500, shown


def test_a_request_whose_body_never_comes_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.endpoint.server.BODY_TIMEOUT_S", 0.1)

    async def body(endpoint: Endpoint) -> bytes:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            reader, writer = await asyncio.open_connection(host, int(port))
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
            head += f"Authorization: Bearer {recording.client.api_key}\r\n"
            writer.write(head.encode() + b"Content-Length: 1000000000\r\n\r\n{")
            line = await asyncio.wait_for(reader.readline(), timeout=40)
            writer.close()
        return line

    assert b" 408 " in served(TextPolicy(["7"]), body)


def test_requests_beyond_the_episode_are_refused_before_they_are_read() -> None:
    """The attack: a thousand requests at once, whose bodies would fill the worker's memory."""

    async def body(endpoint: Endpoint) -> tuple[bytes, bytes]:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        question = json.dumps(ask()).encode()
        limits = rules(max_steps=2)
        with endpoint.episode(IDS, limits, progress=AttemptProgress()) as recording:
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
                f"Authorization: Bearer {recording.client.api_key}\r\n"
                f"Content-Length: {len(question)}\r\n\r\n"
            ).encode()
            opened = []
            for n_begun in (1, 2, 2):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head + question[:1])
                opened.append((reader, writer))
                async with asyncio.timeout(40):
                    while recording._n_in_flight < n_begun:
                        await asyncio.sleep(0.01)
            third = await asyncio.wait_for(opened[2][0].readline(), timeout=40)
            opened[0][1].write(question[1:])
            first = await asyncio.wait_for(opened[0][0].readline(), timeout=40)
            for _, writer in opened:
                writer.close()
        return first, third

    first, third = served(TextPolicy(["7"]), body)
    assert b" 200 " in first and b" 410 " in third


async def posted(
    recording: Recording, *, headers: Mapping[str, str] | None = None, compress: bool = False
) -> tuple[int, Any]:
    """Ask for a completion with the key of an episode. Return the status and the answer."""
    client = recording.client
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{client.base_url}/chat/completions",
            json={"messages": [{"role": "user", "content": "5 + 2"}]},
            headers={"Authorization": f"Bearer {client.api_key}", **(headers or {})},
            compress=compress or None,
        ) as answer,
    ):
        return answer.status, await answer.json()


def test_a_compressed_body_is_refused() -> None:
    async def body(endpoint: Endpoint) -> tuple[int, Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            return await posted(recording, compress=True)

    status, answer = served(TextPolicy(["7"]), body)
    assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")
    assert "compressed (deflate); send it as it is" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.test"}, 403),
        ({"Origin": "null"}, 403),
        ({}, 200),
    ],
)
def test_a_request_of_a_web_page_is_refused(headers: dict[str, str], status: int) -> None:
    async def body(endpoint: Endpoint) -> tuple[int, int]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            answered, _ = await posted(recording, headers=headers)
            return answered, len(recording.steps())

    assert served(TextPolicy(["7"]), body) == (status, int(status == 200))


def test_another_protocol_is_refused() -> None:
    """The attack: whoever asked for one could leave unseen, and got a step that nobody received."""

    async def body(endpoint: Endpoint) -> tuple[int, Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
            answer = await posted(recording, headers=headers)
            assert recording.steps() == []
            return answer

    status, answer = served(TextPolicy(["7"]), body)
    assert status == 400 and "no other protocol than HTTP" in answer["error"]["message"]


def test_a_client_that_reads_no_answers_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: whole requests, one after the other, whose answers nobody reads.

    The connection was kept for ever.
    """
    monkeypatch.setattr("envs.hosting.http_requests.WRITE_TIMEOUT_S", 0.2)

    async def body(endpoint: Endpoint) -> int:
        host, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        server = endpoint._runner.server
        assert server is not None
        with (
            endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording,
            socket.socket() as attacker,
        ):
            key = recording.client.api_key
            request = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n\r\n"
            attacker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            attacker.connect((host, int(port)))
            attacker.setblocking(False)
            connected = 0
            async with asyncio.timeout(40.0):
                while not connected or server.connections:
                    connected = max(connected, len(server.connections))
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        attacker.send(request.encode() * 100)
                    await asyncio.sleep(0.01)
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            status, _ = await post(recording.client, ask())
        return status

    assert served(TextPolicy(["7"]), body) == 200


CALLS = ('{"role": "assistant", "tool_calls": [%s]}', '{"function": {"name": ""}}')
PARTS = ('{"role": "user", "content": [%s]}', '{"type": "text", "text": ""}')


@pytest.mark.parametrize(
    ("kinds", "field"),
    [((CALLS,), "tool_calls"), ((PARTS,), "content"), ((CALLS, PARTS), "content")],
)
def test_parts_and_calls_are_bounded_together(
    kinds: tuple[tuple[str, str], ...], field: str
) -> None:
    """The attack: 16 MiB of empty calls or parts took 6 s of the event loop."""
    n_each = request.MAX_PARTS // len(kinds)

    def body(n_more: int) -> bytes:
        messages = [
            message % ", ".join([one] * (n_each + (n_more if index == len(kinds) - 1 else 0)))
            for index, (message, one) in enumerate(kinds)
        ]
        return ('{"messages": [%s]}' % ", ".join(messages)).encode()  # noqa: UP031

    assert len(request.parse_request(body(0)).messages) == len(kinds)
    with pytest.raises(request.RequestError, match=f"{request.MAX_PARTS} ") as error:
        request.parse_request(body(1))
    assert error.value.param == f"messages[{len(kinds) - 1}].{field}"
    assert error.value.__context__ is None, "an error of pydantic holds the whole list"


def test_tools_are_bounded() -> None:
    tool = '{"type": "function", "function": {"name": "f"}}'
    tools = ",".join([tool] * (request.MAX_PARTS + 1))
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tools}]}}'
    with pytest.raises(request.RequestError, match="tools: more than 16384 ") as error:
        request.parse_request(body.encode())
    assert error.value.param == "tools"
    assert error.value.__context__ is None, "an error of pydantic holds the whole list"


MANY_VALUES = "[%s]" % ",".join(["[]"] * (request.MAX_VALUES // 2 + 1))  # noqa: UP031
A_MESSAGE = '"messages": [{"role": "user", "content": "x"}]'
A_CALL = '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", %s}}]}]}'
A_TOOL = '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": %s}}}]'


@pytest.mark.parametrize(
    "content",
    [
        f"{{{A_MESSAGE}, {A_TOOL}}}",
        f'{{{A_MESSAGE}, "top_p": %s}}',
        f'{{{A_MESSAGE}, "metadata": {{"a": %s}}}}',
        f'{{{A_MESSAGE}, "unknown": %s}}',
        f'{{{A_MESSAGE}, "response_format": {{"a": %s}}}}',
        f'{{{A_MESSAGE}, "tool_choice": %s}}',
        A_CALL % '"arguments": {"a": %s}',
        '{"messages": [{"role": {"a": %s}, "content": "x"}]}',
        '{"messages": [{"role": "user", "content": {"a": %s}}]}',
        '{"messages": [{"role": "user", "content": [%s]}]}',
        "%s",
    ],
)
def test_values_of_every_field_are_bounded_before_they_are_built(
    monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """The attack: 8 MiB of empty lists in one field took 4.6 s of the event loop and 0.76 GiB."""
    body = (content % MANY_VALUES).encode()
    with monkeypatch.context() as patched:
        patched.setattr(ChatRequest, "model_validate_json", lambda *_, **__: pytest.fail("built"))
        with pytest.raises(request.RequestError, match=f"more than {request.MAX_VALUES} values"):
            request.parse_request(body)


def test_values_in_the_texts_of_calls_are_bounded_with_those_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []
    parse_arguments = request.parse_arguments
    monkeypatch.setattr(
        request,
        "parse_arguments",
        lambda text: [parsed.append(text), parse_arguments(text)][1],
    )
    half = json.dumps({"a": [[]] * (request.MAX_VALUES // 4)})
    calls = [{"function": {"name": "f", "arguments": half}} for _ in range(3)]
    body = {"messages": [{"role": "assistant", "tool_calls": calls[:1]}]}
    request.parse_request(json.dumps(body).encode())
    assert parsed == [half]
    body["messages"][0]["tool_calls"] = calls
    with pytest.raises(request.RequestError, match="messages.0..tool_calls: .* values") as error:
        request.parse_request(json.dumps(body).encode())
    assert error.value.param == "messages[0].tool_calls"
    assert parsed == [half, half]


def test_long_conversations_pass_whatever_their_texts_have() -> None:
    """Only structure counts: neither the commas of a text nor those of a quoted program."""
    text = 'x = {"a": [1, 2, 3]}, \\ ' * 20
    turns: list[dict[str, object]] = [
        {"role": "assistant", "tool_calls": [call_of(json.dumps({"code": text}))]},
        {"role": "tool", "tool_call_id": "1", "content": text},
    ]
    body = json.dumps({"messages": turns * 5_000}).encode()
    assert sum(map(body.count, (b",", b"[", b"{"))) > 4 * request.MAX_VALUES
    assert len(request.parse_request(body).messages) == 10_000
    short = json.dumps({"messages": [GUESS] * request.MAX_MESSAGES}).encode()
    assert len(request.parse_request(short).messages) == request.MAX_MESSAGES


@pytest.mark.parametrize(
    ("field", "start"),
    [
        ("tool_choice", "tool_choice=[[], [], "),
        ("n", "n=[[], [], "),
        ("logit_bias", "logit_bias=[[], [], "),
    ],
)
def test_a_wrong_value_is_quoted_in_part(
    monkeypatch: pytest.MonkeyPatch, field: str, start: str
) -> None:
    """Write the first parts of a value with many, not all of them to cut the text then."""
    messages: list[str] = []
    refused = request.refused
    monkeypatch.setattr(
        request, "refused", lambda text, param: [messages.append(text), refused(text, param)][1]
    )
    body = f'{{{A_MESSAGE}, "{field}": [{",".join(["[]"] * 100_000)}]}}'
    with pytest.raises(request.RequestError) as error:
        request.parse_request(body.encode())
    assert str(error.value).startswith(start)
    assert len(messages[0]) < 400


@pytest.mark.parametrize(
    ("content", "one", "n_counted"),
    [
        ('{"messages": [{"role": "assistant", "tool_calls": [%s]}]}', CALLS[1], request.MAX_PARTS),
        ('{"messages": [{"role": "user", "content": [%s]}]}', PARTS[1], 0),
        ('{"messages": [%s]}', '{"role": "user", "content": "x"}', request.MAX_MESSAGES),
    ],
)
def test_a_refused_list_is_built_up_to_its_bound(
    monkeypatch: pytest.MonkeyPatch, content: str, one: str, n_counted: int
) -> None:
    """The attack: 16 MiB of calls were all built, and again for the error: 2.8 s."""
    made, counted = [], []

    class Recording(request._Count):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def add_parts(self, n: int, *, param: str) -> None:
            super().add_parts(n, param=param)
            counted.append(n)

    monkeypatch.setattr(request, "_Count", Recording)
    body = content % ", ".join([one] * (request.MAX_MESSAGES + 10_000))
    with pytest.raises(request.RequestError, match="more than") as error:
        request.parse_request(body.encode())
    assert error.value.__context__ is None, "an error of pydantic holds the whole list"
    assert len(counted) + max(0, made[0].n_messages - 1) == n_counted

"""Test tool calls at the endpoint with vLLM's parsers: with the openai client, an MCP server and by
tokens.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import openai
import psutil
import pytest

from actors.endpoint.server import Endpoint
from actors.endpoint.tool_call_reader import ToolCallReader
from actors.endpoint.vllm_tool_calls import ToolCallParser
from actors.prompting.messages import Message, ToolCall, parse_arguments, seen_text
from actors.rollout.episode import AttemptProgress
from store import Step
from tests.support.chat_samples import IDS, TextPolicy, rules, served, tokenizer

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
# as no tokenizer and no template writes it: the tokens must be kept, not made from the call
LOOSE = 'so: <tool_call>{"arguments":{"b":4,"a":3},"name":"add"}</tool_call>'
ASK: Any = {"role": "user", "content": "what is 3 + 4?"}


def played(
    texts: list[str], *, template: str = "tooled", stream: bool = False, **fields: Any
) -> tuple[list[Any], list[Step], TextPolicy]:
    """Return the replies of a program that adds what it is asked to, its steps, and the policy."""
    policy = TextPolicy(texts)

    async def body(endpoint: Endpoint) -> tuple[list[Any], list[Step]]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            client = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            messages, replies = [ASK], []
            for _ in texts:
                answer = await client.chat.completions.create(
                    model="m", messages=messages, tools=[ADD], **fields
                )
                replies.append(answer.choices[0])
                message = answer.choices[0].message
                messages.append(message)
                for call in message.tool_calls or []:
                    numbers = json.loads(call.function.arguments)
                    result = {"content": str(sum(numbers.values())), "tool_call_id": call.id}
                    messages.append({"role": "tool", **result})
            await client.close()
            return replies, recording.steps()

    replies, steps = served(policy, body, template=template, max_response=200, max_model=2000)
    return replies, steps, policy


@pytest.mark.parametrize(("text", "content"), [(CALL, None), (LOOSE, "so: ")])
@pytest.mark.parametrize("template", ["tooled", "tiny"])
def test_a_call_is_answered_and_the_next_prompt_begins_with_its_tokens(
    text: str, content: str | None, template: str
) -> None:
    (called, last), (one, two), _ = played([text, "it is 7"], template=template)
    (call,) = called.message.tool_calls
    assert (called.finish_reason, called.message.content) == ("tool_calls", content)
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
    assert (last.finish_reason, last.message.content) == ("stop", "it is 7")
    assert last.message.tool_calls is None
    n = len(one.prompt_ids + one.response_ids)
    assert two.prompt_ids[:n] == one.prompt_ids + one.response_ids
    assert "7" in tokenizer(template).decode(two.prompt_ids[n:])
    assert (one.action_text, two.obs_text) == (text, "7")
    assert "add" in tokenizer(template).decode(one.prompt_ids)


def test_without_a_choice_nothing_is_read_as_a_call() -> None:
    (reply,), _, _ = played([CALL], tool_choice="none")
    assert (reply.finish_reason, reply.message.content) == ("stop", CALL)
    assert reply.message.tool_calls is None


@pytest.mark.parametrize(
    "text", ["<tool_call>{", '<tool_call>{"name": "add", "arguments": [3]}</tool_call>', "7"]
)
def test_a_malformed_call_is_text(text: str) -> None:
    (reply,), _, _ = played([text])
    assert (reply.finish_reason, reply.message.content) == ("stop", text)


def test_a_call_of_endless_brackets_is_text() -> None:
    parser = ToolCallParser(tokenizer("xml"), name="auto")
    for brackets in ("[" * 1200, "[" * 20_000 + "]" * 20_000, '{"a":' * 500 + "1" + "}" * 500):
        text = f"<tool_call>\n<function=add>\n<parameter=a>\n{brackets}\n</parameter>"
        for reply in (text, f"{text}\n</function>\n</tool_call>"):
            assert parser.read(reply, (ADD,)) == (reply, ())
    hermes = ToolCallParser(tokenizer("tooled"), name="auto")
    deep = (
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 200 + "]" * 200 + "}}</tool_call>"
    )
    assert hermes.read(deep, (ADD,)) == (deep, ())


def test_a_reply_that_no_parser_reads_in_time_is_text_and_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The attack: a regular expression that takes cubic time, on the worker's event loop."""
    attack = "<dots_function_call>" + "\n" * 3000
    turns = 0

    async def body(endpoint: Endpoint) -> list[Any]:
        nonlocal turns

        async def asked(client: openai.AsyncOpenAI) -> Any:
            answer = await client.chat.completions.create(model="m", messages=[ASK], tools=[ADD])
            return answer.choices[0]

        with endpoint.episode(
            IDS, rules(), progress=AttemptProgress(), label="task 7"
        ) as recording:
            client = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            first = await asked(client)  # now the parser is there
            reading = asyncio.ensure_future(asyncio.gather(asked(client), asked(client)))
            while not reading.done():
                turns += 1
                await asyncio.sleep(0.01)
            await client.close()
            return [first, *reading.result()]

    call = (
        '<dots_function_call><invoke name="add"><parameter name="a">7</parameter></invoke>'
        "</dots_function_call>"
    )
    one, two, three = served(
        TextPolicy([call, attack, call]),
        body,
        template="dots",
        tool_parser="dots",
        max_response=4000,
        max_model=6000,
    )
    assert (two.finish_reason, two.message.content) == ("stop", attack)
    for reply in (one, three):
        assert reply.message.tool_calls[0].function.arguments == '{"a": 7}'
    assert turns > 10, "the event loop goes on"
    (line,) = capsys.readouterr().out.splitlines()
    assert line == (
        f"task 7: a reply of {len(attack):,} characters counts as text without calls: "
        "prompt.tool_parser='dots' did not read it within 0.5 s"
    )


def test_a_reader_whose_processes_are_killed_reads_on() -> None:
    reader = ToolCallReader(tokenizer("tooled"), name="auto")
    assert reader.read(CALL, (ADD,), label="a")[1]
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.Error):  # one that has answered may be ending
            if "serve_forks" in " ".join(child.cmdline()):
                child.kill()
    assert reader.read(CALL, (ADD,), label="a") == (CALL, ())
    assert reader.read(CALL, (ADD,), label="a")[1]
    reader.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("[" * 100_000, "nested deeper"),
        ('{"a": ["\\ud800"]}', "half of a character"),
        ('{"\\uDFFF": 1}', "half of a character"),
        ('{"a":' + "[" * 100 + "]" * 100 + "}", "nested deeper"),
        ("[3]", "JSON object"),
    ],
)
def test_arguments_are_an_object_of_bounded_depth(arguments: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_arguments(arguments)
    assert parse_arguments('{"a": [{"b": []}]}') == {"a": [{"b": []}]}
    assert parse_arguments('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_two_calls_are_two_and_a_stream_numbers_them() -> None:
    async def body(endpoint: Endpoint) -> list[Any]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            client = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            stream = await client.chat.completions.create(
                model="m", messages=[ASK], tools=[ADD], stream=True
            )
            chunks = [chunk async for chunk in stream]
            await client.close()
            return chunks

    texts = [CALL + "\n" + CALL.replace("4", "5")]
    chunks = served(TextPolicy(texts), body, template="tooled", max_response=200, max_model=2000)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, json.loads(call.function.arguments)["b"]) for call in calls] == [
        (0, 4),
        (1, 5),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("template", "fields", "says"),
    [
        ("chatml", {}, "shows no tools"),
        ("tooled", {"tool_choice": "required"}, "use 'auto' or 'none'"),
        (
            "tooled",
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            "use 'auto' or 'none'",
        ),
    ],
)
def test_a_use_of_tools_that_is_not_supported_is_refused(
    template: str, fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        played(["7"], template=template, **fields)


def test_a_parser_that_does_not_read_the_templates_own_call_is_refused() -> None:
    with pytest.raises(ValueError, match="is no parser of this vLLM; it has .*hermes"):
        ToolCallReader(tokenizer("tooled"), name="hermes2")
    with pytest.raises(ValueError, match="does not read the call that the chat template"):
        ToolCallParser(tokenizer("tooled"), name="qwen3_coder")
    with pytest.raises(ValueError, match="does not read .* name the one of the model's family"):
        ToolCallParser(tokenizer("unread"), name="auto")


def test_the_family_is_found_by_what_its_template_writes() -> None:
    parser = ToolCallParser(tokenizer("xml"), name="auto")
    text = "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    _, (call,) = parser.read(text, (ADD,))
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 3})


def test_a_call_that_one_reply_leaves_unfinished_changes_no_later_reply() -> None:
    """The attack: granite4's parser remembered it, and took the calls of all later episodes."""
    parser = ToolCallParser(tokenizer("tooled"), name="granite4")
    assert [call.name for call in parser.read(CALL, (ADD,))[1]] == ["add"]
    cut = '<tool_call>\n{"name": "add", "argum'
    assert parser.read(cut, (ADD,)) == (cut, ())
    assert [call.name for call in parser.read(CALL, (ADD,))[1]] == ["add"]
    end = '{"name": "add", "arguments": {"a": 666}}</tool_call>'
    assert parser.read(end, (ADD,)) == (end, ())


def test_the_state_after_several_calls_is_all_their_answers() -> None:
    def said(role: str, text: str) -> Message:
        return Message(role=role, content=text)

    asked, call = said("user", "add"), ToolCall(id="1", name="add", arguments="{}")
    called = Message(role="assistant", content="", tool_calls=(call, call))
    assert seen_text((asked, called, said("tool", "3"), said("tool", "4"))) == "3\n4"
    assert seen_text((said("tool", "1"), called, said("tool", "3"))) == "3"
    assert seen_text((asked, called, said("tool", "3"), said("user", "and?"))) == "and?"
    assert seen_text((asked, said("assistant", "x"))) == "add"
    assert seen_text((said("assistant", "x"),)) == ""


def test_an_mcp_client_passes_calls_on_to_its_server() -> None:
    """Pass an agent's tool calls to an MCP server, as docs/agent_programs.md shows."""
    mcp = pytest.importorskip("mcp")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("adder")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def body(endpoint: Endpoint) -> tuple[Any, list[Step]]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            model = openai.AsyncOpenAI(
                base_url=recording.client.base_url, api_key=recording.client.api_key
            )
            async with mcp.Client(server) as session:
                listed = await session.list_tools()
                tools: Any = [
                    {
                        "type": "function",
                        "function": {
                            "name": tool.name,
                            "description": tool.description,
                            "parameters": tool.input_schema,
                        },
                    }
                    for tool in listed.tools
                ]
                reply = await model.chat.completions.create(model="m", messages=[ASK], tools=tools)
                (call,) = reply.choices[0].message.tool_calls
                result = await session.call_tool(
                    call.function.name, json.loads(call.function.arguments)
                )
            await model.close()
            return result, recording.steps()

    result, (step,) = served(
        TextPolicy([CALL]), body, template="tooled", max_response=200, max_model=2000
    )
    assert result.content[0].text == "7"
    assert "add" in tokenizer("tooled").decode(step.prompt_ids)

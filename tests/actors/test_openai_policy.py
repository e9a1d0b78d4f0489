"""Test a model behind a server: requests, recorded answers, and failing servers."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import ChatPolicy
from actors.concurrency import Concurrency
from actors.endpoint.server import Endpoint, Recording
from actors.inference import openai_policy
from actors.inference.codepoint_tokenizer import (
    REPLACED,
    CodepointTokenizer,
    codepoint_form,
    ids_of,
    messages_of,
)
from actors.inference.openai_policy import EndpointFailed, with_stop_text
from actors.policy import Completion
from actors.prompting.chat_template import Chat
from actors.prompting.template import Turn
from actors.rollout.episode import AttemptProgress, EpisodeRules
from configs import Config, EndpointConfig, PromptConfig
from envs import Observation
from model_server import MAX_ANSWER_BYTES, json_of
from tests.support.chat_samples import IDS, TextPolicy, rules, served
from tests.support.chat_server import Answer, ChatServer, chat_server, said

DOOR = Observation(text="You see a door.", objective="Open it.", actions=("open door", "wait"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def config_of(
    url: str, *, stop: tuple[str, ...] = (), thinking: bool | None = None, **endpoint: Any
) -> Config:
    config = Config(endpoint=EndpointConfig(**{"url": url, "model": "quick-7b", **endpoint}))
    return replace(
        config, prompt=PromptConfig(template="direct", stop=list(stop), thinking=thinking)
    )


def ask(config: Config, what: Callable[[ChatPolicy], Any] | None = None) -> Completion:
    """Return one completion, or the result of `what(policy)`."""

    async def asked() -> Completion:
        policy = ChatPolicy(config)
        try:
            prompt = codepoint_form(config.prompt).prompt(DOOR, [])
            return await (
                what(policy) if what else policy.generate(prompt, seed=7, temperature=0.4)
            )
        finally:
            await policy.close()

    return asyncio.run(asked())


def failure(config: Config, what: Callable[[ChatPolicy], Any] | None = None) -> str:
    with pytest.raises(EndpointFailed) as caught:
        ask(config, what)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def in_turn(*answers: Answer) -> Callable[[dict[str, Any]], Answer]:
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]


def try_once(policy: ChatPolicy) -> Any:
    return policy.try_once(temperature=0.0)


@pytest.mark.parametrize("key", ["", "sk-own"])
def test_headers_of_the_environment_are_not_sent(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("x-secret", "authorization", "USER-AGENT", "Host", "Accept-Encoding")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "\n".join(f"{name}: for-openai" for name in names))
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "for-openai")
    monkeypatch.setenv("OWN_KEY", key)
    with chat_server(in_turn(said("wait"))) as server:
        ask(config_of(server.url, api_key_env="OWN_KEY" if key else ""))
        failure(config_of(server.url, model="", api_key_env="OWN_KEY" if key else ""), try_once)
    assert server.keys == {f"Bearer {key}" if key else ""} and len(server.headers) == 2
    assert "for-openai" not in "".join(server.headers).lower()


def test_a_request_says_all_that_the_config_does_and_the_text_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    with chat_server(in_turn(said("<action>open door</action>"))) as server:
        config = config_of(
            server.url + "/",
            stop=("</action>",),
            thinking=False,
            api_key_env="SOME_KEY",
            body={"top_p": 0.9},
        )
        completion = ask(config)
    (body,) = server.asked
    (message,) = body.pop("messages")
    assert body == {
        "model": "quick-7b",
        "max_tokens": 512,
        "temperature": 0.4,
        "seed": 7,
        "stop": ["</action>"],
        "chat_template_kwargs": {"enable_thinking": False},
        "top_p": 0.9,
    }
    assert (
        message["role"] == "user"
        and "Open it." in message["content"]
        and "You see a door." in message["content"]
    )
    assert server.keys == {"Bearer sk-secret"}
    form = codepoint_form(config.prompt)
    assert (
        form.parse(completion.token_ids).action == "open door"
        and form.parse(completion.token_ids).well_formed
    )
    assert "".join(map(chr, completion.token_ids)) == "<action>open door</action>"
    assert set(completion.logprobs) == {0.0} and len(completion.logprobs) == len(
        completion.token_ids
    )
    assert (completion.finish_reason, completion.version_min, completion.version_max) == (
        "stop",
        0,
        0,
    )


def test_null_leaves_a_field_out_for_a_server_that_does_not_take_it() -> None:
    with chat_server(in_turn(said("x", "length"))) as server:
        body = {"max_tokens": None, "seed": None, "temperature": None, "max_completion_tokens": 9}
        assert ask(config_of(server.url, body=body)).finish_reason == "length"
    assert server.asked[0].keys() == {
        "model",
        "messages",
        "max_completion_tokens",
    } and server.keys == {""}


def test_an_episode_is_one_conversation_where_the_config_says_so() -> None:
    form = codepoint_form(PromptConfig(template="direct", style="chat", max_prompt_tokens=2048))
    first = form.prompt(DOOR, [])
    turn = Turn(
        observation=DOOR.text,
        action="wait",
        prompt=first,
        response_ids=ids_of("I <action>wait</action>"),
    )
    one, two, three = messages_of(
        form.prompt(replace(DOOR, text="It is locked."), [turn]).token_ids
    )
    assert [one] == messages_of(first.token_ids)
    assert two == {"role": "assistant", "content": "I <action>wait</action>"}
    assert (
        three["role"] == "user"
        and "It is locked." in three["content"]
        and "You see" not in three["content"]
    )


def test_too_long_a_prompt_is_cut_to_four_characters_a_token() -> None:
    form = codepoint_form(PromptConfig(template="direct", max_prompt_tokens=100))
    prompt = form.prompt(replace(DOOR, text="far away " * 200), [])
    assert 350 < len(prompt.token_ids) <= 400 and prompt.n_dropped_tokens > 1000
    (message,) = messages_of(prompt.token_ids)
    assert message["role"] == "user" and " ... " in message["content"]


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text()), min_size=1))
def test_no_text_is_taken_for_the_end_of_a_message(conversation: list[tuple[str, str]]) -> None:
    chat = [{"role": role, "content": text} for role, text in conversation]
    token_ids = CodepointTokenizer().apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True
    )
    assert not isinstance(token_ids, str)
    assert messages_of(token_ids) == [
        {**one, "content": one["content"].translate(REPLACED)} for one in chat
    ]
    assert Chat(CodepointTokenizer(), thinking=None).opening == ""


@pytest.mark.parametrize(
    ("text", "at", "whole", "expected"),
    [
        ("<search>rain", None, True, ("<search>rain</search>", True)),  # left out, as OpenAI does
        ("<answer>a</answer><search>rain", None, True, ("<answer>a</answer>", True)),
        # the one opened last
        ("<search>a<answer>b", None, True, ("<search>a<answer>b</answer>", True)),
        # the server knows better
        ("<search>a<answer>b", "</search>", True, ("<search>a<answer>b</search>", True)),
        ("<search>rain", None, False, ("<search>rain", False)),  # too long
        # went on behind it
        ("<search>rain</search> sun", None, False, ("<search>rain</search>", True)),
        ("no tags", 151645, True, ("no tags", False)),  # vLLM names the token that ended it
    ],
)
def test_the_text_that_ended_a_reply_is_in_it(
    text: str, at: object, whole: bool, expected: tuple[str, bool]
) -> None:
    assert with_stop_text(text, stop=("</search>", "</answer>"), at=at, has_ended=whole) == expected


def test_a_thought_that_comes_apart_stands_before_the_rest() -> None:
    answer: Any = said(None, "length")
    answer[1]["choices"][0]["message"]["reasoning_content"] = "a door"
    with chat_server(in_turn(answer)) as server:
        assert "".join(map(chr, ask(config_of(server.url)).token_ids)) == "<think>a door</think>"


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}),
        (503, "starting"),
        (200, {"error": {"message": "upstream", "code": 502}}),  # as some routers say it
        (200, {"choices": []}),
        (202, "queued"),
        said(7),
    ],
)
def test_a_request_is_asked_again_after_a_trouble_that_passes(trouble: Answer) -> None:
    with chat_server(in_turn(trouble, trouble, said("yes"))) as server:
        assert ask(config_of(server.url, attempts=3)).token_ids == ids_of("yes")
        assert len(server.asked) == 3 and server.asked[0] == server.asked[2]


def test_a_trouble_that_does_not_pass_ends_with_url_and_status() -> None:
    with chat_server(in_turn((503, {"error": {"message": "over\nloaded " + "x" * 999}}))) as server:
        words = failure(config_of(server.url, attempts=3))
        assert words.startswith(f"{server.url} answered 503: over loaded xxx") and words.endswith(
            " ... (3 attempts)"
        )
        assert len(server.asked) == 3


def test_a_refused_request_is_not_repeated_and_the_key_is_never_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    with chat_server(in_turn((401, {"error": {"message": "wrong key sk-secret"}}))) as server:
        words = failure(config_of(server.url, api_key_env="SOME_KEY"))
    assert (
        words == f"{server.url} answered 401: wrong key ***; is the key in SOME_KEY right?"
        and len(server.asked) == 1
    )
    monkeypatch.delenv("SOME_KEY")
    assert "endpoint.api_key_env=SOME_KEY is not set" in failure(
        config_of(server.url, api_key_env="SOME_KEY")
    )


def test_a_server_that_is_not_there_is_one_line() -> None:
    # bound, so that nobody else is given the port, and listening to nobody
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{kept.getsockname()[1]}/v1"
        assert failure(config_of(url, attempts=2)).startswith(f"{url} cannot be reached (")
        assert failure(config_of(url), try_once).startswith(f"{url} cannot be reached (")
        assert failure(config_of(url, model=""), try_once).startswith(f"{url} cannot be reached (")


def test_a_silent_server_fails_before_the_episode_would_be_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = config_of(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", timeout_s=0.2)
        assert "gave no reply within endpoint.timeout_s=0.2" in failure(config)
    config = replace(config, actors=replace(config.actors, turn_timeout_s=0.1))
    assert EpisodeRules.of(config, temperature=1.0).turn_timeout_s > config.endpoint.timeout_s
    assert (
        EpisodeRules.of(Config(), temperature=1.0).turn_timeout_s == Config().actors.turn_timeout_s
    )


def test_a_try_names_the_models_that_there_are() -> None:
    def knows_quick(body: dict[str, Any]) -> Answer:
        known = body["model"] == "quick-7b"
        return said("ready") if known else (404, {"error": {"message": "no such model"}})

    with chat_server(knows_quick) as server:
        ask(config_of(server.url), try_once)
        words = failure(config_of(server.url, model="quick-8b"), try_once)
        assert (
            "answered 404: no such model" in words
            and "has quick-7b, slow-70b, did you mean 'quick-7b'?" in words
        )
        assert "endpoint.model is missing" in failure(config_of(server.url, model=""), try_once)


def test_many_long_names_of_models_are_one_line_of_bounded_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = [f"{number:05}" + "quick\x1b\n" * 100 for number in range(4000)]
    compared: list[str] = []

    def counted(wrong: object, names: Sequence[str]) -> str:
        compared.extend(names)
        return ""

    monkeypatch.setattr(openai_policy, "did_you_mean", counted)
    with chat_server(lambda body: (404, {}), models=models) as server:
        words = failure(config_of(server.url, model="quick-8b"), try_once)
    assert "and 3990 more" in words and len(words) < 8000
    assert "\n" not in words
    assert len(compared) == openai_policy.MAX_NAMES_COMPARED
    assert max(map(len, compared)) < 400


@pytest.mark.parametrize("depth", range(900, 1000, 6))
def test_a_name_that_is_nested_deeply_is_one_line(depth: int) -> None:
    models = f'{{"data": [{{"id": {"[" * depth}{"]" * depth}}}]}}'
    with chat_server(lambda body: (404, {}), models=models) as server:
        assert "answered 404" in failure(config_of(server.url), try_once)


def test_no_more_requests_at_once_than_the_config_says() -> None:
    inside = most = 0
    two_came = threading.Event()

    def count(server: ChatServer) -> Callable[[dict[str, Any]], Answer]:
        def answer(body: dict[str, Any]) -> Answer:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            if inside == 2:
                two_came.set()
            server.lock.release()  # others may come in meanwhile
            two_came.wait(20.0)
            time.sleep(0.02)
            server.lock.acquire()
            inside -= 1
            return said("yes")

        return answer

    with chat_server(in_turn(said("yes"))) as server:
        server.answer = count(server)
        config = config_of(server.url, requests=2)
        prompt = codepoint_form(config.prompt).prompt(DOOR, [])
        ask(
            config,
            lambda policy: asyncio.gather(
                *(policy.generate(prompt, seed=n, temperature=1.0) for n in range(6))
            ),
        )
    assert len(server.asked) == 6 and most == 2
    assert Concurrency.of(config).episodes == 2


def test_a_thought_that_quotes_a_stop_text_does_not_end_the_reply() -> None:
    message = {"content": "<action>go east", "reasoning_content": "not <action>go west</action>"}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
    text, reason = openai_policy.reply_of(answer, stop=["</action>"])
    assert (text, reason) == (
        "<think>not <action>go west</action></think><action>go east</action>",
        "stop",
    )


def test_it_plays_with_this_projects_own_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(endpoint: Endpoint) -> tuple[Recording, Completion]:
        with endpoint.episode(IDS, rules(), progress=AttemptProgress()) as recording:
            monkeypatch.setenv("EPISODE_KEY", recording.client.api_key)
            policy = ChatPolicy(config_of(recording.client.base_url, api_key_env="EPISODE_KEY"))
            prompt = codepoint_form(PromptConfig(template="direct")).prompt(DOOR, [])
            try:
                return recording, await policy.generate(prompt, seed=1, temperature=0.0)
            finally:
                await policy.close()

    recording, completion = served(TextPolicy(["it is 7"]), body)
    assert completion.token_ids == ids_of("it is 7")
    assert [step.action_text for step in recording.steps()] == ["it is 7"]
    assert "You see a door." in recording.steps()[0].obs_text


def test_half_a_character_from_a_server_is_replaced() -> None:
    """An evaluation goes on when a server cuts a reply in the middle of an emoji."""
    with chat_server(in_turn(said("<action>open \ud83d</action>", reasoning="x"))) as server:
        completion = ask(config_of(server.url))
    text = CodepointTokenizer().decode(completion.token_ids, skip_special_tokens=True)
    assert text == "<action>open \ufffd</action>"
    with chat_server(in_turn((400, {"error": {"message": "no \udead"}}))) as server:
        assert "no \ufffd" in failure(config_of(server.url))


@pytest.mark.parametrize(
    "body", ["[" * 200_000, '{"choices": ' + "[" * 200_000 + "]" * 200_000 + "}"]
)
def test_json_nested_without_end_is_no_answer(body: str) -> None:
    with chat_server(in_turn((200, body))) as server:
        assert "no JSON" in failure(config_of(server.url, attempts=1))


def test_an_error_nested_deeply_is_told_and_asked_again() -> None:
    """The attack: a text of it cannot be made, and an evaluation ended with a RecursionError."""
    deep = '{"error": {"message": ' + "[" * 985 + "]" * 985 + "}}"
    with chat_server(in_turn((500, deep), said("yes"))) as server:
        assert ask(config_of(server.url, attempts=2)).token_ids == ids_of("yes")
    with chat_server(in_turn((400, deep))) as server:
        assert failure(config_of(server.url)).startswith(f"{server.url} answered 400: ")


def test_an_answer_of_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    monkeypatch.setattr("model_server.json.loads", lambda text, **_: parsed.append(text))
    body = '{"choices": [' + "[]," * 2**20 + "[]]}"
    assert json_of(body.encode()) is None
    assert not parsed
    json_of(b'{"choices": []}')
    assert parsed == ['{"choices": []}']


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    with chat_server(in_turn(said("x" * MAX_ANSWER_BYTES))) as server:
        assert "more than 16 MiB" in failure(config_of(server.url))


def test_a_compressed_answer_is_not_unpacked() -> None:
    """The attack: 56 KB of gzip in gzip unpacked to terabytes of nothing, and held the event loop.

    It is not asked for either. An error keeps its status.
    """
    packed = {"Content-Encoding": "gzip, gzip"}
    with chat_server(in_turn((200, gzip.compress(b"{}"), packed))) as server:
        assert "has Content-Encoding gzip, gzip, and none was" in failure(config_of(server.url))
        assert "accept-encoding: identity" in server.headers[0].lower()
    with chat_server(in_turn((403, gzip.compress(b"{}"), packed))) as server:
        assert "answered 403" in failure(config_of(server.url))


def test_a_servers_cookies_are_not_kept() -> None:
    """The attack: after 60 answers with 3,500 cookies each, a request took seconds."""
    with chat_server(in_turn((503, {}, {"Set-Cookie": "name=value"}), said("wait"))) as server:
        assert ask(config_of(server.url))
        assert len(server.headers) == 2 and "cookie" not in "".join(server.headers).lower()


@pytest.mark.parametrize("after", ["9" * 400, "\u00b2"])
def test_a_server_that_asks_for_any_pause_is_given_up_in_time(after: str) -> None:
    busy = (503, {}, {"Retry-After": after})
    with chat_server(in_turn(busy)) as server:
        assert "503" in failure(config_of(server.url, attempts=2, timeout_s=0.3))


@pytest.mark.parametrize("status", [302, 307])
def test_a_server_that_sends_the_client_elsewhere_does_not_get_it_to_take_the_prompt_there(
    status: int,
) -> None:
    with chat_server(in_turn(said("mine now"))) as other:
        elsewhere = {"Location": other.url + "/models"}
        with chat_server(in_turn((status, "", elsewhere))) as server:
            words = failure(config_of(server.url, attempts=3))
            assert words.startswith(
                f"{server.url} answered {status}, a redirect, which is not followed"
            )
            assert len(server.asked) == 1 and not other.asked


@pytest.mark.parametrize(
    "place", [f"http://{'a' * 70}.b/", "http://[::1", "//", "http://127.0.0.1:99999/"]
)
def test_a_redirect_to_no_address_is_one_line(place: str) -> None:
    with chat_server(in_turn((307, "", {"Location": place}))) as server:
        assert "answered 307, a redirect" in failure(config_of(server.url))
        assert "answered 307, a redirect" in failure(config_of(server.url), try_once)


def test_an_address_that_is_none_is_one_line() -> None:
    assert "cannot be reached" in failure(config_of(f"http://{'a' * 70}.b/v1", attempts=1))


@pytest.mark.parametrize(("asked", "most"), [({}, 3 * 16), ({"max_completion_tokens": 5}, 5 * 16)])
def test_a_reply_of_more_than_was_asked_for_is_cut(asked: dict[str, int], most: int) -> None:
    """A server that ignored `max_tokens` once had sixteen million tokens stored for each step."""
    with chat_server(in_turn(said("x" * 100_000), said("y" * most))) as server:
        config = config_of(server.url, body=asked)
        config = replace(config, actors=replace(config.actors, max_response_tokens=3))
        cut, whole = ask(config), ask(config)
    assert cut.token_ids == ids_of("x" * most) and cut.finish_reason == "length"
    assert len(cut.logprobs) == most
    assert whole.token_ids == ids_of("y" * most) and whole.finish_reason == "stop"

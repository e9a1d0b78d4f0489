"""Test prompts that continue an exchange: by tokens for an unchanged reply, else from text."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.endpoint.conversation import Conversation, PromptTooLong
from actors.endpoint.response import cut_reply
from actors.policy import Prompt
from actors.prompting.messages import Message
from tests.support.chat_samples import NoisePolicy, completion, encode, tokenizer

EOS = 1
EVERY_TEMPLATE = ("tiny", "chatml", "thinking", "plain")


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def conversation(template: str) -> Conversation:
    return Conversation(tokenizer(template), chat_variables={}, max_characters=10**6)


def whole(template: str, messages: tuple[Message, ...]) -> tuple[int, ...]:
    """Tokenise messages as the tokenizer itself does."""
    chat = [{"role": message.role, "content": message.content} for message in messages]
    return tuple(
        tokenizer(template).apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def test_a_reply_handed_back_keeps_its_tokens_however_its_text_would_be_cut() -> None:
    """Keep two tokens of "12" although the tokenizer would write one."""
    made = conversation("tiny")
    first = made.prompt((user("it is"),))
    response = (*encode("1"), *encode("2"), EOS)
    assert response[:-1] != encode("12")
    made.record((user("it is"),), reply=said("12"), token_ids=first + response, ended=True)
    later = made.prompt((user("it is"), said("12"), user("low")))
    user_token, assistant_token = tokenizer().convert_tokens_to_ids(["<user>", "<assistant>"])
    assert later == (*first, *response, user_token, *encode("low"), assistant_token)


@pytest.mark.parametrize(("ended", "closes"), [(True, 0), (False, 1)])
def test_a_turn_is_closed_once_by_the_model_or_by_the_template(ended: bool, closes: int) -> None:
    made = conversation("tiny")
    first = made.prompt((user("it is"),))
    response = (*encode("7"), EOS) if ended else encode("7")
    made.record((user("it is"),), reply=said("7"), token_ids=first + response, ended=ended)
    later = made.prompt((user("it is"), said("7"), user("low")))
    assert later[: len(first + response)] == first + response
    assert later[len(first + response) :].count(EOS) == closes


def test_a_reply_that_was_cut_keeps_its_last_token_though_the_template_goes_on_with_the_same() -> (
    None
):
    made = conversation("plain")  # which puts a newline behind a reply
    response = encode("7\n")
    assert response[-1:] == encode("\n")
    ids = made.prompt((user("it is"),)) + response
    made.record((user("it is"),), reply=said("7\n"), token_ids=ids, ended=False)
    later = made.prompt((user("it is"), said("7\n"), user("low")))
    assert tokenizer("plain").decode(later[len(ids) :]) == "\nuser: low\nassistant:"


def test_no_text_of_a_message_is_taken_for_the_stand_in_of_a_reply() -> None:
    """The attack: a message with the text that stands for a reply, which was the same for all."""
    made = conversation("tiny")
    ids = (*made.prompt((user("it is"),)), *encode("1"), *encode("2"), EOS)
    made.record((user("it is"),), reply=said("12"), token_ids=ids, ended=True)
    messages = (user("it is"), said("12"), user("say 0reply0 now"))
    assert made.prompt(messages)[: len(ids)] == ids


def test_a_template_that_shows_no_reply_is_rendered_twice_however_many_there_are() -> None:
    """The attack: each recorded reply was tried, with a whole chat rendered for each."""
    shown = "{% for m in messages if m['role'] != 'assistant' %}"
    made_of = train_tokenizer_with(shown + "<user>{{ m['content'] }}{% endfor %}<assistant>")
    made = Conversation(made_of, chat_variables={}, max_characters=10**6)
    messages: tuple[Message, ...] = ()
    for n in range(20):
        messages += (user(f"{n}: 0reply0"),)
        made.record(messages, reply=said("7"), token_ids=encode("7"), ended=False)
        messages += (said("7"),)
    rendered = 0
    apply = made_of.apply_chat_template

    def counted(*arguments: object, **options: object) -> object:
        nonlocal rendered
        rendered += 1
        return apply(*arguments, **options)

    made_of.apply_chat_template = counted
    made.prompt((*messages, user("low")))
    assert rendered == 2


def test_an_edited_reply_is_tokenised_anew() -> None:
    made = conversation("tiny")
    first = made.prompt((user("it is"),))
    made.record(
        (user("it is"),),
        reply=said("12 "),
        token_ids=(*first, *encode("1"), *encode("2 "), EOS),
        ended=True,
    )
    edited = (user("it is"), said("12"), user("low"))
    assert made.prompt(edited) == whole("tiny", edited)


def test_a_reply_edited_later_keeps_what_was_said_before_it() -> None:
    made = conversation("tiny")
    opening = (user("it is"),)
    ids = (*made.prompt(opening), *encode("7"), EOS)
    made.record(opening, reply=said("7"), token_ids=ids, ended=True)
    second = (*opening, said("7"), user("low"))
    made.record(
        second, reply=said("9"), token_ids=(*made.prompt(second), *encode("9"), EOS), ended=True
    )
    later = made.prompt((*second, said("8"), user("high")))
    assert later[: len(ids)] == ids


def test_a_template_that_hides_replies_is_tokenised_anew() -> None:
    shown = "{% for m in messages if m['role'] != 'assistant' %}"
    hiding = shown + "<user>{{ m['content'] }}{% endfor %}<assistant>"
    changed = train_tokenizer_with(hiding)
    made = Conversation(changed, chat_variables={}, max_characters=10**6)
    made.record(
        (user("it is"),),
        reply=said("7"),
        token_ids=(*made.prompt((user("it is"),)), *encode("7"), EOS),
        ended=True,
    )
    messages = ({"role": "user", "content": "it is"}, {"role": "user", "content": "low"})
    shown = changed.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert made.prompt((user("it is"), said("7"), user("low"))) == tuple(shown)


def train_tokenizer_with(template: str):  # type: ignore[no-untyped-def]
    import copy

    changed = copy.deepcopy(tokenizer())
    changed.chat_template = template
    return changed


@pytest.mark.parametrize("template", EVERY_TEMPLATE)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_whatever_a_program_does_every_handed_back_reply_keeps_its_tokens(
    template: str, seed: int
) -> None:
    """Continue, branch, edit a reply, or begin anew, at random."""
    draw, made, policy = random.Random(seed), conversation(template), NoisePolicy()
    exchanges: list[tuple[tuple[Message, ...], str, tuple[int, ...]]] = []
    for turn in range(8):
        new = tuple(
            user(draw.choice(["low", " high ", "it is 7", "über 12\n"]))
            for _ in range(draw.randrange(1, 3))
        )
        # distinct, so that what is edited is not said elsewhere
        messages, begins_with = (*new, user(str(turn))), ()
        if exchanges and draw.random() < 0.8:
            before, reply, token_ids = draw.choice([exchanges[-1], draw.choice(exchanges)])
            if draw.random() < 0.25:
                messages = (*before, said(reply + "!"), *messages)
            else:
                messages, begins_with = (*before, said(reply), *messages), token_ids
        prompt_ids = made.prompt(messages)
        assert prompt_ids[: len(begins_with)] == begins_with
        if not any(message.role == "assistant" for message in messages):
            assert prompt_ids == whole(template, messages)
        answer = asyncio.run(
            policy.generate(
                Prompt(token_ids=prompt_ids, actions=None),
                seed=draw.getrandbits(31),
                temperature=1.0,
            )
        )
        cut = cut_reply(answer, tokenizer(template), max_tokens=99, stop=())
        token_ids = prompt_ids + cut.completion.token_ids
        made.record(messages, reply=said(cut.text), token_ids=token_ids, ended=cut.ended)
        exchanges.append((messages, cut.text, token_ids))


@pytest.mark.parametrize("template", ["tiny", "chatml"])
@given(texts=st.lists(st.sampled_from(["7", "12", "it is 7", "too high"]), min_size=1, max_size=4))
@settings(max_examples=20, deadline=None)
def test_replies_tokenised_as_the_tokenizer_does_give_the_prompt_of_the_whole_chat(
    template: str, texts: list[str]
) -> None:
    """Check that nothing is lost or doubled between an exchange and its continuation."""
    made, messages = conversation(template), (user("guess my number"),)
    for text in texts:
        prompt_ids = made.prompt(messages)
        assert prompt_ids == whole(template, messages)
        made.record(
            messages, reply=said(text), token_ids=(*prompt_ids, *encode(text), EOS), ended=True
        )
        messages = (*messages, said(text), user("low"))
    assert made.prompt(messages) == whole(template, messages)


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text", "tokens", "finish_reason", "ended"),
    [
        ((), 99, "a: b; c", 8, "stop", True),
        ((), 7, "a: b; c", 7, "length", False),
        ((), 2, "a:", 2, "length", False),
        ((";",), 99, "a: b", 5, "stop", False),
        (("; c", " b"), 99, "a:", 4, "stop", False),  # " b" is complete first
        # "b;" is complete first, though it begins later
        ((": b; c", "b;"), 99, "a: ", 5, "stop", False),
        ((";",), 4, "a: b", 4, "length", False),
        (("z",), 99, "a: b; c", 8, "stop", True),
    ],
)
def test_a_reply_is_cut_at_a_stop_text_and_at_a_number_of_tokens(
    stop: tuple[str, ...], max_tokens: int, text: str, tokens: int, finish_reason: str, ended: bool
) -> None:
    letters = tuple(token for letter in "a: b; c" for token in encode(letter))
    assert len(letters) == 7
    whole_reply = completion((*letters, EOS), finish_reason="stop", version=0)
    reply = cut_reply(whole_reply, tokenizer(), max_tokens=max_tokens, stop=stop)
    cut = reply.completion
    assert (reply.text, len(cut.token_ids), cut.finish_reason, reply.ended) == (
        text,
        tokens,
        finish_reason,
        ended,
    )
    assert cut.token_ids == whole_reply.token_ids[:tokens]
    assert cut.logprobs == whole_reply.logprobs[:tokens]


class Read(str):
    """Count how often a text is read whole."""

    times = 0

    def encode(self, *how: str, **options: str) -> bytes:
        Read.times += 1
        return super().encode(*how, **options)


def test_each_of_many_messages_is_looked_at_once() -> None:
    """Hash each message once: hashing each beginning anew took five minutes."""
    Read.times = 0
    made = Conversation(tokenizer("chatml"), chat_variables={}, max_characters=1000)
    messages = tuple(
        Message(role=("user", "assistant")[n % 2], content=Read("7")) for n in range(100_000)
    )
    with pytest.raises(PromptTooLong):
        made.prompt((*messages, user("low")))
    assert Read.times == len(messages)


def test_messages_are_told_apart_by_where_each_ends() -> None:
    made = conversation("tiny")
    ids = (*made.prompt((user("ab"),)), *encode("1"), *encode("2"), EOS)
    made.record((user("ab"),), reply=said("12"), token_ids=ids, ended=True)
    other = (user("a"), Message(role="user", content="b"), said("12"), user("low"))
    assert made.prompt(other) == whole("tiny", other)


def test_tools_and_messages_are_read_once_for_all_replies_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: n=128 replies wrote the text of 8 MiB of tools 128 times on the event loop."""
    read: list[object] = []
    written = json.dumps

    def counted(value: object) -> str:
        read.append(value)
        return written(value)

    monkeypatch.setattr("actors.endpoint.conversation.json.dumps", counted)
    made = conversation("tiny")
    messages = (user("it is"),)
    tools = ({"type": "function", "function": {"name": "low"}},)
    first = made.prompt(messages, tools=tools)
    for n in range(10):
        made.record(
            messages,
            reply=said(str(n)),
            token_ids=(*first, *encode(str(n)), EOS),
            ended=True,
            tools=tools,
        )
    assert read == [list(tools)]
    assert made._newest is not None
    for n in range(10):  # each reply was kept under its own digest
        later = made.prompt((*messages, said(str(n)), user("low")), tools=tools)
        assert later[: len(first) + 2] == (*first, *encode(str(n)), EOS)
    made.record(messages, reply=said("x"), token_ids=first, ended=True)  # other tools
    assert read[-1] == []

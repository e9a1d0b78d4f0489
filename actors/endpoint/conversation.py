"""Chat messages as prompt token ids. What goes on from an earlier exchange keeps its tokens and
never their text.

    conversation = Conversation(tokenizer, chat_variables={}, max_characters=4096)
    prompt_ids = conversation.prompt(messages)
    conversation.record(messages, reply="It is 7.", token_ids=prompt_ids + response_ids, ended=True)
    conversation.prompt((*messages, Message(role="assistant", content="It is 7."), question))   # begins with those token ids

A reply that a program hands back verbatim stands for the tokens that were sampled, whatever its
text would be tokenised as. One that it edited has no such tokens: then the whole prompt is made
from text, which is right too, as the prompt is what the model was given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from actors.prompting.chat_template import REPLY, Tokenizer


class PromptTooLong(ValueError):
    """A prompt that no model of this size takes, as its number of characters tells."""

    def __init__(self, n_characters: int) -> None:
        super().__init__(f"the prompt has {n_characters} characters")
        self.n_characters = n_characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    role: str  # "system", "user" or "assistant"
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    token_ids: tuple[int, ...]  # prompt and response
    ended: bool


class Conversation:
    """The exchanges of one episode; several conversations of one program may be in it, and branches
    of each.

    A text of more than `max_characters` is never tokenised.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, chat_variables: Mapping[str, object], max_characters: int
    ) -> None:
        self._tokenizer, self._variables, self._max_characters = (
            tokenizer,
            dict(chat_variables),
            max_characters,
        )
        # by the digest of the messages with the reply; of equal ones the newest
        self._said: dict[bytes, _Said] = {}

    def prompt(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Token ids up to where the reply begins. Raises PromptTooLong, and what the chat template
        raises.

        Takes time in proportion to the messages' characters, however many messages they are.
        """
        replies = [
            (end, digest)
            for end, digest in _digests(messages)
            if messages[end - 1].role == "assistant"
        ]
        for end, digest in reversed(replies):
            said = self._said.get(digest)
            rest = None if said is None else self._rest(messages, end=end, after=said)
            if said is not None and rest is not None:
                return (*said.token_ids, *rest)
        return tuple(self._encode(self._render(messages)))

    def record(
        self, messages: tuple[Message, ...], *, reply: str, token_ids: tuple[int, ...], ended: bool
    ) -> None:
        """`token_ids` of prompt and response; `ended`: the last one is the model's own end, not a
        limit's.
        """
        *_, (_, digest) = _digests((*messages, Message(role="assistant", content=reply)))
        self._said[digest] = _Said(token_ids=token_ids, ended=ended)

    def _rest(self, messages: tuple[Message, ...], *, end: int, after: _Said) -> list[int] | None:
        """What the chat template writes behind the reply `messages[end - 1]`; None if it does not
        show where that is.
        """
        stand_in = Message(role="assistant", content=REPLY)
        _, *rest = self._render((*messages[: end - 1], stand_in, *messages[end:])).split(REPLY)
        if len(rest) != 1:
            return None
        token_ids = self._encode(rest[0])
        # The template closes the assistant's turn; a reply that ended by itself has done so
        # already.
        has_closed = after.ended and token_ids[:1] == [after.token_ids[-1]]
        return token_ids[has_closed:]

    def _render(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [asdict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=False,
            return_dict=False,
            **self._variables,
        )
        return text

    def _encode(self, text: str) -> list[int]:
        if len(text) > self._max_characters:
            raise PromptTooLong(len(text))
        return self._tokenizer.encode(text, add_special_tokens=False)


def _digests(messages: Sequence[Message]) -> Iterator[tuple[int, bytes]]:
    """Yield each number of messages, from 1, with a digest of the first so many. Looks at each
    message once.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for end, message in enumerate(messages, start=1):
        for text in (message.role, message.content):
            data = text.encode(errors="surrogatepass")
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        yield end, hasher.digest()

"""A model's chat template: a user's message as token ids, to begin a conversation with or to go on
with one.

    chat = Chat(tokenizer, thinking=None)
    chat.begun("You see a door.")                              # ids of the whole prompt
    chat.continued("It is locked.", after=response_ids)        # ids to put behind the prompt and the response

Going on never writes a reply anew: what was sampled stays token for token, so each prompt begins
with the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

# characters of a token, where a vocabulary has only shorter ones: a normaliser may shorten text too
SHORTEST_BOUND = 16
# take a noticeable time to tokenise: a caller on an event loop does it beside that loop
LONG_CHARACTERS = 2**14
# for a chat template to write one short message, a few times: it takes milliseconds
TEMPLATE_TIMEOUT_S = 15.0
MESSAGE, REPLY = "0message0", "0reply0"  # looked for in what a chat template makes of them


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    eos_token_id: int

    # (conversation, add_generation_prompt=, tokenize=, return_dict=False, ...): text, or with
    # `tokenize` a list of token ids
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    # empty where each token is one character, or a byte of one
    def get_vocab(self) -> Mapping[str, int]: ...


T = TypeVar("T")


def where(tokenizer: Tokenizer) -> str:
    """Return the setting that names the model of a tokenizer, with its value where that is
    known.
    """
    path = str(getattr(tokenizer, "name_or_path", ""))
    return f"model.path={path}" if path else "model.path"


def longest_token(tokenizer: Tokenizer) -> int:
    """Return a bound of the characters of one token: n tokens never stand for more than n times as
    many.

    A byte-level vocabulary has a character for each byte, so its entries are no shorter than their
    text.
    """
    return max(SHORTEST_BOUND, max(map(len, tokenizer.get_vocab()), default=0))


def within(work: Callable[[], T], *, seconds: float, late: Callable[[], str]) -> T:
    """Return `work()`. Raises ValueError with `late()` if it has not ended after so many seconds.

    It then goes on in its thread, which nobody can end but the end of this process: the caller has
    to report the error.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            done.set_exception(error)

    threading.Thread(target=run, name="chat template", daemon=True).start()
    try:
        return done.result(timeout=seconds)
    except TimeoutError:
        raise ValueError(late()) from None


class Chat:
    """`thinking` is handed to the template as `enable_thinking`, None leaves it alone; many
    templates ignore it.

    Pure: the same arguments give the same token ids. Templates of vision models get their text as a
    content part. Raises ValueError for a tokenizer without a chat template, or with one that drops
    what the user says, that fails, or that does not end. A template is a program, and comes with
    the model from whoever made that.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool | None) -> None:
        self._tokenizer = tokenizer
        self._variables: dict[str, object] = (
            {} if thinking is None else {"enable_thinking": thinking}
        )
        self._in_parts = False
        if fault := within(self._tried, seconds=TEMPLATE_TIMEOUT_S, late=self._never_ended):
            raise ValueError(
                f"the chat template of the tokenizer in {where(self._tokenizer)} cannot be used "
                f"({fault}); take an "
                "instruction-tuned model, or put a chat_template.jinja beside its tokenizer"
            )
        self.opening = within(self._opening, seconds=TEMPLATE_TIMEOUT_S, late=self._never_ended)

    def begun(self, message: str, *, n_images: int = 0) -> tuple[int, ...]:
        """The conversation's first message, up to where the assistant's reply begins; images come
        before its text.
        """
        return tuple(
            self._apply([("user", message)], generation=True, tokenize=True, n_images=n_images)
        )

    def continued(self, message: str, *, after: Sequence[int]) -> tuple[int, ...]:
        """What goes behind a response `after`: the end of the assistant's turn where it lacks that
        token, and the message.

        Raises ValueError for a chat template that does not repeat the assistant's messages as they
        are.
        """
        conversation = [("user", MESSAGE), ("assistant", REPLY), ("user", message)]
        _, reply, rest = self._apply(conversation, generation=True, tokenize=False).partition(REPLY)
        if not reply:
            raise ValueError(
                "prompt.style='chat' needs a chat template that repeats earlier replies; use "
                "'window' with this one"
            )
        token_ids = self._tokenizer.encode(rest, add_special_tokens=False)
        has_ended = bool(after) and token_ids[:1] == [after[-1]]
        return tuple(token_ids[has_ended:])

    def _never_ended(self) -> str:
        return (
            f"the chat template of the tokenizer in {where(self._tokenizer)} did not end within "
            f"{TEMPLATE_TIMEOUT_S:g} s: it "
            "loops; put a chat_template.jinja that does not beside its tokenizer"
        )

    def _tried(self) -> str:
        """Return why the chat template is of no use, with the text as a content part or without; ""
        if it is.
        """
        fault = self._fault()
        if fault:
            self._in_parts = True
        return fault and self._fault() and fault

    def _fault(self) -> str:
        """Why the chat template does not show what the user says; "" if it does."""
        try:
            token_ids = self._apply([("user", MESSAGE)], generation=False, tokenize=True)
        except Exception as error:  # noqa: BLE001 - a template may raise anything: it is another's program
            return " ".join((str(error) or type(error).__name__).split())[:100]
        shown = MESSAGE in self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return "" if shown else "it leaves out the user's message"

    def _opening(self) -> str:
        """What the chat template puts before the reply: that the assistant speaks and, with some
        models, `<think>`.
        """
        without, whole = (
            self._apply([("user", MESSAGE)], generation=g, tokenize=True) for g in (False, True)
        )
        if whole[: len(without)] != without:
            return ""
        return self._tokenizer.decode(whole[len(without) :], skip_special_tokens=False)

    def _apply(
        self,
        conversation: Sequence[tuple[str, str]],
        *,
        generation: bool,
        tokenize: bool,
        n_images: int = 0,
    ) -> Any:
        images = [{"type": "image"}] * n_images
        messages = [
            {
                "role": role,
                "content": [*images, {"type": "text", "text": text}]
                if self._in_parts or images
                else text,
            }
            for role, text in conversation
        ]
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=generation,
            tokenize=tokenize,
            return_dict=False,
            **self._variables,
        )

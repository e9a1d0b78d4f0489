"""Load a model's tokenizer, and turn user messages into token ids by its chat template.

    tokenizer = load_tokenizer("models/Qwen2.5-1.5B-Instruct", with_torch=True)
    chat = Chat(tokenizer, thinking=None)
    chat.begun("You see a door.")                         # ids of the whole prompt
    chat.continued("It is locked.", after=response_ids)   # ids to append to prompt and response

A continued chat keeps the sampled tokens of a reply as they are, so each prompt begins with the
tokens of the one before.

The episodes of a group meet the same states, so most messages come again: nine of ten in the quick
start. Their token ids are kept, because template and tokeniser take ten times as long as the rest
of a prompt.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from configs import SAFE_LOADING, load_safely
from envs import run_in_thread
from printable import REASON_CHARACTERS, one_line

# Smallest bound of a token's characters: a normaliser may shorten text too.
SHORTEST_BOUND = 16
# A longer text takes a noticeable time to tokenise: do it beside the event loop.
LONG_CHARACTERS = 2**14
TEMPLATE_TIMEOUT_S = 15.0  # for one short message, which takes milliseconds
# Characters of the messages whose token ids are kept: twice those of a whole quick start. With
# their ids they take 20 MB, or 85 MB where a token is one character.
KEPT_CHARACTERS = 2**21
CONTINUED = -1  # form of a message behind a reply; the form of others is their number of images
MESSAGE, REPLY = "0message0", "0reply0"  # looked for in the text that a chat template writes


class Tokenizer(Protocol):
    """List the methods of a Hugging Face tokenizer that are used here."""

    eos_token_id: int

    # (conversation, add_generation_prompt=, tokenize=, return_dict=False, ...) -> text, or a list
    # of token ids with `tokenize`
    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    # empty where each token is one character, or a byte of one
    def get_vocab(self) -> Mapping[str, int]: ...


def load_tokenizer(model_path: str, *, with_torch: bool) -> Tokenizer:
    """Load the tokenizer of a model's directory.

    Without torch it takes a third of the time. transformers is then loaded as if torch were not
    installed, and stays so in this process: use it where no model is computed.
    """
    with nullcontext() if with_torch or "torch" in sys.modules else _torch_hidden():
        # Imported here: the driver and the coordinator import this module, and never need it.
        from transformers import AutoTokenizer

        tokenizer: Tokenizer = load_safely(
            "tokenizer",
            model_path,
            load=lambda: AutoTokenizer.from_pretrained(model_path, **SAFE_LOADING),
        )
        return tokenizer


@contextmanager
def _torch_hidden() -> Iterator[None]:
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    try:
        yield
    finally:
        del sys.modules["torch"]


def model_setting(tokenizer: Tokenizer) -> str:
    """Return the setting that names the tokenizer's model, with its value if it is known."""
    path = str(getattr(tokenizer, "name_or_path", ""))
    return f"model.path={path}" if path else "model.path"


def longest_token(tokenizer: Tokenizer) -> int:
    """Return a bound of one token's characters; n tokens have at most n times as many.

    A byte-level vocabulary writes one character per byte, so its entries are at least as long as
    their text.
    """
    return max(SHORTEST_BOUND, max(map(len, tokenizer.get_vocab()), default=0))


def chat_variables(thinking: bool | None) -> dict[str, object]:
    """Return the variables for a chat template that say whether the model thinks; None: neither."""
    return {} if thinking is None else {"enable_thinking": thinking}


class TokenCache:
    """Keep the token ids of the newest messages, up to KEPT_CHARACTERS. Threads may share it.

    A message is kept with its form, because the same text has other ids elsewhere in a chat.
    """

    def __init__(self) -> None:
        self._token_ids: dict[tuple[str, int], tuple[int, ...]] = {}  # oldest first
        self._n_characters = 0
        self._lock = threading.Lock()

    def find(self, message: str, form: int) -> tuple[int, ...] | None:
        return self._token_ids.get((message, form))

    def keep(self, message: str, form: int, token_ids: tuple[int, ...]) -> None:
        with self._lock:
            if (message, form) in self._token_ids:
                return
            self._token_ids[message, form] = token_ids
            self._n_characters += len(message)
            while self._n_characters > KEPT_CHARACTERS:
                oldest = next(iter(self._token_ids))
                del self._token_ids[oldest]
                self._n_characters -= len(oldest[0])


class Chat:
    """Write messages with the chat template of a tokenizer. Equal arguments give equal token ids.

    `thinking` is passed to the template as `enable_thinking`, unless it is None; many templates
    ignore it. Templates of vision models get their text as a content part.

    Raises ValueError for a tokenizer whose chat template is missing, fails, does not end, or leaves
    out the user's message. A template is a program that comes with the model.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool | None) -> None:
        self._tokenizer = tokenizer
        self._variables = chat_variables(thinking)
        self._in_parts = False
        self._cache = TokenCache()
        if fault := self._with_timeout(self._choose_form):
            raise ValueError(
                f"the chat template of the tokenizer in {model_setting(tokenizer)} cannot be used "
                f"({fault}); take an instruction-tuned model, or put a chat_template.jinja beside "
                "its tokenizer"
            )
        # the template's text before a reply: the assistant's role and, with some models, `<think>`
        self.opening = self._with_timeout(self._find_opening)

    def begun(self, message: str, *, n_images: int = 0) -> tuple[int, ...]:
        """Return the prompt of a new conversation, up to where the assistant's reply begins.

        Images come before the text.
        """
        token_ids = self.known(message, n_images=n_images)
        if token_ids is None:
            messages = [("user", message)]
            applied = self._apply(messages, generation=True, tokenize=True, n_images=n_images)
            token_ids = tuple(applied)
            self._cache.keep(message, n_images, token_ids)
        return token_ids

    def known(self, message: str, *, n_images: int = 0) -> tuple[int, ...] | None:
        """Return `begun` of a message that is kept, at once; None for another message."""
        return self._cache.find(message, n_images)

    def continued(self, message: str, *, after: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that follow the response `after`: its missing end token, and the message.

        Raises ValueError for a chat template that does not repeat the assistant's messages.
        """
        token_ids = self._cache.find(message, CONTINUED)
        if token_ids is None:
            token_ids = self._after_reply(message)
            self._cache.keep(message, CONTINUED, token_ids)
        has_ended = bool(after) and token_ids[:1] == (after[-1],)
        return token_ids[has_ended:]

    def _after_reply(self, message: str) -> tuple[int, ...]:
        """Return the ids of what the template writes after a reply that a message follows."""
        conversation = [("user", MESSAGE), ("assistant", REPLY), ("user", message)]
        _, reply, rest = self._apply(conversation, generation=True, tokenize=False).partition(REPLY)
        if not reply:
            raise ValueError(
                "prompt.style='chat' needs a chat template that repeats earlier replies; use "
                "'window' with this one"
            )
        return tuple(self._tokenizer.encode(rest, add_special_tokens=False))

    def _with_timeout(self, work: Callable[[], str]) -> str:
        try:
            return run_in_thread(work, name="chat template", timeout_s=TEMPLATE_TIMEOUT_S)
        except TimeoutError:
            raise ValueError(
                f"the chat template of the tokenizer in {model_setting(self._tokenizer)} did not "
                f"end within {TEMPLATE_TIMEOUT_S:g} s: it loops; put a chat_template.jinja that "
                "does not beside its tokenizer"
            ) from None

    def _choose_form(self) -> str:
        """Choose plain text or content parts; return the fault of plain text if neither works."""
        fault = self._fault()
        if not fault:
            return ""
        self._in_parts = True
        return fault if self._fault() else ""

    def _fault(self) -> str:
        """Return why the chat template does not show the user's message; "" if it does."""
        try:
            token_ids = self._apply([("user", MESSAGE)], generation=False, tokenize=True)
        except Exception as error:  # noqa: BLE001 - the model's own program may raise anything
            return one_line(str(error) or type(error).__name__)[:REASON_CHARACTERS]
        shown = MESSAGE in self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return "" if shown else "it leaves out the user's message"

    def _find_opening(self) -> str:
        messages = [("user", MESSAGE)]
        without = self._apply(messages, generation=False, tokenize=True)
        whole = self._apply(messages, generation=True, tokenize=True)
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
        messages: list[dict[str, object]] = []
        for role, text in conversation:
            parts = [*images, {"type": "text", "text": text}]
            messages.append({"role": role, "content": parts if self._in_parts or images else text})
        return self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=generation,
            tokenize=tokenize,
            return_dict=False,
            **self._variables,
        )

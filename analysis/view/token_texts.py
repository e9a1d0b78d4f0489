"""Turn the ids of tokens into text, with the tokenizer that lies beside the run's own weights.

A run may come from a stranger, and so may its tokenizer. Only what decodes is taken from the file:
the texts of the ids, within bounds, and decoders that replace or join. Decoding needs no more of a
model than a list of words, so every model becomes one. The automata that the library builds to
encode with, of a unigram model or of added tokens, take hundreds of bytes for each character. Parts
that split text by regular expressions, which a file could make endless, are left out, and decoders
that make text longer: a few of them in a row multiply.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from store import RunLayout, StoreError, entries, objects, open_file, parse_object, text

TOKENIZER_FILE = "tokenizer.json"
MAX_FILE_BYTES = 40 << 20  # the largest vocabularies have 35 MiB
MAX_VALUES = 4_000_000  # lists, objects and their items; the largest have two million, for merges
MAX_TOKENS = 1_000_000  # the largest have 260,000
MAX_CHARACTERS = 16_000_000  # of all tokens; the largest have two million
MAX_VERSIONS = 8  # whose directories are looked into, newest first
BASE_MODELS = ("base/policy", "untrained", "base/untrained")
VERSION_NAME = re.compile(r"v\d+")
SAFE_DECODERS = (
    "ByteLevel",
    "Metaspace",
    "ByteFallback",
    "Fuse",
    "WordPiece",
)
# Ids whose text is made at once. It has 200 MiB at most, and without memory for it the library ends
# the process. A page asks for at most 16,000.
MAX_DECODED = 100_000
MAX_ID = 2**32 - 1  # the library has 32 bits for one
MAX_DECODERS = 8  # known tokenizers have up to four
MAX_TOKEN_CHARACTERS = 512  # known ones have up to 256, and a page shows thousands of tokens
MAX_TOKENS_OF_A_CHARACTER = 4  # it has four bytes, and each may be a token
KEPT_TOKENIZERS = 4  # in memory; runs that are viewed together mostly share one

_loading = threading.Lock()  # a page asks from several threads for one tokenizer


class TokenTexts:
    """The texts of tokens, of one tokenizer or of none."""

    def __init__(self, tokenizer: Tokenizer | None, *, source: str) -> None:
        self._tokenizer = tokenizer
        self.source = source  # the file's place in the run, or why there is none

    @property
    def is_known(self) -> bool:
        """Say whether there is a tokenizer."""
        return self._tokenizer is not None

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """Return what each token adds to the text, None where that is unknown.

        A token that ends within a character adds "", and the token that completes it the character.
        Tokens after MAX_DECODED are unknown.
        """
        if len(ids) > MAX_DECODED:
            return self.pieces(ids[:MAX_DECODED]) + [None] * (len(ids) - MAX_DECODED)
        if self._tokenizer is None:
            return [None] * len(ids)
        stream = DecodeStream(skip_special_tokens=False)
        found: list[str | None] = []
        n_without_text = 0
        for number in ids:
            if self._name(number) is None:
                found.append(None)
                stream = DecodeStream(skip_special_tokens=False)
                continue
            # A stream decodes again all tokens that gave no text yet.
            n_without_text = n_without_text + 1 if found and found[-1] == "" else 0
            if n_without_text >= MAX_TOKENS_OF_A_CHARACTER:
                stream, n_without_text = DecodeStream(skip_special_tokens=False), 0
            try:
                found.append(stream.step(self._tokenizer, number) or "")
            except Exception:  # noqa: BLE001  the library has no class of its own
                found.append(self._name(number))
                stream = DecodeStream(skip_special_tokens=False)
        return found

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens, with ⟨number⟩ for one without a text.

        It ends after MAX_DECODED tokens.
        """
        if len(ids) > MAX_DECODED:
            return f"{self.text(ids[:MAX_DECODED])} [{len(ids) - MAX_DECODED:,} more tokens]"
        if self._tokenizer is not None and all(self._name(number) is not None for number in ids):
            return str(self._tokenizer.decode(ids, skip_special_tokens=False))
        parts = self.pieces(ids)
        return "".join(
            f"⟨{number}⟩" if part is None else part for number, part in zip(ids, parts, strict=True)
        )

    def _name(self, number: int) -> str | None:
        assert self._tokenizer is not None
        name: str | None = self._tokenizer.id_to_token(number) if number >= 0 else None
        return name


def token_texts(run: Path) -> TokenTexts:
    """Return the texts of a run's tokens: of its newest weights, or of the model below it."""
    try:
        layout = RunLayout.open(run)
    except (StoreError, OSError):
        return TokenTexts(None, source="the run has no directory on this machine")
    for directory in _directories(layout.root):
        path = layout.root / directory / TOKENIZER_FILE
        try:
            with open(open_file(path, root=layout.root), "rb") as file:
                seen = os.fstat(file.fileno())
                key = (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size)
        except (OSError, StoreError):  # most directories have none; a link is not followed
            continue
        # The first one counts, sound or not: of many damaged ones none would be remembered.
        try:
            with _loading:
                return _load(path, layout.root, key)
        except (OSError, StoreError) as error:  # removed since
            return TokenTexts(None, source=f"{directory}/{TOKENIZER_FILE} cannot be read: {error}")
    return TokenTexts(None, source=f"no {TOKENIZER_FILE} lies beside the run's weights")


def decoding_part(content: dict[str, object]) -> dict[str, object]:
    """Return the description of a tokenizer that decodes like this one. Raises ValueError."""
    decoders = list(_parts(content.get("decoder")))
    if len(decoders) > MAX_DECODERS:
        raise ValueError(f"it has {len(decoders):,} decoders, more than {MAX_DECODERS}")
    safe = [decoder for decoder in decoders if _is_safe(decoder)]
    return {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": _vocabulary(content), "unk_token": ""},
        "decoder": {"type": "Sequence", "decoders": safe} if safe else None,
    }


def _vocabulary(content: dict[str, object]) -> dict[str, int]:
    """Return the ids of all tokens, those of the model and those that were added.

    Raises ValueError for other values than texts with ids, and beyond the bounds.
    """
    given = objects(content, "model").get("vocab")
    if isinstance(given, list):  # of a unigram model: pairs of text and score
        pairs = [(_text_of(pair), number) for number, pair in enumerate(given)]
    elif isinstance(given, dict):
        pairs = [(token, _id_of(number)) for token, number in given.items()]
    else:
        raise ValueError("its model has no vocabulary")
    added = entries(content, "added_tokens") if content.get("added_tokens") else []
    if (n_tokens := len(pairs) + len(added)) > MAX_TOKENS:
        raise ValueError(f"it has {n_tokens:,} tokens, more than {MAX_TOKENS:,}")
    text_of = {number: token for token, number in pairs}
    text_of |= {_id_of(one.get("id")): text(one, "content") for one in added}
    n_characters = sum(map(len, text_of.values()))
    if n_characters > MAX_CHARACTERS:
        raise ValueError(
            f"its tokens have {n_characters:,} characters, more than {MAX_CHARACTERS:,}"
        )
    longest = max(map(len, text_of.values()), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise ValueError(
            f"it has a token of {longest:,} characters, more than {MAX_TOKEN_CHARACTERS:,}"
        )
    return {token: number for number, token in text_of.items()}


def _text_of(pair: object) -> str:
    if not isinstance(pair, list) or not pair or not isinstance(pair[0], str):
        raise ValueError(f"its vocabulary has {pair!r:.80}, not a text and a score")
    return pair[0]


def _id_of(number: object) -> int:
    if type(number) is not int or not 0 <= number <= MAX_ID:
        raise ValueError(f"a token has the id {number!r:.80}, not one from 0 to {MAX_ID}")
    return number


def _parts(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yield the decoders of nested sequences, in their order."""
    waiting = [decoder]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        parts = one.get("decoders")
        if one.get("type") == "Sequence" and isinstance(parts, list):
            waiting += reversed(parts)
        else:
            yield one


def _is_safe(decoder: dict[str, Any]) -> bool:
    """Say whether a decoder ends, fails on no text and makes none longer, but for a space a token.

    "Longer" is counted in bytes: "▁" has three, and becomes a space.
    """
    kind = decoder.get("type")
    if kind == "Replace":
        pattern, new = decoder.get("pattern"), decoder.get("content")
        old = pattern.get("String") if isinstance(pattern, dict) and len(pattern) == 1 else None
        return (
            isinstance(old, str)
            and old != ""  # which is between any two characters
            and isinstance(new, str)
            and len(new.encode(errors="replace")) <= len(old.encode(errors="replace"))
        )
    if kind == "BPEDecoder":  # an empty suffix stands between any two characters
        return bool(decoder.get("suffix"))
    if kind == "Strip":  # of both ends, it panics on a token of nothing else
        return decoder.get("stop") == 0
    return kind in SAFE_DECODERS


def _directories(root: Path) -> list[str]:
    """Return where a tokenizer may lie, the newest weights first."""
    try:
        names = [name for name in os.listdir(root / "weights") if VERSION_NAME.fullmatch(name)]
    except OSError:
        names = []
    newest = sorted(names, key=lambda name: (len(name), name), reverse=True)[:MAX_VERSIONS]
    return [*(f"weights/{name}" for name in newest), *BASE_MODELS]


@lru_cache(maxsize=KEPT_TOKENIZERS)
def _load(path: Path, root: Path, key: tuple[int, ...]) -> TokenTexts:
    """Read a tokenizer. A file that is none is remembered too. Raises OSError and StoreError.

    `key` changes when the file does.
    """
    source = str(path.relative_to(root))
    try:
        return TokenTexts(_read(path, root), source=source)
    except ValueError as error:
        return TokenTexts(None, source=f"{source} cannot be read: {error}")


def _read(path: Path, root: Path) -> Tokenizer:
    """Raise ValueError for a file that is no tokenizer, or beyond the bounds."""
    with open(open_file(path, root=root), "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES:,} bytes")
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"it has more than {MAX_VALUES:,} values")
    described = json.dumps(decoding_part(parse_object(data)))
    try:
        return Tokenizer.from_str(described)
    except Exception as error:  # the library has no class of its own
        raise ValueError(f"it is no tokenizer ({error})") from error

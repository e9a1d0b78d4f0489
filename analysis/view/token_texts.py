"""Turn the ids of tokens into text, with the tokenizer that lies beside the run's own weights.

A run may come from a stranger, and so may its tokenizer. Only what decodes is taken from the file:
the vocabulary, the added tokens, and decoders that replace or join. Parts that split text by
regular expressions, which a file could make endless, are left out, and decoders that make text
longer: a few of them in a row multiply.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from store import RunLayout, StoreError, objects, open_file, parse_object

TOKENIZER_FILE = "tokenizer.json"
MAX_FILE_BYTES = 64 << 20  # the largest vocabularies have 35 MiB
MAX_VERSIONS = 8  # whose directories are looked into, newest first
BASE_MODELS = ("base/policy", "untrained", "base/untrained")
VERSION_NAME = re.compile(r"v\d+")
ONLY_ENCODE = ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding")
SAFE_DECODERS = (
    "ByteLevel",
    "Metaspace",
    "ByteFallback",
    "Fuse",
    "WordPiece",
)
MAX_DECODERS = 16  # known tokenizers have up to four
MAX_TOKEN_CHARACTERS = 1_024  # a page shows thousands of tokens
KEPT_TOKENIZERS = 4


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
        """
        if self._tokenizer is None:
            return [None] * len(ids)
        stream = DecodeStream(skip_special_tokens=False)
        found: list[str | None] = []
        for number in ids:
            if self._name(number) is None:
                found.append(None)
                stream = DecodeStream(skip_special_tokens=False)
                continue
            try:
                found.append(stream.step(self._tokenizer, number) or "")
            except Exception:  # noqa: BLE001  the library has no class of its own
                found.append(self._name(number))
                stream = DecodeStream(skip_special_tokens=False)
        return found

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens, with ⟨number⟩ for one without a text."""
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
    reason = f"no {TOKENIZER_FILE} lies beside the run's weights"
    for directory in _directories(layout.root):
        path = layout.root / directory / TOKENIZER_FILE
        try:
            with open(open_file(path, root=layout.root), "rb") as file:
                seen = os.fstat(file.fileno())
                if seen.st_size > MAX_FILE_BYTES:
                    reason = f"{directory}/{TOKENIZER_FILE} is too large"
                    continue
                key = (seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size)
        except (OSError, StoreError):  # most directories have none; a link is not followed
            continue
        try:
            return _load(path, layout.root, key)
        except (OSError, StoreError, ValueError) as error:
            reason = f"{directory}/{TOKENIZER_FILE} cannot be read: {error}"
    return TokenTexts(None, source=reason)


def decoding_part(content: dict[str, object]) -> dict[str, object]:
    """Return a tokenizer's description with only what decodes. Raises ValueError."""
    kept = {**content, **dict.fromkeys(ONLY_ENCODE)}
    model = objects(content, "model")
    kept["model"] = {**model, "merges": []} if "merges" in model else model
    decoders = list(_parts(content.get("decoder")))
    if len(decoders) > MAX_DECODERS:
        raise ValueError(f"it has {len(decoders):,} decoders, more than {MAX_DECODERS}")
    safe = [decoder for decoder in decoders if _is_safe(decoder)]
    kept["decoder"] = {"type": "Sequence", "decoders": safe} if safe else None
    return kept


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
    """Read a tokenizer. `key` changes when the file does. Raises ValueError and OSError."""
    with open(open_file(path, root=root), "rb") as file:
        data = file.read(MAX_FILE_BYTES)
    described = json.dumps(decoding_part(parse_object(data)))
    try:
        tokenizer = Tokenizer.from_str(described)
    except Exception as error:  # the library has no class of its own
        raise ValueError(f"it is no tokenizer ({error})") from error
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise ValueError(
            f"it has a token of {longest:,} characters, more than {MAX_TOKEN_CHARACTERS:,}"
        )
    return TokenTexts(tokenizer, source=str(path.relative_to(root)))

"""Turn the ids of tokens into text, with the tokenizer that lies beside the run's own weights.

A run may come from a stranger, and so may its tokenizer. Only what decodes is taken from the file:
the vocabulary, the added tokens, and decoders that replace or join. Parts that split text by
regular expressions, which a file could make endless, are left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
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
    "Strip",
    "WordPiece",
    "BPEDecoder",
)
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
        except (OSError, StoreError):
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
    decoder = _safe_decoder(content.get("decoder"))
    kept["decoder"] = decoder
    return kept


def _safe_decoder(decoder: Any) -> dict[str, object] | None:
    if not isinstance(decoder, dict):
        return None
    kind = decoder.get("type")
    if kind in SAFE_DECODERS:
        return decoder
    pattern = decoder.get("pattern")
    if kind == "Replace" and isinstance(pattern, dict) and list(pattern) == ["String"]:
        return decoder
    parts = decoder.get("decoders")
    if kind == "Sequence" and isinstance(parts, list):
        safe = [each for part in parts if (each := _safe_decoder(part)) is not None]
        return {"type": "Sequence", "decoders": safe}
    return None


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
    return TokenTexts(tokenizer, source=str(path.relative_to(root)))

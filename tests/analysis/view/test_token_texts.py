"""Texts of tokens: characters of several tokens, and tokenizers that should not be loaded."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream, Metaspace
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import Unigram, WordLevel, WordPiece

from analysis.view import token_texts as module
from analysis.view.png import png
from analysis.view.token_texts import MAX_FILE_BYTES, TokenTexts, decoding_part, token_texts
from store import RunLayout
from tests.analysis.view.worked_run import make_tokenizer


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    return RunLayout.create(tmp_path / "run", config_yaml="")


def put(layout: RunLayout, name: str, content: str) -> Path:
    path = layout.root / name / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_a_character_may_have_several_tokens() -> None:
    texts = TokenTexts(make_tokenizer(), source="")
    assert texts.pieces([0, 1, 2, 3, 99, -1, 0]) == ["take", " gold", "", "é", None, None, "take"]
    assert texts.text([0, 99, 5]) == "take⟨99⟩\n"
    assert texts.pieces([]) == []


def test_tokens_without_a_text_are_not_decoded_again_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: a stream decodes all tokens since the last text, so 2,000 took minutes."""
    steps: list[int] = []  # of each stream

    class Counted:
        def __init__(self, **options: bool) -> None:
            self._stream = DecodeStream(**options)
            steps.append(0)

        def step(self, tokenizer: Tokenizer, number: int) -> str | None:
            steps[-1] += 1
            return self._stream.step(tokenizer, number)

    monkeypatch.setattr(module, "DecodeStream", Counted)
    broken = Tokenizer(WordLevel({"\ufffd" * 512: 0, "?": 1}, unk_token="?"))
    assert len(TokenTexts(broken, source="").pieces([0] * 100)) == 100
    assert max(steps) <= module.MAX_TOKENS_OF_A_CHARACTER + 1


def test_no_more_tokens_are_decoded_than_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: a macro `len` of the run's own let 25 million tokens through, and Rust's part
    ends the process when it finds no memory.
    """
    monkeypatch.setattr(module, "MAX_DECODED", 3)
    texts = TokenTexts(make_tokenizer(), source="")
    assert texts.text([0, 1, 0, 0, 0]) == f"{texts.text([0, 1, 0])} [2 more tokens]"
    assert texts.pieces([0] * 5) == [*texts.pieces([0] * 3), None, None]


def test_the_newest_weights_are_asked_first(layout: RunLayout) -> None:
    whole = make_tokenizer().to_str()
    put(layout, "base/policy", whole)
    assert token_texts(layout.root).source == "base/policy/tokenizer.json"
    put(layout, "weights/v9", whole)
    put(layout, "weights/v10", whole)
    assert token_texts(layout.root).source == "weights/v10/tokenizer.json"


def test_without_a_tokenizer_tokens_have_no_text(layout: RunLayout) -> None:
    texts = token_texts(layout.root)
    assert not texts.is_known and "lies beside" in texts.source
    assert texts.pieces([1, 2]) == [None, None]


@pytest.mark.parametrize("content", ["", "no json", "[]", "{}", '{"model": 1}', '{"model": {}}'])
def test_a_damaged_tokenizer_is_named(content: str, layout: RunLayout) -> None:
    put(layout, "weights/v1", content)
    texts = token_texts(layout.root)
    assert not texts.is_known and texts.source.startswith(
        "weights/v1/tokenizer.json cannot be read"
    )


def test_a_link_and_a_large_file_are_not_read(layout: RunLayout, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text(make_tokenizer().to_str())
    (layout.weights / "v2").mkdir(parents=True)
    (layout.weights / "v2" / "tokenizer.json").symlink_to(outside)
    assert not token_texts(layout.root).is_known
    large = put(layout, "weights/v3", "")
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    source = token_texts(layout.root).source
    assert source == "weights/v3/tokenizer.json cannot be read: it has more than 41,943,040 bytes"


def test_only_what_decodes_is_loaded() -> None:
    content = json.loads(make_tokenizer().to_str())
    endless = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    plain = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    content["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(a+)+$"}}
    content["decoder"] = {"type": "Sequence", "decoders": [endless, plain, {"type": "Fuse"}]}
    kept = decoding_part(content)
    assert "pre_tokenizer" not in kept
    assert kept["decoder"] == {"type": "Sequence", "decoders": [plain, {"type": "Fuse"}]}


def whole_tokenizers() -> list[Tokenizer]:
    """Make a tokenizer of each kind of model, with tokens that were added."""
    plain = {"a": 0, "##b": 1, "▁c": 2, "é": 3, "[UNK]": 4}
    made = [
        make_tokenizer(),
        Tokenizer(Unigram([(token, -1.0) for token in plain], unk_id=4)),
        Tokenizer(WordPiece(plain, unk_token="[UNK]")),
        Tokenizer(WordLevel(plain, unk_token="[UNK]")),
    ]
    made[1].decoder, made[2].decoder = Metaspace(), WordPieceDecoder()
    for tokenizer in made:
        tokenizer.add_special_tokens(["<|end|>", "ü x"])
        tokenizer.add_tokens([AddedToken("more", normalized=True)])
    return made


@pytest.mark.parametrize("whole", whole_tokenizers(), ids=lambda whole: type(whole.model).__name__)
def test_every_model_decodes_as_its_library_does(whole: Tokenizer, layout: RunLayout) -> None:
    put(layout, "weights/v1", whole.to_str())
    texts, ids = token_texts(layout.root), [*range(whole.get_vocab_size()), 0, 3, 1]
    assert texts.is_known
    assert texts.text(ids) == whole.decode(ids, skip_special_tokens=False)
    assert "".join(map(str, texts.pieces(ids))) == "".join(
        map(str, TokenTexts(whole, source="").pieces(ids))
    )


READ = """
import resource, sys
from pathlib import Path
import psutil
from analysis.view.token_texts import token_texts
more = psutil.Process().memory_info().data + (512 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (more, more))
print(token_texts(Path(sys.argv[1])).source)
"""


@pytest.mark.parametrize("kind", ["unigram", "added"])
def test_a_long_vocabulary_takes_little_memory(kind: str, layout: RunLayout) -> None:
    """The attack: automata of the library, which took 7 GB for 20 MB and ended `gigpo view`."""
    draw = random.Random(0)
    tokens = [draw.randbytes(250).hex() for _ in range(30_000)]
    if kind == "unigram":
        content = {"model": {"type": "Unigram", "unk_id": 0, "vocab": [[t, -1.0] for t in tokens]}}
    else:
        added = [{"id": 1 + at, "content": token} for at, token in enumerate(tokens)]
        content = {"model": {"type": "WordLevel", "vocab": {"a": 0}}, "added_tokens": added}
    put(layout, "weights/v1", json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-c", READ, layout.root], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "weights/v1/tokenizer.json"), done.stderr


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("MAX_TOKENS", "tokens, more than 3"),
        ("MAX_CHARACTERS", "its tokens have 37 characters, more than 3"),
        ("MAX_VALUES", "it has more than 3 values"),
    ],
)
def test_a_vocabulary_has_bounds_and_what_is_beyond_is_read_once(
    bound: str, words: str, layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, bound, 3)
    put(layout, "weights/v1", make_tokenizer().to_str())
    assert words in token_texts(layout.root).source
    monkeypatch.setattr(module, "_read", None)  # and is not asked again
    assert words in token_texts(layout.root).source


FUSE = {"type": "Fuse"}


def replacing(old: str, new: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


@pytest.mark.parametrize(
    "decoder",
    [
        replacing("e", "e" * 1000),
        replacing("", "e"),
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "Sequence", "decoders": [replacing("e", "ee")] * 3},
    ],
)
def test_decoders_in_a_row_do_not_make_a_text_longer(decoder: object, layout: RunLayout) -> None:
    content = json.loads(make_tokenizer().to_str())
    content["decoder"] = {"type": "Sequence", "decoders": [*[decoder] * 2, FUSE]}
    put(layout, "weights/v1", json.dumps(content))
    texts = token_texts(layout.root)
    assert texts.is_known and texts.text([0, 0]) == "taketake"
    assert texts.pieces([0]) == ["take"]


def test_a_decoder_that_fails_on_a_text_is_left_out(layout: RunLayout) -> None:
    content = json.loads(make_tokenizer().to_str())
    content["decoder"] = {"type": "Strip", "content": "t", "start": 1, "stop": 99}
    put(layout, "weights/v1", json.dumps(content))
    assert token_texts(layout.root).text([0]) == "take"


def test_many_decoders_and_long_tokens_are_refused(layout: RunLayout) -> None:
    content = json.loads(make_tokenizer().to_str())
    many = {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [FUSE] * 9}]}
    put(layout, "weights/v1", json.dumps({**content, "decoder": many}))
    assert "it has 9 decoders, more than 8" in token_texts(layout.root).source
    content["model"]["vocab"]["x" * 513] = len(content["model"]["vocab"])
    put(layout, "weights/v1", json.dumps(content))
    assert "it has a token of 513 characters" in token_texts(layout.root).source


def test_a_picture_has_the_pixels_that_it_was_given() -> None:
    data = png([b"\1\2\3\4\5\6"], width=2)
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[16:24] == b"\0\0\0\2\0\0\0\1"
    start = data.index(b"IDAT") + 4
    assert zlib.decompress(data[start : start + int.from_bytes(data[start - 8 : start - 4])]) == (
        b"\0\1\2\3\4\5\6"
    )

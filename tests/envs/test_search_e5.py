"""The dense index of docs/examples, with a model of random weights."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from envs.search.server import load
from tests.support.search_samples import ROOT, write_lines

WORDS = ["[PAD]", "[UNK]", "query", "passage", ":", '"', "tarn", "wend", "river", "mountain"]
CORPUS = [
    ("a", "tarn", "river"),
    ("b", "wend", "river river river mountain river"),
    ("c", "mountain", "mountain"),
]


@pytest.fixture
def e5_index(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    monkeypatch.setenv("E5_MODEL", str(tmp_path / "model"))
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    fast.save_pretrained(tmp_path / "model")
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    BertModel(config).save_pretrained(tmp_path / "model")
    import e5_index

    return e5_index


def test_the_server_ranks_by_cosine(e5_index, tmp_path, monkeypatch) -> None:
    path = write_lines(
        tmp_path / "corpus.jsonl",
        [{"id": i, "title": title, "text": text} for i, title, text in CORPUS],
    )
    monkeypatch.setattr("sys.argv", ["e5_index", str(path)])
    e5_index.main()
    library = load(path, "e5_index:make")

    e5 = e5_index.E5()
    one_by_one = np.concatenate(
        [e5.embed([f'passage: "{title}"\n{text}']) for _, title, text in CORPUS]
    )
    assert np.linalg.norm(one_by_one, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    for query in ("tarn", "mountain river"):
        # not padded, as the longest of a batch of one
        cosines = one_by_one @ e5.embed([f"query: {query}"])[0]
        best = np.argsort(-cosines)
        (hits,) = library.search([query], 2)
        assert [hit.passage.id for hit in hits] == [CORPUS[row][0] for row in best[:2]]
        assert [hit.score for hit in hits] == pytest.approx(cosines[best[:2]], abs=1e-5)

    write_lines(path, [{"id": "a", "title": "tarn", "text": "river"}])
    with pytest.raises(
        ValueError, match=r"has 3 rows, .*corpus.jsonl 1 passages; embed the corpus again"
    ):
        load(path, "e5_index:make")

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from configs import TinyModelConfig
from learner.model import tiny_model
from learner.model.tiny_model import ANSWER_TOKENS, make_tiny_model, train_tokenizer

TEXTS = [
    "You are in the kitchen. There is a red box on the table .",
    "open the box",
    "go north\nYou see a door.",
] * 20
CONFIG = TinyModelConfig(vocabulary_size=320, hidden_size=64, layers=2)
TOKENIZER = train_tokenizer(TEXTS, vocabulary_size=320)


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=80))
def test_decoding_gives_back_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_answer_tokens_are_one_token_each_and_stay_when_control_tokens_are_left_out() -> None:
    answer = "<think>the box .</think><action>open the box</action>"
    ids = TOKENIZER.encode(answer)
    for token in ANSWER_TOKENS:
        assert ids.count(TOKENIZER.convert_tokens_to_ids(token)) == 1
    assert TOKENIZER.decode([*ids, TOKENIZER.eos_token_id], skip_special_tokens=True) == answer


def test_the_chat_template_ends_where_the_answer_begins() -> None:
    messages = [{"role": "user", "content": "go on"}]
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<user>go on<assistant>"
    messages.append({"role": "assistant", "content": "<action>wait</action>"})
    assert (
        TOKENIZER.apply_chat_template(messages, tokenize=False)
        == prompt + "<action>wait</action><eos>"
    )


def test_merges_are_learned_and_the_same_each_time() -> None:
    assert len(train_tokenizer(TEXTS, vocabulary_size=300)) == 300
    assert 300 < len(TOKENIZER) <= 320, "these texts have too few pairs for 320"
    assert len(TOKENIZER.encode("open the box")) < len("open the box") // 2
    assert train_tokenizer(TEXTS, vocabulary_size=320).get_vocab() == TOKENIZER.get_vocab()


def test_a_vocabulary_smaller_than_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocabulary_size=100 is too small.*at least 264"):
        train_tokenizer(TEXTS, vocabulary_size=100)


def test_a_tokenizer_is_made_of_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: 70 KB of Parquet were 400 million characters, and took all memory. Characters of
    four bytes took four times as much of it.
    """
    monkeypatch.setattr(tiny_model, "MAX_BYTES", 41)
    monkeypatch.setattr(tiny_model, "PIECE_CHARACTERS", 10)
    asked = iter(["a" * 12, "", "\U0001f600" * 100, "c"])
    found = list(tiny_model._first_bytes(asked))
    assert found == ["a" * 10, "a" * 2, "\U0001f600" * 10]
    assert next(asked) == "c", "no more is read"


def test_the_directory_loads_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    for name, seed in {"a": 0, "again": 0, "b": 1}.items():
        torch.rand(1)  # the caller's random numbers neither matter nor are disturbed
        state = torch.get_rng_state()
        make_tiny_model(tmp_path / name, tokenizer=TOKENIZER, config=CONFIG, seed=seed)
        assert torch.equal(state, torch.get_rng_state())
    weights = {
        name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "again", "b")
    }
    assert weights["a"] == weights["again"] != weights["b"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == TOKENIZER.eos_token_id
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    loaded: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "<user>open the box .<assistant><action>go</action>"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.chat_template == TOKENIZER.chat_template
    assert (loaded.pad_token, loaded.eos_token) == ("<pad>", "<eos>")
    assert (
        loaded.decode(loaded.encode(text), skip_special_tokens=True)
        == "open the box .<action>go</action>"
    )

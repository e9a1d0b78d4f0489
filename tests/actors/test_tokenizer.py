"""Check that a tokenizer loaded without torch is the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import resolve_trust_remote_code

from actors.prompting.chat_template import load_tokenizer
from configs import ConfigError, load_safely
from tests.support.chat_samples import tokenizer

ROOT = Path(__file__).resolve().parents[2]
TALK = [
    {"role": "user", "content": "too low: is it 12?"},
    {"role": "assistant", "content": "Größer!"},
]
ASK = """
import importlib.util, json, sys
from actors.prompting.chat_template import load_tokenizer
path, talk = sys.argv[1], json.loads(sys.argv[2])
made = load_tokenizer(path, with_torch=False)
ids = made.apply_chat_template(talk, add_generation_prompt=True, tokenize=True, return_dict=False)
text = made.encode("high", add_special_tokens=False)
print(json.dumps([ids, text, made.decode(ids, skip_special_tokens=False), made.eos_token_id]))
print("torch" in sys.modules, importlib.util.find_spec("torch") is not None)
"""


def test_without_torch_it_is_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer("thinking").save_pretrained(tmp_path)
    command = [sys.executable, "-c", ASK, str(tmp_path), json.dumps(TALK)]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    found, loaded = answer.stdout.splitlines()
    here = load_tokenizer(str(tmp_path), with_torch=True)
    ids = here.apply_chat_template(
        TALK, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    text = here.encode("high", add_special_tokens=False)
    assert json.loads(found) == [
        ids,
        text,
        here.decode(ids, skip_special_tokens=False),
        here.eos_token_id,
    ]
    assert loaded == "False True"  # torch was not loaded, and could be


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tokenizer_config.json", "fast_tokenizer_files", ["tokenizer.4.json/../../private"]),
        ("tokenizer_config.json", "merges_file", "../private"),
        ("tokenizer_config.json", "vocab", "../private"),
        ("tokenizer_config.json", "init_inputs", ["../private"]),
        ("tokenizer_config.json", "source_spm", "../private"),
        ("tokenizer_config.json", "gguf_file", "../private"),
        ("tokenizer_config.json", "unheard_of", [["../private"]]),
        ("tokenizer_config.json", "vocab_file", 0),
        ("special_tokens_map.json", "tokenizer_file", "../private"),
        ("special_tokens_map.json", "target_spm", "../private"),
    ],
)
def test_a_tokenizer_that_names_other_files_is_refused(
    tmp_path: Path, name: str, key: str, value: object
) -> None:
    model, file = tmp_path / "model", tmp_path / "model" / name
    tokenizer("thinking").save_pretrained(model)
    shutil.copy(model / "tokenizer.json", tmp_path / "private")
    (model / "tokenizer.4.json").mkdir()
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, key: value}))
    with pytest.raises(ConfigError, match=f"{name} has the key '{key}'") as refused:
        load_tokenizer(str(model), with_torch=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["model_file", "model_proto", "tokenizer_file", "eos_token"])
def test_arguments_of_sentencepiece_name_no_file(tmp_path: Path, key: str) -> None:
    tokenizer("thinking").save_pretrained(tmp_path)
    _change(tmp_path / "tokenizer_config.json", {"sp_model_kwargs": {key: "/dev/zero"}})
    with pytest.raises(ConfigError, match=f"has the key '{key}'"):
        load_tokenizer(str(tmp_path), with_torch=True)


@pytest.mark.parametrize(
    "name",
    [
        "AutoModelForSpeechSeq2Seq",  # would ask on the terminal, then run the directory's code
        "AutoTokenizer",
        "AutoModelFast",
        "DiaProcessor",  # would load a model from any path
        "GenerationConfig",
        "RagTokenizer",  # loads two others
        "models",
        ["LlamaTokenizer"],
        7,
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_no_class_but_a_tokenizer_is_loaded_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: object, file: str
) -> None:
    tokenizer("thinking").save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'planted')!r}, 'w')")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "auto_map": {"AutoModelForSpeechSeq2Seq": "code.New"}})
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    _change(tmp_path / file, {"tokenizer_class": name})
    with pytest.raises(ConfigError, match=f"{file} has tokenizer_class=.* is no tokenizer"):
        load_tokenizer(str(tmp_path), with_torch=True)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    "name", ["LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast", "TheirTokenizer"]
)
def test_the_tokenizers_of_transformers_are_loaded_and_others_mean_the_usual_one(
    tmp_path: Path, name: str
) -> None:
    tokenizer("thinking").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    usual = {"legacy": False, "sp_model_kwargs": {}, "pad_token": "<pad>", "model_max_length": 9}
    _change(tmp_path / "tokenizer_config.json", {"tokenizer_class": name, **usual})
    assert load_tokenizer(str(tmp_path), with_torch=True).get_vocab()


def test_nobody_is_asked_whether_to_run_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of transformers that is loaded without our arguments would ask."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_safely("anything", "/", load=lambda: resolve_trust_remote_code(None, "x", False, True))


def _change(file: Path, changes: dict[str, object]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_names_of_files_that_are_never_opened_do_no_harm(tmp_path: Path) -> None:
    """Old tokenizers were saved with the paths that they were loaded from."""
    tokenizer("thinking").save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    old = {"tokenizer_file": "/none", "special_tokens_map_file": "/none", "init_inputs": []}
    file.write_text(json.dumps({**json.loads(file.read_text()), **old}))
    assert load_tokenizer(str(tmp_path), with_torch=True) is not None

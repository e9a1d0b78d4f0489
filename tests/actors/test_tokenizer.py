"""Check that a tokenizer loaded without torch is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from actors.prompting.chat_template import load_tokenizer
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

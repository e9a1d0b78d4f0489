"""Share tasks and files between the tests of the search environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from envs import Task

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "search"
CORPUS = EXAMPLE / "corpus.jsonl"
COMMON: dict[str, Any] = {
    "questions": [str(EXAMPLE / "questions.jsonl")],
    "train_sources": ["countries"],
    "heldout_sources": ["countries"],
    "heldout_limit": 0,
    "topk": 2,
}
LOCAL: dict[str, Any] = {**COMMON, "corpus": str(CORPUS), "list_actions": False}


def remote(url: str) -> dict[str, Any]:
    return {**COMMON, "retriever": url}


def a_task(question: str, golden_answers: list[str]) -> Task:
    data = {
        "type": "nq",
        "question": question,
        "golden_answers": json.dumps(golden_answers),
        "corpus": str(CORPUS),
    }
    return Task(id="nq-test_0", env_name="search", split="heldout", seed=0, data=data)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

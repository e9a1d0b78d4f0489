"""The real questions and passages: recall of the index, and splits that do not meet."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from envs import environment_class
from envs.search.files import json_lines
from envs.search.library import bm25_library
from envs.search.scoring import normalised

SEVEN = ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"]
# Of an engine that shares no code with ours, bm25s 0.3.16 with PyStemmer 3.1.0: over all questions of which the corpus has an
# answer, with the question as the only search.
RECALL_AT_3 = {
    "nq": 0.704,
    "triviaqa": 0.761,
    "popqa": 0.552,
    "hotpotqa": 0.660,
    "2wikimultihopqa": 0.339,
    "musique": 0.072,
    "bamboogle": 0.216,
}


def test_recall_at_3_is_what_another_engine_reaches(shared_data: Path) -> None:
    library = bm25_library(shared_data / "qa" / "corpus.jsonl.xz")
    assert len(library) == 19_401
    read = functools.cache(normalised)
    found = defaultdict(list)
    for row in json_lines(shared_data / "qa" / "questions.jsonl.xz", what="questions"):
        if row["answer_in_corpus"]:
            golden = {normalised(answer) for answer in row["golden_answers"]} - {""}
            seen = [read(hit.passage.contents) for hit in library.search([row["question"]], 3)[0]]
            found[row["source"]].append(any(answer in text for answer in golden for text in seen))
    assert {source: mean(hits) for source, hits in found.items()} == pytest.approx(RECALL_AT_3, abs=0.02)


def test_splits_of_the_real_questions(shared_data: Path) -> None:
    options: dict[str, Any] = {
        "questions": [str(shared_data / "qa" / "questions.jsonl.xz")],
        "train_sources": ["nq", "hotpotqa"],
        "heldout_sources": SEVEN,
        "heldout_limit": 0,
        "topk": 3,
        "retriever": "http://127.0.0.1:8000/retrieve",
    }
    search = environment_class("search")
    train, heldout = search.tasks("train", options), search.tasks("heldout", options)
    held = Counter(task.data["type"] for task in heldout)
    whole = {"triviaqa": 1000, "popqa": 1000, "2wikimultihopqa": 2692, "musique": 500, "bamboogle": 125}
    assert {source: held[source] for source in whole} == whole
    trained = Counter(task.data["type"] for task in train)
    assert trained.keys() == {"nq", "hotpotqa"}
    assert trained["nq"] + held["nq"] == 1000
    assert trained["nq"] == pytest.approx(800, abs=50)
    assert len({task.id for task in (*train, *heldout)}) == len(train) + len(heldout) == 6817

    everything = options | {"train_sources": SEVEN}
    asked = [
        {" ".join(task.data["question"].lower().split()) for task in search.tasks(split, everything)}
        for split in ("train", "heldout")
    ]
    assert asked[0].isdisjoint(asked[1])

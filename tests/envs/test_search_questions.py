"""Test how questions are read from files, and which of them are held out."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.search.questions import Question, read_questions, select
from tests.support.search_samples import write_lines


def question(source: str, number: int, *, is_train: bool = False, text: str = "") -> Question:
    prefix = "train" if is_train else "test"
    return Question(
        source=source,
        id=f"{source}-{prefix}_{number}",
        is_train=is_train,
        text=text or f"{source} {number}",
        golden_answers=("x",),
    )


def ids(
    questions: list[Question], split: str, train: list[str], heldout: list[str], limit: int = 0
) -> list[str]:
    chosen = select(
        questions, split=split, train_sources=train, heldout_sources=heldout, heldout_limit=limit
    )
    return [question.id for question in chosen]


def test_an_official_training_part_is_what_is_trained_on() -> None:
    questions = [
        question("nq", 0, is_train=True),
        question("popqa", 0),
        question("nq", 0),
        question("nq", 1, is_train=True),
        question("popqa", 1),
    ]
    assert ids(questions, "train", ["nq"], ["popqa", "nq"]) == ["nq-train_0", "nq-train_1"]
    assert ids(questions, "heldout", ["nq"], ["popqa", "nq"]) == [
        "popqa-test_0",
        "nq-test_0",
        "popqa-test_1",
    ]
    assert ids(questions, "heldout", ["nq"], ["nq"]) == ["nq-test_0"]


def test_without_one_a_fifth_is_held_out_if_it_is_trained_on() -> None:
    questions = [question(source, n) for source in ("nq", "popqa") for n in range(500)]
    train, heldout = (
        ids(questions, split, ["nq"], ["nq", "popqa"]) for split in ("train", "heldout")
    )
    assert not set(train) & set(heldout)
    assert set(train) | set(heldout) == {q.id for q in questions}
    assert {q.id for q in questions if q.source == "popqa"} <= set(heldout)
    assert 75 <= 500 - len(train) <= 125
    # whatever else is read, held out or limited, what is trained on stays the same
    assert ids(questions[:500], "train", ["nq"], ["nq"], 10) == train
    assert ids(list(reversed(questions)), "train", ["nq"], ["popqa"]) == train[::-1]


def test_a_question_that_two_data_sets_ask_is_on_one_side() -> None:
    texts = {"nq": "  What is\n{}? ", "popqa": "what IS {}?"}
    questions = [
        question(source, n, text=text.format(n))
        for source, text in texts.items()
        for n in range(50)
    ]
    train, heldout = (
        ids(questions, split, ["nq", "popqa"], ["nq", "popqa"]) for split in ("train", "heldout")
    )
    assert {name.partition("-")[2] for name in train}.isdisjoint(
        name.partition("-")[2] for name in heldout
    )
    assert len(train) + len(heldout) == 100


def test_a_limit_takes_the_same_questions_however_many_there_are_beside_them() -> None:
    questions = [question(source, n) for source in ("nq", "popqa") for n in range(100)]
    few = ids(questions, "heldout", ["x"], ["nq", "popqa"], 10)
    assert [name.partition("-")[0] for name in few] == ["nq"] * 10 + ["popqa"] * 10
    assert set(few) < set(ids(questions, "heldout", ["x"], ["nq", "popqa"], 20))
    assert any(int(name.rpartition("_")[2]) > 50 for name in few)  # from everywhere in the file
    assert few == [q.id for q in questions if q.id in few]  # in the order of the files


def test_a_data_set_without_questions_for_a_split_is_named() -> None:
    questions = [question("nq", 0, is_train=True), question("popqa", 0)]
    with pytest.raises(
        ValueError, match="no heldout question of 'nq'; it has nq, popqa; add a file or drop it"
    ):
        ids(questions, "heldout", ["nq"], ["nq", "popqa"])
    with pytest.raises(ValueError, match="no train question of 'triviaqa'"):
        ids(questions, "train", ["triviaqa"], ["popqa"])


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.text(max_size=3)),
        min_size=1,
        max_size=60,
    )
)
def test_the_splits_never_meet(drawn: list[tuple[str, bool, str]]) -> None:
    questions = [
        question(source, n, is_train=is_train, text=text)
        for n, (source, is_train, text) in enumerate(drawn)
    ]
    chosen = {}
    for split in ("train", "heldout"):
        try:
            chosen[split] = set(ids(questions, split, ["a", "b"], ["a", "b", "c"]))
        except ValueError:
            return
    assert not chosen["train"] & chosen["heldout"]


# as nq_search.py of Search-R1 writes a row, over a row of FlashRAG
SEARCH_R1 = {
    "id": "dev_3",
    "question": "who wrote the salt year?",
    "golden_answers": ["Mirra Lund", "Lund"],
    "data_source": "hotpotqa",
    "prompt": [
        {
            "role": "user",
            "content": "Answer. For example, <answer> x </answer>. "
            "Question: who wrote the salt year?\n",
        }
    ],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Mirra Lund", "Lund"]}},
    "extra_info": {"split": "test", "index": 3},
}
# as verl and verl-agent prepare it: no id, the question in extra_info
VERL_AGENT = {
    "data_source": "searchR1_nq",
    "prompt": [
        {"role": "system", "content": "..."},
        {"role": "user", "content": "who wrote the salt year?"},
    ],
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Mirra Lund"]}},
    "extra_info": {"split": "train", "index": 12, "question": " who wrote the salt year? "},
    "env_kwargs": {"question": "who wrote the salt year?", "data_source": "searchR1_nq"},
}


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_search_r1s_parquet(tmp_path: Path) -> None:
    (read,) = read_questions((parquet(tmp_path / "test.parquet", [SEARCH_R1]),))
    assert read == Question(
        source="hotpotqa",
        id="hotpotqa-dev_3",
        is_train=False,
        text="who wrote the salt year?",
        golden_answers=("Mirra Lund", "Lund"),
    )


def test_verl_agents_parquet(tmp_path: Path) -> None:
    (read,) = read_questions((parquet(tmp_path / "train.parquet", [VERL_AGENT]),))
    assert read == Question(
        source="nq",
        id="nq-train_12",
        is_train=True,
        text="who wrote the salt year?",
        golden_answers=("Mirra Lund",),
    )


def test_a_row_with_no_more_than_the_usual_columns_has_its_question_in_the_prompt(
    tmp_path: Path,
) -> None:
    usual = {
        key: SEARCH_R1[key]
        for key in ("data_source", "prompt", "ability", "reward_model", "extra_info")
    }
    (read,) = read_questions((parquet(tmp_path / "test.parquet", [usual]),))
    assert (read.id, read.text) == ("hotpotqa-test_3", "who wrote the salt year?")
    assert read.golden_answers == ("Mirra Lund", "Lund")


def test_files_are_read_together(tmp_path: Path) -> None:
    lines = write_lines(
        tmp_path / "q.jsonl",
        [
            {
                "source": "nq",
                "qid": "test_1",
                "question": "q?",
                "golden_answers": "one text",
                "more": 1,
            }
        ],
    )
    both = read_questions((parquet(tmp_path / "train.parquet", [VERL_AGENT]), lines))
    assert [q.id for q in both] == ["nq-train_12", "nq-test_1"]
    assert both[1].golden_answers == ("one text",)


def test_number_zero_is_a_number(tmp_path: Path) -> None:
    rows = [
        {"source": "nq", "qid": number, "question": "q?", "golden_answers": ["a"]}
        for number in (0, 1)
    ]
    assert [q.id for q in read_questions((write_lines(tmp_path / "zero.jsonl", rows),))] == [
        "nq-0",
        "nq-1",
    ]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"qid": "test_0", "question": "q", "golden_answers": ["a"]}, "row 2 lacks 'data_source'"),
        ({"source": "nq", "qid": "test_0", "question": "q"}, "row 2 lacks 'reward_model'"),
        ({"source": "nq", "question": "q", "golden_answers": ["a"]}, "row 2 lacks 'split'"),
        (
            {"source": "nq", "qid": "test_1", "question": "q", "golden_answers": ["a"]},
            "row 2: 'nq-test_1' is there twice",
        ),
    ],
)
def test_a_bad_row_is_named_in_one_line(
    tmp_path: Path, row: dict[str, Any], complaint: str
) -> None:
    good = {"source": "nq", "qid": "test_1", "question": "q", "golden_answers": ["a"]}
    with pytest.raises(ValueError, match=complaint) as refusal:
        read_questions((write_lines(tmp_path / "q.jsonl", [good, row]),))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["bad.jsonl.xz", "bad.jsonl.gz", "bad.jsonl", "bad.parquet"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str, is_cut: bool) -> None:
    """zlib's and LZMA's errors are neither ValueError nor OSError, and name no file."""
    rows = [{"source": "nq", "qid": str(n), "question": "q"} for n in range(200)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    made = {".xz": lzma.compress, ".gz": gzip.compress}.get(Path(name).suffix, bytes)(lines)
    (tmp_path / name).write_bytes(made[:60] if is_cut else made[:50] + b"\xff" * 40)
    with pytest.raises(ValueError, match=f"questions .*{name}") as refusal:
        read_questions((tmp_path / name,))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["none.jsonl.xz", "none.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ValueError, match=f"no questions at .*{name}; docs/search.md says where to get some"
    ):
        read_questions((tmp_path / name,))

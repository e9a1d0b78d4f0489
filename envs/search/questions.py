"""What is asked: questions with their golden answers, from Search-R1's parquet files or JSON lines,
and which are held out.

A row of JSON lines is `{"source", "qid", "question", "golden_answers"}`. A row of a parquet file is
as Search-R1 or verl-agent have it: `data_source`, `reward_model.ground_truth.target`, `extra_info`,
and the question in a column, in `extra_info`, or at the end of `prompt`. A source is a data set:
nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique, bamboogle, or another.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.search.files import check_file, json_lines

HELDOUT_EVERY = 5  # of a data set without a training part one question in five is held out
SOURCE_PREFIX = "searchR1_"  # verl-agent's files have it
BEFORE_QUESTION = "Question:"  # in a prompt of Search-R1
COLUMNS = (
    "id",
    "question",
    "golden_answers",
    "data_source",
    "prompt",
    "reward_model",
    "extra_info",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    source: str
    id: str  # unique within all files; it has the name of the official split where the file has one
    is_train: bool  # of the data set's official training part
    text: str
    golden_answers: tuple[str, ...]

    @property
    def digest(self) -> int:
        """64 bits of the question's words: the same question in two data sets is on the same side
        of a split.
        """
        words = " ".join(self.text.casefold().split())
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


def select(
    questions: Sequence[Question],
    *,
    split: str,
    train_sources: Sequence[str],
    heldout_sources: Sequence[str],
    heldout_limit: int,
) -> list[Question]:
    """The questions of a split, in their order.

    A data set with an official training part trains on that and is held out with the rest. One
    without is divided by `Question.digest` if it is trained on, else held out as a whole. Of more
    than `heldout_limit` held-out questions of a data set those with the least digests are taken; 0
    takes all. ValueError for a data set that has no question for the split.
    """
    official = {question.source for question in questions if question.is_train}
    chosen: list[Question] = []
    for source in train_sources if split == "train" else heldout_sources:
        own = [question for question in questions if question.source == source]
        if source in official:
            held = [not question.is_train for question in own]
        else:
            held = [
                source not in train_sources or question.digest % HELDOUT_EVERY == 0
                for question in own
            ]
        wanted = [
            question
            for question, is_held in zip(own, held, strict=True)
            if is_held == (split == "heldout")
        ]
        if not wanted:
            known = ", ".join(sorted({question.source for question in questions}))
            raise ValueError(
                f"env.options.questions has no {split} question of {source!r}; it has {known}; add "
                "a file or drop it"
            )
        if split == "heldout" and heldout_limit:
            wanted = sorted(wanted, key=lambda question: question.digest)[:heldout_limit]
        chosen += wanted
    taken = {question.id for question in chosen}
    return [question for question in questions if question.id in taken]


@functools.cache
def read_questions(paths: tuple[Path, ...]) -> tuple[Question, ...]:
    """Read once per process. ValueError, in one line, for a file that is not there or has something
    else, or an id twice.
    """
    questions: dict[str, Question] = {}
    for path in paths:
        for number, row in enumerate(_rows(path), start=1):
            try:
                question = _question(row)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"questions {path} row {number} lacks {error} or has it in another form; "
                    "docs/search.md shows a row"
                ) from None
            if question.id in questions:
                raise ValueError(
                    f"questions {path} row {number}: {question.id!r} is there twice; each question "
                    "needs its own id"
                )
            questions[question.id] = question
    return tuple(questions.values())


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix != ".parquet":
        yield from json_lines(path, what="questions")
        return
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(check_file(path, what="questions")) as file:
        there = file.schema_arrow.names
        wanted = [
            name
            for name in COLUMNS
            if name in there and not (name == "prompt" and "question" in there)
        ]
        for batch in file.iter_batches(columns=wanted):
            yield from batch.to_pylist()


def _question(row: Mapping[str, Any]) -> Question:
    extra = row.get("extra_info") or {}
    source = str(row["source"] if "source" in row else row["data_source"]).removeprefix(
        SOURCE_PREFIX
    )
    # 0 is a number as any other
    given = [row[name] for name in ("qid", "id") if row.get(name) not in (None, "")]
    number = given[0] if given else f"{extra['split']}_{extra['index']}"
    golden = (
        row["golden_answers"]
        if row.get("golden_answers")
        else row["reward_model"]["ground_truth"]["target"]
    )
    text = (
        row.get("question")
        or extra.get("question")
        or row["prompt"][-1]["content"].rpartition(BEFORE_QUESTION)[2]
    )
    split = extra.get("split") or str(number).partition("_")[0]
    return Question(
        source=source,
        id=f"{source}-{number}",
        is_train=split == "train",
        text=text.strip(),
        golden_answers=(golden,)
        if isinstance(golden, str)
        else tuple(str(answer) for answer in golden),
    )

"""Read questions with golden answers from Search-R1's files, and divide them into splits.

A line of a JSON file is `{"source", "qid", "question", "golden_answers"}`. A row of a parquet file
is Search-R1's or verl-agent's: `data_source`, `reward_model.ground_truth.target`, `extra_info`, and
the question in a column, in `extra_info`, or at the end of `prompt`. A source is a data set, such
as nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique or bamboogle.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.search.corpus import check_file, json_lines

HELDOUT_EVERY = 5  # one question in five of a data set without an official training part
SOURCE_PREFIX = "searchR1_"  # in verl-agent's files
BEFORE_QUESTION = "Question:"  # in Search-R1's prompts
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
    id: str  # unique within all files; begins with source and official split, if known
    is_train: bool  # belongs to the data set's official training part
    text: str
    golden_answers: tuple[str, ...]

    @property
    def digest(self) -> int:
        """Return 64 bits of a hash of the words.

        So the same question in two data sets is in the same split.
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
    """Return the questions of a split, in their order.

    A data set with an official training part trains on that part; the rest is held out. A data set
    without one is divided by `Question.digest` if it is trained on, else all of it is held out.
    `heldout_limit` bounds the held-out questions of each data set, by least digest; 0 takes all.
    Raises ValueError for a data set without a question for the split.
    """
    has_official_split = {question.source for question in questions if question.is_train}
    chosen_ids: set[str] = set()
    for source in train_sources if split == "train" else heldout_sources:
        is_divided = source in train_sources
        wanted = []
        for question in questions:
            if question.source != source:
                continue
            if source in has_official_split:
                is_heldout = not question.is_train
            else:
                is_heldout = not is_divided or question.digest % HELDOUT_EVERY == 0
            if is_heldout == (split == "heldout"):
                wanted.append(question)
        if not wanted:
            known = ", ".join(sorted({question.source for question in questions}))
            raise ValueError(
                f"env.options.questions has no {split} question of {source!r}; it has {known}; add "
                "a file or drop it"
            )
        if split == "heldout" and heldout_limit:
            wanted = sorted(wanted, key=lambda question: question.digest)[:heldout_limit]
        chosen_ids |= {question.id for question in wanted}
    return [question for question in questions if question.id in chosen_ids]


@functools.cache
def read_questions(paths: tuple[Path, ...]) -> tuple[Question, ...]:
    """Read files once per process.

    Raises ValueError, in one line, for a missing or malformed file, and for an id that is twice.
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
        yield from json_lines(path, kind="questions")
        return
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(check_file(path, kind="questions")) as file:
            names = [name for name in COLUMNS if name in file.schema_arrow.names]
            if "question" in names and "prompt" in names:
                names.remove("prompt")  # long, and needed only for the question
            for batch in file.iter_batches(columns=names):
                yield from batch.to_pylist()
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(f"questions {path} cannot be read: {error}; get it again") from error


def _question(row: Mapping[str, Any]) -> Question:
    """Return the question of a row. Raises KeyError and the like for a row of another form."""
    extra = row.get("extra_info") or {}
    source = row["source"] if "source" in row else row["data_source"]
    source = str(source).removeprefix(SOURCE_PREFIX)
    given_ids = [row[name] for name in ("qid", "id") if row.get(name) not in (None, "")]
    own_id = given_ids[0] if given_ids else f"{extra['split']}_{extra['index']}"
    text = row.get("question") or extra.get("question")
    if not text:
        text = row["prompt"][-1]["content"].rpartition(BEFORE_QUESTION)[2]
    golden = row.get("golden_answers") or row["reward_model"]["ground_truth"]["target"]
    if isinstance(golden, str):
        golden = (golden,)
    official_split = extra.get("split") or str(own_id).partition("_")[0]
    return Question(
        source=source,
        id=f"{source}-{own_id}",
        is_train=official_split == "train",
        text=text.strip(),
        golden_answers=tuple(str(answer) for answer in golden),
    )

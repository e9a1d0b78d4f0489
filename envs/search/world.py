"""Answer a question with searches.

The agent replies `<search>words</search>` or `<answer>words</answer>`. The rules are those of the
paper's code. SearchEnv asks a retrieval server from its worker's event loop, so many questions are
in flight at once. LocalSearchEnv searches a corpus in memory, in an environment process, and needs
no server.

Options of both: `questions` (list of .parquet, .jsonl, .jsonl.xz or .jsonl.gz files),
`train_sources` and `heldout_sources` (lists of data sets), `heldout_limit` (questions per data set;
0 for all), `topk` (passages per search).

Option of SearchEnv: `retriever` (URL).

Options of LocalSearchEnv: `corpus` (file), `list_actions` (whether to list actions, which a policy
without a language model needs).
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.base import Observation, Task, Transition
from envs.options import OptionsError, check_options, check_split, whole_numbers
from envs.search.client import ANSWERED, ask_server
from envs.search.corpus import Corpus, Hit, bm25_corpus, check_file
from envs.search.questions import read_questions, select
from url_secrets import public_url

SEARCH, ANSWER = "search", "answer"
OPENING = {kind: re.compile(f"<{kind}>", re.IGNORECASE) for kind in (SEARCH, ANSWER)}
CLOSING = {kind: re.compile(f"</{kind}>", re.IGNORECASE) for kind in (SEARCH, ANSWER)}
OPENING_TAG = re.compile(f"<(?:{SEARCH}|{ANSWER})>", re.IGNORECASE)
ARTICLE = re.compile(r"\b(a|an|the)\b")
# ASCII only: a typographic quote stays
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
LISTS = ("questions", "train_sources", "heldout_sources")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    """The options that both environments have."""

    questions: tuple[Path, ...]
    train_sources: tuple[str, ...]
    heldout_sources: tuple[str, ...]
    heldout_limit: int
    topk: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    kind: str  # SEARCH, ANSWER, or "" for neither
    text: str  # between the tags, stripped
    is_valid: bool


def read_reply(action: str) -> Reply:
    """Return the first search before the first `</search>`, else the first answer.

    The reply is valid if the whole action opens exactly one block.
    """
    text = action
    for kind in (SEARCH, ANSWER):
        end_tag = f"</{kind}>"
        if end_tag in action:
            text = action.partition(end_tag)[0] + end_tag
            break
    for kind in (SEARCH, ANSWER):
        # Not one pattern for both tags: a text of opening tags would be searched from each of them.
        begin = OPENING[kind].search(text)
        end = CLOSING[kind].search(text, begin.end()) if begin else None
        if begin and end:
            is_valid = len(OPENING_TAG.findall(action)) == 1
            return Reply(kind=kind, text=text[begin.end() : end.start()].strip(), is_valid=is_valid)
    return Reply(kind="", text="", is_valid=False)


def is_match(answer: str, golden_answers: Sequence[str]) -> bool:
    """Return whether the answer equals a golden one, both normalised."""
    return normalise(answer) in {normalise(golden) for golden in golden_answers}


def normalise(text: str) -> str:
    """Return the text in lower case, without punctuation, articles and double spaces."""
    # punctuation first: "the." then is an article, too
    return " ".join(ARTICLE.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def show_passages(hits: Sequence[Hit]) -> str:
    """Return the text that the agent reads: `Doc 1(Title: ...) text`, one passage a line."""
    lines = []
    for number, hit in enumerate(hits, start=1):
        title, _, text = hit.passage.contents.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines)


class Episode:
    """One question. It ends with the first answer; the runner limits the steps."""

    def __init__(self, task: Task, *, list_actions: bool) -> None:
        self._question = task.data["question"]
        self._golden_answers = json.loads(task.data["golden_answers"])
        self._list_actions, self.is_over = list_actions, False

    def first(self) -> Observation:
        """Return the first observation: no text yet, the question as objective and anchor."""
        return Observation(
            text="", objective=self._question, anchor=self._question, actions=self._actions([])
        )

    def after(self, reply: Reply, hits: Sequence[Hit]) -> Transition:
        """Return the transition of a reply, with the passages that its search found."""
        self.is_over = reply.kind == ANSWER
        won = self.is_over and is_match(reply.text, self._golden_answers)
        text = f"<information>{show_passages(hits)}</information>" if reply.kind == SEARCH else ""
        return Transition(
            observation=Observation(
                text=text, objective=self._question, actions=self._actions(hits)
            ),
            reward=float(won),
            terminated=self.is_over,
            truncated=False,
            won=won,
            valid=reply.is_valid,
        )

    def _actions(self, hits: Sequence[Hit]) -> tuple[str, ...] | None:
        """Return actions for a policy that can only choose: search the question, answer a title."""
        if not self._list_actions:
            return None
        titles = dict.fromkeys(hit.passage.contents.partition("\n")[0].strip('"') for hit in hits)
        return (
            f"<{SEARCH}>{self._question}</{SEARCH}>",
            *(f"<{ANSWER}>{title}</{ANSWER}>" for title in titles),
        )


class SearchEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._options, self._url = _parse_remote(options)
        self._episode: Episode | None = None

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        parsed, _ = _parse_remote(options)
        return _list_tasks(parsed, env_name="search", split=split)

    async def reset(self, task: Task) -> Observation:
        self._episode = Episode(task, list_actions=False)
        if self._url not in ANSWERED:  # so that a run without a server fails at its start
            await ask_server(self._url, task.data["question"], topk=self._options.topk)
        return self._episode.first()

    async def step(self, action: str) -> Transition:
        if self._episode is None or self._episode.is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        reply = read_reply(action)
        hits = []
        if reply.kind == SEARCH:
            hits = await ask_server(self._url, reply.text, topk=self._options.topk)
        return self._episode.after(reply, hits)

    def close(self) -> None:
        pass


class LocalSearchEnv:
    deterministic = True

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = _parse_local(options)
        self._path = Path(str(options["corpus"])).resolve()
        self._list_actions = bool(options["list_actions"])
        self._episode: Episode | None = None
        self._corpus: Corpus

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        parsed = _parse_local(options)
        corpus = check_file(Path(str(options["corpus"])), kind="corpus")
        return _list_tasks(
            parsed, env_name="search_local", split=split, corpus=str(corpus.resolve())
        )

    def reset(self, task: Task) -> Observation:
        # The file is the option's. A task may come from anywhere, so its texts name no file.
        self._corpus = bm25_corpus(self._path)
        self._episode = Episode(task, list_actions=self._list_actions)
        return self._episode.first()

    def step(self, action: str) -> Transition:
        if self._episode is None or self._episode.is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        reply = read_reply(action)
        hits = []
        if reply.kind == SEARCH:
            (hits,) = self._corpus.search([reply.text], self._options.topk)
        return self._episode.after(reply, hits)

    def state_key(self) -> str:
        return str(self._episode is None or self._episode.is_over)

    def close(self) -> None:
        pass


def _list_tasks(options: _Options, *, env_name: str, split: str, **data: str) -> list[Task]:
    """Return a task for each question of the split. It has all that an episode needs."""
    check_split(split)
    chosen = select(
        read_questions(options.questions),
        split=split,
        train_sources=options.train_sources,
        heldout_sources=options.heldout_sources,
        heldout_limit=options.heldout_limit,
    )
    return [
        Task(
            id=question.id,
            env_name=env_name,
            split=split,
            seed=0,  # nothing is drawn
            data={
                **data,
                "type": question.source,
                "question": question.text,
                "golden_answers": json.dumps(question.golden_answers, ensure_ascii=False),
            },
        )
        for question in chosen
    ]


def _parse_remote(options: Mapping[str, object]) -> tuple[_Options, str]:
    parsed = _parse("search", options, retriever=str)
    url = str(options["retriever"])
    if not url.startswith(("http://", "https://")):
        raise OptionsError(
            f"search option retriever={public_url(url)!r} must be a URL like "
            "http://127.0.0.1:8000/retrieve"
        )
    return parsed, url


def _parse_local(options: Mapping[str, object]) -> _Options:
    return _parse("search_local", options, corpus=str, list_actions=bool)


def _parse(env_name: str, options: Mapping[str, object], **own: type) -> _Options:
    """Return the common options. `own` has the type of each option of this environment only."""
    types = {**dict.fromkeys(LISTS, list), **own}
    given: dict[str, Any] = check_options(env_name, options, (*types, "heldout_limit", "topk"))
    for name, kind in types.items():
        value = given[name]
        is_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not is_kind or value in ([], ""):
            raise OptionsError(
                f"{env_name} option {name}={value!r} must be of type {kind.__name__}, and not empty"
            )
    return _Options(
        questions=tuple(Path(str(file)) for file in given["questions"]),
        train_sources=tuple(map(str, given["train_sources"])),
        heldout_sources=tuple(map(str, given["heldout_sources"])),
        **whole_numbers(env_name, given, {"heldout_limit": 0, "topk": 1}),
    )

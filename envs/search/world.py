"""Question answering with searches. The agent replies `<search>words</search>` or
`<answer>words</answer>` (docs/search.md).

SearchEnv waits for a retrieval server, on the event loop of its worker: as many questions are in
flight as there are episodes. LocalSearchEnv computes, so it lives in an environment process: BM25
over a corpus in memory, and nothing to start beside it.

Options of both: `questions` (list of .parquet, .jsonl, .jsonl.xz or .jsonl.gz), `train_sources` and
`heldout_sources` (lists of data sets), `heldout_limit` (questions of each data set; 0: all), `topk`
(passages per search). Of SearchEnv: `retriever` (URL). Of LocalSearchEnv: `corpus` (file),
`list_actions` (bool: something to choose from, which a scripted player and so a tiny model need).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envs.base import Observation, Task, Transition
from envs.options import OptionsError, check_options, check_split, whole_number
from envs.search.client import ask_server, has_answered
from envs.search.episode import Episode, task_of
from envs.search.files import check_file
from envs.search.library import Library, bm25_library
from envs.search.questions import read_questions, select
from envs.search.scoring import SEARCH, read_reply


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    questions: tuple[Path, ...]
    train_sources: tuple[str, ...]
    heldout_sources: tuple[str, ...]
    heldout_limit: int
    topk: int


class SearchEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._topk = _parse(options, "search", retriever=str).topk
        self._url = _url(options)
        self._episode: Episode | None = None

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        parsed, _ = _parse(options, "search", retriever=str), _url(options)
        return _tasks(parsed, env_name="search", split=split)

    async def reset(self, task: Task) -> Observation:
        """The first episodes of a process search for their question: without a server a run ends at
        its start.
        """
        self._episode = Episode(task, list_actions=False)
        if not has_answered(self._url):
            await ask_server(self._url, task.data["question"], topk=self._topk)
        return self._episode.first()

    async def step(self, action: str) -> Transition:
        if self._episode is None or self._episode.is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        reply = read_reply(action)
        hits = (
            await ask_server(self._url, reply.text, topk=self._topk) if reply.kind == SEARCH else []
        )
        return self._episode.after(reply, hits)

    def close(self) -> None:
        pass


class LocalSearchEnv:
    def __init__(self, options: Mapping[str, object]) -> None:
        self._topk = _parse(options, "search_local", corpus=str, list_actions=bool).topk
        self._corpus = Path(str(options["corpus"])).resolve()
        self._list_actions = bool(options["list_actions"])
        self._episode: Episode | None = None
        self._library: Library

    @classmethod
    def tasks(cls, split: str, options: Mapping[str, object]) -> Sequence[Task]:
        parsed = _parse(options, "search_local", corpus=str, list_actions=bool)
        corpus = check_file(Path(str(options["corpus"])), what="corpus")
        return _tasks(parsed, env_name="search_local", split=split, corpus=str(corpus.resolve()))

    def reset(self, task: Task) -> Observation:
        # The option's file. A task may come from anywhere, so none of its texts names a file.
        self._library = bm25_library(self._corpus)
        self._episode = Episode(task, list_actions=self._list_actions)
        return self._episode.first()

    def step(self, action: str) -> Transition:
        if self._episode is None or self._episode.is_over:
            raise ValueError("the episode is over: call reset(task) before step")
        reply = read_reply(action)
        hits = self._library.search([reply.text], self._topk)[0] if reply.kind == SEARCH else []
        return self._episode.after(reply, hits)

    def close(self) -> None:
        pass


def _tasks(options: _Options, *, env_name: str, split: str, **data: str) -> list[Task]:
    check_split(split)
    chosen = select(
        read_questions(options.questions),
        split=split,
        train_sources=options.train_sources,
        heldout_sources=options.heldout_sources,
        heldout_limit=options.heldout_limit,
    )
    return [task_of(question, env_name=env_name, split=split, data=data) for question in chosen]


def _url(options: Mapping[str, object]) -> str:
    url = str(options["retriever"])
    if not url.startswith(("http://", "https://")):
        raise OptionsError(
            f"search option retriever={url!r} must be a URL like http://127.0.0.1:8000/retrieve"
        )
    return url


def _parse(options: Mapping[str, object], env_name: str, **own: type) -> _Options:
    """`own` is what this environment takes besides what both take, with its type."""
    lists = ("questions", "train_sources", "heldout_sources")
    wanted = {**dict.fromkeys(lists, list), **own}
    check_options(env_name, options, (*wanted, "heldout_limit", "topk"))
    for name, kind in wanted.items():
        value = options[name]
        if (
            not isinstance(value, kind)
            or isinstance(value, bool) != (kind is bool)
            or value in ([], "")
        ):
            raise OptionsError(
                f"{env_name} option {name}={value!r} must be of type {kind.__name__}, and not empty"
            )
    values = {name: tuple(map(str, options[name])) for name in lists}  # type: ignore[call-overload]  # a list, see above
    counts = {
        name: whole_number(env_name, name, options[name], least=least)
        for name, least in {"heldout_limit": 0, "topk": 1}.items()
    }
    return _Options(
        questions=tuple(map(Path, values["questions"])),
        train_sources=values["train_sources"],
        heldout_sources=values["heldout_sources"],
        **counts,
    )

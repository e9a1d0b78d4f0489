"""Measure search: the BM25 index, the server, and both environments under the workers' pool.

`data` has `qa/corpus.jsonl.xz` and `qa/questions.jsonl.xz`. Recall at 3 is of the question as the
only search: of the questions with a golden answer in the corpus (`answer_in_corpus`), the share
with one in the first three passages. Server, client and environments share this process's event
loop, so `search_server_queries_s` is of one core.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from aiohttp.test_utils import TestServer

from envs import EnvironmentPool, Task, environment_class
from envs.search.client import ask_server
from envs.search.corpus import Corpus, bm25_corpus, json_lines
from envs.search.server import application
from envs.search.world import normalise

TOPK = 3


def measure(*, quick: bool, data: Path) -> dict[str, float]:
    """Return queries/s, steps/s, seconds to index the corpus, and recall at 3 of each data set."""
    rows = list(json_lines(data / "qa" / "questions.jsonl.xz", kind="questions"))
    started = time.perf_counter()
    corpus = bm25_corpus(data / "qa" / "corpus.jsonl.xz")
    figures = {"search_index_s": time.perf_counter() - started}
    questions = [str(row["question"]) for row in rows[:: 10 if quick else 1]]
    figures["search_queries_s"] = median_rate(
        lambda: [corpus.search([text], TOPK) for text in questions], len(questions)
    )
    few = questions[: 200 if quick else 2000]
    figures["search_server_queries_s"] = asyncio.run(server_rate(corpus, few))
    figures |= asyncio.run(step_rates(corpus, data, episodes=len(few)))
    recalls = recall_at_3(corpus, rows)
    figures |= {f"search_recall_at_3_{source}": recall for source, recall in recalls.items()}
    return figures | {"search_recall_at_3": statistics.mean(recalls.values())}


def median_rate(work, count: int) -> float:  # type: ignore[no-untyped-def]
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return count / statistics.median(seconds)


def recall_at_3(corpus: Corpus, rows: Sequence[dict]) -> dict[str, float]:  # type: ignore[type-arg]
    hits = defaultdict(list)
    for row in rows:
        if row["answer_in_corpus"]:
            golden = {normalise(answer) for answer in row["golden_answers"]} - {""}
            (found,) = corpus.search([row["question"]], TOPK)
            seen = [normalise(hit.passage.contents) for hit in found]
            hits[row["source"]].append(any(answer in text for answer in golden for text in seen))
    return {source: statistics.mean(own) for source, own in hits.items()}


async def server_rate(corpus: Corpus, questions: Sequence[str]) -> float:
    """Return queries/s with 16 in flight, each on its own connection, as the environment asks."""
    async with TestServer(application(corpus, topk=TOPK)) as server:
        url, waiting = str(server.make_url("/retrieve")), list(questions)

        async def ask() -> None:
            while waiting:
                await ask_server(url, waiting.pop(), topk=TOPK)

        started = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(16)))
        return len(questions) / (time.perf_counter() - started)


async def step_rates(corpus: Corpus, data: Path, *, episodes: int) -> dict[str, float]:
    """Return steps/s of episodes with a search and an answer, 16 at once, in a worker's pool."""
    common = {
        "questions": [str(data / "qa" / "questions.jsonl.xz")],
        "train_sources": ["nq", "hotpotqa"],
        "heldout_sources": ["nq", "hotpotqa"],
        "heldout_limit": 0,
        "topk": TOPK,
    }
    local = {**common, "corpus": str(data / "qa" / "corpus.jsonl.xz"), "list_actions": False}
    async with TestServer(application(corpus, topk=TOPK)) as server:
        remote = {**common, "retriever": str(server.make_url("/retrieve"))}
        return {
            "search_local_steps_s": await steps_s("search_local", local, episodes=episodes),
            "search_steps_s": await steps_s("search", remote, episodes=episodes),
        }


async def steps_s(name: str, options: dict[str, object], *, episodes: int) -> float:
    pool = EnvironmentPool(name, options, processes=1, answer_timeout_s=60.0)
    tasks = list(environment_class(name).tasks("train", options))[:episodes]
    try:
        await play(pool, tasks[:1])  # starts the process, loads the corpus
        started = time.perf_counter()
        waiting = list(tasks)
        await asyncio.gather(*(play(pool, waiting) for _ in range(16)))
        return 2 * len(tasks) / (time.perf_counter() - started)
    finally:
        pool.close()


async def play(pool: EnvironmentPool, waiting: list[Task]) -> None:
    while waiting:
        task = waiting.pop()
        async with pool.environment() as environment:
            await environment.reset(task)
            await environment.step(f"<search>{task.data['question']}</search>")
            await environment.step("<answer>nobody</answer>")

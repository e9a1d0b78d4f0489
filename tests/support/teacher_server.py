"""Serve a Hugging Face model's log-probabilities as vLLM's server does: `/completions` with echo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import AutoModelForCausalLM

from tests.support.chat_server import Answer, ChatServer, chat_server


class PlainModel:
    """The model as Hugging Face computes it, one sequence at a time."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path)

    def logprobs(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return the log-probability of each token after the first, given the tokens before it."""
        ids_T = torch.tensor(token_ids)
        with torch.no_grad():
            logits_TV = self.model(ids_T[None]).logits[0, :-1]
        logprobs_TV = torch.log_softmax(logits_TV / temperature, -1)
        return logprobs_TV.gather(1, ids_T[1:, None])[:, 0].tolist()


def plain_logprobs(
    path: Path, rows: pa.Table, *, temperature: float = 1.0
) -> dict[int, list[float]]:
    """Return the log-probabilities of each row's response tokens, by the row's number."""
    model, found = PlainModel(path), {}
    pairs = zip(rows["prompt_ids"].to_pylist(), rows["response_ids"].to_pylist(), strict=True)
    for row, (prompt, response) in enumerate(pairs):
        of_all = model.logprobs(prompt + response, temperature=temperature)
        found[row] = of_all[len(prompt) - 1 :]
    return found


@contextmanager
def teacher_server(path: Path) -> Iterator[ChatServer]:
    model = PlainModel(path)
    n_tokens = model.model.config.vocab_size

    def answer(body: dict[str, Any]) -> Answer:
        ids = body["prompt"]
        if max(ids) >= n_tokens:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        assert (body["echo"], body["max_tokens"], body["logprobs"]) == (True, 0, 0)
        return echoed([None, *model.logprobs(ids)])

    with chat_server(answer, models=["teacher"]) as server:
        yield server


def echoed(token_logprobs: object) -> Answer:
    logprobs = None if token_logprobs is None else {"token_logprobs": token_logprobs}
    choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}
    return 200, {"id": "1", "object": "text_completion", "model": "teacher", "choices": [choice]}

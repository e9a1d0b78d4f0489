"""Ask a teacher behind an OpenAI-compatible server for the log-probabilities of recorded tokens.

    teacher = ServedTeacher("http://host:8000/v1")
    rows = teacher.with_logprobs(rows)     # with a list column teacher_logprob

A request to `/completions` has token ids as its prompt, with `echo`, `logprobs` and `max_tokens=0`:
nothing is generated, and the answer has a log-probability for each token of the prompt. vLLM's
server answers so, at temperature 1. Steps that continue one another are one request. The server is
not trusted: an answer of another form is an error, and so is one without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx2
import numpy as np
import openai
import pyarrow as pa

from learner.data.arrow_lists import lists
from learner.data.sequences import sequences
from model_server import (
    MAX_ANSWER_BYTES,
    http_client,
    json_of,
    model_names,
    own_headers,
    quoted,
)
from printable import UserError
from url_secrets import public_url

REQUESTS = 16  # at once; the server makes batches of them
ATTEMPTS = 8  # of one request, while the server is busy or starts again: about half a minute
MAX_NAME_CHARACTERS = 4096  # of the model, which each request sends back
TIMEOUT_S = 300.0  # for one read of an attempt, and for all of the list of models
REQUEST_TIMEOUT_S = 2 * TIMEOUT_S  # for all attempts of one request: each byte ends a read
# Log-probabilities are at most 0, but for rounding. vLLM writes -9999 for a probability of 0.
LEAST, MOST = -1e4, 1e-3


class TeacherError(UserError, RuntimeError):
    """The server cannot be used as a teacher. The message is one line with its URL."""


class ServedTeacher:
    """The one model of a server. Its answers depend on the tokens alone."""

    def __init__(self, url: str) -> None:
        """Find the server's one model. Raises TeacherError."""
        self._url = url
        self._model = asyncio.run(self._find_model())

    def logprobs(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log q of each token after the first, given those before it.

        Takes token ids int [T] and returns float64 [T - 1], for each prompt. Natural logarithms.
        Raises TeacherError.
        """
        return asyncio.run(self._ask_all(prompts))

    def with_logprobs(self, rows: pa.Table) -> pa.Table:
        """Append the list column float64 teacher_logprob: log q of each response token.

        Reads prompt_ids, response_ids, traj_uid and step_index. Raises TeacherError.
        """
        if "images" in rows.column_names and rows["images"].null_count < len(rows):
            raise self._failed("is sent no images; use the teacher's directory")
        prompts, responses = lists(rows, "prompt_ids"), lists(rows, "response_ids")
        whole = sequences(rows, prompts=prompts, responses=responses, merge_steps=True)
        token_ids = [np.append(prompts.row(row), responses.row(row)) for row in whole.last_row_S]
        of_row = [np.empty(0)] * len(rows)  # stays empty for a row without a response
        for index, logprobs in enumerate(self.logprobs(token_ids)):
            for row in whole.rows_K[whole.first_Sp1[index] : whole.first_Sp1[index + 1]]:
                first = prompts.lengths_R[row] - 1
                of_row[row] = logprobs[first : first + responses.lengths_R[row]]
        column = pa.array(of_row, pa.list_(pa.float64()))
        return rows.append_column("teacher_logprob", column)

    async def _find_model(self) -> str:
        async with self._client() as client:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    response = await client.get(
                        "/models",
                        cast_to=httpx2.Response,
                        options={"headers": own_headers(client, key="")},
                    )
            except TimeoutError:
                raise self._failed(f"gave no whole answer within {TIMEOUT_S:g} s") from None
            except openai.OpenAIError as error:
                raise self._failed(f"did not answer: {_reason(error)}") from error
        try:
            names = model_names(self._value(response))
        except (LookupError, TypeError):
            raise self._failed("does not list its models; does the URL end in /v1?") from None
        if len(names) != 1:
            raise self._failed(f"serves {len(names)} models; give it the teacher alone")
        if len(names[0]) > MAX_NAME_CHARACTERS:
            raise self._failed(
                f"serves a model whose name has {len(names[0]):,} characters, more than "
                f"{MAX_NAME_CHARACTERS:,}; give it a short name"
            )
        return names[0]

    async def _ask_all(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        gate = asyncio.Semaphore(REQUESTS)
        async with self._client() as client:
            return await asyncio.gather(*(self._ask(client, one, gate=gate) for one in prompts))

    async def _ask(
        self, client: openai.AsyncOpenAI, token_ids: np.ndarray, *, gate: asyncio.Semaphore
    ) -> np.ndarray:
        """Return log q of one sequence's tokens: float64 [T - 1]. Raises TeacherError."""
        body = {
            "model": self._model,
            "prompt": token_ids.tolist(),
            "echo": True,
            "logprobs": 0,
            "max_tokens": 0,
        }
        try:
            async with gate, asyncio.timeout(REQUEST_TIMEOUT_S):
                response = await client.post(
                    "/completions",
                    body=body,
                    cast_to=httpx2.Response,
                    options={"headers": own_headers(client, key="")},
                )
        except TimeoutError:
            raise self._failed(f"gave no whole answer within {REQUEST_TIMEOUT_S:g} s") from None
        except openai.OpenAIError as error:
            raise self._failed(f"refused tokens: {_reason(error)}") from error
        try:
            found = self._value(response)["choices"][0]["logprobs"]["token_logprobs"][1:]
        except (LookupError, TypeError):
            found = None
        if not isinstance(found, list) or any(type(one) not in (int, float) for one in found):
            raise self._failed("does not echo tokens with their log-probabilities")
        if len(found) != len(token_ids) - 1 or not all(LEAST <= one <= MOST for one in found):
            raise self._failed(
                f"gave {len(found)} log-probabilities for {len(token_ids)} tokens, or one that is "
                f"not from {LEAST:g} to 0"
            )
        return np.array(found, np.float64)

    def _client(self) -> openai.AsyncOpenAI:
        """Return a client for one event loop."""
        return openai.AsyncOpenAI(
            base_url=self._url,
            api_key="none",
            max_retries=ATTEMPTS - 1,
            timeout=TIMEOUT_S,
            http_client=http_client(),
        )

    def _value(self, response: httpx2.Response) -> Any:
        """Return the value of an answer's JSON; None if it cannot be read. Raises TeacherError."""
        if len(response.content) > MAX_ANSWER_BYTES:
            raise self._failed(f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
        return json_of(response.content)

    def _failed(self, why: str) -> TeacherError:
        return TeacherError(f"loss.teacher={public_url(self._url)} {why}")


def _reason(error: openai.OpenAIError) -> str:
    """Return what went wrong with a request. The client calls all of it a connection error."""
    cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else None
    return quoted(cause or error)

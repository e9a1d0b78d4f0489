"""Ask a teacher behind an OpenAI-compatible server for the log-probabilities of recorded tokens.

    teacher = ServedTeacher("http://host:8000/v1")
    rows = teacher.with_logprobs(rows)     # with a list column teacher_logprob

A request to `/completions` has token ids as its prompt, with `echo`, `logprobs` and `max_tokens=0`:
nothing is generated, and the answer has a log-probability for each token of the prompt. vLLM's
server answers so, at temperature 1. Steps that continue one another are one request.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pyarrow as pa

from learner.data.micro_batch import lists, sequences
from printable import UserError, one_line

REQUESTS = 16  # at once; the server makes batches of them
ATTEMPTS = 8  # of one request, while the server is busy or starts again: about half a minute
TIMEOUT_S = 300.0  # for one attempt
# Headers that the client would fill from the environment. They are meant for openai.com.
WITHHELD = ("Authorization", "OpenAI-Organization", "OpenAI-Project")


class TeacherError(UserError, RuntimeError):
    """The server cannot be used as a teacher. The message is one line with its URL."""


class ServedTeacher:
    """The one model of a server. Its answers depend on the tokens alone."""

    def __init__(self, url: str) -> None:
        """Find the server's one model. Raises TeacherError."""
        self._url = url
        self._client = openai.OpenAI(
            base_url=url,
            api_key="none",
            max_retries=ATTEMPTS - 1,
            timeout=TIMEOUT_S,
            http_client=openai.DefaultHttpxClient(follow_redirects=False),
        )
        self._headers: Any = dict.fromkeys(WITHHELD, openai.Omit())
        try:
            models = [model.id for model in self._client.models.list(extra_headers=self._headers)]
        except openai.OpenAIError as error:
            raise self._failed(f"did not answer: {one_line(error)}") from error
        if len(models) != 1:
            raise self._failed(f"serves {len(models)} models; give it the teacher alone")
        (self._model,) = models

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return log q of each token after the first, given those before it: float64 [T - 1].

        Natural logarithms. Raises TeacherError.
        """
        try:
            answer = self._client.completions.create(
                model=self._model,
                prompt=token_ids.tolist(),
                echo=True,
                logprobs=0,
                max_tokens=0,
                extra_headers=self._headers,
            )
            found = answer.choices[0].logprobs.token_logprobs[1:]  # type: ignore[union-attr, index]
            logprobs = np.array(found, np.float64)
        except openai.OpenAIError as error:
            raise self._failed(f"refused tokens: {one_line(error)}") from error
        except (AttributeError, IndexError, TypeError, ValueError):
            raise self._failed("does not echo tokens with their log-probabilities") from None
        if len(logprobs) != len(token_ids) - 1 or not math.isfinite(logprobs.sum()):
            raise self._failed(
                f"gave {len(logprobs)} log-probabilities for {len(token_ids)} tokens, or one that "
                "is not finite"
            )
        return logprobs

    def with_logprobs(self, rows: pa.Table) -> pa.Table:
        """Append the list column float64 teacher_logprob: log q of each response token.

        Reads prompt_ids, response_ids, traj_uid and step_index. Raises TeacherError.
        """
        if "images" in rows.column_names and rows["images"].null_count < len(rows):
            raise self._failed("is sent no images; use the teacher's directory")
        prompts, responses = lists(rows, "prompt_ids"), lists(rows, "response_ids")
        whole = sequences(rows, prompts=prompts, responses=responses, merge_steps=True)
        token_ids = [np.append(prompts.row(row), responses.row(row)) for row in whole.last_row_S]
        threads = ThreadPoolExecutor(REQUESTS)
        try:
            answers = list(threads.map(self.logprobs, token_ids))
        finally:
            threads.shutdown(cancel_futures=True)
        of_row = [np.empty(0)] * len(rows)  # as of a row without a response
        for index, logprobs in enumerate(answers):
            for row in whole.rows_K[whole.first_S1[index] : whole.first_S1[index + 1]]:
                first = prompts.lengths_R[row] - 1
                of_row[row] = logprobs[first : first + responses.lengths_R[row]]
        column = pa.array(of_row, pa.list_(pa.float64()))
        return rows.append_column("teacher_logprob", column)

    def _failed(self, why: str) -> TeacherError:
        return TeacherError(f"loss.teacher={self._url} {why}")

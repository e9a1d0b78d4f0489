"""Compute a critic's values of rows and response tokens, and the tokens' advantages.

    values_R, values_N = critic_values(rows, ranks.values, learner=config.learner)
    rows = with_token_values(rows, values_N)                # for an estimator of TOKEN_LEVEL
    rows = with_token_advantages(rows, gae_lambda=0.95)     # needs value_target: the rows' scores

Letters as in `micro_batch.py`; here N are the response tokens of all rows, end to end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from configs import LearnerConfig, sequence_groups
from gigpo import token_advantages
from learner.data.arrow_lists import lists
from learner.data.micro_batch import MicroBatch, micro_batches

# From micro-batches to the critic's value before each response token: `Critic.values`.
AskCritic = Callable[[Sequence[MicroBatch]], Sequence[torch.Tensor]]
DIGEST_BYTES = 6  # a figure is a float64, which holds integers up to 2^53 exactly


def critic_values(
    rows: pa.Table,
    ask_critic: AskCritic,
    *,
    learner: LearnerConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the value of each row's state [R], and of each response token's state [N], float64.

    The first response token's state is the row's. A row without a response gets one token, because
    the value is read where its first would be predicted. That token itself is never an input, and
    is not among the N. `ask_critic` is `Critic.values`, or calls it on all ranks.
    """
    n_tokens_R = _n_tokens(rows)
    batches = micro_batches(
        _askable(rows, is_empty_R=n_tokens_R == 0),
        micro_batch_tokens=learner.micro_batch_tokens,
        ranks=sequence_groups(learner),
    )
    asked_N = _in_row_order(batches, ask_critic(batches))
    n_asked_R = np.maximum(n_tokens_R, 1)
    values_R = asked_N[np.cumsum(n_asked_R) - n_asked_R]
    return values_R, asked_N[np.repeat(n_tokens_R > 0, n_asked_R)]


def _askable(rows: pa.Table, *, is_empty_R: np.ndarray) -> pa.Table:
    """Return the rows with the columns of a micro-batch, and one token for each empty response."""
    asked = rows.append_column("advantage", pa.array(np.zeros(len(rows))))
    asked = asked.append_column("staleness", pa.array(np.zeros(len(rows), np.int64)))
    for name in ("response_ids", "response_logprobs"):
        index, kind = asked.schema.get_field_index(name), asked.schema.field(name).type
        filled = pc.if_else(pa.array(is_empty_R), pa.scalar([0], kind), asked[name])
        asked = asked.set_column(index, asked.schema.field(name), filled)
    return asked


def _in_row_order(batches: Sequence[MicroBatch], values: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the values of all micro-batches' tokens [N] in the order of the rows, float64.

    A row's tokens are together and in order, in one micro-batch.
    """
    rows_N = np.concatenate([batch.rows_N.numpy() for batch in batches])
    values_N = np.concatenate([batch_N.numpy() for batch_N in values])
    return values_N[np.argsort(rows_N, kind="stable")].astype(np.float64)


def with_token_values(rows: pa.Table, values_N: np.ndarray) -> pa.Table:
    """Append the list column `token_value`."""
    return _with_lists(rows, "token_value", values_N)


def with_token_advantages(rows: pa.Table, *, gae_lambda: float) -> pa.Table:
    """Append the list columns `token_advantage`, whitened over all rows, and `token_value_target`.

    Reads token_value and value_target, the score of each row. See `gigpo.token_advantages`.
    """
    advantages_N, targets_N = token_advantages(
        _token_values(rows), rows["value_target"].to_numpy(), _n_tokens(rows), gae_lambda=gae_lambda
    )
    rows = _with_lists(rows, "token_advantage", advantages_N)
    return _with_lists(rows, "token_value_target", targets_N)


def values_digest(rows: pa.Table) -> int:
    """Return the BLAKE2b of 48 bits of all values of tokens, in the order of the rows."""
    digest = hashlib.blake2b(_token_values(rows).astype("<f4").tobytes(), digest_size=DIGEST_BYTES)
    return int.from_bytes(digest.digest(), "big")


def _token_values(rows: pa.Table) -> np.ndarray:
    column = lists(rows, "token_value")
    return column.of(np.arange(len(rows)))


def _n_tokens(rows: pa.Table) -> np.ndarray:
    return lists(rows, "response_ids").lengths_R


def _with_lists(rows: pa.Table, name: str, numbers_N: np.ndarray) -> pa.Table:
    offsets_Rp1 = pa.array(np.append(0, np.cumsum(_n_tokens(rows))), pa.int32())
    return rows.append_column(name, pa.ListArray.from_arrays(offsets_Rp1, pa.array(numbers_N)))

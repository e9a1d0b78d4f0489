"""From rows with advantages to tensors: what one forward pass of the learner sees.

    for part in split_updates(rows, 2, seed=learner_step):          # one optimizer update each
        batches = micro_batches(part, micro_batch_tokens=16384)  # together exactly the part's response tokens

Letters: R rows, B rows of one micro-batch, T tokens of its longest row, N its response tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

# Rows are padded on the right: a causal model reads only to its left, so no response token ever sees the padding and
# no attention mask is needed (which keeps the faster causal kernel). Any valid id will do.
PAD_ID = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Rows of one forward pass, and the flat positions at which the model predicts a response token.

    The last response token is predicted, but predicts nothing, so it is not an input. Two rows,
    prompt (5, 6, 7) with response (8, 9), and prompt (3,) with response (4, 2):

        input_ids_BT   [[5, 6, 7, 8],      positions_N     [2, 3, 4, 5]      = b * T + t
                        [3, 4, 0, 0]]      response_ids_N  [8, 9, 4, 2]      rows_N  [0, 0, 1, 1]

    The vocabulary projection is computed at `positions_N` only: N of the B * T positions, a tenth in long-prompt games.
    """

    input_ids_BT: torch.Tensor  # int64, padded on the right
    positions_N: torch.Tensor  # int64, index into the flattened B * T
    response_ids_N: torch.Tensor  # int64, the token predicted there
    behaviour_logprobs_N: torch.Tensor  # float32, natural log, as recorded at sampling
    advantages_N: torch.Tensor  # float32, the row's advantage on each of its tokens
    staleness_N: torch.Tensor  # int64, versions: the learner's at consumption minus the oldest that sampled the row
    rows_N: torch.Tensor  # int64, row of the table the micro-batch was made from; a row is a sequence, never cut in two
    proximal_logprobs_N: torch.Tensor | None = None  # float32, of the policy before the learner step's first update

    @property
    def n_rows(self) -> int:
        """Sequences, each with at least one response token."""
        return self.input_ids_BT.shape[0]

    @property
    def n_response_tokens(self) -> int:
        return self.response_ids_N.numel()

    @property
    def n_padded_tokens(self) -> int:
        """B * T: what the forward pass computes, padding included."""
        return self.input_ids_BT.numel()

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {item.name: getattr(self, item.name) for item in fields(self)}
        return MicroBatch(**{name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()})


def split_updates(rows: pa.Table, parts: int, *, seed: int) -> list[pa.Table]:
    """Rows of several optimizer updates: shuffled by `seed`, then cut into consecutive parts of nearly equal length.

    Shuffled, because rows come group by group and each update should see all groups. One part is the table unchanged.
    Fewer rows than parts give one part a row. Five rows in two parts: 3 and 2 rows.
    """
    if parts == 1:
        return [rows]
    order = np.random.default_rng(seed).permutation(rows.num_rows)
    return [rows.take(pa.array(part)) for part in np.array_split(order, min(parts, rows.num_rows))]


def micro_batches(rows: pa.Table, *, micro_batch_tokens: int) -> list[MicroBatch]:
    """Cuts rows into micro-batches of at most `micro_batch_tokens` padded tokens, rows of like length together.

    Longest first, so that a batch too large for the memory fails at once and not after minutes. A row longer than the
    budget has a micro-batch of its own; a row without response tokens has nothing to learn and is left out.
    Reads the columns prompt_ids, response_ids, response_logprobs, advantage and staleness.
    """
    columns = _Columns(rows)
    lengths_R = columns.prompt_lengths_R + columns.response_lengths_R - 1
    order = np.argsort(-lengths_R, kind="stable")
    order = order[columns.response_lengths_R[order] > 0]
    batches: list[MicroBatch] = []
    start = 0
    while start < len(order):
        longest = int(lengths_R[order[start]])
        n_rows = max(1, micro_batch_tokens // longest)
        batches.append(_micro_batch(columns, order[start : start + n_rows]))
        start += n_rows
    return batches


class _Columns:
    """The five columns as flat numpy arrays; row r of a list column is `values[offsets[r]:offsets[r + 1]]`."""

    def __init__(self, rows: pa.Table) -> None:
        self.prompt_ids, self.prompt_offsets = _flat(rows, "prompt_ids")
        self.response_ids, self.response_offsets = _flat(rows, "response_ids")
        self.logprobs, self.logprob_offsets = _flat(rows, "response_logprobs")
        self.advantages_R = rows["advantage"].to_numpy()
        self.staleness_R = rows["staleness"].to_numpy()
        self.prompt_lengths_R = np.diff(self.prompt_offsets)
        self.response_lengths_R = np.diff(self.response_offsets)
        unequal = np.flatnonzero(self.response_lengths_R != np.diff(self.logprob_offsets))
        if unequal.size:
            raise ValueError(
                f"row {unequal[0]} has {self.response_lengths_R[unequal[0]]} response tokens but "
                f"{np.diff(self.logprob_offsets)[unequal[0]]} log-probabilities; "
                "each token needs the one it was sampled with"
            )
        if (self.prompt_lengths_R == 0).any():
            row = int(np.argmin(self.prompt_lengths_R))
            raise ValueError(f"row {row} has an empty prompt; the first response token needs a token that predicts it")


def _flat(rows: pa.Table, name: str) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    column = rows[name].combine_chunks()
    return column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy().astype(np.int64)


def _micro_batch(columns: _Columns, rows_B: NDArray[np.int64]) -> MicroBatch:
    lengths_B = columns.response_lengths_R[rows_B]
    width = int((columns.prompt_lengths_R[rows_B] + lengths_B - 1).max())
    input_ids_BT = np.full((len(rows_B), width), PAD_ID, dtype=np.int64)
    positions, responses, logprobs = [], [], []
    for b, row in enumerate(rows_B):
        prompt = columns.prompt_ids[columns.prompt_offsets[row] : columns.prompt_offsets[row + 1]]
        response = columns.response_ids[columns.response_offsets[row] : columns.response_offsets[row + 1]]
        input_ids_BT[b, : len(prompt)] = prompt
        input_ids_BT[b, len(prompt) : len(prompt) + len(response) - 1] = response[:-1]
        first = b * width + len(prompt) - 1
        positions.append(np.arange(first, first + len(response)))
        responses.append(response)
        logprobs.append(columns.logprobs[columns.logprob_offsets[row] : columns.logprob_offsets[row + 1]])
    return MicroBatch(
        input_ids_BT=torch.from_numpy(input_ids_BT),
        positions_N=torch.from_numpy(np.concatenate(positions)),
        response_ids_N=torch.from_numpy(np.concatenate(responses).astype(np.int64)),
        behaviour_logprobs_N=torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
        advantages_N=torch.from_numpy(np.repeat(columns.advantages_R[rows_B], lengths_B).astype(np.float32)),
        staleness_N=torch.from_numpy(np.repeat(columns.staleness_R[rows_B], lengths_B).astype(np.int64)),
        rows_N=torch.from_numpy(np.repeat(rows_B, lengths_B).astype(np.int64)),
    )

"""Turn rows with advantages into tensors: the input of one forward pass of the learner.

    for part in split_updates(rows, updates=2, rows_per_update=0, seed=learner_step):
        batches = micro_batches(part, micro_batch_tokens=16384, ranks=2)
        # `part` is one optimizer update; rank r computes batches[r::2]

Merge: a step whose prompt repeats all tokens before it continues their sequence. Two steps of a
game whose prompt is its whole history become one sequence with two responses, in brackets:

    row 0: prompt (5, 6)            response (7, 8)      5 6[7 8]
    row 1: prompt (5, 6, 7, 8, 9)   response (4, 2)      5 6[7 8]9[4 2]

The sequence of a chain of rows is its last row's, which is computed anyway. So merging adds no
token, and exceeds no budget that the last row alone does not.

Pack: seven sequences, at most 10 tokens per micro-batch, two ranks. Rank 0 computes the first and
the third micro-batch, rank 1 the others:

    lengths (2, 9, 4, 6, 5, 3, 4)    ->    9 | 6 2 | 5 3 | 4 4    =    [1], [3, 0], [4, 5], [2, 6]

Letters: R rows of the table, K of them with a response, S token sequences of one micro-batch, T
their tokens together, N its response tokens, M micro-batches, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

# A sequence of this many tokens spends as much time in attention scores as in matrix products: 12
# times the hidden size, here 1024. For larger models the true number is larger, and the balance is
# then by tokens almost alone.
EVEN_TOKENS = 12 * 1024
GROWTH = 1 / 16  # of the number of micro-batches, if the sequences did not fit
FILLER_ID = 0  # token of a micro-batch without sequences; nothing is learnt, so any id will do
CHANNELS = 3
# Pixels [height, width, 3] of each image of a row. Bytes take an eighth of the memory of a vision
# tower's input.
RowImages = tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Token sequences end to end, and the positions whose output predicts a response token.

    The last response token predicts nothing, so it is not an input. Two rows, prompt (5, 6, 7) with
    response (8, 9), and prompt (3,) with response (4, 2):

        input_ids_T     [5, 6, 7, 8, 3, 4]      positions_N     [2, 3, 4, 5]
        position_ids_T  [0, 1, 2, 3, 0, 1]      response_ids_N  [8, 9, 4, 2]
        bounds_S1       [0, 4, 6]               rows_N          [0, 0, 1, 1]

    If the second row continued the first, with prompt (5, 6, 7, 8, 9, 3), both would be the one
    sequence 5 6 7 8 9 3 4 with positions 2 3 and 5 6. Attention stays within a sequence. The
    vocabulary projection is computed at `positions_N` only: with long prompts, at a tenth of the T
    positions.

    All ranks do equally many passes. A filler has one token, no row and N = 0.
    """

    input_ids_T: torch.Tensor  # int64
    position_ids_T: torch.Tensor  # int64, from 0 in each sequence
    bounds_S1: torch.Tensor  # int32; sequence s is tokens bounds_S1[s] to bounds_S1[s + 1]
    positions_N: torch.Tensor  # int64, index into T: its output predicts the response token
    response_ids_N: torch.Tensor  # int64, the token predicted there
    behaviour_logprobs_N: torch.Tensor  # float32, natural log, as recorded at sampling
    advantages_N: torch.Tensor  # float32, the row's advantage on each of its tokens, or the token's
    # int64: learner's version minus the oldest version in the row; -1 for an offline row
    staleness_N: torch.Tensor
    rows_N: torch.Tensor  # int64, row of the table: one step, the unit of the loss, never cut
    n_rows: int  # number of distinct rows
    # float32, of the policy before the learner step's first update
    proximal_logprobs_N: torch.Tensor | None = None
    # float32, of a run with a critic: the value that the advantage was computed with, and the value
    # that the critic learns: the row's on each of its tokens, or the token's
    values_N: torch.Tensor | None = None
    value_targets_N: torch.Tensor | None = None
    teacher_logprobs_N: torch.Tensor | None = None  # float32, of a teacher behind a server
    is_token_level: bool = False  # values and advantages are the tokens', not the rows'
    images_S: tuple[RowImages, ...] = ()  # per sequence, in token order; () if no row has one

    @property
    def n_tokens(self) -> int:
        """Number of tokens T of the forward pass."""
        return self.input_ids_T.numel()

    @property
    def n_response_tokens(self) -> int:
        return self.response_ids_N.numel()

    @property
    def n_values(self) -> int:
        """Number of values that the critic learns."""
        return self.n_response_tokens if self.is_token_level else self.n_rows

    def valued_tokens(self) -> torch.Tensor:
        """Return the index of each token whose value the critic learns, int64 [n_values]."""
        if self.is_token_level:
            return torch.arange(self.n_response_tokens, device=self.rows_N.device)
        return first_tokens(self.rows_N)

    def to(self, device: torch.device) -> MicroBatch:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        tensors = {name: v.to(device) for name, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **tensors)


def split_updates(
    rows: pa.Table, *, updates: int, rows_per_update: int, seed: int
) -> list[pa.Table]:
    """Shuffle the rows by `seed` and cut them into the parts of several optimizer updates.

    Each part has `rows_per_update` rows, the last one the rest. With rows_per_update=0 there are
    `updates` parts of nearly equal length, at most one per row. Rows come group by group, and every
    update should see all groups: hence the shuffle. A single part is the table unchanged, also an
    empty one.

        five rows, updates=2               3 and 2 rows
        five rows, rows_per_update=2       2, 2 and 1 rows
    """
    n_rows = rows.num_rows
    n_parts = math.ceil(n_rows / rows_per_update) if rows_per_update else min(updates, n_rows)
    if n_parts <= 1:
        return [rows]
    order = np.random.default_rng(seed).permutation(n_rows)
    ends = np.arange(rows_per_update, n_rows, rows_per_update) if rows_per_update else n_parts
    return [rows.take(pa.array(part)) for part in np.array_split(order, ends)]


def first_tokens(rows_N: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's first response token, int64 [K], in their order.

    A row's tokens are together. Rows (7, 7, 7, 2, 2) begin at (0, 3).
    """
    begins_N = torch.ones_like(rows_N, dtype=torch.bool)
    begins_N[1:] = rows_N[1:] != rows_N[:-1]
    return begins_N.nonzero().squeeze(-1)


def share_of_update(n_rows: int, *, rows_per_update: int) -> float:
    """Return the weight of an update of `n_rows` rows: its share of a full one.

    With rows_per_update=256 an update of 88 rows weighs 88 / 256, as verl's last mini-batch does.
    With rows_per_update=0 each update weighs 1.
    """
    return min(1.0, n_rows / rows_per_update) if rows_per_update else 1.0


def micro_batches(rows: pa.Table, *, micro_batch_tokens: int, ranks: int) -> list[MicroBatch]:
    """Pack the rows that have a response into micro-batches of at most `micro_batch_tokens` tokens.

    Their number is a multiple of `ranks`; it is 0 if no row has a response. A longer sequence gets
    a micro-batch of its own. A step that repeats the tokens before it continues their sequence,
    unless rows have images.

    Reads prompt_ids, response_ids, response_logprobs, advantage, staleness and, if present, images,
    value, value_target and the list teacher_logprob; without images also traj_uid and step_index.
    If there are lists token_advantage, token_value and token_value_target, with a number for each
    response token, they are read instead. Raises ValueError for an empty prompt, and for a response
    without one log-probability per token.
    """
    columns = _columns(rows)
    together = sequences(
        rows,
        prompts=columns.prompts,
        responses=columns.responses,
        # equal image tokens do not mean equal images
        merge_steps=columns.images is None,
    )
    last_S = together.last_row_S
    lengths_S = columns.prompts.lengths_R[last_S] + columns.responses.lengths_R[last_S] - 1
    return [
        _micro_batch(columns, together=together, chosen_S=chosen_S) if len(chosen_S) else _empty()
        for chosen_S in pack(lengths_S, micro_batch_tokens=micro_batch_tokens, ranks=ranks)
    ]


def shortest_sequence(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch with its shortest sequence only: the cheapest pass over real tokens.

    In the example of `MicroBatch`: input_ids_T [3, 4], positions_N [0, 1], n_rows 1.
    """
    shortest = int(batch.bounds_S1.diff().argmin())
    first, end = batch.bounds_S1[shortest : shortest + 2].tolist()
    inside_N = (batch.positions_N >= first) & (batch.positions_N < end)
    proximal_N = batch.proximal_logprobs_N
    return MicroBatch(
        input_ids_T=batch.input_ids_T[first:end],
        position_ids_T=batch.position_ids_T[first:end],
        bounds_S1=torch.tensor([0, end - first], dtype=torch.int32),
        positions_N=batch.positions_N[inside_N] - first,
        response_ids_N=batch.response_ids_N[inside_N],
        behaviour_logprobs_N=batch.behaviour_logprobs_N[inside_N],
        advantages_N=batch.advantages_N[inside_N],
        staleness_N=batch.staleness_N[inside_N],
        rows_N=batch.rows_N[inside_N],
        n_rows=batch.rows_N[inside_N].unique().numel(),
        proximal_logprobs_N=None if proximal_N is None else proximal_N[inside_N],
        images_S=batch.images_S[shortest : shortest + 1],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    prompts: Lists
    responses: Lists
    logprobs: Lists
    advantages: Numbers
    staleness_R: NDArray[np.int64]
    images: pa.ChunkedArray | None  # None: no row has one
    values: Numbers | None  # None: there is no critic
    value_targets: Numbers | None
    teacher_logprobs: Lists | None  # None: no teacher, or each rank has it


def _columns(rows: pa.Table) -> _Columns:
    has_images = "images" in rows.column_names and rows["images"].null_count < rows.num_rows
    columns = _Columns(
        prompts=lists(rows, "prompt_ids"),
        responses=lists(rows, "response_ids"),
        logprobs=lists(rows, "response_logprobs"),
        advantages=_numbers(rows, "advantage"),
        staleness_R=rows["staleness"].to_numpy(),
        images=rows["images"] if has_images else None,
        values=_numbers(rows, "value") if "value" in rows.column_names else None,
        value_targets=(
            _numbers(rows, "value_target") if "value_target" in rows.column_names else None
        ),
        teacher_logprobs=(
            lists(rows, "teacher_logprob") if "teacher_logprob" in rows.column_names else None
        ),
    )
    unequal = np.flatnonzero(columns.responses.lengths_R != columns.logprobs.lengths_R)
    if unequal.size:
        row = int(unequal[0])
        raise ValueError(
            f"row {row} has {columns.responses.lengths_R[row]} response tokens but "
            f"{columns.logprobs.lengths_R[row]} log-probabilities; each token needs the one it was "
            "sampled with"
        )
    if (columns.prompts.lengths_R == 0).any():
        row = int(np.argmin(columns.prompts.lengths_R))
        raise ValueError(
            f"row {row} has an empty prompt; the first response token needs a token before it"
        )
    return columns


def _numbers(rows: pa.Table, name: str) -> Numbers:
    """Return the column, or the numbers of the tokens if there are some."""
    per_token = f"token_{name}"
    return lists(rows, per_token) if per_token in rows.column_names else rows[name].to_numpy()


def _micro_batch(
    columns: _Columns, *, together: Sequences, chosen_S: NDArray[np.int64]
) -> MicroBatch:
    """Lay the sequences `chosen_S` end to end, in that order. K: their rows."""
    n_rows_S = np.diff(together.first_S1)[chosen_S]
    rows_K = together.rows_K[ranges(together.first_S1[chosen_S], n_rows_S)]
    last_S = together.last_row_S[chosen_S]
    n_prompt_S = columns.prompts.lengths_R[last_S]
    n_response_S = columns.responses.lengths_R[last_S]
    bounds_S1 = np.concatenate([[0], np.cumsum(n_prompt_S + n_response_S - 1)])
    input_ids_T = np.empty(bounds_S1[-1], dtype=np.int64)
    input_ids_T[ranges(bounds_S1[:-1], n_prompt_S)] = columns.prompts.of(last_S)
    input_ids_T[ranges(bounds_S1[:-1] + n_prompt_S, n_response_S - 1)] = columns.responses.of(
        last_S, drop_last=True
    )
    first_K = np.repeat(bounds_S1[:-1], n_rows_S) + columns.prompts.lengths_R[rows_K] - 1
    n_response_K = columns.responses.lengths_R[rows_K]

    def on_tokens(numbers: Numbers) -> torch.Tensor:
        if isinstance(numbers, Lists):
            return torch.from_numpy(numbers.of(rows_K).astype(np.float32))
        return torch.from_numpy(numbers[rows_K].astype(np.float32).repeat(n_response_K))

    staleness_K = columns.staleness_R[rows_K].astype(np.int64)
    return MicroBatch(
        input_ids_T=torch.from_numpy(input_ids_T),
        position_ids_T=torch.from_numpy(ranges(np.zeros_like(last_S), np.diff(bounds_S1))),
        bounds_S1=torch.from_numpy(bounds_S1.astype(np.int32)),
        positions_N=torch.from_numpy(ranges(first_K, n_response_K)),
        response_ids_N=torch.from_numpy(columns.responses.of(rows_K).astype(np.int64)),
        behaviour_logprobs_N=torch.from_numpy(columns.logprobs.of(rows_K).astype(np.float32)),
        advantages_N=on_tokens(columns.advantages),
        staleness_N=torch.from_numpy(staleness_K.repeat(n_response_K)),
        rows_N=torch.from_numpy(np.repeat(rows_K, n_response_K)),
        n_rows=len(rows_K),
        values_N=None if columns.values is None else on_tokens(columns.values),
        value_targets_N=None if columns.value_targets is None else on_tokens(columns.value_targets),
        teacher_logprobs_N=(
            None if columns.teacher_logprobs is None else on_tokens(columns.teacher_logprobs)
        ),
        is_token_level=isinstance(columns.advantages, Lists),
        images_S=() if columns.images is None else _images_of(columns.images, last_S),
    )


def _empty() -> MicroBatch:
    nothing, no_float = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.float32)
    return MicroBatch(
        input_ids_T=torch.full((1,), FILLER_ID),
        position_ids_T=torch.zeros(1, dtype=torch.int64),
        bounds_S1=torch.tensor([0, 1], dtype=torch.int32),
        positions_N=nothing,
        response_ids_N=nothing,
        behaviour_logprobs_N=no_float,
        advantages_N=no_float,
        staleness_N=nothing,
        rows_N=nothing,
        n_rows=0,
        values_N=no_float,
        value_targets_N=no_float,
        teacher_logprobs_N=no_float,
    )


def _images_of(images: pa.ChunkedArray, rows_S: NDArray[np.int64]) -> tuple[RowImages, ...]:
    """Return the images of each row, () for a row without. The pixels are not copied."""
    return tuple(tuple(map(_pixels, images[int(row)].values or ())) for row in rows_S)


def _pixels(image: pa.StructScalar) -> NDArray[np.uint8]:
    pixels = np.frombuffer(image["pixels"].as_buffer(), np.uint8)
    return pixels.reshape(image["height"].as_py(), image["width"].as_py(), CHANNELS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """A list column as one flat array, with the start and length of each row."""

    values: NDArray[np.generic]
    starts_R: NDArray[np.int64]
    lengths_R: NDArray[np.int64]

    def of(self, rows_K: NDArray[np.int64], *, drop_last: bool = False) -> NDArray[np.generic]:
        """Return the lists of these rows end to end, each whole or without its last element."""
        return self.values[ranges(self.starts_R[rows_K], self.lengths_R[rows_K] - drop_last)]

    def row(self, row: np.int64) -> NDArray[np.generic]:
        return self.values[self.starts_R[row] : self.starts_R[row] + self.lengths_R[row]]


Numbers = NDArray[np.float64] | Lists  # one a row, or one a response token


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Rows grouped into sequences: s has `rows_K[first_S1[s]:first_S1[s + 1]]`, by step.

    Its tokens are those of its last row.
    """

    rows_K: NDArray[np.int64]  # each row with a response once
    first_S1: NDArray[np.int64]  # begins with 0 and ends with K

    @property
    def last_row_S(self) -> NDArray[np.int64]:
        return self.rows_K[self.first_S1[1:] - 1]


def ranges(starts_K: NDArray[np.int64], lengths_K: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return consecutive integers from each start, end to end.

    Starts (4, 9) with lengths (3, 2) give 4 5 6 9 10.
    """
    ends_K = np.cumsum(lengths_K)
    return np.repeat(starts_K - (ends_K - lengths_K), lengths_K) + np.arange(
        ends_K[-1] if len(ends_K) else 0
    )


def lists(rows: pa.Table, name: str) -> Lists:
    """Return a list column as flat arrays, whatever its chunks and offsets are."""
    column = rows[name].combine_chunks()
    offsets_R1 = column.offsets.to_numpy().astype(np.int64)
    return Lists(
        values=column.values.to_numpy(zero_copy_only=False),
        starts_R=offsets_R1[:-1],
        lengths_R=np.diff(offsets_R1),
    )


def sequences(rows: pa.Table, *, prompts: Lists, responses: Lists, merge_steps: bool) -> Sequences:
    """Put each row with a response into one sequence; without `merge_steps` into one of its own.

    Merging reads the columns traj_uid and step_index, in any row order. A step missing because it
    is in another update breaks no chain, as long as the next one repeats its tokens.
    """
    rows_K = np.flatnonzero(responses.lengths_R > 0)
    begins_K = np.ones(len(rows_K), dtype=bool)
    if merge_steps and len(rows_K):
        trajectory_R = rows["traj_uid"].combine_chunks().dictionary_encode().indices.to_numpy()
        rows_K = rows_K[np.lexsort((rows["step_index"].to_numpy()[rows_K], trajectory_R[rows_K]))]
        before, after = rows_K[:-1], rows_K[1:]
        long_enough = (
            prompts.lengths_R[before] + responses.lengths_R[before] <= prompts.lengths_R[after]
        )
        for k in np.flatnonzero((trajectory_R[before] == trajectory_R[after]) & long_enough):
            begins_K[k + 1] = not _continues(
                before[k], after[k], prompts=prompts, responses=responses
            )
    return Sequences(rows_K=rows_K, first_S1=np.append(np.flatnonzero(begins_K), len(rows_K)))


def _continues(before: np.int64, after: np.int64, *, prompts: Lists, responses: Lists) -> bool:
    """Return whether the prompt of row `after` begins with prompt and response of row `before`."""
    repeated = np.concatenate([prompts.row(before), responses.row(before)])
    return np.array_equal(repeated, prompts.row(after)[: len(repeated)])


def costs(lengths_S: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the time to compute each sequence, in tokens of a short one: T + T^2 / EVEN_TOKENS."""
    return lengths_S + lengths_S**2 / EVEN_TOKENS


def pack(
    lengths_S: NDArray[np.int64], *, micro_batch_tokens: int, ranks: int
) -> list[NDArray[np.int64]]:
    """Return the sequence indices of each micro-batch.

    A micro-batch has at most `micro_batch_tokens`, or one longer sequence. The longest sequence
    comes first; each goes to the cheapest micro-batch with room. There are as few micro-batches as
    that allows, in a multiple of `ranks`; the last ones may be empty. The costliest come first, so
    that a lack of memory shows at once, and so that the ranks' k-th micro-batches, `result[k *
    ranks : (k + 1) * ranks]`, cost about the same. Equal lengths give equal results.
    """
    if not len(lengths_S):
        return []
    order_S = np.argsort(-lengths_S, kind="stable")
    within = np.minimum(lengths_S, micro_batch_tokens)
    n_at_least = max(
        -(-int(within.sum()) // micro_batch_tokens), int((2 * lengths_S > micro_batch_tokens).sum())
    )
    n_batches = ranks * math.ceil(n_at_least / ranks)
    fitted = partial(_fitted, lengths_S, order_S, micro_batch_tokens=micro_batch_tokens)
    while (batch_S := fitted(n_batches=n_batches)) is None:
        n_batches = ranks * math.ceil(n_batches * (1 + GROWTH) / ranks)
    cost_M = np.bincount(batch_S, weights=costs(lengths_S), minlength=n_batches)
    return [order_S[batch_S[order_S] == m] for m in np.argsort(-cost_M, kind="stable")]


def _fitted(
    lengths_S: NDArray[np.int64],
    order_S: NDArray[np.int64],
    *,
    micro_batch_tokens: int,
    n_batches: int,
) -> NDArray[np.int64] | None:
    """Return the micro-batch of each sequence, or None if a sequence found no room."""
    batch_S = np.empty(len(lengths_S), dtype=np.int64)
    tokens_M, cost_M = np.zeros(n_batches, dtype=np.int64), np.zeros(n_batches)
    cost_S = costs(lengths_S)
    for s in order_S:
        room_M = (tokens_M + lengths_S[s] <= micro_batch_tokens) | (tokens_M == 0)
        m = int(np.where(room_M, cost_M, math.inf).argmin())
        if not room_M[m]:
            return None
        batch_S[s] = m
        tokens_M[m] += lengths_S[s]
        cost_M[m] += cost_S[s]
    return batch_S

"""Turn rows with advantages into tensors: the input of one forward pass of the learner.

    batches = micro_batches(rows, micro_batch_tokens=16384, ranks=2)
    # `rows` are those of one optimizer update; rank r computes batches[r::2]

`sequences.py` merges steps into sequences, and `packing.py` puts sequences into micro-batches.

Letters: R rows of the table, K of them with a response, S token sequences of one micro-batch, T
their tokens together, N its response tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from learner.data.arrow_lists import Lists, Numbers, lists, ranges
from learner.data.packing import pack
from learner.data.sequences import Sequences, sequences
from store import CHANNELS

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
        bounds_Sp1      [0, 4, 6]               rows_N          [0, 0, 1, 1]

    If the second row continued the first, with prompt (5, 6, 7, 8, 9, 3), both would be the one
    sequence 5 6 7 8 9 3 4 with positions 2 3 and 5 6. Attention stays within a sequence. The
    vocabulary projection is computed at `positions_N` only: with long prompts, at a tenth of the T
    positions.

    All ranks do equally many passes. A filler has one token, no row and N = 0.
    """

    input_ids_T: torch.Tensor  # int64
    position_ids_T: torch.Tensor  # int64, from 0 in each sequence
    bounds_Sp1: torch.Tensor  # int32; sequence s is tokens bounds_Sp1[s] to bounds_Sp1[s + 1]
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
        """Return the number of tokens T of the forward pass."""
        return self.input_ids_T.numel()

    @property
    def n_response_tokens(self) -> int:
        return self.response_ids_N.numel()

    @property
    def n_values(self) -> int:
        """Return the number of values that the critic learns."""
        return self.n_response_tokens if self.is_token_level else self.n_rows

    def valued_tokens(self) -> torch.Tensor:
        """Return the index of each token whose value the critic learns, int64 [n_values]."""
        if self.is_token_level:
            return torch.arange(self.n_response_tokens, device=self.rows_N.device)
        return first_tokens(self.rows_N)

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **tensors)

    def only_sequence(self, s: int) -> MicroBatch:
        """Return the micro-batch with sequence `s` only.

        In the example above, sequence 1: input_ids_T [3, 4], positions_N [0, 1], n_rows 1.
        """
        first, end = self.bounds_Sp1[s : s + 2].tolist()
        inside_N = (self.positions_N >= first) & (self.positions_N < end)
        of_tokens = {
            name: tensor[inside_N]
            for name, tensor in self._tensors().items()
            if name.endswith("_N")
        }
        of_tokens["positions_N"] = of_tokens["positions_N"] - first
        return replace(
            self,
            input_ids_T=self.input_ids_T[first:end],
            position_ids_T=self.position_ids_T[first:end],
            bounds_Sp1=torch.tensor([0, end - first], dtype=torch.int32),
            n_rows=of_tokens["rows_N"].unique().numel(),
            images_S=self.images_S[s : s + 1],
            **of_tokens,
        )

    @classmethod
    def blank(cls, *, n_sequences: int, n_tokens: int, n_predicted: int) -> MicroBatch:
        """Return equal sequences of the tokens 0, 1, ..., n_tokens - 1, with nothing to learn.

        The first `n_predicted` tokens of each predict a token; all figures there are 0.
        """
        ids_T = torch.arange(n_tokens).repeat(n_sequences)
        begins_Sp1 = n_tokens * torch.arange(n_sequences + 1)
        positions_N = (begins_Sp1[:-1, None] + torch.arange(n_predicted)).flatten()
        zeros_N = torch.zeros(len(positions_N), dtype=torch.float32)
        return cls(
            input_ids_T=ids_T,
            position_ids_T=ids_T,
            bounds_Sp1=begins_Sp1.to(torch.int32),
            positions_N=positions_N,
            response_ids_N=ids_T[positions_N],
            behaviour_logprobs_N=zeros_N,
            advantages_N=zeros_N,
            staleness_N=zeros_N.long(),
            rows_N=torch.arange(n_sequences).repeat_interleave(n_predicted),
            n_rows=n_sequences if n_predicted else 0,
            values_N=zeros_N,
            value_targets_N=zeros_N,
            teacher_logprobs_N=zeros_N,
        )

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are tensors, by name."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: field for name, field in found.items() if isinstance(field, torch.Tensor)}


def first_tokens(rows_N: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's first response token, int64 [K], in their order.

    A row's tokens are together. Rows (7, 7, 7, 2, 2) begin at (0, 3).
    """
    begins_N = torch.ones_like(rows_N, dtype=torch.bool)
    begins_N[1:] = rows_N[1:] != rows_N[:-1]
    return begins_N.nonzero().squeeze(-1)


def micro_batches(rows: pa.Table, *, micro_batch_tokens: int, ranks: int) -> list[MicroBatch]:
    """Pack the rows that have a response into micro-batches of at most `micro_batch_tokens` tokens.

    Their number is a multiple of `ranks`, where a sequence group is one rank; it is 0 if no row has
    a response. A longer sequence gets a micro-batch of its own. A step that repeats the tokens
    before it continues their sequence, unless rows have images.

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
    # Any token will do as the filler's: nothing is learnt from it.
    filler = MicroBatch.blank(n_sequences=1, n_tokens=1, n_predicted=0)
    return [
        _micro_batch(columns, together=together, chosen_S=chosen_S) if len(chosen_S) else filler
        for chosen_S in pack(lengths_S, micro_batch_tokens=micro_batch_tokens, ranks=ranks)
    ]


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
    n_rows_S = np.diff(together.first_Sp1)[chosen_S]
    rows_K = together.rows_K[ranges(together.first_Sp1[chosen_S], n_rows_S)]
    last_S = together.last_row_S[chosen_S]
    n_prompt_S = columns.prompts.lengths_R[last_S]
    n_response_S = columns.responses.lengths_R[last_S]
    bounds_Sp1 = np.concatenate([[0], np.cumsum(n_prompt_S + n_response_S - 1)])
    input_ids_T = np.empty(bounds_Sp1[-1], dtype=np.int64)
    input_ids_T[ranges(bounds_Sp1[:-1], n_prompt_S)] = columns.prompts.of(last_S)
    input_ids_T[ranges(bounds_Sp1[:-1] + n_prompt_S, n_response_S - 1)] = columns.responses.of(
        last_S, drop_last=True
    )
    first_K = np.repeat(bounds_Sp1[:-1], n_rows_S) + columns.prompts.lengths_R[rows_K] - 1
    n_response_K = columns.responses.lengths_R[rows_K]

    def on_tokens(numbers: Numbers) -> torch.Tensor:
        if isinstance(numbers, Lists):
            return torch.from_numpy(numbers.of(rows_K).astype(np.float32))
        return torch.from_numpy(numbers[rows_K].astype(np.float32).repeat(n_response_K))

    staleness_K = columns.staleness_R[rows_K].astype(np.int64)
    return MicroBatch(
        input_ids_T=torch.from_numpy(input_ids_T),
        position_ids_T=torch.from_numpy(ranges(np.zeros_like(last_S), np.diff(bounds_Sp1))),
        bounds_Sp1=torch.from_numpy(bounds_Sp1.astype(np.int32)),
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


def _images_of(images: pa.ChunkedArray, rows_S: NDArray[np.int64]) -> tuple[RowImages, ...]:
    """Return the images of each row, () for a row without. The pixels are not copied."""
    return tuple(tuple(map(_pixels, images[int(row)].values or ())) for row in rows_S)


def _pixels(image: pa.StructScalar) -> NDArray[np.uint8]:
    pixels = np.frombuffer(image["pixels"].as_buffer(), np.uint8)
    return pixels.reshape(image["height"].as_py(), image["width"].as_py(), CHANNELS)

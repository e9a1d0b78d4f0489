from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import MicroBatch, micro_batches, split_updates


def table(*rows: tuple[list[int], list[int], list[float], float]) -> pa.Table:
    prompts, responses, logprobs, advantages = zip(*rows, strict=True)
    return pa.table(
        {
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "response_logprobs": pa.array(logprobs, pa.list_(pa.float32())),
            "advantage": pa.array(advantages, pa.float64()),
            "staleness": pa.array(range(len(rows)), pa.int64()),
        }
    )


LONG = ([5, 6, 7], [8, 9], [-0.5, -1.0], 2.0)
SHORT = ([3], [4, 2], [-0.25, -0.75], -1.0)


def test_the_example_of_the_docstring() -> None:
    (batch,) = micro_batches(table(LONG, SHORT), micro_batch_tokens=100)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8], [3, 4, 0, 0]]
    assert batch.positions_N.tolist() == [2, 3, 4, 5]
    assert batch.response_ids_N.tolist() == [8, 9, 4, 2]
    assert batch.behaviour_logprobs_N.tolist() == [-0.5, -1.0, -0.25, -0.75]
    assert batch.advantages_N.tolist() == [2.0, 2.0, -1.0, -1.0]
    assert batch.rows_N.tolist() == batch.staleness_N.tolist() == [0, 0, 1, 1]
    assert batch.n_rows == 2
    assert (batch.n_response_tokens, batch.n_padded_tokens) == (4, 8)


def test_the_budget_counts_padding_and_the_longest_come_first() -> None:
    rows = table(SHORT, LONG, SHORT)
    assert [b.rows_N.tolist() for b in micro_batches(rows, micro_batch_tokens=7)] == [[1, 1], [0, 0, 2, 2]]
    assert [b.input_ids_BT.shape for b in micro_batches(rows, micro_batch_tokens=8)] == [(2, 4), (1, 2)]


def test_a_row_beyond_the_budget_has_a_micro_batch_of_its_own() -> None:
    assert [b.rows_N.tolist() for b in micro_batches(table(LONG, SHORT), micro_batch_tokens=1)] == [[0, 0], [1, 1]]


def test_a_row_without_response_tokens_is_left_out() -> None:
    (batch,) = micro_batches(table(([1, 2], [], [], 1.0), SHORT), micro_batch_tokens=100)
    assert batch.rows_N.tolist() == [1, 1]
    assert micro_batches(table(([1, 2], [], [], 1.0)), micro_batch_tokens=100) == []


def test_rows_that_cannot_be_right_are_named() -> None:
    with pytest.raises(ValueError, match="row 1 has 2 response tokens but 1 log-probabilities"):
        micro_batches(table(LONG, ([3], [4, 2], [-0.25], 0.0)), micro_batch_tokens=100)
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        micro_batches(table(LONG, ([], [4], [-0.25], 0.0)), micro_batch_tokens=100)


def test_a_filtered_and_chunked_table_is_read_from_the_right_offsets() -> None:
    rows = pa.concat_tables([table(LONG, SHORT), table(SHORT, LONG)]).slice(1, 3)
    (batch,) = micro_batches(rows, micro_batch_tokens=100)
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 8], [3, 4, 0, 0], [3, 4, 0, 0]]
    assert batch.rows_N.tolist() == [2, 2, 0, 0, 1, 1]


def test_updates_share_the_rows_among_them() -> None:
    rows = table(*[([1], [i], [-0.1], float(i)) for i in range(5)])
    parts = split_updates(rows, 2, seed=7)
    assert [part.num_rows for part in parts] == [3, 2]
    assert sorted(np.concatenate([part["advantage"].to_numpy() for part in parts])) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [part.equals(again) for part, again in zip(parts, split_updates(rows, 2, seed=7), strict=True)] == [True] * 2
    assert parts[0]["advantage"].to_pylist() != [0.0, 1.0, 2.0], "rows come group by group, so they are shuffled"
    assert split_updates(rows, 1, seed=7) == [rows]
    assert [part.num_rows for part in split_updates(rows, 9, seed=7)] == [1] * 5


tokens = st.lists(st.integers(1, 99), min_size=1, max_size=12)
random_rows = st.lists(st.tuples(tokens, tokens, st.floats(-3, 3)), min_size=1, max_size=20)


@settings(deadline=None, max_examples=50)
@given(random_rows, st.integers(1, 80))
def test_every_response_token_is_predicted_once_from_its_own_row(
    drawn: list[tuple[list[int], list[int], float]], budget: int
) -> None:
    rows = table(*[(prompt, response, [-0.1] * len(response), a) for prompt, response, a in drawn])
    seen: dict[int, list[int]] = {}
    for batch in micro_batches(rows, micro_batch_tokens=budget):
        assert batch.n_padded_tokens <= budget or len(batch.input_ids_BT) == 1
        for row in batch.rows_N.unique().tolist():
            assert row not in seen
            seen[row] = check_row(batch, row, prompt=drawn[row][0])
    assert seen == {row: response for row, (_, response, _) in enumerate(drawn)}


def check_row(batch: MicroBatch, row: int, *, prompt: list[int]) -> list[int]:
    mine = batch.rows_N == row
    b, t = batch.positions_N[mine] // batch.input_ids_BT.shape[1], batch.positions_N[mine] % batch.input_ids_BT.shape[1]
    assert b.unique().numel() == 1
    assert torch.equal(t, torch.arange(len(prompt) - 1, len(prompt) - 1 + int(mine.sum())))
    response = batch.response_ids_N[mine].tolist()
    assert batch.input_ids_BT[b[0], : int(t[-1]) + 1].tolist() == prompt + response[:-1]
    return response

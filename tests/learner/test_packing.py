"""Test which rows are merged into one sequence, and which sequences into one micro-batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.micro_batch import micro_batches
from learner.data.packing import costs, pack
from tests.support.learner_samples import Row, sequences_of, table

A = ([1, 2], [3], [-0.1], 1.0)  # 1 2 [3]
B = ([1, 2, 3, 4], [5, 6], [-0.2, -0.3], 1.0)  # repeats A, then 4 [5 6]
C = ([1, 2, 3, 4, 5, 6], [7], [-0.4], 1.0)  # repeats B, with nothing in between


def merged(*rows: Row, steps: list[tuple[int, int]]) -> tuple[list[list[int]], list[int]]:
    (batch,) = micro_batches(table(*rows, steps=steps), micro_batch_tokens=100, ranks=1)
    return sequences_of(batch), batch.rows_N.tolist()


def test_a_chain_of_steps_is_its_last_rows_tokens() -> None:
    assert merged(A, B, C, steps=[(0, 0), (0, 1), (0, 2)]) == ([[1, 2, 3, 4, 5, 6]], [0, 1, 1, 2])
    assert merged(C, A, B, steps=[(0, 2), (0, 0), (0, 1)]) == (
        [[1, 2, 3, 4, 5, 6]],
        [1, 2, 2, 0],
    ), "in step order"


def test_a_step_that_is_in_another_update_breaks_no_chain() -> None:
    assert merged(A, C, steps=[(0, 0), (0, 2)]) == ([[1, 2, 3, 4, 5, 6]], [0, 1])


def test_a_step_without_a_response_breaks_no_chain() -> None:
    assert merged(A, ([1, 2, 3], [], [], 0.0), B, steps=[(0, 0), (0, 1), (0, 2)]) == (
        [[1, 2, 3, 4, 5]],
        [0, 2, 2],
    )


def test_only_the_same_tokens_of_the_same_trajectory_merge() -> None:
    apart = [[1, 2, 3, 4, 5], [1, 2]]
    assert merged(A, B, steps=[(0, 0), (1, 1)])[0] == apart, "another trajectory"
    assert merged(A, B, steps=[(0, 1), (0, 0)])[0] == apart, "the later step is the shorter one"
    for n_th, other in ((0, 9), (1, 9), (2, 9)):  # in the prompt, in the response
        changed = list(B[0])
        changed[n_th] = other
        assert len(merged(A, (changed, *B[1:]), steps=[(0, 0), (0, 1)])[0]) == 2
    # The answer is not repeated, though the next row's prompt, which lies behind it in memory,
    # begins with it.
    rows = (A, ([1, 2], [3], [-0.1], 1.0), ([3], [4], [-0.1], 1.0))
    assert merged(*rows, steps=[(0, 0), (0, 1), (1, 0)])[0] == [[1, 2], [1, 2], [3]]


def test_merging_exceeds_no_budget_that_the_last_row_does_not() -> None:
    rows = table(A, B, steps=[(0, 0), (0, 1)])
    (batch,) = micro_batches(rows, micro_batch_tokens=5, ranks=1)
    assert batch.n_tokens == 5
    (batch,) = micro_batches(rows, micro_batch_tokens=2, ranks=1)
    assert batch.n_tokens == 5, (
        "apart they would be 5 and 2 tokens: one too long anyway, and one more to compute"
    )


def test_the_example_of_the_docstring() -> None:
    lengths = np.array([2, 9, 4, 6, 5, 3, 4])
    assert [list(b) for b in pack(lengths, micro_batch_tokens=10, ranks=2)] == [
        [1],
        [3, 0],
        [4, 5],
        [2, 6],
    ]


def test_sequences_fill_as_few_micro_batches_as_the_budget_allows() -> None:
    assert [list(b) for b in pack(np.array([6, 5, 5, 4]), micro_batch_tokens=10, ranks=1)] == [
        [0, 3],
        [1, 2],
    ]
    assert [list(b) for b in pack(np.array([6, 6, 6]), micro_batch_tokens=10, ranks=1)] == [
        [0],
        [1],
        [2],
    ]
    assert [list(b) for b in pack(np.array([6, 6, 6]), micro_batch_tokens=10, ranks=2)] == [
        [0],
        [1],
        [2],
        [],
    ]
    assert pack(np.array([], dtype=np.int64), micro_batch_tokens=10, ranks=3) == []


def test_the_square_of_a_length_counts() -> None:
    """Put the micro-batch with the longer sequence first: at an equal sum it costs more."""
    assert costs(np.array([12 * 1024]))[0] == 2 * 12 * 1024
    assert [list(b) for b in pack(np.array([2, 2, 3, 1]), micro_batch_tokens=4, ranks=1)] == [
        [2, 3],
        [0, 1],
    ]


def test_ranks_are_given_equal_cost_rather_than_equal_tokens() -> None:
    """12,288 tokens cost 24,576, as much as 6.4 times 3,072 tokens, which cost 3,840 each."""
    lengths_S = np.array([12_288, *[3_072] * 6])
    assert [len(one) for one in pack(lengths_S, micro_batch_tokens=20_000, ranks=2)] == [1, 6]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 400), max_size=60), st.integers(1, 900), st.integers(1, 5))
def test_each_sequence_once_within_the_budget_and_costliest_first(
    lengths: list[int], budget: int, ranks: int
) -> None:
    lengths_S = np.array(lengths, dtype=np.int64)
    chosen = pack(lengths_S, micro_batch_tokens=budget, ranks=ranks)
    assert sorted(np.concatenate([[], *chosen])) == list(range(len(lengths)))
    assert len(chosen) % ranks == 0
    assert all(lengths_S[one].sum() <= budget or len(one) == 1 for one in chosen)
    cost = [costs(lengths_S)[one].sum() for one in chosen]
    assert cost == sorted(cost, reverse=True)
    assert [list(one) for one in pack(lengths_S, micro_batch_tokens=budget, ranks=ranks)] == [
        list(one) for one in chosen
    ]


def test_ranks_compute_micro_batches_of_like_cost_side_by_side() -> None:
    """The lengths of a game's prompts: no rank waits more than a hundredth for another."""
    lengths_S = np.random.default_rng(0).integers(20, 400, 1000)
    chosen = pack(lengths_S, micro_batch_tokens=4096, ranks=4)
    cost = np.array([costs(lengths_S)[one].sum() for one in chosen]).reshape(-1, 4)
    assert (cost.min(1) / cost.max(1)).min() > 0.99
    assert len(chosen) == 56  # 211,000 tokens fill 52 micro-batches, were they fluid

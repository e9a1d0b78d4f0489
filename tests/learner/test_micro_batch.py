from __future__ import annotations

from dataclasses import fields
from random import Random

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.micro_batch import MicroBatch, micro_batches
from learner.data.updates import share_of_update, split_updates
from tests.support.learner_samples import one_step_each, sequences_of, table

LONG = ([5, 6, 7], [8, 9], [-0.5, -1.0], 2.0)
SHORT = ([3], [4, 2], [-0.25, -0.75], -1.0)
CONTINUED = ([5, 6, 7, 8, 9, 3], [4, 2], [-0.25, -0.75], -1.0)


def cut(
    rows: pa.Table, micro_batch_tokens: int = 100, *, merge_steps: bool = False, ranks: int = 1
) -> list[MicroBatch]:
    rows = rows if merge_steps else one_step_each(rows)
    return micro_batches(rows, micro_batch_tokens=micro_batch_tokens, ranks=ranks)


def test_the_example_of_the_docstring() -> None:
    (batch,) = cut(table(LONG, SHORT))
    assert batch.input_ids_T.tolist() == [5, 6, 7, 8, 3, 4]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.bounds_Sp1.tolist() == [0, 4, 6]
    assert batch.positions_N.tolist() == [2, 3, 4, 5]
    assert batch.response_ids_N.tolist() == [8, 9, 4, 2]
    assert batch.behaviour_logprobs_N.tolist() == [-0.5, -1.0, -0.25, -0.75]
    assert batch.advantages_N.tolist() == [2.0, 2.0, -1.0, -1.0]
    assert batch.rows_N.tolist() == batch.staleness_N.tolist() == [0, 0, 1, 1]
    assert (batch.n_rows, batch.n_response_tokens, batch.n_tokens) == (2, 4, 6)


def test_the_merged_example_of_the_docstring() -> None:
    (batch,) = cut(table(CONTINUED, LONG, steps=[(0, 1), (0, 0)]), merge_steps=True)
    assert batch.input_ids_T.tolist() == [5, 6, 7, 8, 9, 3, 4]
    assert batch.position_ids_T.tolist() == list(range(7))
    assert batch.bounds_Sp1.tolist() == [0, 7]
    assert batch.positions_N.tolist() == [2, 3, 5, 6]
    assert batch.response_ids_N.tolist() == [8, 9, 4, 2]
    assert batch.behaviour_logprobs_N.tolist() == [-0.5, -1.0, -0.25, -0.75]
    assert batch.advantages_N.tolist() == [2.0, 2.0, -1.0, -1.0]
    assert batch.rows_N.tolist() == batch.staleness_N.tolist() == [1, 1, 0, 0], (
        "a merged row is still a row of the loss"
    )
    assert batch.n_rows == 2


def with_all_figures(rows: pa.Table) -> pa.Table:
    """Append the columns of a run with a critic and a served teacher."""
    numbers = pa.array([1.0 + row for row in range(len(rows))])
    logprobs = rows["response_logprobs"].combine_chunks().cast(pa.list_(pa.float64()))
    rows = rows.append_column("value", numbers).append_column("value_target", numbers)
    return rows.append_column("teacher_logprob", logprobs)


def test_one_sequence_is_as_it_would_be_alone() -> None:
    for rows, s in (((SHORT, LONG), 1), ((CONTINUED, SHORT, LONG), 2)):
        (batch,) = cut(with_all_figures(table(*rows)))
        assert int(batch.bounds_Sp1.diff().argmin()) == s
        found = batch.only_sequence(s)
        row = rows.index(SHORT)
        (alone,) = cut(with_all_figures(table(*rows)).slice(row, 1))
        for item in fields(alone):
            one, other = getattr(found, item.name), getattr(alone, item.name)
            if item.name == "rows_N":  # the number in its own table
                one, other = one - row, other
            if isinstance(other, torch.Tensor):
                assert (one.tolist(), one.dtype) == (other.tolist(), other.dtype), item.name
            else:
                assert one == other, item.name
        assert found.values_N is not None and found.teacher_logprobs_N is not None
    (filler,) = [batch for batch in cut(table(SHORT), ranks=2) if not batch.n_rows]
    assert filler.only_sequence(0).input_ids_T.tolist() == filler.input_ids_T.tolist()


def test_dtypes_and_what_a_device_gets() -> None:
    batch = cut(table(LONG, SHORT))[0].to(torch.device("meta"))
    floats = {"behaviour_logprobs_N", "advantages_N"}
    for item in fields(batch):
        value = getattr(batch, item.name)
        if isinstance(value, torch.Tensor):
            expected = (
                torch.float32
                if item.name in floats
                else torch.int32
                if item.name == "bounds_Sp1"
                else torch.int64
            )
            assert (value.dtype, value.device.type) == (expected, "meta"), item.name
    assert batch.n_rows == 2 and batch.proximal_logprobs_N is None


def test_a_sequence_beyond_the_budget_has_a_micro_batch_of_its_own() -> None:
    assert [b.rows_N.tolist() for b in cut(table(SHORT, LONG, SHORT), 3)] == [
        [1, 1],
        [0, 0],
        [2, 2],
    ]


def test_a_row_without_response_tokens_is_left_out() -> None:
    (batch,) = cut(table(([1, 2], [], [], 1.0), SHORT))
    assert batch.rows_N.tolist() == [1, 1]
    assert cut(table(([1, 2], [], [], 1.0)), ranks=2) == []


def test_a_rank_without_work_has_a_token_and_nothing_to_learn() -> None:
    first, second = cut(table(LONG), ranks=2)
    assert first.n_rows == 1
    assert (
        second.n_rows,
        second.n_response_tokens,
        second.n_tokens,
        second.bounds_Sp1.tolist(),
    ) == (0, 0, 1, [0, 1])


def test_rows_that_cannot_be_right_are_named() -> None:
    with pytest.raises(ValueError, match="row 1 has 2 response tokens but 1 log-probabilities"):
        cut(table(LONG, ([3], [4, 2], [-0.25], 0.0)))
    with pytest.raises(ValueError, match="row 1 has an empty prompt"):
        cut(table(LONG, ([], [4], [-0.25], 0.0)))


def test_a_filtered_and_chunked_table_is_read_from_the_right_offsets() -> None:
    rows = pa.concat_tables([table(LONG, SHORT), table(SHORT, LONG)]).slice(1, 3)
    (batch,) = cut(rows)
    assert sequences_of(batch) == [[5, 6, 7, 8], [3, 4], [3, 4]]
    assert batch.rows_N.tolist() == [2, 2, 0, 0, 1, 1]


def test_updates_share_the_rows_among_them() -> None:
    rows = table(*[([1], [i], [-0.1], float(i)) for i in range(5)])
    parts = split_updates(rows, updates=2, rows_per_update=0, seed=7)
    assert [part.num_rows for part in parts] == [3, 2]
    assert sorted(np.concatenate([part["advantage"].to_numpy() for part in parts])) == [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
    ]
    assert [
        part.equals(again)
        for part, again in zip(
            parts, split_updates(rows, updates=2, rows_per_update=0, seed=7), strict=True
        )
    ] == [True] * 2
    assert parts[0]["advantage"].to_pylist() != [0.0, 1.0, 2.0], (
        "rows come group by group, so they are shuffled"
    )
    assert split_updates(rows, updates=1, rows_per_update=0, seed=7) == [rows]
    assert [
        part.num_rows for part in split_updates(rows, updates=9, rows_per_update=0, seed=7)
    ] == [1] * 5


def test_updates_of_a_given_size_and_the_rest() -> None:
    rows = table(*[([1], [i], [-0.1], float(i)) for i in range(5)])

    def sizes(rows_per_update: int) -> list[int]:
        return [
            part.num_rows
            for part in split_updates(rows, updates=1, rows_per_update=rows_per_update, seed=7)
        ]

    assert [sizes(n) for n in (1, 2, 3, 4, 5, 9)] == [[1] * 5, [2, 2, 1], [3, 2], [4, 1], [5], [5]]
    parts = split_updates(rows, updates=1, rows_per_update=2, seed=7)
    seen = np.concatenate([part["advantage"].to_numpy() for part in parts])
    assert sorted(seen) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(seen) != sorted(seen), "rows come group by group, so they are shuffled"
    assert [
        part.num_rows for part in split_updates(rows[:0], updates=1, rows_per_update=2, seed=7)
    ] == [0]


def test_a_row_weighs_the_same_in_a_smaller_update() -> None:
    assert share_of_update(88, rows_per_update=256) == 88 / 256
    assert share_of_update(256, rows_per_update=256) == 1.0
    assert share_of_update(88, rows_per_update=0) == 1.0


tokens = st.lists(st.integers(1, 3), min_size=1, max_size=6)
# Per step: whether its prompt repeats all tokens before it, the tokens that it adds, its response.
trajectories = st.lists(
    st.lists(
        st.tuples(st.booleans(), tokens, st.lists(st.integers(1, 3), max_size=4)),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=100)
@given(trajectories, st.randoms(), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_every_response_token_is_predicted_once_after_the_tokens_of_its_own_row(
    drawn: list[list[tuple[bool, list[int], list[int]]]],
    random: Random,
    budget: int,
    ranks: int,
    merge: bool,
) -> None:
    steps, rows = [], []
    for trajectory, played in enumerate(drawn):
        history: list[int] = []
        for step, (repeats, added, response) in enumerate(played):
            prompt = (history if repeats else []) + added
            history = prompt + response
            steps.append((trajectory, step))
            rows.append((prompt, response, [-float(step)] * len(response), float(trajectory)))
    order = list(range(len(rows)))
    random.shuffle(order)
    steps, rows = [steps[i] for i in order], [rows[i] for i in order]
    whole = table(*rows, steps=steps)
    batches = cut(whole, budget, merge_steps=merge, ranks=ranks)
    assert len(batches) % ranks == 0
    seen: dict[int, list[int]] = {}
    for batch in batches:
        assert batch.n_tokens == batch.bounds_Sp1[-1] and batch.n_rows == len(batch.rows_N.unique())
        assert batch.n_tokens <= budget or len(batch.bounds_Sp1) == 2
        for row in batch.rows_N.unique().tolist():
            assert row not in seen
            seen[row] = check_row(
                batch, row, prompt=rows[row][0], trajectory=steps[row][0], step=steps[row][1]
            )
    assert seen == {row: response for row, (_, response, _, _) in enumerate(rows) if response}
    assert sum(len(sequences_of(b)) for b in batches if b.n_rows) == n_sequences(
        rows, steps, merge=merge
    )
    chunked = pa.concat_tables([whole.slice(i, 1) for i in range(whole.num_rows)])
    assert all(
        same(a, b)
        for a, b in zip(batches, cut(chunked, budget, merge_steps=merge, ranks=ranks), strict=True)
    )


def check_row(
    batch: MicroBatch, row: int, *, prompt: list[int], trajectory: int, step: int
) -> list[int]:
    mine = batch.rows_N == row
    at_T = batch.positions_N[mine]
    start = int(batch.bounds_Sp1[torch.searchsorted(batch.bounds_Sp1, at_T[0], right=True) - 1])
    response = batch.response_ids_N[mine].tolist()
    assert torch.equal(at_T, torch.arange(len(response)) + start + len(prompt) - 1)
    assert batch.input_ids_T[start : int(at_T[-1]) + 1].tolist() == prompt + response[:-1]
    assert batch.position_ids_T[start : int(at_T[-1]) + 1].tolist() == list(
        range(len(prompt + response) - 1)
    )
    assert set(batch.advantages_N[mine].tolist()) == {trajectory} and set(
        batch.staleness_N[mine].tolist()
    ) == {row}
    assert set(batch.behaviour_logprobs_N[mine].tolist()) == {-float(step)}
    return response


def n_sequences(
    rows: list[tuple[list[int], list[int], list[float], float]],
    steps: list[tuple[int, int]],
    *,
    merge: bool,
) -> int:
    """Rows with a response, less those that the trajectory's next one repeats."""
    n, before = 0, {}
    for (trajectory, _), (prompt, response, _, _) in sorted(zip(steps, rows, strict=True)):
        if response:
            said = before.get(trajectory)
            n += not (merge and said is not None and prompt[: len(said)] == said)
            before[trajectory] = prompt + response
    return n


def same(a: MicroBatch, b: MicroBatch) -> bool:
    pairs = ((getattr(a, item.name), getattr(b, item.name)) for item in fields(MicroBatch))
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import Config, LearnerConfig, ModelConfig, Shape
from configs.learner_memory import activation_bytes
from learner.data.micro_batch import MicroBatch
from learner.distributed.deepspeed_setup import LOOPBACK, host_ranks
from learner.distributed.sequence_group import SequenceGroup
from learner.model.policy_model import load_policy
from learner.training.step_metrics import UpdateStats
from tests.support.engine_samples import all_trained
from tests.support.forked_ranks import forked_ranks
from tests.support.rank_cases import Place, Result
from tests.support.sequence_cases import (
    HEADS,
    ONE_KEY,
    SIZES,
    STAGES,
    TWO_KEYS,
    USED_LOSSES,
    WINDOW,
    grouped_cases,
    make_bases,
    shared_cases,
)

DEADLINE_S = 600.0  # only for what hangs
Found = dict[Any, Any]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bases(tmp_path_factory.mktemp("bases"))


def spread(bases: Path, out: Path, *, ranks: int) -> list[Found]:
    """Run the cases on `ranks` processes, and return the results of each."""
    store = host_ranks(LOOPBACK)
    arguments = (ranks, f"{LOOPBACK}:{store.port}", bases, out)
    with forked_ranks("tests.support.sequence_cases", ranks, *arguments) as processes:
        assert processes.wait(DEADLINE_S) == 0
    return [
        torch.load(out / f"rank{rank}of{ranks}.pt", weights_only=False) for rank in range(ranks)
    ]


@pytest.fixture(scope="module")
def alone(bases: Path) -> Found:
    place = Place(base=bases, rank=0, ranks=1, address=None)
    return shared_cases(place) | grouped_cases(place)


@pytest.fixture(scope="module")
def shared(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """The results of two ranks that share every micro-batch."""
    return spread(bases, tmp_path_factory.mktemp("two"), ranks=2)


def assert_same_figures(one: UpdateStats, other: UpdateStats) -> None:
    record, expected = asdict(other), asdict(one)
    for values in (record, expected):
        del values["n_tokens_computed"]  # a second group has a filler
    assert record.pop("bad_rows") == expected.pop("bad_rows")
    assert record.pop("tokens") == pytest.approx(expected.pop("tokens"), rel=1e-5, abs=1e-6)
    assert record == pytest.approx(expected, rel=1e-5, abs=1e-6)


def assert_same(one: Result, other: Result) -> None:
    """Gradient, figures and weights are equal up to rounding."""
    assert one.gradient.keys() == other.gradient.keys()
    for name, tensor in one.gradient.items():
        distance = float((tensor - other.gradient[name]).norm())
        assert distance <= 1e-5 * float(tensor.norm()), name
    for one_stats, other_stats in zip(one.stats, other.stats, strict=True):
        assert_same_figures(one_stats, other_stats)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(other.weights[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.shortened
@pytest.mark.parametrize(
    "case", [*(f"stage {stage}" for stage in STAGES), "checkpointed", "untrimmed"]
)
def test_three_updates_give_the_weights_of_one_rank(
    alone: Found, shared: list[Found], case: str
) -> None:
    first: Result = alone["stage 0"]
    assert len(first.stats) == 3 and first.stats[1].kl > 1e-6
    for found in shared:
        assert_same(first, found[case])
        torch.testing.assert_close(
            found[f"{case} scores"], alone["stage 0 scores"], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("case", [ONE_KEY, WINDOW, "one token"])
def test_heads_windows_and_short_sequences(alone: Found, shared: list[Found], case: str) -> None:
    for found in shared:
        assert_same(alone[case], found[case])


@pytest.mark.shortened
@pytest.mark.parametrize("case", [*USED_LOSSES, "adapters"])
def test_a_loss_of_whole_rows_or_updates_sees_all_tokens(
    alone: Found, shared: list[Found], case: str
) -> None:
    for found in shared:
        assert_same(alone[case], found[case])


def test_a_critic_learns_and_values_the_same(alone: Found, shared: list[Found]) -> None:
    for found in shared:
        for one, other in zip(alone["critic"], found["critic"], strict=True):
            assert asdict(other) == pytest.approx(asdict(one), rel=1e-4, abs=1e-6)
        values_N = found["critic values"]
        assert float(values_N.abs().mean()) > 1e-3
        torch.testing.assert_close(values_N, alone["critic values"], rtol=1e-3, atol=1e-5)


def test_a_gradient_not_finite_on_one_rank_is_skipped_on_all(
    alone: Found, shared: list[Found]
) -> None:
    *_, grad_norm = alone["skipped"]
    for found in shared:
        assert found["skipped"] == (True, True, False, pytest.approx(grad_norm, rel=1e-5))


@pytest.mark.shortened
def test_groups_of_ranks_add_up_to_one_gradient(alone: Found, bases: Path, tmp_path: Path) -> None:
    """Four ranks are two groups, then one; 4 ranks have 2 heads of keys, and fillers of a token."""
    for found in spread(bases, tmp_path, ranks=4):
        for shared_by in (2, 4):
            for name, other in found[shared_by].items():
                assert_same(alone[name], other)


def test_the_plan_has_room_for_what_a_rank_keeps(alone: Found, shared: list[Found]) -> None:
    n_tokens = all_trained(16).n_tokens - all_trained(4).n_tokens
    for name, key_values in ((ONE_KEY, 16), (TWO_KEYS, 32)):
        shape = Shape(
            layers=SIZES["num_hidden_layers"],
            hidden=SIZES["hidden_size"],
            heads=HEADS,
            queries=SIZES["hidden_size"],
            key_values=key_values,
            feed_forward=SIZES["intermediate_size"],
            vocabulary=SIZES["vocab_size"],
        )

        def planned(tokens: int, ranks: int, shape: Shape = shape) -> float:
            learner = LearnerConfig(micro_batch_tokens=tokens, ranks=ranks, sequence_parallel=ranks)
            return activation_bytes(Config(model=ModelConfig(), learner=learner), shape)

        for found, ranks in ((alone, 1), (shared[0], 2), (shared[1], 2)):
            of_layers = (planned(2 * n_tokens, ranks) - planned(n_tokens, ranks)) * 2 / 3
            kept = found[f"kept {name}"]
            assert kept / 1.05 <= of_layers <= 1.3 * kept, (name, ranks)
        assert shared[0][f"kept {name}"] < 0.6 * alone[f"kept {name}"]


def test_shares_are_equal_and_cover_every_token() -> None:
    batch = MicroBatch.blank(n_sequences=1, n_tokens=5, n_predicted=4)
    for ranks, wanted in ((2, [[0, 1, 2], [3, 4, 0]]), (4, [[0, 1], [2, 3], [4, 0], [0, 0]])):
        shares = [
            SequenceGroup(group=None, rank=rank, ranks=ranks).share_of(batch)  # type: ignore[arg-type]
            for rank in range(ranks)
        ]
        assert [share.input_ids_K.tolist() for share in shares] == wanted
        n_padding = ranks * len(wanted[0]) - 5
        assert all(share.bounds_Sp1.tolist() == [0, 5, 5 + n_padding] for share in shares)
        assert torch.cat([share.indices_Y for share in shares]).tolist() == [0, 1, 2, 3]
        predicting = [share.input_ids_K[share.positions_Y] for share in shares]
        assert torch.cat(predicting).tolist() == [0, 1, 2, 3]


def test_heads_that_ranks_cannot_divide_are_refused(bases: Path) -> None:
    policy = load_policy(
        bases / TWO_KEYS, dtype="float32", gradient_checkpointing=False, temperature=1.0
    )
    three = SequenceGroup(group=None, rank=0, ranks=3)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="sequence_parallel=3 cannot divide the 4 attention heads of Llama"
    ):
        policy.share_tokens(three)

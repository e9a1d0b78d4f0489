from __future__ import annotations

import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from actors.inference.broadcast_receiver import Receiver
from configs import Config, LearnerConfig, ModelConfig
from learner import RankError
from learner.checkpoint import load_checkpoint
from learner.distributed.deepspeed_setup import GROUP_TIMEOUT, LOOPBACK, host_ranks, join_ranks
from learner.files.write_behind import WriteBehind
from learner.model.lora import add_adapters, merged, read_adapter
from learner.rank_group import RankDiedError, RankGroup
from learner.training.engine import Engine
from learner.training.step_metrics import UpdateStats, gathered
from store import RunLayout, broadcast, check_adapter, files_digest, tensor_shapes, weight_files
from tests.support.engine_samples import (
    CUT,
    assert_first_step_same,
    copied,
    cut,
    far_rows,
    make_base,
    random_rows,
)
from tests.support.forked_ranks import forked_ranks
from tests.support.rank_cases import (
    ADAPTED,
    CUT_AT,
    CUTS,
    LEARNER,
    LOSSES,
    MAIN_STAGES,
    SHARED,
    STAGES,
    VALUED,
    WRECKED,
    Place,
    Result,
    results,
)

DEADLINE_S = 600.0  # only for what hangs
Found = dict[str, Any]
# Rank 0 of two, whose other rank is a stranger. It prints its errors.
RANK_0 = """
import sys
import torch
from learner.distributed.deepspeed_setup import from_all_ranks, join_ranks, tensors_from_all_ranks
join_ranks(0, ranks=2, address=sys.argv[1])
for gather, mine in ((from_all_ranks, "mine"), (tensors_from_all_ranks, [torch.ones(3)])):
    try:
        print(f"received {gather(mine, ranks=2)}")
    except Exception as error:
        print(type(error).__name__, flush=True)
"""
# It knows the port alone, finds the other's secret among the keys, and sends a program.
STRANGER = """
import os, sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
while not (keys := [key for key in store.list_keys() if "/" in key]):
    time.sleep(0.01)
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.PrefixStore(keys[0].partition("/")[0], store)
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
class Program:
    def __reduce__(self):
        return open, (sys.argv[2], "w")
for _ in range(2):
    try:
        dist.all_gather_object([None, None], Program())
    except Exception as error:
        print(error, file=sys.stderr)  # torch cannot read what rank 0 sent
time.sleep(600)  # an end may reset the connection before rank 0 has read all; it is killed
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def spread(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found, Found]:
    """The results of one rank, and of rank 0 and rank 1 of two."""
    out = tmp_path_factory.mktemp("ranks")
    store = host_ranks(LOOPBACK)
    address = f"{LOOPBACK}:{store.port}"
    with forked_ranks("tests.support.rank_cases", 2, address, base, out) as ranks:
        alone = results(Place(base=base, rank=0, ranks=1, address=None))
        assert ranks.wait(DEADLINE_S) == 0
    return alone, *(torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2))


def far_apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest relative distance of any tensor from the one of the same name."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in one)


def assert_same(one: UpdateStats, other: UpdateStats, *, tokens_computed: bool) -> None:
    record, expected = asdict(other), asdict(one)
    for values in (record, expected):
        values["tokens"] = dict(values["tokens"])
        if not tokens_computed:
            del values["n_tokens_computed"]
    tokens, expected_tokens = record.pop("tokens"), expected.pop("tokens")
    assert record.pop("bad_rows") == expected.pop("bad_rows")
    assert record == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert tokens == pytest.approx(expected_tokens, rel=1e-5, abs=1e-6)


@pytest.mark.shortened
def test_the_gradient_does_not_depend_on_packing_cut_ranks_or_stage(
    spread: tuple[Found, Found, Found],
) -> None:
    first: Result = spread[0][f"cut 0 {CUTS[0][0]} {CUTS[0][1]}"]
    assert first.stats[0].grad_norm > LEARNER.grad_clip, (
        "clipped, so that the norm is part of what is compared"
    )
    for found in spread:
        for stage, tokens, merge_steps in CUT_AT:
            other: Result = found[f"cut {stage} {tokens} {merge_steps}"]
            case = (stage, tokens, merge_steps)
            assert far_apart(first.gradient, other.gradient) < 1e-5, case
            assert_same(first.stats[0], other.stats[0], tokens_computed=False)
    norm = math.sqrt(
        sum(float(tensor.double().square().sum()) for tensor in first.gradient.values())
    )
    assert norm == pytest.approx(LEARNER.grad_clip, rel=1e-4)


def test_weights_are_those_of_stage_0_by_the_same_names_and_shapes(
    spread: tuple[Found, Found, Found],
) -> None:
    first: Result = spread[0][f"cut 0 {CUTS[0][0]} {CUTS[0][1]}"]
    for found in spread:
        for stage in STAGES:
            weights = found[f"cut {stage} {CUTS[0][0]} {CUTS[0][1]}"].weights
            assert {name: (t.shape, t.dtype) for name, t in weights.items()} == {
                name: (t.shape, t.dtype) for name, t in first.weights.items()
            }
            assert_first_step_same(
                weights, first.weights, first.gradient, learning_rate=LEARNER.learning_rate
            )


@pytest.mark.parametrize("name", LOSSES)
def test_a_correction_of_a_whole_update_has_the_tokens_of_all_ranks(
    spread: tuple[Found, Found, Found], name: str
) -> None:
    alone, *others = (found[f"loss {name}"] for found in spread)
    if name in ("m2po", "interpolated"):
        assert 0.0 < alone.stats[0].tokens["masked_fraction"] < 1.0, "the mask has something to do"
    if name == "recomputed":
        assert (
            alone.stats[0].tokens["clip_fraction"] == 0.0 < alone.stats[1].tokens["clip_fraction"]
        )
    for other in others:
        assert far_apart(alone.gradient, other.gradient) < 1e-5
        assert_same(alone.stats[0], other.stats[0], tokens_computed=True)


@pytest.mark.shortened
@pytest.mark.parametrize("stage", MAIN_STAGES)
def test_an_update_not_finite_on_one_rank_is_skipped_on_all(
    spread: tuple[Found, Found, Found], stage: int
) -> None:
    for found in spread:
        skipped, no_gradient, after, kept, bad_rows, gradient = found[f"skip {stage}"]
        assert (skipped.loss, skipped.grad_norm, skipped.skipped, skipped.bad_rows) == (
            math.inf,
            math.inf,
            True,
            bad_rows,
        )
        assert kept
        assert (no_gradient.grad_norm, no_gradient.skipped, no_gradient.bad_rows) == (
            math.inf,
            True,
            (),
        )
        assert math.isfinite(no_gradient.loss)
        assert not after.skipped
        assert after.learning_rate == skipped.learning_rate, (
            "a skipped update does not count in the warm-up"
        )
        assert far_apart(spread[0]["skip 0"][-1], gradient) < 1e-5, (
            "nothing of the bad gradients stayed"
        )


@pytest.mark.shortened
@pytest.mark.parametrize("stage", MAIN_STAGES)
def test_a_rank_without_rows_takes_part(spread: tuple[Found, Found, Found], stage: int) -> None:
    first: Result = spread[0]["one row 0"]
    for found in spread:
        other: Result = found[f"one row {stage}"]
        assert far_apart(first.gradient, other.gradient) < 1e-5
        assert_same(first.stats[0], other.stats[0], tokens_computed=False)


@pytest.mark.shortened
@pytest.mark.parametrize(("stage", "dtype"), SHARED)
def test_offloaded_updates_are_the_same_also_after_a_bad_one(
    spread: tuple[Found, Found, Found], stage: int, dtype: str
) -> None:
    for found in spread:
        (
            (here, here_weights, n_here, kept_here, bad_rows),
            (away, away_weights, n_away, kept_away, _),
        ) = (found[f"offload {stage} {dtype} {offload}"] for offload in (False, True))
        assert n_here == n_away == 2 and kept_here and kept_away
        # A remainder of the bad gradient would make the next one bad too, or larger than at another
        # stage.
        assert here[2].grad_norm == pytest.approx(
            spread[0]["offload 1 float32 False"][0][2].grad_norm, rel=0.02
        )
        assert [stats.skipped for stats in away] == [False, True, False]
        assert (
            [stats.bad_rows for stats in here]
            == [stats.bad_rows for stats in away]
            == [(), bad_rows, ()]
        )
        assert [stats.grad_norm for stats in away] == pytest.approx(
            [stats.grad_norm for stats in here], rel=1e-5
        )
        for name, tensor in away_weights.items():
            # its true gradient is 0, so that Adam steps by what rounding left
            if name.endswith("k_proj.bias"):
                continue
            # The norm that clips is a sum in another order; in bfloat16 that may round a weight to
            # its neighbour.
            relative = torch.finfo(tensor.dtype).eps if dtype == "bfloat16" else 0.0
            torch.testing.assert_close(
                tensor, here_weights[name], rtol=relative, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("stage", ADAPTED)
def test_adapters_learn_the_same_on_two_ranks(
    spread: tuple[Found, Found, Found], stage: int
) -> None:
    first: Result = spread[0]["adapters 0"]
    assert first.stats[0].kl == pytest.approx(0.0, abs=1e-6) and first.stats[1].kl > 1e-6, (
        "they have begun as the base model"
    )
    for found in spread:
        other: Result = found[f"adapters {stage}"]
        assert all(
            (".lora_A." in name) == (not tensor.any()) for name, tensor in other.gradient.items()
        )
        nonzero = [
            {name: tensor for name, tensor in r.gradient.items() if tensor.any()}
            for r in (first, other)
        ]
        assert far_apart(*nonzero) < 1e-5
        for one_stats, other_stats in zip(first.stats, other.stats, strict=True):
            assert_same(one_stats, other_stats, tokens_computed=False)
        for name, tensor in other.weights.items():
            torch.testing.assert_close(tensor, first.weights[name], rtol=0, atol=1e-4, msg=name)


@pytest.mark.shortened
@pytest.mark.parametrize(("stage", "lora_rank"), VALUED)
def test_a_critic_learns_the_same_on_two_ranks(
    spread: tuple[Found, Found, Found], stage: int, lora_rank: int
) -> None:
    first, (policy,), first_values_N, _ = spread[0][f"critic 0 {lora_rank}"]
    for found in spread:
        stats, (other_policy,), values_N, again = found[f"critic {stage} {lora_rank}"]
        for one, other in zip(first, stats, strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-4)
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
        assert_same(policy, other_policy, tokens_computed=False)
        assert values_N == pytest.approx(first_values_N, rel=2e-2, abs=1e-3)
        assert np.abs(values_N).mean() > 0.01 and again


def test_a_policy_that_an_update_wrecked_is_refused_on_every_rank(
    spread: tuple[Found, Found, Found],
) -> None:
    for found in spread:
        assert [
            found[f"wrecked {stage} {dtype} {rate:g}"] for stage, dtype, rate, _ in WRECKED
        ] == [True] * len(WRECKED)


def test_the_learning_rate_is_scaled_by_the_effective_sample_size(
    spread: tuple[Found, Found, Found],
) -> None:
    for found in spread:
        (stats,) = found["ess_scaled"].stats
        assert stats.learning_rate == pytest.approx(
            LEARNER.learning_rate * stats.tokens["ess"], rel=1e-5
        )
        assert 0.2 < stats.tokens["ess"] < 0.9


def test_figures_of_all_ranks_come_in_the_order_of_the_micro_batches() -> None:
    batches = cut(random_rows(), CUT)
    figures = [
        torch.full((6, batch.n_response_tokens), float(index))
        for index, batch in enumerate(batches)
    ]
    assert len(batches) > 2
    for index, figures_6N in enumerate(gathered(figures, batches, ranks=1)):
        assert figures_6N.tolist() == figures[index].tolist()


def test_a_stranger_who_takes_the_place_of_a_rank_runs_nothing_in_another(tmp_path: Path) -> None:
    """Every user of the machine reaches the rendezvous, which lists its keys."""
    store, ran = host_ranks(LOOPBACK), tmp_path / "ran"
    address = str(broadcast.Address.new(LOOPBACK, store.port))
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(store.port), str(ran)])
    try:
        command = [sys.executable, "-c", RANK_0, address]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    finally:
        stranger.kill()
    assert done.stdout.splitlines() == ["UnicodeDecodeError", "SafetensorError"], (
        "it got what the stranger sent"
    )
    assert not ran.exists()


def test_work_that_cannot_be_shared_is_refused(
    spread: tuple[Found, Found, Found], base: Path
) -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 1 already and cannot become rank 1 of 2"):
        join_ranks(1, ranks=2, address="127.0.0.1:1")
    with Place(base=base, rank=0, ranks=1, address=None).engine() as engine:
        engine.groups = 2
        with pytest.raises(ValueError, match="3 micro-batches cannot be shared by 2 ranks"):
            engine.update(cut(random_rows(), CUT)[:3])


def test_only_the_address_asked_for_takes_connections() -> None:
    store = host_ranks(LOOPBACK)
    socket.create_connection((LOOPBACK, store.port), timeout=DEADLINE_S).close()
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", store.port), timeout=DEADLINE_S)


def gather_merged(engine: Engine) -> None:
    """Take part in gathering the whole weights, also of a model with adapters."""
    for _ in engine.weights():
        pass


class Held(RankGroup):
    """Ranks in an actor of its own, as the learner has them."""

    def kill_other(self) -> None:
        ray.kill(self.peers[0])

    def other_fails(self) -> None:
        self._run_on_all(lambda: None, load_checkpoint, Path("nowhere"))

    def other_fails_while_this_one_waits_for_it(self, updates: Any) -> None:
        """It stays alive, so nothing but its answer says that it will never come to the
        collective.
        """
        self._run_on_all(lambda: self.engine.train(updates), Engine.train, [[]])

    def trained_while_written(self, directory: Path, updates: Any) -> Any:
        """Copy a checkpoint, and write it in a thread once the next update has begun."""
        self.copy_checkpoint(learner_step=1, version=1, lsn=5)
        behind = WriteBehind()
        with behind.finishing():
            behind.start(partial(self.write_checkpoint, directory))
            return self.train(updates)

    def address(self) -> str:
        assert self.broadcast is not None
        return self.broadcast.address

    def n_joined(self) -> int:
        assert self.broadcast is not None
        return self.broadcast._store.add("joined", 0)

    def updates_done(self) -> int:
        return self.engine.n_updates

    def weights(self) -> dict[str, torch.Tensor]:
        return self._run_on_all(lambda: copied(self.engine), gather_merged)


@pytest.fixture
def local_ray() -> Iterator[None]:
    # Ray's processes import `Held` from this module
    repository = str(Path(__file__).resolve().parents[2])
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        logging_level="ERROR",
        object_store_memory=100_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": repository}},
    )
    yield
    ray.shutdown()


@pytest.mark.slow
def test_two_ranks_at_zero_3_publish_whole_adapters(
    base: Path, tmp_path: Path, local_ray: None
) -> None:
    learner = LearnerConfig(learning_rate=1e-2, zero_stage=3, ranks=2)
    model = ModelConfig(path=str(base), lora_rank=2, lora_alpha=4.0)
    config = Config(run_dir=str(tmp_path / "run"), model=model, learner=learner)
    RunLayout.create(tmp_path / "run", config_yaml="")
    ranks = ray.remote(Held).options(num_cpus=0).remote(config, model_path=str(base))
    parts = [cut(far_rows(), CUT, ranks=2)]
    ray.get(ranks.train.remote(parts), timeout=DEADLINE_S)
    digest = ray.get(ranks.copy_weights.remote(), timeout=DEADLINE_S)
    version = tmp_path / "v1"
    ray.get(ranks.write_weights.remote(version), timeout=DEADLINE_S)
    assert digest == files_digest([version / "adapter_model.safetensors"])
    check_adapter(
        version,
        rank=2,
        alpha=4.0,
        base_shapes=tensor_shapes(base),
        base_digest=files_digest(weight_files(base)),
    )
    # The merged weights are those of the same model, gathered from both ranks.
    weights = ray.get(ranks.weights.remote(), timeout=DEADLINE_S)
    causal_lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    add_adapters(causal_lm, rank=2, alpha=4.0)
    read_adapter(causal_lm, version)
    again = dict(merged(causal_lm))
    assert again.keys() == weights.keys()
    for name, tensor in again.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)
    plain = load_file(base / "model.safetensors")
    assert any(not torch.equal(plain[name], tensor) for name, tensor in weights.items())


def test_two_ranks_through_ray_are_one_learner(base: Path, tmp_path: Path, local_ray: None) -> None:
    learner = LearnerConfig(
        learning_rate=1e-2, grad_clip=0.1, zero_stage=3, ranks=2, transfer="broadcast"
    )
    config = Config(
        run_dir=str(tmp_path / "run"), model=ModelConfig(path=str(base)), learner=learner
    )
    layout = RunLayout.create(tmp_path / "run", config_yaml="")
    ranks = ray.remote(Held).options(num_cpus=0).remote(config, model_path=str(base))
    parts = [cut(far_rows(), CUT, ranks=2), cut(random_rows(), CUT, ranks=2)]
    stats = ray.get(ranks.train.remote(parts), timeout=DEADLINE_S)
    address = ray.get(ranks.address.remote(), timeout=DEADLINE_S)
    receiver = Receiver(address, device=torch.device("cpu"), asks=False)
    while not ray.get(ranks.n_joined.remote(), timeout=DEADLINE_S):
        time.sleep(0.01)
    digest = ray.get(ranks.copy_weights.remote(), timeout=DEADLINE_S)
    ray.get(ranks.write_weights.remote(tmp_path / "v1"), timeout=DEADLINE_S)
    published, weights = (
        load_file(tmp_path / "v1" / "model.safetensors"),
        ray.get(ranks.weights.remote(), timeout=DEADLINE_S),
    )
    assert digest == files_digest([tmp_path / "v1" / "model.safetensors"])
    assert published.keys() == weights.keys()
    assert [name for name in weights if not torch.equal(published[name], weights[name])] == []
    while receiver.is_busy:
        time.sleep(0.01)
    received = receiver.take(digest)
    assert received is not None
    assert {name: tensor.shape for name, tensor in received.tensors()} == {
        n: t.shape for n, t in published.items()
    }
    assert [
        name for name, tensor in received.tensors() if not torch.equal(published[name], tensor)
    ] == []
    receiver.close()

    engine = Engine(
        model_path=base,
        model=config.model,
        learner=replace(learner, ranks=1),
        loss=config.loss,
        temperature=config.actors.temperature,
        seed=config.seed,
    )
    for here, there in zip(engine.train(parts), stats, strict=True):
        assert_same(here, there, tokens_computed=True)
    assert ray.get(ranks.updates_done.remote()) == engine.n_updates == 2
    alone = copied(engine)
    assert published.keys() == alone.keys()
    for name, tensor in published.items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-4, msg=name)
    engine.close()
    assert (layout.logs / "learner-rank1.log").exists()

    after = ray.get(ranks.trained_while_written.remote(tmp_path / "c", parts), timeout=DEADLINE_S)
    assert (
        ray.get(ranks.load_checkpoint.remote(tmp_path / "c"), timeout=DEADLINE_S).learner_step == 1
    )
    assert ray.get(ranks.train.remote(parts), timeout=DEADLINE_S) == after

    with pytest.raises(RayTaskError, match="at least one response token"):
        ray.get(ranks.train.remote([[]]), timeout=DEADLINE_S)
    with pytest.raises(
        RankError, match="rank 1 of the learner failed: nowhere is not a whole checkpoint"
    ):
        ray.get(ranks.other_fails.remote(), timeout=DEADLINE_S)
    assert GROUP_TIMEOUT.total_seconds() > DEADLINE_S, (
        "it is not the group's time-out that ends the wait"
    )
    with pytest.raises(
        RankError,
        match="rank 1 of the learner failed: .*at least one response token.*learner-rank1.log",
    ):
        ray.get(ranks.other_fails_while_this_one_waits_for_it.remote(parts), timeout=DEADLINE_S)
    ray.get(ranks.kill_other.remote())
    with pytest.raises(
        RankDiedError, match="rank 1 of the learner died; its last output is in .*learner-rank1.log"
    ):
        ray.get(ranks.train.remote(parts), timeout=DEADLINE_S)
    ray.get(ranks.close.remote(), timeout=DEADLINE_S)

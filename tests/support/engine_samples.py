"""A tiny model, rows for it and what is read off an engine, for the tests of the engine and of its
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state

from configs import TinyModelConfig
from learner.checkpoint import Files, copy_checkpoint, write_checkpoint, write_files
from learner.data.micro_batch import MicroBatch, micro_batches
from learner.distributed.deepspeed_setup import ADAM_BETAS, ADAM_EPSILON, from_all_ranks
from learner.distributed.optimizer_state import trainable
from learner.model.policy_model import PolicyModel
from learner.model.tiny_model import make_tiny_model, train_tokenizer
from learner.training.engine import Engine
from tests.support.learner_samples import one_step_each, table

WHOLE, CUT = 100_000, 40  # micro-batch budgets: everything at once, two or three rows at a time
LENGTHS = (3, 20)  # of random prompts


def make_base(path: Path, *, seed: int = 0) -> Path:
    config = TinyModelConfig(vocabulary_size=280, hidden_size=64, layers=2)
    make_tiny_model(
        path,
        tokenizer=train_tokenizer(["go north"] * 9, vocabulary_size=280),
        config=config,
        seed=seed,
    )
    return path


def random_rows(n_rows: int = 8, *, seed: int = 0) -> pa.Table:
    """Return random rows of trajectories with one step each, none longer than CUT."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(8, 264, (length,), generator=generator).tolist()

    responses = [ids(1, 6) for _ in range(n_rows)]
    return _table(
        prompts=[ids(*LENGTHS) for _ in range(n_rows)],
        responses=responses,
        logprobs=[[-5.6] * len(response) for response in responses],
        advantages=torch.randn(n_rows, generator=generator).tolist(),
        steps=[(row, 0) for row in range(n_rows)],
    )


def far_rows() -> pa.Table:
    """Rows whose behaviour log-probabilities are far enough off that every correction has something
    to do.
    """
    rows = random_rows(12, seed=3)
    generator = torch.Generator().manual_seed(4)
    lengths = [len(ids) for ids in rows["response_ids"].to_pylist()]
    drawn = [(-5.6 + 0.6 * torch.randn(n, generator=generator)).tolist() for n in lengths]
    index = rows.column_names.index("response_logprobs")
    return rows.set_column(index, "response_logprobs", pa.array(drawn, pa.list_(pa.float32())))


def history_rows() -> pa.Table:
    """Five trajectories of three steps whose prompts are all that was said before: each merges into
    one sequence.
    """
    rows = random_rows(15, seed=5).to_pydict()
    for row in range(15):
        rows["traj_uid"][row] = bytes([row // 3]) * 16
        if row % 3:
            rows["prompt_ids"][row] = (
                rows["prompt_ids"][row - 1]
                + rows["response_ids"][row - 1]
                + rows["prompt_ids"][row][:3]
            )
    return _table(
        prompts=rows["prompt_ids"],
        responses=rows["response_ids"],
        logprobs=rows["response_logprobs"],
        advantages=rows["advantage"],
        steps=[divmod(row, 3) for row in range(15)],
    )


def all_trained(n_rows: int) -> MicroBatch:
    """Return rows whose tokens are nearly all trained on, so that the last layer keeps them too."""
    rows = table(*[([5], [6] * 63, [-1.0] * 63, 1.0) for _ in range(n_rows)])
    (batch,) = micro_batches(rows, micro_batch_tokens=64 * n_rows, ranks=1)
    return batch


def kept_bytes(policy: PolicyModel, batch: MicroBatch) -> int:
    """Return the bytes of all tensors that the backward pass of this batch will read."""
    own = {each.untyped_storage().data_ptr() for each in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        results = policy(batch)
    assert all(result.requires_grad for result in results)
    return sum(kept.values())


def with_places(rows: pa.Table) -> pa.Table:
    """Append what an estimator of tokens reads: values of 0, and the place of each token in its
    response as its advantage and its target.
    """
    places = [[float(t) for t in range(len(ids))] for ids in rows["response_ids"].to_pylist()]
    zeros = [[0.0] * len(of_row) for of_row in places]
    for name, numbers in (("value", zeros), ("advantage", places), ("value_target", places)):
        rows = rows.append_column(f"token_{name}", pa.array(numbers, pa.list_(pa.float64())))
    return rows


def _table(
    *,
    prompts: list[list[int]],
    responses: list[list[int]],
    logprobs: list[list[float]],
    advantages: list[float],
    steps: list[tuple[int, int]],
) -> pa.Table:
    return pa.table(
        {
            "traj_uid": pa.array(
                [bytes([trajectory]) * 16 for trajectory, _ in steps], pa.binary(16)
            ),
            "step_index": pa.array([step for _, step in steps], pa.int32()),
            "prompt_ids": pa.array(prompts, pa.list_(pa.int32())),
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
            "response_logprobs": pa.array(logprobs, pa.list_(pa.float32())),
            "advantage": pa.array(advantages, pa.float64()),
            "staleness": pa.array([row % 3 for row in range(len(prompts))], pa.int64()),
        }
    )


def cut(
    rows: pa.Table, tokens: int, *, ranks: int = 1, merge_steps: bool = False
) -> list[MicroBatch]:
    rows = rows if merge_steps else one_step_each(rows)
    return micro_batches(rows, micro_batch_tokens=tokens, ranks=ranks)


def copied(engine: Engine) -> dict[str, torch.Tensor]:
    """The weights as they are now; all ranks together."""
    return {name: tensor.clone() for name, tensor in engine.weights()}


def assert_first_step_same(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    *,
    learning_rate: float,
) -> None:
    """Weights after a first update, each of them, up to what rounding of its gradient explains.

    Adam's first step is learning_rate g / (|g| + eps). Sums in another order change g by less than
    1e-8 here, which is nothing to a step of most weights, and all of it where g itself is rounding:
    of a key's bias, whose true gradient is 0.
    """
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        allowed = 1e-6 + learning_rate * 1e-8 / (gradients[name].abs() + ADAM_EPSILON)
        assert ((tensor - other[name]).abs() <= allowed).all(), name


def gradient(engine: Engine) -> dict[str, torch.Tensor]:
    """After the first update of its life: the clipped gradient as Adam saw it, read off its first
    moment.
    """
    found = {}
    for name, parameter in trainable(engine.policy.causal_lm).items():
        if engine.deepspeed.zero_optimization():
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
        else:
            moment = engine.deepspeed.optimizer.state[parameter]["exp_avg"]
        found[name] = moment.detach().clone() / (1.0 - ADAM_BETAS[0])
    return found


def save_checkpoint(
    engine: Engine, dest: Path, *, learner_step: int, version: int, lsn: int
) -> None:
    """Copy and write a checkpoint, on all ranks together, without Ray.

    Other ranks than 0 return when all files are written, and do not wait for the disk.
    """
    copy = copy_checkpoint(engine, learner_step=learner_step, version=version, lsn=lsn)
    if engine.ranks == 1:
        write_checkpoint(copy, dest, others=list)
        return

    def of_others() -> list[Files]:
        _, *others = from_all_ranks([], ranks=engine.ranks)
        return [Files(**files) for of_rank in others for files in of_rank]

    def others() -> list[Callable[[], list[Files]]]:
        dist.barrier()  # the directory is there
        return [of_others]

    if engine.rank == 0:
        write_checkpoint(copy, dest, others=others)
    else:
        dist.barrier()
        files = [asdict(one) for one in write_files(copy, dest)]
        from_all_ranks(files, ranks=engine.ranks)

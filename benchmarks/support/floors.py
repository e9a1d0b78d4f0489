"""Measure each part of a run alone: CPU milliseconds per agent step; for `budget.py`.

    measure_floors(run_dir, policy=policy, n_groups=32)    # {"engine_floor_ms": 1.2, ...}

The same model, prompts, answers, actions and groups as in the run, each part in a loop of its own,
without processes, messages and an event loop:

engine        plain transformers sampling of batches as large as the engine's
worker        tokenise the prompts, decode the answers, write the groups' Parquet files
environment   reset the tasks and carry out the recorded actions
learner       one update with all groups: pack, forward, backward, AdamW. The run's learner leaves
              out the groups that are filtered or stale, so it may take less
coordinator   lease, commit, claim and settle the groups
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from support.learner_contenders import Learner
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import configs
from configs import Config
from coordinator import Coordinator, Lease, Settlement
from envs import environment_class, list_tasks
from store import (
    SEGMENT_SCHEMA,
    RunLayout,
    SegmentMeta,
    TrajectoryMeta,
    VersionRecord,
    uid,
    write_open_sql,
)
from store.segments import write_rows

MS_PER_S = 1e3


class CpuClock:
    """Sum up the CPU seconds of this process within `with clock.running():`."""

    def __init__(self) -> None:
        self._cpu_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begun_s = time.process_time()
        yield
        self._cpu_s += time.process_time() - begun_s

    def ms_per(self, n: int) -> float:
        return self._cpu_s / n * MS_PER_S


def measure_floors(run_dir: Path, *, policy: Path, n_groups: int) -> dict[str, float]:
    """Return the floors of a run that has ended. The environment's steps include its resets."""
    torch.set_num_threads(1)
    config = configs.from_yaml(RunLayout.open(run_dir).info.config_yaml)
    files = run_dir.glob("segments/**/*.parquet")
    whole = pa.concat_tables(pq.ParquetFile(file).read().cast(SEGMENT_SCHEMA) for file in files)
    newest = whole.sort_by([("t_start", "descending")])["group_uid"].unique()[:n_groups]
    groups = [whole.filter(pc.equal(whole["group_uid"], group_uid)) for group_uid in newest]
    rows = pa.concat_tables(groups)
    return {
        "engine_floor_ms": engine_floor(policy, rows, config),
        "worker_floor_ms": worker_floor(policy, groups),
        "env_floor_ms": environment_floor(rows, config),
        "learner_floor_ms": learner_floor(policy, rows, config),
        "coordinator_floor_ms": coordinator_floor(groups, config),
    }


def engine_floor(policy: Path, rows: pa.Table, config: Config) -> float:
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    n_requests = config.actors.groups_in_flight * config.algorithm.group_size
    prompts = [torch.tensor(ids) for ids in rows["prompt_ids"].to_pylist()]
    lengths = torch.tensor(pc.list_value_length(rows["response_ids"]).to_pylist())
    clock = CpuClock()
    for begin in range(0, len(prompts), n_requests):
        batch = slice(begin, begin + n_requests)
        with clock.running():
            sample(model, prompts[batch], lengths[batch])
    return clock.ms_per(len(prompts))


@torch.inference_mode()
def sample(model: Any, prompts: Sequence[torch.Tensor], lengths_B: torch.Tensor) -> None:
    """Sample as many tokens after each prompt as given, and look up their log-probabilities."""
    ones = [torch.ones_like(ids) for ids in prompts]
    ids_BT = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    mask_BT = pad_sequence(ones, batch_first=True, padding_side="left")
    cache = DynamicCache()
    while len(lengths_B):
        output = model(ids_BT, attention_mask=mask_BT, past_key_values=cache, logits_to_keep=1)
        logprobs_BV = output.logits[:, -1].log_softmax(-1)
        ids_BT = torch.multinomial(logprobs_BV.exp(), 1)
        logprobs_BV.gather(1, ids_BT)
        mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], dim=1)
        lengths_B = lengths_B - 1
        if not lengths_B.all():  # some have ended
            going = lengths_B.nonzero().flatten()
            ids_BT, mask_BT, lengths_B = ids_BT[going], mask_BT[going], lengths_B[going]
            cache.batch_select_indices(going)


def worker_floor(policy: Path, groups: Sequence[pa.Table]) -> float:
    tokenizer = AutoTokenizer.from_pretrained(policy).backend_tokenizer
    clock, n_steps = CpuClock(), 0
    with tempfile.TemporaryDirectory() as name:
        layout = RunLayout.create(Path(name), config_yaml=configs.as_yaml(Config(run_dir=name)))
        for group in groups:
            n_steps += group.num_rows
            responses = group["response_ids"].to_pylist()
            texts = [
                tokenizer.decode(ids, skip_special_tokens=False)
                for ids in group["prompt_ids"].to_pylist()
            ]
            with clock.running():
                for text, response in zip(texts, responses, strict=True):
                    tokenizer.encode(text, add_special_tokens=False)
                    tokenizer.decode(response, skip_special_tokens=False)
                write_rows(layout, group, trajectories=(), worker="alone", epoch=1)
    return clock.ms_per(n_steps)


def environment_floor(rows: pa.Table, config: Config) -> float:
    env = config.env
    environment = environment_class(env.name)(env.options)
    tasks = {task.id: task for task in list_tasks(env.name, env.options)["train"]}
    steps = rows.select(["task_id", "step_index", "action_text"]).to_pylist()
    clock = CpuClock()
    with clock.running():
        for step in steps:
            if step["step_index"] == 0:
                environment.reset(tasks[step["task_id"]])
            environment.step(step["action_text"])
    environment.close()
    return clock.ms_per(len(steps))


def learner_floor(policy: Path, rows: pa.Table, config: Config) -> float:
    rng = np.random.default_rng(0)
    columns = ["traj_uid", "step_index", "prompt_ids", "response_ids", "response_logprobs"]
    trained = rows.select(columns)
    trained = trained.append_column("advantage", pa.array(rng.normal(size=rows.num_rows)))
    trained = trained.append_column("staleness", pa.array(np.zeros(rows.num_rows, np.int64)))
    learner = Learner(
        policy,
        trained,
        pass_tokens=config.learner.micro_batch_tokens,
    )
    learner.update()  # the first one allocates
    clock = CpuClock()
    with clock.running():
        learner.update()
    return clock.ms_per(rows.num_rows)


def coordinator_floor(groups: Sequence[pa.Table], config: Config) -> float:
    """Play the life of as many groups as there are, whose segments are only described."""
    clock = CpuClock()
    with tempfile.TemporaryDirectory() as name:
        config = replace(config, run_dir=name)
        layout = RunLayout.create(Path(name), config_yaml=configs.as_yaml(config))
        write_open_sql(layout, macros=(), max_staleness=config.max_staleness)
        coordinator = Coordinator(config, learns=True)
        try:
            with clock.running():
                n_settled = run_groups(coordinator, len(groups), config)
        finally:
            coordinator.close()
    return clock.ms_per(sum(group.num_rows for group in groups[:n_settled]))


def run_groups(coordinator: Coordinator, n_groups: int, config: Config) -> int:
    """Lease, commit, claim and settle groups, a batch at a time; return how many."""
    n_done = 0
    for step in range(n_groups // config.learner.groups_per_step):
        record = VersionRecord(
            version=step, path=f"weights/v{step}", digest="described", learner_step=step
        )
        coordinator.publish(record)
        for _ in range(config.learner.groups_per_step):
            lease = coordinator.lease("worker-0")
            assert lease is not None, "a batch is claimed before the next one is leased"
            coordinator.commit(described(lease, coordinator.layout), lease.epoch)
            n_done += 1
        batch = coordinator.claim(step)
        assert batch is not None, "it was just committed"
        coordinator.settle(
            Settlement(
                batch_id=batch.batch_id,
                learner_step=step + 1,
                filtered={},
                version_in=step,
                metrics={},
            )
        )
    return n_done


def described(lease: Lease, layout: RunLayout) -> SegmentMeta:
    group = lease.group
    metas = tuple(
        TrajectoryMeta(
            traj_uid=uid(group.group_uid, member),
            group_uid=group.group_uid,
            member=member,
            n_steps=1,
            episode_return=0.0,
            won=False,
            task_score=None,
            invalid_steps=0,
            version_min=lease.version.version,
            version_max=lease.version.version,
        )
        for member in group.missing
    )
    name = group.group_uid.hex()
    return SegmentMeta(
        segment_id=name,
        path=layout.relative(layout.segment(worker=lease.worker, segment_id=name)),
        digest=name,
        n_steps=len(metas),
        n_bytes=1,
        worker=lease.worker,
        trajectories=metas,
    )

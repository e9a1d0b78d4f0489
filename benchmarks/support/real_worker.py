"""A real worker with a real engine in Ray, fed by a real coordinator, and what it asked its engine
for; for `rollout.py`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from support.raw_vllm import Request

import configs
from actors import WorkerActor, WorkerSetup
from actors.rollout.episode import request_seed
from configs import Config
from coordinator import CoordinatorActor
from store import (
    RunLayout,
    VersionRecord,
    files_digest,
    read_segments,
    weight_files,
    write_open_sql,
)

ANSWER_TIMEOUT_S = 600.0
POLL_S = 0.2
COLUMNS = ("group_uid", "traj_uid", "step_index", "prompt_ids", "response_ids", "t_start", "gen_us")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    tokens_per_s: float
    requests: list[Request]  # in the order they were made


class RealWorker:
    """`turn()` has it play one batch of groups, as fast as it can; between turns admission is
    closed and it waits.
    """

    def __init__(self, config: Config, model_path: Path) -> None:
        self.config, self.model_path = config, model_path
        self.layout = RunLayout.create(Path(config.run_dir), config_yaml=configs.as_yaml(config))
        write_open_sql(self.layout, macros=(), max_staleness=0)
        self.coordinator = CoordinatorActor.options(num_cpus=0).remote(config, learns=True)
        setup = WorkerSetup(name="worker-0", config=config, model_path=str(model_path))
        self.worker = WorkerActor.options(num_cpus=0).remote(setup, self.coordinator)
        self.learner_step = 0
        self._settle: Any = None

    def start(self) -> None:
        ray.get(self.worker.start.remote(), timeout=ANSWER_TIMEOUT_S)
        directory = self.layout.weights_dir(0)
        shutil.copytree(self.model_path, directory)
        record = VersionRecord(
            version=0,
            path=self.layout.relative(directory),
            digest=files_digest(weight_files(directory)),
            learner_step=None,
        )
        ray.get(self.coordinator.publish.remote(record))
        self.running = self.worker.run.remote()

    def turn(self) -> Turn:
        if self._settle is not None:
            ray.get(self.coordinator.settle.remote(self._settle, self.learner_step, {}, 0, {}))
        while (batch := ray.get(self.coordinator.claim.remote(0))) is None:
            ended, _ = ray.wait([self.running], timeout=POLL_S)
            ray.get(ended)  # raises what ended it
            assert not ended, "the worker ended"
        self.learner_step, self._settle = self.learner_step + 1, batch.batch_id
        return in_the_window(read_segments(self.layout, batch.segments).select(COLUMNS))

    def close(self) -> None:
        ray.get(self.worker.stop.remote())
        ray.wait([self.running], timeout=ANSWER_TIMEOUT_S)
        ray.get(self.worker.close.remote())
        ray.get(self.coordinator.close.remote())
        for actor in (self.worker, self.coordinator):
            ray.kill(actor)


def in_the_window(rows: pa.Table) -> Turn:
    """Return the figures of requests that were answered while the worker still began new groups.

    Until then it had as many requests in flight as it may have.
    """
    starts_us = pc.cast(rows["t_start"], pa.int64()).to_numpy()
    ends_us = starts_us + rows["gen_us"].to_numpy()
    firsts_us = (
        pa.table({"group": rows["group_uid"], "start": starts_us})
        .group_by("group")
        .aggregate([("start", "min")])
    )
    begin_us, end_us = int(starts_us.min()), pc.max(firsts_us["start_min"]).as_py()
    chosen = [number for number in starts_us.argsort() if ends_us[number] <= end_us]
    picked = rows.take(chosen)
    n_tokens = pc.sum(pc.list_value_length(picked["response_ids"])).as_py()
    return Turn(tokens_per_s=n_tokens / ((end_us - begin_us) / 1e6), requests=requests_of(picked))


def requests_of(rows: pa.Table) -> list[Request]:
    return [
        Request(prompt_ids=row["prompt_ids"], seed=request_seed(row["traj_uid"], row["step_index"]))
        for row in rows.select(["prompt_ids", "traj_uid", "step_index"]).to_pylist()
    ]

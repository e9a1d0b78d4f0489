"""Run the ranks of the learner: one engine in this process, the others in Ray actors.

    ranks = RankGroup(config, model_path="runs/default/base")   # starts learner.ranks - 1 actors
    stats = ranks.train(updates)
    digest = ranks.copy_weights()
    ranks.write_weights(directory)      # in a thread, while the next call of `train` runs
    ranks.close()

Methods that train, copy or save first call the other ranks, then do the same work here, and return
when all ranks are done. The two that write may run in a thread beside the others. The output of the
other ranks is in logs/learner-rank<r>.log. If a rank dies or fails the method raises RankError,
also where the remaining ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from configs import Config, has_critic
from coordinator import capture_output
from learner.checkpoint import (
    CheckpointCopy,
    CheckpointPoint,
    Files,
    FilesOfRank,
    copy_checkpoint,
    load_checkpoint,
    write_checkpoint,
    write_files,
)
from learner.data.micro_batch import MicroBatch
from learner.distributed.deepspeed_setup import GROUP_TIMEOUT, LOOPBACK, host_ranks
from learner.interface import RankError
from learner.model.lora import write_adapter_config
from learner.publishing.broadcast_sender import Broadcast
from learner.publishing.copy_model import copy_file
from learner.publishing.publish import SHARD_BYTES, WeightsCopy
from learner.training.critic import CriticStats
from learner.training.engine import Engine
from learner.training.step_metrics import UpdateStats
from store import (
    RunLayout,
    broadcast,
    check_adapter,
    compile_elsewhere,
    files_digest,
    tensor_shapes,
    weight_files,
    write_base,
)

# Without a limit a rank that waits for devices held by others would block the start for ever.
START_TIMEOUT_S = 120.0
WATCH_S = 0.2  # between two checks of the other ranks while this one works
# After one rank's failure: time for the others to fail, and for Ray to notice a death. Only then
# can the cause be told from its consequences.
FAILURE_S = 5.0

TOKENIZER_FILE = "tokenizer.json"
WRITING = "writing"  # Ray's name for the thread of a rank that writes while the rank trains

Answer = TypeVar("Answer")


class RankDiedError(RankError):
    """A rank's process is gone."""


class RankGroup:
    """Run every call on all ranks. Rank 0 is this process."""

    def __init__(self, config: Config, *, model_path: str) -> None:
        """Start all ranks and load the model. Raises RankError if one does not start."""
        self.layout = RunLayout.open(Path(config.run_dir))
        self.model_path = model_path
        self._write_timeout_s = config.learner.step_timeout_s
        self._weights = WeightsCopy()
        self._model = config.model
        self._base_digest = ""  # until the first adapter is written
        self._checkpoint: CheckpointCopy | None = None  # until it is written
        options = {"num_cpus": 0, "num_gpus": config.learner.gpus_per_rank}
        self.peers = [
            _RemoteRankActor.options(**options).remote(
                config, run_id=self.layout.info.run_id, model_path=model_path, rank=rank
            )
            for rank in range(1, config.learner.ranks)
        ]
        # The engine works in its own thread. A collective cannot be interrupted, so this thread
        # stays free to notice that a rank is gone.
        self._thread = ThreadPoolExecutor(max_workers=1) if self.peers else None
        address = None
        if self.peers:
            host = self._host()
            self._rendezvous = host_ranks(host)
            address = str(broadcast.Address.new(host, self._rendezvous.port))
        starts = [peer.start.remote(address) for peer in self.peers]
        self.engine = self._wait_for_all(
            starts, lambda: make_engine(config, model_path=model_path, rank=0, address=address)
        )
        self.broadcast: Broadcast | None = None
        if config.learner.transfer == "broadcast":
            one_machine = len([node for node in ray.nodes() if node["Alive"]]) == 1
            host = LOOPBACK if one_machine else ray.util.get_node_ip_address()
            self.broadcast = Broadcast(host, device=self.engine.deepspeed.device)

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        """Apply one optimizer update per list of micro-batches. See `Engine.train`."""
        given = ray.put(updates) if self.peers else None
        return self._run_on_all(lambda: self.engine.train(updates), Engine.train, given)

    def train_critic(self, updates: Sequence[Sequence[MicroBatch]]) -> list[CriticStats]:
        """Apply one optimizer update of the critic per list. See `Engine.train_critic`."""
        given = ray.put(updates) if self.peers else None
        return self._run_on_all(
            lambda: self.engine.train_critic(updates), Engine.train_critic, given
        )

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Return the critic's values per micro-batch. See `Critic.values`."""
        given = ray.put(micro_batches) if self.peers else None
        return self._run_on_all(lambda: self.engine.values(micro_batches), Engine.values, given)

    def copy_weights(self) -> str:
        """Copy the current weights into main memory. Return the digest that their files will have.

        `write_weights` has to be done with the version before.
        """
        digest = self._run_on_all(
            lambda: self._weights.take(self.engine.published()), gather_weights
        )
        if self.engine.publishes_adapters and self._weights.n_bytes > SHARD_BYTES:
            raise ValueError(
                f"the adapters have {self._weights.n_bytes} bytes, and one file has at most "
                f"{SHARD_BYTES}; use a smaller model.lora_rank, or model.lora_serving=merged"
            )
        return digest

    def write_weights(self, directory: Path) -> None:
        """Write the copied weights, and send them to the engines. See `WeightsCopy.write`."""
        if self.engine.publishes_adapters:
            self._weights.write_adapter(directory, write_others=self._write_adapter_files)
            return
        with self.broadcast.round() if self.broadcast is not None else nullcontext() as send:
            self._weights.write(directory, source_dir=self.model_path, send=send)

    def _write_adapter_files(self, directory: Path) -> None:
        """Write an adapter's configuration, the digest of its base model, and the tokenizer.

        The digest is computed once, in the thread that writes: it reads the whole base model. The
        viewer shows tokens by the tokenizer.
        """
        base, is_first = Path(self.model_path), not self._base_digest
        if is_first:
            self._base_digest = files_digest(weight_files(base))
        if (base / TOKENIZER_FILE).is_file():
            copy_file(base / TOKENIZER_FILE, directory / TOKENIZER_FILE)
        write_adapter_config(self.engine.policy.causal_lm, directory)
        write_base(directory, digest=self._base_digest)
        if is_first:  # engines make the same check, of each version
            check_adapter(
                directory,
                rank=self._model.lora_rank,
                alpha=self._model.lora_alpha,
                base_shapes=tensor_shapes(base),
                base_digest=self._base_digest,
            )

    def copy_checkpoint(self, *, learner_step: int, version: int, lsn: int) -> None:
        """Copy everything that a checkpoint needs into main memory, on each rank its own part."""
        copy = partial(copy_checkpoint, learner_step=learner_step, version=version, lsn=lsn)
        self._checkpoint = self._wait_for_all(
            [peer.copy_checkpoint.remote(copy) for peer in self.peers], lambda: copy(self.engine)
        )

    def write_checkpoint(self, directory: Path) -> None:
        """Write the copied checkpoint, and free the copy. See `learner.checkpoint`."""
        copy, self._checkpoint = self._checkpoint, None
        assert copy is not None, "copy first"

        def others() -> list[FilesOfRank]:
            calls = [peer.write_files.remote(directory) for peer in self.peers]
            return [
                partial(self._answer, call, rank=rank, timeout_s=self._write_timeout_s)
                for rank, call in enumerate(calls, start=1)
            ]

        write_checkpoint(copy, directory, others=others)

    def load_checkpoint(self, directory: Path) -> CheckpointPoint:
        return self._run_on_all(
            lambda: load_checkpoint(self.engine, directory), load_checkpoint, directory
        )

    def close(self) -> None:
        """End the other ranks and free this rank's memory, also after an error."""
        for peer in self.peers:
            ray.kill(peer)
        if self._thread is not None:
            # After an error it may wait for a rank that is gone.
            self._thread.shutdown(wait=False)
        self.engine.close()

    def _host(self) -> str:
        """Return the host for the rendezvous of the ranks.

        Within one machine it is the loopback address: it needs no name and passes every firewall.
        """
        nodes = {ray.get_runtime_context().get_node_id()}
        for rank, call in enumerate([peer.node.remote() for peer in self.peers], start=1):
            nodes.add(self._answer(call, rank=rank, timeout_s=START_TIMEOUT_S))
        return LOOPBACK if len(nodes) == 1 else ray.util.get_node_ip_address()

    def _run_on_all(
        self, own: Callable[[], Answer], others: Callable[..., object], *arguments: object
    ) -> Answer:
        """Run `others(engine, *arguments)` on the other ranks, and `own` here."""
        return self._wait_for_all([peer.run.remote(others, *arguments) for peer in self.peers], own)

    def _wait_for_all(self, calls: list[Any], own: Callable[[], Answer]) -> Answer:
        """Return the result of `own` when the calls, one to each other rank, have returned too.

        An error of this rank is raised unchanged. If this rank failed because another rank died, or
        only another rank failed, RankError is raised.
        """
        if self._thread is None:
            return own()
        outcome = self._thread.submit(own)
        failure = None
        while failure is None and not outcome.done():
            wait([outcome], timeout=WATCH_S)
            failure = self._failure(calls, timeout_s=0.0)
        # If all ranks fail for the same reason, they do so within moments.
        wait([outcome], timeout=FAILURE_S)
        if outcome.done() and outcome.exception() is not None:
            failure = failure or self._failure(calls, timeout_s=FAILURE_S)
            if not isinstance(failure, RankDiedError):
                return outcome.result()  # raises
        if failure is not None:
            raise failure
        for rank, call in enumerate(calls, start=1):
            self._answer(call, rank=rank, timeout_s=GROUP_TIMEOUT.total_seconds())
        return outcome.result()

    def _failure(self, calls: list[Any], *, timeout_s: float) -> RankError | None:
        """Wait up to `timeout_s` for the other ranks' calls. Return the first failure or None."""
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        for rank, call in enumerate(calls, start=1):
            if call in done:
                try:
                    self._answer(call, rank=rank, timeout_s=0.0)
                except RankError as error:
                    return error
        return None

    def _answer(self, call: Any, *, rank: int, timeout_s: float) -> Any:
        """Return a rank's answer. Raises RankError after a failure, a death or a time-out."""
        log = self.layout.logs / f"{log_name(rank)}.log"
        try:
            return ray.get(call, timeout=timeout_s)
        except GetTimeoutError as error:
            raise RankError(
                f"rank {rank} of the learner did not answer within {timeout_s:g} s; see {log}, or, "
                "if there is none, free a device for it"
            ) from error
        except RayTaskError as error:
            failed = f"rank {rank} of the learner failed: {error.cause}; see {log}"
            raise RankError(failed) from error
        except RayError as error:
            died = f"rank {rank} of the learner died; its last output is in {log}"
            raise RankDiedError(died) from error


class RemoteRank:
    """Run one of the other ranks, in a Ray actor."""

    def __init__(self, config: Config, *, run_id: str, model_path: str, rank: int) -> None:
        self.config = config
        self.model_path = model_path
        self.rank = rank
        self._checkpoint: CheckpointCopy | None = None
        compile_elsewhere()
        layout = RunLayout.join(Path(config.run_dir), storage_uri=config.store.uri, run_id=run_id)
        capture_output(layout.logs / f"{log_name(rank)}.log")

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def start(self, address: str) -> None:
        self.engine = make_engine(
            self.config, model_path=self.model_path, rank=self.rank, address=address
        )

    def run(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function(engine, *arguments)`; rank 0 alone needs the result."""
        function(self.engine, *arguments)

    def copy_checkpoint(self, copy: Callable[[Engine], CheckpointCopy]) -> None:
        self._checkpoint = copy(self.engine)

    @ray.method(concurrency_group=WRITING)
    def write_files(self, dest: Path) -> list[Files]:
        """Write the copied part of a checkpoint while other calls run, and free the copy."""
        copy, self._checkpoint = self._checkpoint, None
        assert copy is not None, "copy first"
        return write_files(copy, dest)


_RemoteRankActor: Any = ray.remote(concurrency_groups={WRITING: 1})(RemoteRank)


def gather_weights(engine: Engine) -> None:
    """Take part in gathering the published weights, which rank 0 writes."""
    for _ in engine.published():
        pass


def make_engine(config: Config, *, model_path: str, rank: int, address: str | None) -> Engine:
    """Make the engine of one rank from the config."""
    return Engine(
        model_path=model_path,
        model=config.model,
        learner=config.learner,
        loss=config.loss,
        temperature=config.actors.temperature,
        seed=config.seed,
        critic=config.critic if has_critic(config) else None,
        rank=rank,
        address=address,
    )


def log_name(rank: int) -> str:
    """Name a rank's output file in logs/, without suffix. Rank 0 is the learner's own process."""
    return f"learner-rank{rank}" if rank else "learner"

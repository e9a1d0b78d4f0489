"""The learner's ranks: an engine in this process, the others in Ray actors, all doing the same
thing at the same time.

    ranks = RankGroup(config, model_path="runs/default/base")   # starts `learner.ranks - 1` actors; with 1 rank none
    stats = ranks.train(updates)                            # as Engine.train
    digest = ranks.publish(directory)
    ranks.close()

A call goes to the other ranks first and is then done here; it returns when all are done. Their
output is in logs/learner-rank<r>.log. A rank that dies or fails ends the call with a RankError,
also where the others would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from configs import Config
from coordinator import capture_output
from learner.checkpointing.checkpoint import CheckpointPoint, load_checkpoint, save_checkpoint
from learner.data.micro_batch import MicroBatch
from learner.distributed.deepspeed_setup import GROUP_TIMEOUT, LOOPBACK, host_ranks
from learner.files.atomic_directory import BackgroundFsync
from learner.publishing.broadcast_sender import Broadcast
from learner.publishing.publish import publish_weights
from learner.ray_actor import RankError
from learner.training.engine import Engine
from learner.training.update_stats import UpdateStats
from store import RunLayout
from store import broadcast as protocol

# of a rank's process: a wait for devices that others hold would otherwise have no end
START_TIMEOUT_S = 120.0
WATCH_S = 0.2  # between two looks at the other ranks while this one works
# after one rank's failure, for the others' and for Ray to know of a death: which is the cause?
FAILURE_S = 5.0

Answer = TypeVar("Answer")


class RankDiedError(RankError):
    """Its process is gone."""


class RankGroup:
    """What the loop knows of the ranks: rank 0 is here, the others do as it does."""

    def __init__(self, config: Config, *, model_path: str) -> None:
        """Returns when all ranks have loaded the model. Raises RankError if one does not come."""
        self.layout = RunLayout.open(Path(config.run_dir))
        self.model_path = model_path
        self._behind = BackgroundFsync()  # of published weights
        options = {"num_cpus": 0, "num_gpus": config.learner.gpus_per_rank}
        self.peers = [
            _PeerActor.options(**options).remote(config, model_path, rank)
            for rank in range(1, config.learner.ranks)
        ]
        # The engine's own thread: a collective cannot be interrupted, so this one stays free to see
        # that a rank is gone.
        self._thread = ThreadPoolExecutor(max_workers=1) if self.peers else None
        address = None
        if self.peers:
            host = self._host()
            self._meeting_point = host_ranks(host)
            address = str(protocol.Address.new(host, self._meeting_point.port))
        calls = [peer.start.remote(address) for peer in self.peers]
        self.engine = self._run_on_all(
            calls, lambda: make_engine(config, model_path=model_path, rank=0, address=address)
        )
        self.broadcast: Broadcast | None = None
        if config.learner.transfer == "broadcast":
            one_machine = len([node for node in ray.nodes() if node["Alive"]]) == 1
            host = LOOPBACK if one_machine else ray.util.get_node_ip_address()
            self.broadcast = Broadcast(host)

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        """As `Engine.train`."""
        given = ray.put(updates) if self.peers else None
        return self._run_on_all(
            [peer.train.remote(given) for peer in self.peers], lambda: self.engine.train(updates)
        )

    def publish(self, directory: Path) -> str:
        """Writes the weights as they are now, and sends them; returns their digest. As
        `publish_weights`; on disk with the next checkpoint.
        """
        base, behind = self.model_path, self._behind
        with self.broadcast.round() if self.broadcast is not None else nullcontext() as send:
            calls = [peer.give_weights.remote() for peer in self.peers]
            return self._run_on_all(
                calls,
                lambda: publish_weights(
                    self.engine.weights(), directory, source_dir=base, behind=behind, send=send
                ),
            )

    def save_checkpoint(
        self, directory: Path, *, learner_step: int, version: int, lsn: int
    ) -> None:
        """Durable when it returns, and so are all weights published before: a run that goes on from
        it may expect them.

        Raises OSError naming weights that the disk failed to take.
        """
        point = {"learner_step": learner_step, "version": version, "lsn": lsn}
        calls = [peer.save_checkpoint.remote(directory, **point) for peer in self.peers]
        self._run_on_all(calls, lambda: save_checkpoint(self.engine, directory, **point))
        self._behind.wait()

    def load_checkpoint(self, directory: Path) -> CheckpointPoint:
        calls = [peer.load_checkpoint.remote(directory) for peer in self.peers]
        return self._run_on_all(calls, lambda: load_checkpoint(self.engine, directory))

    def close(self) -> None:
        """Ends the other ranks, which keep nothing that is not written, and frees this one's
        memory; also after an error.
        """
        for peer in self.peers:
            ray.kill(peer)
        if self._thread is not None:
            # after an error it may be waiting for a rank that is gone
            self._thread.shutdown(wait=False)
        self.engine.close()

    def _host(self) -> str:
        """Where the ranks meet: within one machine the loopback address, which needs no name and
        passes every firewall.
        """
        asked = [peer.node.remote() for peer in self.peers]
        nodes = [
            self._answer(call, rank=rank, timeout_s=START_TIMEOUT_S)
            for rank, call in enumerate(asked, start=1)
        ]
        here = ray.get_runtime_context().get_node_id()
        return LOOPBACK if set(nodes) == {here} else ray.util.get_node_ip_address()

    def _run_on_all(self, calls: list[Any], own: Callable[[], Answer]) -> Answer:
        """`own`'s result when the calls, one to each other rank, have returned too.

        An error of this rank is raised as it is, and its loss of a rank that died as a RankError;
        so is an error that only another rank has.
        """
        if self._thread is None:
            return own()
        outcome = self._thread.submit(own)
        failure = None
        while failure is None and not outcome.done():
            wait([outcome], timeout=WATCH_S)
            failure = self._failure(calls, timeout_s=0.0)
        # where all ranks fail, of the same, they do within moments
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
        """The first of the calls that has failed, or fails within the time while others are waited
        for.
        """
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        for rank, call in enumerate(calls, start=1):
            if call in done:
                try:
                    self._answer(call, rank=rank, timeout_s=0.0)
                except RankError as error:
                    return error
        return None

    def _answer(self, call: Any, *, rank: int, timeout_s: float) -> Any:
        """Raises RankError: the call failed, or its rank died, or it takes too long."""
        log = self.layout.logs / f"{log_name(rank)}.log"
        try:
            return ray.get(call, timeout=timeout_s)
        except GetTimeoutError as error:
            reason = f"did not answer within {timeout_s:g} s; see {log}, or, if there is none, free a device for it"
            raise RankError(f"rank {rank} of the learner {reason}") from error
        except RayTaskError as error:
            raise RankError(
                f"rank {rank} of the learner failed: {error.cause}; see {log}"
            ) from error
        except RayError as error:
            raise RankDiedError(
                f"rank {rank} of the learner died; its last words are in {log}"
            ) from error


class RemoteRank:
    """One of the other ranks, in a process of its own."""

    def __init__(self, config: Config, model_path: str, rank: int) -> None:
        self.config, self.model_path, self.rank = config, model_path, rank
        capture_output(RunLayout.open(Path(config.run_dir)).logs / f"{log_name(rank)}.log")

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def start(self, address: str) -> None:
        self.engine = make_engine(
            self.config, model_path=self.model_path, rank=self.rank, address=address
        )

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> None:
        self.engine.train(updates)

    def give_weights(self) -> None:
        for _ in self.engine.weights():
            pass

    def save_checkpoint(
        self, directory: Path, *, learner_step: int, version: int, lsn: int
    ) -> None:
        save_checkpoint(self.engine, directory, learner_step=learner_step, version=version, lsn=lsn)

    def load_checkpoint(self, directory: Path) -> None:
        load_checkpoint(self.engine, directory)


_PeerActor: Any = ray.remote(RemoteRank)


def make_engine(config: Config, *, model_path: str, rank: int, address: str | None) -> Engine:
    """The engine of one rank, as the config has it."""
    return Engine(
        model_path=model_path,
        model=config.model,
        learner=config.learner,
        loss=config.loss,
        temperature=config.actors.temperature,
        seed=config.seed,
        rank=rank,
        address=address,
    )


def log_name(rank: int) -> str:
    """Of a rank's output under logs/; rank 0 is the learner itself."""
    return f"learner-rank{rank}" if rank else "learner"

"""A learner's loop without Ray, workers or a model: the real coordinator and catalog, trained by a
stand-in.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

import configs
from configs import Config
from coordinator import Coordinator, Lease, Reply
from learner import Learner, LearnerSetup
from learner.checkpoint import CheckpointError, CheckpointPoint
from learner.data.batch_loader import BatchLoader, make_loader
from learner.data.micro_batch import MicroBatch
from learner.files.atomic_directory import atomic_directory, visible_whole
from learner.training.step_metrics import UpdateStats
from store import (
    RunLayout,
    Step,
    state_hash,
    write_open_sql,
    write_segment,
)
from tests.support.lease_samples import leased_trajectory

WEIGHTS_FILE = "model.safetensors"
GROUPS_PER_STEP, GROUP_SIZE, N_STEPS = 2, 2, 2
DAMAGE = "damaged"


def make_config(run_dir: Path, *, max_staleness: int, **learner: object) -> Config:
    config = Config(run_dir=str(run_dir), max_staleness=max_staleness)
    changes: dict[str, Any] = {
        "groups_per_step": GROUPS_PER_STEP,
        "steps": 4,
        "checkpoint_every": 100,
        "starvation_timeout_s": 20.0,
        **learner,
    }
    return replace(
        config,
        env=configs.EnvConfig(name="key_room", options={}),
        algorithm=replace(config.algorithm, group_size=GROUP_SIZE),
        learner=replace(config.learner, **changes),
        evaluation=replace(config.evaluation, every=0),
    )


def open_coordinator(config: Config) -> Coordinator:
    """Open the coordinator of the run at `config.run_dir`, which is made if it does not exist.

    Closing it and opening another is a restart.
    """
    run_dir = Path(config.run_dir)
    if not RunLayout.exists(run_dir):
        layout = RunLayout.create(run_dir, config_yaml=configs.as_yaml(config))
        write_open_sql(layout, macros=[], max_staleness=config.max_staleness)
    return Coordinator(config, learns=True)


def no_critic(micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    raise AssertionError("these runs have no critic")


def loader_of(coordinator: Coordinator, *, config: Config | None = None) -> BatchLoader:
    """Return the loader of a coordinator's run, with other settings if they are given."""
    return make_loader(
        config or coordinator.config,
        coordinator.layout,
        claim=coordinator.claim,
        refill=coordinator.refill,
        ask_critic=no_critic,
    )


def play(
    coordinator: Coordinator, lease: Lease, *, n_response_tokens: int = 2, alike: bool = False
) -> None:
    """Commit a whole group at its lease's version.

    Each trajectory has N_STEPS steps. A step of member m has reward m, or 0 if `alike`.
    """
    version = lease.version.version
    trajectories = [
        leased_trajectory(
            lease,
            member,
            won=bool(member),
            steps=tuple(
                Step(
                    step_index=index,
                    prompt_ids=(1, 2, 3 + index),
                    prompt_dropped_turns=0,
                    prompt_dropped_tokens=0,
                    response_ids=(7,) * n_response_tokens,
                    response_logprobs=(-0.5,) * n_response_tokens,
                    version_min=version,
                    version_max=version,
                    finish_reason="stop",
                    obs_text=f"room {index}",
                    anchor_text=f"room {index}",
                    state_hash=state_hash(f"room {index}"),
                    admissible_actions=None,
                    action_text="go",
                    reward=0.0 if alike else float(member),
                    is_action_valid=True,
                    terminated=index == N_STEPS - 1,
                    truncated=False,
                    t_start_us=1,
                    gen_us=1,
                    env_us=1,
                )
                for index in range(N_STEPS)
            ),
        )
        for member in lease.group.missing
    ]
    coordinator.commit(
        write_segment(coordinator.layout, trajectories, worker="w", epoch=lease.epoch), lease.epoch
    )


def play_all(coordinator: Coordinator, **how: Any) -> int:
    """Play all groups that admission allows. Return their number."""
    n = 0
    while (lease := coordinator.lease("w")) is not None:
        play(coordinator, lease, **how)
        n += 1
    return n


class Handle:
    """Stand in for the coordinator's Ray handle. Workers play all leases before each claim."""

    def __init__(
        self, coordinator: Coordinator, *, playing: Callable[[Coordinator], object] = play_all
    ) -> None:
        self.coordinator, self.playing = coordinator, playing
        self.claims_for: list[int] = []  # versions, also where nothing was claimed
        # as Ray has it: the loop, its prefetching and its heart all call
        self.one_call = threading.Lock()

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *given, **named: self.call(name, *given, **named))

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        with self.one_call:
            if name == "claim":
                self.claims_for.append(given[0])
            if name in ("claim", "refill"):
                self.playing(self.coordinator)
            return getattr(self.coordinator, name)(*given, **named)


class Silent:
    """Stand in for Heartbeat, whose thread would outlive its coordinator."""

    def __init__(self, send: object, *, every_s: float) -> None: ...

    def report(self, waiting_on: str | None, *, waits_s: float, within_s: float) -> None: ...

    def close(self) -> None: ...


class StandIn:
    """Stand in for RankGroup. Its weights are the number of updates it has seen.

    `stats` makes the results of a learner step's updates.
    """

    broadcast = None

    stats: Callable[[StandIn, Sequence[Sequence[MicroBatch]]], list[UpdateStats]]

    def __init__(self, config: Config, *, model_path: str) -> None:
        self.config = config
        self.n_updates = 0
        self.closed = False

    def train(self, updates: Sequence[Sequence[MicroBatch]]) -> list[UpdateStats]:
        self.n_updates += len(updates)
        return self.stats(updates)

    def copy_weights(self) -> str:
        self.weights = str(self.n_updates)
        return blake3(self.weights.encode()).hexdigest()

    def write_weights(self, directory: Path) -> None:
        with visible_whole(directory) as unfinished:
            (unfinished / WEIGHTS_FILE).write_text(self.weights)

    def copy_checkpoint(self, *, learner_step: int, version: int, lsn: int) -> None:
        self.point = CheckpointPoint(
            learner_step=learner_step, version=version, n_updates=self.n_updates, lsn=lsn
        )

    def write_checkpoint(self, directory: Path) -> None:
        with atomic_directory(directory) as unfinished:
            (unfinished / "point.json").write_text(json.dumps(asdict(self.point)))

    def load_checkpoint(self, directory: Path) -> CheckpointPoint:
        text = (directory / "point.json").read_text()
        if text == DAMAGE:
            raise CheckpointError(f"{directory} is damaged; use an older checkpoint")
        point = CheckpointPoint(**json.loads(text))
        self.n_updates = point.n_updates
        return point

    def close(self) -> None:
        self.closed = True


def good(updates: Sequence[Sequence[MicroBatch]], **tokens: float) -> list[UpdateStats]:
    """Return updates that went well. `tokens` are figures of `token_diagnostics`."""
    return [
        UpdateStats(
            loss=0.5,
            kl=0.0,
            entropy=tokens.get("entropy", 1.0),
            grad_norm=1.0,
            learning_rate=1e-3,
            n_rows=sum(batch.n_rows for batch in update),
            n_tokens=sum(batch.n_response_tokens for batch in update),
            n_tokens_computed=sum(batch.n_tokens for batch in update),
            skipped=False,
            bad_rows=(),
            tokens={"ess": tokens.get("ess", 1.0), "mismatch_kl": tokens.get("mismatch_kl", 0.0)},
        )
        for update in updates
    ]


def bad(updates: Sequence[Sequence[MicroBatch]], *, rows: tuple[int, ...]) -> list[UpdateStats]:
    return [
        replace(
            stats,
            loss=float("inf"),
            grad_norm=float("inf"),
            skipped=True,
            bad_rows=rows,
            tokens={"ess": float("inf")},
        )
        for stats in good(updates)
    ]


def make_learner(
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    handle: Handle,
    stats: Callable[[StandIn, Sequence[Sequence[MicroBatch]]], list[UpdateStats]],
) -> Learner:
    """Return a started learner, whose ranks and heartbeats are stand-ins."""
    patch_learner(monkeypatch, stats)
    setup = LearnerSetup(run_id="unused", config=config, model_path="unused")
    return Learner(setup, handle, stopping=threading.Event())  # type: ignore[arg-type]


def patch_learner(
    monkeypatch: pytest.MonkeyPatch,
    stats: Callable[[StandIn, Sequence[Sequence[MicroBatch]]], list[UpdateStats]],
) -> None:
    """Replace ranks, heartbeats and the coordinator's replies in learners made after this."""
    monkeypatch.setattr(
        "learner.learner.RankGroup", type("RankGroup", (StandIn,), {"stats": stats})
    )
    monkeypatch.setattr("learner.learner.Heartbeat", Silent)
    monkeypatch.setattr(Reply, "get", lambda reply, **patience: reply.reference)

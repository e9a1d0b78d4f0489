"""Train real learner steps of a tiny model on random episodes, without workers and Ray.

# for more ranks than one process can have; with a critic, if the last word is there
python -c "from tests.support.replay_samples import main; main()" RUN STEPS RANKS [critic]
"""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from configs import Config, CriticConfig, ModelConfig
from coordinator import Coordinator, Lease, Reply
from learner import Learner, LearnerSetup
from store import write_segment
from tests.support.engine_samples import make_base
from tests.support.learner_loop import Handle, Silent, make_config, open_coordinator
from tests.support.lease_samples import leased_trajectory
from tests.support.store_samples import make_step

N_STEPS = 3  # of an episode


class Crashed(Exception):
    pass


def config_of(
    run: Path,
    *,
    lora_rank: int = 0,
    kl_coef: float = 0.0,
    critic: CriticConfig | None = None,
    estimator: str = "turn_ppo",
    **learner: Any,
) -> Config:
    """Return the config of a run whose base policy is in its directory.

    Every setting that a learner step can depend on has an effect in it. `estimator` is for a critic.
    """
    settings: dict[str, Any] = {
        "updates_per_step": 2,
        "learning_rate": 2e-3,
        "schedule": "linear",
        "warmup_updates": 3,
        "ess_scaled": True,
        "micro_batch_tokens": 60,
        "checkpoint_every": 8,
        "keep_every": 8,
        **learner,
    }
    config = make_config(run, max_staleness=1, **settings)
    loss = replace(config.loss, proximal="recomputed", kl_coef=kl_coef)
    config = replace(config, loss=loss, model=ModelConfig(lora_rank=lora_rank))
    if critic is None:
        return config
    return replace(config, critic=critic, algorithm=replace(config.algorithm, estimator=estimator))


def train(config: Config, *, crash_at: int | None = None) -> None:
    """Train to the last step, from the run's current state.

    `crash_at` ends the learner between publishing this learner step and settling it.
    """

    class Fragile(Handle):
        def call(self, name: str, *given: Any, **named: Any) -> Any:
            if name == "settle" and given[0].learner_step == crash_at:
                raise Crashed
            return super().call(name, *given, **named)

    base = Path(config.run_dir) / "base" / "policy"
    coordinator = open_coordinator(config)
    if not base.is_dir():
        make_base(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.learner.Heartbeat", Silent)
        patch.setattr(Reply, "get", lambda reply, **patience: reply.reference)
        handle = Fragile(coordinator, playing=_play_all)
        setup = LearnerSetup(run_id="unused", config=config, model_path=str(base))
        try:
            learner = Learner(setup, handle, stopping=threading.Event())  # type: ignore[arg-type]
            try:
                learner.run()
            except Crashed:
                pass
            finally:
                learner.close()
        finally:
            coordinator.close()


def _play_all(coordinator: Coordinator) -> None:
    while (lease := coordinator.lease("w")) is not None:
        _play(coordinator, lease)


def _play(coordinator: Coordinator, lease: Lease) -> None:
    """Random tokens, log-probabilities near those of an untrained policy, random rewards."""
    drawn = random.Random(f"{lease.group.ordinal} {lease.group.missing}")
    version = lease.version.version
    trajectories = []
    for member in lease.group.missing:
        steps = []
        for index in range(N_STEPS):
            response = [drawn.randrange(8, 264) for _ in range(drawn.randrange(1, 5))]
            changes = {
                "prompt_ids": tuple(drawn.randrange(8, 264) for _ in range(drawn.randrange(3, 15))),
                "response_ids": tuple(response),
                "response_logprobs": tuple(drawn.gauss(-5.6, 0.3) for _ in response),
                "reward": float(drawn.randrange(3)),
                "version_max": version,
            }
            steps.append(make_step(index, n_steps=N_STEPS, version=version, **changes))
        trajectories.append(
            leased_trajectory(
                lease,
                member,
                won=drawn.random() < 0.5,
                steps=tuple(steps),
            )
        )
    coordinator.commit(
        write_segment(coordinator.layout, trajectories, worker="w", epoch=lease.epoch), lease.epoch
    )


def main() -> None:
    run, steps, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ray.init(include_dashboard=False, log_to_driver=False)
    critic = CriticConfig(learning_rate=1e-2) if sys.argv[4:] else None
    train(config_of(run, steps=steps, ranks=ranks, zero_stage=1, critic=critic))

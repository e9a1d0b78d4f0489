"""Make configs of other runs from a run's config: its tiny base policy, an external model's."""

from __future__ import annotations

from dataclasses import replace

from configs.schema import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    LossConfig,
    OfflineConfig,
    ReplayConfig,
    TasksConfig,
)

# The imitation of a scripted policy that makes a tiny base policy. Several updates a batch, because
# playing costs more than imitating. The rate suits hidden sizes of one or two hundred only: the
# model begins with random weights and only has to learn the form of an answer.
CLONE_EPISODES_PER_STEP = 32
CLONE_UPDATES_PER_STEP = 5
CLONE_LEARNING_RATE = 2e-3


def cloning_config(config: Config) -> Config:
    """Return the run that makes a tiny base policy, by imitation of the scripted policy.

    Groups have one episode, because nothing is compared. Staleness has no bound, because the
    scripted policy never changes.
    """
    tiny = config.model.tiny
    return replace(
        config,
        source=[],
        offline=OfflineConfig(),
        replay=ReplayConfig(),
        max_staleness=tiny.clone_steps,
        tasks=TasksConfig(),  # what the script wins says nothing about the policy
        model=replace(config.model, lora_rank=0),
        actors=replace(
            config.actors,
            scripted=True,
            workers=1,
            gpus_per_worker=0,
            engine={},
            batch_invariant=False,
            groups_in_flight=CLONE_EPISODES_PER_STEP,
            extra_members=0,
        ),
        algorithm=AlgorithmConfig(estimator="grpo", group_size=1),  # its advantages are not read
        loss=LossConfig(policy="behaviour_cloning"),
        critic=CriticConfig(),
        learner=replace(
            config.learner,
            steps=tiny.clone_steps,
            groups_per_step=CLONE_EPISODES_PER_STEP,
            updates_per_step=CLONE_UPDATES_PER_STEP,
            rows_per_update=0,
            learning_rate=CLONE_LEARNING_RATE,
            warmup_updates=0,
            ess_scaled=False,  # a scripted policy has no log-probabilities
            keep_versions=2,
            checkpoint_every=max(1, tiny.clone_steps // 4),
        ),
        evaluation=replace(config.evaluation, at_start=False, every=0),
    )


def without_model(config: Config) -> Config:
    """Return the config for an external model: no model directory, adapter, GPU or source."""
    return replace(
        config,
        source=[],
        offline=OfflineConfig(),
        replay=ReplayConfig(),
        model=replace(config.model, path="", lora_rank=0),
        actors=replace(config.actors, gpus_per_worker=0, engine={}, batch_invariant=False),
    )

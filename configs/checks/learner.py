"""Check the section `learner`: retention, updates, ranks."""

from __future__ import annotations

from configs.derived import most_updates
from configs.errors import ConfigError
from configs.schema import Config, LearnerConfig


def check_retention(config: Config) -> None:
    """Refuse to remove checkpoints or weights that are still needed."""
    learner = config.learner
    if learner.keep_every % learner.checkpoint_every:
        raise ConfigError(
            f"learner.keep_every={learner.keep_every} is no multiple of "
            f"learner.checkpoint_every={learner.checkpoint_every}, so most of those steps would "
            "have no checkpoint to keep; use a multiple"
        )
    least = config.max_staleness + 2
    # a scripted policy loads no weights
    if learner.keep_versions < least and not config.actors.scripted:
        raise ConfigError(
            f"learner.keep_versions={learner.keep_versions} could delete weights that an actor is "
            f"about to load; with max_staleness={config.max_staleness} keep at least {least}"
        )


def check_updates(config: Config) -> None:
    """Check how a batch is cut into updates, and the schedule over all of them."""
    learner, most = config.learner, most_updates(config)
    if learner.learning_rate > 1.0:
        raise ConfigError(
            f"learner.learning_rate={learner.learning_rate:g} would wreck any model at once; use "
            "e.g. 1e-6"
        )
    sized = f"learner.rows_per_update={learner.rows_per_update}"
    counted = f"learner.updates_per_step={learner.updates_per_step}"
    if learner.rows_per_update and learner.updates_per_step != LearnerConfig().updates_per_step:
        raise ConfigError(f"{sized} and {counted} both cut a batch; leave one out")
    if learner.rows_per_update and learner.schedule == "linear":
        raise ConfigError(
            f"learner.schedule='linear' needs the run's number of updates, which {sized} leaves "
            "open; use learner.updates_per_step, or learner.schedule=constant"
        )
    warmup_steps = config.critic.warmup_steps
    if warmup_steps and learner.schedule == "linear":
        raise ConfigError(
            f"learner.schedule='linear' falls over all learner steps, and critic.warmup_steps="
            f"{warmup_steps} of them make no update of the policy; use learner.schedule=constant"
        )
    n_updates = (learner.steps - warmup_steps) * most
    if learner.warmup_updates > n_updates:
        raise ConfigError(
            f"learner.warmup_updates={learner.warmup_updates} would outlast the run's {n_updates} "
            f"updates (learner.steps={learner.steps} of at most {most} each), so "
            f"learner.learning_rate would never be reached; use at most {n_updates}"
        )
    if config.loss.proximal == "recomputed" and most == 1:
        raise ConfigError(
            f"loss.proximal='recomputed' with {sized if learner.rows_per_update else counted} "
            "costs a forward pass for a policy that is still the one being trained, so its clip "
            "would never act; set loss.policy=reinforce, the same without, or more updates"
        )


def check_offload(config: Config) -> None:
    """Refuse an offload of states that are not partitioned."""
    if config.learner.offload and config.learner.zero_stage == 0:
        raise ConfigError(
            "learner.offload=true with learner.zero_stage=0 would do nothing; set "
            "learner.zero_stage=1"
        )


def check_ranks(config: Config) -> None:
    """Check the GPU of each rank, and the ranks that share a sequence."""
    per_rank, ranks = config.learner.gpus_per_rank, config.learner.ranks
    if per_rank > 1:
        raise ConfigError(
            f"learner.gpus_per_rank={per_rank:g} is more than one GPU; use 1, and more "
            "learner.ranks for more GPUs"
        )
    shared_by = config.learner.sequence_parallel
    if ranks % shared_by:
        raise ConfigError(
            f"learner.ranks={ranks} are no whole number of groups of "
            f"learner.sequence_parallel={shared_by}; set learner.ranks={shared_by}, or a multiple"
        )
    if config.learner.flash_attention != 2 and not (per_rank and config.model.dtype == "bfloat16"):
        raise ConfigError(
            f"learner.flash_attention={config.learner.flash_attention} does nothing without a GPU "
            "and model.dtype=bfloat16, which its kernels need; leave it out"
        )
    if 0 < per_rank < 1 < ranks:
        raise ConfigError(
            f"learner.gpus_per_rank={per_rank:g} with learner.ranks={ranks} could put two ranks on "
            "one GPU, which NCCL refuses; use learner.ranks=1, or learner.gpus_per_rank=1"
        )

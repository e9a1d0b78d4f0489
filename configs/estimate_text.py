"""Show the estimate of a run on GPUs, and its assumptions, as text."""

from __future__ import annotations

from configs.assumptions import ASSUMED, ENVIRONMENT_S, GPU, GPU_BYTES, WORKER_S
from configs.derived import gpus_needed, least_workers
from configs.engine_estimate import EngineEstimate, Lengths
from configs.estimate import Estimate, better_split, estimate_run, is_on_gpus
from configs.model_size import is_known_by_name, size_line
from configs.plan import GIB
from configs.schema import Config, WorkerRange
from printable import counted


def describe_estimate(config: Config) -> str:
    """Return the estimate, and the assumptions that it is made of, as text. Raises ConfigError."""
    n_gpus = gpus_needed(config, learns=True)
    if not is_on_gpus(config):
        return (
            "estimate: none, because engines and learner are not both on GPUs; for the speed of "
            "the quick start on two cores see docs/performance.md\n"
        )
    estimate = estimate_run(config)
    is_range = isinstance(config.actors.workers, WorkerRange) and estimate.engine is not None
    fewest = " (with actors.workers.min workers)" * is_range
    lines = [
        f"estimate for {counted(n_gpus, 'GPU')}{fewest} of the kind {GPU}; none of it was measured",
        f"  model         {size_line(config)}"
        + (", a rounded number; it is counted once the model is here" * is_known_by_name(config)),
    ]
    if estimate.engine is not None:
        lines += _engine_lines(config, estimate.engine, estimate.lengths)
    own = config.learner.gpus_per_rank * GPU_BYTES / GIB
    lines += [
        f"  learner GPU   {estimate.state_bytes / GIB:.1f} GiB weights, gradients, optimizer; "
        f"{estimate.activation_bytes / GIB:.1f} GiB activations; of {own:.1f}",
        *(f"  does not fit  {fault}" for fault in estimate.faults),
        *_rate_lines(config, estimate),
    ]
    if split := better_split(config):
        better, factor = split
        lines.append(
            f"  better        {factor:.1f} times as fast with as many GPUs: "
            f"actors.workers{'.min' * is_range}={least_workers(better.actors)} "
            f"learner.ranks={better.learner.ranks}"
        )
    return "\n".join([*lines, "assumed", *(f"  {line}" for line in ASSUMED), ""])


def _engine_lines(config: Config, engine: EngineEstimate, lengths: Lengths) -> list[str]:
    return [
        f"  engine GPU    {engine.weights_bytes / GIB:.1f} GiB weights; "
        f"{engine.cache_bytes / GIB:.1f} GiB KV cache, for {_number(engine.cache_tokens)} tokens "
        f"in {counted(max(1, round(config.actors.gpus_per_worker)), 'GPU')}; "
        f"{_number(engine.requests)} requests at once, limited by {engine.requests_limit}",
        f"  generation    {least_workers(config.actors)} x {_number(engine.steps_per_s)} "
        "agent steps/s, "
        f"{_number(engine.steps_per_s * lengths.response)} tokens/s each: "
        f"{engine.prefill_s * 1000:.1f} ms for a prompt of {_number(lengths.new_prompt)} tokens, "
        f"{engine.decode_s * 1000:.1f} ms for an answer of {_number(lengths.response)}",
    ]


def _rate_lines(config: Config, estimate: Estimate) -> list[str]:
    lengths, step_s = estimate.lengths, estimate.step_s
    trained_tokens = lengths.new_prompt + lengths.response
    rate = estimate.n_trained / step_s
    cores = estimate.n_played / step_s * (WORKER_S + ENVIRONMENT_S) if estimate.engine else 0.0
    return [
        f"  training      {_number(estimate.train_steps_per_s)} agent steps/s, "
        f"{_number(estimate.train_steps_per_s * trained_tokens)} tokens/s",
        f"  learner step  {_number(estimate.n_trained)} agent steps in {_number(step_s)} s: "
        f"{_number(estimate.play_s)} s to play, {_number(estimate.train_s)} s to train, "
        f"{_number(estimate.publish_s)} s to publish, {_number(estimate.checkpoint_s)} s for "
        f"checkpoints; {_number(estimate.write_s)} s to write files beside it",
        f"  together      {_number(rate)} agent steps/s, {_number(rate * trained_tokens)} tokens/s"
        + (f"; {_number(cores)} CPU cores for workers and environments" if cores else ""),
        f"  waits         {_waits(config, estimate)}",
    ]


def _waits(config: Config, estimate: Estimate) -> str:
    """Say in one line who waits for whom, and for how much of the time."""
    if estimate.engine is None:
        return "nobody: nothing is played"
    play_s, learn_s = estimate.play_s, estimate.learn_s
    if estimate.is_synchronous:
        engines, learner = learn_s / estimate.step_s, play_s / estimate.step_s
        return (
            f"the engines, {engines:.0%} of the time, and the learner, {learner:.0%}, for each "
            "other (max_staleness=0)"
        )
    if play_s > learn_s:
        return (
            f"the learner, {1 - learn_s / play_s:.0%} of the time, for groups; the limit is: "
            f"{estimate.slowest}"
        )
    return (
        f"the engines, {1 - play_s / learn_s:.0%} of the time, for admission; the limit is: learner"
    )


def _number(value: float) -> str:
    """Return a number with three digits, such as 1,230 or 0.0123."""
    return f"{float(f'{value:.3g}'):,.12g}"

"""python -m learner replay RUN --step K [--to M] [--explain] [--set key=value ...]: learner steps
again, from what is stored.

    for step in replayed(layout, config, first=21, last=40, explained=None, say=print):
        assert step.same

A learner of its own starts from the newest kept checkpoint before step K, else from the base model,
and trains on the groups that the run's learner trained on, in their order, at their versions. After
each step its weights are exported as they were published, and have to have the digest of the
version that the step published; the figures recorded with the step have to be the same numbers. The
run itself is only read, also while it trains: what is written goes to a temporary directory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import ray
import torch
from transformers.utils.logging import disable_progress_bar

import configs
from configs import Config
from gigpo import prepare_advantages
from learner.data.batch_loader import ready_batch, source_of
from learner.distributed.deepspeed_setup import PARTITIONED
from learner.distributed.device import described, reservation
from learner.distributed.ray_directory import make_ray_directory, remove_ray_directories
from learner.publishing.base_model import base_model
from learner.rank_group import RankGroup
from learner.ray_actor import RAY_HIDES_GPUS, ray_token
from learner.replay.explain import Explanation, explain, reasons, table
from learner.training.step_metrics import timeless_metrics
from printable import plain_console
from store import (
    CheckpointRecord,
    RunLayout,
    VersionRecord,
    published_version,
    read_run_file,
    restart_points,
    trained_step,
)

SAME, DIFFERENT = 0, 1
LEARNING_RATE = "loss/learning_rate"  # the first to look at
# Settings that a run may be continued with and that change what a learner step does, to the last
# bit at least.
CHANGES_BITS = (
    "learner.learning_rate",
    "learner.steps",
    "learner.ranks",
    "learner.threads",
    "learner.zero_stage",
    "learner.micro_batch_tokens",
    "learner.deterministic",
    "model.lora_tf32",
    "stored.train_on",
)
NEWEST_CONFIG = "config.yaml"  # of a run's newest start, as `cli/train.py` leaves it
SHOWN_FIGURES, SHOWN_DIGITS = 5, 12  # in a difference; digits of a digest
LEAST_WIDTH = 140  # characters, of the explanation

Say = Callable[[str], None]
Explained = Callable[[Explanation], None]


class ReplayError(ValueError):
    """What was asked for cannot be replayed here; the message says why, and what can be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A learner step that was trained again; or the one it began after, loaded and not trained."""

    learner_step: int
    published: VersionRecord
    digest: str  # of the weights here
    # figure -> what was recorded, and what it is here, where they differ
    changed: Mapping[str, tuple[float, float]]
    n_figures: int  # that were compared
    what: str  # was trained on
    seconds: float

    @property
    def same(self) -> bool:
        return self.digest == self.published.digest and not self.changed


def run(options: argparse.Namespace) -> int:
    layout = RunLayout.open(options.run_dir)
    last = options.step if options.to is None else options.to
    if not 1 <= options.step <= last:
        raise ReplayError(
            f"--step {options.step} --to {last}: steps count from 1, and the last is not before "
            "the first"
        )
    console = plain_console(soft_wrap=False)
    console.width = max(console.width, LEAST_WIDTH)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def show(explanation: Explanation) -> None:
        console.print(table(explanation))
        for reason in reasons(explanation):
            say(reason)

    n_trained, seconds, n_figures = 0, 0.0, 0
    config = _config(layout, options.set)
    for step in replayed(
        layout,
        config,
        first=options.step,
        last=last,
        explained=show if options.explain else None,
        say=say,
    ):
        if not step.same:
            say(_difference(step, config, layout))
            return DIFFERENT
        n_trained, seconds, n_figures = n_trained + 1, seconds + step.seconds, step.n_figures
    each = (
        f"weights and {n_figures} figures of each, bit for bit"
        if n_trained > 1
        else f"weights and {n_figures} figures"
    )
    say(
        f"{n_trained} of {n_trained} learner steps identical, {each}; {seconds / n_trained:.1f} s "
        "a step"
    )
    return SAME


def replayed(
    layout: RunLayout,
    config: Config,
    *,
    first: int,
    last: int,
    explained: Explained | None,
    say: Say,
) -> Iterator[Replayed]:
    """Every learner step from the one after the starting point to `last`, as soon as it is trained;
    ends at the first that differs. Of the starting point only that it differs. `explained` is given
    what learner step `first` is about to learn.

    Raises ReplayError, and what reading raises: StoreError, CheckpointError, FileNotFoundError,
    with the name of the file.
    """
    _check_possible(config, explains=explained is not None)
    trained_step(layout, last)  # before anything is loaded: is it there?
    model_path = base_model(layout, config)
    disable_progress_bar()  # of loading the model
    source = source_of(config, layout, claim=lambda version: None)
    prepare_advantages(source.advantages)
    with (
        _scratch(layout) as scratch,
        _ranks(
            replace(config, run_dir=str(scratch)), model_path=model_path, run=layout.root
        ) as ranks,
    ):
        start = _restored(layout, ranks, before=first, model_path=model_path, scratch=scratch)
        say(start.what)
        if not start.same:
            yield start
            return
        for learner_step in range(start.learner_step + 1, last + 1):
            began_at_s = time.monotonic()
            recorded = trained_step(layout, learner_step)
            ready = ready_batch(
                source, recorded.batch, version=recorded.version_in, learner_step=learner_step
            )
            if explained is not None and learner_step == first:
                explained(explain(ranks.engine, ready))
            updates = ranks.train([update.micro_batches for update in ready.updates])
            figures = timeless_metrics(ready, updates)
            known = {
                name: (recorded.figures[name], value)
                for name, value in figures.items()
                if name in recorded.figures
            }
            step = Replayed(
                learner_step=learner_step,
                published=recorded.published,
                digest=_digest(ranks, scratch),
                changed={name: pair for name, pair in known.items() if pair[0] != pair[1]},
                n_figures=len(known),
                what=f"groups {len(recorded.batch.groups)}, rows {ready.rows.num_rows}, updates {len(updates)}",
                seconds=time.monotonic() - began_at_s,
            )
            same = f"identical to version {step.published.version}" if step.same else "DIFFERENT"
            say(f"learner step {learner_step}: {step.what}: {same} ({step.seconds:.1f} s)")
            yield step
            if not step.same:
                return


def _config(layout: RunLayout, settings: Sequence[str]) -> Config:
    return configs.load_stored(
        layout.info.config_yaml, settings, name=f"the config of {layout.root}"
    )


def _check_possible(config: Config, *, explains: bool) -> None:
    """The weights of another device would differ in their last bits."""
    learner, has_gpu = config.learner, torch.cuda.is_available()
    if has_gpu and not learner.gpus_per_rank:
        raise ReplayError(
            "the run's learner had no GPU (learner.gpus_per_rank=0); hide this one: "
            "CUDA_VISIBLE_DEVICES= python ..."
        )
    if learner.gpus_per_rank and not has_gpu:
        raise ReplayError(
            f"the run's learner had GPUs (learner.gpus_per_rank={learner.gpus_per_rank:g}), there "
            "is none here"
        )
    if learner.gpus_per_rank and learner.ranks > 1:
        raise ReplayError(
            f"learner.ranks={learner.ranks} on GPUs cannot be replayed; on CPUs they can"
        )
    if explains and learner.zero_stage >= PARTITIONED:
        raise ReplayError(
            f"learner.zero_stage={learner.zero_stage} spreads the gradient over the ranks; leave "
            "out --explain"
        )


@contextmanager
def _scratch(layout: RunLayout) -> Iterator[Path]:
    """A run directory for what a learner writes: weights, and the logs of its ranks."""
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        shutil.copyfile(layout.run_json, Path(name) / layout.run_json.name)
        (Path(name) / layout.logs.name).mkdir()
        yield Path(name)


@contextmanager
def _ranks(config: Config, *, model_path: Path, run: Path) -> Iterator[RankGroup]:
    """As many as the run had; several need a Ray of their own."""
    with _private_ray(run) if config.learner.ranks > 1 else nullcontext():
        ranks = RankGroup(config, model_path=str(model_path))
        try:
            yield ranks
        finally:
            ranks.close()


@contextmanager
def _private_ray(run: Path) -> Iterator[None]:
    """Start a Ray whose directory no other user can enter, and remove both at the end.

    What a killed replay of the run left is removed first.
    """
    remove_ray_directories(run)
    directory = make_ray_directory(run)
    os.environ.update(RAY_HIDES_GPUS)
    try:
        with ray_token(directory):
            try:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="error",
                    configure_logging=False,
                    _temp_dir=str(directory / "ray"),  # Ray lets everybody write there
                )
                yield
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _restored(
    layout: RunLayout, ranks: RankGroup, *, before: int, model_path: Path, scratch: Path
) -> Replayed:
    """The newest state before a learner step that is still there, loaded; compared with the version
    it was published as.
    """
    began_at_s = time.monotonic()
    kept = [
        point
        for point in restart_points(layout)
        if point.learner_step < before and (layout.root / point.path).is_dir()
    ]
    if kept:
        _load(layout, ranks, kept[0])
    learner_step, version = (kept[0].learner_step, kept[0].version) if kept else (0, 0)
    what = (
        f"the checkpoint of learner step {learner_step}" if kept else f"the base model {model_path}"
    )
    published = published_version(layout, version)
    digest = _digest(ranks, scratch)
    same, perhaps = (
        "are" if digest == published.digest else "are NOT",
        reservation(ranks.engine.learner),
    )
    return Replayed(
        learner_step=learner_step,
        published=published,
        digest=digest,
        changed={},
        n_figures=0,
        what=f"{layout.root}: begins with {what}; its weights {same} those of version {version}{perhaps}",
        seconds=time.monotonic() - began_at_s,
    )


def _load(layout: RunLayout, ranks: RankGroup, record: CheckpointRecord) -> None:
    point = ranks.load_checkpoint(layout.root / record.path)
    if (point.learner_step, point.version) != (record.learner_step, record.version):
        raise ReplayError(
            f"{layout.root / record.path} was written at learner step {point.learner_step} and "
            f"version {point.version}, the "
            f"catalog has {record.learner_step} and {record.version}: move it away to begin at an "
            "older one"
        )


def _digest(ranks: RankGroup, scratch: Path) -> str:
    """Of the weights as they are now, written as a version is."""
    directory = scratch / "weights"
    digest = ranks.publish(directory)
    shutil.rmtree(directory)
    return digest


def _difference(step: Replayed, config: Config, layout: RunLayout) -> str:
    """What is known of why."""
    after = f"after learner step {step.learner_step}"
    if step.digest != step.published.digest:
        here, there = step.digest[:SHOWN_DIGITS], step.published.digest[:SHOWN_DIGITS]
        lines = [
            f"the weights {after} are {here} here, {there} as published in version "
            f"{step.published.version}"
        ]
    else:
        lines = [f"the weights {after} are identical, but {len(step.changed)} figures differ"]
    names = sorted(step.changed, key=lambda name: (name != LEARNING_RATE, name))
    lines += [
        f"  {name}: {step.changed[name][0]!r} recorded, {step.changed[name][1]!r} here"
        for name in names[:SHOWN_FIGURES]
    ]
    device = described(config.learner) + reservation(config.learner)
    lines.append(
        f"this is torch {torch.__version__} on {device}; another release, processor or code than "
        "the run's changes bits. So do "
        f"{', '.join(CHANGES_BITS)}: where the run was continued with others than run.json has, "
        "give those with --set"
    )
    if (layout.root / NEWEST_CONFIG).is_file():
        started = configs.from_yaml(read_run_file(layout.root, NEWEST_CONFIG))
        changed = [
            f"{key}={now}"
            for key in CHANGES_BITS
            if (now := attrgetter(key)(started)) != attrgetter(key)(config)
        ]
        lines += [f"its newest start had others; try --set {' '.join(changed)}"] * bool(changed)
    return "\n".join(lines)

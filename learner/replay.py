"""Train learner steps again from the store, and compare weights and figures bit for bit.

    for step in replayed(layout, config, first=21, last=40, explained=None, say=print):
        assert step.same

A learner starts from the newest kept checkpoint before step 21, or from the base model. It trains
on the same groups in the same order and at the same versions as the run's learner did. After each
step its weights must have the digest of the version that the step published, and its figures must
equal the recorded ones. The run is only read, also while it trains; files are written to a
temporary directory.
"""

from __future__ import annotations

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
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

import configs
from configs import Config
from gigpo import AdvantageSettings, check_group_filter, prepare_advantages
from learner.data.batch_loader import PreparedBatch, make_loader, prepare_batch
from learner.distributed.deepspeed_setup import PARTITIONED, device_text, nondeterminism_note
from learner.distributed.private_ray import (
    RAY_HIDES_GPUS,
    make_ray_directory,
    on_the_loopback,
    own_imports,
    ray_secrets,
    remove_ray_directories,
)
from learner.explain import Explanation, explain, left_out_lines, table
from learner.publishing.base_model import base_model
from learner.rank_group import RankGroup
from learner.training.critic import critic_metrics
from learner.training.engine import train_batch
from learner.training.step_metrics import timeless_metrics
from printable import UserError
from store import (
    CONFIG_FILE,
    CheckpointRecord,
    RunLayout,
    TrainedStep,
    VersionRecord,
    published_version,
    read_run_file,
    restart_points,
    trained_step,
)

OTHER_VALUES = "trajectories whose values, by the critic, are not the recorded ones"
LEARNING_RATE = "loss/learning_rate"  # shown first among the differences
# A run may be continued with other values of these settings, and they change a step's bits.
CHANGES_BITS = (
    "learner.learning_rate",
    "critic.learning_rate",
    "learner.steps",
    "learner.ranks",
    "learner.sequence_parallel",
    "learner.threads",
    "learner.zero_stage",
    "learner.micro_batch_tokens",
    "learner.deterministic",
    "offline.train_on",
)
SHOWN_FIGURES, SHOWN_DIGITS = 5, 12  # in a difference; digits of a digest
LEAST_WIDTH = 140  # characters, for the explanation's table

Say = Callable[[str], None]


class ReplayError(UserError, ValueError):
    """The requested steps cannot be replayed here. The message gives the reason and a remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A learner step trained again, or the starting point, which is only loaded and compared."""

    learner_step: int
    published: VersionRecord
    digest: str  # of the weights computed here
    changed: Mapping[str, tuple[float, float]]  # differing figure -> recorded value, value here
    n_figures: int  # number of figures compared
    what: str  # the groups, rows and updates, for people
    seconds: float

    @property
    def same(self) -> bool:
        return self.digest == self.published.digest and not self.changed


def replay_steps(
    run: Path, *, first: int, last: int, settings: Sequence[str], explains: bool, console: Console
) -> bool:
    """Train learner steps `first` to `last` of a run again and show how they compare.

    Return whether all of them are identical. `explains` shows the gradient of each group of step
    `first`. Raises ReplayError, StoreError and CheckpointError.
    """
    layout = RunLayout.open(run)
    if not 1 <= first <= last:
        raise ReplayError(
            f"steps {first} to {last}: steps count from 1, and the last is not before the first"
        )
    console.width = max(console.width, LEAST_WIDTH)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    def show(explanation: Explanation) -> None:
        console.print(table(explanation))
        for line in left_out_lines(explanation):
            say(line)

    config = configs.load_saved(
        layout.info.config_yaml, settings, name=f"the config of {layout.root}"
    )
    explained = show if explains else None
    trained = []
    for step in replayed(layout, config, first=first, last=last, explained=explained, say=say):
        if not step.same:
            say(_difference(step, config=config, layout=layout))
            return False
        trained.append(step)
    each = f"weights and {trained[-1].n_figures} figures"
    if len(trained) > 1:
        each += " of each, bit for bit"
    step_s = sum(step.seconds for step in trained) / len(trained)
    say(f"{len(trained)} of {len(trained)} learner steps identical, {each}; {step_s:.1f} s a step")
    return True


def replayed(
    layout: RunLayout,
    config: Config,
    *,
    first: int,
    last: int,
    explained: Callable[[Explanation], None] | None,
    say: Say,
) -> Iterator[Replayed]:
    """Yield each learner step from the starting point to `last`, up to the first that differs.

    The starting point itself is yielded only if it differs. `explained` gets the explanation of
    step `first` before it is trained. Raises ReplayError, StoreError, CheckpointError and
    FileNotFoundError.
    """
    _check_possible(config, explains=explained is not None)
    trained_step(layout, last)  # raises, before anything is loaded, if there is no such step
    model_path = base_model(layout, config)
    disable_progress_bar()  # shown by transformers while it loads the model
    prepare_advantages(_advantage_settings(config))
    with (
        _scratch(layout) as scratch,
        _ranks(config, layout, model_path=model_path, scratch=scratch) as ranks,
    ):
        # The batches are those of the store, so nothing is claimed.
        loader = make_loader(
            config,
            layout,
            claim=lambda version: None,
            refill=lambda batch_id, **wanted: None,
            ask_critic=ranks.values,
        )
        start = _restored(layout, ranks, before=first, model_path=model_path, scratch=scratch)
        say(start.what)
        if not start.same:
            yield start
            return
        for learner_step in range(start.learner_step + 1, last + 1):
            began_at_s = time.monotonic()
            recorded = trained_step(layout, learner_step)
            batch = prepare_batch(
                loader,
                recorded.batch,
                version=recorded.version_in,
                learner_step=learner_step,
                more=None,
            )
            if explained is not None and learner_step == first:
                explained(explain(ranks.engine, batch))
            step = _trained_again(ranks, batch, recorded, config=config, began_at_s=began_at_s)
            same = f"identical to version {step.published.version}" if step.same else "DIFFERENT"
            say(f"learner step {learner_step}: {step.what}: {same} ({step.seconds:.1f} s)")
            yield step
            if not step.same:
                return


def _trained_again(
    ranks: RankGroup,
    batch: PreparedBatch,
    recorded: TrainedStep,
    *,
    config: Config,
    began_at_s: float,
) -> Replayed:
    """Train on the batch, and compare the weights and the figures with the recorded ones."""
    updates, critic = train_batch(
        ranks, batch.updates, config=config, learner_step=recorded.learner_step
    )
    figures = timeless_metrics(batch, updates) | critic_metrics(critic)
    compared = figures.keys() & recorded.figures.keys()
    pairs = {name: (recorded.figures[name], figures[name]) for name in compared}
    other_values = sum(recorded.values.get(uid) != own for uid, own in batch.state_values.items())
    pairs[OTHER_VALUES] = (0.0, float(other_values))
    what = f"groups {len(recorded.batch.groups)}, rows {batch.rows.num_rows}"
    if batch.replayed.num_rows:
        what += f", rows of replayed wins {batch.replayed.num_rows}"
    return Replayed(
        learner_step=recorded.learner_step,
        published=recorded.published,
        digest=ranks.copy_weights(),
        changed={name: (was, here) for name, (was, here) in pairs.items() if was != here},
        n_figures=len(compared),
        what=f"{what}, updates {len(updates)}",
        seconds=time.monotonic() - began_at_s,
    )


def _advantage_settings(config: Config) -> AdvantageSettings:
    """Return the settings of advantages. Raises ReplayError for values that a run cannot have."""
    try:
        check_group_filter(config.algorithm.group_filter)
        return AdvantageSettings.of(config.algorithm)
    except ValueError as error:
        raise ReplayError(f"the run's config: algorithm.{error}") from error


def _check_possible(config: Config, *, explains: bool) -> None:
    """Raise ReplayError if the weights could not be the same bits on this machine."""
    learner, has_gpu = config.learner, torch.cuda.is_available()
    if has_gpu and not learner.gpus_per_rank:
        raise ReplayError(
            "the run's learner had no GPU (learner.gpus_per_rank=0); hide this one: "
            "CUDA_VISIBLE_DEVICES= gigpo replay ..."
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
    if explains and learner.sequence_parallel > 1:
        raise ReplayError(
            f"learner.sequence_parallel={learner.sequence_parallel} spreads each sequence over "
            "several ranks; leave out --explain"
        )
    if explains and learner.zero_stage >= PARTITIONED:
        raise ReplayError(
            f"learner.zero_stage={learner.zero_stage} spreads the gradient over the ranks; leave "
            "out --explain"
        )


@contextmanager
def _scratch(layout: RunLayout) -> Iterator[Path]:
    """Make a temporary run directory for weights and for the logs of the ranks."""
    with tempfile.TemporaryDirectory(prefix="replay-") as name:
        shutil.copyfile(layout.run_json, Path(name) / layout.run_json.name)
        (Path(name) / layout.logs.name).mkdir()
        yield Path(name)


@contextmanager
def _ranks(
    config: Config, layout: RunLayout, *, model_path: Path, scratch: Path
) -> Iterator[RankGroup]:
    """Start as many ranks as the run had. Several ranks need a Ray of their own."""
    with _private_ray(layout.root) if config.learner.ranks > 1 else nullcontext():
        ranks = RankGroup(replace(config, run_dir=str(scratch)), model_path=str(model_path))
        try:
            yield ranks
        finally:
            ranks.close()


@contextmanager
def _private_ray(run: Path) -> Iterator[None]:
    """Start a Ray that no other user can reach, and remove it with its directory at the end."""
    remove_ray_directories(run)  # left by killed replays of the run
    directory = make_ray_directory(run)
    os.environ.update(RAY_HIDES_GPUS)
    try:
        with ray_secrets(directory):
            try:
                with on_the_loopback() as given:
                    ray.init(
                        address="local",
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level="error",
                        configure_logging=False,
                        job_config=own_imports(),
                        _temp_dir=str(directory / "ray"),  # Ray makes it writable for everybody
                        **given,
                    )
                yield
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _restored(
    layout: RunLayout, ranks: RankGroup, *, before: int, model_path: Path, scratch: Path
) -> Replayed:
    """Load the newest state before a learner step, and compare it with its published version."""
    began_at_s = time.monotonic()
    kept = [
        point
        for point in restart_points(layout)
        if point.learner_step < before and (layout.root / point.path).is_dir()
    ]
    learner_step = 0
    version = 0
    source = f"the base model {model_path}"
    if kept:
        _load(layout, ranks, record=kept[0])
        learner_step, version = kept[0].learner_step, kept[0].version
        source = f"the checkpoint of learner step {learner_step}"
    published = published_version(layout, version)
    digest = ranks.copy_weights()
    same = "are" if digest == published.digest else "are NOT"
    note = nondeterminism_note(ranks.engine.learner)
    return Replayed(
        learner_step=learner_step,
        published=published,
        digest=digest,
        changed={},
        n_figures=0,
        what=f"{layout.root}: begins with {source}; its weights {same} those of version "
        f"{version}{note}",
        seconds=time.monotonic() - began_at_s,
    )


def _load(layout: RunLayout, ranks: RankGroup, *, record: CheckpointRecord) -> None:
    point = ranks.load_checkpoint(layout.root / record.path)
    if (point.learner_step, point.version) != (record.learner_step, record.version):
        raise ReplayError(
            f"{layout.root / record.path} was written at learner step {point.learner_step} and "
            f"version {point.version}, the catalog has {record.learner_step} and {record.version}: "
            "move it away to begin at an older one"
        )


def _difference(step: Replayed, *, config: Config, layout: RunLayout) -> str:
    """Describe a difference and its possible causes."""
    after = f"after learner step {step.learner_step}"
    lines = [f"the weights {after} are identical, but {len(step.changed)} figures differ"]
    if step.digest != step.published.digest:
        here, there = step.digest[:SHOWN_DIGITS], step.published.digest[:SHOWN_DIGITS]
        lines = [
            f"the weights {after} are {here} here, {there} as published in version "
            f"{step.published.version}"
        ]
    names = sorted(step.changed, key=lambda name: (name != LEARNING_RATE, name))
    for name in names[:SHOWN_FIGURES]:
        recorded, here_value = step.changed[name]
        lines.append(f"  {name}: {recorded!r} recorded, {here_value!r} here")
    device = device_text(config.learner) + nondeterminism_note(config.learner)
    lines.append(
        f"this is torch {torch.__version__} on {device}; another release, processor or code than "
        f"the run's changes bits. So do {', '.join(CHANGES_BITS)}: if the run was continued with "
        "values that differ from run.json, give them as key=value"
    )
    if (layout.root / CONFIG_FILE).is_file():
        newest = configs.from_yaml(read_run_file(layout.root, CONFIG_FILE))
        found = {key: (attrgetter(key)(newest), attrgetter(key)(config)) for key in CHANGES_BITS}
        changed = [f"{key}={there}" for key, (there, here) in found.items() if there != here]
        if changed:
            lines.append(f"its newest start had others; try {' '.join(changed)}")
    return "\n".join(lines)

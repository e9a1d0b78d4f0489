"""Train in a small world while time is simulated: groups take long, become too old, are waited for.

    simulation = Simulation(engine=engine, world=world, config=config, task_step_s=[0.2, 1.8],
                            noise=0.25, slots=8, learn_s=12.0)
    for step in simulation.steps():
        step.clock_s, step.task_success ...

An episode takes its number of steps, times the time of a step in its task, times a log-normal
number of its own. A group is complete with its last episode. The rules are those of the system:

- `free_groups` of the coordinator admits groups; `slots` of them are played at once, each to its
  end on the weights with which it began.
- The learner claims the oldest complete groups, while it trains on the batch before for the next
  version (learner/data/prefetch.py), and with max_staleness=0 only between two steps. Complete
  groups that are too old are left out first (store/catalog/batches.py).
- `stragglers: drop` gives up a group that new weights make too old while it is played. If no
  episode of it has ended it is played again, up to MAX_REQUEUES times (coordinator/leases.py).
- `stragglers: wait` lets the learner claim nothing while that would make a group too old.

Groups that teach nothing are not refilled (algorithm.refill_groups=0).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from benchmarks.studies.small_training import train_on
from benchmarks.studies.small_world import (
    Answers,
    World,
    answers_of,
    chances_of,
    play_tasks,
    wins_of,
)
from configs import Config
from coordinator.admission import free_groups
from coordinator.leases import MAX_REQUEUES
from coordinator.task_queue import task_index
from learner.training.engine import Engine


@dataclass(eq=False, kw_only=True, slots=True)
class Group:
    """A group of one task. Times are of its newest attempt."""

    ordinal: int
    task: int
    version: int = 0  # of the weights that played it
    rows: pa.Table | None = None
    lengths: Sequence[int] = ()  # steps of each episode
    ends_s: Sequence[float] = ()  # of each episode
    n_requeued: int = 0

    @property
    def end_s(self) -> float:
        return max(self.ends_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """A learner step, the simulated time of its end, and what its weights can do."""

    clock_s: float
    staleness: float  # versions, mean of the groups
    groups: tuple[Group, ...]  # that were trained on
    task_success: np.ndarray  # float64 [tasks], probability of a win after the step


@dataclass(kw_only=True, slots=True)
class Simulation:
    """Play, claim and train in simulated time. Each list holds the groups of one state."""

    engine: Engine
    world: World
    config: Config
    task_step_s: Sequence[float]  # time of a step in each task
    noise: float  # standard deviation of the logarithm of an episode's own factor
    slots: int
    learn_s: float
    clock_s: float = 0.0
    version: int = 0
    n_opened: int = 0
    open: list[Group] = field(default_factory=list)  # given up, to be played again
    in_play: list[Group] = field(default_factory=list)
    complete: list[Group] = field(default_factory=list)
    claimed: list[Group] = field(default_factory=list)
    training: list[Group] = field(default_factory=list)
    trained_at_s: float = np.inf  # end of the learner step that is under way
    attempts: list[Group] = field(default_factory=list)  # every group at each time it was begun
    n_stale: int = 0  # groups that were never trained on
    answers: Answers = field(init=False)  # of the weights of answers_version
    answers_version: int = -1

    def steps(self) -> Iterator[TimedStep]:
        """Play and train `config.learner.steps` times."""
        while self.version < self.config.learner.steps:
            self._lease()
            self._claim()
            next_end_s = min((group.end_s for group in self.in_play), default=np.inf)
            assert min(next_end_s, self.trained_at_s) < np.inf, "nothing is played or trained on"
            self.clock_s = min(next_end_s, self.trained_at_s)
            if next_end_s <= self.trained_at_s:
                ended = [group for group in self.in_play if group.end_s <= self.clock_s]
                self.complete += ended
                self.in_play = [group for group in self.in_play if group not in ended]
            else:
                yield self._train()

    def task_success(self) -> np.ndarray:
        """Return the probability of a win with the weights of now, float64 [tasks]."""
        worth = wins_of(self.world, chances_of(self.world, self.engine))
        return worth[self.world.max_steps][list(self.world.starts)]

    def _lease(self) -> None:
        while len(self.in_play) < self.slots:
            if self.open:
                group = self.open.pop(0)
            elif self._n_admitted():
                tasks = len(self.world.tasks)
                task = task_index(self.n_opened, tasks, seed=self.config.seed)
                group = Group(ordinal=self.n_opened, task=task)
                self.n_opened += 1
            else:
                return
            self._play(group)
            self.in_play.append(group)

    def _n_admitted(self) -> int:
        held = (self.open, self.in_play, self.complete, self.claimed, self.training)
        return free_groups(
            outstanding=sum(map(len, held)),
            groups_per_step=self.config.learner.groups_per_step,
            max_staleness=self.config.max_staleness,
        )

    def _play(self, group: Group) -> None:
        """Play all episodes with the weights of now, and let them end later."""
        seed = (self.config.seed, group.ordinal, group.n_requeued)
        group.version = self.version
        group.rows = self._rows(group, seed=seed)
        counts = group.rows["traj_uid"].value_counts().to_pylist()
        group.lengths = [int(each["counts"]) for each in counts]
        factors = np.random.default_rng([*seed, 1]).lognormal(sigma=self.noise, size=len(counts))
        step_s = self.task_step_s[group.task]
        group.ends_s = [
            self.clock_s + length * step_s * factor
            for length, factor in zip(group.lengths, factors, strict=True)
        ]
        self.attempts.append(replace(group, rows=None))

    def _rows(self, group: Group, *, seed: tuple[int, ...]) -> pa.Table:
        return play_tasks(
            self._answers(),
            self.world,
            tasks=[group.task],
            group_size=self.config.algorithm.group_size,
            seed=seed,
            version=self.version,
        )

    def _answers(self) -> Answers:
        """Return the distributions of the weights of now. Those of choices take one pass."""
        if self.answers_version != self.version:
            self.answers, self.answers_version = answers_of(self.engine, self.world), self.version
            self.answers.after(
                [
                    (*choice.prompt_ids, *choice.answer_ids[:n])
                    for choice in self.world.choices
                    for n in range(len(choice.answer_ids))
                ]
            )
        return self.answers

    def _claim(self) -> None:
        """Claim a batch for the version at which it will be trained on, and begin to train."""
        if not self.claimed and (not self.training or self.config.max_staleness):
            at_version = self.version + bool(self.training)
            oldest = at_version - self.config.max_staleness
            waits = self.config.stragglers == "wait" and any(
                group.version == oldest for group in self.in_play
            )
            if not waits:
                self._drop_stale(oldest)
                self._take_oldest()
        if self.claimed and not self.training:
            self.training, self.claimed = self.claimed, []
            self.trained_at_s = self.clock_s + self.learn_s

    def _drop_stale(self, oldest: int) -> None:
        fresh = [group for group in self.complete if group.version >= oldest]
        self.n_stale += len(self.complete) - len(fresh)
        self.complete = fresh

    def _take_oldest(self) -> None:
        n = self.config.learner.groups_per_step
        if len(self.complete) >= n:
            self.complete.sort(key=lambda group: (group.version, group.ordinal))
            self.claimed, self.complete = self.complete[:n], self.complete[n:]

    def _train(self) -> TimedStep:
        batch, self.training = self.training, []
        self.trained_at_s = np.inf
        self._learn(batch)
        staleness = float(np.mean([self.version - group.version for group in batch]))
        self.version += 1
        self._give_up_too_old()
        return TimedStep(
            clock_s=self.clock_s,
            staleness=staleness,
            groups=tuple(replace(group, rows=None) for group in batch),
            task_success=self.task_success(),
        )

    def _learn(self, batch: Sequence[Group]) -> None:
        rows = pa.concat_tables([group.rows for group in batch if group.rows is not None])
        train_on(self.engine, rows, self.config, version=self.version)

    def _give_up_too_old(self) -> None:
        oldest = self.version - self.config.max_staleness
        for group in [each for each in self.in_play if each.version < oldest]:
            assert self.config.stragglers == "drop", f"group {group.ordinal} was not waited for"
            self.in_play.remove(group)
            has_member = min(group.ends_s) <= self.clock_s
            if has_member or group.n_requeued == MAX_REQUEUES:
                self.n_stale += 1
            else:
                group.n_requeued += 1
                self.open.append(group)

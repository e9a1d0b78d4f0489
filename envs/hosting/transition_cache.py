"""Remember the answers of deterministic environments, so that none is computed twice.

    cache = TransitionCache("textworld", deterministic=True, max_bytes=MAX_BYTES, keeper=keeper)
    episode = cache.episode(task, objects)
    observation = await episode.answer(RESET)
    transition = await episode.answer("go east")
    episode.close()

A task is remembered as a graph: a node is a state, an edge an action with its answer. Two ways into
one state share its node if the environment has `state_key`; without it every sequence of actions
has a node of its own. An environment that does not say `deterministic = True` is always asked.

A remembered answer asks no environment object, nor does an action that a state does not understand,
if the environment has `understood`. Before an unknown action an object is brought to the
episode's state: by `restore_state`, and then other episodes may have it afterwards, or by the
actions that it has missed. So an episode never takes more steps than without the cache.

An environment with `kept_answers` has a file for each task (`kept_answers.py`), which is read when
the task is first played, and written when no episode of it is played any more. A file has no saved
states: a state that is known from it is reached by actions once, and saved then.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary, ref

from envs.base import Task, Transition
from envs.errors import EnvironmentDied
from envs.hosting.answers import KEY_BYTES, Answer, StepFrom, Understood
from envs.hosting.kept_answers import (
    UNREADABLE,
    AnswerFile,
    AnswerKeeper,
    KeptAnswer,
    Result,
    StateRecord,
)
from envs.hosting.pending import request_of_task

# The bytes that a worker remembers, beside an engine that takes gigabytes: some 60,000 steps of
# short texts.
MAX_BYTES = 2**27
RECORD_BYTES = 1200  # of an answer with its node and edge, without texts and pixels; measured
RESET = None  # stands for `reset` among the actions of the root


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Node:
    """A state, with the known answers to its actions."""

    id: bytes  # equal in all processes
    saved: bytes | None = None
    understood: Understood | None = None
    edges: dict[str | None, _Edge] = field(default_factory=dict)

    def known(self, action: str | None) -> _Edge | None:
        """Return the edge of an action; None if the environment has to be asked."""
        edge = self.edges.get(action)
        if edge is None and self.understood and action not in self.understood.actions:
            return _Edge(self.understood.otherwise, self)
        return edge

    def id_after(self, action: str | None) -> bytes:
        """Return the id of the state after an action, for an environment without `state_key`."""
        told = self.id + repr(action).encode(errors="backslashreplace")
        return hashlib.blake2b(told, digest_size=KEY_BYTES).digest()

    def record(self) -> StateRecord:
        answers = tuple(
            KeptAnswer(action=action, result=edge.result, state=edge.node.id)
            for action, edge in self.edges.items()
        )
        return StateRecord(understood=self.understood, answers=answers)


@dataclass(frozen=True, slots=True)
class _Edge:
    result: Result
    node: _Node


@dataclass(eq=False, slots=True)
class EnvironmentObject:
    """An environment object in some process, and where it stands."""

    call: Callable[[str, object], Awaitable[Answer]]
    task: Task  # the last one
    node: ref[_Node] | None = None  # its state; None if that is unknown

    def stands_at(self, node: object) -> bool:
        return node is not None and self.node is not None and self.node() is node


class Objects(Protocol):
    """The environment objects that no episode holds."""

    def take(self, task: Task, node: _Node | None) -> EnvironmentObject: ...

    def give_back(self, returned: EnvironmentObject) -> None: ...


class _Graph:
    """All that is known of one task."""

    def __init__(self, task: Task) -> None:
        self.task, self.root, self.n_bytes = task, _Node(b""), 0
        self.n_playing = 0  # episodes
        self.file: AnswerFile | None = None
        self.opening = asyncio.Lock()
        self.is_open = False  # whether the file was read, or there is none
        self._new: set[_Node] = set()  # with answers that the file lacks
        self._nodes: dict[bytes, _Node] = {}
        self._locks: WeakValueDictionary[tuple[_Node, str | None], asyncio.Lock]
        self._locks = WeakValueDictionary()

    def asking(self, node: _Node, action: str | None) -> asyncio.Lock:
        """Return the lock of a question. A group's episodes often have the same one at once."""
        return self._locks.setdefault((node, action), asyncio.Lock())

    def take_file(self, file: AnswerFile | None) -> None:
        """Know the answers of a file from now on."""
        self.is_open, self.file = True, file
        if file is not None:
            self.n_bytes += sum(map(sys.getsizeof, file.states.values()))

    def is_unread(self, node: _Node) -> bool:
        return self.file is not None and node.id in self.file.states

    def read(self, node: _Node) -> None:
        """Add what the file knows of a state. Raises one of UNREADABLE."""
        assert self.file is not None
        record = self.file.states.pop(node.id)
        self.n_bytes -= sys.getsizeof(record)
        kept = StateRecord.decode(record)
        if node.understood is None:
            node.understood = kept.understood
            self.n_bytes += _n_bytes_understood(kept.understood)
        for answer in kept.answers:
            if answer.action not in node.edges:
                self._add_edge(node, answer)

    def add(self, node: _Node, action: str | None, answer: Answer) -> _Edge:
        state = answer.state
        assert state is not None
        after = node.id_after(action) if state.key is None else state.key
        edge = self._add_edge(node, KeptAnswer(action=action, result=answer.result, state=after))
        self._new.add(node)
        if edge.node.understood is None and state.understood is not None:
            edge.node.understood = state.understood
            self.n_bytes += _n_bytes_understood(state.understood)
            if not self.is_unread(edge.node):
                self._new.add(edge.node)
        self.save_state(edge.node, state.saved)
        return edge

    def save_state(self, node: _Node, saved: bytes | None) -> None:
        if node.saved is None and saved is not None:
            node.saved = saved
            self.n_bytes += len(saved)

    def take_new(self) -> dict[bytes, bytes]:
        """Return the records of states with new answers, which count as written from now on."""
        new, self._new = self._new, set()
        return {node.id: node.record().encode() for node in new}

    def _add_edge(self, node: _Node, answer: KeptAnswer) -> _Edge:
        self.n_bytes += _n_bytes(answer.result) + sys.getsizeof(answer.action)
        after = self._nodes.get(answer.state)
        if after is None:
            after = self._nodes[answer.state] = _Node(answer.state)
        edge = node.edges[answer.action] = _Edge(answer.result, after)
        return edge


class TransitionCache:
    """Keep the graphs of the tasks played last, `max_bytes` of them in all.

    `deterministic`: the class says so. An object of it may still say otherwise.
    """

    def __init__(
        self, env_name: str, *, deterministic: bool, max_bytes: int, keeper: AnswerKeeper | None
    ) -> None:
        self.env_name = env_name
        self.deterministic = deterministic
        self.n_answers = self.n_remembered = 0  # resets and steps; those that asked nobody
        self.n_bytes = 0  # of all graphs
        self.n_held_bytes = 0  # the same, with graphs that are forgotten and still played
        self._can_restore = False  # whether an answer had a saved state
        self._max_bytes = max_bytes
        self._keeper = keeper
        self._graphs: OrderedDict[str, _Graph] = OrderedDict()  # by task id, oldest use first

    def episode(self, task: Task, objects: Objects) -> CachedEpisode:
        """Begin an episode. It takes an environment object when it has a question."""
        if not self.deterministic:
            return CachedEpisode(self, _Graph(task), objects)
        graph = self._graphs.pop(task.id, None)
        if graph is None or graph.task != task:
            if graph is not None:
                self._forgot(graph)
            graph = _Graph(task)
        self._graphs[task.id] = graph
        return CachedEpisode(self, graph, objects)

    async def open(self, graph: _Graph) -> None:
        """Read the task's file, once for all of its episodes. Waits for the storage."""
        if self._keeper is None or graph.is_open or not self.deterministic:
            return
        async with graph.opening:
            if not graph.is_open:
                file = await self._keeper.open(graph.task)
                with self._accounted(graph):
                    graph.take_file(file)

    def asking(self, graph: _Graph, node: _Node, action: str | None) -> asyncio.Lock:
        """Return the lock of a question.

        States that can be restored share a lock: one environment object then has the task in
        memory, and serves all episodes of the task in turn.
        """
        return graph.asking(graph.root, RESET) if self._can_restore else graph.asking(node, action)

    def known(self, graph: _Graph, node: _Node, action: str | None) -> _Edge | None:
        """Return the edge of an action; None if the environment has to be asked."""
        if graph.is_unread(node):
            try:
                with self._accounted(graph):
                    graph.read(node)
            except UNREADABLE as error:
                assert self._keeper is not None and graph.file is not None
                self._keeper.note(f"in {graph.file.path} are ignored where they are none: {error}")
        return node.known(action)

    def add(self, graph: _Graph, node: _Node, action: str | None, answer: Answer) -> _Edge:
        """Remember an answer."""
        assert answer.state is not None
        self._can_restore |= answer.state.saved is not None
        with self._accounted(graph):
            return graph.add(node, action, answer)

    def save_state(self, graph: _Graph, node: _Node, saved: bytes | None) -> None:
        with self._accounted(graph):
            graph.save_state(node, saved)

    def end_episode(self, graph: _Graph) -> None:
        """Write what is new, if this was the last episode of its task."""
        graph.n_playing -= 1
        if graph.n_playing == 0 and self._graphs.get(graph.task.id) is not graph:
            self.n_held_bytes -= graph.n_bytes
        if graph.n_playing == 0 and self._keeper is not None and (new := self._unwritten(graph)):
            self._keeper.save([new])

    def distrust(self, graph: _Graph) -> str:
        """Forget a task whose answers were not repeated. Return what was done with its file."""
        if self._graphs.get(graph.task.id) is graph:
            self._forgot(self._graphs.pop(graph.task.id))
        file, graph.file = graph.file, None
        if file is None:
            return ""
        assert self._keeper is not None
        self._keeper.distrust(file)
        return f"; its kept answers in {file.path} are removed"

    def close(self) -> None:
        """Write what is new of tasks that are still played. Waits for the storage."""
        left = [new for graph in self._graphs.values() if (new := self._unwritten(graph))]
        if left and self._keeper is not None:
            self._keeper.save_now(left)

    def _unwritten(self, graph: _Graph) -> tuple[AnswerFile, dict[bytes, bytes]] | None:
        """Return a task's file and the records that it lacks; None if there are none."""
        if graph.file is None or self._keeper is None or not self.deterministic:
            return None
        try:
            new = graph.take_new()
        except ValueError as error:
            self._keeper.note(f"are not written: {error}")
            return None
        return (graph.file, new) if new else None

    @contextmanager
    def _accounted(self, graph: _Graph) -> Iterator[None]:
        """Count what the block adds to a graph, and forget the tasks that are too many.

        Those whose last episode began first are forgotten, as a whole. Running episodes keep the
        graph of a forgotten task until they end.
        """
        before = graph.n_bytes
        try:
            yield
        finally:
            self.n_held_bytes += graph.n_bytes - before
            if self._graphs.get(graph.task.id) is graph:
                self.n_bytes += graph.n_bytes - before
            while self.n_bytes > self._max_bytes:
                self._forgot(self._graphs.popitem(last=False)[1])

    def _forgot(self, graph: _Graph) -> None:
        """Count a graph no more. Its running episodes keep it until the last one ends."""
        self.n_bytes -= graph.n_bytes
        if graph.n_playing == 0:
            self.n_held_bytes -= graph.n_bytes


class CachedEpisode:
    """One episode: `answer(RESET)`, `answer(action)` for each action, then `close`."""

    def __init__(self, cache: TransitionCache, graph: _Graph, objects: Objects) -> None:
        self._cache, self._graph, self._objects = cache, graph, objects
        # None: no answer is remembered from here on
        self._node: _Node | None = graph.root if cache.deterministic else None
        self._path: list[tuple[str | None, _Edge]] = []  # from the first to the latest answer
        self._object: EnvironmentObject | None = None  # held by this episode
        self._n_done = 0  # length of the path that the object has gone
        self._is_over = False
        self._has_failed = False
        graph.n_playing += 1

    async def answer(self, action: str | None) -> Result:
        """Return the remembered answer, or the environment's. Raises its EnvironmentDied.

        After an error the episode has no state: what the environment said next would be remembered
        for all episodes of the task.
        """
        if self._has_failed:
            raise EnvironmentDied(
                "the episode ended with an error; begin another one with a reset", at_fault=False
            )
        try:
            return await self._answer(action)
        except BaseException:
            self._has_failed = True
            raise

    async def _answer(self, action: str | None) -> Result:
        if action is RESET:
            await self._cache.open(self._graph)
        self._cache.n_answers += 1
        node = self._node
        if node is None:
            return await self._learn(None, action)
        edge = self._cache.known(self._graph, node, action)
        if edge is None:
            async with self._cache.asking(self._graph, node, action):
                edge = self._cache.known(self._graph, node, action)
                if edge is None:
                    return await self._learn(node, action)
        self._cache.n_remembered += 1
        self._node = edge.node
        self._path.append((action, edge))
        # An episode that waits for nobody would not let the others run, nor notice its deadline.
        await asyncio.sleep(0)
        return edge.result

    def close(self) -> None:
        self._give_back()
        if not self._is_over:
            self._is_over = True
            self._cache.end_episode(self._graph)

    def _give_back(self) -> None:
        if self._object is not None:
            self._objects.give_back(self._object)
        self._object = None

    async def _learn(self, node: _Node | None, action: str | None) -> Result:
        """Ask an environment object, and remember its answer."""
        if self._object is None:
            self._object = self._objects.take(self._graph.task, node)
            self._n_done = 0
        asked = self._object
        is_there = asked.stands_at(node)
        asked.node = None  # if a request fails, the object's state is unknown
        if node is None or is_there:
            answer = await asked.call(*self._request(action))
        elif node.saved is not None and action is not None:
            answer = await asked.call(*self._request(action, saved=node.saved))
        else:
            await self._repeat(asked)
            answer = await asked.call(*self._request(action))
        result, state = answer.result, answer.state
        if node is None or state is None:
            self._cache.deterministic, self._node = False, None
            return result
        edge = self._cache.add(self._graph, node, action, answer)
        self._path.append((action, edge))
        self._n_done = len(self._path)
        self._node = edge.node
        asked.node = ref(self._node)
        if state.saved is not None:
            self._give_back()  # any object can go on from here
        return result

    async def _repeat(self, asked: EnvironmentObject) -> None:
        """Have the object take the episode's actions that it has missed.

        It begins in the latest state of the episode that can be restored.
        """
        saved = [None, *(edge.node.saved for _, edge in self._path)]  # before each action
        restored = (at for at in range(len(self._path) - 1, self._n_done, -1) if saved[at])
        begin = next(restored, self._n_done)
        for at, (action, edge) in enumerate(self._path[begin:], start=begin):
            answer = await asked.call(
                *self._request(action, saved=saved[at] if at == begin > self._n_done else None)
            )
            self._n_done = at + 1
            if answer.result != edge.result:
                request = request_of_task(*self._request(action), self._graph.task)
                kept = self._cache.distrust(self._graph)
                raise EnvironmentDied(
                    f"environment {self._cache.env_name!r} says deterministic = True, but "
                    f"{request} gave two answers after the same actions{kept}; remove it, or have "
                    "the answers depend on the task and the actions alone",
                    at_fault=True,
                )
            if answer.state is not None:
                self._cache.save_state(self._graph, edge.node, answer.state.saved)

    def _request(self, action: str | None, saved: bytes | None = None) -> tuple[str, object]:
        """Return method and argument, from the object's own state or from a saved one."""
        if action is RESET:
            return "reset", self._graph.task
        if saved is None:
            return "step", action
        return "step", StepFrom(task=self._graph.task, saved=saved, action=action)


def _n_bytes(result: Result) -> int:
    seen = result.observation if isinstance(result, Transition) else result
    texts = (seen.text, seen.objective, seen.anchor or "", *(seen.actions or ()))
    n_bytes = sum(map(sys.getsizeof, texts)) + sum(image.nbytes for image in seen.images)
    return RECORD_BYTES + n_bytes


def _n_bytes_understood(understood: Understood | None) -> int:
    if understood is None:
        return 0
    return _n_bytes(understood.otherwise) + sum(map(sys.getsizeof, understood.actions))

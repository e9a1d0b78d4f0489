"""Remember the answers of deterministic environments, so that none is computed twice.

    cache = TransitionCache("textworld", deterministic=True, max_bytes=MAX_BYTES)
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
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary, ref

from envs.base import Observation, Task, Transition
from envs.errors import EnvironmentDied
from envs.hosting.answers import Answer, State, StepFrom, Understood
from envs.hosting.pending import request_of_task

Result = Observation | Transition

# The bytes that a worker remembers, beside an engine that takes gigabytes: some 60,000 steps of
# short texts.
MAX_BYTES = 2**27
RECORD_BYTES = 1200  # of an answer with its node and edge, without texts and pixels; measured
RESET = None  # stands for `reset` among the actions of the root


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Node:
    """A state, with the known answers to its actions."""

    saved: bytes | None
    understood: Understood | None
    edges: dict[str | None, _Edge] = field(default_factory=dict)

    def known(self, action: str | None) -> _Edge | None:
        """Return the edge of an action; None if the environment has to be asked."""
        edge = self.edges.get(action)
        if edge is None and self.understood and action not in self.understood.actions:
            return _Edge(self.understood.otherwise, self)
        return edge


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
        self.task, self.root, self.n_bytes = task, _Node(saved=None, understood=None), 0
        self._nodes: dict[bytes, _Node] = {}
        self._locks: WeakValueDictionary[tuple[_Node, str | None], asyncio.Lock]
        self._locks = WeakValueDictionary()

    def asking(self, node: _Node, action: str | None) -> asyncio.Lock:
        """Return the lock of a question. A group's episodes often have the same one at once.

        States that can be restored share a lock: one environment object then has the task in
        memory, and serves all episodes of the task in turn.
        """
        key = (node, action) if node.saved is None else (self.root, RESET)
        return self._locks.setdefault(key, asyncio.Lock())

    def add(self, node: _Node, action: str | None, answer: Answer) -> _Edge:
        result, state = answer.result, answer.state
        assert state is not None
        self.n_bytes += _n_bytes(result) + sys.getsizeof(action)
        after = None if state.key is None else self._nodes.get(state.key)
        if after is None:
            after = _Node(saved=state.saved, understood=state.understood)
            self.n_bytes += _n_bytes_of_state(state)
            if state.key is not None:
                self._nodes[state.key] = after
        edge = node.edges[action] = _Edge(result, after)
        return edge


class TransitionCache:
    """Keep the graphs of the tasks played last, `max_bytes` of them in all.

    `deterministic`: the class says so. An object of it may still say otherwise.
    """

    def __init__(self, env_name: str, *, deterministic: bool, max_bytes: int) -> None:
        self.env_name = env_name
        self.deterministic = deterministic
        self.n_answers = self.n_remembered = 0  # resets and steps; those that asked nobody
        self.n_bytes = 0  # of all graphs
        self._max_bytes = max_bytes
        self._graphs: OrderedDict[str, _Graph] = OrderedDict()  # by task id, oldest use first

    def episode(self, task: Task, objects: Objects) -> CachedEpisode:
        """Begin an episode. It takes an environment object when it has a question."""
        if not self.deterministic:
            return CachedEpisode(self, _Graph(task), objects)
        graph = self._graphs.pop(task.id, None)
        if graph is None or graph.task != task:
            self.n_bytes -= 0 if graph is None else graph.n_bytes
            graph = _Graph(task)
        self._graphs[task.id] = graph
        return CachedEpisode(self, graph, objects)

    def add(self, graph: _Graph, node: _Node, action: str | None, answer: Answer) -> _Edge:
        """Remember an answer. The tasks whose last episode began first are forgotten, as a whole.

        Running episodes keep the graph of a forgotten task until they end.
        """
        before = graph.n_bytes
        edge = graph.add(node, action, answer)
        if self._graphs.get(graph.task.id) is graph:
            self.n_bytes += graph.n_bytes - before
        while self.n_bytes > self._max_bytes:
            self.n_bytes -= self._graphs.popitem(last=False)[1].n_bytes
        return edge


class CachedEpisode:
    """One episode: `answer(RESET)`, `answer(action)` for each action, then `close`."""

    def __init__(self, cache: TransitionCache, graph: _Graph, objects: Objects) -> None:
        self._cache, self._graph, self._objects = cache, graph, objects
        # None: no answer is remembered from here on
        self._node: _Node | None = graph.root if cache.deterministic else None
        self._path: list[tuple[str | None, Result]] = []  # from the first to the latest answer
        self._object: EnvironmentObject | None = None  # held by this episode
        self._n_done = 0  # length of the path that the object has gone

    async def answer(self, action: str | None) -> Result:
        """Return the remembered answer, or the environment's. Raises its EnvironmentDied."""
        self._cache.n_answers += 1
        node = self._node
        if node is None:
            return await self._learn(None, action)
        edge = node.known(action)
        if edge is None:
            async with self._graph.asking(node, action):
                edge = node.known(action)
                if edge is None:
                    return await self._learn(node, action)
        self._cache.n_remembered += 1
        self._node = edge.node
        self._path.append((action, edge.result))
        # An episode that waits for nobody would not let the others run, nor notice its deadline.
        await asyncio.sleep(0)
        return edge.result

    def close(self) -> None:
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
            answer = await self._ask(asked, action)
        elif node.saved is not None and action is not None:
            request = StepFrom(task=self._graph.task, saved=node.saved, action=action)
            answer = await asked.call("step", request)
        else:
            await self._repeat(asked)
            answer = await self._ask(asked, action)
        result, state = answer.result, answer.state
        if node is None or state is None:
            self._cache.deterministic, self._node = False, None
            return result
        self._path.append((action, result))
        self._n_done = len(self._path)
        self._node = self._cache.add(self._graph, node, action, answer).node
        asked.node = ref(self._node)
        if state.saved is not None:
            self.close()  # any object can go on from here
        return result

    async def _repeat(self, asked: EnvironmentObject) -> None:
        """Have the object take the episode's actions that it has missed."""
        for action, remembered in self._path[self._n_done :]:
            answer = await self._ask(asked, action)
            self._n_done += 1
            if answer.result != remembered:
                request = request_of_task(*self._request(action), self._graph.task)
                raise EnvironmentDied(
                    f"environment {self._cache.env_name!r} says deterministic = True, but "
                    f"{request} gave two answers after the same actions; remove it, or have the "
                    "answers depend on the task and the actions alone",
                    at_fault=True,
                )

    async def _ask(self, asked: EnvironmentObject, action: str | None) -> Answer:
        return await asked.call(*self._request(action))

    def _request(self, action: str | None) -> tuple[str, object]:
        return ("reset", self._graph.task) if action is RESET else ("step", action)


def _n_bytes(result: Result) -> int:
    seen = result.observation if isinstance(result, Transition) else result
    texts = (seen.text, seen.objective, seen.anchor or "", *(seen.actions or ()))
    n_bytes = sum(map(sys.getsizeof, texts)) + sum(image.nbytes for image in seen.images)
    return RECORD_BYTES + n_bytes


def _n_bytes_of_state(state: State) -> int:
    n_bytes = len(state.saved or b"")
    if state.understood is not None:
        n_bytes += _n_bytes(state.understood.otherwise)
        n_bytes += sum(map(sys.getsizeof, state.understood.actions))
    return n_bytes

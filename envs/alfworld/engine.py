"""Translate a game for ALFWorld's planner, and play it. The planner holds the state.

TextWorld's PddlEnv does the same with its own classes. Texts, rewards and commands here are equal
to its own, and a test plays both side by side. Only the commands and texts that are asked for are
made. A translation takes most of a first reset and is kept: a group plays its game several times.
"""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import fast_downward
from alfworld.agents.utils.misc import Demangler
from fast_downward.translate.pddl.conditions import Atom
from textworld.generator.game import EntityInfo

from envs.alfworld.games import TASK_MARK, Game, read_game
from envs.alfworld.generated import read_generated
from envs.alfworld.grammar import Facts, Language, Placeholder, Signature

INTRO = "#intro#"
NOTHING_HAPPENS = "Nothing happens."
# The planner's library keeps a game in global variables, so each game in play needs its own copy. A
# copy has 6 MB and cannot be unloaded, so free ones are reused.
_free_libraries: list[Any] = []
_language = lru_cache(maxsize=4)(Language)  # all official games share one
KEPT_GAMES = 256  # translations in each process, about 100 KB each


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A game as the planner and the grammar need it."""

    language: Language
    sas: bytes  # the planner's own format, deflated
    facts: Mapping[Signature, frozenset[tuple[str, ...]]]  # of the initial state
    types: Mapping[str, str]  # type of each entity, by its id
    entities: Mapping[str, EntityInfo]  # by id, named as ALFWorld names them ("mug 1")
    parameters: Mapping[str, tuple[Placeholder, ...]]  # by action
    task: str
    walkthrough: tuple[str, ...]


@lru_cache(maxsize=KEPT_GAMES)
def translated(data: str, split: str, name: str) -> Translation:
    """Read and translate a game, or return a kept translation. Raises ValueError."""
    if data:
        return translate(read_game(Path(data).expanduser(), split, name))
    return translate(read_generated(name))


def translate(game: Game) -> Translation:
    arguments = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(game.domain, game.problem)
    finally:
        sys.argv = arguments  # the planner overwrites it
    types = {entity.name: entity.type_name for entity in task.objects}
    facts = defaultdict(set)
    for fact in task.init:
        if isinstance(fact, Atom) and fact.predicate != "=":
            facts[fact.predicate, tuple(types[name] for name in fact.args)].add(tuple(fact.args))
    supertypes = tuple((kind.name, tuple(kind.supertype_names)) for kind in task.types)
    mentioned = [name for known in facts.values() for fact in known for name in fact]
    parameters = {}
    for action in task.actions:
        entries = action.parameters
        parameters[action.name] = tuple(
            (entry.name.strip("?"), entry.type_name) for entry in entries
        )
    return Translation(
        language=_language(game.domain, game.grammar, supertypes),
        sas=zlib.compress(sas.encode(), level=1),
        facts={signature: frozenset(arguments) for signature, arguments in facts.items()},
        types=types,
        entities=_named({name: types[name] for name in mentioned}),
        parameters=parameters,
        task=game.task,
        walkthrough=game.walkthrough,
    )


def _named(types: Mapping[str, str]) -> dict[str, Any]:
    """Return the entities by id, with ALFWorld's names."""
    entities = {name: EntityInfo(name, kind) for name, kind in types.items()}
    names = Demangler(game_infos=entities)
    for entity in entities.values():
        entity.name = names.demangle_alfred_name(entity.id)
        entity.definite, entity.indefinite = "the", "a"
    return entities


class Engine:
    """Play games, one after the other."""

    def __init__(self) -> None:
        self._library = _free_libraries.pop() if _free_libraries else fast_downward.load_lib()
        self._game: Translation
        self._facts: Facts
        self._operators: dict[str, Any] = {}  # the planner's, by command

    @property
    def commands(self) -> list[str]:
        """Return the admissible commands in alphabetical order."""
        return sorted(self._operators)

    def reset(self, game: Translation) -> str:
        """Begin a game and return its first text."""
        self._game = game
        self._library.load_sas(zlib.decompress(game.sas))
        self._facts = Facts(game.facts)
        self._list_operators()
        return self._say(INTRO, {}).replace(TASK_MARK, game.task)

    def step(self, command: str) -> tuple[str, bool]:
        """Return the game's answer, and whether it is won. An unknown command changes nothing."""
        operator = self._operators.get(command)
        if operator is None:
            return NOTHING_HAPPENS, self._library.check_goal()
        name, binding = self._split(operator)
        self._apply(operator)
        text = self._say(self._game.language.answers[name], binding)
        self._list_operators()
        return text, self._library.check_goal()

    def state_key(self) -> str:
        """Return the changes of the facts. The planner's state follows from its facts."""
        return repr(self._facts.changes())

    def close(self) -> None:
        """Leave the copy of the planner to the next engine of this process."""
        if self._library is not None:
            _free_libraries.append(self._library)
        self._library = None

    def _apply(self, operator: Any) -> None:
        effects = (fast_downward.Atom * operator.nb_effect_atoms)()
        self._library.apply_operator(operator.id, effects)
        for effect in effects:  # "Atom holds(agent1, mug_1)" or "NegatedAtom ..."
            kind, rest = effect.name.split(" ", 1)
            predicate, inner = rest[:-1].split("(", 1)
            arguments = tuple(inner.split(", ")) if inner else ()
            types = tuple(self._game.types[entity] for entity in arguments)
            is_true = kind != "NegatedAtom"
            self._facts.set((predicate, types), arguments, holds=is_true)
            self._facts.set((f"not_{predicate}", types), arguments, holds=not is_true)

    def _list_operators(self) -> None:
        operators = (fast_downward.Operator * self._library.get_applicable_operators_count())()
        self._library.get_applicable_operators(operators)
        self._operators = {}
        for operator in operators:
            name, binding = self._split(operator)
            command = self._say(self._game.language.commands[name], binding)
            self._operators.setdefault(command, operator)  # the first with this command counts

    def _split(self, operator: Any) -> tuple[str, dict[Placeholder, str]]:
        name, *arguments = operator.name.split()
        # The planner names an operator without the variables that it bound itself ("there is a
        # ..."). They are the last parameters, and no command or answer mentions them.
        return name, dict(zip(self._game.parameters[name], arguments, strict=False))

    def _say(self, text: str, binding: dict[Placeholder, str]) -> str:
        return self._game.language.say(
            text, binding, facts=self._facts, entities=self._game.entities
        )

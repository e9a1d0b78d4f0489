"""A game as the planner reads it. Made once: the translation takes most of a first reset, and a
group plays one game 8 times.

TextWorld translates a game four times for a reset, twice of them for a planner that plays nobody's
game here.
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

from envs.alfworld.games import Game, read_game
from envs.alfworld.generated import read_generated
from envs.alfworld.texts import Language, Placeholder, Signature

KEPT_GAMES = 256  # in each process; some 100 KB each


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    language: Language
    sas: bytes  # deflated; the planner's own format
    facts: Mapping[Signature, frozenset[tuple[str, ...]]]  # of the initial state
    types: Mapping[str, str]  # of each entity, by its id
    entities: Mapping[str, EntityInfo]  # by id, named as ALFWorld names them ("mug 1")
    parameters: Mapping[str, tuple[Placeholder, ...]]  # of each action
    task: str
    walkthrough: tuple[str, ...]


@lru_cache(maxsize=KEPT_GAMES)
def translated(data: str, split: str, name: str) -> Translation:
    """The game of that name, made now if it is not among the last KEPT_GAMES. Raises ValueError if
    there is none.
    """
    return translate(
        read_game(Path(data).expanduser(), split, name) if data else read_generated(name)
    )


def translate(game: Game) -> Translation:
    arguments = sys.argv
    try:
        task, sas = fast_downward.pddl2sas(game.domain, game.problem)
    finally:
        sys.argv = arguments  # which it overwrites
    types = {entity.name: entity.type_name for entity in task.objects}
    facts = defaultdict(set)
    for fact in task.init:
        if isinstance(fact, Atom) and fact.predicate != "=":
            facts[fact.predicate, tuple(types[name] for name in fact.args)].add(tuple(fact.args))
    kinds = tuple((kind.name, tuple(kind.supertype_names)) for kind in task.types)
    return Translation(
        language=_language(game.domain, game.grammar, kinds),
        sas=zlib.compress(sas.encode(), level=1),
        facts={signature: frozenset(arguments) for signature, arguments in facts.items()},
        types=types,
        entities=_named(
            {
                name: types[name]
                for known in facts.values()
                for arguments in known
                for name in arguments
            }
        ),
        parameters={
            action.name: tuple(
                (parameter.name.strip("?"), parameter.type_name) for parameter in action.parameters
            )
            for action in task.actions
        },
        task=game.task,
        walkthrough=game.walkthrough,
    )


_language = lru_cache(maxsize=4)(Language)  # all official games have one


def _named(types: Mapping[str, str]) -> dict[str, Any]:
    entities = {name: EntityInfo(name, kind) for name, kind in types.items()}
    names = Demangler(game_infos=entities)
    for entity in entities.values():
        entity.name = names.demangle_alfred_name(entity.id)
        entity.definite, entity.indefinite = "the", "a"
    return entities

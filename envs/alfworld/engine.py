"""One game being played: the planner holds the state, `texts.py` the words.

TextWorld's PddlEnv does the same with its own classes; what is said, paid and listed here is equal
to what it says, pays and lists, and a test plays both side by side. Only the commands and texts
that are asked for are made.
"""

from __future__ import annotations

import zlib
from typing import Any

import fast_downward

from envs.alfworld.games import TASK_MARK
from envs.alfworld.texts import Facts, Placeholder
from envs.alfworld.translation import Translation

INTRO = "#intro#"
NOTHING_HAPPENS = "Nothing happens."
# The planner's library keeps a game in its global variables, so each game in play has a copy of its
# own, and a copy that has been loaded cannot be unloaded: 6 MB for ever. So copies are handed on,
# never made anew while one is free.
_free_libraries: list[Any] = []


class Engine:
    """Plays any number of games, one after the other."""

    def __init__(self) -> None:
        self._library = _free_libraries.pop() if _free_libraries else fast_downward.load_lib()
        self._game: Translation
        self._facts: Facts
        self._operators: dict[str, Any] = {}  # the planner's, by command

    @property
    def commands(self) -> list[str]:
        """All that can be done now, in alphabetical order."""
        return sorted(self._operators)

    def reset(self, game: Translation) -> str:
        """Begins the game; returns what it says first."""
        self._game = game
        self._library.load_sas(zlib.decompress(game.sas))
        self._facts = Facts(game.facts)
        self._list_operators()
        return self._say(INTRO, {}).replace(TASK_MARK, game.task)

    def step(self, command: str) -> tuple[str, bool]:
        """What the game answers, and whether it is won now. An unknown command changes nothing."""
        operator = self._operators.get(command)
        if operator is None:
            return NOTHING_HAPPENS, self._library.check_goal()
        name, binding = self._split(operator)
        self._apply(operator)
        text = self._say(self._game.language.answers[name], binding)
        self._list_operators()
        return text, self._library.check_goal()

    def close(self) -> None:
        """Leaves its copy of the planner to the next engine of this process."""
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
            # Of operators with the same words the first one counts.
            self._operators.setdefault(
                self._say(self._game.language.commands[name], binding), operator
            )

    def _split(self, operator: Any) -> tuple[str, dict[Placeholder, str]]:
        name, *arguments = operator.name.split()
        return name, dict(zip(self._game.parameters[name], arguments, strict=False))

    def _say(self, text: str, binding: dict[Placeholder, str]) -> str:
        return self._game.language.say(
            text, binding, facts=self._facts, entities=self._game.entities
        )

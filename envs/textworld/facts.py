"""Follow the facts of a game, and find its valid actions without searching all rules each time.

    facts = KnownFacts(progression)  # TextWorld's GameProgression, after a reset
    text = facts.text                # equal texts are equal facts, in every process
    facts.go_to(text)                # the facts are again what they were
    facts.follow(progression)        # another one of the same game, after its next reset

A search through all rules takes TextWorld 1 ms. But a rule's actions depend only on the facts that
its conditions name, and most of these stay what they were. Games share their rules, and names such
as `r_0`, so one memory serves all games of a process.

TextWorld ships no types, so its objects have none here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, starmap
from typing import Any

MAX_KNOWN = 2**14  # actions of a rule under some facts; most are none, some 1 KB


@dataclass(frozen=True, slots=True)
class _Known:
    state: Any  # never changed: episodes that come here share it
    valid_actions: Any


class KnownFacts:
    """Stand in for `update` of a game's GameProgression."""

    def __init__(self, progression: Any) -> None:
        self._known: dict[str, _Known] = {}
        kb = progression.game.kb
        self._constants = tuple(kb.types.constants_mapping.items())
        self._conditions = _conditions(kb)
        self.follow(progression)

    def follow(self, progression: Any) -> None:
        assert not progression.tracking_quests  # `update` would have to update them, too
        self._progression = progression
        progression.update = self.apply
        self.text = _text(progression.state)
        self._known[self.text] = _Known(progression.state, progression.valid_actions)

    def go_to(self, text: str) -> None:
        if text not in self._known:
            self._learn(text, _state(self._progression, text))
        self._arrive(text)

    def apply(self, action: Any) -> None:
        """Change the facts as an action does. TextWorld calls it as `progression.update`."""
        state = self._progression.state.copy()
        state.apply(action)
        text = _text(state)
        if text not in self._known:
            self._learn(text, state)
        self._arrive(text)

    def _learn(self, text: str, state: Any) -> None:
        """Do what `state.all_applicable_actions` does for all rules, in the same order."""
        by_name = defaultdict(set)
        for fact in state.facts:
            by_name[fact.name].add(fact)
        facts = {name: frozenset(named) for name, named in by_name.items()}
        logic, valid = self._progression.game.kb.logic, list[Any]()
        for rule, names in self._conditions:
            if all(name in facts for name in names):
                valid += _actions(
                    rule, tuple(facts[name] for name in names), self._constants, logic
                )
        self._known[text] = _Known(state, valid)

    def _arrive(self, text: str) -> None:
        known = self._known[text]
        self.text = text
        self._progression.state = known.state
        self._progression._valid_actions = known.valid_actions


def _conditions(kb: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Return each rule with the names in its conditions."""
    conditions = []
    for rule in kb.rules.values():
        bound = {each for condition in rule.preconditions for each in condition.parameters}
        # any other could stand for a variable of facts that no condition names
        assert bound.union(kb.types.constants_mapping).issuperset(rule.placeholders), rule
        conditions.append((rule, tuple({condition.name for condition in rule.preconditions})))
    return conditions


@lru_cache(maxsize=MAX_KNOWN)
def _actions(
    rule: Any, facts: tuple[frozenset[Any], ...], constants: tuple[tuple[Any, Any], ...], logic: Any
) -> tuple[Any, ...]:
    """Return the valid actions of a rule."""
    from textworld.logic import State

    state = State(logic, chain.from_iterable(facts))
    return tuple(state.all_instantiations(rule, dict(constants)))


def _text(state: Any) -> str:
    """Return the facts in one order. Their own order and hashes differ between processes."""
    facts = [
        [fact.name, *([each.name, each.type] for each in fact.arguments)] for fact in state.facts
    ]
    return json.dumps(sorted(facts))


def _state(progression: Any, text: str) -> Any:
    """Return the facts of a text as TextWorld keeps them."""
    from textworld.logic import Proposition, State, Variable

    facts = json.loads(text)
    propositions = (Proposition(name, starmap(Variable, variables)) for name, *variables in facts)
    return State(progression.game.kb.logic, propositions)

"""Find the valid actions of a game once for each set of facts, as TextWorld takes 1 ms for it.

    facts = KnownFacts(progression)  # TextWorld's GameProgression, after a reset
    text = facts.text                # equal texts are equal facts, in every process
    facts.go_to(text)                # the facts are again what they were
    facts.follow(progression)        # another one of the same game, after its next reset

TextWorld ships no types, so its objects have none here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import starmap
from typing import Any


@dataclass(frozen=True, slots=True)
class _Known:
    state: Any  # never changed: episodes that come here share it
    valid_actions: Any


class KnownFacts:
    """Stand in for `update` of a game's GameProgression."""

    def __init__(self, progression: Any) -> None:
        self._known: dict[str, _Known] = {}
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
        kb = self._progression.game.kb
        found = state.all_applicable_actions(kb.rules.values(), kb.types.constants_mapping)
        self._known[text] = _Known(state, list(found))

    def _arrive(self, text: str) -> None:
        known = self._known[text]
        self.text = text
        self._progression.state = known.state
        self._progression._valid_actions = known.valid_actions


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

"""Evaluate ALFWorld's grammar as TextWorld does, and some hundred times as fast.

TextWorld parses a text each time it uses it, and copies its state for each symbol. Here each text
is parsed once, by TextWorld's own parsers, and evaluated in place. A *binding* maps a placeholder
(name, type) to an entity's id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from textworld.envs.pddl.logic import GameLogic
from textworld.envs.pddl.textgen import (
    ConditionalSymbol,
    ContextSensitiveGrammar,
    EvalSymbol,
    ListSymbol,
    NonterminalSymbol,
    TerminalSymbol,
)
from textworld.logic import Rule, Type

from envs.alfworld.expressions import Read, parse_expression

Placeholder = tuple[str, str]  # name, type
Binding = Mapping[Placeholder, str]
Signature = tuple[str, tuple[str, ...]]  # predicate, types of its arguments


class Facts:
    """The facts that hold now: tuples of entity ids by signature."""

    def __init__(self, facts: Mapping[Signature, frozenset[tuple[str, ...]]]) -> None:
        self._facts = {signature: set(arguments) for signature, arguments in facts.items()}
        self._changed: set[tuple[Signature, tuple[str, ...]]] = set()  # since the beginning
        self._in_order: dict[Signature, list[tuple[str, ...]]] = {}

    def set(self, signature: Signature, arguments: tuple[str, ...], *, holds: bool) -> None:
        known = self._facts.setdefault(signature, set())
        if (arguments in known) == holds:
            return
        (known.add if holds else known.discard)(arguments)
        self._changed ^= {(signature, arguments)}
        self._in_order.pop(signature, None)

    def holds(self, signature: Signature, arguments: tuple[str, ...]) -> bool:
        return arguments in self._facts.get(signature, ())

    def changes(self) -> list[tuple[Signature, tuple[str, ...]]]:
        """Return the facts that have begun or ceased to hold since the beginning, in order."""
        return sorted(self._changed)

    def in_order(self, signature: Signature) -> list[tuple[str, ...]]:
        if signature not in self._in_order:
            self._in_order[signature] = sorted(self._facts.get(signature, ()))
        return self._in_order[signature]


class Language:
    """The texts of a grammar: the actions' commands and their answers."""

    def __init__(
        self, domain: str, grammar: str, types: Sequence[tuple[str, Sequence[str]]]
    ) -> None:
        logic = GameLogic(domain, grammar)
        for name, parents in types:
            # PDDL's root type is called object, as is one of ALFRED's
            if name not in {known.name for known in logic.types}:
                logic.types.add(Type(name, parents))
        self.types, self.rules = logic.types, logic.grammar._rules
        actions = logic.actions.items()
        self.commands: dict[str, str] = {name: action.template for name, action in actions}
        self.answers: dict[str, str] = {name: action.feedback_rule for name, action in actions}
        # The grammar is the only source of texts, so it bounds these caches.
        self.parse: Callable[[str], Any] = cache(_parse)
        self.query: Callable[[str], Any] = cache(self._parse_query)
        self.code: Callable[[str], Read] = cache(parse_expression)

    def say(self, text: str, binding: Binding, *, facts: Facts, entities: Mapping[str, Any]) -> str:
        """Expand a text of the grammar. `entities` are TextWorld's EntityInfo by id."""
        return _Expansion(self, facts, entities).all(self.parse(text), binding)

    def _parse_query(self, query: str) -> list[tuple[list[Signature], list[Placeholder]]]:
        """Return for each predicate of a conjunction its possible signatures and its terms.

        Signatures stand in TextWorld's order.
        """
        found = []
        for predicate in Rule.parse_conjunctive_query(query).preconditions:
            signatures = []
            for kinds in self.types.multi_subtypes(list(map(self.types.get, predicate.types))):
                signatures.append((predicate.name, tuple(kind.name for kind in kinds)))
            terms = [(term.name, term.type) for term in predicate.parameters]
            found.append((signatures, terms))
        return found


def _parse(text: str) -> Any:
    grammar = ContextSensitiveGrammar.parse(json.dumps({"text": [{"rhs": text}]}))
    return grammar._rules["text"][0].rhs


class _Expansion:
    """Expand one text with the current facts."""

    def __init__(self, language: Language, facts: Facts, entities: Mapping[str, Any]) -> None:
        self._language = language
        self._facts = facts
        self._entities = entities

    def all(self, symbols: Sequence[Any], binding: Binding) -> str:
        return "".join(self._one(symbol, binding) for symbol in symbols)

    def _one(self, symbol: Any, binding: Binding) -> str:
        match symbol:
            case TerminalSymbol():
                return str(symbol)
            case NonterminalSymbol():
                return self._rule(str(symbol), binding)
            case EvalSymbol():
                named = {name: self._entities[entity] for (name, _), entity in binding.items()}
                return str(self._language.code(symbol.expression)(named))
            case ConditionalSymbol():
                return "".join(self._each(symbol, binding))
            case ListSymbol():
                return self._listed(self._each(symbol.symbol, binding), binding)
        raise TypeError(
            f"unknown grammar symbol of type {type(symbol).__name__}; this needs textworld==1.7.0"
        )

    def _rule(self, name: str, binding: Binding) -> str:
        """Expand the first alternative of a rule whose condition holds."""
        for rule in self._language.rules[name]:
            if not rule.condition or any(True for _ in self._bindings(rule.condition, binding)):
                return self.all(rule.rhs, binding)
        raise ValueError(f"the grammar's rule {name!r} has no alternative for this state")

    def _each(self, symbol: Any, binding: Binding) -> list[str]:
        bindings = self._bindings(symbol.given, binding) if symbol.given else [binding]
        return [self._one(symbol.expression, each) for each in bindings]

    def _listed(self, texts: list[str], binding: Binding) -> str:
        if not texts:
            return self._rule("list_empty", binding)
        if len(texts) == 1:
            return texts[0]
        separator = self._rule("list_separator", binding)
        last = self._rule("list_last_separator", binding)
        return separator.join(texts[:-1]) + last + texts[-1]

    def _bindings(self, query: str, binding: Binding) -> Iterator[Binding]:
        """Yield the extensions of `binding` with which the conjunction holds.

        A new placeholder takes an entity that no other has.
        """
        return self._extended(self._language.query(query), binding)

    def _extended(self, predicates: Sequence[Any], binding: Binding) -> Iterator[Binding]:
        if not predicates:
            yield binding
            return
        (signatures, terms), rest = predicates[0], predicates[1:]
        known = tuple(binding.get(term) for term in terms)
        for signature in signatures:
            if None not in known:
                # There is no None in `known`.
                if self._facts.holds(signature, known):  # type: ignore[arg-type]
                    yield from self._extended(rest, binding)
                continue
            for arguments in self._facts.in_order(signature):
                extended = _bound(terms, arguments, binding)
                if extended is not None:
                    yield from self._extended(rest, extended)


def _bound(
    terms: Sequence[Placeholder], arguments: Sequence[str], binding: Binding
) -> Binding | None:
    extended = dict(binding)
    for term, entity in zip(terms, arguments, strict=True):
        existing = extended.get(term)
        if existing is None:
            if entity in extended.values():
                return None
            extended[term] = entity
        elif existing != entity:
            return None
    return extended

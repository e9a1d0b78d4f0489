"""Evaluate the expressions of a grammar without running them as Python.

    read = parse_expression("r.name or r.id")
    text = read({"r": entity})

TextWorld's own evaluator uses `eval`, so a game file could do whatever the process may do. Taking
the builtins away would not help: every object leads back to them. Only the syntax of ALFWorld's
grammar is read here: an entity, one of its texts, quoted text, `+` and `or`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

# the text fields of TextWorld's EntityInfo
READABLE = frozenset({"id", "type", "name", "noun", "adj", "definite", "indefinite", "desc"})
# ALFWorld's longest expression has 29. Python's parser fails on deep nesting.
MAX_CHARACTERS = 200
TAKES = "it takes an entity, its name, quoted text, + and `or`"

Names = Mapping[str, object]  # entities by the name that the grammar has bound
Read = Callable[[Names], object]


def parse_expression(expression: str) -> Read:
    """Return a function that evaluates the expression. Raises ValueError for any other syntax."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"alfworld: the grammar's expression {expression[:60]!r}... has over {MAX_CHARACTERS} "
            "characters"
        )
    try:
        return _read(ast.parse(expression.strip(), mode="eval").body, expression)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise _refused(expression, str(error)) from None


def _read(node: ast.expr, expression: str) -> Read:
    match node:
        case ast.Constant(value=str(text)):
            return lambda names: text
        case ast.Name(id=name):
            return lambda names: _bound(names, name, expression)
        case ast.Attribute(value=ast.Name(id=name), attr=field) if field in READABLE:
            return lambda names: getattr(_bound(names, name, expression), field)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined(_read(left, expression), _read(right, expression), expression)
        case ast.BoolOp(op=ast.Or(), values=[*values]):
            return _first_of([_read(value, expression) for value in values])
    raise _refused(expression, f"{ast.unparse(node)!r} is not read")


def _bound(names: Names, name: str, expression: str) -> object:
    if name not in names:
        raise _refused(expression, f"there is no entity {name!r} here")
    return names[name]


def _joined(left: Read, right: Read, expression: str) -> Read:
    def read(names: Names) -> str:
        parts = left(names), right(names)
        if not isinstance(parts[0], str) or not isinstance(parts[1], str):
            raise _refused(expression, "+ joins texts")
        return parts[0] + parts[1]

    return read


def _first_of(values: list[Read]) -> Read:
    """Return the function for Python's `or`: the first value that is not empty, else the last."""

    def read(names: Names) -> object:
        value: object = None
        for each in values:
            value = each(names)
            if value:
                break
        return value

    return read


def _refused(expression: str, why: str) -> ValueError:
    return ValueError(
        f"alfworld: the grammar's expression {expression!r} is refused: {why}; {TAKES}"
    )

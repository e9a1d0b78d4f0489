"""Test that docstrings open as CONTRIBUTING.md says: with a verb or a noun, not with a riddle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "actors",
    "analysis",
    "benchmarks",
    "cli",
    "configs",
    "coordinator",
    "docs",
    "driver",
    "envs",
    "gigpo",
    "learner",
    "store",
    "tests",
)
RIDDLES = {"what", "of", "as", "those", "that", "who", "whose", "which"}
# A function does something; a record is something.
NO_VERBS = {
    "a",
    "all",
    "an",
    "each",
    "every",
    "how",
    "it",
    "its",
    "no",
    "number",
    "one",
    "the",
    "this",
}
HOLDING = {"describe", "hold", "keep", "name", "record"}
NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> list[tuple[ast.AST, int, str]]:
    """Return every docstring with what it is of, and its line number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, NODES) and (text := ast.get_docstring(node)):
            found.append((node, node.body[0].lineno, text))
    return found


def is_record(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        ast.unparse(decorator).startswith("dataclass") for decorator in node.decorator_list
    )


def is_open_to_doubt(node: ast.AST, docstring: str, *, in_a_test: bool) -> bool:
    """Return whether a docstring does not open as CONTRIBUTING.md says."""
    words = docstring.split()
    first = words[0].strip(",.:;`'\"").lower() if words else ""
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_function and not in_a_test and first in NO_VERBS:
        return True
    return first in RIDDLES or (is_record(node) and first in HOLDING)


def test_docstrings_say_what_they_are_about() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    n_docstrings, doubtful = 0, []
    for path in [*sorted(ROOT.glob("*.py")), *files]:
        place = path.relative_to(ROOT)
        for node, line, text in docstrings(path.read_text()):
            n_docstrings += 1
            if is_open_to_doubt(node, text, in_a_test=place.parts[0] == "tests"):
                doubtful.append(f"{place}:{line}: {text.splitlines()[0]}")
    assert n_docstrings > 3000, f"the test reads the sources, and found {n_docstrings} docstrings"
    assert doubtful == []


def test_a_doubtful_opening_is_found() -> None:
    source = '''
def f():
    """Of a run, its steps."""

def g():
    """The steps of a run."""

def h():
    """Return the steps of a run."""

class A:
    """Keep the steps of a run."""

@dataclass(frozen=True)
class B:
    """Hold the steps of a run."""

@dataclass(frozen=True)
class C:
    """The steps of a run."""
'''
    found = [
        (
            is_open_to_doubt(node, text, in_a_test=False),
            is_open_to_doubt(node, text, in_a_test=True),
        )
        for node, _, text in docstrings(source)
    ]
    no = (False, False)
    assert found == [(True, True), (True, False), no, no, (True, True), no]


def test_the_tests_that_security_names_exist() -> None:
    """SECURITY.md names for each promise the test that proves it."""
    named = re.findall(r"`(tests/[a-z_/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20, "the test reads the page"
    assert [path for path in named if not (ROOT / path).is_file()] == []

"""Test that docstrings are plain English: they open with a verb or a noun, not with a riddle."""

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
NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> list[tuple[int, str]]:
    """Return every docstring with its line number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, NODES) and (text := ast.get_docstring(node)):
            found.append((node.body[0].lineno, text))
    return found


def opens_with_a_riddle(docstring: str) -> bool:
    words = docstring.split()
    return bool(words) and words[0].strip(",.:`'\"").lower() in RIDDLES


def test_docstrings_say_what_they_are_about() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    n_docstrings, riddles = 0, []
    for path in [*sorted(ROOT.glob("*.py")), *files]:
        for line, text in docstrings(path.read_text()):
            n_docstrings += 1
            if opens_with_a_riddle(text):
                first = text.splitlines()[0]
                riddles.append(f"{path.relative_to(ROOT)}:{line}: {first}")
    assert n_docstrings > 3000, f"the test reads the sources, and found {n_docstrings} docstrings"
    assert riddles == []


def test_a_riddle_is_found() -> None:
    source = 'def f():\n    """Of a run, its steps."""\n\nclass A:\n    """Return it."""\n'
    assert [opens_with_a_riddle(text) for _, text in docstrings(source)] == [True, False]


def test_the_tests_that_security_names_exist() -> None:
    """SECURITY.md names for each promise the test that proves it."""
    named = re.findall(r"`(tests/[a-z_/]+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 20, "the test reads the page"
    assert [path for path in named if not (ROOT / path).is_file()] == []

"""Pages of the documentation site say what is so: named tests exist, examples give their output."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from store import FORMAT

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMED = re.compile(r"`(tests/[a-z_/]+\.py)::(test_\w+)`")
# a source in a page, from the root
SOURCE = re.compile(r"(?<![\w/.-])((?:[a-z_]+/)+\w+\.(?:py|sql|yaml))\b")
PACKAGES = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"benchmarks", "tests"}
# `Class.method` or `function`, and the link to its file behind it
FUNCTION = re.compile(r"`((?:\w+\.)?[a-z_]+)` \(\[((?:[a-z_]+/)*[a-z_]+\.py)\]\(\2\)\)")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
N_THREADS = 20


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def methods(path: Path) -> set[str]:
    """Return the functions of a file, and its methods as `Class.method` and by themselves."""
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    return functions(path) | {
        f"{found.name}.{node.name}"
        for found in classes
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def pages_of(nav: list[dict]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from pages_of(value)


def test_no_command_of_a_page_takes_a_name_in_tmp() -> None:
    """The attack: another user made the directory first, and had their code executed from it."""
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    blocks = [block for page in pages for block in BLOCK.findall(page.read_text())]
    assert len(blocks) > 20
    assert [block for block in blocks if "/tmp/" in block] == []


@pytest.mark.parametrize("page", ["elsewhere.md", "concepts.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    named = NAMED.findall((DOCS / page).read_text())
    assert named
    missing = [f"{path}::{name}" for path, name in named if name not in functions(ROOT / path)]
    assert missing == []


def test_the_sources_that_pages_name_exist() -> None:
    """The CHANGELOG also names files that are gone, and pages of studies are made by them."""
    pages = [*DOCS.glob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING"))]
    named = {
        (page.name, path)
        for page in pages
        for path in SOURCE.findall(page.read_text())
        if path.partition("/")[0] in PACKAGES
    }
    assert len(named) > 100, "the test reads the pages"
    assert [(page, path) for page, path in named if not (ROOT / path).exists()] == []


def test_the_readme_leads_through_functions_that_are_there() -> None:
    found = FUNCTION.findall((ROOT / "README.md").read_text())
    assert len(found) == 8 + 5, "a group's way, and a version's"
    for name, place in found:
        assert name in methods(ROOT / place), f"{name} is not in {place}"


def test_every_thread_has_a_link_what_happened_there_and_here_and_a_test() -> None:
    _, *threads = re.split(r"^### ", (DOCS / "elsewhere.md").read_text(), flags=re.MULTILINE)
    assert len(threads) == N_THREADS
    for thread in threads:
        assert re.match(r"\[[\w./-]+ #(\d+)\]\(https://github\.com/[\w./-]+/\1\)\n", thread), thread
        assert "**There:** " in thread and "**Here:** " in thread, thread
        assert NAMED.search(thread), thread


def test_the_example_of_anchor_states_gives_the_output_below_it() -> None:
    page = (DOCS / "concepts.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (output,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code, {})
    assert said.getvalue() == output
    figure = (DOCS / "figures/anchors.svg").read_text()
    for value in ("+2.23", "+1.44", "-5.91"):
        assert value in output and value.replace("-", "−") in figure


def test_the_page_about_the_store_names_the_format() -> None:
    named = re.findall("`(async-gigpo/[0-9]+)`", (DOCS / "store.md").read_text())
    assert named == [FORMAT]


def test_the_site_shows_every_page() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    shown = list(pages_of(config["project"]["nav"]))
    written = {str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md")}
    assert len(shown) == len(set(shown))
    assert set(shown) == written | {"README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"}


def test_pictures_are_legible_on_any_background() -> None:
    """A picture is shown on a light and on a dark page, so it brings its own background."""
    for path in re.findall(r"!\[[^\]]+\]\(([^)]+\.svg)\)", (DOCS / "concepts.md").read_text()):
        text = (DOCS / path).read_text()
        assert re.search(r'<rect width="\d+" height="\d+" rx="10" fill="#fff"/>', text), path
        assert "aria-label" in text and "<title>" in text, path

"""docs/reference is what the code says: python docs/make_reference.py writes it."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

from configs import schema

ROOT = Path(__file__).resolve().parents[2]


def make_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs/make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = make_reference()


@pytest.mark.parametrize("name", sorted(MAKE.PAGES))
def test_a_page_is_what_the_code_says(name: str) -> None:
    written = (ROOT / "docs" / "reference" / name).read_text()
    assert written == MAKE.PAGES[name](), "run: python docs/make_reference.py"


def names(section: type, prefix: str = "") -> list[str]:
    found = []
    for field, hint in get_type_hints(section).items():
        inner = is_dataclass(hint)
        found += names(hint, f"{prefix}{field}.") if inner else [prefix + field]
    assert len(get_type_hints(section)) == len(fields(section))
    return found


def test_every_setting_is_there_once() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    for name in names(schema.Config):
        assert page.count(f"| `{name}` |") == 1, name


def test_comments_above_and_beside_a_setting_are_its_meaning() -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    assert "| `env.max_steps` | whole number | `10` | Actions per episode; a longer" in page
    assert '"drop" retries or leaves them out, "wait" makes the learner wait for them |' in page
    assert "Rarely changed" not in page

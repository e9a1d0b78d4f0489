"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("actors", "analysis", "cli", "configs", "coordinator", "driver", "envs", "gigpo", "learner")
FILES = [*ROOT.glob("*.py"), *(f for p in (*OURS, "store") for f in (ROOT / p).rglob("*.py"))]
WITH_EXAMPLES = sorted(f for f in FILES if ">>> " in f.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=lambda file: str(file.relative_to(ROOT)))
def test_an_example_is_true(file: Path) -> None:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed, results

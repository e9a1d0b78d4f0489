"""The small run that tests of damage, repair and rebuild work on."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import RunLayout
from tests.support.store_runs import copy_run, make_run


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Return a run that no test may change."""
    return make_run(tmp_path_factory.mktemp("intact") / "run")


@pytest.fixture
def layout(intact: RunLayout, tmp_path: Path) -> RunLayout:
    """Return a copy of it, for one test."""
    return copy_run(intact, tmp_path / "run")

"""The small runs that tests of damage, repair, rebuild and storages work on."""

from __future__ import annotations

from pathlib import Path

import pytest

from store import RunLayout
from store.exchange import bring
from tests.support.store_runs import copy_run, make_run
from tests.support.stored_runs import make_lost_run


@pytest.fixture(scope="session")
def intact(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """Return a run that no test may change."""
    return make_run(tmp_path_factory.mktemp("intact") / "run")


@pytest.fixture
def layout(intact: RunLayout, tmp_path: Path) -> RunLayout:
    """Return a copy of it, for one test."""
    return copy_run(intact, tmp_path / "run")


@pytest.fixture
def lost(tmp_path: Path) -> RunLayout:
    """Return a run with a storage whose owner was killed, see `make_lost_run`."""
    return make_lost_run(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bring.run_at.cache_clear()
    bring.bring_catalog.cache_clear()
    return tmp_path / "cache"

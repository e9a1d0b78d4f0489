"""The log that engines of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def engine_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a log, for engines whose log no test looks into.

    Engines with the same environment variables, and so with one log, are forked from the server of
    this process. Another one imports vLLM, which takes ten seconds of a core or more.
    """
    return tmp_path_factory.mktemp("engines") / "logs" / "engine.log"

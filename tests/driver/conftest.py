"""Make a supervisor that starts no process."""

from __future__ import annotations

from pathlib import Path

import pytest

import configs
from driver import processes
from driver import supervisor as supervisor_module
from driver.supervisor import Supervisor
from store import RunLayout
from tests.support.supervisor_samples import Calls


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: list[str]) -> Supervisor:
    monkeypatch.setattr(processes, "kill", lambda process: None)
    monkeypatch.setattr(supervisor_module, "CoordinatorProcess", lambda config, *, learns: Calls())
    config = configs.from_yaml(f"{{run_dir: {tmp_path}}}")
    RunLayout.create(tmp_path, config_yaml="")
    made = Supervisor(config, "model", learns=True, say=said.append, say_stopping=lambda text: None)
    made.is_up = True
    return made

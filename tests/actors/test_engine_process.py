"""Another user of the machine gives an engine no code through a name in the temporary directory."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.inference import engine_process
from configs import ActorsConfig
from store import COMPILED, StoreError

# What torch asks before it reads compiled code, in a process that imports it as an engine does.
PLACES = """
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
print(cache_dir(), triton_cache_dir(0))
"""


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ActorsConfig:
    """Return the settings of an engine on a GPU, which compiles. One on a CPU does not."""
    monkeypatch.setattr(engine_process, "_is_cpu_build", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ActorsConfig(gpus_per_worker=1.0)


def test_an_engine_reads_no_compiled_code_that_somebody_else_can_write(
    actors: ActorsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch unpickles what it finds there, and its default is /tmp/torchinductor_USER."""
    planted = tmp_path / "tmp" / f"torchinductor_{getpass.getuser()}"
    planted.mkdir(parents=True)
    # as torch leaves it in a worker that imported it
    monkeypatch.setenv(COMPILED, str(planted))
    variables = engine_process.engine_environment(actors, tmp_path, tmp_path / "engine.log")
    done = subprocess.run(
        [sys.executable, "-c", PLACES],
        env=os.environ | variables | {"TMPDIR": str(planted.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    places = [Path(text) for text in done.stdout.split()]
    own = tmp_path / "cache" / "async-gigpo" / "compiled"
    assert len(places) == 2 and all(place.is_relative_to(own) for place in places)
    for directory in (own, own.parent):
        assert directory.stat().st_mode & 0o077 == 0
    assert list(planted.iterdir()) == []


def test_an_engine_does_not_start_with_a_cache_of_somebody_else(
    actors: ActorsConfig, tmp_path: Path
) -> None:
    (tmp_path / "cache" / "async-gigpo").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache" / "async-gigpo" / "compiled").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="compiled is a link or another user's"):
        engine_process.engine_environment(actors, tmp_path, tmp_path / "engine.log")

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


def test_an_engine_keeps_its_temporary_files_where_only_this_user_can_enter(
    actors: ActorsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: who locks the file at which vLLM's processes meet keeps the engine waiting."""
    monkeypatch.setenv(engine_process.ENGINE_SOCKETS, str(tmp_path / "private"))
    (tmp_path / "model.safetensors").touch()
    for settings in (actors, ActorsConfig()):
        monkeypatch.setattr(
            engine_process, "_is_cpu_build", lambda on=settings: not on.gpus_per_worker
        )
        variables = engine_process.engine_environment(settings, tmp_path, tmp_path / "engine.log")
        assert variables["TMPDIR"] == str(tmp_path / "private")


# As a worker: Python's first folder is that of the script, and OpenCV is among what vLLM imports.
STARTS_PROGRAMS = """
import multiprocessing, os, subprocess
import cv2
if __name__ == "__main__":
    subprocess.run(["true"], check=True)
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    subprocess.run([os.sys.executable, "-m", "planted"], check=False)
"""


@pytest.mark.parametrize("is_protected", [False, True])
def test_an_engine_takes_no_code_from_the_current_directory(
    actors: ActorsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_protected: bool
) -> None:
    """It may be a stranger's run. The attack: modules, or a library that the next program loads."""
    monkeypatch.delenv(engine_process.LIBRARIES, raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    run = tmp_path / "run"
    run.mkdir()
    for module in ("planted", "multiprocessing"):
        (run / f"{module}.py").write_text(f"open({str(run / 'mark')!r}, 'a').write({module!r})")
    (tmp_path / "worker.py").write_text(STARTS_PROGRAMS)
    variables = engine_process.engine_environment(actors, tmp_path, tmp_path / "engine.log")

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(tmp_path / "worker.py")],
            cwd=run,
            env=os.environ | (variables if is_protected else {}),
            capture_output=True,
            text=True,
            check=False,
        )

    done = start()
    assert (done.returncode == 0) == is_protected, done.stderr
    assert (run / "mark").exists() != is_protected, "imported by a process that Python started"
    (run / "libc.so.6").touch()
    done = start()
    assert ("file too short" in done.stderr) != is_protected, done.stderr


def test_the_folders_of_libraries_that_a_user_gives_stay(actors: ActorsConfig) -> None:
    given = {engine_process.LIBRARIES: "/opt/cuda/lib64::/opt/lib:"}
    found = engine_process.from_installed_files(given)
    assert found[engine_process.LIBRARIES] == "/opt/cuda/lib64:/opt/lib"

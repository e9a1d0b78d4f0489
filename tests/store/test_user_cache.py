"""Another user of the machine takes the name that torch would use in the temporary directory."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from store import StoreError, own_cache
from tests.support.neighbours import Neighbour

IMPORTS = """
import os, store
store.keep_compiled_code()
import torch._dynamo
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def run(code: str, temporary: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if "INDUCTOR" not in name}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(cache)},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.fixture
def squatted(tmp_path: Path) -> Path:
    """A file: nobody but its owner can remove it from /tmp."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (temporary / f"torchinductor_{getpass.getuser()}").touch()
    return temporary


def test_no_name_in_the_temporary_directory_keeps_torch_from_its_import(
    squatted: Path, tmp_path: Path
) -> None:
    without = run(IMPORTS.replace("store.keep_compiled_code()", ""), squatted, tmp_path / "cache")
    assert "FileExistsError" in without.stderr, "the attack itself works"
    done = run(IMPORTS, squatted, tmp_path / "cache")
    own = tmp_path / "cache" / "async-gigpo" / "compiled"
    assert done.stdout == f"{own}\n", done.stderr
    assert own.stat().st_mode & 0o077 == 0


def test_a_cache_beneath_another_users_directory_in_one_for_all_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: its owner put code of theirs in the place of what torch had compiled."""
    for_all, cache = tmp_path / "tmp", tmp_path / "tmp" / "new" / "cache"
    cache.mkdir(parents=True)
    for_all.chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(cache.parent)
    with pytest.raises(StoreError, match=r"new belongs to another user .*set XDG_CACHE_HOME"):
        own_cache("compiled")
    assert list(cache.iterdir()) == []
    neighbour.gives_back(cache.parent)
    monkeypatch.setattr(os, "geteuid", os.getuid)  # the user of this test makes it
    assert own_cache("compiled") == cache / "async-gigpo" / "compiled"


def test_a_user_without_a_cache_keeps_torchs_default(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    done = run(IMPORTS, tmp_path, tmp_path / "cache")
    assert done.stdout == f"{tmp_path}/torchinductor_{getpass.getuser()}\n", done.stderr

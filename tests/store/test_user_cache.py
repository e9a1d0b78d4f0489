"""Another user of the machine takes the name that torch would use in the temporary directory."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from store import (
    COMPILED,
    StoreError,
    check_own_directory,
    compile_elsewhere,
    compiler_elsewhere,
    own_cache,
)
from store.untrusted import own_directory
from store.user_cache import private_directory
from tests.support.neighbours import ORDINARY, Neighbour

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
import os, store, sys
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


def test_a_cache_beneath_another_users_directory_is_refused_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: they renamed what the cache lies in, and their code ran as the user."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
    neighbour = Neighbour(monkeypatch)
    neighbour.gets(shared)
    with pytest.raises(StoreError, match=r"shared belongs to another user .*set XDG_CACHE_HOME"):
        own_cache("compiled")
    neighbour.gives_back(shared)
    with pytest.raises(
        StoreError, match=r"every user may write in .*shared, .*chmod o-w.*set XDG_CACHE_HOME"
    ):
        own_cache("compiled")
    assert not list(shared.iterdir())
    shared.chmod(0o1777)
    check_own_directory(shared, with_ancestors=True)


def test_a_directory_for_a_while_lies_in_the_cache_and_not_in_one_of_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a copy that was written below TMPDIR went through a link to another file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with private_directory("gigpo-") as made:
        assert made.parent == own_cache("copies")
        assert made.stat().st_mode & 0o777 == 0o700
    assert not made.exists()


def test_without_a_cache_it_is_a_temporary_one_that_nobody_could_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "cache").write_text("no directory")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with private_directory("gigpo-") as made:
        assert made.parent == scratch
    scratch.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: ORDINARY)  # for root every directory passes
    with (
        pytest.raises(StoreError, match=r"every user may write in .*set XDG_CACHE_HOME"),
        private_directory("gigpo-"),
    ):
        pass
    assert not list(scratch.iterdir())


def test_what_a_killed_command_left_is_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    old, new = own_cache("copies") / "old", own_cache("copies") / "new"
    for left in (old, new):
        left.mkdir()
        (left / "catalog.sqlite").write_bytes(b"x")
    os.utime(old, (0, 0))
    with private_directory("gigpo-"):
        assert new.exists() and not old.exists()


def test_the_owner_above_a_cache_may_be_unknown_in_a_user_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There root's /home belongs to nobody."""
    (tmp_path / "home" / "user").mkdir(parents=True)
    Neighbour(monkeypatch).gets(tmp_path / "home")
    with pytest.raises(StoreError, match="home belongs to another user"):
        check_own_directory(tmp_path / "home" / "user", with_ancestors=True)
    monkeypatch.setattr(own_directory, "_has_unknown_users", lambda: True)
    check_own_directory(tmp_path / "home" / "user", with_ancestors=True)


def test_what_is_made_above_a_cache_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: under a umask of 000 a neighbour exchanged the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    umask = os.umask(0)
    try:
        directory = own_cache("compiled")
    finally:
        os.umask(umask)
    for made in (directory, *directory.parents[:3]):
        assert made.stat().st_mode & 0o777 == 0o700


def test_a_user_without_a_cache_has_a_temporary_directory_alone(
    squatted: Path, tmp_path: Path
) -> None:
    """The attack: another user took the name that torch uses, and put their code there."""
    (tmp_path / "cache").touch()
    starts = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {IMPORTS!r}])"
    done = run(f"{IMPORTS}sys.stdout.flush()\n{starts}", squatted, tmp_path / "cache")
    (made,) = squatted.glob("gigpo-compiled-*")
    assert done.stdout == f"{made}\n{made}\n", done.stderr  # also of a process that it started
    assert made.stat().st_mode & 0o777 == 0o700


COMPILES = """
import os, subprocess, sys, store
store.compile_elsewhere()
store.compile_elsewhere()  # in a process of that process
from triton.runtime.build import compile_module_from_src
print(compile_module_from_src(src=sys.argv[1], name="launcher"))
"""
MODULE = """
#include <Python.h>
static struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&m); }
"""
# Other tests of the process set these. With OpenCV's, later programs load libraries from the current
# directory. With the others the compiler is started elsewhere already.
LEFT_BY_OTHERS = ("LD_LIBRARY_PATH", "CC", COMPILED)
THEIRS = '__attribute__((constructor)) static void go(void) { fclose(fopen("executed", "w")); }'


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("is_guarded", [True, False])
def test_triton_links_nothing_of_the_current_directory(is_guarded: bool, tmp_path: Path) -> None:
    """The attack: ld takes `libgcc_s.so.1` there first, and Triton loads what it has linked."""
    pytest.importorskip("triton")
    here = tmp_path / "theirs"
    here.mkdir()
    (here / "theirs.c").write_text(f"#include <stdio.h>\n{THEIRS}\n")
    make = ["gcc", "-fPIC", "-c", "theirs.c", "-o", "libgcc_s.so.1"]
    subprocess.run(make, cwd=here, check=True)
    code = COMPILES if is_guarded else re.sub(".*compile_elsewhere.*", "", COMPILES)
    done = subprocess.run(
        [sys.executable, "-c", code, MODULE],
        cwd=here,
        env={
            **{name: text for name, text in os.environ.items() if name not in LEFT_BY_OTHERS},
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        },
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (here / "executed").exists() is not is_guarded, "the attack itself works"


@pytest.mark.parametrize("compiler", ["ccache gcc", "none-of-the-path", "/none/gcc"])
def test_a_compiler_that_is_not_found_is_not_looked_for_in_the_current_directory(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: `CC="ccache gcc"`, and a file of that name in the directory of a stranger."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ccache gcc").touch(0o755)
    given = {COMPILED: str(tmp_path / "compiled"), "CC": compiler}
    assert compiler_elsewhere(given) == {}


def test_where_nothing_can_be_written_triton_finds_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on a CPU needs none, and goes on."""
    for name in (COMPILED, "CC"):
        monkeypatch.setenv(name, "")  # so that the test's own values go with it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "async-gigpo" / "compiled" / "cc").mkdir(parents=True)
    (tmp_path / "async-gigpo" / "compiled" / "cc" / "full").touch()
    for made in (tmp_path / "async-gigpo", tmp_path / "async-gigpo" / "compiled"):
        made.chmod(0o700)
    compile_elsewhere()
    assert shutil.which(os.environ["CC"]) is None

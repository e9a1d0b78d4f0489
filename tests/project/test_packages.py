"""No module is imported from the current directory, however the package was installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = "__editable__.async_gigpo-0.1.0.finder.__path_hook__"


def test_each_package_has_an_init() -> None:
    """Else setuptools' editable install appends a relative name to sys.path."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = settings["packages"]["find"]
    assert found["namespaces"] is False
    tops = [ROOT / pattern.rstrip("*") for pattern in found["include"]]
    modules = [path for top in tops for path in top.rglob("*.py")]
    assert {path.parent for path in modules if not (path.parent / "__init__.py").is_file()} == set()


def test_nothing_relative_is_searched_for_modules(tmp_path: Path) -> None:
    """The attack: org.py, for which the standard library looks, lay in a directory of that name."""
    (tmp_path / HOOK).mkdir()
    (tmp_path / HOOK / "org.py").write_text("raise SystemExit('a stranger is executed')")
    program = f"""
import json, sys
sys.path.append({HOOK!r})
import cli
import copy, cli.__main__
print(json.dumps(sys.path))
"""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(map(os.path.isabs, json.loads(ran.stdout)))


def test_this_installation_has_no_relative_name_in_its_path(tmp_path: Path) -> None:
    """If this fails, the virtual environment is older than the package's settings: make setup."""
    program = "import json, sys; print(json.dumps(sys.path))"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(map(os.path.isabs, json.loads(ran.stdout)))

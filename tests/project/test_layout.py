"""Check the sources against the rules that say who may import whom."""

from __future__ import annotations

import ast
import graphlib
import importlib
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from store import Catalog, RunLayout, export, write_open_sql

ROOT = Path(__file__).resolve().parents[2]
# They import nothing of ours: everybody may import them.
SHARED = (
    "bounded_json",
    "bounded_yaml",
    "linear_h11",
    "model_server",
    "path_bounds",
    "printable",
    "row_bounds",
    "url_secrets",
    "usage_statistics",
    "weight_pieces",
)
TABLE = "| | configs |"  # how the table of CONTRIBUTING.md begins
THE_SAME = "the same"  # as in the row above


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| ").split("|")]


# Who may import whom of our packages, and which libraries a package must never import. These are
# the rules; the table of CONTRIBUTING.md shows them. To widen one, change both and say why.
MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "envs": set(),
    "store": set(),
    "gigpo": set(),
    "coordinator": {"configs", "envs", "store"},
    "analysis": {"configs", "envs", "store", "gigpo"},
    "actors": {"configs", "envs", "store", "coordinator"},
    "learner": {"configs", "store", "gigpo", "coordinator"},
    "driver": {
        "configs",
        "envs",
        "store",
        "gigpo",
        "coordinator",
        "analysis",
        "actors",
        "learner",
    },
    "cli": {
        "configs",
        "envs",
        "store",
        "gigpo",
        "coordinator",
        "analysis",
        "actors",
        "learner",
        "driver",
    },
}
NEVER: dict[str, set[str]] = {
    "configs": {"ray", "torch", "vllm", "deepspeed"},
    "envs": {"ray", "torch", "vllm", "deepspeed", "transformers"},
    "store": {"ray", "torch", "vllm", "deepspeed", "transformers"},
    "gigpo": {"ray", "vllm", "deepspeed", "transformers"},
    "coordinator": {"torch", "vllm", "deepspeed"},
    "analysis": {"ray", "torch", "vllm", "deepspeed"},
    "actors": {"deepspeed"},
    "learner": {"vllm"},
    "driver": set(),
    "cli": set(),
}
FOLDERS = tuple(MAY_IMPORT)


def written_tables() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return the rules as the table of CONTRIBUTING.md has them."""
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(TABLE))
    columns = cells(lines[begin])[:-1]
    may_import: dict[str, set[str]] = {}
    never: dict[str, set[str]] = {}
    above: set[str] = set()
    for line in itertools.takewhile(bool, lines[begin + 2 :]):
        package, *marks, forbidden = cells(line)
        assert len(marks) == len(columns) and set(marks) <= {"✓", "–", ""}, line
        may_import[package] = {
            name for name, mark in zip(columns, marks, strict=True) if mark == "✓"
        }
        names = {name.strip() for name in re.split(r",| and ", forbidden)} - {"", "–"}
        if THE_SAME in names:
            names = names - {THE_SAME} | above
        never[package] = above = names
    return may_import, never


def test_contributing_shows_the_rules_and_says_why_each_package_is_one() -> None:
    assert written_tables() == (MAY_IMPORT, NEVER)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    reasons = text.partition("| why it is separate |")[2].partition("\n\n")[0]
    second = [cells(line)[1] for line in reasons.splitlines() if line.startswith("| ")]
    named = {name for cell in second for name in re.findall(r"`(\w+)[/.]", cell)}
    assert named == {*FOLDERS, *SHARED}


# the last part of an array's name, as "Letters" in CONTRIBUTING.md explains it; do_GET is no array
SHAPE = re.compile(r"(?!do_)[a-z]\w*_((?:[A-Zr](?:p1)?|\d)+)")


def letters_of(path: Path) -> set[str]:
    """Return the letters of the shapes in a file's names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(node.arg or "")
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    shapes = [found[1] for name in names if (found := SHAPE.fullmatch(name))]
    return set(re.sub(r"p1|\d", "", "".join(shapes)))


def test_each_letter_of_a_shape_is_explained() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Letters")[2]
    lines = section.partition("\n## ")[0].splitlines()
    first = [cells(line)[0] for line in lines if line.startswith("|")]
    explained = {letter for cell in first[2:] for letter in cell.split(", ")} | {"r"}
    assert {"T", "S", "N", "A", "D"} < explained, "the test reads the table"
    used = {
        letter: path.relative_to(ROOT).as_posix()
        for folder in (*FOLDERS, "benchmarks", "tests")
        for path in sources(folder)
        for letter in letters_of(path)
    }
    assert len(used) > 15, "the test reads the sources"
    unexplained = {letter: path for letter, path in used.items() if letter not in explained}
    assert not unexplained


def test_every_folder_is_type_checked() -> None:
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    own = [*FOLDERS, *(f"{name}.py" for name in SHARED)]
    assert sorted(files) == sorted([*own, "benchmarks/studies"])


def test_no_module_but_the_shared_ones_stands_at_the_root() -> None:
    assert sorted(path.stem for path in ROOT.glob("*.py")) == list(SHARED)


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder} has no sources"
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_the_table_allows(folder: str) -> None:
    for path in sources(folder):
        for module in imported_modules(path):
            top = module.partition(".")[0]
            assert top not in NEVER[folder], f"{path.relative_to(ROOT)} imports {module}"
            if top in FOLDERS and top != folder:
                assert top in MAY_IMPORT[folder], (
                    f"{path.relative_to(ROOT)}: {folder} may not import {module}"
                )
                assert module == top, (
                    f"{path.relative_to(ROOT)}: import from {top}, not from its module {module}"
                )


def module_names() -> dict[str, Path]:
    """Return every module of the folders by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in FOLDERS
        for path in sources(folder)
    }


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """Return our modules that a file imports, also in functions and for type checkers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
            found |= inner or {node.module}
    return found & known.keys()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Lazy imports and those for type checkers count too: a circle is one subject in two files."""
    known = module_names()
    graph = graphlib.TopologicalSorter({name: imports_of(known[name], known) for name in known})
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_only_the_vllm_files_import_vllm() -> None:
    importers = {
        path.name
        for path in sources("actors")
        for module in imported_modules(path)
        if module.startswith("vllm")
    }
    assert importers <= {
        "engine_process.py",
        "engine_worker.py",
        "vllm_adapters.py",
        "vllm_cpu_adapters.py",
        "vllm_engine.py",
        "vllm_images.py",
        "vllm_policy.py",
        "vllm_preemptions.py",
        "vllm_requests.py",
        "vllm_step_pacing.py",
        "vllm_tool_calls.py",
        "vllm_weight_loader.py",
        "vllm_whole_answers.py",
    }


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {"cli"}))  # nobody imports from cli
def test_the_public_list_is_sorted_and_importable(folder: str) -> None:
    package = importlib.import_module(folder)
    constants_first = sorted(
        package.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    is_lazy = (ROOT / folder / "__init__.pyi").exists()  # then lazy_loader sorts the names
    assert list(package.__all__) == (sorted(package.__all__) if is_lazy else constants_first)
    assert all(hasattr(package, name) for name in package.__all__)


# a module or a folder of the package itself: `envs/base.py` is a path from the root, and none
IN_A_MAP = re.compile(r"(?<![\w/.-])(\w+(?:\.py\b|/(?!\w)))")


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_map_of_a_package_names_its_modules(folder: str) -> None:
    """The docstring of an `__init__.py` names all modules and folders of it, and no others.

    One line is no map: the package above says what is in such a folder.
    """
    for init in (path for path in sources(folder) if path.name == "__init__.py"):
        package, place = init.parent, init.relative_to(ROOT)
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        if package != ROOT / folder and "\n" not in text:
            continue
        named = set(IN_A_MAP.findall(text))
        modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
        folders = {f"{path.parent.name}/" for path in package.glob("*/*.py")}
        unnamed = sorted((modules | folders) - named)
        assert not unnamed, f"{place} does not name {', '.join(unnamed)}"
        below = {path.name + "/" * path.is_dir() for path in package.rglob("*")}
        gone = sorted(named - below)
        assert not gone, f"{place} names {', '.join(gone)}, which is not there"


def test_sql_files_have_at_most_100_columns() -> None:
    """Ruff checks the Python files."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.sql")]
    assert len(files) > 20
    for path in files:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert len(line) <= 100, f"{path.relative_to(ROOT)}:{number} has {len(line)} columns"


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_module_imports_nothing_of_ours(name: str) -> None:
    for module in imported_modules(ROOT / f"{name}.py"):
        assert module.partition(".")[0] not in FOLDERS, f"{name}.py imports {module}"


def test_only_the_two_ends_of_a_transfer_import_its_module() -> None:
    """It loads torch, which most packages must not."""
    importers = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in sources(folder)
        if "weight_pieces" in imported_modules(path)
    }
    assert importers == {
        "actors/inference/broadcast_receiver.py",
        "learner/publishing/broadcast_sender.py",
    }


# which writes ASCII unless it is told otherwise
PRINTABLE = ("printable(", "map(printable", "json.dumps(")


def test_all_that_is_shown_is_made_printable() -> None:
    """A task named `[red]` would become a colour, one with an escape sequence could write the
    clipboard.
    """
    for path in (path for folder in FOLDERS for path in sources(folder)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("from_markup", "excepthook"), (
                    f"{path.name}: use printable.py"
                )
            if not isinstance(node, ast.Call):
                continue
            text, called = ast.unparse(node), ast.unparse(node.func)
            where = f"{path.relative_to(ROOT)}:{node.lineno}: {text}"
            if called == "print":
                is_made = any(way in text for way in PRINTABLE)
                assert is_made or all(isinstance(value, ast.Constant) for value in node.args), where
            assert called not in ("Console", "argparse.ArgumentParser", "warnings.showwarning"), (
                f"{where}: use printable.py"
            )
            if called == "Text":
                assert text.startswith("Text(printable("), where
            if called == "warnings.warn":
                assert text.startswith("warnings.warn(printable("), where


def test_nothing_waits_by_wait_for() -> None:
    """In Python 3.11 it forgets a cancellation that comes with the answer; asyncio.timeout does
    not.
    """
    users = [
        path.name
        for folder in FOLDERS
        for path in sources(folder)
        if "asyncio.wait_for(" in path.read_text()
    ]
    assert not users


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py")), "it would shadow the package `store`"


@pytest.mark.parametrize(
    ("code", "needs_ray"),
    [
        ("import actors", True),  # all that the coordinator loads
        ("from cli.__main__ import main; main(['status', RUN]); main(['stop', RUN])", False),
        # what the driver looks at and writes before it starts the others
        (
            "import configs; from driver import preflight; from pathlib import Path; "
            "config = configs.from_yaml('{run_dir: ' + RUN + '/it}'); "
            "Path(config.run_dir).mkdir(); "
            "preflight.make_or_open_run(config); preflight.check_same_run(config)",
            True,
        ),
    ],
)
def test_a_process_that_computes_nothing_loads_nothing_to_compute_with(
    code: str, needs_ray: bool, tmp_path: Path
) -> None:
    """All processes of a run load what they need at its start, on the same cores: torch alone is 2
    s of CPU.
    """
    layout = RunLayout.create(tmp_path / "run", config_yaml="", storage_uri="")
    write_open_sql(layout, macros=[], max_staleness=0)
    with Catalog.open(layout) as catalog:
        export(catalog, layout)
    ask = f"import sys; RUN = {str(layout.root)!r}; {code}; print(*sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert answer.stderr == ""
    loaded = set(answer.stdout.split())
    assert ("ray" in loaded) == needs_ray
    assert not loaded & {"torch", "transformers", "deepspeed", "vllm", "aiohttp"}

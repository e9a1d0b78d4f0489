"""A command that reads a run of somebody else has a limit of memory, and says so in one line."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cli.__main__ import main
from cli.arguments import RunPath
from store import RunLayout, StoreError, limited_memory, sign_run
from store.errors import is_out_of_memory
from store.untrusted import memory_limit

# Programs with the least limit of a machine without free memory, or with {mib} MiB beside it.
PROGRAM = """
import sys
from cli.__main__ import main
from store.untrusted import memory_limit
memory_limit.SHARE_OF_FREE_MEMORY = 0
memory_limit.LEAST_BYTES = {mib} << 20
sys.exit(max(main(words.split("|")) for words in sys.argv[1:]))
"""
MUCH_BYTES = 1 << 40  # no machine gives it to a program


@pytest.fixture
def foreign(layout: RunLayout) -> RunLayout:
    """Return a run that this user did not make."""
    (layout.root / "signed.json").unlink()
    return layout


def commands(*words: str, mib: int) -> subprocess.CompletedProcess[str]:
    """Run commands of `gigpo`, words separated by |, in one process."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(mib=mib), *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )


def limit_within(place: Path) -> int:
    with limited_memory([place]):
        return resource.getrlimit(resource.RLIMIT_DATA)[0]


def test_commands_work_on_an_honest_run_with_the_least_limit(foreign: RunLayout) -> None:
    run = foreign.root
    query = "SELECT sum(length(obs_text)) AS n FROM steps"
    done = commands(f"sql|{run}|{query}", f"fsck|{run}", f"status|{run}", f"report|{run}", mib=1024)
    assert done.returncode == 0, done.stderr
    assert f"{run}: whole" in done.stdout and (run / "report.html").is_file()


def test_without_memory_a_command_says_its_limit_and_what_to_do(foreign: RunLayout) -> None:
    """The file is one that a run may write: no other bound refuses it."""
    indices = pa.nulls(900, pa.int32()).fill_null(0)
    column = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * 1_000_000]))
    part = next(foreign.exports.glob("groups-*.parquet"))
    part.chmod(0o644)
    pq.write_table(pa.table({"x": column}), part, compression="zstd", store_schema=False)
    done = commands(f"fsck|{foreign.root}", mib=128)
    assert done.stderr, done.stdout
    (line,) = done.stderr.splitlines()
    assert "GiB, the limit for a run that was not made by you" in line
    assert "add --trust" in line and "ulimit -d" in line
    assert done.returncode == 2 and "damaged" not in done.stdout


def test_only_runs_of_others_are_limited(foreign: RunLayout) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    free = psutil.virtual_memory().available
    assert memory_limit.LEAST_BYTES <= limit_within(foreign.root) < free + (8 << 30)
    assert limit_within(foreign.root / "no_run") != before[0]
    with pytest.raises(StoreError, match="the limit for a run"), limited_memory([foreign.root]):
        bytearray(MUCH_BYTES)
    with pytest.raises(ZeroDivisionError), limited_memory([foreign.root]):
        _ = 1 // 0
    sign_run(foreign.root)
    assert limit_within(foreign.root) == before[0]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_dataset_is_imported_within_the_limit_also_from_a_uri(
    layout: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def noted(*_: object) -> None:
        limits.append(resource.getrlimit(resource.RLIMIT_DATA))
        raise StoreError("that is enough")

    monkeypatch.setattr("store.import_selection", noted)
    for source in (str(tmp_path), tmp_path.as_uri()):
        assert main(["import", str(layout.root), source]) == 2
    assert len(limits) == 2 and resource.getrlimit(resource.RLIMIT_DATA) not in limits


def test_a_container_has_less_than_its_machine(tmp_path: Path) -> None:
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    inner = groups / "pod" / "training"
    inner.mkdir(parents=True)
    for directory, most, used, cached in ((groups, "max", 9, 0), (inner, "800", 300, 100)):
        (directory / "memory.max").write_text(f"{most}\n")
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    own.write_text("0::/pod/training\n")
    assert memory_limit._free_in_groups(groups, own) == [600]
    old = groups / "memory" / "docker"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("520\n")
    own.write_text("5:memory:/docker\n4:cpu:/docker\n")
    assert memory_limit._free_in_groups(groups, own) == [0], "it uses more than its limit"
    assert memory_limit._free_in_groups(groups, tmp_path / "none") == []
    (groups / "memory").rename(groups / "cpu,memory")
    own.write_text("5:cpu,memory:/docker\n")
    assert memory_limit._free_in_groups(groups, own) == [0], "mounted together, without statistics"


def test_a_limit_that_the_caller_set_stays(foreign: RunLayout) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    own = psutil.virtual_memory().total - (1 << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (own, before[1]))
    try:
        assert limit_within(foreign.root) == own
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_a_server_that_others_can_ask_has_a_limit_for_good() -> None:
    program = (
        "import resource; from store import limit_memory; limit_memory(); "
        "print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert 1 << 30 <= int(done.stdout) < psutil.virtual_memory().total


def test_an_error_of_memory_is_known_by_its_cause() -> None:
    error = StoreError("it is damaged")
    assert not is_out_of_memory(error)
    error.__cause__ = OSError("Couldn't deserialize thrift: std::bad_alloc")
    assert is_out_of_memory(error)


def test_the_place_of_a_run_is_found_in_an_argument(tmp_path: Path) -> None:
    plain, stepped = RunPath(path_type=str), RunPath(path_type=str, has_step=True)
    assert plain.places(None) == []
    evaluated = RunPath(path_type=str, has_step=True, may_be_config=True)
    assert evaluated.places("config.yaml") == [] and evaluated.places("a@4") == [Path("a")]
    assert evaluated.places("config.yaml@4") == [Path("config.yaml")]  # a run's name
    # The attack: a file was there when the limit was decided, and a run when it was read.
    file = tmp_path / "run"
    file.touch()
    assert plain.places(file) == evaluated.places(str(file)) == [file]
    assert plain.places(("runs/a", "runs/b@4")) == [Path("runs/a"), Path("runs/b@4")]
    assert stepped.places("runs/a@4") == stepped.places("runs/a") == [Path("runs/a")]

"""A server whose answers have no end takes no more memory than a limit, before anybody trusts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from store import has_begun, storage
from store.errors import UnavailableError
from tests.support.endless_server import Kind, endless_server

# A command with a small limit. It prints the largest memory of this process and of its children, in
# KiB. VmHWM begins at the program's start; ru_maxrss would begin with the memory of the tests.
PROGRAM = """
import re, resource, sys
from pathlib import Path
from cli.__main__ import main
from store import storage_claim
from store.exchange import bring, dataset_files, offline_import
from store.untrusted import memory_limit
from tests.support import impatient
dataset_files._local_copy = impatient.fetch_dataset_soon
for module in (storage_claim, bring, offline_import):
    module.SMALL_BYTES = {limit}
memory_limit.SHARE_OF_FREE_MEMORY, memory_limit.LEAST_BYTES = 0, {limit}
status = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""
ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 100 << 20
LIBRARIES_KIB = 500 << 10  # Arrow, DuckDB and the stacks of their threads
CONFIG = str(ROOT / "configs/quickstart.yaml")
COMMANDS = {
    "train": ("train", CONFIG, "--resume", "{uri}", "run_dir={to}"),
    "resume": ("train", "--resume", "{uri}", "run_dir={to}"),
    "fork": ("train", "--fork", "{uri}@1", "run_dir={to}"),
    "source": ("train", CONFIG, "source={uri}", "run_dir={to}", "--dry-run"),
    "fetch": ("fetch", "{uri}", "{to}"),
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "k")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def command(words: tuple[str, ...], *, uri: str, to: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM.format(limit=LIMIT_BYTES)),
            *(word.format(uri=uri, to=to) for word in words),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("train", "body", "the answer is longer than it says, or than memory"),
        ("train", "pages", "take more than 100 MiB of memory"),
        ("resume", "body", "cannot look for .*longer"),
        ("fork", "file", "cannot read .*run.json: the answer is longer"),
        ("source", "body", "cannot look for .*longer"),
        ("fetch", "file", "cannot read .*run.json: the answer is longer"),
    ],
)
def test_an_answer_without_an_end_is_one_line_and_takes_no_more_than_the_limit(
    name: str, kind: Kind, says: str, tmp_path: Path
) -> None:
    with endless_server(kind) as uri:
        done = command(COMMANDS[name], uri=uri, to=tmp_path / "new")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()

    assert re.search(says, line) and "check the URI, and who answers there" in line
    assert all(int(kib) < LIBRARIES_KIB for kib in done.stdout.split()[-2:])
    assert not (tmp_path / "new").exists()


def test_a_dataset_that_drips_ends_the_command_and_not_only_its_wait(tmp_path: Path) -> None:
    """The attack: the error was said, and then Arrow's threads kept the process for days."""
    with endless_server("drip") as uri:
        done = command(COMMANDS["source"], uri=uri, to=tmp_path / "new")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "cannot read" in line and "dataset.json" in line
    assert not (tmp_path / "new").exists()


def test_a_file_that_drips_is_not_waited_for_until_the_deadline_of_the_size_that_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The attack: a manifest named a segment of 7 GB, for which `gigpo fetch` waited 31 minutes."""
    monkeypatch.setattr("tests.support.endless_server.DRIPPED_BYTES", 7 << 30)
    monkeypatch.setattr(storage, "DEADLINE_S", 1.0)
    monkeypatch.setattr(storage, "SLOWEST_BYTES_PER_S", 1 << 30)
    with (
        endless_server("drip") as uri,
        pytest.raises(UnavailableError, match=r"cannot read .* within 1 s: no answer"),
    ):
        storage.open_storage(uri).read("dataset.json")


def test_an_answer_that_is_shorter_than_it_says_is_no_memory_of_this_process() -> None:
    """The attack: a text of 1,000 bytes of which 10 came had others that were read before."""
    with (
        endless_server("short") as uri,
        pytest.raises(UnavailableError, match="config.yaml: the answer is shorter than it says"),
    ):
        storage.open_storage(uri).read("config.yaml")


def test_a_long_list_is_read() -> None:
    with endless_server("list") as uri:
        assert has_begun(uri)

"""The power goes. Whatever of unsynced bytes and names is lost, torn or reordered: what was
acknowledged is there and whole.

`crash/disk.py` says what is assumed of the disk.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.disk import Disk
from tests.crash.lab import WORKERS, lose_power, phases, scratch, workers
from tests.crash.scenarios import RECORDED, recording_of
from tests.crash.tracer import FileCall

# How often the power goes, at random moments. `make test-crash`: 4000.
CRASHES = int(os.environ.get("STORE_POWER_LOSS_CRASHES", "60"))
FEW = CRASHES // 12  # of what takes longer to look at, and is rarer
SEED = 20_000
ROOT = Path("/disk")


@pytest.mark.parametrize(
    ("what", "crashes"),
    [
        ("workload", CRASHES),
        ("killed", FEW),
        ("mend", FEW),
        ("publish", CRASHES),
        ("fork", FEW),
        ("copy", FEW),
    ],
)
def test_nothing_acknowledged_is_lost_torn_or_doubled_when_the_power_goes(
    what: str, crashes: int
) -> None:
    pool = workers()
    with scratch() as directory:
        recording = pool.submit(recording_of, what, directory / "base").result()
        verify, rng = RECORDED[what][1], random.Random(SEED)
        points = sorted(rng.randrange(len(recording.calls) + 1) for _ in range(crashes))
        parts = [
            pool.submit(
                lose_power,
                recording,
                points[part::WORKERS],
                seed=SEED + part * crashes,
                verify=verify,
            )
            for part in range(WORKERS)
        ]
        bad = [crash for part in parts for crash in part.result()]
    during = Counter(phase for phase in phases(recording.calls) if phase)
    print(
        f"{what}: {crashes} power losses over {during.total()} calls {dict(during)}: {len(bad)} bad"
    )
    assert bad == []


def states(*calls: FileCall) -> set[tuple[tuple[str, bytes | None], ...]]:
    """Return the states that a power loss after these calls may leave, found in 300 tries."""
    disk = Disk(ROOT, {})
    for call in calls:
        disk.apply(call)
    found = [disk.after_power_loss(random.Random(seed)) for seed in range(300)]
    return {
        tuple(
            sorted(
                (path.removeprefix("/disk/"), data)
                for path, data in left.items()
                if path != "/disk"
            )
        )
        for left in found
    }


def create(path: str, data: bytes) -> tuple[FileCall, FileCall]:
    return FileCall(name="open", path=path, offset=os.O_CREAT), FileCall(
        name="write", path=path, data=data
    )


def sync(path: str) -> FileCall:
    return FileCall(name="fsync", path=path)


def test_the_disk_loses_names_and_bytes_that_were_not_synced_and_no_others() -> None:
    made = create("/disk/a", b"new")
    assert states(*made, sync("/disk/a"), sync("/disk")) == {(("a", b"new"),)}
    assert states(*made, sync("/disk/a")) == {(), (("a", b"new"),)}  # the name
    # the bytes
    assert states(*made, sync("/disk")) == {(("a", b""),), (("a", b"\0\0\0"),), (("a", b"new"),)}


def test_the_disk_renames_in_one_step_and_loses_what_is_in_a_lost_directory() -> None:
    old = (*create("/disk/a", b"old"), sync("/disk/a"), sync("/disk"))
    new = (
        *create("/disk/b", b"new"),
        sync("/disk/b"),
        FileCall(name="rename", path="/disk/b", target="/disk/a"),
    )
    assert states(*old, *new) == {
        (("a", b"old"),),
        (("a", b"old"), ("b", b"new")),
        (("a", b"new"),),
    }
    assert states(*old, *new, sync("/disk")) == {(("a", b"new"),)}
    inside = (
        FileCall(name="mkdir", path="/disk/d"),
        *create("/disk/d/a", b"x"),
        sync("/disk/d/a"),
        sync("/disk/d"),
    )
    assert states(*inside) == {(), (("d", None), ("d/a", b"x"))}
    assert states(*inside, sync("/disk")) == {(("d", None), ("d/a", b"x"))}


def test_the_disk_tears_and_reorders_sectors_that_were_not_synced() -> None:
    first = (*create("/disk/a", bytes([1]) * 1024), sync("/disk/a"), sync("/disk"))
    sectors = {
        tuple(data[start] for start in range(0, len(data), 512))
        for ((_, data),) in states(
            *first,
            FileCall(name="write", path="/disk/a", data=bytes([2]) * 1024),
            FileCall(name="write", path="/disk/a", offset=512, data=bytes([3]) * 512),
        )
        if data is not None
    }
    assert sectors == {(one, two) for one in (1, 2) for two in (1, 2, 3)}
